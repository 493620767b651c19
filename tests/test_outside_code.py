"""A run is named by all that decides its numbers: the whole of its code, the files that this code
reads, and no value that only a running program holds."""

import contextlib
import importlib
import json
import os
import runpy
import sys
import textwrap
import types

import pytest
import torch
from safetensors.torch import save_file

from hmoe_repro.algorithms import get_algorithm, source
from hmoe_repro.algorithms.base import ALGORITHMS, ERM, register
from hmoe_repro.algorithms.from_file import (
    algorithm_from_file,
    algorithm_name,
    restore_algorithm,
    source_hash,
)
from hmoe_repro.algorithms.outside_code import difference
from hmoe_repro.algorithms.source import read_kept, source_of
from hmoe_repro.apps.export import export_model
from hmoe_repro.apps.predict import load
from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import ensure_writable
from hmoe_repro.studies.worker import RunFileServer, train_remotely
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome

SHAPE = ((3, 16, 16), 4, 3, {"network": "small_cnn"})


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, own_names):
    "A working directory of the test's own, with its runs."
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def enter(path, name="Mine"):
    "The class of a file, as it is trained."
    return ALGORITHMS[algorithm_from_file(f"{path}:{name}")]


# Statements that change a constant from afar

CHANGED = {
    "alias": "D = C\nD['w'] = 0.0",
    "helper": "def f(d): d['w'] = 0.0\n_ = f(C)",
    "setitem": "import operator\n_ = operator.setitem(C, 'w', 0.0)",
    "annotated": "def f(d): d['w'] = 0.0\n_: object = f(C)",
    "decorator": "def enter(f): C['w'] = 0.0; return f\n@enter\ndef unused(): pass",
    "default": "def f(d): d['w'] = 0.0\ndef unused(x=f(C)): pass",
    "annotation": "def f(d): d['w'] = 0.0\ndef unused(x: f(C)): pass",
    "class body": "class Unused:\n    C['w'] = 0.0",
    "class value": "D = C\nclass Unused:\n    x = D.update(w=0.0)",
    "method default": "def f(d): d['w'] = 0.0\nclass Unused:\n    def g(self, x=f(C)): pass",
    "subclass hook": "class Base:\n    def __init_subclass__(cls): C['w'] = 0.0\n"
    "class Unused(Base): pass",
    "metaclass": "class Meta(type):\n    def __init__(cls, *a): C['w'] = 0.0\n"
    "class Unused(metaclass=Meta): pass",
    "descriptor": "class Named:\n    def __set_name__(self, o, n): C['w'] = 0.0\nnamed = Named()\n"
    "class Unused:\n    x = named",
    "operator": "class Sum:\n    def __or__(self, o): C['w'] = 0.0\nD = Sum()\nx = D | {}",
    "format": "class Text:\n    def __str__(self): C['w'] = 0.0; return ''\nt = Text()\nx = f'{t}'",
    "percent": "class Text:\n    def __str__(self): C['w'] = 0.0; return ''\nx = '%s' % (Text(),)",
    "walrus": "x = (y := C).update(w=0.0)",
    "comprehension": "x = [C.update(w=0.0) for _ in 'a']",
    "not a program": "if __name__ != '__main__':\n    C['w'] = 0.0",
    "no program": "if __name__ == '__main__':\n    pass\nelse:\n    C['w'] = 0.0",
    "or a program": "if __name__ == '__main__' or True:\n    C['w'] = 0.0",
    "rebound register": "def register(d): d['w'] = 0.0; return d\nx = register(C)",
    "rebound property": "def property(f): C['w'] = 0.0; return f\n"
    "class Unused:\n    @property\n    def x(self): pass",
    "subclasses": "class Zero:\n    w = 0.0\n    def __init__(self): pass\n"
    "class Sub(Zero): w = 0.0\nC['w'] = len(Zero.__subclasses__()) - 1.0",
}
FILE = """
from hmoe_repro.algorithms.base import ERM, HParam
C = {"w": 1.0}

class Mine(ERM):
    def weight(self):
        return C["w"]

    def loss(self, minibatches):
        return {k: C["w"] * v for k, v in super().loss(minibatches).items()}
"""


