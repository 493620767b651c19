"""Statistics: contrasts by hand and against statsmodels, Holm, rates and power by brute force,
the published records' recomputed values, the crossed bootstrap against all draws, pictures."""

import itertools
import math
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from hmoe_repro.analysis.plotting import small_texts
from hmoe_repro.analysis.results import frame_of, results
from hmoe_repro.analysis.statistics import (
    accuracy_verdict,
    contrast,
    contrast_table,
    contrast_text,
    contrasts,
    correction_note,
    effect_lines,
    forest_note,
    forest_plot,
    forest_rows,
    gain_words,
    holm,
    interquartile_mean,
    interval_note,
    main_effects,
    mean_interval,
    minimum_detectable_difference,
    paired_values,
    rate,
    rate_text,
    sensitivity_line,
)
from hmoe_repro.core.errors import HmoeError

pytestmark = pytest.mark.usefixtures("warm_kernels")
DOMAINS = ("negative", "photo", "plain", "sketch")
GRID = [[1.0, 2.0, -1.0, 0.5], [0.0, 3.0, 1.0, 1.5], [2.0, 2.5, -2.0, 1.0]]


def run(algorithm, domain, seed, accuracy, **more):
    "A run with the accuracy given; HMOE's modes are a point apart."
    modes = ("mix", "max", "ood") if algorithm.startswith("HMOE") else ("default",)
    selected = {
        mode: {"step": 1, "validation_accuracy": 0.9, "test_accuracy": accuracy + 0.01 * i}
        for i, mode in enumerate(modes)
    }
    config = {"algorithm": algorithm, "dataset": "DigitDomains", "test_domains": [domain]}
    made = {"run_id": f"{algorithm}-{domain}-{seed}-{more}", "status": "complete"}
    made |= {"config": config | {"trial_seed": seed} | more, "test_size": 360}
    return made | {"selected": selected}


def study(**grids):
    "Results of ERM and of algorithms that are better by `grid[seed][domain]` points; None: no run."
    records = []
    for name, grid in {"ERM": np.zeros((3, 4)).tolist(), **grids}.items():
        for s, row in enumerate(grid):
            for d, gain in enumerate(row):
                if gain is not None:
                    level = 0.6 + 0.03 * s + 0.05 * d
                    records.append(run(name.replace("_", "-"), DOMAINS[d], s, level + gain / 100))
    return frame_of(records)


# Contrasts


def test_a_contrast_by_hand():
    found = contrast(study(CORAL=GRID), "CORAL").set_index("test_domain")
    grid = np.array(GRID)
    assert list(found.index) == [*DOMAINS, "Average"]
    variances = grid.var(axis=0, ddof=1) / 3
    freedom = variances.sum() ** 2 / (variances**2 / 2).sum()
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variances.sum()) / 4
    average = found.loc["Average"]
    assert average.difference == pytest.approx(grid.mean())
    assert (average.low, average.high) == pytest.approx((grid.mean() - half, grid.mean() + half))
    assert (average.seeds, average.pairs, average.ahead) == (3, 12, 9)


def test_single_domains_are_paired_t_tests_and_a_domain_fixed_effect_where_variances_are_equal():
    found = contrast(study(CORAL=GRID), "CORAL").set_index("test_domain")
    for column, domain in zip(np.transpose(GRID), DOMAINS):
        low, high = DescrStatsW(column).tconfint_mean()
        assert (found.low[domain], found.high[domain]) == pytest.approx((low, high))
        assert found.p[domain] == pytest.approx(stats.ttest_1samp(column, 0).pvalue)
    equal = np.array([[0.0], [1.0], [-1.0]]) + [[1.0, 4.0, -2.0, 3.0]]
    long = pd.DataFrame(equal, columns=list(DOMAINS)).melt(var_name="domain")
    long["domain"] = pd.Categorical(long.domain)
    fit = ols("value ~ C(domain, Sum)", long).fit()  # its intercept is the mean of domains
    interval = mean_interval(pd.DataFrame(equal, columns=list(DOMAINS)))
    assert (interval.low, interval.high) == pytest.approx(fit.conf_int().loc["Intercept"].tolist())
    assert interval.freedom == pytest.approx(fit.df_resid)
    assert interval.p == pytest.approx(fit.pvalues["Intercept"])


