"""DMG's figures: scores of masks with numbers by hand, axes with a zero, sentences, and pages of
invented records, of few, and of none."""

import math
import re

import invented
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from notebooks import page_functions

from hmoe_repro.analysis.masks import (
    by_weight,
    change_line,
    draw_sensitivity,
    mask_rows,
    mask_runs,
    mask_scores,
    overlap_line,
    own_mask_gain,
    own_mask_line,
    pair_curves,
    pair_scores,
    place_scores,
    weight_changes,
    weight_diff,
    weight_table,
)
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.report.render import render
from hmoe_repro.studies.artefacts import artefact_studies, artefact_study
from hmoe_repro.studies.studies import count_runs
from hmoe_repro.studies.study_file import read_study
from hmoe_repro.training.run_config import RunConfig

ordered_masks = page_functions("dmg_fig4").ordered_masks
kind_table = page_functions("dmg_fig5").kind_table
sparse_line = page_functions("dmg_fig6").sparse_line

NUMBERS = re.compile(r"[+-][\d.]+(?=\D)")
DOMAINS = ("negative", "photo", "plain", "sketch")
ENVIRONMENT = {"versions": {}, "commit": "0", "device": "cpu", "device_name": "none", "threads": 1}


def kept(rows):
    "What a run notes of masks, counted neuron by neuron; rows of 0 and 1."
    masks, pairs = [[bool(x) for x in row] for row in rows], []
    for i in range(len(masks)):
        for j in range(i + 1, len(masks)):
            either = sum(a or b for a, b in zip(masks[i], masks[j]))
            both = sum(a and b for a, b in zip(masks[i], masks[j]))
            pairs.append(both / either if either else 1.0)
    users = [sum(column) for column in zip(*masks)]
    kinds = [sum(u == 0 for u in users), sum(u == 1 for u in users), sum(u > 1 for u in users)]
    return {
        "neurons": len(users),
        "kept": [round(sum(row) / len(row), 4) for row in masks],
        "iou": [round(iou, 4) for iou in pairs],
        "mean_iou": round(sum(pairs) / len(pairs), 4),
        "kinds": dict(zip(("useless", "specific", "shared"), kinds)),
    }


ALL = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
APART = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]  # IoU 1/3, 1/2, 1/2; one all, two one, one none
NONE = [[0] * 4] * 3


def run(target, seed, weight, last=ALL, out=0.7, inside=0.9, own=0.9, **hparams):
    "A complete run of DMG: the first place keeps everything, the last as given."
    sources = [d for d in DOMAINS if d != target]
    hparams = {"lambda_o": weight, "lambda_s": 0.0} | hparams
    who = dict(algorithm="DMG", dataset="DigitDomains", dataset_fingerprint="0", trial_seed=seed)
    more = {"network": "image_cnn", "resolution": 16, "steps": 40, "protocol": "dmg"}
    config = RunConfig(**who, test_domains=(target,), hparams=hparams, **more)
    both = kept([a + b for a, b in zip(ALL, last)])
    losses = {f"iou_{p}": v for p, v in zip(("0_1", "0_2", "1_2"), both["iou"])}
    halfway = {p: (1 + v) / 2 for p, v in losses.items()}
    by_mask = {d: [own if i == j else 0.8 for j in range(3)] for i, d in enumerate(sources)}
    accuracy = {d: {"split": "test", "images": 9, "by_mask": row} for d, row in by_mask.items()}
    accuracy[target] = {"split": "in", "images": 45, "by_mask": [0.5] * 3}
    chosen = {"step": 39, "validation_accuracy": 0.9}
    return {
        "run_id": config.run_id,
        "record_version": 2,
        "status": "complete",
        "reason": None,
        "config": config.to_dict(),
        "checkpoints": [
            {"step": 19, "losses": {"loss": 1.0, "iou_fc": 0.5} | halfway, "accuracies": {}},
            {"step": 39, "losses": {"loss": 0.5} | losses, "accuracies": {}},
        ],
        "selected": {"pred-ens": chosen | {"test_accuracy": out}},
        "in_domain": {"pred-ens": chosen | {"accuracy": inside}, "kd": chosen | {"accuracy": own}},
        "discovery": None,
        "masks": {
            "step": 39,
            "domains": sources,
            "pairs": [[sources[i], sources[j]] for i, j in ((0, 1), (0, 2), (1, 2))],
            "places": {"first": kept(ALL), "last": kept(last)},
            "overall": both,
            "accuracy": accuracy,
        },
        "test_size": 450,
        "in_domain_size": 268,
        "protocol": {"name": "dmg", "epochs": 4.0, "updates_per_epoch": 10, "splits": "72/8/20"},
        "environment": ENVIRONMENT,
        "wall_time_s": 1.0,
        "finished": "2026-01-01T00:00:00+00:00",
    }


