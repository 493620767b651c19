"""The reading path is as long as the start page says, and short enough to be read. The tables that
the start page links to are complete."""

import importlib
import importlib.util
import re
import sys

import pytest
from notebooks import LIBRARY, ROOT

sys.path.append(str(ROOT / "docs/book"))
import cells  # noqa: E402
import names  # noqa: E402

spec = importlib.util.spec_from_file_location("reading_path", ROOT / ".ci/reading_path.py")
reading_path = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reading_path)

MOST_WORDS = 18_000  # of the path
MOST_WORDS_OF_START = 900
FIX = "Fix: python .ci/reading_path.py"


def test_words_that_are_read():
    text = "Two words, $x$ and `one_name`.\n\n$$a = bb$$\n\n<details>hidden words</details>"
    text += "\n```\ncode here\n```\n[a link](https://not.counted)"
    assert reading_path.count_words(text) == 5


def test_every_step_of_the_path_says_its_minutes():
    table = names.cell_text(names.START, reading_path.TABLE)
    rows = [row.strip("| ").split("|") for row in table.splitlines() if re.match(r"\| \d", row)]
    assert [int(row[-1]) for row in rows] == reading_path.minutes_of_steps(), FIX
    words, lines = reading_path.WORDS, reading_path.LINES
    assert f"A minute is {words} words or {lines} lines of code" in table


def test_minutes_are_written_into_the_table():
    table = "| | page | minutes |\n|---|---|---:|\n| 1 | a 9 | 10 |\n| 2 | b | 3 |\n\nEnd."
    made = reading_path.with_minutes(table, [7, 12])
    assert made == table.replace("| 10 |", "| 7 |").replace("| 3 |", "| 12 |")
    with pytest.raises(ValueError, match="1 rows too few"):
        reading_path.with_minutes(table, [7, 12, 1])


def test_the_path_is_short():
    assert sum(reading_path.length(page)[0] for page in names.reading_path()) <= MOST_WORDS


def test_the_start_page_is_question_picture_and_path():
    found = names.cells_of(names.START)
    assert reading_path.length(names.START)[0] <= MOST_WORDS_OF_START
    ids = [cell["id"] for cell in found]
    order = ["md-question", "md-picture", "figure-hmoe-drawing", reading_path.TABLE]
    assert sorted(order, key=ids.index) == order
    assert cells.is_picture(found[ids.index("figure-hmoe-drawing")])
    linked = " ".join(cell["source"] for cell in found)
    for page in (names.INDEX, names.NOTEBOOKS, "docs/papers.md"):
        assert f"](../../{page})" in linked


def test_every_notebook_is_in_the_table_once_and_in_order():
    links = re.findall(r"^\| \[(\w+)\]\(([^)]+\.ipynb)\)", names.text_of(names.NOTEBOOKS), re.M)
    listed = [((ROOT / names.NOTEBOOKS).parent / link).resolve() for _, link in links]
    expected = [p.resolve() for p in LIBRARY if p != ROOT / names.START]
    assert listed == expected
    assert [name for name, _ in links] == [path.stem for path in expected]
    assert len(links) >= 150


def resolve(name):
    "The object behind a dotted name of the library, for example 'method.hmoe.HMOE.predict'."
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module("hmoe_repro." + ".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_name_of_the_index_is_found():
    table = names.text_of(names.INDEX).partition("\n## What the letters mean")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    objects = {n: resolve(n) for n in re.findall(r"`([\w.]+)`", "\n".join(rows))}
    assert len(objects) >= 30
    assert all(map(callable, objects.values()))
    cited = [o for o in objects.values() if re.search(r"\(HMOE, [^)]*\)", o.__doc__ or "")]
    assert len(cited) >= 15  # docstrings that name their place in the paper


def test_checks_that_show_nothing_are_folded_in_the_book():
    "A check that shows a value stays, and so does a cell of the library."
    stays = {"source": "assert x\nx", "outputs": [{"data": {}}], "id": "check-a"}
    assert cells.folded(stays, evidence=False) == ("", "")
    assert cells.folded(stays | {"outputs": []}, evidence=False) == ("hide-input", "check")
    assert (
        cells.folded({"source": "def f():\n    return 1", "outputs": [], "id": "def-f"}, False)[0]
        == ""
    )