def test_each_contrast_has_its_own_variance():
    "A row that fails with one seed in three widens its own interval and nobody else's."
    steady, wild = (
        [[1.0, 1.1, 0.9, 1.0], [1.1, 1.0, 1.0, 0.9], [0.9, 0.9, 1.1, 1.1]],
        np.zeros((3, 4)),
    )
    wild[1] = -40
    alone = contrast(study(CORAL=steady), "CORAL").low
    both = contrasts(study(CORAL=steady, MMD=wild.tolist())).set_index("algorithm")
    np.testing.assert_allclose(both.low["CORAL"], alone)
    assert both.significant["CORAL"].iloc[-1]
    assert not both.significant["MMD"].iloc[-1]


def test_seeds_that_agree_are_no_proof_of_a_difference():
    "Two seeds that differ by the same one image of 100 have no variance to test it with."
    found = contrasts(study(CORAL=[[1.0, 2.0, 0.0, 3.0]] * 2))
    assert found[["low", "high", "p"]].isna().sum().tolist() == [5, 5, 4]
    alone = contrast(study(CORAL=[[1.0, 2.0, 0.0, 3.0]] * 2), "CORAL")
    assert alone[["low", "high"]].isna().all(axis=None)  # not in a table of contrasts alone
    assert found.p[2] == 1
    assert contrast_text(found.iloc[0]).startswith("+1.0 (equal in")
    said = accuracy_verdict(study(CORAL=[[1.0, 2.0, 0.0, 3.0]] * 2))
    assert said.startswith("Not decided")
    assert "no variance" in said
    assert "none of 1" in said


def correlated(seeds, correlation=0.5, domains=4):
    "A grid whose domains share a part of each seed's luck."
    random = np.random.default_rng(3)
    mixed = np.full((domains, domains), correlation) + (1 - correlation) * np.eye(domains)
    return pd.DataFrame(random.multivariate_normal(np.ones(domains), mixed, size=seeds))


def test_from_seven_seeds_on_an_interval_is_over_seed_means():
    """It is that of a one-sample t-test of the seed means; below, domains are independent, and the
    interval of domains that go together is too narrow."""
    grid = correlated(7)
    found, means = mean_interval(grid), grid.mean(axis=1)
    assert (found.low, found.high) == pytest.approx(DescrStatsW(means).tconfint_mean())
    assert found.p == pytest.approx(stats.ttest_1samp(means, 0).pvalue)
    assert (found.freedom, found.seeds, found.pairs) == (6, 7, 28)
    few = mean_interval(grid[:6])
    apart = math.sqrt((grid[:6].var() / 6).sum()) / 4
    assert (few.high - few.low) / 2 == pytest.approx(stats.t.isf(0.025, few.freedom) * apart)
    assert "over seed means" in interval_note(7)
    assert "too narrow" in interval_note(6)


def test_a_missing_run_changes_an_interval_over_seeds_little():
    """Seeds with a gap count with what they have: the estimate is still a mean over domains."""
    grid = correlated(12)
    whole, holed = mean_interval(grid), grid.copy()
    holed.iloc[3, 1] = np.nan
    found = mean_interval(holed)
    assert found.mean == pytest.approx(holed.mean().mean())
    assert found.freedom == 10
    assert (found.high - found.low) / (whole.high - whole.low) == pytest.approx(1, abs=0.1)


def test_how_often_intervals_cover_the_truth_when_domains_are_correlated():
    random, covered = np.random.default_rng(0), {3: 0, 7: 0}
    mixed = np.full((4, 4), 0.3) + 0.7 * np.eye(4)
    for seeds in covered:
        for grid in random.multivariate_normal(np.zeros(4), mixed, size=(1000, seeds)):
            found = mean_interval(pd.DataFrame(grid))
            covered[seeds] += found.low < 0 < found.high
    assert covered[3] < 900
    assert covered[7] == pytest.approx(950, abs=25)