def sweep(weights=(0.0, 0.1, 1.0), targets=("photo", "sketch"), seeds=(0, 1, 2), knob="lambda_o"):
    "Masks come apart at the weight 1; the target loses two points there, and seeds one each."
    return [
        spread(run(t, s, w, APART if w == 1 else ALL, 0.7 + s / 100 - 0.02 * (w == 1), **{knob: w}))
        for w in weights
        for t in targets
        for s in seeds
    ]


def spread(record):
    "The record with a little noise, since seeds that agree exactly give no interval."
    weights = [record["config"]["hparams"][name] for name in ("lambda_o", "lambda_s")]
    noise = 1e-8 * (1 - record["config"]["trial_seed"]) * (1 + sum(weights))
    record["selected"]["pred-ens"]["test_accuracy"] += noise
    for mode in record["in_domain"].values():
        mode["accuracy"] += noise
    for place in (record["masks"]["overall"], *record["masks"]["places"].values()):
        place["mean_iou"] += noise
    for row in record["masks"]["accuracy"].values():
        row["by_mask"] = [x + noise * (x == 0.9) for x in row["by_mask"]]  # the own mask
    return record


# Frames


def framed(*records):
    return frame_of(list(records))


def test_rows_hold_everything_that_a_run_measured_of_its_masks():
    rows = mask_rows(framed(run("photo", 3, 0.1, APART)))
    assert set(rows.place) == {"first", "last", "all places", "test", "in"}
    last = rows[rows.place == "last"].set_index(["quantity", "domain"]).value
    assert last["kept"].tolist() == [0.5, 0.5, 0.25]
    assert last["iou"].tolist() == [0.3333, 0.5, 0.5]
    assert last["shared"].item() == 0.25
    tested = rows[(rows.quantity == "accuracy") & (rows.place == "test")]
    own = tested[tested.domain == tested.other]
    assert own.value.tolist() == [0.9] * 3
    assert set(rows.weight) == {0.1}


def test_a_row_holds_what_a_run_measured_in_percent():
    scores = mask_scores(framed(run("photo", 3, 0.1, APART, 0.625, 0.875, 0.95)))
    (row,) = scores.to_dict("records")
    assert (row["weight"], row["test_domain"], row["trial_seed"]) == (0.1, "photo", 3)
    assert (row["out_of_domain"], row["in_domain"], row["known_domain"]) == (62.5, 87.5, 95.0)
    assert row["gain"] == pytest.approx(15)  # 0.95 on the own domain, 0.8 elsewhere
    assert row["iou"] == pytest.approx((5 / 7 + 5 / 6 + 5 / 6) / 3, abs=1e-4)
    assert row["kept"] == pytest.approx(100 * (6 + 6 + 5) / 24, abs=0.01)
    assert row["empty"] == 0


def test_empty_masks_and_missing_measures_are_told():
    empty = run("photo", 0, 1.0, NONE)
    empty["masks"]["overall"] = kept(NONE)
    del empty["in_domain"]
    for measured in empty["masks"]["accuracy"].values():
        measured["split"] = "out"
    (row,) = mask_scores(framed(empty)).to_dict("records")
    assert row["empty"] == 100
    assert row["iou"] == 1
    assert row["kept"] == 0
    assert all(math.isnan(row[name]) for name in ("in_domain", "known_domain", "gain"))


