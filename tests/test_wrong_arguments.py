"""Every public function with arguments of a wrong kind: an `HmoeError` with cause and fix, and no
other error, before anything is trained or downloaded."""

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pandas as pd
import pytest
import torch
from test_hostile import trained  # noqa: F401

import hmoe_repro
from hmoe_repro.apps import compare as comparing
from hmoe_repro.apps.discover import discover
from hmoe_repro.core.devices import resolve_device
from hmoe_repro.core.errors import (
    PUBLIC,
    Device,
    HmoeError,
    Place,
    _fits,
    _in_words,
    public,
    system_error,
)
from hmoe_repro.networks.search_space import HParam
from hmoe_repro.studies.sweep import SweepOptions
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run_config import RunOptions
from hmoe_repro.training.store import RunStore

for found in pkgutil.walk_packages(hmoe_repro.__path__, "hmoe_repro."):
    importlib.import_module(found.name)

LONG = "x" * 300
VALUES = {
    "None": None, "True": True, "5": 5, "-1": -1, "2.5": 2.5, "nan": float("nan"), "huge": 10**30,
    "empty": "", "long": LONG, "NUL": "a\0b", "folder": "no/such/place", "[]": [], "[None]": [None],
    "['x']": ["x"], "[[]]": [[]], "{}": {}, "{5: 5}": {5: 5}, "object": object(), "bytes": b"x",
    "array": np.zeros(3), "tensor": torch.zeros(2), "frame": pd.DataFrame(), "class": dict,
}  # fmt: skip
DATA = {d: (torch.rand(12, 3, 16, 16), torch.arange(12) % 2) for d in "ab"}


class Reached(Exception):
    "A call whose arguments are accepted has come to what takes long."


@pytest.fixture(scope="module")
def given(trained):  # noqa: F811
    "Function -> arguments with which it works."
    frame, records = hmoe_repro_results(trained), trained.scan()[0]
    config = make_config("ERM", "DigitDomainsTiny", ["sketch"], network="small_cnn", steps=2)
    run = RunOptions(algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["sketch"])
    model = hmoe_repro.load(records[0]["run_id"], store=trained)
    return {
        "compare": dict(algorithms=["ERM"], data=DATA, seeds=1, steps=1, jobs=1),
        "as_dataset": dict(data=DATA),
        "load": dict(model=records[0]["run_id"], store=trained),
        "load_model": dict(run_id=records[0]["run_id"], store=trained),
        "RunStore.find": dict(self=trained, prefix=records[0]["run_id"]),
        "RunStore.__init__": dict(self=RunStore.__new__(RunStore)),
        "Comparison.save": dict(self=comparing.compare_frame(frame, "ERM")),
        "drawn_configs": dict(run=run.replace(network="small_cnn"), n_hparams=2),
        "predict_images": dict(model=model, images=np.zeros((16, 16, 3), np.uint8)),
        "predict_folder": dict(model=model, folder="."),
        "export_model": dict(model=model, folder="exported"),
        "make_config": dict(algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["sketch"])
        | dict(network="small_cnn"),
        "run": dict(config=config, store=trained),
        "sweep": dict(configs=[]),
        "SweepOptions.__init__": dict(self=SweepOptions.__new__(SweepOptions), store=trained),
        "load_dataset": dict(name="DigitDomainsTiny"),
        "results": dict(source=str(trained.folder)),
        "select_model": dict(records=records, test_domain="sketch"),
        "accuracy_table": dict(frame=frame),
        "contrasts": dict(frame=frame),
        "contrast": dict(frame=frame, a="ERM"),
        "merge_hparams": dict(declared={"lr": HParam(0.1, "rate")}, given={}),
        "draw_hparams": dict(declared={"lr": HParam(0.1, "rate")}, hparams_seed=1, trial_seed=0),
        "get_algorithm": dict(name="ERM"),
        "algorithm_name": dict(given="ERM"),
        "new_algorithm": dict(name="Mine", path="mine.py"),
        "pack": dict(store=trained, path="runs.tar.gz"),
        "export_domainbed": dict(records=records, folder="out"),
        "rate": dict(successes=1, n=2),
        "discover": dict(folder="."),
        "read_pool": dict(folder="."),
        "gallery": dict(profile="quick", output="nowhere"),
    }


