"""Rates of discovery and what belongs to them: exact intervals, settings by name, baselines without
a gate, the length of codes, partial domain labels, and options that leave old runs their names."""

import itertools
import json
import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.analysis.clusters import gate_table, gate_verdict
from hmoe_repro.analysis.discovery_rates import (
    accuracy_by_found,
    baseline_table,
    best_restarts,
    code_trace,
    discovery_rates,
    kmeans_comparison,
    kmeans_lines,
    named_settings,
    plot_rates,
    rate_summary,
    setting_runs,
    sign_tests,
)
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.analysis.statistics import rate
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.data.kmeans_baseline import image_statistics, kmeans
from hmoe_repro.method.clustering import code_statistics, in_plane, is_diverged, purity
from hmoe_repro.method.gating import entropy_weight
from hmoe_repro.method.hmoe import HMOE
from hmoe_repro.networks.encoders import SmallD2V
from hmoe_repro.report.compare_published import compare_runs
from hmoe_repro.training.measurements import check_measure, measure_run
from hmoe_repro.training.model import build_dataset
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import draw_domain_labelled
from hmoe_repro.training.run import run
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import RunStore
from hmoe_repro.training.trainer import Trainer

TINY = {"network": "small_cnn", "steps": 4, "checkpoint_frequency": 2}
CPU = torch.device("cpu")


def plan(algorithm="HMOE-DN", measure="", restart=0, **hparams):
    "A run of four updates on the tiny digits."
    hparams = {"batch_size": 4, "d2v_stride": 2} | hparams if "HMOE" in algorithm else hparams
    asked = {"measure": measure, "restart": restart, "hparams": hparams}
    return make_config(algorithm, "DigitDomainsTiny", ["sketch"], **asked, **TINY)


def trainer_of(config):
    return Trainer(config, build_dataset(config), CPU)


# Numbers


def test_purity_is_that_of_a_count_by_hand():
    random = np.random.default_rng(0)
    for experts, domains in ((1, 3), (3, 3), (5, 3), (8, 2)):
        found, truth = random.integers(0, experts, 60), random.integers(0, domains, 60)
        hits = sum(
            max(sum((found == k) & (truth == d)) for d in range(domains)) for k in set(found)
        )
        assert purity(found, truth) == pytest.approx(hits / 60)


def test_kmeans_finds_the_best_division_there_is():
    random = np.random.default_rng(3)
    points = np.concatenate([random.normal(c, 0.4, (4, 2)) for c in (0, 3)]) * [1, 100]
    scaled = (points - points.mean(0)) / points.std(0)

    def loss(labels):
        parts = [scaled[labels == k] for k in set(labels)]
        return sum(((p - p.mean(0)) ** 2).sum() for p in parts)

    every = [np.array(labels) for labels in itertools.product((0, 1), repeat=8)]
    best = min(loss(labels) for labels in every if len(set(labels)) == 2)
    assert loss(kmeans(points, 2)) == pytest.approx(best)
    assert (kmeans(points, 2) == kmeans(5 * points - 7, 2)).all()


@pytest.mark.parametrize("points, k", [(np.zeros((2, 3)), 3), (np.zeros((4, 1)), 0)])
def test_too_few_points_are_refused(points, k):
    with pytest.raises(ValueError, match="n_clusters"):
        kmeans(points, k)


def test_codes_that_are_not_finite_are_not_clustered():
    with pytest.raises(HmoeError, match="finite"):
        kmeans([[0.0], [math.nan], [1.0]], 2)


def test_statistics_of_images_are_those_of_a_loop():
    images = torch.rand(3, 2, 5, 4)
    for one, found in zip(images, image_statistics(images)):
        means = [channel.mean().item() for channel in one]
        spreads = [channel.std(correction=0).item() for channel in one]
        assert found.tolist() == pytest.approx([*means, *spreads], abs=1e-6)


# Divergence


def statistics(scale):
    "Of codes that lie on three embeddings, the codes multiplied by `scale`."
    embeddings = np.array([[3.0, 0, 4], [0, 5, 0], [0, 0, -5]])
    codes = scale * embeddings[[0, 0, 1, 2]]
    return code_statistics(codes, np.eye(3)[[0, 0, 1, 2]], embeddings)


