"""Tables, their errors and their verdicts by hand."""

import math

import invented
import matplotlib.pyplot as plt
import numpy as np
import pytest

from hmoe_repro.analysis.clusters import highest_nmi
from hmoe_repro.analysis.statistics import (
    accuracy_verdict,
    minimum_detectable_difference,
    paired_difference,
    plot_results,
    row_places,
)
from hmoe_repro.analysis.tables import (
    accuracy_table,
    cell_statistics,
    row_name,
    run_results,
    table_notes,
)
from hmoe_repro.core.errors import HmoeError


@pytest.fixture
def miniature():
    return invented.miniature()


def test_cells_are_the_means_and_errors_of_the_protocol(miniature):
    cells = cell_statistics(run_results(miniature)).set_index(["algorithm", "mode", "test_domain"])
    photo = cells.loc[("HMOE-DN", "mix", "photo")]
    assert photo["mean"] == pytest.approx(70) and photo.n == 3
    assert photo.stderr == pytest.approx(
        100 * math.sqrt(((0.1) ** 2 + 0.05**2 + 0.05**2) / 3) / math.sqrt(3)
    )
    average = cells.loc[("ERM", "default", "Average")]
    assert average["mean"] == pytest.approx((60 + 84) / 2)
    assert average.stderr == pytest.approx(100 * np.std([0.65, 0.71, 0.80]) / math.sqrt(3))


def test_the_table_says_what_is_missing(miniature):
    table = accuracy_table(miniature).set_index(["algorithm", "mode"])
    assert list(table.columns) == ["photo", "sketch", "Average"] and list(table.index) == [
        ("ERM", "default"),
        ("HMOE-DN", "mix"),
        ("HMOE-DN", "max"),
    ]
    assert (
        table.loc[("ERM", "default"), "photo"] == "60.0 ± 4.7"
        and table.loc[("HMOE-DN", "mix"), "sketch"] == "85.0 (1/3)"
    )
    notes = "\n".join(table_notes(miniature))
    assert (
        "failed: HMOE-DN on sketch, seed 1" in notes
        and "NaN loss at step 40" in notes
        and "missing: HMOE-DN on sketch, seeds 1, 2" in notes
        and "one trial seed" not in notes
        and notes.endswith("as in DomainBed; with n - 1 for n they are 1.22 times as large")
    )


def test_a_cell_without_any_seed_takes_the_average_with_it(miniature):
    table = accuracy_table(
        [
            r
            for r in miniature
            if r["run_id"] != invented.measured("HMOE-DN", "sketch", 0, mix=1)["run_id"]
        ]
    ).set_index(["algorithm", "mode"])
    assert (
        table.loc[("HMOE-DN", "mix"), "sketch"] == "– (0/3)"
        and table.loc[("HMOE-DN", "mix"), "Average"] == "– (0/3)"
    )


def test_no_seed_in_common_gives_a_mean_but_no_error():
    table = accuracy_table(
        [
            invented.measured("ERM", "photo", 0, default=0.5),
            invented.measured("ERM", "sketch", 1, default=0.7),
        ]
    )
    assert table.loc[0, "photo"] == "50.0 (1/2)" and table.loc[0, "Average"] == "60.0 (0/2 whole)"


def test_one_seed_has_no_standard_error():
    runs = [
        invented.measured("ERM", "photo", 0, default=0.5),
        invented.measured("ERM", "sketch", 0, default=0.7),
    ]
    assert accuracy_table(runs).loc[0].tolist() == ["ERM", "default", "50.0", "70.0", "60.0"]
    assert "one trial seed: no standard errors" in table_notes(runs)
    limits = minimum_detectable_difference(runs)
    assert limits.by_seeds.isna().all() and np.allclose(limits.detectable, limits.by_images)


def test_two_runs_for_one_cell_are_refused(miniature):
    with pytest.raises(HmoeError, match="both ERM on photo with seed 0.*Fix"):
        run_results(
            miniature + [invented.measured("ERM", "photo", 0, default=0.9) | {"run_id": "f" * 12}]
        )


