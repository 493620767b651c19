"""Hostile files: no field of a record, state, archive, export or cache runs code or fills a disk.

Each test makes the crafted file itself. `tripwire` is a module that notes its import and its call.
"""

import json
import sys

import pytest
import torch

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.checkpoint_io import load_state, save_state, sealed
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

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
    sys.modules.pop("hmoe_tripwire", None)


def spec_of(test="sketch", **options):
    return make_config("ERM", "DigitDomainsTiny", [test], hparams=HPARAMS, **SHORT | options)


class Stop(KeyboardInterrupt):
    "What a person, or the end of a slot, does to a run."


def half_done(spec, store):
    "Train a run beyond its first checkpoints and stop it; returns the path of its state."

    def stop(step, steps):
        if step == 5:
            raise Stop

    with pytest.raises(Stop):
        run(spec, store, on_step=stop)
    return store.path(spec.run_id) / "state.safetensors"


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
        with pytest.raises(HmoeError, match="not a saved state"):
            load_state(tmp_path / "state")
    assert not tripwire.exists() and "hmoe_tripwire" not in sys.modules


def test_a_run_with_such_a_state_starts_again(tripwire, tmp_path):
    spec, store = spec_of(), RunStore(tmp_path / "runs")
    path = half_done(spec, store)
    path.write_bytes(sealed({}, tree=pytree_text("hmoe_tripwire", "call"), plain="[1]"))
    with pytest.warns(UserWarning, match="starts again"):
        record = run(spec, store)
    assert record["status"] == "complete" and not record["resumed"]
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
        with pytest.raises(HmoeError, match="not a saved state"):
            load_state(tmp_path / "state")


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_deep_tree_is_refused(depth, tmp_path):
    text = '{"list":[' * depth + "1" + "]}" * depth
    (tmp_path / "state").write_bytes(sealed({}, tree=text))
    with pytest.raises(HmoeError, match="not a saved state"):
        load_state(tmp_path / "state")


def test_what_a_state_cannot_hold_is_refused_when_it_is_written(tmp_path):
    from collections import defaultdict, namedtuple

    Pair = namedtuple("Pair", "a b")
    for value in (defaultdict(list), Pair(1, 2), {1, 2}, object(), {(1, 2): 3}):
        with pytest.raises(HmoeError, match=r"state\['a'\]\[0\]"):
            save_state(tmp_path / "state", {"a": [value]})
    assert not (tmp_path / "state").exists()
