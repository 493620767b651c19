"""Runs on folders of images, from the specification to the record: killed and resumed, with and
without helpers, from files and from the cache."""

import json
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.image_folder import sample_tree
from hmoe_repro.training.model import build_dataset, load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import RunStore, outcome
from hmoe_repro.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("own_names")
SMALL = dict(network="image_cnn", steps=6, checkpoint_frequency=3, resolution=32)
BATCH = {"batch_size": 2, "lr": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "garden & house"
    sample_tree(path, per_class=5, size=48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_CACHE", str(path.parent / "cache"))
        yield path


def short_config(folder, algorithm="ERM", **options):
    return make_config(algorithm, str(folder), ["sketch"], hparams=BATCH | options, **SMALL)


CHILD = """
import json, os, signal, sys
from hmoe_repro.core.config import CONFIG
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import RunStore
from hmoe_repro.training.run import run
def die(step, steps):
    if step >= int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)
CONFIG.restore(sys.argv[4])
run(RunConfig.from_dict(json.loads(sys.argv[1])), RunStore(sys.argv[2]), on_step=die)
"""


def test_a_run_is_known_by_names_and_content_and_holds_no_path(folder):
    made = short_config(folder, "HMOE-DN")
    text = json.dumps(made.to_dict())
    assert made.dataset == "garden & house"
    assert str(folder.parent) not in text
    assert made.resolution == 32
    assert made.hparams["d2v_encoder"] == "small"
    assert made.images == {
        "source": "files",
        "data_augmentation": True,
        "val_augment": True,
        "unreadable": "refuse",
        "interpolation": "bilinear",
    }
    assert (
        short_config(folder, "HMOE-DN", val_augment=False).run_id
        != made.run_id
        == RunConfig.from_dict(json.loads(text)).run_id
    )


def test_data_that_is_tensors_has_no_options_for_images():
    made = make_config("ERM", "DigitDomains", ["photo"], network="small_cnn")
    assert made.images is None
    assert "weights" not in made.hparams


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed_equals_undisturbed(folder, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(CONFIG, "workers", workers)
    made = short_config(folder, "HMOE-DN")
    whole = run(made, RunStore(tmp_path / "whole"))
    assert whole["status"] == "complete", whole["reason"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CHILD,
            json.dumps(made.to_dict()),
            str(tmp_path / "cut"),
            str(random.choice((4, 5))),
            CONFIG.to_json(),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = run(made, RunStore(tmp_path / "cut"))
    assert again["resumed"]
    assert outcome(again) == outcome(whole)


def test_helpers_change_no_number_and_the_cache_none_without_augmentation(
    folder, tmp_path, monkeypatch
):
    records = {}
    for workers in (0, 2):
        monkeypatch.setattr(CONFIG, "workers", workers)
        records[workers] = outcome(run(short_config(folder), RunStore(tmp_path / str(workers))))
    assert records[0] == records[2]
    assert records[0]["status"] == "complete"
    from_files, from_cache = (
        run(short_config(folder, data_augmentation=False, source=s), RunStore(tmp_path / s))
        for s in ("files", "cache")
    )
    assert from_files["run_id"] != from_cache["run_id"]
    assert from_files["checkpoints"] == from_cache["checkpoints"]
    assert records[0]["checkpoints"] != from_files["checkpoints"]


def test_validation_images_are_augmented_only_if_asked_and_the_same_at_every_visit(folder):
    seen = {}
    for asked in (True, False):
        made = short_config(folder, val_augment=asked)
        trainer = Trainer(made, build_dataset(made), "cpu")
        seeds = trainer.evaluation.validation_seeds("photo", 2)
        assert (seeds is not None) == asked
        if asked:
            assert torch.equal(seeds, trainer.evaluation.validation_seeds("photo", 2))
            assert not torch.equal(seeds, trainer.evaluation.validation_seeds("cartoon", 2))
        seen[asked] = trainer.data.inputs(
            trainer.data.domain_index("photo"), trainer.splits["photo"]["out"], seeds=seeds
        )
    assert not torch.equal(seen[True], seen[False])


def test_labels_stay_when_a_class_is_missing_in_a_domain(folder, tmp_path):
    copy = tmp_path / "lacking"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "cartoon" / "flower")
    made = short_config(copy)
    data = build_dataset(made)
    assert data.class_names == ["flower", "temple"]
    assert set(data.labels[data.domain_index("cartoon")].tolist()) == {1}
    assert run(made, RunStore(tmp_path / "runs"))["status"] == "complete"


def test_a_damaged_image_is_refused_by_name_or_left_out(folder, tmp_path):
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    victim = next((copy / "photo" / "temple").iterdir())
    victim.write_bytes(victim.read_bytes()[:400])
    with pytest.raises(HmoeError, match=victim.name):
        short_config(copy)
    made = short_config(copy, unreadable="skip")
    assert made.dataset_fingerprint != short_config(folder).dataset_fingerprint
    assert run(made, RunStore(tmp_path / "runs"))["status"] == "complete"


def test_one_domain_and_other_wishes_that_cannot_be_met(folder, tmp_path):
    alone = tmp_path / "alone"
    shutil.copytree(folder / "photo", alone / "photo")
    with pytest.raises(HmoeError, match="leave a training domain"):
        make_config("ERM", str(alone), ["photo"], hparams=BATCH, **SMALL)
    with pytest.raises(
        HmoeError, match="none are named. Fix: choose weights random, IMAGENET1K_V1"
    ):
        make_config("ERM", str(folder), ["photo"], resolution=32)
    with pytest.raises(HmoeError, match="images of 16 pixels"):
        make_config("ERM", "DigitDomains", ["photo"], resolution=32)
    with pytest.raises(HmoeError, match="no option source"):
        make_config("ERM", "DigitDomains", ["photo"], hparams={"source": "cache"})
    with pytest.raises(HmoeError, match="exists only if network"):
        make_config("ERM", str(folder), ["photo"], hparams={"freeze_bn": "yes"}, **SMALL)
    with pytest.raises(HmoeError, match="unknown data set .nor is it the path of a folder."):
        make_config("ERM", str(tmp_path / "nowhere"), ["photo"])


@pytest.mark.slow
def test_a_large_network_with_kept_weights_runs_and_comes_back(folder, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    from hmoe_repro.networks.backbones import make_backbone

    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    torch.manual_seed(1)
    save_file(
        {
            name: t.contiguous()
            for name, t in make_backbone("resnet18", (3, 32, 32)).body.state_dict().items()
        },
        tmp_path / "mine.safetensors",
    )
    made = make_config(
        "ERM",
        str(folder),
        ["sketch"],
        hparams=BATCH | {"weights": str(tmp_path / "mine.safetensors"), "batch_size": 2},
        network="resnet18",
        steps=2,
        resolution=32,
    )
    assert made.weights.startswith("file-")
    assert str(tmp_path) not in json.dumps(made.to_dict())
    (tmp_path / "mine.safetensors").unlink()
    record = run(made)
    assert record["status"] == "complete", record["reason"]
    algorithm, _ = load_model(made.run_id)
    with torch.no_grad():
        assert algorithm.predict(torch.rand(1, 3, 32, 32)).shape == (1, 2)


def test_panels_hold_small_pictures(folder, tmp_path):
    from safetensors.numpy import load_file

    made = make_config(
        "HMOE-DN",
        str(folder),
        ["sketch"],
        hparams=BATCH | {"d2v_encoder": "small", "source": "cache"},
        network="image_cnn",
        steps=1,
        resolution=96,
    )
    assert run(made, RunStore(tmp_path))["status"] == "complete"
    arrays = load_file(tmp_path / made.run_id / "arrays.safetensors")
    assert arrays["panel_images"].shape[1:] == (3, 64, 64)
    assert arrays["panel_images"].dtype == np.uint8
    assert arrays["panel_images"].std() > 20


def test_searched_hyper_parameters_are_those_of_domainbed(folder):
    from hmoe_repro.core.seeds import seed_hash

    made = make_config(
        "ERM",
        str(folder),
        ["sketch"],
        trial_seed=1,
        hparams_seed=2,
        network="image_cnn",
        resolution=64,
    )
    drawn = lambda name: np.random.RandomState(seed_hash(seed_hash(2, 1), name))
    assert made.hparams["lr"] == 10 ** drawn("lr").uniform(-5, -3.5)
    assert made.hparams["batch_size"] == int(2 ** drawn("batch_size").uniform(3, 5.5))
    assert "resnet_dropout" not in made.hparams
    assert made.hparams_seed == 2
    assert (
        make_config(
            "ERM",
            str(folder),
            ["sketch"],
            trial_seed=1,
            hparams_seed=2,
            hparams={"lr": 0.5},
            network="image_cnn",
            resolution=64,
        ).hparams["lr"]
        == 0.5
    )


@pytest.mark.slow
def test_an_algorithm_from_a_file_trains_in_another_process(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "mine.py").write_text(
        "from hmoe_repro.algorithms.base import ERM\nclass Mine(ERM): pass\n"
    )
    made = make_config(
        f"{tmp_path / 'mine.py'}:Mine",
        "DigitDomainsTiny",
        ["photo"],
        hparams=BATCH,
        network="small_cnn",
        steps=2,
    )
    (tmp_path / "mine.py").write_text("raise SystemExit\n")
    child = """
import json, sys
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.run import run
record = run(RunConfig.from_dict(json.loads(sys.argv[1])), trust_code=len(sys.argv) > 2)
print(record["status"], record["reason"])
"""
    words = [sys.executable, "-c", child, json.dumps(made.to_dict())]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "failed" in done.stdout, done.stderr + done.stdout
    assert "--trust-code" in done.stdout, done.stderr + done.stdout
    done = subprocess.run([*words, "trusted"], capture_output=True, text=True)
    assert done.stdout.strip() == "complete None", done.stderr + done.stdout
