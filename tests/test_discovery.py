"""Scores of latent domains: the limits where they can be computed by hand, and a picture that
repeats."""

import json
import math

import invented
import numpy as np
import pandas as pd
import pytest

from hmoe_repro.analysis.clusters import (
    agreement_summary,
    closest_factors,
    collapse_scores,
    confusion,
    counts_text,
    discovery_lines,
    discovery_table,
    factor_scores,
    found_and_right,
    found_right_finding,
    found_right_table,
    fresh_distance,
    gate_similarity,
    gate_summary,
    gate_table,
    gate_verdict,
    mean_gates,
    nmi_table,
    partitions,
    scored_runs,
    similarity_lines,
    similarity_table,
    smallest_distance,
)
from hmoe_repro.analysis.curves import seed_curves
from hmoe_repro.analysis.embeddings import plot_factors, subset, tsne
from hmoe_repro.analysis.results import checkpoints, frame_of, selected_so_far
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
    assert set(scores) == KEYS
    assert scores["nmi_domain"] == pytest.approx(1)
    assert scores["ari_domain"] == pytest.approx(1)
    assert scores["nmi_class"] == pytest.approx(0, abs=1e-9)
    assert scores["experts_used"] == 3
    assert scores["gate_entropy"] == pytest.approx(0, abs=1e-6)
    assert scores["load_balance"] == pytest.approx(0, abs=1e-9)
    json.dumps(scores)
    assert all(type(v) in (int, float) for v in scores.values())


def test_one_expert_for_everything():
    scores = score_discovery(one_hot(np.zeros(150, int), 3), DOMAINS, CLASSES)
    assert scores["nmi_domain"] == scores["nmi_class"] == 0
    assert scores["ari_domain"] == 0
    assert scores["experts_used"] == 1
    assert scores["load_balance"] == pytest.approx(math.log(3), abs=1e-6)


def test_a_model_with_a_single_expert():
    scores = score_discovery(np.ones((150, 1)), DOMAINS, CLASSES)
    assert scores["experts_used"] == 1
    assert scores["gate_entropy"] == 0 == scores["load_balance"]
    assert scores["nmi_domain"] == 0


def test_two_of_three_experts():
    experts = np.array([0, 0, 1])[np.unique(DOMAINS, return_inverse=True)[1]]
    scores = score_discovery(one_hot(experts, 3), DOMAINS, CLASSES)
    h_a, h_d = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), math.log(3)
    assert scores["nmi_domain"] == pytest.approx(2 * h_a / (h_a + h_d))
    assert scores["load_balance"] == pytest.approx(math.log(3) - h_a)
    assert scores["experts_used"] == 2


def test_a_uniform_gate():
    scores = gate_scores(np.full((40, 5), 0.2, dtype=np.float16))
    assert scores["gate_entropy"] == pytest.approx(math.log(5))
    assert scores["load_balance"] == pytest.approx(0, abs=1e-9)


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


def test_tsne_repeats_and_keeps_groups_apart():
    random = np.random.default_rng(0)
    parts = {
        "train": random.normal(size=(60, 8)).astype(np.float16),
        "test": random.normal(size=(20, 8)) + 9,
        "embeddings": random.normal(size=(3, 8)),
    }
    first, second = tsne(parts), tsne(parts)
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
    assert np.array_equal(subset(100, 20, 1), subset(100, 20, 1))
    assert not np.array_equal(subset(100, 20, 1), subset(100, 20, 2))
    assert len(set(subset(100, 20))) == 20
    assert np.array_equal(subset(5, 20), np.arange(5))


def test_the_table_of_discovery_passes_over_what_has_none():
    runs = [
        run(seed, **{"nmi_domain": nmi}) | ({} if nmi else {"discovery": None})
        for seed, nmi in ((1, 0.5), (0, 0.9), (2, None))
    ]
    table = discovery_table(frame_of(runs + [run(3) | {"status": "failed"}]))
    assert table.trial_seed.tolist() == [0, 1]
    assert table.nmi_domain.tolist() == [0.9, 0.5]
    assert "code_length" not in table
    far = [{"code_length": None, "embedding_length": 5.0}]
    for codes in ({"code_length": 10.0, "embedding_length": 5.0}, *far):
        runs[0]["checkpoints"] = [{"accuracies": {}}, {"accuracies": {}, "codes": codes}]
        lengths = discovery_table(frame_of(runs)).code_length.tolist()
        assert lengths[1] == (2.0 if codes["code_length"] else math.inf)
        assert math.isnan(lengths[0])


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


