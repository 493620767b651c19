"""`hmoe_repro.compare`: the kinds of data it takes, the runs that it makes, what it says of them,
and algorithms and data sets that are defined in a notebook or a program."""

import json
import os
import subprocess
import sys
import time
import warnings
from html import escape

import nbformat
import pandas as pd
import pytest
import torch
from nbclient import NotebookClient
from torch.utils.data import Dataset, TensorDataset

import hmoe_repro
from hmoe_repro.algorithms.base import ALGORITHMS, ERM, register
from hmoe_repro.apps.compare import as_dataset
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import MultiDomainDataset
from hmoe_repro.data.image_folder import sample_tree
from hmoe_repro.data.registry import DATASETS, kept_data
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.studies.sweep import sweep
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.predictions import PREDICTIONS_FILE
from hmoe_repro.training.store import RunStore, outcome

FACTOR = 0.5
SHORT = {"seeds": 1, "steps": 2, "hparams": {"batch_size": 4}, "jobs": 1, "device": "cpu"}


def scaled(losses):
    return {"loss": FACTOR * losses["loss"]}


class Half(ERM):
    def loss(self, minibatches):
        return scaled(super().loss(minibatches))


class Failing(ERM):
    def loss(self, minibatches):
        raise ValueError("not today")


class Noisy(Dataset):
    "Another image each time, or one of no tensor."

    def __init__(self, image=None):
        self.image = image

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.rand(3, 16, 16) if self.image is None else self.image, i % 2


class Odd(Dataset):
    "Samples that are dictionaries or single tensors, or an item that raises."

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if self.kind == "error" and i == 3:
            raise OSError("disk error at item 3")
        image, label = torch.full((3, 16, 16), i / 8), i % 2
        if self.kind == "dictionary":
            return {"pixels": image, "label": label}
        return image if self.kind == "single" else (image, label)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, own_names):
    for name in ("runs", "cache"):
        monkeypatch.setenv(f"HMOE_{name.upper()}", str(tmp_path / name))
    return tmp_path


def tensors(channels=3, classes=2, count=20):
    generator = torch.Generator().manual_seed(0)
    return {
        d: (torch.rand(count, channels, 16, 16, generator=generator), torch.arange(count) % classes)
        for d in ("a", "b", "c")
    }


def compare(algorithms, data, **more):
    return hmoe_repro.compare(algorithms, data, **SHORT | more)


def test_all_kinds_of_data(place):
    sample_tree(place / "pictures", per_class=5, size=20)
    folder = compare("ERM", place / "pictures", resolution=16, test_domains=["sketch"])
    assert folder.frame[["dataset", "network", "resolution"]].values.tolist() == [
        ["pictures", "image_cnn", 16]
    ]
    named = compare(["ERM"], "DigitDomainsTiny", test_domains="photo")
    assert named.frame.network.tolist() == ["small_cnn"]
    assert len(named.frame) == 1
    given = tensors()
    by_tensor = compare(["ERM", "HMOE-DN"], given)
    sets = {domain: TensorDataset(x.double(), y.int()) for domain, (x, y) in given.items()}
    by_dataset = compare(["ERM", "HMOE-DN"], sets)
    assert by_dataset.frame.run_id.tolist() == by_tensor.frame.run_id.tolist()
    assert by_tensor.frame.status.eq("complete").all()
    assert len(by_tensor.frame) == 3 + 3 * 3
    fingerprint = as_dataset(given).fingerprint
    assert set(by_tensor.frame.dataset) == {f"tensors-{fingerprint}"}
    assert set(by_tensor.frame.dataset_fingerprint) == {fingerprint}
    given["b"][0][7, 0, 3, 3] = 0.25
    assert not {*compare("ERM", given).frame.run_id} & {*by_tensor.frame.run_id}
    bytes_ = {d: ((255 * x).byte().numpy(), y.numpy()) for d, (x, y) in given.items()}
    assert compare("ERM", bytes_, test_domains=["a"]).frame.status.tolist() == ["complete"]


