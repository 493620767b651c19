"""Classes of a DomainBed checkout, here a stand-in with its interface and its habits, as ours."""

import re
import shutil
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import hmoe, hmoe_process

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import random_batches
from hmoe_repro.algorithms.domainbed_adapter import _import_checkout, _Loader
from hmoe_repro.algorithms.hparams import draw_hparams
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything, seed_hash
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome
from hmoe_repro.training.trainer import Trainer

SMALL = {"network": "small_cnn", "steps": 13, "checkpoint_frequency": 4}
SHAPE = (3, 16, 16), 10, 3


@pytest.fixture
def checkout(root, tmp_path, monkeypatch, own_names):
    "A copy of the stand-in, as a process finds it that has imported none before."
    folder = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "tests" / "domainbed_checkout", folder, ignore=ignore)
    monkeypatch.setenv("HMOE_DOMAINBED", str(folder))
    forget()
    yield folder
    forget()


def forget():
    _import_checkout.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "domainbed"]:
        del sys.modules[name]


def short_config(name, **more):
    options = {"hparams": {"batch_size": 8}} | SMALL | more
    full = name if ":" in name else f"domainbed:{name}"
    return make_config(full, "DigitDomainsTiny", ["sketch"], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ERM", "Adversarial", "Cloning", "Hoarder", "Probes", "Schedules"]
)
def test_a_stopped_run_resumes_bitwise(checkout, tmp_path, name):
    "Stopped in the middle of an update between two checkpoints, and before and after a new Adam."
    config, whole, parts = short_config(name), RunStore(tmp_path / "a"), RunStore(tmp_path / "b")
    record = run(config, whole)
    assert record["status"] == "complete", record["reason"]
    for stop_at in (3, 11):

        def stop(step, steps, at=stop_at):
            if step == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(config, parts, on_step=stop)
    resumed = run(config, parts)
    assert resumed["resumed"]
    assert outcome(resumed) == outcome(record)
    kept = [load_model(config.run_id, store=store)[0].state_dict() for store in (whole, parts)]
    assert all(torch.equal(kept[0][key], kept[1][key]) for key in kept[0])


def test_a_run_that_cannot_resume_says_so(checkout, tmp_path):
    "The optimiser of the stored weights is another than the one of a new object."

    def stop(step, steps):
        if step == 11:
            raise KeyboardInterrupt

    store = RunStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(short_config("Regroups"), store, on_step=stop)
    record = run(short_config("Regroups"), store)
    assert record["status"] == "failed"
    assert re.search("cannot be resumed: a later optimiser has other weights", record["reason"])


def test_its_erm_is_our_erm(checkout):
    "The same featurizer, data and steps: the same weights up to rounding."
    both = []
    for cls in (ERM, get_algorithm("domainbed:ERM")):
        seed_everything(0)
        algorithm = cls(*SHAPE, {"network": "small_cnn"})
        losses = [algorithm.update(random_batches(3, SHAPE[0], 10, s))["loss"] for s in range(4)]
        both.append((losses, algorithm.predict(torch.ones(2, *SHAPE[0])).detach()))
    assert both[0][0] == pytest.approx(both[1][0], abs=1e-5)
    torch.testing.assert_close(both[0][1], both[1][1], atol=1e-4, rtol=0)


def test_hyper_parameters_are_those_of_its_registry(checkout):
    cls = get_algorithm("domainbed:Adversarial")
    config = short_config("Adversarial", hparams={"lambda": 2, "every": 3, "batch_size": 8})
    assert config.hparams == {
        "batch_size": 8, "every": 3, "lambda": 2.0, "lr": 1e-3, "nonlinear_classifier": False,
        "weight_decay": 0.0,
    }  # fmt: skip
    from domainbed.hparams_registry import random_hparams

    for dataset, resolution in (("RotatedMNIST", 28), ("PACS", 224), ("DomainNet", 224)):
        theirs = random_hparams("Adversarial", dataset, seed_hash(7, 2))
        drawn = draw_hparams(cls.HPARAMS, 7, 2, resolution, dataset)
        assert drawn == {name: theirs[name] for name in drawn}
        assert len(drawn) == 6
        assert not any(isinstance(value, np.generic) for value in drawn.values())
    for wrong in ("class_balanced", "lamda"):
        with pytest.raises(HmoeError, match=f"unknown hyper-parameter '{wrong}'"):
            short_config("Adversarial", hparams={wrong: False})


