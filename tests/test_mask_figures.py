"""DMG's figures: scores of masks with numbers by hand, axes with a zero, sentences, and pages of
invented records, of few, and of none."""

import math

import invented
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from hmoe_repro.analysis.mask_plots import (
    draw_kinds,
    draw_masks,
    draw_pair_curves,
    draw_pairs,
    draw_places,
    draw_sensitivity,
    ordered_masks,
    plot_line,
    weight_axis,
    weight_places,
)
from hmoe_repro.analysis.mask_scores import (
    against_reference,
    alike_line,
    by_weight,
    fall_line,
    gain_lines,
    kind_table,
    mask_scores,
    order_lines,
    over_seeds,
    pair_curves,
    pair_lines,
    pair_scores,
    paired_weights,
    place_scores,
    range_line,
    reference_line,
    sparsity_line,
    weight_diff,
    weight_table,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.report.render import render
from hmoe_repro.studies.artefacts import artefact_studies, artefact_study
from hmoe_repro.studies.studies import count_runs
from hmoe_repro.studies.study_file import read_study
from hmoe_repro.training.run_config import RunSpec

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
    who = ("DMG", "DigitDomains", "0", (target,), seed)
    more = {"network": "image_cnn", "resolution": 16, "steps": 40, "protocol": "dmg"}
    spec = RunSpec(*who, hparams=hparams, **more)
    both = kept([a + b for a, b in zip(ALL, last)])
    losses = {f"iou_{p}": v for p, v in zip(("0_1", "0_2", "1_2"), both["iou"])}
    halfway = {p: (1 + v) / 2 for p, v in losses.items()}
    by_mask = {d: [own if i == j else 0.8 for j in range(3)] for i, d in enumerate(sources)}
    accuracy = {d: {"split": "test", "images": 9, "by_mask": row} for d, row in by_mask.items()}
    accuracy[target] = {"split": "in", "images": 45, "by_mask": [0.5] * 3}
    chosen = {"step": 39, "validation_accuracy": 0.9}
    return {
        "run_id": spec.run_id,
        "record_version": 1,
        "status": "complete",
        "reason": None,
        "spec": spec.to_dict(),
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
        run(t, s, w, APART if w == 1 else ALL, 0.7 + s / 100 - 0.02 * (w == 1), **{knob: w})
        for w in weights
        for t in targets
        for s in seeds
    ]


# Frames


def test_a_row_holds_what_a_run_measured_in_percent():
    scores = mask_scores([run("photo", 3, 0.1, APART, 0.625, 0.875, 0.95)])
    (row,) = scores.to_dict("records")
    assert (row["weight"], row["test_domain"], row["trial_seed"]) == (0.1, "photo", 3)
    assert (row["out_of_domain"], row["in_domain"], row["known_domain"]) == (62.5, 87.5, 95.0)
    assert row["gain"] == pytest.approx(15)  # 0.95 on the own domain, 0.8 elsewhere
    overall = kept([a + b for a, b in zip(ALL, APART)])
    assert overall["iou"] == [0.7143, 0.8333, 0.8333]  # 5/7, 5/6, 5/6
    assert row["iou"] == pytest.approx((5 / 7 + 5 / 6 + 5 / 6) / 3, abs=1e-4)
    assert row["kept"] == pytest.approx(100 * (6 + 6 + 5) / 24, abs=0.01) and row["empty"] == 0


def test_empty_masks_and_missing_measures_are_told():
    empty = run("photo", 0, 1.0, NONE)
    empty["masks"]["overall"] = kept(NONE)
    del empty["in_domain"]
    for measured in empty["masks"]["accuracy"].values():
        measured["split"] = "out"
    (row,) = mask_scores([empty]).to_dict("records")
    assert row["empty"] == 100 and row["iou"] == 1 and row["kept"] == 0
    assert all(math.isnan(row[name]) for name in ("in_domain", "known_domain", "gain"))


def test_other_runs_are_left_out_and_two_of_a_cell_refused():
    failed = run("photo", 1, 0.1) | {"status": "failed"}
    plain = {name: v for name, v in run("photo", 2, 0.1).items() if name != "masks"}
    assert len(mask_scores([run("photo", 0, 0.1), failed, plain])) == 1
    assert mask_scores([]).empty and place_scores([]).empty and pair_scores([]).empty
    twice = [run("photo", 0, 0.1), run("photo", 0, 0.1, mask_lr=1.0)]
    with pytest.raises(HmoeError, match="two runs have lambda_o 0.1, test domain photo and seed 0"):
        mask_scores(twice)


def test_a_mean_is_over_domains_and_its_error_over_whole_seeds():
    frame = pd.DataFrame(
        [("photo", 0, 1.0), ("sketch", 0, 3.0), ("photo", 1, 3.0), ("sketch", 1, 5.0)]
        + [("photo", 2, 5.0)],
        columns=["test_domain", "trial_seed", "x"],
    )
    mean, error, n = over_seeds(frame, "x")
    assert mean == pytest.approx((3 + 4) / 2)  # of photo 3, of sketch 4
    # seeds 2 and 4: a standard error of 1, and 12.7 of them make 95 % of two values
    assert (error, n) == (pytest.approx(12.706), 2)
    one = over_seeds(frame[frame.trial_seed == 0], "x")
    assert one[0] == 2 and math.isnan(one[1]) and one[2] == 1


def test_lines_are_of_each_domain_and_of_their_mean():
    lines = by_weight(mask_scores(sweep()), "out_of_domain").set_index(["test_domain", "weight"])
    assert lines["mean"]["average", 1.0] == pytest.approx(69)
    assert lines["mean"]["photo", 0.0] == pytest.approx(71)
    assert lines.errors["sketch", 0.1] == pytest.approx(4.303 / math.sqrt(3)) and len(lines) == 9


def test_neurons_are_useless_shared_or_specific():
    first, last = place_scores([run("photo", 0, 0.1, APART)]).to_dict("records")
    names = ("useless", "one", "some", "shared")
    assert [first[n] for n in names] == [0, 0, 0, 100] and first["place"] == "first"
    assert [last[n] for n in names] == [25, 50, 0, 25]
    assert last["iou"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3, abs=1e-4)
    pair = place_scores([run("photo", 0, 0.1, [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])])
    assert pair.iloc[1][list(names)].tolist() == [25, 25, 25, 25]


def test_shares_agree_with_counting_for_two_and_three_domains_and_are_not_made_up_for_four():
    random = np.random.default_rng(0)
    for domains in (2, 3, 4):
        masks = (random.random((domains, 40)) < 0.6).astype(int)
        made = run("photo", 0, 0.1)
        made["masks"]["places"] = {"fc": kept(masks.tolist())}
        row = place_scores([made]).iloc[0]
        users = masks.sum(0)
        assert row.useless == pytest.approx(100 * (users == 0).mean(), abs=0.05)
        assert row.one == pytest.approx(100 * (users == 1).mean(), abs=0.05)
        several = (users > 1).mean()
        if domains < 4:
            assert row.shared == pytest.approx(100 * (users == domains).mean(), abs=0.05)
            several = several - (users == domains).mean()
        else:
            assert math.isnan(row.shared) and "shared" not in kind_table(place_scores([made]))
        assert row.some == pytest.approx(100 * several, abs=0.05)


def test_counted_users_tell_the_kinds_of_five_domains():
    "New records count them; beside an older one, which does not, nothing is made up."
    masks = [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0], *[[1, 1, 0, 0, 0, 0, 0, 0]] * 3]
    place, old = kept(masks), run("photo", 1, 0.1)
    old["masks"]["places"] = {"fc": place}
    new = run("photo", 0, 0.1)
    new["masks"]["places"] = {"fc": place | {"users": [4, 2, 0, 0, 0, 2]}}
    names = ["shared", "some", "one", "useless"]
    assert kind_table(place_scores([new]))[names].iloc[0].tolist() == [25, 0, 25, 50]
    both = kind_table(place_scores([new, old]))
    assert "shared" not in both and both[names[1:]].iloc[0].tolist() == [25, 25, 50]
    three = kept(APART)
    exact = {"useless": 25, "one": 50, "some": 0, "shared": 25}
    for counted in (three, three | {"users": [1, 2, 0, 1]}):
        new["masks"]["places"] = {"fc": counted}
        assert place_scores([new]).iloc[0][list(exact)].to_dict() == exact


