"""Write the minutes of each step of the reading path into the table of the start page.

    python .ci/reading_path.py

A minute is 200 words or 40 lines of code. Formulas, targets of links, buttons, code in text and
folded answers are not counted.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "docs/book")]

import names  # noqa: E402

WORDS, LINES = 200, 40  # read in a minute
TABLE = "md-path"  # the cell of the start page
INSTALL = "install-if-absent"  # the cell that nobody reads


def count_words(text: str) -> int:
    "Return the number of words that are read in a text: no formulas, code or folded answers."
    button = r"\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)"
    skipped = rf"{button}|```.*?```|\$\$.*?\$\$|\$[^$]*\$|<details>.*?</details>|<[^>]*>"
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(skipped, " ", text, flags=re.S))
    return sum(bool(re.search("[A-Za-z]{2}", word)) for word in text.split())


def count_lines(cell: dict) -> int:
    "Return the number of lines of a code cell without comments and empty lines."
    lines = [line.strip() for line in cell["source"].splitlines()]
    return sum(bool(line) and line[0] != "#" for line in lines)


def length(page: str) -> tuple[int, int]:
    "Return (words, lines of code) of a page."
    cells = names.cells_of(page)
    words = sum(count_words(c["source"]) for c in cells if c["cell_type"] == "markdown")
    code = [c for c in cells if c["cell_type"] == "code" and c["id"] != INSTALL]
    return words, sum(count_lines(c) for c in code)


def minutes_of_steps() -> list[int]:
    "Return the minutes of each numbered row of the path, summed over its pages."
    steps = []
    for page, number in names.reading_path().items():
        words, lines = length(page)
        steps += [0.0] if number else []
        steps[-1] += words / WORDS + lines / LINES
    return [round(step) for step in steps]


def with_minutes(table: str, minutes: list[int]) -> str:
    "Return the table of the path with these minutes in its last column."
    left, lines = list(minutes), table.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if re.match(r"\| \d", line):
            lines[i] = re.sub(r"\d+ \|$", f"{left.pop(0)} |", line.rstrip("\n")) + "\n"
    if left:
        raise ValueError(f"the table has {len(left)} rows too few")
    return "".join(lines)


def main() -> None:
    "Rewrite the column of minutes."
    path = ROOT / names.START
    notebook = json.loads(path.read_text(encoding="utf-8"))
    (cell,) = [c for c in notebook["cells"] if c["id"] == TABLE]
    table = with_minutes("".join(cell["source"]), minutes_of_steps())
    cell["source"] = table.splitlines(keepends=True)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
