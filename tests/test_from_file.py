"""An algorithm in a file of one's own: which class is meant, what is said where it is wrong, and
with which version of the file a run resumes."""

import ast
import itertools
import sys

import pytest
import torch

from hmoe_repro.algorithms.base import ALGORITHMS
from hmoe_repro.algorithms.from_file import (
    algorithm_from_file,
    explain_error,
    is_file_algorithm,
    restore_algorithm,
    source_hash,
)
from hmoe_repro.algorithms.source import (
    _last_cells,
    keep,
    packed_source,
    read_kept,
    source_of,
    unpack_source,
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
    assert file(TWO, "Plain") == "Plain (mine.py)"
    assert ALGORITHMS["Plain (mine.py)"].needs_domain_labels
    assert ALGORITHMS["Plain (mine.py)"].settings.smoothing == 0.1
    assert file(TWO, "Named") == file(TWO, "Other") == "Named (mine.py)"
    hashes = {source_hash(ALGORITHMS[f"{name} (mine.py)"]) for name in ("Named", "Plain")}
    assert len(hashes) == 2
    assert "Named" not in ALGORITHMS
    assert "Plain" not in ALGORITHMS
    assert is_file_algorithm("mine.py:Plain")
    assert not is_file_algorithm("Plain (mine.py)")


def test_a_class_name_goes_before_a_registered_one(file):
    text = "from hmoe_repro.algorithms.base import ERM\n"
    text += "class First(ERM): name = 'Second'\nclass Second(ERM): pass\n"
    assert file(text, "Second") == "Second (mine.py)"
    assert ALGORITHMS["Second (mine.py)"].__name__ == "Second"


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "x = 1\n\nraise ValueError('no')\n",
            r"ValueError: no \(line 3\). Fix: correct that line of mine",
        ),
        ("def broken(:\n", r"SyntaxError: .*\(line 1\)"),
        ("import sys\nsys.exit('done')\n", r"SystemExit: done \(line 2\)"),
        ("import nowhere_to_be_found\n", r"nowhere_to_be_found.*\(line 1\)"),
        (
            "class Mine: pass\n",
            r"\(Mine exists, but is not a subclass of Algorithm\). Fix: define one as a subclass",
        ),
        (TWO, "no algorithm 'Mine'. Fix: use one of its algorithms: Plain, Other"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(file, text, said):
    for _ in range(2):  # and what failed once is not taken for imported
        with pytest.raises(HmoeError, match=said):
            file(text, "Mine")


def test_settings_that_name_no_file_or_no_class(tmp_path):
    with pytest.raises(HmoeError, match="Fix: write path/file.py:Name"):
        algorithm_from_file("mine.py")
    with pytest.raises(HmoeError, match="cannot be read.*Fix: correct its path"):
        algorithm_from_file(f"{tmp_path / 'absent.py'}:Mine")


def test_an_error_in_training_is_explained_with_its_line(file):
    cls = ALGORITHMS[file(TWO, "Named")]
    with pytest.raises(IndexError) as caught:
        cls(*SHAPE).update([])
    said = explain_error(caught.value, cls.name, source_hash(cls))
    assert "line 17 of mine.py (`return {" in said
    assert "IndexError" in said
    assert "Fix:" in said
    assert explain_error(ValueError("elsewhere"), "Named", "0" * 12) == "ValueError: elsewhere"
    assert explain_error(ValueError("ours"), "ERM", None) == "ValueError: ours"


def test_a_run_goes_on_with_the_version_it_began_with(file, tmp_path):
    old = source_hash(ALGORITHMS[file(TWO, "Plain")])
    new = source_hash(ALGORITHMS[file(TWO.replace("0.1", "0.2"), "Plain")])
    assert old != new
    assert ALGORITHMS["Plain (mine.py)"].settings.smoothing == 0.2
    assert restore_algorithm("Plain (mine.py)", old).settings.smoothing == 0.1
    with pytest.raises(HmoeError, match=rf"not kept here \(the present source has hash {old}\)"):
        restore_algorithm("Plain (mine.py)", "0" * 12)
    kept = tmp_path / "runs" / "algorithms" / f"{new}.py"
    kept.write_text("changed")
    with pytest.raises(
        HmoeError, match=f"the kept source {new}.py of algorithm Plain .mine.py. was changed"
    ):
        restore_algorithm("Plain (mine.py)", new)


USES = """
import math
from helpers import sharpen
import package.losses
from torch.nn.functional import cross_entropy
from hmoe_repro.algorithms.base import ERM, concatenate

RATE = 0.5
TABLE = {}
TABLE["k"] = 1

def scaled(x):
    def inner():
        from helpers import late
        return late(x)
    return RATE * sharpen(package.losses.twice(inner()))

class Base(ERM):
    def loss(self, minibatches):
        x, y = concatenate(minibatches)
        return {"loss": scaled(cross_entropy(self.predict(x), y))}

class Mine(Base):
    table = TABLE

class Another(ERM):
    other = math.pi  # a remark
"""
BESIDE = {
    "helpers.py": "import deeper\n\ndef sharpen(x):\n    return deeper.same(x)\n\n"
    "def late(x):\n    import deeper\n    return deeper.same(x)\n",
    "deeper.py": "def same(x):\n    return x\n",
    "package/__init__.py": "from .losses import twice\n",
    "package/losses.py": "import deeper\n\ndef twice(x):\n    return 2 * deeper.same(x)\n",
    "unused.py": "x = 1\n",
}
CHANGES = [  # what is changed, in which file, and whether that is another version of Mine
    (USES, "math.pi  # a remark", "math.e", False),
    (USES, "class Another(ERM):", "class Another(ERM):\n    more = 1\n", False),
    (USES, "RATE = 0.5", "# remark\nRATE = (\n    0.5)", False),
    (USES, "import math", "import math, cmath", True),
    (USES, "", "if __name__ == '__main__':\n    print(Mine)\n", False),
    (USES, "RATE = 0.5", "RATE = 0.6", True),
    (USES, "return RATE *", "return 2 * RATE *", True),
    (USES, '"k"] = 1', '"k"] = 2', True),
    (USES, "x, y = conc", "y, x = conc", True),
    (USES, "", "Mine.table = {}\n", True),
    (USES, "", "import torch\ntorch.set_flush_denormal(True)\n", True),
    (USES, "", "import colorsys\n", True),
    ("deeper.py", "return x", "return x + 1", True),
    ("deeper.py", "return x", "return x  # a remark", False),
    ("package/__init__.py", "import twice", "import twice as thrice", True),
    ("unused.py", "1", "2", False),
]


def lay_out(folder, changed=None, old="", new=""):
    "The file and the modules next to it, one of them changed."
    for name, text in {"mine.py": USES, **BESIDE}.items():
        if name == changed or name == "mine.py" and changed == USES:
            assert old in text
            text = text.replace(old, new, 1) if old else text + new
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "mine.py"


@pytest.mark.parametrize("changed, old, new, other", CHANGES)
def test_the_hash_is_that_of_what_the_class_reaches(tmp_path, changed, old, new, other):
    def key():
        return source_of((tmp_path / "mine.py").read_text(), "Mine", tmp_path).key

    lay_out(tmp_path)
    before = key()
    lay_out(tmp_path, changed, old, new)
    assert (key() != before) == other


def test_the_hash_is_the_same_where_python_fails_once_at_each_parse(tmp_path, monkeypatch):
    lay_out(tmp_path)
    text = (tmp_path / "mine.py").read_text()
    key = source_of(text, "Mine", tmp_path).key
    parse = ast.parse
    calls = itertools.count(1)

    def fails_every_other_time(*arguments, **options):
        if next(calls) % 2:
            raise SystemError("AST constructor recursion depth mismatch (before=159, after=180)")
        return parse(*arguments, **options)

    monkeypatch.setattr(ast, "parse", fails_every_other_time)
    assert source_of(text, "Mine", tmp_path).key == key
    assert next(calls) > 4


def test_code_that_looks_names_up_at_run_time_counts_as_a_whole(tmp_path):
    keys = [
        source_of(USES.replace("RATE *", f"{how} *").replace("math.pi", pi), "Mine", tmp_path).key
        for how in ("RATE", "globals()['RATE']")
        for pi in ("math.pi", "math.e")
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_modules_next_to_the_file_travel_with_it_in_two_versions(tmp_path, monkeypatch, own_names):
    """Imports on top, inside functions and inside packages find the version that was kept, even
    when the files are gone; and nothing of it is left among the modules of this process."""
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    losses = []
    for factor in ("x", "x * 10"):
        path = lay_out(tmp_path / "own", "deeper.py", "return x", f"return {factor}")
        name = algorithm_from_file(f"{path}:Mine")
        losses.append((name, source_hash(ALGORITHMS[name])))
    for name in BESIDE:
        (tmp_path / "own" / name).unlink()
    batch = [(torch.ones(4, 3, 16, 16), torch.arange(4))] * 3
    values = []
    for name, key in losses:
        torch.manual_seed(0)
        cls = restore_algorithm(name, key)
        values.append(cls(*SHAPE).loss(batch)["loss"].item())
    assert values[1] == pytest.approx(1000 * values[0], rel=1e-5)  # sharpen, twice and late
    assert not {"helpers", "deeper", "package"} & set(sys.modules)
    kept = tmp_path / "runs" / "algorithms" / losses[0][1]
    assert not list(kept.rglob("*.pyc"))
    assert not (kept / "unused.py").exists()
    (kept / "deeper.py").write_text("def same(x):\n    return 0 * x\n")
    del ALGORITHMS[name]
    with pytest.raises(HmoeError, match="was changed"):
        restore_algorithm(*losses[0])


@pytest.mark.parametrize(
    "text, said",
    [
        ("from ..above import x\nclass Mine: y = x", "above the folder of the file"),
        ("import broken\nclass Mine: y = broken", r"broken.py is not valid Python: .*line 1"),
    ],
)
def test_what_cannot_be_carried_is_refused(tmp_path, text, said):
    (tmp_path / "broken.py").write_text("def :")
    with pytest.raises(HmoeError, match=said):
        source_of(text, "Mine", tmp_path)


def test_cells_that_ran_twice_or_out_of_order_are_the_same_code(tmp_path):
    cells = ["import math\nRATE = 0.1", "class Base: rate = RATE", "class Mine(Base): pi = math.pi"]

    def of(*executed):
        return source_of(_last_cells(executed), "Mine", tmp_path, in_file=False)

    plain = of(*cells)
    executed = [
        cells[0],
        "RATE = 5",
        "x = 1/0",
        cells[1],
        "%broken",
        *cells,
        "x = Mine()",
        "data = x",
    ]
    assert of(*executed, cells[0]) == plain
    assert of(*cells, "RATE = 0.2").key != plain.key
    assert "data" not in of(*executed, cells[2] + "\n    def f(self, data): return data").text


def test_a_packed_source_is_the_same_on_another_machine(tmp_path):
    (tmp_path / "helpers.py").write_text("def penalty(x): return x")
    (tmp_path / "teacher.pt").write_bytes(b"weights")
    text = "import helpers\nclass Mine:\n    files = {'teacher': 'teacher.pt'}\n"
    source = source_of(text, "Mine", tmp_path)
    path = keep(source, tmp_path / "here")
    files = packed_source(tmp_path / "here", source.key)
    assert len(files) == 4  # the text, the module next to it, the digests and the teacher
    unpack_source(files, tmp_path / "there")
    assert read_kept(tmp_path / "there" / path.name) == source
    assert packed_source(tmp_path / "here", "0" * 12) == {}