def test_lengths_and_spread_are_those_by_hand():
    found = statistics(2.0)
    assert found["code_length"] == pytest.approx(10)
    assert found["embedding_length"] == 5
    codes = 2 * np.array([[3, 0, 4], [3, 0, 4], [0, 5, 0], [0, 0, -5]])
    centre = codes.mean(0)
    squared = np.mean([((c - centre) ** 2).sum() for c in codes])
    assert found["code_spread"] == pytest.approx(math.sqrt(squared))
    assert found["largest_code"] == 10
    assert found["gate_entropy"] == 0


@pytest.mark.parametrize("scale, expected", [(1, False), (9.9, False), (10.1, True)])
def test_ten_lengths_of_the_embeddings_are_the_limit(scale, expected):
    assert is_diverged(statistics(scale)) is expected


@pytest.mark.parametrize("name", ["code_length", "largest_code"])
@pytest.mark.parametrize("value", [None, math.inf, math.nan])
def test_what_is_not_finite_has_diverged(name, value):
    assert is_diverged(statistics(1) | {name: value})


def test_codes_too_large_for_storage_have_diverged():
    assert is_diverged(statistics(1) | {"largest_code": 7e4})
    assert not is_diverged(statistics(1) | {"largest_code": 6e4})


def test_a_checkpoint_says_how_long_the_codes_are_and_training_does_not_notice():
    trainer = trainer_of(plan())
    trainer.update()
    trainer.update()
    before, weights = torch.get_rng_state(), trainer.algorithm.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    trainer.evaluate()
    assert torch.equal(before, torch.get_rng_state())
    assert trainer.algorithm.training
    after = trainer.algorithm.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in weights.items())
    seen = trainer.checkpoints[-1]["codes"]
    model = trainer.algorithm.model
    lengths = model.embeddings.detach().norm(dim=1)
    assert seen["embedding_length"] == pytest.approx(lengths.mean().item(), rel=1e-5)
    assert 0 < seen["code_length"] < 10 * seen["embedding_length"]
    assert "codes" not in trainer_of(plan("ERM")).checkpoints


def test_a_run_that_diverged_says_so_and_one_that_did_not_as_well(tmp_path):
    trainer = trainer_of(plan())
    trainer.update()
    assert measure_run(trainer)[0]["discovery"]["diverged"] is False
    with torch.no_grad():
        trainer.algorithm.model.encoder.output.bias.add_(100)
    scores = measure_run(trainer)[0]
    assert scores["discovery"]["diverged"] is True
    trainer.checkpoints.append({"codes": statistics(50)})
    with torch.no_grad():
        trainer.algorithm.model.encoder.output.bias.sub_(100)
    assert measure_run(trainer)[0]["discovery"]["diverged"] is True


def record(setting, domain="ink", seed=0, nmi=0.95, diverged=False, **more):
    "An invented record of HMOE-DN with three training domains."
    others = [d for d in ("ink", "oil", "pen", "wax") if d != domain]
    scores = {"nmi_domain": nmi, "nmi_class": 0.0, "experts_used": 3, "gate_entropy": 0.1}
    scores |= {"load_balance": 0.0, "purity": 0.9, "diverged": diverged}
    points = [
        {
            "step": step,
            "accuracies": {d: {"out": {"mix": 0.5}} for d in others},
            "codes": statistics(1) | {"code_length": length},
        }
        for step, length in ((5, 4.0), (10, None if diverged else 6.0))
    ]
    config = {"algorithm": "HMOE-DN", "test_domains": [domain], "trial_seed": seed, "steps": 11}
    config["dataset"] = "Invented"
    config["hparams"] = {"lambda_kl": 3.0, **setting}
    return {
        "run_id": f"{sorted(setting.items())}{domain}{seed}",
        "status": "complete",
        "config": config | more,
        "checkpoints": points,
        "selected": {"mix": {"test_accuracy": 0.5, "validation_accuracy": 0.5, "step": 10}},
        "discovery": scores,
    }


def test_a_verdict_does_not_count_what_diverged_as_a_finding():
    records = [record({}, seed=s, diverged=s == 0) for s in range(3)]
    table = gate_table(frame_of(records))
    assert table.diverged.tolist() == [True, False, False]
    assert "1 diverged" in gate_verdict(table)
    for one in records:
        del one["discovery"]["diverged"]
    assert gate_table(frame_of(records)).diverged.isna().all()