@pytest.mark.parametrize("how", CHANGED)
def test_what_is_trained_is_what_the_file_says(place, how):
    before, after = FILE.split("\nclass Mine")
    text = f"{before}\n{CHANGED[how]}\n\nclass Mine{after}"
    path = write(place / "mine.py", text)
    assert runpy.run_path(str(path))["C"] == {"w": 0.0}, "that is what the file says"
    cls = enter(path)
    assert cls(*SHAPE).weight() == 0.0
    key = source_hash(cls)
    changed = (
        text.replace("w'] = 0.0", "w'] = 2.0")
        .replace("w=0.0", "w=2.0")
        .replace("'w', 0.0", "'w', 2.0")
    )
    changed = changed.replace("- 1.0", "+ 1.0")
    assert changed != text
    assert source_hash(enter(write(place / "mine.py", changed))) != key


QUIET = [
    '"""A text."""\n',
    "# a remark\n",
    "if __name__ == '__main__':\n    C['w'] = 0.0\n",
    "def unused(x=1, *, y: int | None = None) -> dict[str, int]:\n    return C.pop('w')\n",
    "OTHER = 3.0\nTABLE = {'other': OTHER}\n",
    "class Second(ERM):\n    HPARAMS = ERM.HPARAMS | {'a': HParam(0.5, 'half', min=0)}\n"
    "    def loss(self, minibatches):\n        return {'loss': C['w']}\n"
    "    @property\n    def x(self):\n        return C\n",
    "class Own:\n    y = (1, 2)\nclass Below(Own):\n    '''Its parent.'''\n",
]


@pytest.mark.parametrize("text", QUIET)
def test_what_cannot_matter_makes_no_new_run(place, text):
    key = source_of(FILE, "Mine", place).key
    assert source_of(FILE + text, "Mine", place).key == key
    used = FILE.replace("return C", f"return {text.split()[1].split('(')[0].rstrip(':')} and C")
    if text.split()[0] in ("def", "class"):
        assert source_of(used, "Mine", place).key != source_of(used + text, "Mine", place).key


def test_a_class_that_does_not_count_is_not_registered_in_place_of_another(place):
    """Both classes stand in both kept copies; each name leads to the copy that was asked for."""
    text = FILE + "\nVALUE = sum([1])\n@__import__('functools').cache\ndef f(): pass\n"
    text += "\nfrom hmoe_repro.algorithms.base import register\n"
    text += "@register('Other', paper='-', needs_domain_labels=False)\n"
    text += "class Second(ERM):\n    total = sum([1])\n"
    path = write(place / "mine.py", text)
    second, first = enter(path, "Second"), enter(path, "Mine")
    assert ALGORITHMS["Other (mine.py)"] is second
    assert ALGORITHMS["Mine (mine.py)"] is first
    assert source_hash(ALGORITHMS["Other (mine.py)"]) == second.source_hash


# Modules of the user's


def test_a_module_elsewhere_on_the_path_is_part_of_the_run(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place / "tools"))
    keys = []
    for factor in (2.0, 3.0):
        write(
            place / "tools" / "far_away.py", f"import farther\ndef f(): return farther.x * {factor}"
        )
        write(place / "tools" / "farther.py", "x = 5.0")
        text = FILE.replace('return C["w"]', "import far_away; return far_away.f()")
        cls = enter(write(place / "own" / "mine.py", text))
        keys.append(source_hash(cls))
    assert len({*keys}) == 2
    for name in ("far_away", "farther"):
        (place / "tools" / f"{name}.py").unlink()
    name = "Mine (mine.py)"
    assert [restore_algorithm(name, key, trust_code=True)(*SHAPE).weight() for key in keys] == [
        10.0,
        15.0,
    ]
    assert "far_away" not in sys.modules