def test_the_interquartile_mean_resists_one_bad_run():
    grid = correlated(8)
    value, low, high = interquartile_mean(grid)
    assert value == pytest.approx(stats.trim_mean(grid.to_numpy().ravel(), 0.25))
    assert low < value < high
    bad = grid.copy()
    bad.iloc[0, 0] = -500
    assert abs(interquartile_mean(bad)[0] - value) < 0.2 < abs(bad.mean().mean() - value)
    assert math.isnan(interquartile_mean(grid[:7])[0])
    assert sensitivity_line(grid[:7]) == ""
    assert f"{value:+.1f} points" in sensitivity_line(grid)


def test_the_bootstrap_is_stratified_by_domain():
    """Domains that differ by much and seeds that nearly agree: redrawing seeds moves little."""
    seeds = np.linspace(-0.01, 0.01, 8)
    grid = pd.DataFrame({name: value + seeds for name, value in zip("abcd", (0, 10, 20, 30))})
    value, low, high = interquartile_mean(grid)
    assert 14.99 < low < value < high < 15.01


def test_a_bootstrap_of_zero_width_is_no_interval():
    grid = pd.DataFrame({"a": [0.0] * 8, "b": [10.0] * 8, "c": [20.0] * 8, "d": [30.0] * 8})
    value, low, high = interquartile_mean(grid)
    assert value == 15
    assert math.isnan(low)
    assert math.isnan(high)
    assert sensitivity_line(grid).partition("+15.0 points ")[2].startswith("(no interval")


def test_an_open_interval_is_undecided_and_never_equality():
    interval = mean_interval(pd.DataFrame({"a": [-5.0, 0.0, 5.0]}))
    assert gain_words(interval) == "undecided"
    assert gain_words(mean_interval(pd.DataFrame({"a": [1.0, 1.1, 1.2]}))) == "higher"
    small = mean_interval(pd.DataFrame({"a": [0.1, 0.11, 0.12]}))
    assert gain_words(small).startswith("higher, too small")


def test_missing_runs_and_one_seed_give_no_interval():
    holes = [[1.0, None, -1.0, 0.5], [0.0, None, 1.0, None]]
    found = contrast(study(CORAL=holes), "CORAL").set_index("test_domain")
    assert found.pairs["Average"] == 5
    assert math.isnan(found.p["Average"])
    assert found.low["plain"] < 0 < found.high["plain"]
    assert math.isnan(found.low["sketch"])
    single = contrast(study(CORAL=GRID[:1]), "CORAL")
    assert single.difference.iloc[-1] == pytest.approx(np.mean(GRID[0]))
    assert single.p.isna().all()


def test_what_cannot_be_compared_is_said():
    frame = study(CORAL=GRID, HMOE_DN=GRID)
    with pytest.raises(HmoeError, match="'MMD'") as caught:
        contrast(frame, "MMD")
    assert caught.value.choices == ["ERM", "CORAL", "HMOE-DN"]
    with pytest.raises(HmoeError, match="column.*'lrr'"):
        contrast(frame, {"lrr": 1})
    with pytest.raises(HmoeError, match="two.*negative.*seed 0"):
        contrast(frame, {"algorithm": ["ERM", "CORAL"]})
    apart = frame_of([run("ERM", "photo", 0, 0.5), run("CORAL", "photo", 1, 0.5)])
    with pytest.raises(HmoeError, match="in common"):
        contrast(apart, "CORAL")
    with pytest.raises(HmoeError, match="nothing.*ERM"):
        contrasts(frame[frame.algorithm == "ERM"])
    assert list(paired_values(frame, ("HMOE-DN", "ood"), "ERM").columns) == list(DOMAINS)