# Settings and rates


def test_settings_are_called_what_differs_from_the_most_frequent():
    records = [record({}, seed=s) for s in range(3)] + [record({"code_norm": "batch"})]
    records.append(record({"lambda_kl": 1.0}, steps=99))
    names = named_settings(frame_of(records), {"code_norm batch": "ours"})
    assert names.tolist() == ["default"] * 3 + ["ours", "lambda_kl 1.0, updates 99"]


def test_rates_count_every_run_once():
    records = [record({}, d, s, 0.95 if s else 0.5) for d in ("ink", "oil") for s in range(4)]
    records += [record({"code_norm": "batch"}, "ink", s, 1.0) for s in range(2)]
    runs = setting_runs(frame_of(records))
    rates = discovery_rates(runs).set_index(["setting", "test_domain"])
    assert rates.loc[("default", "all"), ["runs", "found"]].tolist() == [8, 6]
    assert rates.loc[("default", "ink"), "found"] == 3
    _, low, high = rate(6, 8)
    assert rates.loc[("default", "all"), ["low", "high"]].tolist() == [100 * low, 100 * high]
    row = sign_tests(runs).iloc[0]
    assert row[["setting", "against"]].tolist() == ["code_norm batch", "default"]
    assert row[["pairs", "higher", "lower"]].tolist() == [2, 1, 0]
    assert row.p == 1


def test_the_table_and_the_picture_of_rates_show_every_run_and_the_best_setting_first():
    records = [record({}, d, s, 0.95 if s else 0.5) for d in ("ink", "oil") for s in range(4)]
    records += [record({"code_norm": "batch"}, d, 0, 1.0) for d in ("ink", "oil")]
    records += [record({"code_norm": "batch"}, "ink", 5, 0.1, diverged=True)]
    runs = setting_runs(frame_of(records))
    summary = rate_summary(runs).set_index("setting")
    _, low, high = rate(6, 8)
    assert list(summary) == ["found", "percent", "95 % CI", "mean NMI", "ink", "oil"]
    assert summary.loc["default", ["found", "percent", "ink"]].tolist() == [
        "6 of 8",
        "75",
        "3 of 4",
    ]
    assert summary["95 % CI"]["default"] == f"{100 * low:.0f} to {100 * high:.0f}"
    figure = plot_rates(runs)
    rates, ink, oil = figure.axes
    names = [label.get_text() for label in rates.get_yticklabels()]
    assert names == ["default (6 of 8)", "code_norm batch (2 of 3)"]
    [points] = rates.containers
    assert points.lines[0].get_xdata().tolist() == pytest.approx([75, 200 / 3])
    dots, crosses = ink.collections
    assert sorted(dots.get_offsets()[:, 0].round(2)) == [0.5, 0.95, 0.95, 0.95, 1.0]
    assert crosses.get_offsets()[:, 0].tolist() == [0.1]
    assert len(oil.collections[0].get_offsets()) == 5
    order = [
        label.get_text() for label in plot_rates(runs[::-1], ranked=False).axes[0].get_yticklabels()
    ]
    assert order == names[::-1]
    plt.close("all")


def test_of_restarts_the_most_decided_counts_and_agrees_with_the_next():
    records = []
    found = ((0.3, 0.5, "0101"), (0.1, 0.95, "0011"), (0.2, 0.7, "1100"), (0.9, 0.2, "0000"))
    for restart, (entropy, nmi, groups) in enumerate(found):
        for seed in range(2):
            made = record({}, seed=seed, nmi=nmi, restart=restart)
            made["discovery"] |= {"gate_entropy": entropy + seed, "groups": groups}
            made |= {"run_id": f"{restart} {seed}", "wall_time_s": 10.0}
            records.append(made)
    best = best_restarts(setting_runs(frame_of(records)))
    assert best.nmi_domain.tolist() == [0.95, 0.95]
    assert best.restarts.tolist() == [4, 4]
    assert best.wall_time_s.tolist() == [40.0, 40.0]
    assert best.agreement.tolist() == [1.0, 1.0]
    for made in records:
        del made["discovery"]["groups"]
    assert best_restarts(setting_runs(frame_of(records))).agreement.isna().all()
    alone = best_restarts(setting_runs(frame_of(records[:2])))
    assert alone.restarts.tolist() == [1, 1]
    assert alone.agreement.isna().all()