def test_kinds_are_means_over_runs_with_places_in_order():
    table = kind_table(place_scores(sweep()))
    assert table.place.tolist() == ["first"] * 3 + ["last"] * 3
    assert table.weight.tolist() == [0, 0.1, 1] * 2
    assert table.iloc[-1][["shared", "some", "one", "useless"]].tolist() == [25, 0, 50, 25]


def test_pairs_at_the_end_and_through_training():
    records = [run("photo", 0, 0.1, APART)]
    ends = pair_scores(records)
    assert ends.pair.tolist() == ["negative & plain", "negative & sketch", "plain & sketch"]
    assert ends.iou.tolist() == [0.7143, 0.8333, 0.8333]
    curves = pair_curves(records)
    assert len(curves) == 6 and set(curves.epoch) == {2, 4}  # `iou_fc` is of a place
    first = curves[curves.pair == "negative & plain"].set_index("epoch").iou
    assert first[4] == 0.7143 and first[2] == pytest.approx((1 + 0.7143) / 2)


# Sentences


def test_the_overlap_of_the_last_place_falls_by_as_much_as_was_wanted():
    places = place_scores(sweep())
    falls = paired_weights(places[places.place == "last"], "iou", 0.0, 1.0)
    assert len(falls) == 6 and np.allclose(falls.difference, 1 - 4 / 9, atol=1e-4)
    line = fall_line(places)
    assert "(last) is 0.56 lower than at 0" in line and line.endswith("interval included.")
    assert "95 % CI ± 0.00 over 3 trial seeds; 6 pairs" in line
    alone = fall_line(place_scores(sweep(seeds=(0,))))
    assert alone.endswith("(one trial seed, no interval).") and "at least the required 0.2" in alone
    assert fall_line(places[places.weight < 1]).startswith("No verdict on the overlap")
    assert fall_line(place_scores([])).startswith("No verdict on the overlap")