def run(seed=0, algorithm="HMOE-DN", experts=3, **discovery):
    whole = {
        "experts_used": 2,
        "gate_entropy": 0.0,
        "load_balance": 0.0,
        "nmi_domain": 0.0,
        "ari_domain": 0.0,
        "nmi_class": 0.0,
        "ari_class": 0.0,
    } | discovery
    looks = {name: {"out": {"mix": 0.9}} for name in ("ink", "oil", "pen")}
    config = {
        "algorithm": algorithm,
        "dataset": "Invented",
        "test_domains": ["photo"],
        "steps": 200,
    }
    hparams = {"num_experts": experts, "lambda_en": 1.0}
    return {
        "run_id": f"{seed:08x}{algorithm[-4:]}",
        "status": "complete",
        "config": config | {"trial_seed": seed, "hparams": hparams},
        "checkpoints": [{"step": 10, "accuracies": looks}],
        "selected": {"mix": {"step": 10, "validation_accuracy": 0.9, "test_accuracy": 0.5}},
        "discovery": whole,
    }


def test_partitions_begin_with_the_expert_and_hold_every_factor_of_one_split():
    parts = partitions(STORED)
    assert list(parts) == ["expert", "domain", "class", "colour"]
    assert np.array_equal(parts["expert"], COLOURS)
    assert all(len(p) == 150 for p in parts.values())


def test_agreement_is_symmetric_and_sees_the_colour():
    table = nmi_table(partitions(STORED))
    assert np.allclose(table, table.T)
    assert table.loc["expert", "colour"] == pytest.approx(1)
    assert table.loc["expert", "domain"] == pytest.approx(0, abs=1e-9)
    assert (
        nmi_table({"expert": np.zeros(4, int), "domain": np.array([0, 0, 1, 1])}).loc[
            "expert", "expert"
        ]
        == 1
    )


def test_the_scores_of_factors_are_those_of_the_record():
    known = score_discovery(STORED["gate_out"], DOMAINS, CLASSES, colour=COLOURS)
    table = factor_scores(frame_of([run(**known)]), {"class": 10}).set_index("factor")
    assert list(table.index) == ["domain", "class", "colour"]
    assert table.nmi["colour"] == 1
    assert table.nmi_at_equal_load["domain"] == 1
    assert math.isnan(table.nmi_at_equal_load["colour"])
    with pytest.raises(HmoeError, match="no complete run has discovery scores"):
        factor_scores(frame_of([run() | {"discovery": None}]))


@pytest.mark.parametrize(
    "scores, values, closest",
    [
        ({"class": 0.40, "digit": 0.36}, {}, ("class", 0.40)),
        ({"class": 0.40, "digit": 0.36}, {"class": 3, "digit": 50}, ("digit", 0.36)),
        ({"class": 0.0, "digit": 0.09}, {}, ("nothing", 0.09)),
        ({"class": 0.0, "digit": 0.1}, {}, ("digit", 0.1)),
    ],
)
def test_the_closest_factor_is_judged_by_what_is_possible(scores, values, closest):
    scores = {f"{kind}_{n}": v for n, v in scores.items() for kind in ("nmi", "ari")}
    table = factor_scores(frame_of([run(nmi_domain=0.05, **scores)]), values)
    best = closest_factors(table).iloc[0]
    assert (best.factor, best.nmi) == closest