def test_the_chance_of_a_split_is_that_of_a_fair_coin():
    found = lambda seed, first: 0.95 if (seed == 0) == first else 0.5
    records = [record({}, "ink", s, found(s, True)) for s in range(6)]
    records += [record({"code_norm": "batch"}, "ink", s, found(s, False)) for s in range(6)]
    row = sign_tests(setting_runs(frame_of(records))).iloc[0]
    assert (row.higher, row.lower) == (5, 1)
    assert row.p == row.p_holm == pytest.approx(14 / 64)


def test_without_discordant_pairs_nothing_is_said_of_chance():
    runs = setting_runs(frame_of([record({}), record({"code_norm": "batch"})]))
    assert sign_tests(runs)[["p", "p_holm"]].isna().all(axis=None)


def test_accuracy_is_compared_with_erm_on_equal_seeds_and_by_test_domain():
    """The domains are found only where the harder domain is held out: a mean over runs that found
    them would be lower, although they are better than ERM by one point in each pair."""
    records, base = [], {"ink": 0.4, "oil": 0.8}
    for domain, seed in itertools.product(base, range(3)):
        for algorithm, gain in (("ERM", 0.0), ("HMOE-DN", 0.01 + 0.001 * seed)):
            made = record({}, domain, seed, 0.95 if domain == "ink" else 0.3)
            made["config"]["algorithm"] = algorithm
            right = base[domain] + 0.02 * seed + gain
            chosen = {"step": 10, "validation_accuracy": 0.5, "test_accuracy": right}
            made["selected"] = {"mix" if gain else "default": chosen}
            made |= {} if gain else {"discovery": None, "run_id": f"erm{domain}{seed}"}
            records.append(made)
    frame = frame_of(records)
    table = accuracy_by_found(frame, setting_runs(frame)).set_index("test_domain")
    assert table.difference.tolist() == pytest.approx([1.1] * 3)
    assert table.ahead["Average"] == 6
    assert table.found["ink"] == 3
    assert table.if_found["ink"] == pytest.approx(43.1)
    assert table.if_not["oil"] == pytest.approx(83.1)
    assert math.isnan(table.if_found["oil"])
    assert table.loc["Average", ["found", "if_found", "if_not"]].isna().all()


def test_the_trace_has_each_checkpoint_and_shows_what_was_not_finite():
    trace = code_trace(frame_of([record({}), record({}, seed=1, diverged=True)]))
    assert trace.step.tolist() == [5, 10, 5, 10]
    assert trace.relative_length.tolist() == [0.8, 1.2, 0.8, math.inf]
    with pytest.raises(HmoeError, match="no complete run"):
        setting_runs(frame_of([record({}) | {"discovery": None}]))


def test_baselines_are_means_over_seeds_of_complete_runs():
    def of_erm(nmi, status="complete"):
        scores = {"nmi_domain": nmi, "nmi_class": 0.0, "purity": 0.8}
        made = record({}, algorithm="ERM") | {"status": status, "run_id": f"{nmi}{status}"}
        return made | {"clusters": {"statistics": scores, "features": scores | {"nmi_domain": 0.1}}}

    runs = [of_erm(0.5), of_erm(1.0), of_erm(0.0, "failed"), record({})]
    table = baseline_table(frame_of(runs))
    assert table.mean_nmi.tolist() == pytest.approx([0.75, 0.1])
    assert table.runs.tolist() == [2, 2]
    assert table.found.tolist() == [1, 0]
    found = [record({}, d, s, n) for d, s, n in (("ink", 0, 0.7), ("ink", 1, 0.9), ("oil", 0, 1))]
    compared = kmeans_comparison(setting_runs(frame_of(found)), table, "setting")
    assert compared.test_domain.tolist() == ["ink"]
    assert compared.above.tolist() == [1]
    lines = kmeans_lines(compared)
    assert lines[0].startswith("default: above the better k-means in 1 of 2 (95 % CI 1 to 99 %)")
    assert lines[1] == "k-means, colour and contrast: mean NMI by held-out domain: ink 0.75."
    assert kmeans_lines(kmeans_comparison(setting_runs(frame_of(found)), table[:0])) == []
    for made in runs[:2]:  # of a network with frozen stages
        made["clusters"]["style"] = made["clusters"]["features"] | {"nmi_domain": 0.9}
    styled = baseline_table(frame_of(runs))
    assert styled.baseline.tolist()[1] == "k-means, style of first stages"
    compared = kmeans_comparison(setting_runs(frame_of(found)), styled, "setting")
    assert "above the best k-means in 0 of 2" in kmeans_lines(compared)[0]