@pytest.mark.parametrize(
    "falls, said",
    [
        ((0.24, 0.25, 0.26), "at least the required 0.2, interval included."),
        ((0.10, 0.25, 0.40), "the required 0.2 lies within the interval."),
        ((0.10, 0.11, 0.12), "less than the required 0.2."),
    ],
)
def test_a_fall_is_judged_with_its_interval(falls, said):
    rows = [(w, "photo", s, "fc", 1 - f * w) for s, f in enumerate(falls) for w in (0.0, 1.0)]
    columns = ["weight", "test_domain", "trial_seed", "place", "iou"]
    assert fall_line(pd.DataFrame(rows, columns=columns)).endswith(said)


def test_the_range_of_means_is_judged_by_the_spread_of_seeds():
    scores = mask_scores(sweep())
    # averages per seed: 70, 71, 72 and at the weight 1 two less: variance 1 with 6 degrees of
    # freedom, 2.447 sqrt(2 / 3) = 1.998
    line = range_line(scores, "out_of_domain", "On the target")
    assert "highest at 0 (71.0) and lowest at 1 (69.0), 2.0 points apart" in line
    assert line.endswith(
        ": more than the 2.0 detectable between two weights chosen in advance, "
        "but these two are the extremes of 3."
    )
    slightly = scores.assign(out_of_domain=scores.out_of_domain + 0.3 * (scores.weight == 1))
    assert ": within the 2.0 detectable" in range_line(slightly, "out_of_domain", "x")
    near = scores.assign(out_of_domain=scores.out_of_domain + 1 * (scores.weight == 1))
    assert ": within the 2.0 detectable" in range_line(near, "out_of_domain", "x")
    same = "On the training domains: the mean is the same at all weights."
    assert range_line(scores, "in_domain", "On the training domains") == same
    gone = scores.assign(in_domain=math.nan)
    assert "no verdict" in range_line(gone, "in_domain", "In domain")
    alone = range_line(mask_scores(sweep(seeds=(0,))), "out_of_domain", "x")
    assert alone.endswith("(one seed: seed noise is unknown).")