@pytest.mark.slow
def test_its_runs_are_those_of_a_sweep(place):
    study = """
title = "the same"
algorithms = ["ERM", "HMOE-DN"]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo"]
seeds = 2
steps = 4
checkpoint_frequency = 1
network = "small_cnn"
[hparams.all]
batch_size = 4
"""
    (place / "same.toml").write_text(study)
    configs = study_configs(place / "same.toml")
    other = RunStore(place / "other")
    sweep(configs, store=other, device="cpu", jobs=1)
    more = {"seeds": 2, "steps": 4, "test_domains": ["photo"]}
    made = compare(["ERM", "HMOE-DN"], "DigitDomainsTiny", **more)
    assert {*made.frame.run_id} == {config.run_id for config in configs}
    for config in configs:
        assert outcome(RunStore().read(config.run_id)) == outcome(other.read(config.run_id))
    erm = [other.read(s.run_id)["selected"]["default"] for s in configs if s.algorithm == "ERM"]
    mean = 100 * sum(chosen["test_accuracy"] for chosen in erm) / len(erm)
    erm_row = made.table.iloc[0]
    assert erm_row.algorithm == "ERM"
    assert erm_row["Average of photo"].startswith(f"{mean:.1f} ± ")


@pytest.mark.slow
def test_an_own_class_stands_in_the_table_and_nothing_is_trained_twice(monkeypatch, tmp_path):
    first = compare(["ERM", Half], tensors(), seeds=2)
    name = "Half (test_compare_call.py)"
    assert first.table.algorithm.tolist() == ["ERM", name]
    columns = first.table.columns.tolist()
    assert columns[2].startswith("Average")
    assert (columns[3].split(" (")[0], columns[4]) == ("difference to ERM", "p (Holm)")
    assert first.table.iloc[0, 4] == "–"
    assert "95 % CI" in first.table.iloc[1, 3]
    assert first.verdict in repr(first)
    assert "small_cnn, 16 pixels" in repr(first)
    assert ", 2 updates" in repr(first)
    page = first.save(tmp_path / "page.html").read_text()
    assert first.frame.finished.max()[:10] in page
    assert "Chance is 50.0" in page
    assert escape(first.verdict) in page
    assert "<svg" in page
    assert "<script" not in page
    assert all(run_id in page for run_id in first.frame.run_id)
    assert "http-equiv" in page
    source = RunStore().folder / "algorithms" / f"{ALGORITHMS[name].source_hash}.py"
    kept = source.read_text()
    assert "FACTOR = 0.5" in kept
    assert "def scaled" in kept
    for module in ("hmoe_repro.studies.worker_pools.run", "hmoe_repro.studies.worker.run"):
        monkeypatch.setattr(module, lambda *_, **__: pytest.fail("trained again"))
    again = compare([Half, "ERM"], tensors(), seeds=2, baseline="ERM")
    assert again.verdict == first.verdict
    assert again.contrasts.equals(first.contrasts)
    assert {*again.frame.run_id} == {*first.frame.run_id}


def test_a_failed_algorithm_is_a_note_and_a_failed_baseline_an_error():
    made = compare(["ERM", Failing], tensors(), test_domains=["a"])
    (note,) = [note for note in made.notes if note.startswith("failed")]
    assert "ValueError: not today" in note
    assert "of test_compare_call.py" in note
    assert made.verdict.startswith("Nothing to compare")
    assert len(made.table) == 1
    with pytest.raises(HmoeError, match="baseline Failing.*not today"):
        compare([Failing, "ERM"], tensors(), test_domains=["a"])


