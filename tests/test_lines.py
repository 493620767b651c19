"""Lines one can read: ruff is content, nothing is wider than a notebook shows, and no function or
module holds more than one can keep in mind."""

import ast
import subprocess
import sys

import pytest
from notebooks import LIBRARY, PAPER, ROOT, cells, for_each, python

WIDTH, FUNCTION, MODULE = 100, 48, 800
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


def lines_of(function):
    "Lines of a function without its docstring and without the functions inside it."
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines -= first.end_lineno - first.lineno + 1
    inner = [
        n
        for n in ast.walk(function)
        if n is not function and isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return lines - sum(n.end_lineno - n.lineno + 1 for n in inner)


@for_each(LIBRARY + PAPER)
def test_no_function_is_long(path):
    functions = [
        n
        for cell in cells(path, "code")
        for n in ast.walk(python(cell))
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert not {f.name: lines_of(f) for f in functions if lines_of(f) > FUNCTION}


def test_no_module_is_long():
    def lines(path):
        text = path.read_text(encoding="utf-8").splitlines()
        return sum(bool(line.strip()) and not line.startswith("# %%") for line in text)

    assert not {p.relative_to(ROOT).as_posix(): lines(p) for p in MODULES if lines(p) > MODULE}