def test_the_right_mask_is_judged_at_each_weight():
    records = [run("photo", s, w, own=0.8 + 0.1 * w) for w in (0.0, 1.0) for s in range(3)]
    low, high = gain_lines(records)
    assert low.startswith("lambda_o = 0: ") and "+0.00 points" in low
    assert "not significantly specialised" in low
    assert "+10.00 points" in high and high.endswith("masks are specialised here.")
    assert gain_lines([]) == []


def test_places_are_named_in_the_order_of_their_overlap():
    lines = order_lines(place_scores(sweep()))
    assert lines[-1] == "At 1: first 1.00 > last 0.44; each later place overlaps less."
    assert lines[0].endswith("not in the order of the network.")


def test_masks_that_all_keep_everything_do_not_differ():
    apart = pair_lines([run("photo", s, 0.1, APART) for s in range(2)])
    assert apart[1] == (
        "Target photo: negative & sketch 0.83, plain & sketch 0.83, negative & plain 0.71."
    )
    assert "Mean IoU 0.794 ± 0.000" in apart[0] and apart[0].endswith("masks differ.")
    assert "keeps 71 % of the neurons" in apart[0]
    young = [run("photo", s, 0.1, APART) for s in range(2)]
    for mode in (mode for record in young for mode in record["selected"].values()):
        mode["validation_accuracy"] = 0.5
    assert pair_lines(young)[0].endswith("masks differ; these networks are undertrained.")
    same = pair_lines([run("photo", s, 0.1) for s in range(2)])
    assert same[0].endswith("masks are not shown to differ.")
    assert pair_lines([]) == ["No verdict on the masks: no complete run has any."]


def test_sparsity_is_set_beside_the_usual_penalty_in_pairs():
    scores = mask_scores(sweep((0.0, 1.0), knob="lambda_s"), "lambda_s")
    usual = mask_scores(sweep((0.1,)))
    rows = against_reference(scores, usual, "out_of_domain").set_index("weight")
    assert np.allclose(rows["mean"], [0, -2]) and np.allclose(rows.errors, 0)
    line = reference_line(scores, usual, "out_of_domain", "On the target")
    assert "worse at lambda_S = 1 (-2.0 ± 0.0); not significantly worse at 0 (0.0 ± 0.0)" in line
    assert "no seeds pair" in reference_line(scores, usual[:0], "out_of_domain", "x")
    said = sparsity_line(scores)
    assert said.startswith("The overlap is lowest at lambda_S = 1 (IoU 0.79") and "71 %" in said
    bare = scores.assign(empty=50.0 * (scores.weight == 1))
    assert sparsity_line(bare).endswith("50 % of masks keep nothing, and two such overlap fully.")
    assert sparsity_line(scores[:3]).startswith("No verdict")