def test_holm_against_statsmodels_and_rates_against_brute_force():
    p = np.random.default_rng(0).uniform(size=9) ** 3
    p[4] = np.nan
    known = np.full(9, np.nan)
    known[~np.isnan(p)] = multipletests(p[~np.isnan(p)], method="holm")[1]
    np.testing.assert_allclose(holm(p), known)
    assert np.isnan(holm([math.nan])).all()
    for k, n in ((0, 5), (4, 12), (17, 32), (7, 7)):
        share, low, high = rate(k, n)
        tail = lambda q, many, n=n: sum(math.comb(n, i) * q**i * (1 - q) ** (n - i) for i in many)
        assert share == k / n
        assert k == 0 or tail(low, range(k, n + 1)) == pytest.approx(0.025)
        assert k == n or tail(high, range(k + 1)) == pytest.approx(0.025)
    assert re.findall(r"\d+", rate_text(4, 12)) == ["4", "12", "95", "10", "65"]
    with pytest.raises(HmoeError):
        rate(5, 4)


# The published records


def average(frame, algorithm, mode="default"):
    table = contrasts(frame).set_index(["algorithm", "mode", "test_domain"])
    return table.loc[(algorithm, mode, "Average")]


def test_one_algorithm_of_table_1_on_the_digits_is_better_than_erm():
    frame = results("quick-table1")
    dann, mixup = average(frame, "DANN"), average(frame, "Mixup")
    assert (dann.difference, dann.low, dann.high) == pytest.approx((13.0, 9.24, 16.76), abs=0.01)
    assert dann.ahead == dann.pairs == 12
    assert dann.p_holm == pytest.approx(0.0105, abs=1e-4)
    assert mixup.difference == pytest.approx(9.07, abs=0.01)
    assert not mixup.significant
    verdict = accuracy_verdict(frame)
    decided, _, rest = verdict.partition(" against ")
    assert re.findall(r"(\w+) ([+-][\d.]+)", decided) == [
        *(("DANN", "+13.0"), ("CI", "+9.2"), ("to", "+16.8")),
        *(("IGA", "-52.6"), ("CI", "-56.4"), ("to", "-48.8")),
    ]
    assert "the 49 rows" in rest
    assert "47 of 49" in rest
    assert list(contrast_table(frame).algorithm).count("DANN") == 1


@pytest.mark.slow
def test_on_rotated_mnist_small_differences_are_decided_beside_an_unstable_row():
    frame, low = results("mnist-rotated"), [("HMOE-DN", "ood")]
    mix = average(frame, "HMOE-DL", "mix")
    assert mix.difference == pytest.approx(1.158, abs=1e-3)
    assert mix.low > 0
    assert mix.significant
    verdict = accuracy_verdict(frame)
    assert verdict.startswith("HMOE-DL MIX +1.2")
    assert "HMOE-DN OOD -17.2" in verdict
    more = results(["mnist-rotated", "mnist-rotated-baselines"])
    mldg = average(more, "MLDG")
    assert mldg.difference == pytest.approx(1.63, abs=0.01)
    assert mldg.low > 0
    with_it = minimum_detectable_difference(frame).detectable.iloc[-1]
    without = minimum_detectable_difference(frame, low).detectable.iloc[-1]
    assert without < with_it < 2 * without  # a median, not a pooled variance


# What a study could have seen


def test_the_minimum_detectable_difference_is_found_in_four_of_five_studies():
    random, found = np.random.default_rng(0), []
    frame = study(CORAL=(random.normal(size=(3, 4))).tolist())
    limits = minimum_detectable_difference(frame).set_index("test_domain")
    row = contrast(frame, "CORAL").iloc[0]
    error = (row.high - row.difference) / stats.t.ppf(0.975, 2)
    for _ in range(20_000):
        values = limits.detectable["negative"] + math.sqrt(3) * error * random.normal(size=3)
        found.append(values)
    found = stats.ttest_1samp(found, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)
    assert (limits.seeds == 3).all()
    assert limits.test_images["Average"] == 4 * 360
    assert set(limits.rests_on) == {"seeds, in pairs"}


def test_one_seed_knows_the_test_images_alone():
    frame = study(CORAL=GRID)
    limits = minimum_detectable_difference(frame[frame.trial_seed == 0]).set_index("test_domain")
    p = frame[(frame.trial_seed == 0) & (frame.test_domain == "photo")].accuracy.mean()
    sure = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert limits.detectable["photo"] == pytest.approx(
        100 * sure * math.sqrt(2 * p * (1 - p) / 360), rel=1e-3
    )
    assert set(limits.rests_on) == {"test images alone"}