def test_the_lines_count_runs_and_follow_the_records():
    runs = [
        run(0, nmi_colour=1.0, ari_colour=1.0),
        run(1, nmi_colour=0.9, ari_colour=1.0),
        run(2, nmi_domain=0.7, nmi_colour=0.0, ari_colour=0.0),
        run(3, nmi_colour=0.0, ari_colour=0.0),
        run(4, "HMOE-DL", nmi_class=1.0),
        run(5) | {"status": "failed"},
    ]
    lines = discovery_lines(frame_of(runs), {"colour": 3}, {"domain": "angle"})
    assert [line[:7] for line in lines] == ["HMOE-DN"] * 2 + ["HMOE-DL"] * 2
    assert lines[0].startswith("HMOE-DN, 4 runs: the experts agree most")
    assert "with the colour in 2 (NMI 0.90 to 1.00)" in lines[0]
    assert "with the angle in 1 (NMI 0.70)" in lines[0]
    assert "with nothing in 1" in lines[0]
    assert lines[0].endswith("Mean NMI: colour 0.47, angle 0.17, class 0.00.")
    assert lines[1] == "HMOE-DN, all 4 runs had idle experts."


def test_the_summary_has_a_row_for_each_algorithm_and_factor():
    runs = [run(0, nmi_domain=0.2), run(1, nmi_domain=0.4, ari_domain=0.5, gate_entropy=1.0)]
    runs.append(run(2, "HMOE-DL", nmi_domain=1.0))
    table = agreement_summary(frame_of(runs), {"class": 10}).set_index(["algorithm", "factor"])
    assert [f for _, f in table.index] == ["domain", "class"] * 2
    row = table.loc["HMOE-DN", "domain"].drop("nmi_at_equal_load")
    assert row.tolist() == pytest.approx([2, 0.3, 0.2, 0.4, 0.25, 0.5 / math.log(3)])
    possible = table.nmi_at_equal_load["HMOE-DN"]
    assert possible.tolist() == pytest.approx([1, 2 * math.log(3) / math.log(30)])


# The unseen domain


def test_mean_gates_keep_the_test_domain_last_and_sum_to_one():
    means = mean_gates(STORED, ["a", "unseen", "c", "d"])
    assert list(means.index) == ["a", "c", "d", "unseen (test)"]
    assert means.loc["unseen (test)"].tolist() == [0.75, 0.25]
    assert np.allclose(means.sum(axis=1), 1)
    assert np.allclose(means.loc["a"], 0.5)


def test_similarity_by_hand():
    table = gate_similarity(
        pd.DataFrame([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.25] * 4])
    )
    assert np.allclose(np.diag(table), 1)
    assert np.allclose(table, table.T)
    assert table.iloc[0, 2] == 0
    mixture = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert table.iloc[0, 1] == pytest.approx(1 - (mixture - 0.5))
    mixture = -(0.75 * math.log2(0.375) + 0.25 * math.log2(0.125))
    assert table.iloc[1, 3] == pytest.approx(1 - (mixture - 0.5 * 1 - 0.5 * 2))


def similar(gates):
    "`similarity_table` of a run with these mean gates, of which the last is the test domain's."
    gates = np.array(gates, float)
    arrays = {"gate_out": gates[:-1], "domain_out": np.arange(len(gates) - 1)}
    arrays |= {"gate_test": gates[-1:], "domain_test": np.array([len(gates) - 1])}
    return similarity_table([(frame_of([run()]).iloc[0], arrays)], ["0", "15", "75"])


def test_the_sentence_names_the_nearest_domain_only_where_the_gate_tells_domains_apart():
    table = similar([[1, 0], [0, 1], [0.1, 0.9]])
    assert list(table) == ["algorithm", "test_domain", "0", "15", "lowest_in_training"]
    assert table.lowest_in_training[0] == 0
    assert "photo: most like 15 (0.9" in similarity_lines(table)[0]
    line = similarity_lines(similar([[0.5, 0.5], [0.52, 0.48], [0.5, 0.5]]))[0]
    assert line.endswith("does not separate the training domains (similarity at least 1.00).")


# Collapse


def test_the_effective_number_counts_by_weight():
    loads = score_discovery(one_hot(np.array([0, 0, 1, 2]), 8), [0, 0, 1, 1], [0, 1, 0, 1])
    row = scored_runs(frame_of([run(0, experts=8, **loads)])).iloc[0]
    assert row.effective_experts == pytest.approx(2**1.5)
    assert row.share_of_log_K == 0
    kept = {"gate_out": one_hot(np.array([0, 0, 1, 2]), 8), "embeddings": np.eye(8)}
    scores = collapse_scores(kept | {"code_out": np.array([[0.0, 0], [2, 0]])})
    assert scores["experts_used"] == 3
    assert scores["largest_share"] == 0.5
    assert scores["smallest_distance"] == pytest.approx(math.sqrt(2))
    assert scores["spread"] == 1


