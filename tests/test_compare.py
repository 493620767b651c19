"""The two blocks of Table 1, and its page on the digits from invented records."""

import re

import invented
import numpy as np
import pandas as pd
import pytest

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.analysis.published import label_block, label_blocks
from hmoe_repro.apps.compare import Comparison

pytestmark = pytest.mark.usefixtures("warm_kernels")


def test_blocks_follow_what_the_algorithms_declare():
    names = algorithm_names()
    blocks = label_blocks(names)
    assert sorted(sum(blocks.values(), [])) == sorted(names)
    assert blocks["without domain labels"][0] == "ERM"
    assert all(
        get_algorithm(n).needs_domain_labels == (block == "with domain labels")
        for block, inside in blocks.items()
        for n in inside
    )
    assert label_block("SWAD-HMOE-DL") == "with domain labels"
    assert label_block("SWAD-ERM") == "without domain labels"
    assert label_block("My own") == "not known here"
    assert label_blocks(["ERM"]) == {"without domain labels": ["ERM"]}


# The page

DIGITS = ("ERM", "CORAL", "GroupDRO", "MIRO", "SWAD", "HMOE-DL", "HMOE-DN")


def study():
    """Invented records of a study of Table 1, with a failed run and one algorithm that lacks a test
    domain."""
    from hmoe_repro.training.run_config import RunConfig

    def renamed(record, name):
        for chosen in record["selected"].values():
            chosen["validation_accuracy"] = 0.9
        config = record["config"] | {"algorithm": name}
        return record | {"config": config, "run_id": RunConfig.from_dict(config).run_id}

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
    return runs + [lost | {"run_id": RunConfig.from_dict(lost["config"]).run_id}]


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
        "digits_table1_contrasts.csv",
        "digits_table1_verdict.md",
    } <= {p.name for p in table1_page.iterdir()}


def test_the_page_has_two_blocks_and_says_what_is_missing(table1_page):
    folder = table1_page
    table = (folder / "digits_table1.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert "stand-in" in table.splitlines()[0]
    assert len(rows) == 2 * 3 + 5
    with_labels = [row for row in rows if row.startswith("| with domain labels")]
    assert {row.split("|")[2].strip() for row in with_labels} == {"CORAL", "GroupDRO", "HMOE-DL"}
    assert rows[: len(with_labels)] == with_labels
    assert rows[len(with_labels)].split("|")[2].strip() == "ERM"
    text = (folder / "digits_table1.ipynb").read_text()
    assert "failed: SWAD on sketch" in text
    assert "missing: SWAD on sketch" in text
    assert "Holm's correction" in text
    assert "not comparable" in text
    assert "on single test domains" in text.lower()
    assert "–" in next(row for row in rows if "SWAD" in row)
    verdict, *more = (folder / "digits_table1_verdict.md").read_text().splitlines()
    assert re.match(r"- (No|Undecided): .* above ERM", verdict)
    assert any("against ERM" in line or "differs significantly from ERM" in line for line in more)
    assert any(line.startswith("- Against HMOE-DN MIX: ") for line in more)


def test_a_saved_comparison_says_how_many_of_its_rows_the_picture_has(tmp_path):
    names = [f"other {k}" for k in range(25)]
    rows = [
        (name, "default", domain, k - 9.0, k - 10.0, k - 8.0, False)
        for k, name in enumerate(names)
        for domain in ("ink", "oil", "Average")
    ]
    columns = ["algorithm", "mode", "test_domain", "difference", "low", "high", "significant"]
    contrasts = pd.DataFrame(rows, columns=columns)
    frame = pd.DataFrame({"algorithm": names, "finished": "2026-01-01T00:00:00"})
    said = "20 of 25 rows; the rest in the table below."
    for table, expected in ((contrasts, True), (contrasts[contrasts.difference < 5], False)):
        comparison = Comparison("No.", frame[["algorithm"]], table, frame, [])
        page = comparison.save(tmp_path / "page.html").read_text(encoding="utf-8")
        assert (said in page) == expected
        assert "<svg" in page