def test_a_module_that_cannot_be_carried_is_refused(place, monkeypatch):
    path = write(
        place / "mine.py", "import importlib\nx = importlib.import_module('beside')\n" + FILE
    )
    write(place / "beside.py", "y = 1")
    with pytest.raises(HmoeError, match="by a string.*`import beside`"):
        enter(path)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    write(place / f"fast{suffix}", "")
    with pytest.raises(HmoeError, match="compiled.*as a package"):
        enter(write(path, "import fast\n" + FILE))
    hidden = f"import sys\nsys.path.insert(0, {str(place / 'hidden')!r})\nimport not_seen_before\n"
    write(place / "hidden" / "not_seen_before.py", "y = 1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(HmoeError, match="not_seen_before.py.*part of"):
        enter(write(path, hidden + FILE))


# Files that the code reads

READS = {
    "open": "open(PATH).read()",
    "bytes": "open(PATH, 'rb').read()",
    "pathlib": "__import__('pathlib').Path(PATH).read_text()",
    "os": "__import__('os').open(PATH, 0)",
    "torch": "__import__('torch').load(PATH)",
    "mapped": "__import__('torch').load(PATH, mmap=True)",
    "numpy": "__import__('numpy').load(PATH)",
    "numpy bytes": "__import__('numpy').fromfile(PATH)",
    "pandas": "__import__('pandas').read_csv(PATH)",
    "image": "__import__('PIL.Image').Image.open(PATH)",
    "link": "__import__('os').symlink(PATH, 'link'); open('link')",
    "safetensors": "__import__('safetensors.torch').torch.load_file(PATH)",
    "safe_open": "__import__('safetensors').safe_open(PATH, 'pt')",
    "jit": "__import__('torch').jit.load(PATH)",
    "sqlite": "__import__('sqlite3').connect(PATH)",
    "storage": "__import__('torch').from_file(PATH, size=1, dtype=__import__('torch').uint8)",
    "this library": "__import__('hmoe_repro.core.files').core.files.read_bytes(PATH)",
}
WHERE = """
from hmoe_repro.algorithms.base import ERM
PATH = {path!r}

class Mine(ERM):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        {init}

    def loss(self, minibatches):
        {loss}
        return super().loss(minibatches)

    def predict(self, x):
        {predict}
        return super().predict(x)
"""
BATCH = [(torch.rand(4, 3, 16, 16), torch.arange(4))] * 3


def reading(path, where, how):
    "The text of a class that reads a file in one of its methods."
    methods = {"init": "pass", "loss": "pass", "predict": "pass"}
    return WHERE.format(path=str(path), **methods | {where: how})


@pytest.mark.parametrize("how", READS)
def test_an_undeclared_file_is_named_with_the_line_to_add(place, how):
    save_file({"w": torch.ones(2)}, place / "teacher.pt")
    path = write(place / "mine.py", reading(place / "teacher.pt", "init", READS[how]))
    with pytest.raises(HmoeError, match=r'teacher.pt, .*files.*{"teacher": "teacher.pt"}'):
        enter(path)(*SHAPE)


@pytest.mark.parametrize("where", ["init", "loss", "predict"])
@pytest.mark.parametrize("caught", [False, True])
def test_it_is_named_wherever_it_is_read_and_whatever_is_caught(place, where, caught):
    write(place / "table.json", "{}")
    how = "open(PATH).read()"
    if caught:
        how = f"\n        try: {how}\n        except Exception: pass"
    cls = enter(write(place / "mine.py", reading(place / "table.json", where, how)))
    with pytest.raises(HmoeError, match='mine.py reads.*files.*{"table": "table.json"}'):
        cls(*SHAPE).update(BATCH)


def test_a_file_read_at_import_is_named_and_a_run_is_refused_before_it_begins(place):
    write(place / "table.toml", "x = 1")
    text = f"import tomllib\nX = tomllib.load(open({str(place / 'table.toml')!r}, 'rb'))\n{FILE}"
    with pytest.raises(HmoeError, match='files.*{"table": "table.toml"}'):
        enter(write(place / "mine.py", text))
    path = write(place / "own.py", reading(place / "table.toml", "init", "open(PATH)"))
    with pytest.raises(HmoeError, match="own.py reads"):
        make_config(f"{path}:Mine", "DigitDomainsTiny", ["photo"], network="small_cnn")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_is_named_if_a_module_beside_or_a_thread_reads_it(place):
    write(place / "table.json", "{}")
    how = "import threading; t = threading.Thread(target=beside.read); t.start(); t.join()"
    write(place / "beside.py", f"def read(): open({str(place / 'table.json')!r})")
    for call in ("beside.read()", how):
        text = "import beside\n" + reading("x", "init", call)
        with pytest.raises(HmoeError, match='files.*{"table": "table.json"}'):
            enter(write(place / "mine.py", text))(*SHAPE)


def test_an_exported_model_is_a_file_too_and_a_run_is_none(place):
    """`load` of a folder reads what lies there today; a run is named by the code itself."""
    config = make_config("ERM", "DigitDomainsTiny", ["photo"], network="small_cnn", steps=1)
    run(config, RunStore())
    export_model(load(config.run_id), place / "exported")
    how = "import hmoe_repro; hmoe_repro.load({!r})"
    for model, free in ((config.run_id, True), (str(place / "exported"), False)):
        cls = enter(write(place / "mine.py", reading("x", "init", how.format(model))))
        with contextlib.nullcontext() if free else pytest.raises(HmoeError, match="mine.py reads"):
            cls(*SHAPE)


def test_reads_that_are_nobodys_business_are_free(place, monkeypatch):
    """Of installed packages, the system, caches; of what the code wrote itself; and those of this
    library, here the data set."""
    cache = write(place / "cache" / "weights.bin", "x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    from hmoe_repro.algorithms.outside_code import _unwatched_folders

    _unwatched_folders.cache_clear()
    own = str(place / "scratch.txt")
    how = f"open({own!r}, 'w').close(); open({own!r}).read(); open({str(cache)!r}).read(); "
    how += "open(__import__('json').__file__).read(); open('/dev/null').read(); "
    how += "import hmoe_repro.core.toml as t; t.package_toml('algorithms.toml')"
    path = write(place / "mine.py", reading("x", "init", how))
    record = run(short_config(path), RunStore())
    _unwatched_folders.cache_clear()
    assert record["status"] == "complete", record["reason"]


WRITES = {
    "torch": "torch.save({'w': torch.ones(2)}, OWN); torch.load(OWN)",
    "torch by name": "torch.save(f=OWN, obj=torch.ones(2)); torch.load(OWN)",
    "safetensors": "st.save_file({'w': torch.ones(2)}, OWN); st.load_file(OWN)",
    "renamed": "open(OWN + '.part', 'w').close(); os.replace(OWN + '.part', OWN); open(OWN)",
    "moved": "open(OWN + '.part', 'w').close(); shutil.move(OWN + '.part', OWN); open(OWN)",
    "folder renamed": "os.mkdir('a'); open('a/x', 'w').close(); os.rename('a', 'b'); open('b/x')",
    "appended": "open(OWN, 'a+').close(); open(OWN, 'a+').close(); open(OWN)",
    "sqlite": "sqlite3.connect(OWN).execute('create table a (b)'); sqlite3.connect(OWN)",
    "temporary": "f = tempfile.NamedTemporaryFile(); open(f.name)",
    "warning": "[warnings.warn(str(n), stacklevel=n) for n in range(1, 40)]",
    "traceback": "linecache.clearcache(); traceback.format_stack()",
}
MODULES = "import linecache, os, shutil, sqlite3, tempfile, traceback, torch, warnings"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", WRITES)
def test_what_the_code_wrote_is_its_own_however_it_was_written(place, how):
    """Also under another name; and the lines of running code may be shown."""
    text = f"{MODULES}\nimport safetensors.torch as st\nOWN = {str(place / 'own.bin')!r}\n"
    enter(write(place / "mine.py", text + reading("x", "init", WRITES[how])))(*SHAPE)


TAKEN = {
    "renamed over": "open('own', 'w').close(); os.replace(PATH, 'own'); open('own')",
    "copied": "shutil.copyfile(PATH, 'own'); open('own')",
    "source": "linecache.clearcache(); linecache.getline(PATH, 1)",
    "folder": "open('own', 'w').close(); os.rename('own', 'own2'); open(PATH)",
}


@pytest.mark.parametrize("how", TAKEN)
def test_another_file_does_not_become_its_own(place, how):
    write(place / "teacher.py", "x = 1")
    text = f"{MODULES}\n" + reading(place / "teacher.py", "init", TAKEN[how])
    with pytest.raises(HmoeError, match="not part of"):
        enter(write(place / "mine.py", text))(*SHAPE)


# Files that a class declares

TEACHER = """
import torch
from hmoe_repro.algorithms.base import ERM

class Base(ERM):
    files = {"teacher": "weights/teacher.pt"}

class Mine(Base):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("teacher", torch.load(self.files["teacher"]))

    def loss(self, minibatches):
        return {"loss": super().loss(minibatches)["loss"] * self.teacher.mean()}
"""


def short_config(path, name="Mine", steps=2):
    hparams = {"batch_size": 4}
    options = dict(network="small_cnn", steps=steps, checkpoint_frequency=1)
    return make_config(f"{path}:{name}", "DigitDomainsTiny", ["photo"], 0, hparams, **options)


def teach(place, value):
    (place / "weights").mkdir(exist_ok=True)
    torch.save(torch.full((3,), value), place / "weights" / "teacher.pt")


def test_a_declared_file_is_in_the_id_and_travels_with_the_run(place):
    path = write(place / "mine.py", TEACHER)
    teach(place, 7.0)
    seven = short_config(path)
    assert short_config(path) == seven
    teach(place, 0.0)
    zero = short_config(path)
    assert zero.run_id != seven.run_id
    assert ALGORITHMS[zero.algorithm].source_hash in str(zero)[:0] + zero.algorithm_source
    (place / "weights" / "teacher.pt").unlink()
    path.unlink()
    forget()
    records = [run(config, RunStore(), trust_code=True) for config in (zero, seven)]
    losses = [record["checkpoints"][-1]["losses"]["loss"] for record in records]
    assert losses[0] == 0.0
    assert losses[1] > 1.0


def forget():
    "As in another process, no file has been entered."
    for name in [name for name in ALGORITHMS if name.endswith((".py)", "(notebook)"))]:
        del ALGORITHMS[name]
    for name in [name for name in sys.modules if name.startswith("hmoe_own_")]:
        del sys.modules[name]


def test_a_damaged_copy_is_refused_unless_the_original_is_there(place):
    path = write(place / "mine.py", TEACHER)
    teach(place, 7.0)
    config = short_config(path)
    (copy,) = (place / "runs" / "algorithms" / "files").iterdir()
    copy.write_bytes(b"damaged")
    forget()
    assert (
        restore_algorithm(config.algorithm, config.algorithm_source, True)(*SHAPE).teacher[0] == 7.0
    )
    (place / "weights" / "teacher.pt").unlink()
    forget()
    with pytest.raises(HmoeError, match="'teacher'.*teacher.pt.*missing"):
        restore_algorithm(config.algorithm, config.algorithm_source, True)


def test_a_large_file_stays_where_it_is_and_is_checked(place, monkeypatch):
    monkeypatch.setattr(source, "MOST_CARRIED", 10)
    path = write(place / "mine.py", TEACHER)
    teach(place, 7.0)
    config = short_config(path)
    assert not (place / "runs" / "algorithms" / "files").exists()
    assert run(config, RunStore())["status"] == "complete"
    teach(place, 0.0)
    forget()
    with pytest.raises(HmoeError, match="weights/teacher.pt.* has changed"):
        restore_algorithm(config.algorithm, config.algorithm_source, True)


def test_the_original_may_be_opened_while_it_is_what_was_hashed(place):
    text = TEACHER.replace('self.files["teacher"]', repr(str(place / "weights" / "teacher.pt")))
    path = write(place / "mine.py", text)
    teach(place, 7.0)
    cls = ALGORITHMS[short_config(path).algorithm]
    assert cls(*SHAPE).teacher[0] == 7.0
    teach(place, 0.0)
    with pytest.raises(HmoeError, match="changed after.*planned"):
        cls(*SHAPE)


@pytest.mark.parametrize(
    "line, said",
    [
        ('files = {"teacher": "absent.pt"}', "absent.pt does not exist. Fix: correct its path"),
        ('files = {"teacher": "weights"}', "it is a folder"),
        ('files = dict(teacher="weights/teacher.pt")', "not a dictionary of strings"),
        ('files = {"teacher": "weights/" + "teacher.pt"}', "not a dictionary of strings"),
    ],
)
def test_a_declaration_that_cannot_hold_is_refused(place, line, said):
    teach(place, 7.0)
    text = TEACHER.replace('files = {"teacher": "weights/teacher.pt"}', line)
    with pytest.raises(HmoeError, match=said):
        enter(write(place / "mine.py", text))


def test_code_and_files_travel_to_a_machine_that_shares_no_folder(place, monkeypatch):
    "As on a cluster: the node has neither the file, nor what it imports, nor the teacher."
    text = TEACHER.replace("import torch\n", "import torch\nfrom beside import twice\n")
    text = text.replace("self.teacher.mean()", "twice(self.teacher.mean())")
    write(place / "beside.py", "def twice(x): return 2 * x")
    path = write(place / "mine.py", text)
    teach(place, 7.0)
    config, home = short_config(path), RunFileServer(place / "runs")
    ensure_writable(home.folder / config.run_id)
    expected = run(config, RunStore(place / "local"))
    for file in (path, place / "beside.py", place / "weights" / "teacher.pt"):
        file.unlink()
    forget()
    monkeypatch.setenv("HMOE_RUNS", str(place / "node"))
    told = lambda name, *what: getattr(home, name)(*what)  # noqa: E731
    ended = train_remotely(told, config.to_dict(), "cpu", None, CONFIG.to_json())
    assert ended == ("complete", None)
    assert outcome(RunStore(place / "runs").read(config.run_id)) == outcome(expected)


def test_what_did_not_change_is_not_imported_again(place):
    path = write(place / "mine.py", TEACHER)
    teach(place, 7.0)
    assert (
        enter(path) is enter(path) is restore_algorithm("Mine (mine.py)", source_hash(enter(path)))
    )


def test_a_manifest_that_was_changed_is_no_kept_source(place):
    path = write(place / "mine.py", TEACHER)
    teach(place, 7.0)
    kept = place / "runs" / "algorithms" / f"{source_hash(enter(path))}.py"
    assert (
        read_kept(kept).files["teacher"].size == (place / "weights" / "teacher.pt").stat().st_size
    )
    described = kept.with_suffix(".json")
    changed = json.loads(described.read_text())
    changed["teacher"]["sha256"] = "0" * 64
    described.write_text(json.dumps(changed))
    assert read_kept(kept) is None
    described.unlink()
    assert read_kept(kept) is None


def test_random_constants_are_the_same_in_every_process_and_disturb_nothing(place):
    text = "import torch, random\nimport numpy as np\n"
    text += "NOISE = torch.rand(2), random.random(), np.random.rand()\n"
    cls = enter(write(place / "mine.py", text + FILE))
    noise, name, key = sys.modules[cls.__module__].NOISE, cls.name, source_hash(cls)
    forget()
    torch.manual_seed(3)
    again = restore_algorithm(name, key, trust_code=True)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert difference(sys.modules[again.__module__].NOISE, noise, "NOISE") is None


COUNTS = """
import helper_with_a_list
from hmoe_repro.algorithms.base import ERM
SEEN = {"updates": 0}

class Mine(ERM):
    losses = []

    def loss(self, minibatches):
        SEEN["updates"] += 1
        self.losses.append(1.0)
        helper_with_a_list.LIST.append(1.0)
        late = SEEN["updates"] + len(self.losses) + len(helper_with_a_list.LIST)
        return {"loss": super().loss(minibatches)["loss"] * late}
"""


def test_what_one_run_leaves_in_the_module_does_not_reach_the_next(place):
    write(place / "helper_with_a_list.py", "LIST = []")
    path = write(place / "mine.py", COUNTS)
    config = short_config(path)
    first = run(config, RunStore(place / "a"))
    again = run(config, RunStore(place / "b"))
    assert outcome(first) == outcome(again)
    forget()
    elsewhere = run(config, RunStore(place / "c"), trust_code=True)
    assert outcome(elsewhere) == outcome(first)


# Values of a program or notebook


@pytest.fixture
def notebook(monkeypatch):
    "A function that executes cells as a notebook does, and returns its names."
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def execute(*cells):
        main._ih = ["", *cells]
        for cell in cells:
            exec(cell, vars(main))
        return vars(main)

    return execute


USES = "from hmoe_repro.algorithms.base import ERM\nimport torch"
NET = "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
NET += "        self.w = torch.nn.Parameter(torch.zeros(2))\nteacher = Net()"
MINE = (
    "class Mine(ERM):\n    def loss(self, minibatches):\n        return {'loss': teacher.w.sum()}"
)
HELD = {
    "trained": ([NET, "with torch.no_grad():\n    teacher.w.fill_(7)"], MINE, "teacher"),
    "drawn": (["W = torch.rand(3)"], "class Mine(ERM):\n    w = W", "W"),
    "alias": (["C = {'w': 1.0}", "D = C\nD['w'] = 0.0"], "class Mine(ERM):\n    c = C", "C"),
    "helper": (
        ["C = {'w': 1.0}", "def f(d): d['w'] = 0\n_ = f(C)"],
        "class Mine(ERM):\n    c = C",
        "C",
    ),
    "object": (
        ["from types import SimpleNamespace as S\nC = S(w=1.0)", "D = C\nD.w = 0.0"],
        "class Mine(ERM):\n    def f(self): return C.w",
        "C.w",
    ),
    "private": (["_C = [1]", "D = _C\nD.append(2)"], "class Mine(ERM):\n    c = _C", "_C"),
    "set": (["C = {1}", "D = C\nD.add(2)"], "class Mine(ERM):\n    c = C", "C"),
    "class": ([], "class Mine(ERM):\n    w = 1.0", "Mine"),
    "default": (
        ["def f(x=[1]): return x", "f().append(2)"],
        "class Mine(ERM):\n    def f(self): return f()",
        "f's defaults",
    ),
}


@pytest.mark.parametrize("how", HELD)
def test_a_value_that_its_code_does_not_give_is_refused(notebook, how):
    cells, mine, path = HELD[how]
    names = notebook(USES, *cells, mine)
    if how == "class":
        names["Mine"].extra = 2.0
    with pytest.raises(HmoeError) as refused:
        algorithm_name(names["Mine"])
    assert path in str(refused.value)
    if how in ("trained", "drawn"):
        assert f'files = {{"{path}": "{path}.pt"}}' in refused.value.fix


def test_a_notebook_whose_values_are_what_its_cells_say_is_taken(notebook):
    """Also a teacher that was saved, declared, and is loaded where the class is built."""
    names = notebook(
        USES + "\nimport math, re, logging\nfrom dataclasses import dataclass",
        NET.replace("\nteacher = Net()", ""),
        "@dataclass\nclass Settings:\n    rate: float = 0.1\n    sizes: tuple = (1, 2)",
        "SETTINGS = Settings(0.2)\nEYE = torch.eye(2)",
        "WORD = re.compile('a')\nACT = torch.nn.ReLU()",
        "trained = Net()\nwith torch.no_grad():\n    trained.w.fill_(7)\n"
        "torch.save(trained.state_dict(), 'teacher.pt')",
        "def scaled(x, by=SETTINGS.rate):\n    return ACT(x) * by * EYE[0, 0] * math.pi",
        "class Mine(ERM):\n    files = {'teacher': 'teacher.pt'}\n"
        "    def __init__(self, *arguments):\n        super().__init__(*arguments)\n"
        "        self.teacher = Net()\n"
        "        self.teacher.load_state_dict(torch.load(self.files['teacher']))\n"
        "    def loss(self, minibatches):\n"
        "        return {'loss': scaled(self.teacher.w.sum()) * SETTINGS.sizes[0]}",
    )
    cls = ALGORITHMS[algorithm_name(names["Mine"])]
    assert cls(*SHAPE).teacher.w.tolist() == [7.0, 7.0]
    os.unlink("teacher.pt")
    key = source_hash(cls)
    forget()
    assert restore_algorithm(cls.name, key, True)(*SHAPE).teacher.w.tolist() == [7.0, 7.0]


def test_a_reversed_gradient_and_a_cached_function_are_taken(notebook):
    """PyTorch adds a class to each `torch.autograd.Function`, and a cache the module's name."""
    names = notebook(
        USES + "\nimport functools",
        "class Reversed(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x.view_as(x)\n"
        "    @staticmethod\n    def backward(ctx, g): return -g",
        "@functools.lru_cache\ndef power(n): return 0.9**n",
        "class Mine(ERM):\n    def loss(self, minibatches):\n"
        "        return {'loss': Reversed.apply(minibatches[0][0]).sum() * power(2)}",
    )
    assert ALGORITHMS[algorithm_name(names["Mine"])](*SHAPE).name == "Mine (notebook)"
    names["Reversed"].backward = staticmethod(lambda ctx, g: 2 * g)
    with pytest.raises(HmoeError, match="Reversed.backward.*differs"):
        algorithm_name(names["Mine"])


def test_a_class_that_was_changed_after_its_import_is_refused(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place))
    write(place / "own_module_of_a_test.py", FILE)
    mine = importlib.import_module("own_module_of_a_test")
    assert ALGORITHMS[algorithm_name(mine.Mine)](*SHAPE).weight() == 1.0
    mine.C["w"] = 0.0
    with pytest.raises(HmoeError, match=r"C\['w'\].*0.0 now.*1.0"):
        algorithm_name(mine.Mine)
    mine.C["w"] = 1.0
    mine.Mine.extra = 1
    with pytest.raises(HmoeError, match="Mine, .*differs"):
        algorithm_name(mine.Mine)
    del mine.Mine.extra
    write(place / "own_module_of_a_test.py", FILE.replace('return C["w"]', 'return 2 * C["w"]'))
    with pytest.raises(HmoeError, match="Mine.weight.*differs.*restart Python"):
        algorithm_name(mine.Mine)
    del sys.modules["own_module_of_a_test"]


# Names that lead to code by another way


def test_averaged_weights_of_a_class_of_a_file_have_its_hash(place):
    keys = []
    for factor in (1.0, 0.5):
        text = f"FACTOR = {factor}\n{FILE.replace('return C', 'return FACTOR * C')}"
        cls = enter(write(place / "mine.py", text))
        keys.append(source_hash(get_algorithm("SWAD-Mine (mine.py)")))
        assert keys[-1] == source_hash(cls)
    assert keys[0] != keys[1]
    forget()
    restored = [restore_algorithm("SWAD-Mine (mine.py)", key, True) for key in keys]
    assert [cls.base(*SHAPE).weight() for cls in restored] == [1.0, 0.5]


def test_a_class_that_was_registered_by_hand_has_the_hash_of_its_file(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place))
    keys = []
    for factor in (1.0, 0.5):
        text = f"FACTOR = {factor}\n{FILE.replace('return C', 'return FACTOR * C')}"
        write(place / "own_module_by_hand.py", text)
        mine = importlib.import_module("own_module_by_hand").Mine
        register("By hand", paper="-", needs_domain_labels=False)(mine)
        keys.append(source_hash(mine))
        del ALGORITHMS["By hand"], sys.modules["own_module_by_hand"]
    assert keys[0] != keys[1]
    assert issubclass(mine, ERM)


def test_a_declared_file_that_cannot_be_copied_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(original, copy):
        copy.write(original.read(3))
        raise OSError(28, "No space left on device")

    file = tmp_path / "teacher.pt"
    file.write_bytes(b"weights")
    declared = source.DeclaredFile(str(file), source.digest_of(file), 7)
    kept = tmp_path / "kept"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", full)
        with pytest.raises(OSError, match="No space left"):
            source._carry(kept, declared)
    assert not [path for path in kept.rglob("*") if path.is_file()]
    source._carry(kept, declared)
    assert [path.read_bytes() for path in kept.rglob("*.pt")] == [b"weights"]