def hmoe_repro_results(store):
    from hmoe_repro.analysis.results import results

    return results(store.folder)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch, own_names):
    "An empty folder to work in, and nothing that takes long."
    for name in ("RUNS", "RESULTS", "FIGURES", "DATA"):
        monkeypatch.setenv(f"HMOE_{name}", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)

    def stop(*_, **__):
        raise Reached

    monkeypatch.setattr(comparing, "_train", stop)
    for place in ("studies.worker_pools.run", "studies.worker.run", "report.render.render"):
        module, name = place.rsplit(".", 1)
        module = importlib.import_module(f"hmoe_repro.{module}")
        if hasattr(module, name):
            monkeypatch.setattr(module, name, stop)
    import urllib.request

    monkeypatch.setattr(urllib.request, "urlopen", stop)


def calls_of(function, usual: dict, value):
    "Arguments of calls in which one, or each of the needed ones, is `value`."
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named = [p for p in named if p.name != "self"]
    needed = [p.name for p in named if p.default is p.empty]
    if not usual:
        yield dict.fromkeys(needed, value)
    for parameter in named if usual or not needed else ():
        yield usual | {parameter.name: value}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_wrong_arguments_are_errors_with_cause_and_fix(name, given, elsewhere):
    function, short = PUBLIC[name], re.sub(r"^.*?\.(?=[a-z_]+$|[A-Z])", "", name)
    failed = []
    for kind, value in VALUES.items():
        for call in calls_of(function, given.get(short, {}), value):
            try:
                function(**call)
            except Reached:
                pass
            except HmoeError as error:
                said = str(error)
                if "\n" in said or not (error.cause and (error.fix or error.choices is not None)):
                    failed.append((kind, said))
            except Exception as error:
                which = [n for n, v in call.items() if v is value]
                failed.append((kind, which, f"{type(error).__name__}: {error}"[:150]))
    assert not failed, "\n".join(map(str, failed))


def test_what_users_are_shown_is_public(root):
    "The functions in the README and the documents, but those for the code of an algorithm."
    shown = set()
    for path in (root / "README.md", *(root / "docs").glob("*.md")):
        if path.name != "porting.md":
            text = path.read_text(encoding="utf-8")
            for module, names in re.findall(r"from (hmoe_repro[\w.]*) import ([\w, ]+)", text):
                shown |= {getattr(importlib.import_module(module), n) for n in names.split(", ")}
            shown |= {getattr(hmoe_repro, n) for n in re.findall(r"\bhm\.(\w+)\(", text)}
    functions = {f for f in shown if inspect.isfunction(f)}
    assert functions
    assert functions <= {*PUBLIC.values()}
    assert {hmoe_repro.compare, hmoe_repro.load, discover} <= {*PUBLIC.values()}


def test_every_argument_of_a_public_function_has_a_kind():
    for name, function in PUBLIC.items():
        for parameter in inspect.signature(function).parameters.values():
            several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            known = function.kinds[parameter.name] is not inspect.Parameter.empty
            assert known or several or parameter.name == "self", (name, parameter.name)


@pytest.mark.parametrize(
    "kind, fits, wrong, words",
    [
        (int, [1, np.int64(2), 10**30], [True, 1.0, "1", None, [1]], "a whole number"),
        (float, [1, 1.5, np.float32(2)], [True, "1", None], "a number"),
        (bool, [True, np.bool_(False)], [1, "true", None], "True or False"),
        (Device, ["cpu", torch.device("cpu")], [None, 5, b"cpu"], "a text or a torch.device"),
        (str | None, ["a", "", None], [5, b"a", ["a"], "a\0b"], "a text or None"),
        (Place, ["a", RunStore().folder], [None, 5, b"a", "a\0"], "a text or a path"),
        (list[str], [["a"], (), np.array(["a"])], ["a", ["a", 1], {}, None], "a list, each a text"),
        (dict[str, int], [{}, {"a": 1}], [{1: 1}, {"a": "b"}, [], None], "a dictionary"),
        (type[RunStore], [RunStore, dict], ["RunStore", None], "a type"),
        (RunStore, [RunStore()], [None, "runs"], "a RunStore"),
    ],
)  # fmt: skip
def test_what_an_annotation_allows(kind, fits, wrong, words):
    assert all(_fits(value, kind) for value in fits)
    assert not any(_fits(value, kind) for value in wrong)
    assert _in_words(kind) == words