def test_clusters_are_measured_on_request_and_in_the_record(tmp_path):
    config = plan("ERM", measure="clusters")
    found = run(config, RunStore(tmp_path))["clusters"]
    data = build_dataset(config)
    assert found["clusters"] == 3
    assert found["split"] == "out"
    trainer = trainer_of(config)
    points, truth = [], []
    for domain in trainer.domains:
        position = data.domain_index(domain)
        chosen = trainer.splits[domain]["out"]
        points.append(image_statistics(data.inputs(position, chosen, CPU)))
        truth += [position] * len(chosen)
    expected = purity(kmeans(torch.cat(points), 3), truth)
    assert found["statistics"]["purity"] == pytest.approx(expected)
    assert "clusters" not in run(plan("ERM"), RunStore(tmp_path))


def test_an_algorithm_without_features_cannot_measure_clusters():
    asked = SimpleNamespace(config=plan("ERM", measure="clusters"), algorithm=object())
    with pytest.raises(HmoeError, match="no featurizer"):
        check_measure(asked)


def test_a_restart_keeps_the_split_and_changes_weights_and_batches():
    first, again = trainer_of(plan()), trainer_of(plan().replace(restart=1))
    assert again.config.run_id != first.config.run_id == plan(restart=0).run_id
    assert str(again.config).endswith("seed 0, restart 1")
    for domain in first.domains:
        for part in ("in", "out"):
            assert torch.equal(first.splits[domain][part], again.splits[domain][part])
    weights = [t.algorithm.model.embeddings for t in (first, again)]
    assert not torch.equal(*weights)
    drawn = []
    for trainer in (first, again):
        trainer.update()
        drawn.append(torch.cat(trainer.batches.drawn))
    assert not torch.equal(*drawn)


def test_groups_are_kept_on_request_and_are_the_experts_of_the_validation_images(tmp_path):
    asked = run(plan(measure="groups"), RunStore(tmp_path))["discovery"]
    trainer = trainer_of(plan(measure="groups"))
    images = sum(len(trainer.splits[domain]["out"]) for domain in trainer.domains)
    assert len(asked["groups"]) == images
    assert set(asked["groups"]) <= set("012")
    assert len(set(asked["groups"])) >= asked["experts_used"]
    assert "groups" not in run(plan(), RunStore(tmp_path))["discovery"]


@pytest.mark.parametrize(
    "algorithm, measure, given",
    [
        ("ERM", "groups", {}),
        ("HMOE-ND", "groups", {"num_experts": 17}),
        ("HMOE-ND", "codes", {"num_experts": 2}),
    ],
)
def test_groups_need_a_gate_of_few_experts_and_a_plane_three(algorithm, measure, given):
    with pytest.raises(HmoeError, match="no gate of [13] to 16 experts"):
        check_measure(trainer_of(plan(algorithm, measure=measure, **given)))


def test_a_plane_keeps_the_distances_of_its_embeddings_and_of_codes_in_it():
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(4, 8))
    inside = rng.dirichlet(np.ones(3), size=20) @ embeddings[:3]
    off = np.linalg.svd(embeddings[1:3] - embeddings[0])[2][-1]  # at right angles to the plane
    flat = in_plane(np.concatenate([inside, inside + 5 * off]), embeddings)
    codes, corners = np.array(flat["codes"]), np.array(flat["embeddings"])
    assert np.allclose(cdist(codes[:20], corners[:3]), cdist(inside, embeddings[:3]), atol=0.02)
    assert np.allclose(codes[:20], codes[20:])
    assert np.allclose(corners[:3].mean(0), 0, atol=0.01)
    assert corners[1, 0] > corners[0, 0]
    assert corners[0, 1] == corners[1, 1] < corners[2, 1]


