"""Paired comparison of algorithms: grids by hand, the bootstrap against all draws and against a
loop, missing runs, verdicts and blocks."""

import itertools
import math

import invented
import matplotlib.pyplot as plt
import numpy as np
import pytest

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.analysis.published import label_block, label_blocks
from hmoe_repro.analysis.statistics import (
    bootstrap_table,
    crossed_bootstrap,
    noise_verdict,
    paired_bootstrap,
    paired_difference,
    paired_grid,
    plot_differences,
)
from hmoe_repro.core.errors import HmoeError

pytestmark = pytest.mark.usefixtures("warm_kernels")


def run(algorithm, domain, seed, accuracy, status="complete"):
    "A run with the accuracy given; HMOE's modes are a point apart."
    modes = ("mix", "max", "ood") if algorithm.startswith("HMOE") else ("default",)
    selected = {
        mode: {"step": 1, "validation_accuracy": 0.9, "test_accuracy": accuracy + 0.01 * i}
        for i, mode in enumerate(modes)
    }
    return {
        "run_id": f"{algorithm}-{domain}-{seed}",
        "status": status,
        "spec": {
            "algorithm": algorithm,
            "dataset": "DigitDomains",
            "test_domains": [domain],
            "trial_seed": seed,
        },
        "selected": selected if status == "complete" else {},
        "test_size": 360,
    }


def pair(grid, domains=("negative", "photo", "plain", "sketch"), algorithm="CORAL", level=0.6):
    """Runs of ERM and of an algorithm that is better by `grid[seed][domain]` points; None: a run
    that failed."""
    runs = []
    for s, row in enumerate(grid):
        for d, gain in zip(domains, row):
            base = level + 0.03 * s + 0.05 * domains.index(d)
            runs += [
                run("ERM", d, s, base),
                run(
                    algorithm,
                    d,
                    s,
                    base + (gain or 0) / 100,
                    "complete" if gain is not None else "failed",
                ),
            ]
    return runs


GRID = [[1.0, 2.0, -1.0, 0.5], [0.0, 3.0, 1.0, 1.5], [2.0, 2.5, -2.0, 1.0]]


def test_the_grid_holds_differences_of_equal_seed_and_domain():
    grid = paired_grid(pair(GRID)[::-1], "CORAL")
    np.testing.assert_allclose(grid.to_numpy(), GRID, atol=1e-9)
    assert list(grid.index) == [0, 1, 2] and list(grid.columns) == [
        "negative",
        "photo",
        "plain",
        "sketch",
    ]
    np.testing.assert_allclose(
        paired_grid(pair(GRID), "ERM", baseline="CORAL").to_numpy(), -np.array(GRID), atol=1e-9
    )
    hmoe = pair(GRID, algorithm="HMOE-DN")
    np.testing.assert_allclose(paired_grid(hmoe, "HMOE-DN").to_numpy(), GRID, atol=1e-9)
    np.testing.assert_allclose(
        paired_grid(hmoe, "HMOE-DN", mode="ood").to_numpy(), np.array(GRID) + 2, atol=1e-9
    )


def test_the_bootstrap_against_all_draws():
    "Two seeds and two domains have sixteen equally likely draws, with the mean of each by hand."
    grid = np.array([[1.0, 5.0], [2.0, -4.0]])
    every = [
        grid[np.ix_(s, d)].mean()
        for s in itertools.product((0, 1), repeat=2)
        for d in itertools.product((0, 1), repeat=2)
    ]
    values, counts = np.unique(np.round(every, 9), return_counts=True)
    drawn = np.round(crossed_bootstrap(grid, 40_000), 9)
    assert set(drawn) == set(values)
    np.testing.assert_allclose([(drawn == v).mean() for v in values], counts / 16, atol=0.01)


def test_the_bootstrap_against_a_loop_with_missing_cells():
    grid = np.array([[1.0, np.nan, -1.0], [np.nan, np.nan, 4.0]])
    random, slow = np.random.default_rng(3), []
    for _ in range(6000):
        rows, columns = random.integers(2, size=2), random.integers(3, size=3)
        cells = [grid[s, d] for s in rows for d in columns if not np.isnan(grid[s, d])]
        slow.append(sum(cells) / len(cells) if cells else math.nan)
    fast = crossed_bootstrap(grid, 6000)
    assert abs(np.isnan(fast).mean() - np.isnan(slow).mean()) < 0.02 and np.isnan(fast).any()
    np.testing.assert_allclose(
        np.nanquantile(fast, [0.1, 0.5, 0.9]), np.nanquantile(slow, [0.1, 0.5, 0.9]), atol=0.3
    )
    assert np.array_equal(fast, crossed_bootstrap(grid, 6000), equal_nan=True)