# Verdicts and pictures


def three():
    "ERM, an algorithm better by two points everywhere, one that differs by noise, one far below."
    noise = np.random.default_rng(0).normal(size=(3, 4))
    grids = {"CORAL": 2 + 0.1 * noise, "MMD": noise, "HMOE_DN": -9 + 0.1 * noise}
    return study(**{name: grid.tolist() for name, grid in grids.items()})


def test_the_verdict_begins_with_the_answer():
    frame = three()
    verdict = accuracy_verdict(frame)
    assert verdict.startswith("CORAL +2.0 points")
    assert ", HMOE-DN MIX -9.0" in verdict
    assert "the 5 rows" in verdict
    assert "1 of 5" in verdict
    assert "single test domains" in verdict
    assert "of 20 differences" in verdict
    few = accuracy_verdict(frame[frame.algorithm != "HMOE-DN"])
    assert few.startswith("CORAL +2.0 points")
    assert "the 2 rows" in few
    noise = accuracy_verdict(frame[frame.algorithm.isin(["ERM", "MMD"])])
    assert noise.startswith("Undecided: no row")
    assert "(closest: MMD " in noise
    assert "95 % CI" in noise
    against = accuracy_verdict(frame, ("HMOE-DN", "mix"))
    assert "against HMOE-DN MIX" in against
    assert "ERM +9.0" in against


def test_a_stated_contrast_does_not_depend_on_the_other_rows_of_its_table():
    """Alone in its family it keeps its p; the other rows are corrected for each other."""
    frame = three()
    row = ("MMD", "default")
    plain = contrasts(frame)
    table = contrasts(frame, stated=[row])
    few = contrasts(frame[frame.algorithm != "HMOE-DN"], stated=[row])
    averages = table[table.test_domain == "Average"].set_index(["algorithm", "mode"])
    stated = averages.loc[row]
    assert stated.stated
    assert stated.corrected_for == 1
    assert stated.p_holm == stated.p
    again = few[(few.test_domain == "Average") & few.stated].iloc[0]
    assert (again.p, again.p_holm, again.significant) == (
        stated.p,
        stated.p_holm,
        stated.significant,
    )
    others = averages[~averages.stated]
    assert len(others) == 4
    assert others.corrected_for.eq(4).all()
    np.testing.assert_allclose(others.p_holm, holm(others.p))
    before = plain[plain.test_domain == "Average"]
    assert before.corrected_for.eq(5).all()
    np.testing.assert_allclose(before.p_holm, holm(before.p))
    single = table.test_domain != "Average"
    np.testing.assert_allclose(table.p_holm[single], plain.p_holm[single])
    assert table.corrected_for[single].eq(20).all()


def test_a_table_says_for_how_many_rows_it_is_corrected():
    frame = three()
    note = correction_note(contrasts(frame))
    assert note.startswith("after Holm's")
    assert "the 5 rows" in note
    some = frame[frame.algorithm.isin(["ERM", "CORAL", "MMD"])]
    with_one = contrasts(some, stated=[("MMD", "default")])
    stated, others = correction_note(with_one).split("; ")
    assert stated.split(", ")[::2] == ["MMD", "uncorrected"]
    assert "other 1 row" in others
    assert "Holm" in others
    verdict = accuracy_verdict(some, stated=[("CORAL", "default")])
    assert verdict.startswith("CORAL is 2.0")
    assert "claim, uncorrected" in verdict
    assert "No other row" in verdict
    assert "other 1 row" in verdict
    assert accuracy_verdict(some, stated=[("MMD", "default")]).startswith("Undecided: MMD ")


