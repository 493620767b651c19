"""The change log: one line for each change, in the sections of a release."""

import re

from notebooks import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text("utf-8")
LINES = TEXT.partition("\n## ")[2].splitlines()[1:]
LONGEST = 250


def test_each_change_is_one_line():
    assert len(LINES) > 50
    for line in filter(None, LINES):
        assert re.match(r"- \S|### (Numbers|Added|Changed|Fixed|Removed)(: [A-Za-z ,]+)?$", line), (
            line
        )
        assert len(line) <= LONGEST, line


def test_changes_of_numbers_are_marked_and_come_first():
    numbers, _, others = "\n".join(LINES).partition("\n### Added")
    marked = [line for line in numbers.splitlines() if line.startswith("- ")]
    assert marked
    assert all(line.startswith("- **numbers** ") for line in marked)
    assert "**numbers**" not in others


def test_no_change_is_listed_twice():
    changes = [line for line in LINES if line.startswith("- ")]
    assert len(set(changes)) == len(changes)


def test_links_of_the_log_lead_to_files():
    for target in re.findall(r"\]\((?!https:)([^)#]+)", TEXT):
        assert (ROOT / target).exists(), target