def test_a_public_function_is_as_before_but_for_its_errors():
    def size(folder, most: int = 3, *more: int, **options: str) -> int:
        "How large it is."
        if most == 4:
            raise FileNotFoundError(2, "No such file", "there")
        return most

    try:
        checked = public(folder=Place)(size)
        assert checked(".") == 3
        assert checked(".", 5, "anything", x=1) == 5
        assert checked.__doc__ == size.__doc__
        assert inspect.signature(checked) == inspect.signature(size)
        for call, said in (
            (
                dict(folder=None),
                r"size\(\) got None \(NoneType\) as folder. Fix: folder is a text or",
            ),
            (dict(folder=".", most="3"), r"got '3' \(str\) as most. Fix: most is a whole number"),
            (
                dict(most=1),
                "size.*missing a required argument: 'folder'. Valid: folder, most, more",
            ),
            (dict(folder=".", most=4), "No such file: there. Fix: name another path"),
        ):
            with pytest.raises(HmoeError, match=said):
                checked(**call)
    finally:
        PUBLIC.popitem()


def test_results_of_a_folder_by_its_name(given, elsewhere, trained, monkeypatch):  # noqa: F811
    from hmoe_repro.analysis.results import results

    monkeypatch.chdir(trained.folder.parent)
    assert len(results("runs")) == len(results(trained.folder)) == 2
    for source, said in (
        ([], "no study is named. Fix: name"),
        ("study.toml", r"study.toml.*Fix: name a TOML file"),
        (".", "has no runs. Fix: name"),
        ("absent", "no records of study 'absent'"),
    ):
        with pytest.raises(HmoeError, match=said):
            results(source)


def test_values_of_numpy_and_torch_are_what_they_say():
    "A run by NumPy's numbers is the run by Python's, and a device is a device."
    usual = dict(algorithm="ERM", dataset="DigitDomainsTiny", network="small_cnn")
    python = make_config(
        test_domains=["sketch"], trial_seed=1, hparams={"batch_size": 8}, steps=3, **usual
    )
    numpy = make_config(
        test_domains=np.array(["sketch"]),
        trial_seed=np.int64(1),
        hparams={"batch_size": np.int64(8)},
        steps=np.int32(3),
        **usual,
    )
    assert numpy == python
    assert numpy.run_id == python.run_id
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")


def test_domains_and_classes_of_compare_may_be_numbers(elsewhere):
    data = dict(enumerate(DATA.values()))
    for more in (dict(test_domains=[0]), dict(test_domains=1), dict(classes=range(2))):
        with pytest.raises(Reached):
            hmoe_repro.compare(["ERM"], data, seeds=1, steps=1, jobs=1, **more)


@pytest.mark.parametrize(
    "error, said",
    [
        (
            ConnectionError("refused by host"),
            "ConnectionError: refused by host. Fix: check the file or",
        ),
        (OSError("no such revision."), "OSError: no such revision. Fix: check the file or"),
        (TimeoutError(), "TimeoutError. Fix: check the file or"),
        (FileNotFoundError(2, "No such file", "a"), "No such file: a. Fix: name another path"),
    ],
)
def test_errors_of_libraries_keep_their_message(error, said):
    assert str(system_error(error)).startswith(said)


def test_a_closed_pipe_is_no_error_of_a_path():
    def write():
        raise BrokenPipeError(32, "Broken pipe")

    try:
        with pytest.raises(BrokenPipeError):
            public(write)()
    finally:
        PUBLIC.popitem()
