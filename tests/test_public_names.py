"""`import hmoe_repro as hm`: the public names, what their import costs, what `list_*` return."""

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hmoe_repro as hm
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.names import matching_names

PROMISED = {
    "Algorithm", "RunConfig", "checkpoints", "compare", "confusion_matrix", "discover",
    "evaluate", "find_lr", "get_algorithm", "predictions",
    "list_algorithms", "list_datasets", "list_networks", "load", "load_dataset", "register",
    "results", "run", "sweep",
}  # fmt: skip
LARGE = "torch torchvision timm numpy pandas scipy sklearn matplotlib seaborn pydantic typer rich"
INIT = Path(hm.__file__)


def in_a_new_process(code):
    "What a new Python prints for `code`, as JSON."
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def typed_imports():
    "Public name -> module, as an editor reads them under TYPE_CHECKING."
    tree = ast.parse(INIT.read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert guarded.test.id == "TYPE_CHECKING"
    return {
        alias.name: node.module
        for node in guarded.body
        for alias in node.names
        if isinstance(node, ast.ImportFrom) and node.level == 1 and alias.asname is None
    }


def test_the_promised_names_are_public():
    assert PROMISED <= set(hm.__all__)
    assert set(hm.__all__) - PROMISED == {"make_config"}
    assert hm.__all__ == sorted(hm.__all__)
    assert {*hm.__all__, "__version__"} <= set(dir(hm))


def test_an_editor_reads_the_names_that_are_imported_lazily():
    assert typed_imports() == hm._MODULES
    assert set(hm._MODULES) == set(hm.__all__)
    assert (INIT.parent / "py.typed").is_file()


@pytest.mark.parametrize("name", sorted(PROMISED | {"make_config"}))
def test_a_public_name_is_the_object_of_its_module(name):
    found = getattr(hm, name)
    module = importlib.import_module(f"hmoe_repro.{typed_imports()[name]}")
    assert found is getattr(module, name)
    assert callable(found)
    assert found.__module__ == module.__name__, "the door names the module that defines it"
    assert f"`{name}`" in hm.__doc__ or f"hm.{name}(" in hm.__doc__ or name.startswith("list_")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'hmoe_repro' has no attribute 'evaluat'"):
        hm.evaluat  # noqa: B018


def test_no_public_name_hides_a_subpackage():
    inside = {module.name for module in pkgutil.iter_modules(hm.__path__)}
    assert len(inside) >= 12
    assert not inside & set(hm.__all__)


def test_deep_imports_and_public_names_live_together():
    """In either order, modules of the same name included: `run`, `sweep`, `discover`, `compare`."""
    code = """
import json
import hmoe_repro as hm
before = [hm.run, hm.sweep, hm.discover, hm.compare]
import hmoe_repro.training.run, hmoe_repro.studies.sweep, hmoe_repro.data.registry
import hmoe_repro.apps.discover, hmoe_repro.apps.compare
from hmoe_repro.training.run import run
after = [hm.run, hm.sweep, hm.discover, hm.compare]
modules = [hm.training.run, hm.studies.sweep, hm.apps.discover, hm.apps.compare, hm.data]
kinds = [type(module).__name__ for module in modules]
print(json.dumps([before == after, run is hm.run, kinds]))
"""
    assert in_a_new_process(code) == [True, True, ["module"] * 5]


def test_the_import_is_fast_and_imports_nothing_large():
    """About 5 ms; the fastest of three, because another process may take the processor."""
    code = f"""
import json, sys, time
start = time.perf_counter()
import hmoe_repro
taken = time.perf_counter() - start
loaded = [name for name in {LARGE!r}.split() if name in sys.modules]
dir(hmoe_repro), hmoe_repro.__all__, hmoe_repro.__doc__
print(json.dumps([taken, loaded, [name for name in sys.modules if name[:11] == "hmoe_repro."]]))
"""
    times = []
    for _ in range(3):
        taken, loaded, own = in_a_new_process(code)
        times.append(taken)
        assert loaded == []
        assert own == []
    assert min(times) < 0.1


def test_algorithms_are_listed_without_torch():
    code = """
import json, sys
import hmoe_repro as hm
names = hm.list_algorithms("HMOE*")
print(json.dumps([names, "torch" in sys.modules]))
"""
    assert in_a_new_process(code) == [["HMOE-DL", "HMOE-DN", "HMOE-ND"], False]


NAMES = ["ERM", "ERM++", "HMOE-ND", "HMOE-DN", "IB-ERM"]


@pytest.mark.parametrize(
    "pattern, exclude, found",
    [
        ("*", (), ["ERM", "ERM++", "HMOE-DN", "HMOE-ND", "IB-ERM"]),
        ("", (), ["ERM", "ERM++", "HMOE-DN", "HMOE-ND", "IB-ERM"]),
        ("ERM", (), ["ERM"]),
        ("hmoe-?d", (), ["HMOE-ND"]),
        ("*-[dn]n", (), ["HMOE-DN"]),
        (["ERM", "IB*"], (), ["ERM", "IB-ERM"]),
        ("*ERM*", "IB*", ["ERM", "ERM++"]),
        ("*", ["*-*", "*+"], ["ERM"]),
        ("RM", (), []),
        ([], (), []),
    ],
)
def test_names_match_patterns(pattern, exclude, found):
    assert matching_names([*NAMES, "ERM"], pattern, exclude) == found


@pytest.mark.parametrize("name", ["list_algorithms", "list_networks", "list_datasets"])
def test_what_is_no_pattern_is_refused(name):
    with pytest.raises(HmoeError, match=rf"{name}\(\) got 3 \(int\) as pattern"):
        getattr(hm, name)(3)


def test_the_lists_hold_what_can_be_used():
    assert hm.list_datasets("*mnist") == ["ColoredMNIST", "RotatedMNIST"]
    assert hm.list_networks("*_cnn") == ["image_cnn", "mnist_cnn", "small_cnn"]
    assert not [name for name in hm.list_networks() if "<" in name]
    for name in hm.list_algorithms():
        assert issubclass(hm.get_algorithm(name), hm.Algorithm)
    assert len(hm.list_algorithms()) >= 42
    assert len(hm.list_datasets()) >= 60


def test_timm_names_are_listed_if_a_pattern_asks():
    found = hm.list_networks("timm:resnet1[08]*")
    assert "timm:resnet18" in found
    assert all(name.startswith("timm:resnet1") for name in found)
    assert not hm.list_networks("resnet18d")


def test_a_registered_class_is_listed(own_names):
    @hm.register("ListedHere", paper="", needs_domain_labels=False)
    class Mine(hm.Algorithm):
        pass

    assert hm.list_algorithms("Listed*") == ["ListedHere"]
    assert hm.get_algorithm("ListedHere") is Mine


def test_a_person_trains_reads_and_loads_with_the_public_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    small = {"network": "small_cnn", "steps": 3, "checkpoint_frequency": 3}
    config = hm.make_config("ERM", "DigitDomainsTiny", ["sketch"], **small)
    assert isinstance(config, hm.RunConfig)
    record = hm.run(config)
    assert record["status"] == "complete"
    assert record["run_id"] == config.run_id
    frame = hm.results(tmp_path / "runs")
    assert frame.run_id.tolist() == [config.run_id]
    assert frame.algorithm.tolist() == ["ERM"]
    assert set(hm.checkpoints(frame).quantity) >= {"validation_accuracy", "test_accuracy"}
    assert hm.run(hm.RunConfig.from_dict(config.to_dict())) == record