def test_pairs_of_test_domains_stay_out_of_the_table(miniature):
    pair = invented.measured("ERM", "photo", 0, default=0.1)
    pair["spec"]["test_domains"] = ["photo", "sketch"]
    assert accuracy_table(miniature + [pair]).equals(accuracy_table(miniature))


def test_resolvable_difference_by_hand(miniature):
    limits = minimum_detectable_difference(
        [r for r in miniature if r["spec"]["algorithm"] == "ERM"]
    ).set_index("test_domain")
    assert limits.loc["photo", "by_seeds"] == pytest.approx(200 * math.sqrt(2 * 0.01 / 3))
    assert limits.loc["photo", "by_images"] == pytest.approx(200 * math.sqrt(2 * 0.6 * 0.4 / 360))
    assert limits.loc["photo", "detectable"] == pytest.approx(
        200 * math.sqrt(2 * (0.01 / 3 + 0.24 / 360))
    )
    p = (0.80 + 0.82 + 0.90) / 3
    floor = (0.24 / 360 + p * (1 - p) / 360) / 4
    assert limits.loc["Average", "detectable"] == pytest.approx(
        200 * math.sqrt(2 * (np.var([0.65, 0.71, 0.80], ddof=1) / 3 + floor))
    )


def test_paired_difference_by_hand(miniature):
    paired = paired_difference(miniature).set_index(["algorithm", "mode"])
    d = np.array([0.10, 0.15, 0.05, 0.05])
    row = paired.loc[("HMOE-DN", "mix")]
    assert (
        row.difference == pytest.approx(100 * d.mean())
        and row.stderr == pytest.approx(100 * d.std() / 2)
        and (row.pairs, row.ahead) == (4, 4)
    )
    assert paired.loc[("HMOE-DN", "max"), "ahead"] == 1
    with pytest.raises(HmoeError, match="CORAL.*Valid: ERM, HMOE-DN"):
        paired_difference(miniature, baseline="CORAL")


def test_results_can_be_drawn_with_holes(miniature):
    figure, axes = plt.subplots(1, 3)
    plot_results(miniature, axes)
    assert [a.get_title() for a in axes] == ["photo", "sketch", "Average"]
    assert [t.get_text() for t in axes[0].get_yticklabels()] == ["ERM", "HMOE-DN"]
    assert len({axis.get_xlim() for axis in axes}) == 1
    plt.close(figure)


def test_no_mark_is_cut_by_the_end_of_a_scale():
    "One panel shows little and the other much, so that a margin of the first is nothing here."
    levels = {"photo": (0.10, 0.60), "sketch": (0.05, 0.06)}
    records = [
        invented.record("ERM", domain, seed, np.random.default_rng(0))
        for domain in levels
        for _ in range(2)
        for seed in range(3)
    ]
    for i, record in enumerate(records):
        high = i // 3 % 2
        accuracy = levels[record["spec"]["test_domains"][0]][high]
        record["selected"]["default"]["test_accuracy"] = accuracy
        record["spec"]["algorithm"] = ("ERM", "CORAL")[high]
    figure, axes = plt.subplots(1, 3)
    plot_results(records, axes)
    low, high = axes[0].get_xlim()
    assert low <= 5 - 0.02 * (high - low) and high >= 60 + 0.02 * (high - low)
    plt.close(figure)


def test_modes_share_the_row_of_their_algorithm(miniature):
    places = row_places(run_results(miniature))
    modes = [place for (name, _), place in places.items() if name == "HMOE-DN"]
    assert places["ERM", "default"] == (0, "o")
    assert len({place.mark for place in modes}) == len(modes)
    assert sum(place.height for place in modes) / len(modes) == pytest.approx(1)