def test_only_sparse_masks_that_keep_something_say_whether_they_are_alike():
    scores = mask_scores(sweep((0.0, 0.01, 0.1, 1.0), knob="lambda_s"), "lambda_s")
    assert alike_line(scores).startswith("Sparse and alike: at no weight do masks keep less than")
    kept, iou = {0.01: 2.0, 0.1: 9.0, 1.0: 0.0}, {0.01: 0.13, 0.1: 0.6, 1.0: 1.0}
    thin = scores.assign(
        kept=scores.weight.map(kept).fillna(90.0),
        iou=scores.weight.map(iou).fillna(0.9),
        empty=50.0 * (scores.weight == 1),
    )
    assert alike_line(thin) == (
        "Sparse and alike: at 0.01 they keep 2 % and are not alike (IoU 0.13); at 0.1 they keep "
        "9 % and are alike (IoU 0.60); at 1 some or all keep nothing, and an IoU of empty masks is "
        "a convention."
    )


def test_the_table_has_intervals_and_departures_name_missing_weights():
    table = weight_table(mask_scores(sweep())).set_index("lambda_o")
    assert table["target, %"]["1"] == f"69.0 ± {4.303 / math.sqrt(3):.1f}" and table.runs["1"] == 6
    assert table["own mask − others"]["0"] == "10.00 ± 0.00"
    assert weight_table(mask_scores(sweep(seeds=(0,))))["target, %"][0] == "70.0"
    missing = weight_diff(mask_scores(sweep()), "paper-dmg-overlap", "lambda_o")
    assert missing == ["lambda_o: not run: 1e-05, 0.0001, 0.001, 0.01"]
    everything = pd.DataFrame({"weight": [0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1]})
    assert weight_diff(everything, "paper-dmg-sparsity", "lambda_s") == []


# Pictures


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_zero_stands_beside_the_axis_and_no_line_leads_to_it():
    assert weight_places([1, 0, 0.01]) == {0: -3, 0.01: -2, 1: 0}
    assert weight_places([0.0]) == {0.0: 0.0}
    axis = plt.figure().add_subplot()
    plot_line(axis, [0, 0.01, 1], [5, 6, 7], [1, math.nan, 1], label="x")
    drawn = sorted(line.lines[0].get_xdata().tolist() for line in axis.containers)
    assert drawn == [[-3.0], [-2.0, 0.0]]
    assert [line.get_label() for line in axis.containers].count("x") == 1
    weight_axis(axis, [0, 0.01, 0.03, 1], "weight")
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert labels == ["0", "$10^{-2}$", "0.03", "$10^{0}$"]


def test_accuracies_share_an_axis_and_empty_masks_are_hollow():
    scores = mask_scores(sweep())
    panels = {"out_of_domain": "a", "in_domain": "b", "iou": "c"}
    figure = draw_sensitivity(scores, panels, "lambda_o", {"iou": 0.5})
    a, b, c, hidden = figure.axes
    assert a.get_ylim() == b.get_ylim() != c.get_ylim() and not hidden.get_visible()
    assert a.get_ylim()[0] < 67 and a.get_ylim()[1] > 90
    dashed = [line for line in c.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [0.5]
    bare = draw_sensitivity(scores.assign(empty=10.0 * (scores.weight == 1)), panels, "lambda_o")
    hollow = [x for x in bare.axes[2].lines if x.get_markerfacecolor() == "white"]
    assert [x.get_xdata().tolist() for x in hollow] == [[0.0]]


def test_places_and_kinds_have_a_panel_each():
    places = place_scores(sweep())
    titles = [a.get_title() for a in draw_places(places).axes if a.get_visible()]
    assert titles == ["mean of all targets", "target photo", "target sketch"]
    figure = draw_kinds(places)
    assert [axis.get_title() for axis in figure.axes] == ["first", "last"]
    bars = [bar.get_height() for bar in figure.axes[1].patches]
    assert bars == [100, 100, 25, 0, 0, 0, 0, 0, 50, 0, 0, 25]


def test_pairs_have_a_bar_each_and_one_for_their_mean_and_for_the_neurons():
    records = [run("photo", s, 0.1, APART) for s in range(2)]
    (axis,) = draw_pairs(pair_scores(records), mask_scores(records)).axes
    widths = [bar.get_width() for bar in axis.patches]
    assert widths == pytest.approx([0.7143, 0.8333, 0.8333, 0.7936, 17 / 24], abs=1e-3)
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names[-2:] == ["all pairs", "neurons kept"]
    (axis,) = draw_pair_curves(pair_curves(records)).axes
    assert len(axis.lines) == 3 and axis.lines[0].get_xdata().tolist() == [2, 4]


def test_masks_are_drawn_by_who_keeps_a_neuron():
    assert ordered_masks(APART).tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]
    assert ordered_masks([[0, 0, 1], [0, 1, 1]]).tolist() == [[1, 0, 0], [1, 1, 0]]
    record = run("photo", 0, 0.1, APART)
    real = np.array([a + b for a, b in zip(ALL, APART)]) - 0.5
    arrays = {"masks": real.astype(np.float16), "mask_sizes": np.array([4, 4])}
    first, last = draw_masks(record, arrays).axes
    assert np.array_equal(last.images[0].get_array(), APART) and first.images[0].get_array().all()
    assert last.get_title(loc="left") == "last: 4 neurons"
    with pytest.raises(HmoeError, match="stored no masks. Fix: "):
        draw_masks(record, {})


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
        if record["spec"]["trial_seed"] == 0:
            (folder / study).mkdir(exist_ok=True)
            kept_by = np.ones((3, 8), np.float16)
            stored = {"masks": kept_by, "mask_sizes": np.array([4, 4], np.int16)}
            save_file(stored, folder / study / f"{record['run_id']}.safetensors")