@pytest.mark.parametrize(
    "name, said",
    [
        ("NeedsCuda", "in line .* of algorithms.py .*cuda.*Fix: use --device cuda"),
        ("NeedsPackage", "Install it with: pip.*Fix: install the package"),
        ("SWAD-domainbed:ERM", "unknown algorithm"),  # its optimisers are its own
        ("URM", "URM accepts only DomainBed's featurizers.*Fix: use --algorithm URM"),
        ("Absent", "unknown algorithm of DomainBed 'Absent'. Valid: ERM, Adversarial"),
    ],
)
def test_what_cannot_run_says_why_before_it_is_trained(checkout, name, said):
    if name == "NeedsCuda" and torch.cuda.is_available():
        pytest.skip("CUDA is there")
    with pytest.raises(HmoeError, match=said):
        short_config(name)


@pytest.mark.parametrize(
    "name, said",
    [
        ("Iterates", "keeps a count, which a checkpoint cannot hold"),
        (
            "Fussy",
            r"in line \d+ of algorithms.py \(`assert type.*`\): AssertionError\. Fix: correct that",
        ),
        ("Wrong", "KeyError: 'no_such_setting'.*Fix: correct that line of your checkout"),
    ],
)
def test_what_fails_in_training_names_its_cause(checkout, tmp_path, name, said):
    record = run(short_config(name), RunStore(tmp_path))
    assert record["status"] == "failed"
    assert re.search(said, record["reason"]), record["reason"]