def test_runs_that_found_the_domains_are_counted_by_test_domain():
    runs = invented.discovered("HMOE-DN", "photo", (1, 0.9, 0))
    runs += invented.discovered("HMOE-ND", "sketch", (0.89,))
    found = scored_runs(frame_of(runs))
    assert counts_text(found) == "photo 2 of 3, sketch 0 of 1"
    assert found.nmi_at_equal_load.tolist() == pytest.approx([1, 1, 1, 0.8113], abs=1e-4)


def test_distances_of_embeddings():
    assert smallest_distance(np.array([[0, 0], [3, 4], [0, 9]], np.float16)) == 5
    assert smallest_distance([[1, 1], [1, 1], [7, 7]]) == 0
    assert math.isnan(smallest_distance([[1.0, 2.0]]))
    assert fresh_distance(2, 32) == pytest.approx(math.sqrt(2 * 31.34), abs=0.15)
    assert fresh_distance(8, 32) < fresh_distance(2, 32)


def test_the_table_of_gates_and_its_sentence():
    runs = [
        run(0, gate_entropy=math.log(3), load_balance=0.0, experts_used=3),
        run(1, gate_entropy=0.1, load_balance=math.log(3 / 2), experts_used=2),
        run(2, gate_entropy=0.1, experts_used=3),
        run(3) | {"discovery": None},
    ]
    table = gate_table(frame_of(runs))
    assert table.effective_experts.tolist() == pytest.approx([3, 2, 3])
    assert table.share_of_log_K[0] == pytest.approx(1)
    assert table.K.tolist() == [3, 3, 3]
    counted = gate_summary(table).iloc[0]
    assert counted[["runs", "uniform", "idle", "all_used"]].tolist() == [3, 1, 1, 1]
    assert gate_verdict(table) == (
        "3 runs: gate nearly uniform in 1, idle experts in 1, all experts in use in 1."
    )
    assert gate_verdict(table[:1]).startswith("1 run: gate nearly uniform in 1, idle experts in 0")
    with pytest.raises(HmoeError, match="Fix: choose runs of HMOE"):
        gate_table(frame_of(runs[3:]))


def test_a_collapse_is_half_of_the_effective_number():
    balances = (math.log(2) + 1e-9, 0.1)
    runs = [run(s, experts=8, gate_entropy=0.1, load_balance=l) for s, l in enumerate(balances)]
    counted = gate_summary(gate_table(frame_of(runs))).iloc[0]
    assert (counted.runs, counted.collapsed, counted.idle) == (2, 1, 2)


def test_a_uniform_gate_names_nothing_and_says_why():
    runs = [run(s, gate_entropy=0.99 * math.log(3), nmi_class=0.8) for s in range(2)]
    (line,) = discovery_lines(frame_of(runs))
    assert "uniform in every run (entropy at least 99 % of log K; undertrained)" in line
    assert "class" not in line
    for r in runs:
        r["config"]["hparams"]["lambda_en"] = 0.0
    assert "trained without an entropy loss" in discovery_lines(frame_of(runs))[0]
    runs[0]["discovery"]["gate_entropy"] = 0.1
    assert len(discovery_lines(frame_of(runs))) == 2


def test_only_complete_runs_with_scores_are_scored():
    runs = [run(0), run(1) | {"status": "failed"}, run(2) | {"discovery": None}]
    found = scored_runs(frame_of(runs))
    assert found.trial_seed.tolist() == [0]
    assert found[["domains", "K"]].values.tolist() == [[3, 3]]
    assert scored_runs(frame_of(runs[1:])).empty
    assert scored_runs(frame_of([])).empty
    with pytest.raises(HmoeError, match="no complete run has discovery scores. Fix"):
        scored_runs(frame_of(runs[1:]), required=True)