def test_one_seed_decides_nothing_and_one_algorithm_has_no_contrast():
    frame = three()
    one = accuracy_verdict(frame[frame.trial_seed == 1])
    assert one.startswith("Not decided: one")
    assert "HMOE-DN MIX -" in one
    alone = frame[frame.algorithm == "ERM"]
    assert accuracy_verdict(alone).startswith("Nothing to compare")
    assert minimum_detectable_difference(alone).detectable.notna().all()
    with pytest.raises(HmoeError, match="'Fish'") as caught:
        accuracy_verdict(frame, "Fish")
    assert caught.value.choices == ["ERM", "CORAL", "MMD", "HMOE-DN"]


def test_the_table_of_contrasts_has_every_row_and_its_domains():
    table = contrast_table(three()).set_index(["algorithm", "mode"])
    assert [*table.columns] == [
        *("Average", "low", "high", "p_holm", "corrected_for", "ahead"),
        *DOMAINS,
    ]
    assert table.loc[("CORAL", "default"), "ahead"] == "12 of 12"
    assert len(table) == 5
    np.testing.assert_allclose(table[list(DOMAINS)].mean(axis=1), table.Average)


def drawn_points(axis):
    "Row -> its point in a panel, for points within the panel."
    dots = [line for line in axis.lines if line.get_marker() == "o"]
    return {
        round(float(y)): (float(x), dot.get_markerfacecolor() != "white")
        for dot in dots
        for x, y in zip(dot.get_xdata(), dot.get_ydata())
    }


def test_a_forest_has_the_average_first_and_its_rows_sorted_by_effect():
    table = contrasts(three())
    figure = forest_plot(table, undertrained=[("MMD", "default")])
    axes = {axis.get_title(): axis for axis in figure.axes}
    assert [*axes] == ["Average", *DOMAINS]
    assert axes["Average"].get_position().width > 2 * axes[DOMAINS[0]].get_position().width
    names = ["CORAL", "MMD †", "HMOE-DN OOD", "HMOE-DN MAX", "HMOE-DN MIX"]
    assert [t.get_text() for t in axes["Average"].get_yticklabels()] == names
    average = table[table.test_domain == "Average"].sort_values("difference", ascending=False)
    points = drawn_points(axes["Average"])
    assert set(points) == set(range(5))
    for at, row in enumerate(average.itertuples()):
        assert points[at] == (pytest.approx(row.difference), row.significant)
    assert len({axes[domain].get_xlim() for domain in DOMAINS}) == 1
    assert not small_texts(figure)
    plt.close(figure)


def invented_contrasts(effects, half=3.0, significant=()):
    "Contrasts on two test domains and on average, of algorithms with the effects given."
    rows = []
    for name, effect in effects.items():
        for domain in ("ink", "oil", "Average"):
            numbers = (effect, effect - half, effect + half, name in significant)
            rows.append((name, "default", domain, *numbers))
    columns = ["algorithm", "mode", "test_domain", "difference", "low", "high", "significant"]
    return pd.DataFrame(rows, columns=columns)


def test_a_long_forest_keeps_the_papers_methods_the_significant_rows_and_both_ends():
    effects = {f"other {k}": k - 20.0 for k in range(40)}
    effects |= {"HMOE-DN": 0.1, "GMoE": 0.2, "DMG": 0.3}
    table = invented_contrasts(effects, significant=("other 19", "other 21"))
    rows = [algorithm for algorithm, _ in forest_rows(table)]
    kept = {"HMOE-DN", "GMoE", "DMG", "other 19", "other 21"}
    ends = {f"other {k}" for k in [*range(7), *range(32, 40)]}
    assert len(rows) == 20
    assert set(rows) == kept | ends
    assert rows == sorted(rows, key=effects.get, reverse=True)
    assert forest_note(table).startswith("20 of 43")
    figure = forest_plot(table)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == rows
    plt.close(figure)
    few = table[table.algorithm.isin(rows)]
    assert len(forest_rows(few)) == 20
    assert forest_note(few) == ""


