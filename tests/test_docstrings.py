"""Docstrings of the parts below: a first line that stands alone, and sections that agree with
the code."""

import ast
import re

import pytest
from notebooks import ROOT

PARTS = (  # each in its line
    "algorithms",
    "analysis",
    "apps",
    "bench",
    "cli",
    "method",
    "report",
    "studies",
    "training",
)
FURTHER = (
    "core/config.py",
    "core/row_files.py",
    "data/cache.py",
    "data/precomputed.py",
    "networks/measuring.py",
    "networks/routing.py",
)
MODULES = [path for part in PARTS for path in sorted((ROOT / "hmoe_repro" / part).glob("*.py"))] + [
    ROOT / "hmoe_repro" / path for path in FURTHER
]
VAGUE = {"what", "those", "that", "how", "of", "whether", "which", "where", "all", "one", "in"}
SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\n((?:(?: {4}.*)?\n?)+)", re.M)
ENTRY = re.compile(r"^ {4}\*{0,2}(\w+)(?:, \w+)*:", re.M)


def documented(path):
    "(name, node, docstring) of the module and of its classes and functions, if they have one."
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", path.stem), node, text


def sections(text):
    "Title -> body of the sections of a docstring."
    return dict(SECTION.findall(text + "\n"))


def parameters(node):
    "The names of a function's parameters; of a class, those of its constructor or its fields."
    if isinstance(node, ast.ClassDef):
        names = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                names |= parameters(inner)
        return names
    a = node.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    return {argument.arg for argument in every if argument}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_first_lines_say_what_a_thing_is_or_does(path):
    found = list(documented(path))
    assert found or not path.read_text(encoding="utf-8").strip()
    for name, _, text in found:
        first = re.split(r"\W+", text, maxsplit=1)[0].lower()
        assert first not in VAGUE, f"{name}: {text.splitlines()[0]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_what_is_public_has_a_docstring(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = [
        node
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
    ]
    assert not [node.name for node in public if not ast.get_docstring(node)]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_documented_arguments_are_parameters(path):
    for name, node, text in documented(path):
        named = ENTRY.findall(sections(text).get("Args", ""))
        assert "Args:" not in text or named, name
        if not isinstance(node, ast.Module):
            assert set(named) <= parameters(node), (name, set(named) - parameters(node))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_an_algorithm_says_its_loss_and_its_source(path):
    for name, node, text in documented(path):
        if not isinstance(node, ast.ClassDef):
            continue
        papers = [
            keyword.value.value
            for call in node.decorator_list
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "register"
            for keyword in call.keywords
            if keyword.arg == "paper"
        ]
        for paper in papers:
            prose = SECTION.sub("", text)
            assert paper in " ".join(text.split()), f"{name} does not name {paper}"
            assert sum(bool(line.strip()) for line in prose.splitlines()) <= 8, name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_no_code_span_is_broken_over_two_lines(path):
    for name, _, text in documented(path):
        for paragraph in text.split("\n\n"):
            lines = paragraph.splitlines()
            odd = [line for line in lines if line.count("`") % 2]
            assert not odd, f"{name}: {odd[0]}"