X, Y = torch.rand(8, 3, 16, 16), torch.arange(8) % 2
NHWC = X.permute(0, 2, 3, 1)
BAD = [
    ({"a": (X, Y)}, {}, "has one domain"),
    ({"a": (X, Y), "b": (X, Y * 0)}, {}, r"do not have the same labels: 2 .* and 1"),
    ({"a": (X, Y), "b": (X - 1, Y)}, {}, "images of domain 'b' are torch.float32 .* from -"),
    ({"a": (X.long(), Y), "b": (X.long(), Y)}, {}, "torch.int64 of shape .*torch.uint8 from 0"),
    ({"a": (X[:, 0], Y), "b": (X, Y)}, {}, r"of shape \(8, 16, 16\).* Fix: \(N, C, H, W\)"),
    ({"a": (X, Y), "b": (X[..., :8], Y)}, {}, r"images of 'b'.*\(3, 16, 8\)"),
    ({"a": (X, Y[:5]), "b": (X, Y)}, {}, "8 images and 5 labels"),
    ({"a": (X, Y.float()), "b": (X, Y.float())}, {}, "labels of type torch.float32"),
    ({"a": (X, Y), "b": "images"}, {}, "domain 'b' is str, not a pair"),
    ({"a": (X, Y), "b": Noisy()}, {}, "another image at each call.* random transform"),
    ({"a": (X, Y), "b": Noisy("picture")}, {}, "item 0 .* gives str as image, not a tensor"),
    ([X, Y], {}, "list cannot be used as data"),
    ({}, {}, "dict cannot be used as data"),
    ("DigitDomainsTinny", {}, "unknown data set.* 'DigitDomainsTinny'"),
    ({"a": (X, Y), "b": (X, Y)}, {"test_domains": ["z"]}, "unknown domain .* Valid: a, b"),
    ({"a": (X, Y), "b": (X, Y)}, {"hparams": {"lrr": 1}}, "unknown hyper-parameter .*'lrr'"),
    ({"a": (X, Y), "b": (X, Y)}, {"seeds": 0}, "no trial seed"),
    ({"a": (X, Y), "b": (X, Y)}, {"baseline": "CORAL"}, "unknown baseline"),
    (
        {"a": (NHWC, Y), "b": (NHWC, Y)},
        {},
        r"\(16, 16, 3\): channels last.* permute\(0, 3, 1, 2\)".replace("* p", "*p"),
    ),
    (
        {"a": (X, Y + 1), "b": (X, Y + 1)},
        {},
        "labels are 1, 2: not every number.*y - 1, or classes=",
    ),
    ({"a": (X, 2 * Y), "b": (X, 2 * Y)}, {}, "labels are 0, 2: not every number.*or classes="),
    ({"a": (X, Y - 1), "b": (X, Y - 1)}, {}, "labels are -1, 0: not every"),
    ({"a": (X, 0 * Y), "b": (X, 0 * Y)}, {}, "the classes are 0, not two"),
    ({"a": (X, Y, Y), "b": (X, Y)}, {}, "domain 'a' has 3 parts"),
    ({"a": TensorDataset(X, Y, Y), "b": (X, Y)}, {}, "item 0 .*'a' has 3 elements"),
    ({"a": TensorDataset(X, Y + 0.5), "b": (X, Y)}, {}, r"has the label tensor\(0.5000\)"),
    (
        {"a": Odd("dictionary"), "b": (X, Y)},
        {},
        r"item 0 .*dictionary without 'image' \(pixels, label\)",
    ),
    ({"a": Odd("error"), "b": (X, Y)}, {}, "item 3 .*raised OSError: disk error at item 3"),
    ({"a": Odd("single"), "b": (X, Y)}, {}, "item 0 .*is Tensor, no pair"),
    ({"a": (X, Y), "b": (X, Y)}, {"classes": ["x"]}, "the classes are x, not two"),
    ({"a": (X, Y), "b": (X, Y)}, {"classes": ["x", "x"]}, "the classes are x, x, not two"),
    ({"a": (X, Y + 1), "b": (X, Y + 1)}, {"classes": ["x", "y"]}, "label 2, of 2 classes"),
    ("DigitDomainsTiny", {"classes": ["x", "y"]}, "these data name their own"),
    ({"a": (X, Y), "b": (X, Y)}, {"seeds": [0, 0]}, "trial seed 0 is given twice"),
    ({"a": (X, Y), "b": (X, Y)}, {"seeds": []}, "no trial seed"),
    ({"a": (X, Y), "b": (X, Y)}, {"seeds": None}, "seeds"),
    ({"a": (X, Y), "b": (X, Y)}, {"seeds": [-1]}, "whole numbers from 0"),
    ({"a": (X, Y), "b": (X, Y)}, {"seeds": 10**9}, "more than 10,000"),
    ({"a": (X, Y), "b": (X, Y)}, {"test_domains": []}, "no test domain"),
    ({"a": (X, Y), "b": (X, Y)}, {"test_domains": ["a", "a"]}, "test domain 'a' is given twice"),
]