def test_codes_are_kept_in_the_plane_at_each_checkpoint_on_request(tmp_path):
    points = run(plan(measure="codes"), RunStore(tmp_path))["checkpoints"]
    trainer = trainer_of(plan(measure="codes"))
    for point in points:
        plane = point["codes"]["plane"]
        assert list(plane["images"]) == trainer.domains
        assert np.shape(plane["codes"]) == (sum(plane["images"].values()), 2)
        assert np.shape(plane["embeddings"]) == (3, 2)
    assert "plane" not in run(plan(), RunStore(tmp_path))["checkpoints"][0]["codes"]


# Options of ours


def test_an_option_changes_the_name_of_a_run_and_its_default_does_not():
    plain = plan()
    given = plan(code_norm="none", embedding_scale=1.0, entropy_ramp=0.5, d2v_lr=0.0)
    assert given.run_id == plain.run_id
    assert plain.hparams["code_norm"] == "none"
    ours = plan(code_norm="batch")
    assert ours.run_id != plain.run_id
    assert ours.hparams["code_norm"] == "batch"
    assert RunConfig.from_dict(json.loads(json.dumps(ours.to_dict()))).run_id == ours.run_id


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"code_norm": "layer"}, "unknown code_norm 'layer'"),
        ({"d2v_small_norm": "batch"}, "unknown d2v_small_norm 'batch'"),
        ({"entropy_ramp": -1.0}, "at least 0"),
        ({"d2v_lr": -0.1}, "at least 0"),
        ({"labelled_fraction": 0.5}, "lambda_d is 0"),
        ({"labelled_domains": "plain"}, "lambda_d is 0"),
        ({"lambda_d": 1.0, "labelled_fraction": 1.5}, "labelled_fraction must be at most 1"),
        ({"lambda_d": 1.0, "labelled_fraction": -0.5}, "at least 0"),
        ({"lambda_d": 1.0, "labelled_domains": "sketch"}, "unknown training domain"),
    ],
)
def test_wrong_options_are_refused_when_a_run_is_planned(wrong, said):
    with pytest.raises(HmoeError, match=said):
        plan(**wrong)


def test_a_ramp_of_zero_is_the_full_weight_from_the_start():
    assert [entropy_weight(t, 0) for t in (0.0, 0.1, 1.0)] == [1, 1, 1]
    assert [entropy_weight(t, 0.2) for t in (0.0, 0.1, 0.4)] == [0, 0.5, 1]


def test_normalised_codes_have_mean_0_and_variance_1_over_a_batch():
    seed_everything(0)
    net = HMOE(
        torch.nn.Flatten(), SmallD2V(3, 8, 4), 3 * 8 * 8, 5, 3, embedding_dim=8, code_norm="batch"
    )
    x = torch.rand(32, 3, 8, 8)
    v = net.train().encode(x)
    spread = net.encoder(x).var(0, correction=0)
    assert v.mean(0).abs().max() < 1e-3
    torch.testing.assert_close(
        v.var(0, correction=0), spread / (spread + 1e-5), rtol=1e-3, atol=1e-3
    )
    net.eval()
    together, alone = net.encode(x), torch.cat([net.encode(x[:1]), net.encode(x[1:])])
    torch.testing.assert_close(together, alone)


def test_a_run_with_normalised_codes_goes_on_to_the_bit():
    config = plan(code_norm="batch")
    whole, cut = trainer_of(config), trainer_of(config)
    for _ in range(2):
        cut.update()
    state = cut.state()
    resumed = trainer_of(config)
    resumed.load(state)
    for trainer, updates in ((whole, 4), (resumed, 2)):
        for _ in range(updates):
            trainer.update()
    expected = whole.algorithm.state_dict()
    assert any("running_mean" in name for name in expected)
    found = resumed.algorithm.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_embeddings_are_drawn_as_far_apart_as_asked():
    nets = []
    for scale in (1.0, 0.3):
        seed_everything(0)
        shape = (3, 16, 16), 10, 3
        cls = get_algorithm("HMOE-DN")
        nets.append(cls(*shape, {"network": "small_cnn", "embedding_scale": scale}))
    torch.testing.assert_close(0.3 * nets[0].model.embeddings, nets[1].model.embeddings)