def test_the_confusion_of_a_run_ends_with_its_test_domain():
    table = confusion(STORED, ["a", "unseen", "c", "d"])
    assert list(table.index) == ["a", "c", "d", "unseen (test)"]
    assert table.loc["unseen (test)"].tolist() == [3, 1]
    assert confusion(STORED, ["red", "green"], "colour").values.tolist() == [[75, 0], [0, 75]]


def test_finding_the_domains_is_compared_within_a_test_domain():
    "The correlation is that of NMI and accuracy after both lost the mean of their test domain."
    runs = []
    for seed, (domain, base) in enumerate([("photo", 0.2), ("ink", 0.8)] * 6):
        made = run(seed, nmi_domain=0.1 * (seed // 2))
        made["config"]["test_domains"] = [domain]
        made["selected"]["mix"]["test_accuracy"] = base + 0.01 * (seed // 2)
        runs.append(made)
    table = found_and_right(frame_of(runs))
    assert table.above_mean.max() == pytest.approx(2.5)
    row = found_right_table(table).iloc[0]
    assert row.runs == 12
    assert row.correlation == pytest.approx(1, abs=1e-5)
    assert row.low > 0.9
    assert math.isnan(found_right_table(table[:8]).correlation[0])


# Curves


def test_the_selected_curve_ends_at_the_tables_number():
    runs = invented.digits(seeds=(0,), domains=("photo",))
    for made in runs:
        for mode, chosen in made["selected"].items():
            curve = selected_so_far(made["checkpoints"], "photo", mode)
            assert curve[-1] == chosen["test_accuracy"]
    frame = frame_of(runs)
    ends = checkpoints(frame).query("quantity == 'test_accuracy'").groupby(["algorithm", "mode"])
    expected = frame.set_index(["algorithm", "mode"]).accuracy
    assert ends.value.last().to_dict() == expected.to_dict()


def test_curves_average_domains_before_seeds():
    cells = [(d, s) for d in ("photo", "sketch") for s in (0, 1)]
    runs = [invented.measured("ERM", d, s, default=0.5) for d, s in cells]
    for made, loss in zip(runs, (1.0, 2.0, 3.0, 6.0)):
        for point in made["checkpoints"]:
            point["losses"] = {"loss": loss}
    long = checkpoints(frame_of(runs))
    seeds = seed_curves(long, "loss").groupby("trial_seed").value
    assert seeds.unique().map(list).tolist() == [[2.0], [4.0]]  # (1 + 3) / 2 and (2 + 6) / 2
    assert seed_curves(long, "L_d").empty
    cut = long[~((long.trial_seed == 1) & (long.step == long.step.max()))]
    assert seed_curves(cut, "loss").step.max() < long.step.max()


@pytest.mark.parametrize(
    "correlation, low, high, said",
    [
        (0.7, 0.2, 0.9, "more accurate"),
        (-0.7, -0.9, -0.2, "less accurate"),
        (0.1, -0.4, 0.5, "not clearly related"),
        (math.nan, math.nan, math.nan, "Too few runs"),
    ],
)
def test_a_relation_of_domains_and_accuracy_is_said_only_if_its_interval_leaves_zero(
    correlation, low, high, said
):
    columns = ["algorithm", "runs", "correlation", "low", "high"]
    rows = [("HMOE-DL", 12, 0.9, 0.8, 0.95), ("HMOE-DN", 12, correlation, low, high)]
    finding = found_right_finding(pd.DataFrame(rows, columns=columns))
    assert said in finding
    assert "HMOE-DN" in finding
    assert len(finding.split()) <= 14


def test_the_factor_that_experts_follow_is_on_top_and_given_domains_come_last():
    rows = [("HMOE-DL", "domain", 1.0), ("HMOE-DN", "domain", 0.1), ("HMOE-DN", "colour", 0.8)]
    scores = pd.DataFrame(rows, columns=["algorithm", "factor", "nmi"])
    figure = plot_factors(scores, {"domain": "angle"})
    assert [axis.get_title() for axis in figure.axes] == ["HMOE-DN", "HMOE-DL"]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["colour", "angle"]
