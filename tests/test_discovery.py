"""Scores of latent domains: the limits where they can be computed by hand, and a picture that
repeats."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from hmoe_repro.analysis.clusters import (
    agreement,
    agreement_summary,
    agreement_verdict,
    closest_factor,
    closest_other,
    collapse_scores,
    collapse_verdict,
    confusion,
    discovery_lines,
    discovery_table,
    factor_scores,
    fresh_distance,
    gate_similarity,
    gate_table,
    gate_verdict,
    mean_gates,
    partitions,
    scored_runs,
    similarity_verdict,
    smallest_distance,
)
from hmoe_repro.analysis.embeddings import overlap_counts, subset, tsne
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.clustering import cluster_scores, gate_scores, score_discovery

DOMAINS = np.repeat([0, 2, 3], 50)
CLASSES = np.tile(np.arange(10), 15)
KEYS = {
    "nmi_domain",
    "ari_domain",
    "nmi_class",
    "ari_class",
    "experts_used",
    "gate_entropy",
    "load_balance",
    "purity",
}


def one_hot(experts, count):
    return np.eye(count)[experts]


def test_perfect_discovery():
    gate = one_hot(np.unique(DOMAINS, return_inverse=True)[1], 3)
    scores = score_discovery(gate.astype(np.float16), DOMAINS.astype(np.int16), CLASSES)
    assert (
        set(scores) == KEYS
        and scores["nmi_domain"] == pytest.approx(1)
        and scores["ari_domain"] == pytest.approx(1)
    )
    assert scores["nmi_class"] == pytest.approx(0, abs=1e-9) and scores["experts_used"] == 3
    assert scores["gate_entropy"] == pytest.approx(0, abs=1e-6) and scores[
        "load_balance"
    ] == pytest.approx(0, abs=1e-9)
    json.dumps(scores)
    assert all(type(v) in (int, float) for v in scores.values())


def test_one_expert_for_everything():
    scores = score_discovery(one_hot(np.zeros(150, int), 3), DOMAINS, CLASSES)
    assert scores["nmi_domain"] == scores["nmi_class"] == 0 and scores["ari_domain"] == 0
    assert scores["experts_used"] == 1 and scores["load_balance"] == pytest.approx(
        math.log(3), abs=1e-6
    )


def test_a_model_with_a_single_expert():
    scores = score_discovery(np.ones((150, 1)), DOMAINS, CLASSES)
    assert (
        scores["experts_used"] == 1
        and scores["gate_entropy"] == 0 == scores["load_balance"]
        and scores["nmi_domain"] == 0
    )


def test_two_of_three_experts():
    experts = np.array([0, 0, 1])[np.unique(DOMAINS, return_inverse=True)[1]]
    scores = score_discovery(one_hot(experts, 3), DOMAINS, CLASSES)
    h_a, h_d = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), math.log(3)
    assert scores["nmi_domain"] == pytest.approx(2 * h_a / (h_a + h_d))
    assert (
        scores["load_balance"] == pytest.approx(math.log(3) - h_a) and scores["experts_used"] == 2
    )


def test_a_uniform_gate():
    scores = gate_scores(np.full((40, 5), 0.2, dtype=np.float16))
    assert scores["gate_entropy"] == pytest.approx(math.log(5)) and scores[
        "load_balance"
    ] == pytest.approx(0, abs=1e-9)


def test_half_precision_rows_need_not_sum_to_one():
    gate = np.random.default_rng(0).dirichlet(np.ones(5), 200)
    exact, stored = gate_scores(gate), gate_scores(gate.astype(np.float16))
    assert stored["gate_entropy"] == pytest.approx(exact["gate_entropy"], abs=1e-3)


def test_an_expert_of_less_than_a_hundredth_is_not_used():
    assert gate_scores(one_hot(np.array([0] * 199 + [1]), 3))["experts_used"] == 1
    assert gate_scores(one_hot(np.array([0] * 99 + [1]), 3))["experts_used"] == 2


def test_numbering_does_not_matter():
    assert cluster_scores(
        np.array([7, 7, 4, 4]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    ) == pytest.approx({"nmi_domain": 1, "ari_domain": 1, "nmi_class": 0, "ari_class": -0.5})


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
    assert (
        list(table.index) == ["a", "c", "d"]
        and table.shape == (3, 5)
        and (table.sum(axis=1) == 50).all()
        and table["expert 4"].sum() == 0
    )


def test_tsne_repeats_and_keeps_groups_apart():
    random = np.random.default_rng(0)
    parts = {
        "train": random.normal(size=(60, 8)).astype(np.float16),
        "test": random.normal(size=(20, 8)) + 9,
        "embeddings": random.normal(size=(3, 8)),
    }
    first, second = tsne(parts, seed=3), tsne(parts, seed=3)
    assert {k: v.shape for k, v in first.items()} == {
        "train": (60, 2),
        "test": (20, 2),
        "embeddings": (3, 2),
    }
    assert all(np.array_equal(first[k], second[k]) for k in parts)
    apart = np.linalg.norm(first["train"].mean(0) - first["test"].mean(0))
    assert apart > np.linalg.norm(first["test"] - first["test"].mean(0), axis=1).mean()


def test_tsne_says_how_many_points_it_takes():
    for count in (3, 1501):
        with pytest.raises(HmoeError, match="between 4 and 1500"):
            tsne({"train": np.zeros((count, 2))})


def test_subsets_are_seeded_and_distinct():
    assert np.array_equal(subset(100, 20, 1), subset(100, 20, 1)) and not np.array_equal(
        subset(100, 20, 1), subset(100, 20, 2)
    )
    assert len(set(subset(100, 20))) == 20 and np.array_equal(subset(5, 20), np.arange(5))


def test_the_table_of_discovery_passes_over_what_has_none():
    runs = [
        {
            "status": "complete",
            "spec": {"algorithm": a, "test_domains": ["photo"], "trial_seed": s},
            "discovery": d,
        }
        for a, s, d in (
            ("HMOE-DN", 1, {"nmi_domain": 0.5}),
            ("HMOE-DN", 0, {"nmi_domain": 0.9}),
            ("ERM", 0, None),
        )
    ]
    table = discovery_table(runs + [{"status": "failed", "spec": {}, "discovery": None}])
    assert table.trial_seed.tolist() == [0, 1] and table.nmi_domain.tolist() == [0.9, 0.5]
    assert "code_length" not in table
    far = [{"code_length": None, "embedding_length": 5.0}]
    for codes in ({"code_length": 10.0, "embedding_length": 5.0}, *far):
        runs[0]["checkpoints"] = [{"codes": {}}, {"codes": codes}]
        lengths = discovery_table(runs).code_length.tolist()
        assert lengths[1] == (2.0 if codes["code_length"] else math.inf) and math.isnan(lengths[0])


# Factors besides the domain

COLOURS = np.tile([0, 1], 75)
STORED = {
    "gate_out": one_hot(COLOURS, 2).astype(np.float16),
    "code_out": np.zeros((150, 4)),
    "domain_out": DOMAINS.astype(np.int16),
    "class_out": CLASSES.astype(np.int16),
    "colour_out": COLOURS.astype(np.int16),
    "gate_test": one_hot(np.array([0, 0, 0, 1]), 2),
    "domain_test": np.ones(4, np.int16),
    "colour_test": np.zeros(4),
    "panel_images": np.zeros((3, 2, 4, 4)),
}


def run(seed=0, algorithm="HMOE-DN", **discovery):
    whole = {
        "experts_used": 2,
        "gate_entropy": 0.0,
        "load_balance": 0.0,
        "nmi_domain": 0.0,
        "ari_domain": 0.0,
        "nmi_class": 0.0,
        "ari_class": 0.0,
    } | discovery
    return {
        "run_id": f"{seed:012x}",
        "status": "complete",
        "spec": {"algorithm": algorithm, "test_domains": ["photo"], "trial_seed": seed},
        "discovery": whole,
    }


def test_partitions_begin_with_the_expert_and_hold_every_factor_of_one_split():
    parts = partitions(STORED)
    assert (
        list(parts) == ["expert", "domain", "class", "colour"]
        and np.array_equal(parts["expert"], COLOURS)
        and all(len(p) == 150 for p in parts.values())
    )
    with pytest.raises(HmoeError, match="no gate values of split 'in'.*Valid: out, test"):
        partitions(STORED, "in")


def test_agreement_is_symmetric_and_sees_the_colour():
    table = agreement(partitions(STORED))
    assert (
        np.allclose(table, table.T)
        and table.loc["expert", "colour"] == pytest.approx(1)
        and table.loc["expert", "domain"] == pytest.approx(0, abs=1e-9)
    )
    assert (
        agreement({"expert": np.zeros(4, int), "domain": np.array([0, 0, 1, 1])}).loc[
            "expert", "expert"
        ]
        == 1
    )


def test_factor_scores_of_arrays_and_of_their_record_are_the_same():
    known = score_discovery(STORED["gate_out"], DOMAINS, CLASSES, colour=COLOURS)
    from_arrays, from_record = factor_scores(STORED), factor_scores(run(**known))
    pd.testing.assert_frame_equal(from_arrays, from_record)
    assert list(from_arrays.index) == ["domain", "class", "colour"] and from_arrays.nmi[
        "colour"
    ] == pytest.approx(1)
    with pytest.raises(HmoeError, match="no discovery scores"):
        factor_scores({"run_id": "0" * 12, "discovery": None})


def test_confusion_with_another_factor():
    table = confusion(COLOURS, COLOURS, 3, names=["red", "green"], factor="colour")
    assert (
        table.index.name == "colour"
        and table.loc["red"].tolist() == [75, 0, 0]
        and table.loc["green"].tolist() == [0, 75, 0]
    )


def test_the_closest_factor_is_judged_by_what_is_possible():
    scores = {"nmi_domain": 0.05, "ari_domain": 0.9, "nmi_class": 0.40, "nmi_digit": 0.36}
    assert closest_factor(scores) == ("class", 0.40)
    assert closest_factor(scores, {"class": 1.0, "digit": 0.46}) == ("digit", 0.36)
    assert closest_factor(scores | {"nmi_class": 0.0, "nmi_digit": 0.09}) == ("nothing", 0.09)
    assert closest_factor(scores | {"nmi_class": 0.0, "nmi_digit": 0.1}) == ("digit", 0.1)


def test_the_verdict_counts_runs_and_follows_the_records():
    runs = [
        run(0, nmi_colour=1.0),
        run(1, nmi_colour=0.9),
        run(2, nmi_domain=0.7),
        run(3),
        run(4, "HMOE-ND", nmi_class=1.0),
        run(5) | {"status": "failed"},
    ]
    line = agreement_verdict(runs, "HMOE-DN", {"colour": 1.0}, {"domain": "angle"})
    assert (
        line.startswith("HMOE-DN, 4 runs")
        and "with the colour in 2 (NMI 0.90 to 1.00)" in line
        and "with the angle in 1 (NMI 0.70)" in line
        and "with nothing in 1" in line
    )
    assert "colour 0.95" in line and "angle 0.17" in line and "class 0.00" in line
    assert "with the class in 1 (NMI 1.00, of 0.60 at equal load)" in agreement_verdict(
        runs, "HMOE-ND", {"class": 0.6}
    )
    with pytest.raises(HmoeError, match="no complete run of 'HMOE-DL'"):
        agreement_verdict(runs, "HMOE-DL")


def test_the_summary_has_a_row_for_each_algorithm_and_factor():
    table = agreement_summary(
        [
            run(0, nmi_domain=0.2),
            run(1, nmi_domain=0.4, ari_domain=0.5),
            run(2, "HMOE-DL", nmi_domain=1.0),
        ],
        {"HMOE-DN": {"domain": 0.8}},
    ).set_index(["algorithm", "factor"])
    assert [f for _, f in table.index] == ["domain", "class"] * 2  # in the order of the records
    row = table.loc["HMOE-DN", "domain"]
    assert (
        row.runs,
        row.mean_nmi,
        row.lowest_nmi,
        row.highest_nmi,
        row.mean_ari,
        row.nmi_at_equal_load,
    ) == pytest.approx((2, 0.3, 0.2, 0.4, 0.25, 0.8))
    assert len(table) == 4 and math.isnan(table.loc[("HMOE-DL", "domain"), "nmi_at_equal_load"])
    with pytest.raises(HmoeError, match="no complete run has discovery scores"):
        agreement_summary([run(0) | {"status": "failed"}])


# The unseen domain


def test_mean_gates_keep_the_test_domain_last_and_sum_to_one():
    means = mean_gates(STORED, ["a", "unseen", "c", "d"])
    assert (
        list(means.index) == ["a", "c", "d", "unseen (test)"]
        and means.loc["unseen (test)"].tolist() == [0.75, 0.25]
        and np.allclose(means.sum(axis=1), 1)
    )
    assert np.allclose(means.loc["a"], 0.5)


def test_similarity_by_hand():
    table = gate_similarity(
        pd.DataFrame([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.25] * 4])
    )
    assert np.allclose(np.diag(table), 1) and np.allclose(table, table.T) and table.iloc[0, 2] == 0
    mixture = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert table.iloc[0, 1] == pytest.approx(1 - (mixture - 0.5))
    mixture = -(0.75 * math.log2(0.375) + 0.25 * math.log2(0.125))
    assert table.iloc[1, 3] == pytest.approx(1 - (mixture - 0.5 * 1 - 0.5 * 2))


def similarity(rows, names=("0", "15", "75 (test)")):
    return gate_similarity(pd.DataFrame(rows, index=names))


def test_the_sentence_names_the_nearest_domain_only_where_the_gate_tells_domains_apart():
    assert similarity_verdict(similarity([[1, 0], [0, 1], [0.1, 0.9]])).startswith(
        "75: most like 15 (0.9"
    )
    assert "alike among themselves" not in similarity_verdict(
        similarity([[1, 0], [0, 1], [0.1, 0.9]])
    )
    line = similarity_verdict(similarity([[0.5, 0.5], [0.52, 0.48], [0.5, 0.5]]))
    assert (
        line.startswith("75: equally like all training domains")
        and "does not separate domains" in line
    )


# Collapse


def test_the_effective_number_counts_by_weight():
    scores = collapse_scores(
        one_hot(np.array([0, 0, 1, 2]), 8), np.eye(8), np.array([[0.0, 0], [2, 0]])
    )
    assert (
        scores["effective_experts"] == pytest.approx(2**1.5)
        and scores["experts_used"] == 3
        and scores["largest_share"] == 0.5
    )
    assert scores["smallest_distance"] == pytest.approx(math.sqrt(2)) and scores[
        "spread"
    ] == pytest.approx(1)
    uniform = collapse_scores(np.full((10, 4), 0.25))
    assert (
        uniform["effective_experts"] == pytest.approx(4)
        and uniform["largest_share"] == 1
        and "spread" not in uniform
    )


def test_distances_of_embeddings():
    assert (
        smallest_distance(np.array([[0, 0], [3, 4], [0, 9]], np.float16)) == 5
        and smallest_distance([[1, 1], [1, 1], [7, 7]]) == 0
    )
    assert math.isnan(smallest_distance([[1.0, 2.0]]))
    assert fresh_distance(2, 32) == pytest.approx(
        math.sqrt(2 * 31.34), abs=0.15
    ) and fresh_distance(8, 32) < fresh_distance(2, 32)


def test_the_table_of_gates_and_its_sentence():
    runs = [
        run(0, gate_entropy=math.log(3), load_balance=0.0, experts_used=3),
        run(1, gate_entropy=0.1, load_balance=math.log(3 / 2), experts_used=2),
        run(2, gate_entropy=0.1, experts_used=3),
        run(3) | {"discovery": None},
    ]
    table = gate_table(runs, lambda record: 3)
    assert table.effective_experts.tolist() == pytest.approx([3, 2, 3]) and table.share_of_log_K[
        0
    ] == pytest.approx(1)
    line = gate_verdict(table)
    assert line.startswith(
        "3 runs: gate nearly uniform in 1, idle experts in 1, all experts in use in 1"
    ) and line.endswith("2 to 3 of 3.")
    assert (
        gate_verdict(table[:1])
        == "1 run: gate nearly uniform in 1, idle experts in 0, all experts in use in 0."
    )
    with pytest.raises(HmoeError, match="Fix: choose runs of HMOE"):
        gate_table(runs[3:], lambda record: 3)


def test_the_next_best_factor_is_never_the_domain():
    zero = {"nmi_domain": 0.0, "nmi_class": 0.0, "nmi_colour": 0.0, "experts_used": 1}
    assert (
        closest_other(zero) == "class"
        and closest_other(zero | {"nmi_domain": 1.0, "nmi_colour": 0.01}) == "colour"
    )
    assert (
        closest_other(zero | {"nmi_class": 0.3, "nmi_colour": 0.4}, {"class": 0.5, "colour": 1.0})
        == "class"
    )


def test_embeddings_that_cover_each_other_are_counted():
    assert [
        count for _, count in overlap_counts([[0, 0], [0, 1], [50, 50], [1, 0]], [100, 100])
    ] == [3, 1] and [c for _, c in overlap_counts([[0, 0], [0, 5]], [100, 100])] == [1, 1]


def test_both_signs_of_a_collapse_are_told_apart():
    runs = [
        run(s, gate_entropy=0.1, load_balance=l, experts_used=2)
        for s, l in enumerate((math.log(2), 0.1))
    ]
    line = collapse_verdict(gate_table(runs, lambda record: 8), [0.5, 5.9], fresh=6.0)
    assert (
        line.startswith("the load collapsed in 1 of 2 runs (effective number 4.0 to 7.2 of 8")
        and "embeddings merged in 1 of 2 stored runs "
        "(smallest distance 0.5 to 5.9 at the end, 6.0 at initialisation)"
        in line
    )
    assert collapse_verdict(gate_table(runs, lambda record: 8)).endswith("nats).")


def test_a_uniform_gate_names_nothing_and_says_why():
    runs = [run(s, gate_entropy=0.99 * math.log(2), nmi_class=0.8) for s in range(2)]
    for r in runs:
        r["spec"] |= {"steps": 200, "hparams": {"lambda_en": 1.0}}
    (line,) = discovery_lines(runs, {"HMOE-DN": {}}, lambda record: 2)
    assert (
        "still uniform in all of them after 200 updates "
        "(entropy at least 99 % of log K; undertrained)"
        in line
        and "class" not in line
    )
    for r in runs:
        r["spec"]["hparams"]["lambda_en"] = 0.0
    assert (
        "trained without an entropy loss"
        in discovery_lines(runs, {"HMOE-DN": {}}, lambda record: 2)[0]
    )
    runs[0]["discovery"]["gate_entropy"] = 0.1
    assert len(discovery_lines(runs, {"HMOE-DN": {}}, lambda record: 2)) == 2
    told = [r | {"spec": r["spec"] | {"algorithm": "HMOE-DL"}} for r in runs]
    lines = discovery_lines(told + runs, {"HMOE-DL": {}, "HMOE-DN": {}}, lambda record: 2)
    assert [line[:7] for line in lines] == ["HMOE-DN"] * 2 + ["HMOE-DL"] * 2


def test_only_complete_runs_with_scores_are_scored():
    runs = [run(0), run(1) | {"status": "failed"}, run(2) | {"discovery": None}]
    assert scored_runs(runs) == runs[:1] and scored_runs(runs[1:]) == []
    with pytest.raises(HmoeError, match="no complete run has discovery scores. Fix"):
        scored_runs(runs[1:], required=True)