def _after_an_update(**given):
    "What one update of HMOE-DN on the same batch moves: name -> largest step of a weight."
    seed_everything(0)
    hparams = {"network": "small_cnn", "lr": 0.01} | given
    algorithm = get_algorithm("HMOE-DN")((3, 16, 16), 10, 3, hparams)
    before = {n: p.detach().clone() for n, p in algorithm.named_parameters()}
    algorithm.update([(torch.rand(4, 3, 16, 16), torch.arange(4)) for _ in range(3)])
    return {n: (p.detach() - before[n]).abs().max().item() for n, p in algorithm.named_parameters()}


def test_the_encoder_takes_steps_at_a_rate_of_its_own():
    "Adam's first step moves each weight that has a gradient by the learning rate."
    usual, same, slow = (_after_an_update(d2v_lr=rate) for rate in (0.0, 0.01, 0.0001))
    assert same == usual
    inside = [name for name in slow if name.startswith("model.encoder.")]
    assert 0 < len(inside) < len(slow)
    for name, step in slow.items():
        expected = usual[name] / 100 if name in inside else usual[name]
        assert step == pytest.approx(expected, rel=0.05, abs=1e-7), name


# Partial labels


def test_labels_are_of_the_asked_share_nested_and_by_seed():
    inside = [torch.arange(0, 100, 2), torch.arange(31)]
    shares = [
        draw_domain_labelled({"labelled_fraction": f}, ["ink", "oil"], inside, 0)
        for f in (0.0, 0.1, 0.5)
    ]
    assert [[len(p) for p in parts] for parts in shares] == [[0, 0], [5, 3], [25, 16]]
    for few, more, every in zip(shares[1], shares[2], inside):
        assert set(few.tolist()) < set(more.tolist()) < set(every.tolist())
    other = draw_domain_labelled({"labelled_fraction": 0.1}, ["ink", "oil"], inside, 1)
    assert set(other[0].tolist()) != set(shares[1][0].tolist())
    assert draw_domain_labelled({}, ["ink", "oil"], inside, 0) is None
    one = draw_domain_labelled({"labelled_domains": " oil "}, ["ink", "oil"], inside, 0)
    assert len(one[0]) == 0
    assert set(one[1].tolist()) == set(range(31))


def test_only_told_images_enter_the_domain_loss():
    trainer = trainer_of(plan(lambda_d=1.0, labelled_fraction=0.5))
    batches = trainer.batches.next()
    drawn = trainer.batches.drawn
    algorithm = trainer.algorithm
    algorithm.has_domain_label = [torch.isin(d, k) for d, k in zip(drawn, trainer.labelled)]
    assert 0 < sum(int(t.sum()) for t in algorithm.has_domain_label) < sum(map(len, drawn))
    with torch.no_grad():
        found = algorithm.loss(batches)["L_d"]
        terms = []
        for domain, ((x, _), told, indices) in enumerate(
            zip(batches, algorithm.has_domain_label, drawn)
        ):
            log_p = algorithm.codes(x)[1].log()
            for row, image in enumerate(indices.tolist()):
                known = image in trainer.labelled[domain].tolist()
                assert known == bool(told[row])
                terms += [-log_p[row, domain]] if known else []
    assert float(found) == pytest.approx(float(torch.stack(terms).mean()), rel=1e-4)


def test_no_label_at_all_trains_as_without_the_loss():
    trainers = [trainer_of(plan()), trainer_of(plan(lambda_d=1.0, labelled_fraction=0.0))]
    for trainer in trainers:
        trainer.update()
        trainer.update()
    first, second = (t.algorithm.state_dict() for t in trainers)
    assert all(torch.allclose(value, second[name]) for name, value in first.items())


# A published record with fewer entries


def test_a_repeated_run_may_have_more_entries_than_the_published_record(tmp_path):
    fresh = run(plan(), RunStore(tmp_path))
    older = json.loads(json.dumps(fresh))
    for point in older["checkpoints"]:
        del point["codes"]
    for name in ("purity", "diverged"):
        del older["discovery"][name]
    assert fresh["discovery"]["purity"] > 0
    assert compare_runs(frame_of([fresh]), frame_of([older])).different.tolist() == [False]
    older["checkpoints"][0]["losses"]["L_y"] += 0.1
    assert compare_runs(frame_of([fresh]), frame_of([older])).different.tolist() == [True]