def test_other_runs_are_left_out_and_two_of_a_cell_refused():
    failed = run("photo", 1, 0.1) | {"status": "failed", "selected": {}, "in_domain": {}}
    plain = {name: v for name, v in run("photo", 2, 0.1).items() if name != "masks"}
    frame = framed(run("photo", 0, 0.1), failed, plain, run("sketch", 0, 0.1))
    assert len(mask_scores(frame)) == 2
    assert mask_runs(frame).test_domain.tolist() == ["photo", "sketch"]
    for function in (mask_scores, place_scores, pair_scores, pair_curves, own_mask_gain):
        assert function(framed()).empty
    twice = mask_scores(framed(run("photo", 0, 0.1), run("photo", 0, 0.1, mask_lr=1.0)))
    with pytest.raises(HmoeError, match="two.*photo.*seed 0"):
        by_weight(twice, "iou")
    other = run("sketch", 0, 0.1)
    other["config"] |= {"protocol": "domainbed"}
    with pytest.raises(HmoeError, match="two protocols"):
        mask_scores(framed(run("photo", 0, 0.1), other))


def test_lines_are_of_each_domain_and_of_their_mean():
    scores = mask_scores(framed(*sweep()))
    lines = by_weight(scores, "out_of_domain").set_index(["test_domain", "weight"])
    assert lines["mean"]["average", 1.0] == pytest.approx(69)
    assert len(lines) == 9
    half = lines.high - lines["mean"]
    assert half["sketch", 0.1] == pytest.approx(4.3027 / math.sqrt(3), 1e-4)  # 2 degrees of freedom
    # two domains of variance 1: half of sqrt(1/3 + 1/3), with 4 degrees of freedom
    assert half["average", 0.1] == pytest.approx(2.7764 * math.sqrt(2 / 3) / 2, 1e-4)
    one = by_weight(scores[scores.trial_seed == 0], "iou")
    assert one.low.isna().all()
    assert set(one.seeds) == {1}


