"""The reading path is as long as the start page says, and short enough to be read."""

import re
import sys

from notebooks import ROOT, code_lines

sys.path.append(str(ROOT / "docs/book"))
import cells  # noqa: E402
import names  # noqa: E402

REFERENCE = ("md-symbols", "md-order", "md-index")  # tables of the start page to look things up in
MOST_WORDS, WORDS, LINES = 18_000, 200, 40  # of the path; read in a minute


def words(cell):
    "The words of a cell of text that are read: no formulas, code, links' targets, folded answers."
    text = re.sub(
        r"```.*?```|\$\$.*?\$\$|\$[^$]*\$|<details>.*?</details>|<[^>]*>", " ", cell, flags=re.S
    )
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(bool(re.search("[A-Za-z]{2}", word)) for word in text.split())


def length(page):
    "(words, lines of code) of a page of the path."
    cells = [cell for cell in names.cells_of(page) if cell["id"] not in REFERENCE]
    texts = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    code = [len(code_lines(cell)) for cell in cells if cell["cell_type"] == "code"]
    return sum(map(words, texts)), sum(code)


def minutes_of_steps():
    "The minutes of each numbered row of the path: those of its pages together."
    steps = []
    for page, number in names.reading_path().items():
        read, lines = length(page)
        steps += [0.0] if number else []
        steps[-1] += read / WORDS + lines / LINES
    return [round(step) for step in steps]


def test_words_that_are_read():
    text = "Two words, $x$ and `one_name`.\n\n$$a = bb$$\n\n<details>hidden words</details>"
    assert words(text + "\n```\ncode here\n```\n[a link](https://not.counted)") == 5


def test_every_step_of_the_path_says_its_minutes():
    table = names.cell_text(names.START, "md-path")
    rows = [row.strip("| ").split("|") for row in table.splitlines() if re.match(r"\| \d", row)]
    assert [int(row[-1]) for row in rows] == minutes_of_steps()
    assert f"A minute is {WORDS} words or {LINES} lines of code" in table


def test_the_path_is_short():
    assert sum(length(page)[0] for page in names.reading_path()) <= MOST_WORDS


def test_checks_that_show_nothing_are_folded_in_the_book():
    "A check that shows a value stays, and so does a cell of the library."
    stays = {"source": "assert x\nx", "outputs": [{"data": {}}], "id": "check-a"}
    assert cells.folded(stays, evidence=False) == ("", "")
    assert cells.folded(stays | {"outputs": []}, evidence=False) == ("hide-input", "check")
    assert (
        cells.folded({"source": "def f():\n    return 1", "outputs": [], "id": "def-f"}, False)[0]
        == ""
    )
