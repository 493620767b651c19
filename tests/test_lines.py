"""Lines one can read: ruff is content with notebooks, modules and tests, and no line is wider than
a notebook shows."""

import ast
import subprocess
import sys

import pytest
from notebooks import ROOT

WIDTH = 100
MODULES = sorted(p for p in (ROOT / "hmoe_repro").rglob("*.py") if p.name != "_modidx.py")


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=lambda c: c[0])
def test_ruff_has_nothing_to_say(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_no_line_of_the_library_is_wide():
    "But for line 1, the one sentence of a notebook, and for `__all__`: nbdev writes both."
    wide = []
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        named = [n for n in ast.parse(text).body if isinstance(n, ast.Assign)]
        of_nbdev = {
            line
            for n in named
            if getattr(n.targets[0], "id", "") == "__all__"
            for line in range(n.lineno, n.end_lineno + 1)
        }
        wide += [
            f"{path.relative_to(ROOT)}:{i}"
            for i, line in enumerate(text.splitlines(), 1)
            if len(line) > WIDTH and i not in of_nbdev and i > 1
        ]
    assert not wide