@pytest.mark.parametrize("far", [1, 2])
def test_a_few_rows_far_away_leave_room_for_the_intervals_of_all_others(far):
    effects = {f"near {k}": k - 5.0 for k in range(10)} | {f"far {k}": -52.0 for k in range(far)}
    figure = forest_plot(invented_contrasts(effects))
    axis = figure.axes[0]
    low, high = axis.get_xlim()
    assert -52 < low < -8
    assert high > 7
    assert high - low < 20
    triangles = [line for line in axis.lines if line.get_marker() == "<"]
    assert sum(len(line.get_xdata()) for line in triangles) == far
    written = [text.get_text() for text in axis.texts if text.get_text()]
    assert written == ["-52"] * far
    assert not [text for text in axis.texts if not text.get_text()]  # no interval ends in an arrow
    plt.close(figure)


def test_a_forest_of_one_test_domain_has_one_panel_and_one_seed_no_interval():
    table = invented_contrasts({"CORAL": 1.0, "MMD": -1.0})
    table = table[table.test_domain != "oil"].assign(low=math.nan, high=math.nan)
    figure = forest_plot(table)
    assert [axis.get_title() for axis in figure.axes] == ["ink"]
    assert set(drawn_points(figure.axes[0])) == {0, 1}
    plt.close(figure)


def test_rows_of_a_forest_take_the_colours_of_a_column():
    table = invented_contrasts({"CORAL": 1.0, "MMD": -1.0})
    table["block"] = table.algorithm.map({"CORAL": "labels", "MMD": "none"})
    figure = forest_plot(table, hue="block", palette={"labels": "#E69F00", "none": "#0072B2"})
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [dot.get_color() for dot in dots] == ["#E69F00", "#0072B2"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["labels", "none"]
    plt.close(figure)


# Main effects


def test_an_effect_is_the_mean_difference_of_pairs_with_its_interval_over_seeds():
    def measured(wide, late, seed):
        accuracy = 0.5 + 0.03 * wide + 0.01 * seed + 0.002 * wide * seed
        return run("net", "ink", seed, accuracy, wide=wide, late=late)

    grid = itertools.product((0, 1), (0, 1), range(3))
    frame = frame_of([measured(*point) for point in grid])
    table = main_effects(frame, {"wide": "wide", "late": "late"}).set_index("setting")
    half = stats.t.ppf(0.975, 2) * 0.2 / math.sqrt(3)
    assert table.loc["wide", "difference"] == pytest.approx(3.2)
    assert table.loc["wide", "high"] == pytest.approx(3.2 + half, abs=1e-4)
    assert table.loc["late", "difference"] == pytest.approx(0)
    assert (table.pairs == 6).all()
    lines = effect_lines(table.reset_index())
    name, _, change = lines[0].partition(": 1 − 0 ")
    assert name == "wide"
    assert re.findall(r"[+-][\d.]+", change) == ["+3.2", "+2.7", "+3.7"]
    assert "6 pairs, significant" in change
    assert lines[1].endswith("undecided.")
    single = main_effects(frame[frame.trial_seed == 0], {"wide": "wide"})
    assert pd.isna(single.low[0])
    assert "(one seed)" in effect_lines(single)[0]


def test_an_effect_that_is_equal_in_all_seeds_is_not_called_one_seed():
    points = itertools.product((0, 1), range(3))
    runs = [run("net", "ink", s, 0.5 + 0.1 * wide + 0.01 * s, wide=wide) for wide, s in points]
    effects = main_effects(frame_of(runs), {"wide": "wide"})
    assert effects.freedom.tolist() == [math.inf]
    assert "(equal in" in effect_lines(effects)[0]


def test_a_baseline_may_be_named_as_a_list_or_by_its_columns():
    points = itertools.product(("ERM", "net"), ("ink", "oil"), range(3))
    runs = [run(name, d, s, 0.5 + 0.01 * s * (name == "net")) for name, d, s in points]
    frame = frame_of(runs)
    expected = minimum_detectable_difference(frame, baseline="ERM")
    assert (expected.rests_on == "seeds, in pairs").any()
    for baseline in (["ERM", "default"], ("ERM", "default"), {"algorithm": "ERM"}):
        found = minimum_detectable_difference(frame, baseline=baseline)
        pd.testing.assert_frame_equal(found, expected)
