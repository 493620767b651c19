"""An algorithm in a file of one's own: which class is meant, what is said where it is wrong, and
with which version of the file a run resumes."""

import pytest

from hmoe_repro.algorithms.base import ALGORITHMS
from hmoe_repro.algorithms.from_file import (
    algorithm_from_file,
    explain_error,
    is_file_algorithm,
    restore_algorithm,
    source_hash,
)
from hmoe_repro.core.errors import HmoeError

SHAPE = ((3, 16, 16), 4, 3, {"network": "small_cnn"})
TWO = """
from __future__ import annotations
from dataclasses import dataclass

from hmoe_repro.algorithms.base import ERM, register

@dataclass
class Settings:
    smoothing: float = 0.1

class Plain(ERM):
    settings = Settings()

@register("Named", paper="a test", needs_domain_labels=False)
class Other(ERM):
    def loss(self, minibatches):
        return {"loss": minibatches[7]}
"""


@pytest.fixture
def file(tmp_path, monkeypatch, own_names):
    "A function that writes a file and registers an algorithm of it; runs are kept elsewhere."
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))

    def enter(text, name):
        (tmp_path / "mine.py").write_text(text)
        return algorithm_from_file(f"{tmp_path / 'mine.py'}:{name}")

    return enter


def test_a_class_is_found_by_its_own_name_and_by_the_registered_one(file):
    assert (
        file(TWO, "Plain") == "Plain (mine.py)"
        and ALGORITHMS["Plain (mine.py)"].needs_domain_labels
    )
    assert ALGORITHMS["Plain (mine.py)"].settings.smoothing == 0.1
    assert file(TWO, "Named") == file(TWO, "Other") == "Named (mine.py)"
    hashes = {source_hash(ALGORITHMS[f"{name} (mine.py)"]) for name in ("Named", "Plain")}
    assert len(hashes) == 1 and "Named" not in ALGORITHMS and "Plain" not in ALGORITHMS
    assert is_file_algorithm("mine.py:Plain") and not is_file_algorithm("Plain (mine.py)")


def test_a_class_name_goes_before_a_registered_one(file):
    text = "from hmoe_repro.algorithms.base import ERM\n"
    text += "class First(ERM): name = 'Second'\nclass Second(ERM): pass\n"
    assert file(text, "Second") == "Second (mine.py)"
    assert ALGORITHMS["Second (mine.py)"].__name__ == "Second"


@pytest.mark.parametrize(
    "text, said",
    [
        ("x = 1\n\nraise ValueError('no')\n", r"ValueError: no \(line 3\). Fix: that line of mine"),
        ("def broken(:\n", r"SyntaxError: .*\(line 1\)"),
        ("import sys\nsys.exit('done')\n", r"SystemExit: done \(line 2\)"),
        ("import nowhere_to_be_found\n", r"nowhere_to_be_found.*\(line 1\)"),
        ("class Mine: pass\n", r"\(Mine there is no subclass of Algorithm\). It has: no subclass"),
        (TWO, "no algorithm 'Mine'. It has: Plain, Other"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(file, text, said):
    for _ in range(2):  # and what failed once is not taken for imported
        with pytest.raises(HmoeError, match=said):
            file(text, "Mine")


def test_settings_that_name_no_file_or_no_class(tmp_path):
    with pytest.raises(HmoeError, match="Fix: path/file.py:Name"):
        algorithm_from_file("mine.py")
    with pytest.raises(HmoeError, match="cannot be read.*Fix: its path"):
        algorithm_from_file(f"{tmp_path / 'absent.py'}:Mine")


def test_an_error_in_training_is_explained_with_its_line(file):
    cls = ALGORITHMS[file(TWO, "Named")]
    with pytest.raises(IndexError) as caught:
        cls(*SHAPE).update([])
    said = explain_error(caught.value, cls.name, source_hash(cls))
    assert "line 17 of mine.py (`return {" in said and "IndexError" in said and "Fix:" in said
    assert explain_error(ValueError("elsewhere"), "Named", "0" * 12) == "ValueError: elsewhere"
    assert explain_error(ValueError("ours"), "ERM", None) == "ValueError: ours"


def test_a_run_goes_on_with_the_version_it_began_with(file, tmp_path):
    old = source_hash(ALGORITHMS[file(TWO, "Plain")])
    new = source_hash(ALGORITHMS[file(TWO.replace("0.1", "0.2"), "Plain")])
    assert old != new and ALGORITHMS["Plain (mine.py)"].settings.smoothing == 0.2
    assert restore_algorithm("Plain (mine.py)", old).settings.smoothing == 0.1
    with pytest.raises(
        HmoeError, match=f"not kept here; the one known by that name has hash {old}"
    ):
        restore_algorithm("Plain (mine.py)", "0" * 12)
    kept = tmp_path / "runs" / "algorithms" / f"{new}.py"
    kept.write_text("changed")
    with pytest.raises(
        HmoeError, match=f"the kept source {new}.py of algorithm Plain .mine.py. was changed"
    ):
        restore_algorithm("Plain (mine.py)", new)