@pytest.mark.parametrize("data, more, said", BAD)
def test_what_is_wrong_is_said_before_anything_is_trained(data, more, said):
    with pytest.raises(HmoeError, match=said):
        compare(["ERM"], data, **more)
    assert not RunStore().scan()[0]


def test_classes_allow_labels_with_gaps():
    """Names say that a class without an image is meant, as a `Dataset` with `classes` does."""
    given = {d: (x, 2 * y) for d, (x, y) in tensors().items()}
    data = as_dataset(given, classes=["ant", "bee", "cow"])
    assert data.class_names == ["ant", "bee", "cow"]
    assert data.labels[0].unique().tolist() == [0, 2]
    given["b"] = (given["b"][0], given["b"][1] * 0)  # a class that one domain lacks
    assert as_dataset(given, classes=["ant", "bee", "cow"]).labels[1].unique().tolist() == [0]
    made = compare("ERM", given, test_domains=["a"], classes=["ant", "bee", "cow"])
    assert "Chance is 33.3" in made.notes[0]
    sets = {domain: TensorDataset(x, 2 * y) for domain, (x, y) in tensors().items()}
    for one in sets.values():
        one.classes = ["ant", "bee", "cow"]
    assert as_dataset(sets).num_classes == 3


def test_the_error_of_a_dataset_is_kept():
    with pytest.raises(HmoeError) as caught:
        as_dataset({"a": Odd("error"), "b": (X, Y)})
    assert isinstance(caught.value.__cause__, OSError)


def test_images_in_two_domains_of_tensors_are_counted():
    given = tensors()
    given["c"][0][:2] = given["a"][0][5]
    with pytest.warns(UserWarning, match=r"2 images are in two domains.*c\[0\], in a too"):
        as_dataset(given)


def test_data_sets_of_python_files_are_checked_for_their_channels():
    with pytest.raises(HmoeError, match="channels last"):
        MultiDomainDataset("mine", ["a", "b"], ["0", "1"], [NHWC, NHWC], [Y, Y])
    tall = torch.rand(8, 3, 16, 4)
    MultiDomainDataset("mine", ["a", "b"], ["0", "1"], [tall, tall], [Y, Y])
    features = torch.rand(8, 64, 1, 1)
    MultiDomainDataset("mine", ["a", "b"], ["0", "1"], [features, features], [Y, Y])


def test_unknown_algorithms_are_refused():
    inner = type("Inner", (ERM,), {"__qualname__": "f.<locals>.Inner", "__module__": __name__})
    for given, said in (("EMR", "unknown algorithm 'EMR'.*ERM"), (int, "nor a subclass"), (3, "3")):
        with pytest.raises(HmoeError, match=said):
            compare([given], tensors())
    with pytest.raises(HmoeError, match="another definition.*top of"):
        compare([inner], tensors())
    with pytest.raises(HmoeError, match="to train"):
        compare([], tensors())


def test_importing_the_package_imports_no_torch():
    code = "import sys, hmoe_repro; print('torch' in sys.modules, hmoe_repro.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", hmoe_repro.__version__]
    with pytest.raises(AttributeError, match="no attribute 'compares'"):
        hmoe_repro.compares  # noqa: B018


# A notebook and a program