def test_set_lr_is_called_at_checkpoints_and_may_end_training(checkout):
    "As DomainBed's train_autolr.py: before accuracies, with loaders of the validation images."
    data, config = (
        load_dataset("DigitDomainsTiny"),
        short_config("Schedules", evaluate="selection:70"),
    )
    trainer = Trainer(config.replace(evaluate="all"), data, "cpu")
    algorithm, inner = trainer.algorithm, trainer.algorithm.inner
    batches = [list(trainer.evaluation.validation_batches(d)) for d in trainer.domains]
    weights, rates = [], []
    for t in range(6):
        trainer.update()
        with torch.no_grad():
            each = [[F.cross_entropy(algorithm.predict(x), y) for x, y in part] for part in batches]
        expected = sum(sum(part).item() / len(part) for part in each) / len(each)
        trainer.evaluate()
        if t < 4:
            assert inner.val_losses[t] == pytest.approx(expected, rel=1e-5)
            rates.append(inner.optimizer.param_groups[0]["lr"])
        weights.append(inner.classifier.weight.detach().clone())
    assert rates == pytest.approx([1e-3, 1e-4, 1e-5, 1e-6])
    assert len(inner.val_losses) == 4
    assert algorithm.ended
    assert algorithm.update_count == 6
    still = [torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    assert still == [False, False, False, True, True]


def test_a_loader_knows_its_length_before_and_after():
    "It reads ahead only if it is asked before."
    seen, loader = [], _Loader(iter("abc"))
    seen.extend(loader)
    assert seen == [*"abc"]
    assert len(loader) == 3
    loader = _Loader(iter("abc"))
    assert len(loader) == 3
    assert list(loader) == [*"abc"]


def test_a_checkout_that_never_ends_is_stopped(checkout, monkeypatch):
    monkeypatch.setenv("HMOE_FILE_SECONDS", "1")
    with open(checkout / "domainbed/networks.py", "a") as file:
        file.write("\nwhile True:\n    pass\n")
    with pytest.raises(HmoeError, match="cannot be imported.*the limit HMOE_FILE_SECONDS"):
        short_config("ERM")


def test_the_code_is_part_of_a_runs_identity(checkout, tmp_path, monkeypatch):
    first, store = short_config("ERM"), RunStore(tmp_path / "runs")
    assert first.algorithm == "domainbed:ERM"
    assert len(first.algorithm_source) == 12
    with open(checkout / "domainbed/lib/misc.py", "a") as file:
        file.write("\n# changed\n")
    (checkout / "domainbed/datasets.py").write_text("# not used")
    forget()
    from hmoe_repro.algorithms.base import ALGORITHMS

    del ALGORITHMS["domainbed:ERM"]
    second = short_config("ERM")
    assert second.replace(algorithm_source=first.algorithm_source) == first
    assert second.run_id != first.run_id
    assert "another source (hash" in run(first, store)["reason"]
    (checkout / "domainbed/datasets.py").write_text("# still not used")
    forget()
    del ALGORITHMS["domainbed:ERM"]
    assert short_config("ERM") == second
    monkeypatch.setenv("HMOE_DOMAINBED", str(tmp_path))
    del ALGORITHMS["domainbed:ERM"]
    with pytest.raises(HmoeError, match="has no domainbed/algorithms.py"):
        short_config("ERM")
    monkeypatch.delenv("HMOE_DOMAINBED")
    with pytest.raises(HmoeError, match="--domainbed PATH"):
        short_config("ERM")


def test_the_commands_take_a_checkout(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_DOMAINBED", "")
    tiny = ["--dataset", "DigitDomainsTiny", "--test-domain", "photo", "--network", "small_cnn"]
    tiny += ["--steps", 2, "--set", "batch_size=4", "--set", "every=3", "--device", "cpu"]
    call = ["train", "--algorithm", "domainbed:Adversarial", *tiny]
    said = hmoe(*call, folder=tmp_path)
    assert said.returncode == 1
    assert "--domainbed PATH" in said.stderr
    said = hmoe(*call, "--domainbed", checkout, folder=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "domainbed:Adversarial" in said.stdout, said.stderr


@pytest.mark.slow
def test_workers_of_a_sweep_import_the_checkout(checkout, tmp_path):
    names = ["--algorithm", "domainbed:Adversarial", "--algorithm", "ERM", "--jobs", "2"]
    call = ["sweep", "digits_table", "--profile", "smoke", *names, "--domainbed", checkout]
    said = hmoe_process(*call, "--device", "cpu", folder=tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr
    assert " 0 failed" in said.stdout, said.stdout + said.stderr


# What decides its numbers besides the code of the package


def again():
    "As in a new process."
    from hmoe_repro.algorithms.base import ALGORITHMS

    forget()
    for name in [name for name in ALGORITHMS if name.startswith("domainbed:")]:
        del ALGORITHMS[name]


def test_modules_that_the_checkout_imports_are_part_of_the_hash(checkout):
    algorithms = checkout / "domainbed" / "algorithms.py"
    text = algorithms.read_text()
    imports = "import beside_the_package\nfrom domainbed import datasets\n"
    algorithms.write_text(text + imports)
    keys = []
    for beside, inside in ((1, 1), (2, 1), (2, 2)):
        (checkout / "beside_the_package.py").write_text(f"x = {beside}")
        (checkout / "domainbed" / "datasets.py").write_text(f"y = {inside}")
        again()
        sys.modules.pop("beside_the_package", None)
        keys.append(short_config("ERM").algorithm_source)
    del sys.modules["beside_the_package"]
    assert len({*keys}) == 3


def test_a_file_that_a_class_of_the_checkout_reads_is_declared_or_refused(checkout, tmp_path):
    algorithms, table = checkout / "domainbed" / "algorithms.py", checkout / "table.txt"
    reads = "\n\nclass Reads(ERM):\n    def update(self, minibatches, unlabeled=None):\n"
    reads += "        self.read = float(open(PATH).read())\n"
    reads += "        return super().update(minibatches, unlabeled)\n"
    text = algorithms.read_text() + reads
    algorithms.write_text(text.replace("PATH", repr(str(table))))
    table.write_text("1")
    again()
    record = run(short_config("Reads"), RunStore(tmp_path / "a"))
    assert 'files = {"table": "table.txt"} to the class' in record["reason"]
    declared = "class Reads(ERM):\n    files = {'table': 'table.txt'}"
    text = text.replace("class Reads(ERM):", declared).replace("PATH", "self.files['table']")
    algorithms.write_text(text)
    again()
    first = short_config("Reads")
    assert run(first, RunStore(tmp_path / "a"))["status"] == "complete"
    table.write_text("2")
    again()
    assert short_config("Reads").run_id != first.run_id
    table.unlink()
    again()
    with pytest.raises(HmoeError, match="declares 'table', and .*table.txt is not a file"):
        short_config("Reads")