def test_the_spread_is_that_of_rows_and_columns_drawn_whole():
    "If all domains of a seed share their luck, twelve cells are three results."
    rows = np.repeat([[0.0], [3.0], [6.0]], 40, axis=1)
    assert (
        abs(crossed_bootstrap(rows, 20_000).std() - np.sqrt(6 / 3)) < 0.03
    )  # population variance 6, three draws
    assert crossed_bootstrap(rows[:1].repeat(3, 0)).std() < 1e-9
    assert abs(crossed_bootstrap(rows.T, 20_000).std() - np.sqrt(6 / 3)) < 0.03


def test_the_interval_of_a_study():
    found = paired_bootstrap(pair(GRID), "CORAL")
    means = crossed_bootstrap(np.array(GRID))
    assert found["difference"] == pytest.approx(np.mean(GRID)) and (
        found["pairs"],
        found["seeds"],
        found["test_domains"],
    ) == (12, 3, 4)
    assert (found["low"], found["high"]) == pytest.approx(
        tuple(np.quantile(means, [0.025, 0.975]))
    ) and found["above"] == pytest.approx((means > 0).mean(), abs=1e-3)
    narrow = paired_bootstrap(pair(GRID), "CORAL", level=0.5)
    assert found["low"] < narrow["low"] < narrow["high"] < found["high"]
    back = paired_bootstrap(pair(GRID), "ERM", baseline="CORAL")
    assert (back["low"], back["high"]) == pytest.approx((-found["high"], -found["low"]))
    easier = paired_bootstrap(
        [r for r in pair(GRID, level=0.2)], "CORAL"
    )  # what both find easy or hard cancels
    assert easier["low"] == pytest.approx(found["low"]) and easier["high"] == pytest.approx(
        found["high"]
    )


def test_missing_runs_shrink_the_grid_and_one_seed_gives_no_interval():
    holes = [[1.0, None, -1.0, 0.5], [0.0, None, 1.0, None]]
    found = paired_bootstrap(pair(holes), "CORAL")
    assert (
        (found["pairs"], found["seeds"], found["test_domains"]) == (5, 2, 3)
        and found["difference"] == pytest.approx(0.3)
        and found["low"] < 0.3 < found["high"]
    )
    for grid in (GRID[:1], [row[:1] for row in GRID]):
        single = paired_bootstrap(pair(grid), "CORAL")
        assert single["difference"] == pytest.approx(np.mean(grid)) and all(
            math.isnan(single[name]) for name in ("low", "high", "above")
        )


def test_what_cannot_be_compared_is_said():
    runs = pair(GRID)
    with pytest.raises(
        HmoeError, match="unknown algorithm with complete runs 'MMD'. Valid: ERM, CORAL"
    ):
        paired_bootstrap(runs, "MMD")
    with pytest.raises(HmoeError, match="unknown baseline with complete runs 'MMD'"):
        paired_bootstrap(runs, "CORAL", baseline="MMD")
    with pytest.raises(HmoeError, match="unknown mode of CORAL 'mix'. Valid: default"):
        paired_grid(runs, "CORAL", mode="mix")
    apart = [
        run("ERM", "photo", 0, 0.5),
        run("CORAL", "photo", 1, 0.5),
        run("CORAL", "plain", 0, 0.5),
    ]
    with pytest.raises(
        HmoeError, match="CORAL and ERM have no trial seed and test domain in common"
    ):
        paired_bootstrap(apart, "CORAL")
    with pytest.raises(HmoeError, match="nothing to compare ERM with"):
        bootstrap_table([r for r in runs if r["spec"]["algorithm"] == "ERM"])


def three():
    """ERM, an algorithm better by two points everywhere, one that only differs by noise, and HMOE-
    DN far below."""
    noise = np.random.default_rng(0).normal(size=(3, 4))
    others = pair((2 + 0.3 * noise).tolist()) + [
        r
        for r in pair(noise.tolist(), algorithm="MMD")
        + pair((-5 + noise).tolist(), algorithm="HMOE-DN")
        if r["spec"]["algorithm"] != "ERM"
    ]
    return others


def test_the_table_agrees_with_the_paired_difference_and_tells_noise_apart():
    table = bootstrap_table(three()).set_index(["algorithm", "mode"])
    assert list(table.index) == [
        ("CORAL", "default"),
        ("MMD", "default"),
        ("HMOE-DN", "mix"),
        ("HMOE-DN", "max"),
        ("HMOE-DN", "ood"),
    ]
    assert table.excludes_0.to_dict() == {
        ("CORAL", "default"): True,
        ("MMD", "default"): False,
        ("HMOE-DN", "mix"): True,
        ("HMOE-DN", "max"): True,
        ("HMOE-DN", "ood"): True,
    }
    np.testing.assert_allclose(
        table.difference, paired_difference(three()).set_index(["algorithm", "mode"]).difference
    )


def test_the_verdict_names_rows_and_chance():
    line = noise_verdict(bootstrap_table(three()))
    assert (
        line.startswith("4 of 5 intervals exclude 0: HMOE-DN MIX -")
        and "CORAL +2.0 (95 % CI +" in line
        and line.endswith("If none differed from ERM, about 0.2 would do so by chance.")
    )
    assert "0 of 1 intervals exclude 0: no difference to ERM was detected." in noise_verdict(
        bootstrap_table([r for r in three() if r["spec"]["algorithm"] in ("ERM", "MMD")])
    )
    assert noise_verdict(bootstrap_table(pair(GRID[:1]))).startswith(
        "No intervals: they need at least two"
    )