CELLS = [
    "import torch, json, os\nimport hmoe_repro\nfrom hmoe_repro.algorithms.base import ERM",
    "from hmoe_repro.data.base import MultiDomainDataset\n"
    "from hmoe_repro.data.registry import register_dataset\n"
    "from hmoe_repro.training.store import RunStore, outcome\n"
    "from helpers import twice\nFACTOR = 0.25",
    "x = 'an experiment'\ndef scaled(loss):\n    return FACTOR * twice(loss)",
    "class Mine(ERM):\n    def loss(self, minibatches):\n        x = super().loss(minibatches)\n"
    "        return {'loss': scaled(x['loss'])}",
    "@register_dataset('Noises', domain_names=tuple('abc'), summary='noise', seeded=True)\n"
    "def noises(trial_seed, data_dir):\n    torch.manual_seed(trial_seed)\n"
    "    x = [torch.rand(20, 3, 16, 16) for _ in 'abc']\n"
    "    y = [torch.arange(20) % 2] * 3\n"
    "    return MultiDomainDataset('Noises', list('abc'), ['0', '1'], x, y)",
    "def records(jobs, folder):\n"
    "    store = RunStore(os.path.join(os.environ['HMOE_RUNS'], folder))\n"
    "    made = hmoe_repro.compare(['ERM', Mine], 'Noises', 2, ['a', 'b'], 3, jobs=jobs,\n"
    "        hparams={'batch_size': 4}, device='cpu', store=store)\n"
    "    ids = sorted(set(made.frame.run_id))\n"
    "    return made, [outcome(store.read(i)) for i in ids]",
    "serial, one = records(1, 'one')",
    "parallel, two = records(2, 'two')",
    "print(json.dumps([one == two, len(one), sorted({r['status'] for r in two}),\n"
    "    parallel.table.algorithm.tolist(), parallel.verdict == serial.verdict]))",
]
HELPERS = "def twice(loss):\n    return 2 * loss\n"


def printed(notebook):
    return "".join(o.get("text", "") for o in notebook.cells[-1].outputs)


@pytest.mark.slow
def test_a_cell_trains_serially_and_in_parallel_with_equal_records(place, monkeypatch):
    """In a real kernel; a new process then loads a model of it without the notebook."""
    (place / "helpers.py").write_text(HELPERS)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    how = {"kernel_name": "python3", "resources": {"metadata": {"path": str(place)}}}
    NotebookClient(notebook, timeout=300, **how).execute()
    same = json.loads(printed(notebook))
    assert same == [True, 8, ["complete"], ["ERM", "Mine (notebook)"], True]
    (place / "helpers.py").unlink()
    store = RunStore(place / "runs" / "two")
    mine = next(r for r in store.scan()[0] if r["config"]["algorithm"] == "Mine (notebook)")
    assert "Noises" not in DATASETS
    with pytest.raises(HmoeError, match="code stored.*next to.*trust"):
        load_model(mine["run_id"], store=store)
    model, _ = load_model(mine["run_id"], store=store, trust_code=True)
    assert type(model).__name__ == "Mine"
    assert model.predict(X).shape == (8, 2)
    assert type(model).loss.__globals__["FACTOR"] == 0.25
    assert "x" not in type(model).loss.__globals__, "what has the name of a local one is left out"


@pytest.mark.slow
def test_a_program_without_a_guard_trains_in_parallel_once(place):
    (place / "helpers.py").write_text(HELPERS)
    program = ["print('begun', flush=True)", *CELLS]
    (place / "program.py").write_text("\n".join(program).replace("print(json", "print('end', json"))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=place, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begun") == 1
    line = done.stdout.splitlines()[-1]
    expected = [True, 8, ["complete"], ["ERM", "Mine (program.py)"], True]
    assert json.loads(line.removeprefix("end ")) == expected


