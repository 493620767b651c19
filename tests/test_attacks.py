"""Hostile files: no field of a record, state, archive, export or cache runs code or fills a disk.

Each test makes the crafted file itself. `tripwire` is a module that notes its import and its call.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import sys
import tarfile
import tracemalloc
import zipfile

import commands
import pytest
import torch

from hmoe_repro.analysis.writers import PAGE_POLICY
from hmoe_repro.core import environment
from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import download
from hmoe_repro.studies import export_import
from hmoe_repro.studies.export_import import pack_runs, unpack_runs
from hmoe_repro.studies.sweep import sweep
from hmoe_repro.training import run as run_module
from hmoe_repro.training.checkpoint_io import load_state, save_state, sealed
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome, verify_studies

SHORT = {"network": "small_cnn", "steps": 7, "checkpoint_frequency": 3}
HPARAMS = {"batch_size": 8}
TRIPWIRE = """
from pathlib import Path
NOTE = Path(__file__).with_name("note.txt")
NOTE.write_text("imported")
def call(*arguments, **options):
    NOTE.write_text("called")
"""


@pytest.fixture
def tripwire(tmp_path, monkeypatch):
    "The file that says whether the module `hmoe_tripwire` was imported or called."
    folder = tmp_path / "tripwire"
    folder.mkdir()
    (folder / "hmoe_tripwire.py").write_text(TRIPWIRE)
    monkeypatch.syspath_prepend(str(folder))
    yield folder / "note.txt"
    for name in [name for name in sys.modules if name.startswith(("hmoe_tripwire", "hmoe_own_"))]:
        del sys.modules[name]


def spec_of(test="sketch", **options):
    return make_config("ERM", "DigitDomainsTiny", [test], hparams=HPARAMS, **SHORT | options)


class Stop(KeyboardInterrupt):
    "What a person, or the end of a slot, does to a run."


def half_done(config, store):
    "Train a run beyond its first checkpoints and stop it; returns the path of its state."

    def stop(step, steps):
        if step == 5:
            raise Stop

    with pytest.raises(Stop):
        run(config, store, on_step=stop)
    return store.path(config.run_id) / "state.safetensors"


def pytree_text(module, name):
    "What PyTorch's `treespec_dumps` writes of a `defaultdict` with that callable."
    leaf = {"type": None, "context": None, "children_spec": []}
    context = {"default_factory_module": module, "default_factory_name": name}
    context["dict_context"] = json.dumps(["x"])
    tree = {
        "type": "collections.defaultdict",
        "context": json.dumps(context),
        "children_spec": [leaf],
    }
    return json.dumps([1, tree])


def test_a_state_with_a_callable_is_refused_without_an_import(tripwire, tmp_path):
    tree = pytree_text("hmoe_tripwire", "call")
    for header in ({"tree": tree, "plain": "[1]"}, {"tree": json.dumps({"defaultdict": tree})}):
        (tmp_path / "state").write_bytes(sealed({}, **header))
        with pytest.raises(HmoeError, match="saved state"):
            load_state(tmp_path / "state")
    assert not tripwire.exists()
    assert "hmoe_tripwire" not in sys.modules


def test_a_run_with_such_a_state_starts_again(tripwire, tmp_path):
    config, store = spec_of(), RunStore(tmp_path / "runs")
    path = half_done(config, store)
    path.write_bytes(sealed({}, tree=pytree_text("hmoe_tripwire", "call"), plain="[1]"))
    with pytest.warns(UserWarning, match="starts again"):
        record = run(config, store)
    assert record["status"] == "complete"
    assert not record["resumed"]
    assert not tripwire.exists()


TREES = [
    {"dict": [["a", 1], ["a", 2]]},
    {"dict": [[{"list": []}, 1]]},
    {"dict": [["a"]]},
    {"dict": {"a": 1}},
    {"list": 3},
    {"tensor": "7"},
    {"tensor": 0},
    {"tensor": {"tensor": "0"}},
    {"list": [], "tuple": []},
    {},
    [1, 2],
    {"object": []},
]


@pytest.mark.parametrize("tree", TREES, ids=json.dumps)
def test_a_tree_of_anything_else_is_refused(tree, tmp_path):
    for whole in (tree, {"list": [tree]}):
        (tmp_path / "state").write_bytes(sealed({"0": torch.zeros(1)}, tree=json.dumps(whole)))
        with pytest.raises(HmoeError, match="saved state"):
            load_state(tmp_path / "state")


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_deep_tree_is_refused(depth, tmp_path):
    text = '{"list":[' * depth + "1" + "]}" * depth
    (tmp_path / "state").write_bytes(sealed({}, tree=text))
    with pytest.raises(HmoeError, match="saved state"):
        load_state(tmp_path / "state")


def test_what_a_state_cannot_hold_is_refused_when_it_is_written(tmp_path):
    from collections import defaultdict, namedtuple

    Pair = namedtuple("Pair", "a b")
    for value in (defaultdict(list), Pair(1, 2), {1, 2}, object(), {(1, 2): 3}):
        with pytest.raises(HmoeError, match=r"state\['a'\]\[0\]"):
            save_state(tmp_path / "state", {"a": [value]})
    assert not (tmp_path / "state").exists()


# Code that a record, an archive or an exported model names.


@pytest.fixture
def own_store(tmp_path, monkeypatch):
    "A store that is the folder of runs, as another person's would be."
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    return RunStore(tmp_path / "runs")


def record_of(config):
    "A whole record of a run, without any training."
    half = {part: {"default": 0.5} for part in ("in", "out")}
    names = ("clean", "photo", "sketch", "inverted")
    chosen = {"step": 0, "validation_accuracy": 0.5, "test_accuracy": 0.5}
    return {
        "run_id": config.run_id,
        "record_version": 2,
        "status": "complete",
        "config": config.to_dict(),
        "checkpoints": [{"step": 0, "accuracies": dict.fromkeys(names, half)}],
        "selected": {"default": chosen},
        "discovery": None,
    }


def with_weights(config, store):
    "A finished run in the store, with weights of the right network; returns its id."
    from hmoe_repro.training.model import build_algorithm, build_dataset, save_model, selected_path

    plain = spec_of()
    data = build_dataset(plain)
    names = {"classes": data.class_names, "domains": ["clean"], "input_shape": [3, 16, 16]}
    store.path(config.run_id).mkdir(parents=True)
    store.write(record_of(config))
    path = selected_path(store.path(config.run_id), "default")
    save_model(path, build_algorithm(plain, data), names)
    return config.run_id


def exported_as(config, run_id, store, folder):
    "What `hmoe export` writes of a run, put together by hand."
    folder.mkdir()
    exported = {"record": record_of(config), "weights": "default"}
    (folder / "config.json").write_text(json.dumps(exported))
    content = (store.path(run_id) / "selected-default.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def ways_in(config, run_id, store, tmp_path):
    "Everything that reads a record and makes a data set or a model of it, by name."
    from hmoe_repro.apps.predict import load
    from hmoe_repro.studies.sweep import sweep
    from hmoe_repro.training.model import build_algorithm, build_dataset, load_model

    folder, fresh = exported_as(config, run_id, store, tmp_path / "exported"), tmp_path / "fresh"
    return {
        "load_model": lambda: load_model(run_id, store=store),
        "load": lambda: load(run_id, store=store),
        "load a folder": lambda: load(folder),
        "build_dataset": lambda: build_dataset(config),
        "build_algorithm": lambda: build_algorithm(config, build_dataset(spec_of())),
        "sweep": lambda: sweep(config, store=RunStore(fresh), jobs=1),
        "sweep here": lambda: sweep(config, store=RunStore(fresh), device="cpu", jobs=0),
        "run": lambda: run(config, RunStore(fresh)),
    }


DATA_FILES = ("{folder}/evil.py:call", "evil.py:call", "./evil.py:call", "x/../evil.py:call")


@pytest.mark.parametrize("text", DATA_FILES)
def test_a_record_cannot_name_code_as_its_data_set(
    text, tripwire, own_store, tmp_path, monkeypatch
):
    (tripwire.parent / "hmoe_tripwire.py").rename(tripwire.parent / "evil.py")
    (tripwire.parent / "x").mkdir()
    (tripwire.parent / "evil.py:call").mkdir()  # a folder, and so the path of a data set
    monkeypatch.chdir(tripwire.parent)
    config = spec_of().replace(
        dataset=text.format(folder=tripwire.parent), dataset_fingerprint="0" * 12
    )
    run_id = with_weights(config, own_store)
    ways = ways_in(config, run_id, own_store, tmp_path)
    with pytest.raises(HmoeError, match="data set.*record"):
        ways["build_dataset"]()
    for name in ("load_model", "load", "load a folder"):  # need no data set, and so ask for none
        ways[name]()
    assert ways["sweep here"]()[run_id].status == ways["run"]()["status"] == "failed"
    assert not tripwire.exists()


def _named(**changes):
    names = {"classes": ["0", "1"], "domains": ["clean"], "input_shape": [3, 16, 16]}
    return names | changes


NAMES = {
    "nothing": None,
    "a list": [],
    "a text": "x",
    "no classes": {"domains": ["clean"], "input_shape": [3, 16, 16]},
    "a number of classes": _named(classes=4),
    "classes of numbers": _named(classes=[1, 2]),
    "a number of domains": _named(domains=4),
    "no shape": _named(input_shape=[]),
    "a text as shape": _named(input_shape="abc"),
    "a negative shape": _named(input_shape=[3, -1, 1]),
    "an endless shape": _named(input_shape=[3, 10**9, 10**9]),
    "a shape of truths": _named(input_shape=[3, True, True]),
}


@pytest.mark.parametrize("names", NAMES)
def test_names_in_weights_that_no_run_writes_are_one_line(names, own_store, tmp_path):
    from safetensors.torch import load as read

    from hmoe_repro.apps.predict import load
    from hmoe_repro.core.seals import metadata_of, sealed

    config = spec_of()
    folder = exported_as(config, with_weights(config, own_store), own_store, tmp_path / "exported")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = metadata_of(content) | {"names": json.dumps(NAMES[names])}
    path.write_bytes(sealed(read(content), **header))
    with pytest.raises(HmoeError, match="weights.*cut, damaged"):
        load(folder)


RECORDS = {
    "empty": {},
    "a list": [],
    "nothing": None,
    "no configuration": {"run_id": "0" * 12},
    "a text as configuration": {"run_id": "0" * 12, "config": "x"},
    "no name": {"config": {}},
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_in_an_exported_folder_that_is_none_is_one_line(record, tmp_path):
    from hmoe_repro.apps.predict import load

    text = json.dumps({"record": RECORDS[record], "weights": "default"})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HmoeError, match="no config.json.*`hmoe export`"):
        load(tmp_path)


def test_an_edited_configuration_in_an_exported_folder_is_refused(own_store, tmp_path):
    from hmoe_repro.apps.predict import load

    config = spec_of()
    folder = exported_as(config, with_weights(config, own_store), own_store, tmp_path / "exported")
    assert load(folder).record["run_id"] == config.run_id
    path = folder / "config.json"
    exported = json.loads(path.read_text())
    exported["record"]["config"]["trial_seed"] += 1
    path.write_text(json.dumps(exported))
    with pytest.raises(HmoeError, match=f"config.json.*edited.*{config.run_id}"):
        load(folder)


@pytest.mark.parametrize("text", ["../..", "/", "/nowhere/x", "..", "~", "a/../b", ""])
def test_a_record_cannot_name_a_path_as_its_data_set(text, own_store):
    from hmoe_repro.training.model import build_dataset

    with pytest.raises(HmoeError, match="of the record"):
        build_dataset(spec_of().replace(dataset=text, dataset_fingerprint="../../x"))


KEPT = """
import os
os.environ["HMOE_TRIPWIRE"] = "ran"
from hmoe_repro.algorithms.base import ERM
class Mine(ERM):
    pass