def test_the_picture_shows_every_row_and_fills_what_is_told_apart():
    figure, axis = plt.subplots()
    table = bootstrap_table(three())
    plot_differences(table, axis, lambda name: "#123456")
    dots = [line for line in axis.lines if line.get_marker() == "o"]
    assert [t.get_text() for t in axis.get_yticklabels()] == [
        "CORAL",
        "MMD",
        "HMOE-DN MIX",
        "HMOE-DN MAX",
        "HMOE-DN OOD",
    ]
    assert [dot.get_markerfacecolor() == "white" for dot in dots] == [
        False,
        True,
        False,
        False,
        False,
    ] and {dot.get_color() for dot in dots} == {"#123456"}
    plt.close(figure)


def test_blocks_follow_what_the_algorithms_declare():
    names = algorithm_names()
    blocks = label_blocks(names)
    assert (
        sorted(sum(blocks.values(), [])) == sorted(names)
        and blocks["without domain labels"][0] == "ERM"
    )
    assert all(
        get_algorithm(n).needs_domain_labels == (block == "with domain labels")
        for block, inside in blocks.items()
        for n in inside
    )
    assert (
        label_block("SWAD-HMOE-DL") == "with domain labels"
        and label_block("SWAD-ERM") == "without domain labels"
        and label_block("My own") == "not known here"
    )
    assert label_blocks(["ERM"]) == {"without domain labels": ["ERM"]}


# The page

DIGITS = ("ERM", "CORAL", "GroupDRO", "MIRO", "SWAD", "HMOE-DL", "HMOE-DN")


def study():
    """Invented records of a study of Table 1, with a failed run and one algorithm that lacks a test
    domain."""
    from hmoe_repro.training.run_config import RunSpec

    def renamed(record, name):
        for chosen in record["selected"].values():
            chosen["validation_accuracy"] = 0.9
        spec = record["spec"] | {"algorithm": name}
        return record | {"spec": spec, "run_id": RunSpec.from_dict(spec).run_id}

    random = np.random.default_rng(0)
    make = lambda name, d, s: (
        renamed(invented.record(name, d, s, random, steps=41), name)
        if name in invented.ALGORITHMS
        else renamed(invented.record("ERM", d, s, random, steps=41), name)
    )
    runs = [
        make(name, d, s)
        for name in DIGITS
        for d in invented.DOMAINS
        for s in range(3)
        if not (name == "SWAD" and d == "sketch")
    ]
    lost = renamed(invented.failed("ERM", "sketch", 0), "SWAD")
    return runs + [lost | {"run_id": RunSpec.from_dict(lost["spec"]).run_id}]


@pytest.fixture(scope="module")
def table1_page(tmp_path_factory, root):
    "The folder of the page of Table 1, rendered from invented records."
    from hmoe_repro.report.render import KINDS, render

    base = tmp_path_factory.mktemp("table1")
    invented.write_study(base / "store", "quick-table1", study())
    folders = {"store": base / "store", "output": base / "figures"}
    return render("digits_table1", "quick", **folders, formats=KINDS).parent


@pytest.mark.slow
def test_the_page_leaves_what_a_page_leaves(table1_page):
    kinds = ("csv", "md", "tex", "png", "pdf", "ipynb", "provenance.json")
    assert {
        *(f"digits_table1.{kind}" for kind in kinds),
        "digits_table1_resolvable.md",
        "digits_table1_paired.csv",
        "digits_table1_verdict.md",
    } <= {p.name for p in table1_page.iterdir()}


def test_the_page_has_two_blocks_and_says_what_is_missing(table1_page):
    folder = table1_page
    table = (folder / "digits_table1.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert "not the paper's" in table.splitlines()[0] and len(rows) == 2 * 3 + 5
    with_labels = [row for row in rows if row.startswith("| with domain labels")]
    assert (
        {row.split("|")[2].strip() for row in with_labels} == {"CORAL", "GroupDRO", "HMOE-DL"}
        and rows[: len(with_labels)] == with_labels
        and rows[len(with_labels)].split("|")[2].strip() == "ERM"
    )
    text = (folder / "digits_table1.ipynb").read_text()
    assert (
        "failed: SWAD on sketch" in text
        and "missing: SWAD on sketch" in text
        and "Holm's correction" in text
        and "not comparable" in text
        and "differences exceed two standard errors" in text
    )
    assert "–" in next(row for row in rows if "SWAD" in row)
    verdict, *more = (folder / "digits_table1_verdict.md").read_text().splitlines()
    assert verdict.startswith("- ") and "minimum detectable difference" in verdict
    assert " Accuracy on validation images of the training domains: " in verdict
    assert more[-1].startswith("- In pairs with ERM, the interval excludes 0 for ")