def test_a_value_that_is_not_what_its_cell_says_is_refused(monkeypatch, place):
    main = sys.modules["__main__"]
    cells = ["from hmoe_repro.algorithms.base import ERM", "LIST = [1]", "class M(ERM): got = LIST"]
    scope = {"__name__": "__main__"}
    for cell in cells:
        exec(cell, scope)
    for name in ("LIST", "M"):
        monkeypatch.setattr(main, name, scope[name], raising=False)
    monkeypatch.setattr(main, "_ih", ["", *cells], raising=False)
    assert compare([scope["M"]], tensors(), test_domains=["a"]).table.algorithm[0] == "M (notebook)"
    register("Of a cell", paper="own", needs_domain_labels=False)(scope["M"])
    config = make_config("Of a cell", "DigitDomainsTiny", ["photo"], steps=2)
    assert (config.algorithm, len(config.algorithm_source)) == ("M (notebook)", 12)
    scope["LIST"].append(2)
    with pytest.raises(HmoeError, match=r"LIST.*\[1, 2\].*\[1\]"):
        compare([scope["M"]], tensors())
    monkeypatch.setattr(main, "_ih", ["", *cells[:2], "%%time\nclass M(ERM): got = LIST"])
    with pytest.raises(HmoeError, match="M .*not defined"):
        compare([scope["M"]], tensors())
    with pytest.raises(HmoeError, match="M.*another object"):
        compare([type("M", (ERM,), {"__module__": "__main__"})], tensors())


def test_damaged_kept_data_are_named(place):
    made = compare("ERM", tensors(), test_domains=["a"])
    (path,) = (place / "runs" / "data").glob("*.safetensors")
    fingerprint = made.frame.record[0]["config"]["dataset_fingerprint"]
    assert kept_data(fingerprint).fingerprint == fingerprint
    path.write_bytes(path.read_bytes()[:-5])
    time.sleep(0.01)
    from hmoe_repro.data.registry import _read_kept

    _read_kept.cache_clear()
    with pytest.raises(HmoeError, match="damaged.*delete"):
        kept_data(fingerprint)
    load_model(made.frame.run_id[0])  # which needs no data


def test_a_label_beyond_the_named_classes_is_named():
    x, y = torch.rand(8, 3, 16, 16), torch.arange(8) % 2
    data = {"a": (x, 2 * y), "b": (x / 2, 2 * y)}
    with pytest.raises(HmoeError, match="'a'.*label 2.*Fix: .*classes="):
        as_dataset(data, classes=["u", "v"])
    assert as_dataset(data, classes=range(3)).class_names == ["0", "1", "2"]


def test_predictions_are_kept_if_wanted_and_change_no_run(place):
    plain = compare(["ERM"], tensors(), test_domains=["a"])
    (run_id,) = plain.frame.run_id
    kept = plain.store.path(run_id) / PREDICTIONS_FILE
    assert not kept.exists()
    again = compare(["ERM"], tensors(), test_domains=["a"], save_predictions=True)
    assert kept.exists()
    columns = ["run_id", "accuracy"]
    pd.testing.assert_frame_equal(again.frame[columns], plain.frame[columns])
    images = hmoe_repro.predictions(again)
    of_test = images[images.role == "test"]
    assert of_test.correct.mean() == again.frame.accuracy.item()


@pytest.mark.parametrize("display", [True, False])
def test_progress_is_shown_unless_it_is_not_wanted(place, capsys, display):
    made = compare(["ERM"], tensors(), test_domains=["a"], display=display)
    assert made.frame.status.tolist() == ["complete"]
    printed = "".join(capsys.readouterr())
    assert ("[1/1] ERM" in printed) == display
    assert bool(printed) == display


def test_a_plan_is_silent_about_a_teacher_that_is_loaded_in_the_constructor():
    taught = []

    @register("Taught", paper="none", needs_domain_labels=False)
    class Taught(ERM):
        def __init__(self, input_shape, num_classes, num_domains, hparams=None):
            super().__init__(input_shape, num_classes, num_domains, hparams)
            with torch.device("cpu"):
                state = ERM(input_shape, num_classes, num_domains, hparams).state_dict()
            self.teacher = ERM(input_shape, num_classes, num_domains, hparams)
            self.teacher.load_state_dict(state)
            taught.append(self)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_config("Taught", "DigitDomainsTiny", ["sketch"], network="small_cnn")
    assert taught