PAGES = ("dmg_fig3", "dmg_fig4", "dmg_fig5", "dmg_fig6")
MADE = {
    "dmg_fig3": {"dmg_fig3.csv", "dmg_fig3.png"},
    "dmg_fig4": {"dmg_fig4.csv", "dmg_fig4.png", "dmg_fig4_training.png", "dmg_fig4_masks.png"},
    "dmg_fig5": {"dmg_fig5.csv", "dmg_fig5.png", "dmg_fig5_neurons.csv", "dmg_fig5_neurons.png"},
    "dmg_fig6": {"dmg_fig6.csv", "dmg_fig6.png"},
}
SAID = {
    "dmg_fig3": ("2.0 points apart", "(last) is 0.56 lower", "lambda_o = 1: On its own domain"),
    "dmg_fig4": ("Mean IoU 1.000 ± 0.000", "| 48.70 |", "masks are not shown to differ"),
    "dmg_fig5": ("(last) is 0.56 lower", "first 1.00 &gt; last 0.44", "lambda_o: not run: 1e-05"),
    "dmg_fig6": (
        "worse at lambda_S = 1 (-2.0 ± 0.0)",
        "masks keep 70.8 % of neurons",
        "Sparse and alike: at no weight",
    ),
}


@pytest.mark.usefixtures("warm_kernels")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_invented_runs(name, tmp_path):
    store = tmp_path / "store"
    write(store, "quick-dmg-overlap", sweep())
    write(store, "quick-dmg", sweep(), arrays=True)
    write(store, "quick-dmg-sparsity", sweep((0.0, 1.0), knob="lambda_s"))
    page = render(name, "quick", store=store, output=tmp_path / "out")
    made = {file.name for file in page.parent.iterdir()}
    assert MADE[name] <= made
    text = page.read_text().replace(" > ", " &gt; ")
    assert "network: image_cnn instead of alexnet" in text
    assert "near_zero: False instead of True" in text and "as DomainBed does" in text
    for said in SAID[name]:
        assert said in text, said


@pytest.mark.usefixtures("warm_kernels")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_any_record(name, tmp_path):
    (tmp_path / "store").mkdir()
    page = render(name, "paper", store=tmp_path / "store", output=tmp_path / "out")
    text = page.read_text()
    assert "Not run: there are no records of study `paper-dmg-" in text
    assert "Not run: `paper-dmg-" in text and "42 runs" in text
    assert not [file for file in page.parent.iterdir() if file.suffix == ".png"]
