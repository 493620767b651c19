"""Scores of latent domains: the limits where they can be computed by hand, and a picture that repeats."""
import json
import math

import numpy as np
import pytest

from hmoe_repro.core import HmoeError
from hmoe_repro.clusters import cluster_scores, gate_scores, score_discovery
from hmoe_repro.discovery import confusion, discovery_table, subset, tsne

DOMAINS = np.repeat([0, 2, 3], 50)
CLASSES = np.tile(np.arange(10), 15)
KEYS = {"nmi_domain", "ari_domain", "nmi_class", "ari_class", "experts_used", "gate_entropy", "load_balance"}


def one_hot(experts, count):
    return np.eye(count)[experts]


def test_perfect_discovery():
    gate = one_hot(np.unique(DOMAINS, return_inverse=True)[1], 3)
    scores = score_discovery(gate.astype(np.float16), DOMAINS.astype(np.int16), CLASSES)
    assert set(scores) == KEYS and scores["nmi_domain"] == pytest.approx(1) and scores["ari_domain"] == pytest.approx(1)
    assert scores["nmi_class"] == pytest.approx(0, abs=1e-9) and scores["experts_used"] == 3
    assert scores["gate_entropy"] == pytest.approx(0, abs=1e-6) and scores["load_balance"] == pytest.approx(0, abs=1e-9)
    json.dumps(scores)
    assert all(type(v) in (int, float) for v in scores.values())


def test_one_expert_for_everything():
    scores = score_discovery(one_hot(np.zeros(150, int), 3), DOMAINS, CLASSES)
    assert scores["nmi_domain"] == scores["nmi_class"] == 0 and scores["ari_domain"] == 0
    assert scores["experts_used"] == 1 and scores["load_balance"] == pytest.approx(math.log(3), abs=1e-6)


def test_a_model_with_a_single_expert():
    scores = score_discovery(np.ones((150, 1)), DOMAINS, CLASSES)
    assert scores["experts_used"] == 1 and scores["gate_entropy"] == 0 == scores["load_balance"] and scores["nmi_domain"] == 0


def test_two_of_three_experts():
    experts = np.array([0, 0, 1])[np.unique(DOMAINS, return_inverse=True)[1]]
    scores = score_discovery(one_hot(experts, 3), DOMAINS, CLASSES)
    h_a, h_d = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), math.log(3)
    assert scores["nmi_domain"] == pytest.approx(2 * h_a / (h_a + h_d))
    assert scores["load_balance"] == pytest.approx(math.log(3) - h_a) and scores["experts_used"] == 2


def test_a_uniform_gate():
    scores = gate_scores(np.full((40, 5), 0.2, dtype=np.float16))
    assert scores["gate_entropy"] == pytest.approx(math.log(5)) and scores["load_balance"] == pytest.approx(0, abs=1e-9)


def test_half_precision_rows_need_not_sum_to_one():
    gate = np.random.default_rng(0).dirichlet(np.ones(5), 200)
    exact, stored = gate_scores(gate), gate_scores(gate.astype(np.float16))
    assert stored["gate_entropy"] == pytest.approx(exact["gate_entropy"], abs=1e-3)


def test_an_expert_of_less_than_a_hundredth_is_not_used():
    assert gate_scores(one_hot(np.array([0] * 199 + [1]), 3))["experts_used"] == 1
    assert gate_scores(one_hot(np.array([0] * 99 + [1]), 3))["experts_used"] == 2


def test_numbering_does_not_matter():
    assert cluster_scores(np.array([7, 7, 4, 4]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])) == pytest.approx({"nmi_domain": 1, "ari_domain": 1, "nmi_class": 0, "ari_class": -0.5})


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(HmoeError, match="150 assignments but 149 domain labels"):
        cluster_scores(np.zeros(150), DOMAINS[:-1], CLASSES)
    with pytest.raises(HmoeError, match="must be .n, K."):
        score_discovery(np.empty((0, 3)), [], [])
    with pytest.raises(HmoeError, match="must be .n, K."):
        score_discovery(np.zeros(150), DOMAINS, CLASSES)


def test_confusion_counts_every_sample_once():
    experts = np.random.default_rng(0).integers(0, 3, 150)
    table = confusion(experts, DOMAINS, num_experts=5, names=["a", "b", "c", "d"])
    assert list(table.index) == ["a", "c", "d"] and table.shape == (3, 5) and (table.sum(axis=1) == 50).all() and table["expert 4"].sum() == 0


def test_tsne_repeats_and_keeps_groups_apart():
    random = np.random.default_rng(0)
    parts = {"train": random.normal(size=(60, 8)).astype(np.float16), "test": random.normal(size=(20, 8)) + 9, "embeddings": random.normal(size=(3, 8))}
    first, second = tsne(parts, seed=3), tsne(parts, seed=3)
    assert {k: v.shape for k, v in first.items()} == {"train": (60, 2), "test": (20, 2), "embeddings": (3, 2)}
    assert all(np.array_equal(first[k], second[k]) for k in parts)
    apart = np.linalg.norm(first["train"].mean(0) - first["test"].mean(0))
    assert apart > np.linalg.norm(first["test"] - first["test"].mean(0), axis=1).mean()


def test_tsne_says_how_many_points_it_takes():
    for count in (3, 1501):
        with pytest.raises(HmoeError, match="between 4 and 1500"):
            tsne({"train": np.zeros((count, 2))})


def test_subsets_are_seeded_and_distinct():
    assert np.array_equal(subset(100, 20, 1), subset(100, 20, 1)) and not np.array_equal(subset(100, 20, 1), subset(100, 20, 2))
    assert len(set(subset(100, 20))) == 20 and np.array_equal(subset(5, 20), np.arange(5))


def test_the_table_of_discovery_passes_over_what_has_none():
    runs = [{"status": "complete", "spec": {"algorithm": a, "test_domains": ["photo"], "trial_seed": s}, "discovery": d}
            for a, s, d in (("HMOE-DN", 1, {"nmi_domain": 0.5}), ("HMOE-DN", 0, {"nmi_domain": 0.9}), ("ERM", 0, None))]
    table = discovery_table(runs + [{"status": "failed", "spec": {}, "discovery": None}])
    assert table.trial_seed.tolist() == [0, 1] and table.nmi_domain.tolist() == [0.9, 0.5]