def test_neurons_are_useless_shared_or_specific():
    first, last = place_scores(framed(run("photo", 0, 0.1, APART))).to_dict("records")
    names = ("useless", "one", "some", "shared")
    assert [first[n] for n in names] == [0, 0, 0, 100]
    assert first["place"] == "first"
    assert [last[n] for n in names] == [25, 50, 0, 25]
    assert last["iou"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3, abs=1e-4)
    two = run("photo", 0, 0.1, [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    assert place_scores(framed(two)).iloc[1][list(names)].tolist() == [25, 25, 25, 25]


def test_shares_agree_with_counting_for_two_and_three_domains_and_are_not_made_up_for_four():
    random = np.random.default_rng(0)
    for domains in (2, 3, 4):
        masks = (random.random((domains, 40)) < 0.6).astype(int)
        made = run("photo", 0, 0.1)
        made["masks"]["places"] = {"fc": kept(masks.tolist())}
        row, users = place_scores(framed(made)).iloc[0], masks.sum(0)
        assert row.useless == pytest.approx(100 * (users == 0).mean(), abs=0.05)
        assert row.one == pytest.approx(100 * (users == 1).mean(), abs=0.05)
        if domains == 4:
            assert math.isnan(row.shared)
            assert math.isnan(row.some)
        else:
            shared = (users == domains).mean()
            assert row.shared == pytest.approx(100 * shared, abs=0.05)
            assert row.some == pytest.approx(100 * ((users > 1).mean() - shared), abs=0.05)


def test_counted_users_tell_the_kinds_of_five_domains():
    masks = [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0], *[[1, 1, 0, 0, 0, 0, 0, 0]] * 3]
    new = run("photo", 0, 0.1)
    new["masks"]["places"] = {"fc": kept(masks) | {"users": [4, 2, 0, 0, 0, 2]}}
    names = ["shared", "some", "one", "useless"]
    assert kind_table(place_scores(framed(new)))[names].iloc[0].tolist() == [25, 0, 25, 50]


def test_kinds_are_means_over_runs_with_places_in_order():
    table = kind_table(place_scores(framed(*sweep())))
    assert table.place.tolist() == ["first"] * 3 + ["last"] * 3
    assert table.weight.tolist() == [0, 0.1, 1] * 2
    assert table.iloc[-1][["shared", "some", "one", "useless"]].tolist() == [25, 0, 50, 25]


def test_pairs_at_the_end_and_through_training():
    frame = framed(run("photo", 0, 0.1, APART))
    ends = pair_scores(frame)
    assert ends.pair.tolist() == ["negative & plain", "negative & sketch", "plain & sketch"]
    assert ends.iou.tolist() == [0.7143, 0.8333, 0.8333]
    curves = pair_curves(frame)
    assert len(curves) == 6
    assert set(curves.epoch) == {2, 4}
    first = curves[curves.pair == "negative & plain"].set_index("epoch").iou
    assert first[4] == 0.7143
    assert first[2] == pytest.approx((1 + 0.7143) / 2)


# Sentences


def test_the_gain_of_the_right_mask_by_hand():
    gains = own_mask_gain(framed(*(run("photo", s, 0.1, own=0.8 + s / 100) for s in range(3))))
    assert gains.gain.tolist() == pytest.approx([0, 1, 2])
    assert gains.trained.all()
    # a mean of 1 with a standard error of 1 / sqrt(3), and 4.30 of them
    line = own_mask_line(gains)
    assert NUMBERS.findall(line) == ["+1.00", "-1.48", "+3.48"]
    assert line.endswith("undecided (3 runs, 3 trial seeds).")
    wide = framed(*(run("photo", s, 0.1, own=0.94 + s / 100) for s in range(3)))
    line = own_mask_line(own_mask_gain(wide))
    assert NUMBERS.findall(line) == ["+15.00", "+12.52", "+17.48"]
    assert "points, significant" in line
    assert "(one seed)" in own_mask_line(gains[:1])
    assert "(1 runs" in own_mask_line(gains[:1])
    assert own_mask_line(gains[:0]).startswith("No verdict on")


def test_what_masks_of_undertrained_networks_do_is_stated_with_the_caveat():
    runs = [run("photo", s, 0.1, own=0.94 + s / 100) for s in range(3)]
    runs[0]["selected"]["pred-ens"]["validation_accuracy"] = (
        0.799  # of ten classes, 80 % is trained
    )
    frame = framed(*runs)
    assert own_mask_gain(frame).trained.tolist() == [False, True, True]
    line = own_mask_line(own_mask_gain(frame))
    assert "+15.00" in line
    assert line.endswith("networks are undertrained.")
    assert "1 of 3" in line
    assert overlap_line(frame).endswith("networks are undertrained.")
    assert "caution: 1 of" in overlap_line(frame)


def test_a_change_is_paired_and_has_its_own_variance():
    scores = mask_scores(framed(*sweep()))
    base, others = scores[scores.weight == 0], scores[scores.weight > 0]
    shift = {(0.1, s): 0.1 * s for s in range(3)} | {(1.0, s): s - 1 for s in range(3)}
    moved = [shift[w, s] for w, s in zip(others.weight, others.trial_seed)]
    table = weight_changes(
        others.assign(out_of_domain=others.out_of_domain + moved), "out_of_domain", base
    ).set_index("weight")
    assert table["mean"].tolist() == pytest.approx([0.1, -2])
    # two domains, each of variance s^2: half of sqrt(2 s^2 / 3), 4 degrees of freedom
    half = 2.7764 * np.array([0.1, 1]) * math.sqrt(2 / 3) / 2
    assert (table.high - table["mean"]).tolist() == pytest.approx(half.tolist(), rel=1e-4)
    assert table.significant.tolist() == [False, True]
    assert set(table.pairs) == {6}
    line = change_line(table.reset_index(), "Accuracy", "that at 0", "lambda_o")
    decided, open_ = line.split(" It is ")
    assert decided.startswith("Accuracy differs significantly")
    assert "lambda_o = 1:" in decided
    assert NUMBERS.findall(decided) == ["-2.0", "-3.1", "-0.9"]
    assert open_.startswith("undecided")
    assert "lambda_o = 0.1:" in open_
    assert NUMBERS.findall(open_) == ["+0.1", "-0.0", "+0.2"]
    alone = weight_changes(others[others.trial_seed == 0], "out_of_domain", base)
    line = change_line(alone, "x", "y", "lambda_o")
    assert line.startswith("x has no")
    assert "0.1: +0.0" in line
    assert "1: -2.0" in line
    assert line.count("(one seed)") == 2
    none = weight_changes(others, "out_of_domain", base.assign(trial_seed=base.trial_seed + 9))
    assert "no two runs" in change_line(none, "x", "y", "lambda_o")


def test_masks_that_all_keep_everything_do_not_differ():
    apart = overlap_line(framed(*(spread(run("photo", s, 0.1, APART)) for s in range(2))))
    assert "domains differ:" in apart
    assert "IoU is 0.79" in apart
    assert "71 % of" in apart
    assert "(2 runs)" in apart
    same = overlap_line(framed(*(run("photo", s, 0.1) for s in range(2))))
    assert "not shown to" in same
    assert overlap_line(framed()).startswith("No verdict")


def test_only_sparse_masks_that_keep_something_say_whether_they_are_alike():
    scores = mask_scores(framed(*sweep((0.0, 0.01, 0.1, 1.0), knob="lambda_s")), "lambda_s")
    assert "at no weight" in sparse_line(scores)
    kept, iou = {0.01: 2.0, 0.1: 9.0, 1.0: 0.0}, {0.01: 0.13, 0.1: 0.6, 1.0: 1.0}
    thin = scores.assign(
        kept=scores.weight.map(kept).fillna(90.0),
        iou=scores.weight.map(iou).fillna(0.9),
        empty=50.0 * (scores.weight == 1),
    )
    line = sparse_line(thin)
    assert "are not alike:" in line
    found = re.findall(r"IoU ([\d.]+) at lambda_s = ([\d.]+),[^;]* (\d+) %", line)
    assert found == [("0.13", "0.01", "2"), ("0.60", "0.1", "9")]
    assert line.split("; ")[2].startswith("at 1 some")
    assert "are alike" in sparse_line(thin[thin.weight != 0.01])
    assert "are inconclusive" in sparse_line(thin[thin.weight == 1])


def test_the_table_has_intervals_and_departures_name_missing_weights():
    scores = mask_scores(framed(*sweep()))
    table = weight_table(scores).set_index("lambda_o")
    assert table["target, %"]["1"] == "69.0 ± 1.1"
    assert table.runs["1"] == 6
    assert table["own mask − others"]["0"] == "10.00 ± 0.00"
    assert weight_table(scores[scores.trial_seed == 0])["target, %"][0] == "70.0"
    missing = weight_diff(scores, "paper-dmg-overlap", "lambda_o")
    (absent,) = (line.removeprefix("lambda_o: not run: ").split(", ") for line in missing)
    assert absent == ["1e-05", "0.0001", "0.001", "0.01"]
    everything = pd.DataFrame({"weight": [0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1]})
    assert weight_diff(everything, "paper-dmg-sparsity", "lambda_s") == []


# Pictures


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_weights_are_categories_the_first_of_which_may_be_zero():
    scores = mask_scores(framed(*sweep()))
    axis = draw_sensitivity(scores, {"iou": "IoU"}, "lambda_o").axes[0]
    (drawn,) = axis.containers
    line = by_weight(scores, "iou").query("test_domain == 'average'")
    assert drawn.lines[0].get_ydata().tolist() == line["mean"].tolist()
    ends = [part[:, 1].tolist() for part in drawn.lines[2][0].get_segments()]
    assert np.ravel(ends) == pytest.approx(line[["low", "high"]].to_numpy().ravel())
    names = [f"{weight:g}" for weight in line.weight]
    assert [label.get_text() for label in axis.get_xticklabels()] == names


def test_accuracies_share_an_axis_and_empty_masks_are_hollow():
    scores = mask_scores(framed(*sweep()))
    panels = {"out_of_domain": "a", "in_domain": "b", "iou": "c"}
    figure = draw_sensitivity(scores, panels, "lambda_o", {"iou": 0.5})
    a, b, c = figure.axes
    assert a.get_ylim() == b.get_ylim() != c.get_ylim()
    means = by_weight(scores, "out_of_domain")["mean"]
    assert a.get_ylim()[0] < means.min()
    assert a.get_ylim()[1] > means.max()
    dashed = [line for line in c.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [0.5]
    bare = draw_sensitivity(scores.assign(empty=10.0 * (scores.weight == 1)), panels, "lambda_o")
    hollow = [x for x in bare.axes[2].lines if x.get_markerfacecolor() == "white"]
    assert [x.get_xdata().tolist() for x in hollow] == [[2]]


def test_masks_are_ordered_by_who_keeps_a_neuron():
    assert ordered_masks(APART).tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]
    assert ordered_masks([[0, 0, 1], [0, 1, 1]]).tolist() == [[1, 0, 0], [1, 1, 0]]


# Studies and pages


def test_the_papers_sweeps_are_files_that_differ_in_the_weights_alone():
    overlap, sparsity = (read_study(f"paper-dmg-{name}") for name in ("overlap", "sparsity"))
    assert count_runs("paper-dmg-overlap") == count_runs("paper-dmg-sparsity") == 7 * 6
    ours, usual = overlap.runs[0], read_study("paper-dmg-domainnet").runs[0]
    common = ours.settings("DMG", {}) | {"lambda_o": 0.1}
    assert common == usual.settings("DMG", {"lambda_o": 0.1})
    assert sparsity.runs[0].settings("DMG", {"lambda_o": 0.1}) == common
    for name in ("network", "epochs", "splits", "resolution", "test_domains", "protocol", "seeds"):
        assert getattr(ours, name) == getattr(usual, name) == getattr(sparsity.runs[0], name)


def test_a_page_names_its_study_and_the_one_beside_it():
    found = [artefact_study("dmg_fig4", p) for p in ("smoke", "quick", "pacs", "paper")]
    assert found == ["smoke-dmg", "quick-dmg", "pacs-dmg", "paper-dmg-overlap"]
    assert artefact_study("dmg_fig3", "quick") == "quick-dmg-overlap"
    assert artefact_studies("dmg_fig6", "quick") == ["quick-dmg-overlap", "quick-dmg-sparsity"]


def write(folder, study, records, arrays=False):
    "A study's file, and the masks of its runs with the seed 0."
    invented.write_study(folder, study, records)
    for record in records if arrays else ():
        if record["config"]["trial_seed"] == 0:
            kept_by = np.ones((3, 8), np.float16)
            stored = {"masks": kept_by, "mask_sizes": np.array([4, 4], np.int16)}
            invented.write_arrays(folder / study, record["run_id"], stored)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dmg_fig4", "dmg_fig5")]
pages = pytest.mark.parametrize("name", ["dmg_fig3", "dmg_fig6", *SLOW])
MADE = {
    "dmg_fig3": {"dmg_fig3.csv", "dmg_fig3.png"},
    "dmg_fig4": {"dmg_fig4.csv", "dmg_fig4.png", "dmg_fig4_training.png", "dmg_fig4_masks.png"},
    "dmg_fig5": {"dmg_fig5.csv", "dmg_fig5.png", "dmg_fig5_neurons.csv", "dmg_fig5_neurons.png"},
    "dmg_fig6": {"dmg_fig6.csv", "dmg_fig6.png"},
}
SAID = {
    "dmg_fig3": (
        "lambda_o = 1: -2.0 (95 % CI -2.0 to -2.0)",
        "The IoU of two masks differs significantly from that at lambda_o = 0, at lambda_o = 1: "
        "-0.21",
        "significantly from the mean under the others, at lambda_o = 0: +10.0",
    ),
    "dmg_fig4": ("mean IoU is 1.00", "| 48.70 |", "Masks of two domains are not shown to differ"),
    "dmg_fig5": (
        "(last) differs significantly from that at lambda_o = 0, at lambda_o = 1: -0.56",
        "not run: 1e-05",
    ),
    "dmg_fig6": (
        "differs significantly from that of DMG with lambda_o = 0.1, at lambda_s = 1: -2.0",
        "Sparse masks: at no weight",
    ),
}


@pytest.mark.usefixtures("warm_kernels")
@pages
def test_a_page_of_invented_runs(name, tmp_path):
    store = tmp_path / "store"
    write(store, "quick-dmg-overlap", sweep())
    write(store, "quick-dmg", sweep(), arrays=True)
    write(store, "quick-dmg-sparsity", sweep((0.0, 1.0), knob="lambda_s"))
    page = render(name, "quick", store=store, output=tmp_path / "out")
    made = {file.name for file in page.parent.iterdir()}
    assert MADE[name] <= made
    text = page.read_text()
    assert "image_cnn instead of" in text
    assert "near_zero: False instead" in text
    assert "as DomainBed does" in text
    for said in SAID[name]:
        assert said in text, said


@pytest.mark.usefixtures("warm_kernels")
@pages
def test_a_page_without_any_record(name, tmp_path):
    (tmp_path / "store").mkdir()
    page = render(name, "paper", store=tmp_path / "store", output=tmp_path / "out")
    text = page.read_text()
    assert re.search("no records of.*`paper-dmg-", text)
    assert "Not run: `paper-dmg-" in text
    assert "42 runs" in text
    assert not [file for file in page.parent.iterdir() if file.suffix == ".png"]
