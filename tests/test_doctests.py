"""Examples in docstrings print what they say, and every function of the public API has one."""

import doctest
import importlib

import pytest
from notebooks import ROOT

import hmoe_repro

LIBRARY = ROOT / "hmoe_repro"
WITH_EXAMPLES = [
    path
    for path in sorted(LIBRARY.rglob("*.py"))
    if "\n    >>> " in path.read_text(encoding="utf-8")
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_examples_print_what_they_say(path, tmp_path, monkeypatch):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    failed, tried = doctest.testmod(module, optionflags=OPTIONS)
    assert tried
    assert not failed


@pytest.mark.parametrize("name", hmoe_repro.__all__)
def test_a_public_name_has_an_example(name):
    assert ">>> " in getattr(hmoe_repro, name).__doc__