def test_the_band_is_the_baseline_and_what_is_detectable(miniature):
    figure, axes = plt.subplots(1, 3)
    plot_results(miniature, axes)
    limits = minimum_detectable_difference(miniature).set_index("test_domain").detectable
    cells = cell_statistics(run_results(miniature)).set_index(["algorithm", "test_domain"])["mean"]
    for axis, domain in zip(axes, limits.index):
        band, mean = axis.patches[0], cells["ERM", domain]
        if not np.isnan(mean):
            assert band.get_x() == pytest.approx(mean - limits[domain])
            assert band.get_width() == pytest.approx(2 * limits[domain])
    plt.close(figure)
    figure, axes = plt.subplots(1, 3)
    plot_results(miniature, axes, baseline="CORAL")
    assert not any(axis.patches for axis in axes)
    plt.close(figure)


# Verdicts


def test_the_ceiling_of_nmi_is_reached_by_the_best_balanced_experts():
    from sklearn.metrics import normalized_mutual_info_score

    domains, experts = (
        np.repeat([0, 1, 2], 20),
        np.arange(60) % 20 % 2 + 2 * np.repeat([0, 1, 2], 20),
    )
    assert highest_nmi(3, 6) == pytest.approx(normalized_mutual_info_score(domains, experts))
    assert highest_nmi(3, 5) == pytest.approx(2 * math.log(3) / math.log(15)) and highest_nmi(
        3, 3
    ) == 1 == highest_nmi(1, 1)
    with pytest.raises(HmoeError, match="at least one"):
        highest_nmi(0, 3)


def test_the_accuracy_verdict(miniature):
    near = accuracy_verdict(
        miniature + [invented.measured("HMOE-DN", "sketch", s, mix=0.85, max=0.80) for s in (1, 2)]
    )
    assert near.startswith(
        "No algorithm differs significantly from ERM in average accuracy: "
        "the largest difference, HMOE-DN MIX (+5.5), is within the "
    )
    assert near.endswith("0 of 4 differences exceed two standard errors.")
    far = accuracy_verdict(
        [r for r in miniature if r["spec"]["algorithm"] == "ERM"]
        + [
            invented.measured("HMOE-DN", d, s, mix=0.05)
            for d in ("photo", "sketch")
            for s in range(3)
        ]
    )
    assert far.startswith("Significantly different from ERM in average accuracy (more than ")
    assert "HMOE-DN MIX (-67.0)" in far
    assert far.endswith(
        "2 of 2 differences exceed two standard errors, all of them "
        "significant after Holm's correction for 2 comparisons: HMOE-DN MIX on sketch (-79.0), "
        "HMOE-DN MIX on photo (-55.0)."
    )
    assert "Only ERM has a complete average." in accuracy_verdict(
        miniature[:6] + [invented.measured("HMOE-DN", "photo", 0, mix=0.6)]
    )
    with pytest.raises(HmoeError, match="CORAL.*Valid: ERM, HMOE-DN"):
        accuracy_verdict(miniature, baseline="CORAL")


def test_a_row_that_fails_now_and_then_is_judged_by_its_own_spread():
    "Ten steady rows beside it make the pooled error small; its own makes its mean uncertain."

    def row(name, *accuracies):
        runs = [invented.measured("ERM", "photo", s, default=a) for s, a in enumerate(accuracies)]
        return [r | {"spec": r["spec"] | {"algorithm": name}} for r in runs]

    names = ("ERM", *(f"steady {i}" for i in range(9)))
    steady = [r for name in names for r in row(name, 0.9, 0.901, 0.902)]
    wild = steady + row("wild", 0.9, 0.6, 0.5)
    line = accuracy_verdict(wild)
    assert "No algorithm differs" in line and "wild (-23.4), exceeds" in line
    own = "after Holm's correction for 10 comparisons, with unequal variances (Welch)"
    assert f"but is not significant {own}. In single" in line
    assert f"{own}): low (-23.1)." in accuracy_verdict(steady + row("low", 0.66, 0.67, 0.68))
    once = accuracy_verdict([r for r in wild if r["spec"]["trial_seed"] == 1])
    assert "comparisons): wild (-30.1)" in once and "Welch" not in once


def test_a_row_is_called_by_its_algorithm_and_its_mode_if_it_has_a_choice():
    assert row_name("ERM", "default") == "ERM" and row_name("HMOE-DN", "ood") == "HMOE-DN OOD"