"""


def kept_algorithm(store):
    "A run of an algorithm whose code is kept in the store, as another process left it."
    from hmoe_repro.algorithms.source import Source, keep

    source = Source(KEPT, {})
    keep(source, store.folder / "algorithms")
    return spec_of().replace(algorithm="Mine (mine.py)", algorithm_source=source.key)


@pytest.fixture
def has_run(monkeypatch):
    "Whether the code that is kept in a store has run in this process."
    monkeypatch.setenv("HMOE_TRIPWIRE", "")
    yield lambda: os.environ["HMOE_TRIPWIRE"] == "ran"
    for name in [name for name in sys.modules if name.startswith("hmoe_own_")]:
        del sys.modules[name]


def test_the_code_kept_in_a_store_runs_only_if_trusted(has_run, own_store, tmp_path, own_names):
    from hmoe_repro.training.model import load_model

    config = kept_algorithm(own_store)
    run_id = with_weights(config, own_store)
    ways = ways_in(config, run_id, own_store, tmp_path)
    del ways["build_dataset"]
    assert "code stored" in ways.pop("run")()["reason"]
    for name, way in ways.items():
        with pytest.raises(HmoeError, match="code stored"):
            print(name, way())
        assert not has_run(), name
    load_model(run_id, store=own_store, trust_code=True)
    assert has_run()


def test_a_page_of_spectra_runs_no_code_of_a_record(has_run, own_store, own_names):
    from types import SimpleNamespace

    import numpy as np

    from hmoe_repro.analysis.spectra import _before_training

    names = ["clean", "photo", "sketch", "inverted"]
    pictures = {"images": np.zeros((4, 3, 16, 16), np.uint8), "domain": np.arange(4)}
    kept = SimpleNamespace(
        domain_names=names, class_names=list(range(10)), shown=np.arange(4), **pictures
    )
    with pytest.raises(HmoeError, match="code stored"):
        _before_training(SimpleNamespace(record=record_of(kept_algorithm(own_store))), kept)
    assert not has_run()


@pytest.mark.parametrize("key", ["../evil", "", "0" * 13, "*", "..", "/etc/passwd"])
def test_the_hash_of_a_source_is_no_path(key, own_store, own_names):
    from hmoe_repro.algorithms.from_file import restore_algorithm

    (own_store.folder / "algorithms").mkdir(parents=True)
    (own_store.folder / "evil.py").write_text(KEPT)
    with pytest.raises(HmoeError, match="not kept here"):
        restore_algorithm("Mine (mine.py)", key, trust_code=True)


def test_a_graph_of_another_process_is_not_unpickled(tmp_path, monkeypatch):
    from hmoe_repro.apps.export import run_graph
    from hmoe_repro.core.seals import write_sums

    loaded = []
    monkeypatch.setattr(torch.export, "load", loaded.append)
    (tmp_path / "model.pt2").write_bytes(b"PK")
    with pytest.raises(HmoeError, match="trust_code=True"):
        run_graph(tmp_path / "model.pt2", torch.zeros(1, 3, 16, 16))
    with pytest.raises(HmoeError, match="not listed.*SHA256SUMS"):
        run_graph(tmp_path / "model.pt2", torch.zeros(1, 3, 16, 16), trust_code=True)
    assert not loaded
    write_sums(tmp_path, ["model.pt2"])
    with pytest.raises(HmoeError, match="trust_code=True"):
        run_graph(tmp_path / "model.pt2", torch.zeros(1, 3, 16, 16))
    assert not loaded
    with pytest.raises(HmoeError, match="not run here"):  # the stand-in returns no graph
        run_graph(tmp_path / "model.pt2", torch.zeros(1, 3, 16, 16), trust_code=True)
    assert loaded


# Where the library runs code that is not its own, and why no file decides it.
GATES = {
    "core/feature_tables.py": {"np.load"},  # with allow_pickle=False
    "data/image_quality.py": {"np.load"},  # with allow_pickle=False
    "algorithms/__init__.py": {"import_module"},  # names of `algorithms.toml`
    "algorithms/domainbed_adapter.py": {"import_module"},  # the checkout HMOE_DOMAINBED names
    "algorithms/from_file.py": {"exec", "compile"},  # a file the user named, or --trust-code
    "algorithms/outside_code.py": {"import_module"},  # safetensors, whose reading it watches
    "core/determinism.py": {"import_module"},  # what a new process of the library begins with
    "report/warm_kernels.py": {"import_module"},  # modules the launcher names
    "data/registry.py": {"run_path"},  # a file the user named
    "networks/pretrained.py": {"torch.load"},  # with weights_only=True
    "report/readme.py": {"run_path"},  # the checkout's docs/readme_picture.py
    "apps/export.py": {"torch.export.load"},  # a graph of this process, or trust_code=True
    "analysis/claims.py": {"frame.eval"},  # texts of the library's claims.toml
    "__init__.py": {"import_module"},  # the library's own names
}
BUILT_IN = {"exec", "eval", "compile", "__import__"}
RUNS_CODE = {"import_module", "run_path", "run_module", "exec_module", "load_module"}
RUNS_CODE |= {"treespec_loads", "sympify"}
UNPICKLES = {"torch.load", "torch.export.load", "pickle.load", "pickle.loads", "joblib.load"}
UNPICKLES |= {"np.load", "numpy.load", "torch.jit.load", "pd.read_pickle", "torch.hub.load"}


def test_the_places_that_run_code_are_those_of_the_table():
    import ast
    from importlib.resources import files

    package, found = files("hmoe_repro"), {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            full = ast.unparse(node.func)
            last = full.rpartition(".")[2]
            called = full if full in UNPICKLES | BUILT_IN else last if last in RUNS_CODE else ""
            if last == "eval" and full != "eval" and node.args:  # `model.eval()` has none
                called = "frame.eval"
            if not called:
                continue
            found.setdefault(path.relative_to(package).as_posix(), set()).add(called)
            if called == "torch.load":
                given = {word.arg: word.value for word in node.keywords}
                assert given["weights_only"].value is True
            if called == "np.load":
                given = {word.arg: word.value for word in node.keywords}
                assert given["allow_pickle"].value is False
    assert found == GATES


def test_no_page_that_the_library_writes_runs_a_script():
    """Text of records is on pages, and a browser must not take it for a program. The page that
    tests/test_serve.py looks at has one script, which its server marks."""
    from importlib.resources import files

    def read(page):
        return page.read_text("utf-8")

    pages = list((files("hmoe_repro") / "templates").glob("*.html"))
    whole = [text for text in map(read, pages) if "<meta charset" in text]
    assert len(whole) == 3
    served = [text for text in whole if "Content-Security-Policy" not in text]
    assert len(served) == 1  # the page of a local server, whose policy is a header
    assert served[0].count("<script") == served[0].count('<script nonce="{{ nonce }}">') == 1
    for text in set(whole) - set(served):
        policy = text.partition('"Content-Security-Policy" content="')[2].partition('"')[0]
        assert policy == "{{ policy|safe }}" or "script-src 'none'" in policy
        assert "<script" not in text
    assert PAGE_POLICY.startswith("default-src 'none'; ")
    assert "script" not in PAGE_POLICY
    others = [text for text in map(read, pages) if "{% extends" in text]
    assert len(others) == 6
    for text in others:  # one page is the frame of all others
        assert text.startswith('{% extends "static_page.html" %}')
        assert "<script" not in text
        assert "<head" not in text


# Archives that grow, or say one name twice.


def archive_of(path, members, mode="w:gz"):
    "An archive of (name, content); each with the digest that `hmoe pack` writes."
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.pax_headers = {"HMOE.sha256": hashlib.sha256(content).hexdigest()}
            archive.addfile(member, io.BytesIO(content))
    return path


def refused(store, path, said, **options):
    "Unpacking fails with `said`, in one line, and leaves nothing in the store."
    with pytest.raises(HmoeError, match=said) as caught:
        unpack_runs(store, path, **options)
    assert "\n" not in str(caught.value)
    assert not list(store.folder.iterdir())


ZEROS = bytes(2**20)


def test_an_archive_unpacks_to_no_more_than_its_limit(tmp_path, monkeypatch):
    store = RunStore(tmp_path / "store")
    files = [(f"{i:012x}/state.safetensors", ZEROS) for i in range(4)]
    path = archive_of(tmp_path / "bomb.tar.gz", files)
    assert path.stat().st_size < 2**14
    refused(store, path, "more than 2,097,152 bytes.*--limit-gib", limit=2 * 2**20)
    monkeypatch.setattr(download, "LEAST_LIMIT", 3 * 2**20)
    refused(store, path, "more than 3,145,728 bytes")
    assert unpack_runs(store, path, limit=5 * 2**20).startswith("4 runs added, 0")


def test_a_large_archive_may_unpack_to_twenty_times_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LEAST_LIMIT", 2**20)
    noise = random.Random(0).randbytes(2**20)
    files = [("0" * 12 + "/state.safetensors", noise)]
    files += [(f"{i:012x}/state.safetensors", ZEROS) for i in range(1, 12)]
    path = archive_of(tmp_path / "store.tar.gz", files)
    assert unpack_runs(RunStore(tmp_path / "store"), path).startswith("12 runs added")
    files += [(f"{i:012x}/state.safetensors", ZEROS) for i in range(12, 30)]
    refused(RunStore(tmp_path / "other"), archive_of(path, files), "unpacks to more than")


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "w"])
def test_a_header_is_no_place_for_a_bomb(mode, tmp_path):
    path = tmp_path / "bomb"
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("0" * 12 + "/state.safetensors")
        member.pax_headers = {"comment": "0" * (3 * 2**20)}
        archive.addfile(member)
    refused(RunStore(tmp_path / "store"), path, "a header of 3,1.. ... bytes|a header of 3,")


def test_an_archive_is_not_held_in_memory(tmp_path):
    size = 48 * 2**20
    files = [("0" * 12 + "/state.safetensors", bytes(size))]
    path, store = archive_of(tmp_path / "one.tar.gz", files), RunStore(tmp_path / "store")
    peaks = []
    for work in (
        lambda: unpack_runs(store, path),
        lambda: pack_runs(store, tmp_path / "again.tar.gz"),
        lambda: unpack_runs(RunStore(tmp_path / "third"), store.folder),
    ):
        tracemalloc.start()
        work()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < size / 4, peaks


@pytest.mark.parametrize("second", ["state", "selected-DEFAULT"])
def test_a_member_that_is_there_twice_is_refused(second, tmp_path):
    names = ["state", "selected-default", second]
    files = [("0" * 12 + f"/{name}.safetensors", name.encode()) for name in names]
    path = archive_of(tmp_path / "twice.tar.gz", files)
    refused(RunStore(tmp_path / "store"), path, "twice")


def sparse_header(name, real):
    "A member of the old GNU format that says it has `real` bytes and holds none."
    member = tarfile.TarInfo(name)
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = f"{real:011o}\0".encode()
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def test_a_file_with_holes_is_refused(tmp_path):
    path = tmp_path / "holes.tar"
    path.write_bytes(sparse_header("0" * 12 + "/state.safetensors", 2**32) + bytes(1024))
    refused(RunStore(tmp_path / "store"), path, "not an archive of runs")


def test_a_record_too_large_to_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(export_import, "MAX_RECORD_BYTES", 1000)
    files = [("0" * 12 + "/record.json", b" " * 1001)]
    path = archive_of(tmp_path / "large.tar.gz", files)
    refused(RunStore(tmp_path / "store"), path, "1,001 bytes, more than 1,000")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_of_data_sets_have_a_limit_too(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LEAST_LIMIT", 2**20)
    path = tmp_path / f"images.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for i in range(3):
                archive.writestr(str(i), ZEROS)
    else:
        archive_of(path, [(str(i), ZEROS) for i in range(3)])
    with pytest.raises(HmoeError, match="unpacks.*more than 1,048,576"):
        download.unpack(path, tmp_path / "target")


def test_a_packed_store_is_the_same_archive_byte_by_byte(tmp_path):
    files = [(f"{i:012x}/state.safetensors", bytes([i]) * 3000) for i in range(3)]
    store = RunStore(tmp_path / "store")
    unpack_runs(store, archive_of(tmp_path / "first.tar.gz", files))
    for name in ("one.tar.gz", "two.tar.gz"):
        said = pack_runs(store, tmp_path / name)
        assert said.startswith("0 finished")
        assert "3 half-done" in said
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    with pytest.raises(HmoeError, match="to pack"):
        pack_runs(RunStore(tmp_path / "empty"), tmp_path / "none.tar.gz")
    assert not (tmp_path / "none.tar.gz").exists()


# A state of other versions.


def computed_with(monkeypatch, **others):
    "Let this process say that it computes with other versions."
    here = environment.versions()
    monkeypatch.setattr(run_module, "versions", lambda: here | others)


@pytest.mark.parametrize("package", ["torch", "timm", "numpy"])
def test_a_state_of_other_versions_is_refused_and_names_both(package, tmp_path, monkeypatch):
    config, store = spec_of(), RunStore(tmp_path / "runs")
    computed_with(monkeypatch, **{package: "1.2.3"})
    path = half_done(config, store)
    before = path.read_bytes()
    computed_with(monkeypatch, **{package: "4.5.6"})
    with pytest.raises(HmoeError, match="--resume-anyway") as caught:
        run(config, store)
    assert f"{package} 1.2.3" in str(caught.value)
    assert f"{package} 4.5.6" in str(caught.value)
    assert path.read_bytes() == before
    assert store.read(config.run_id) is None
    record = run(config, store, resume_anyway=True)
    assert record["resumed"]
    assert f"{package} 1.2.3" in record["environment"]["resumed_from"]
    alone = run(config, RunStore(tmp_path / "alone"))
    assert outcome(record) == outcome(alone)
    assert "resumed_from" not in alone["environment"]


def test_all_parts_of_a_run_are_named(tmp_path, monkeypatch):
    from hmoe_repro.analysis.results import frame_of
    from hmoe_repro.report.provenance import _environments

    config, store = spec_of(steps=13), RunStore(tmp_path / "runs")
    for stop_at, version in ((5, "1.0"), (8, "2.0"), (11, "2.0"), (0, "3.0")):
        computed_with(monkeypatch, torch=version)

        def stop(step, steps, stop_at=stop_at):
            if step == stop_at:
                raise Stop

        with contextlib.suppress(Stop):
            record = run(config, store, on_step=stop, resume_anyway=True)
    said = record["environment"]["resumed_from"]
    assert [word for word in said.split() if word in ("1.0,", "2.0,", "3.0,")] == ["1.0,", "2.0,"]
    assert _environments(frame_of([record]))["resumed_from"] == [said]


def test_a_sweep_and_the_command_resume_only_if_told(tmp_path, monkeypatch, own_store):
    config = spec_of()
    computed_with(monkeypatch, torch="1.0")
    half_done(config, own_store)
    monkeypatch.undo()
    monkeypatch.setenv("HMOE_RUNS", str(own_store.folder))
    status, reason = sweep(config, store=own_store, jobs=1)[config.run_id]
    assert status == "failed"
    assert "torch 1.0" in reason
    words = "train --algorithm ERM --dataset DigitDomainsTiny --test-domain sketch".split()
    words += "--network small_cnn --steps 7 --checkpoint-frequency 3 --set batch_size=8".split()
    done = commands.hmoe(*words, folder=tmp_path)
    assert done.returncode == 1
    assert "torch 1.0" in done.stderr
    done = commands.hmoe(*words, "--resume-anyway", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    record = own_store.read(config.run_id)
    assert record["resumed"]
    assert "torch 1.0" in record["environment"]["resumed_from"]


NO_STATES = [
    [],
    {"trainer": []},
    {"spent": float("inf")},
    {"spent": -1.0},
    {"spent": "long"},
    {"parts": []},
    {"parts": [{"torch": "1"}]},
    {"parts": ["x"]},
    {"run": 5},
    {"library": None},
]


@pytest.mark.parametrize("changes", NO_STATES, ids=str)
def test_a_tree_that_is_no_state_is_set_aside(changes, tmp_path):
    path, whole = tmp_path / "state.safetensors", {"trainer": {}, "spent": 1.0, "run": "0" * 12}
    whole |= {
        "library": environment.library_hash(),
        "parts": run_module.with_current_part([], "cpu"),
    }
    save_state(path, whole)
    assert run_module._read_state(path, "0" * 12)["trainer"] == {}
    save_state(path, whole | changes if isinstance(changes, dict) else changes)
    with pytest.warns(UserWarning, match="starts again"):
        assert run_module._read_state(path, "0" * 12)["trainer"] is None
    assert not path.exists()


# Names and files that are no text.


@pytest.mark.parametrize("name", ["SWAD-" * 3000 + "ERM", "SMA-SWAD-" * 2 + "ERM", "SWAD-" * 5000])
def test_an_average_of_averages_without_end_is_refused(name):
    from hmoe_repro.algorithms import get_algorithm

    with pytest.raises(HmoeError) as caught:
        get_algorithm(name)
    assert len(str(caught.value)) < 400
    assert get_algorithm("SWAD-SMA-ERM").name == "SWAD-SMA-ERM"


@pytest.mark.parametrize("content", [b"\xff\xfe0  x.jsonl\n", b"\x80", "0  x\n".encode("utf-16")])
def test_digests_that_are_no_text_are_one_line(content, tmp_path):
    (tmp_path / "SHA256SUMS").write_bytes(content)
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(HmoeError, match="SHA256SUMS.*UTF-8") as caught:
        verify_studies(tmp_path)
    assert "\n" not in str(caught.value)
    done = commands.hmoe("select", "--study", "x", folder=tmp_path, HMOE_RESULTS=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("hmoe: ")
    assert "UTF-8" in done.stderr


def test_two_digests_of_one_study_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}\n")
    digest = hashlib.sha256(b"{}\n").hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  x.jsonl\n{digest}  x.jsonl\n")
    with pytest.raises(HmoeError, match="two digests.*x.jsonl"):
        verify_studies(tmp_path)


STUDY = """title = "x"
[[runs]]
algorithms = ["ERM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["sketch"]
seeds = 1
steps = 3
"""


def test_a_kept_study_file_that_is_no_text_is_one_line(tmp_path):
    from hmoe_repro.studies.study_file import read_study, study_file_copy

    (tmp_path / "reports").mkdir()
    study = tmp_path / "mine.toml"
    study.write_text(STUDY)
    (tmp_path / "reports" / "mine.toml").write_bytes(b"\xff\xff\n")
    with pytest.raises(HmoeError, match="mine.toml.*UTF-8"):
        study_file_copy(read_study(str(study)), tmp_path / "reports")


LOOPS = [
    ("runs", {"HMOE_RUNS": "loop"}),
    ("select", {"HMOE_RUNS": "loop"}),
    ("pack x.tar.gz", {"HMOE_RUNS": "loop"}),
    ("unpack loop", {"HMOE_RUNS": "loop"}),
    ("unpack loop", {}),
    ("select --study quick-table1", {"HMOE_RESULTS": "loop"}),
    ("data list", {"HMOE_FOLDERS": "loop"}),
    ("train --algorithm ERM --dataset loop --test-domain x", {}),
    ("train --algorithm loop.py:X --dataset DigitDomainsTiny --test-domain sketch", {}),
    ("train --algorithm ERM --dataset loop.py:X --test-domain sketch", {}),
    ("plan loop.toml", {}),
    ("predict loop --model loop", {}),
    ("discover loop", {}),
]


@pytest.mark.parametrize("words, given", LOOPS, ids=str)
def test_links_that_lead_in_a_circle_are_one_line(words, given, tmp_path, monkeypatch, own_names):
    for name in ("loop", "loop.py", "loop.toml"):
        (tmp_path / name).symlink_to(tmp_path / name)
    given = {name: str(tmp_path / value) for name, value in given.items()}
    if "HMOE_FOLDERS" in given:
        monkeypatch.setattr(CONFIG, "datasets", (given["HMOE_FOLDERS"],))
    done = commands.hmoe(*words.split(), folder=tmp_path, **given)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1)
    if done.returncode:
        assert done.stderr.strip().splitlines()[-1].startswith("hmoe: ")
