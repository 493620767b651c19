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


def test_ruff_has_nothing_to_say_of_exported_modules():
    """A cell that is not exported may use an import, or define a name, that the module lacks. nbdev
    orders the imports and writes two wide lines."""
    options = ["--config", 'include=["hmoe_repro/**/*.py"]', "--ignore", "E501,I001"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options, "hmoe_repro"],
        cwd=ROOT,
        capture_output=True,
        text=True,
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


ONE_IDEA = (  # parts whose statements hold one idea each
    "algorithms",
    "analysis",
    "apps",
    "bench",
    "cli",
    "core",
    "data",
    "method",
    "networks",
    "report",
    "studies",
    "training",
)


def is_computed(node) -> bool:
    "Is an expression more than a name, an attribute or a number?"
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return not isinstance(node, (ast.Name, ast.Attribute, ast.Constant))


def joins_ideas(node) -> str:
    "What a node does besides its one idea; '' if nothing."
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        unpacked = isinstance(node.targets[0], ast.Tuple)
        if unpacked and sum(map(is_computed, node.value.elts)) > 1:
            return "assigns several computations"
    if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.IfExp):
        return "chooses what it goes through"
    if isinstance(node, ast.NamedExpr):
        return "assigns inside an expression"
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    if isinstance(node, comprehensions):
        inner = [n for n in ast.walk(node) if n is not node and isinstance(n, comprehensions[:3])]
        if inner or len(node.generators) > 1:
            return "nests comprehensions"
    return ""


@pytest.mark.parametrize(
    "code, joined",
    [
        ("a, b = f(x), g(y)", True),
        ("a, b = b, a", False),
        ("a, b = f(x), -1", False),
        ("for x in y if z else (): pass", True),
        ("if (n := f()): pass", True),
        ("[x for y in z for x in y]", True),
        ("[[x] for x in y]", False),
    ],
)
def test_ideas_are_told_apart(code, joined):
    assert any(map(joins_ideas, ast.walk(ast.parse(code)))) == joined


@pytest.mark.parametrize("part", ONE_IDEA)
def test_a_statement_holds_one_idea(part):
    joined = []
    for path in (ROOT / "hmoe_repro" / part).glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        loops = {id(node.test) for node in nodes if isinstance(node, ast.While)}
        for node in nodes:  # `while piece := file.read(n)` is how files are read in pieces
            if joins_ideas(node) and id(node) not in loops:
                line = getattr(node, "lineno", 0)
                joined.append(f"{path.relative_to(ROOT)}:{line} {joins_ideas(node)}")
    assert not joined
