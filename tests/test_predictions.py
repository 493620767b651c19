"""Predictions of a run: equal to its record, complete, sealed, bounded, and resumed."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hmoe_repro.core.config import CONFIG, Config
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import MultiDomainDataset
from hmoe_repro.training import predictions as module
from hmoe_repro.training.model import build_dataset, load_model, selected_path
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.predictions import PREDICTIONS_FILE, ensure_predictions, read_predictions
from hmoe_repro.training.protocols import EVALUATION_BATCH
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, check_files, outcome

SHORT = dict(network="small_cnn", steps=31, checkpoint_frequency=10)


def configured(algorithm="ERM", **more):
    "A short run on the tiny digits."
    options = SHORT | {"hparams": {"batch_size": 8}} | more
    return make_config(algorithm, "DigitDomainsTiny", ["sketch"], **options)


@pytest.fixture(scope="module")
def hmoe_run(tmp_path_factory):
    "A run with three inference modes and predictions: (record, its folder)."
    store = RunStore(tmp_path_factory.mktemp("runs"))
    record = run(configured("HMOE-DN"), store, save_predictions=True)
    return record, store.path(record["run_id"])


def test_accuracies_are_those_of_the_record_in_every_mode(hmoe_run):
    record, folder = hmoe_run
    stored = read_predictions(folder, record)
    assert stored.modes == list(record["selected"])
    assert len(stored.modes) == 3
    for mode, selected in record["selected"].items():
        hits = stored.logits_of(mode).argmax(1) == stored.label
        of_test = torch.tensor([role == "test" for role in stored.role])
        assert int(of_test.sum()) == record["test_size"]
        assert float(hits[of_test].double().mean()) == selected["test_accuracy"]
        point = next(p for p in record["checkpoints"] if p["step"] == stored.steps[mode])
        for domain, splits in point["accuracies"].items():
            if "out" in splits and domain != "sketch":
                index = stored.domain_names.index(domain)
                rows = [
                    i
                    for i, role in enumerate(stored.role)
                    if role == "validation" and stored.domain[i] == index
                ]
                assert float(hits[rows].double().mean()) == splits["out"][mode]


def test_every_image_is_predicted_once_with_its_label(hmoe_run):
    record, folder = hmoe_run
    stored = read_predictions(folder, record)
    data = build_dataset(configured("HMOE-DN"))
    assert len(set(stored.ids)) == len(stored) == sum(len(y) for y in data.labels)
    for name, label, domain, index in zip(
        stored.ids, stored.label, stored.domain, stored.index, strict=True
    ):
        assert name == f"{data.domain_names[domain]}/{index}"
        assert label == data.labels[domain][index]


def test_logits_are_those_of_the_loaded_model(hmoe_run):
    record, folder = hmoe_run
    stored = read_predictions(folder, record)
    data = build_dataset(configured("HMOE-DN"))
    algorithm, _ = load_model(record["run_id"], "max", RunStore(folder.parent))
    rows = [i for i, role in enumerate(stored.role) if role == "test"]
    position = data.domain_index("sketch")
    with torch.no_grad():
        x = data.inputs(position, stored.index[rows])
        expected = algorithm.predict_modes(x)["max"]
    assert torch.allclose(stored.logits_of("max")[rows], expected, atol=1e-5)


def test_the_frame_has_probabilities_and_losses_by_hand(hmoe_run):
    record, folder = hmoe_run
    stored = read_predictions(folder, record)
    frame = stored.frame("ood", logits=True)
    logits = stored.logits_of("ood").double().numpy()
    for row in (0, 17, len(frame) - 1):
        weights = np.exp(logits[row] - logits[row].max())
        probability = weights / weights.sum()
        best = int(probability.argmax())
        line = frame.iloc[row]
        assert line.predicted == stored.class_names[best]
        assert line.probability == pytest.approx(probability[best], abs=1e-12)
        assert line.loss == pytest.approx(-np.log(probability[stored.label[row]]), abs=1e-9)
        assert line["logit 3"] == logits[row, 3]
    with pytest.raises(HmoeError) as caught:
        stored.frame("mxi")
    assert "mix" in str(caught.value)


def test_predictions_change_neither_the_run_nor_its_id(hmoe_run, tmp_path):
    record, _ = hmoe_run
    store = RunStore(tmp_path)
    without = run(configured("HMOE-DN"), store)
    assert "predictions" not in without
    folder = store.path(without["run_id"])
    assert not (folder / PREDICTIONS_FILE).exists()
    assert without["run_id"] == record["run_id"]
    with_predictions = {name: v for name, v in record.items() if name != "predictions"}
    assert outcome(without) == outcome(with_predictions)
    before = (folder / "record.json").read_bytes()
    computed = ensure_predictions(without, folder)
    asked_again = run(configured("HMOE-DN"), store, save_predictions=True)
    assert asked_again == without
    assert (folder / "record.json").read_bytes() == before
    _, other = hmoe_run
    stored = read_predictions(other, record)
    for mode in stored.modes:
        assert torch.equal(stored.logits[mode], computed.logits[mode])
    assert (folder / PREDICTIONS_FILE).read_bytes() == (other / PREDICTIONS_FILE).read_bytes()


def test_modes_of_a_known_domain_apply_to_training_domains(tmp_path):
    config = configured("DMG", protocol="dmg", steps=6, checkpoint_frequency=3)
    store = RunStore(tmp_path)
    record = run(config, store, save_predictions=True)
    assert record["status"] == "complete", record["reason"]
    stored = read_predictions(store.path(record["run_id"]), record)
    for mode, entry in record["in_domain"].items():
        logits = stored.logits_of(mode)
        rows = torch.tensor([role == "test in domain" for role in stored.role])
        hits = (logits.argmax(1) == stored.label)[rows]
        assert float(hits.double().mean()) == pytest.approx(entry["accuracy"], abs=1e-12)
        of_target = torch.tensor([role == "test" for role in stored.role])
        assert bool(logits[of_target].isnan().all()) == (mode not in record["selected"])
        frame = stored.frame(mode)
        assert not frame.probability.isna().any()
        assert (set(frame.role) >= {"test"}) == (mode in record["selected"])


def test_damaged_exchanged_and_missing_files_are_refused(hmoe_run, tmp_path):
    record, folder = hmoe_run
    copy = tmp_path / record["run_id"]
    copy.mkdir()
    with pytest.raises(HmoeError, match="save-predictions"):
        read_predictions(copy)
    content = bytearray((folder / PREDICTIONS_FILE).read_bytes())
    content[-5] ^= 1
    (copy / PREDICTIONS_FILE).write_bytes(content)
    with pytest.raises(HmoeError, match="SHA-256"):
        read_predictions(copy)
    with pytest.raises(HmoeError, match=PREDICTIONS_FILE):
        check_files(copy, "run")
    (copy / PREDICTIONS_FILE).write_bytes((folder / PREDICTIONS_FILE).read_bytes())
    read_predictions(copy, record)
    with pytest.raises(HmoeError, match="SHA-256 is in the record"):
        read_predictions(copy, record | {"predictions": {"sha256": "0" * 64}})
    other = tmp_path / "0123456789ab"
    other.mkdir()
    (other / PREDICTIONS_FILE).write_bytes((folder / PREDICTIONS_FILE).read_bytes())
    with pytest.raises(HmoeError, match=record["run_id"]):
        read_predictions(other)


def test_parts_beyond_the_limit_are_left_out_by_name(hmoe_run, tmp_path, monkeypatch):
    record, _ = hmoe_run
    store = RunStore(tmp_path)
    config = configured()
    data = build_dataset(config)
    of_test = 4 * data.num_classes * len(data.labels[data.domain_index("sketch")])
    monkeypatch.setattr(module, "MAX_LOGIT_BYTES", of_test)
    with pytest.warns(UserWarning, match="train"):
        record = run(config, store, save_predictions=True)
    stored = read_predictions(store.path(record["run_id"]), record)
    assert stored.role.count("test") == record["test_size"]
    assert "train" not in stored.role
    assert record["predictions"]["left_out"] == stored.left_out != []
    predicted = {(stored.domain_names[d], r) for d, r in zip(stored.domain, stored.role)}
    named = {f"{domain} ({role})" for domain, role in predicted}
    assert not named & set(stored.left_out)


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_predictions(tmp_path):
    config = configured()
    undisturbed = RunStore(tmp_path / "undisturbed")
    run(config, undisturbed, save_predictions=True)
    child = """
import json, os, signal, sys
from hmoe_repro.training.run import run
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import RunStore
def die(step, steps):
    if step == 27: os.kill(os.getpid(), signal.SIGKILL)
config = RunConfig.from_dict(json.loads(sys.argv[1]))
run(config, RunStore(sys.argv[2]), on_step=die, save_predictions=True)
"""
    killed = tmp_path / "killed"
    arguments = [sys.executable, "-c", child, json.dumps(config.to_dict()), str(killed)]
    code = subprocess.run(arguments, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    assert code == -signal.SIGKILL
    store = RunStore(killed)
    folder = store.path(config.run_id)
    assert not (folder / PREDICTIONS_FILE).exists()
    record = run(config, store, save_predictions=True)
    assert record["resumed"]
    again = (folder / PREDICTIONS_FILE).read_bytes()
    assert again == (undisturbed.path(config.run_id) / PREDICTIONS_FILE).read_bytes()


def test_the_setting_reaches_worker_processes():
    passed_on = Config()
    passed_on.restore(Config(save_predictions=True).to_json())
    assert passed_on.save_predictions
    assert not CONFIG.save_predictions


def test_ten_thousand_images_are_predicted_in_batches(tmp_path, monkeypatch):
    """At most one batch of images is decoded at a time, and the file has little but the logits."""
    amount, num_classes = 5_000, 20
    labels = torch.arange(amount) % num_classes
    pictures = [torch.zeros(amount, 3, 8, 8, dtype=torch.uint8) for _ in "ab"]
    classes = [f"class {i}" for i in range(num_classes)]
    data = MultiDomainDataset("Many", ["a", "b"], classes, pictures, [labels, labels])
    sizes = []

    def inputs(position, indices, device):
        sizes.append(len(indices))
        return torch.nn.functional.one_hot(data.labels[position][indices], num_classes).float()

    monkeypatch.setattr(data, "inputs", inputs)
    monkeypatch.setattr(module, "load_weights", lambda path, algorithm: None)
    everything = torch.arange(amount)
    config = SimpleNamespace(run_id="0123456789ab", test_domains=("b",))
    splits = {"a": {"in": everything[1000:], "out": everything[:1000]}, "b": {"in": everything}}
    evaluation = SimpleNamespace(
        config=config, data=data, splits=splits, domains=["a"], device=torch.device("cpu")
    )
    algorithm = torch.nn.Module()
    algorithm.predict_modes = lambda x: {"default": 5 * x}
    folder = tmp_path / config.run_id
    folder.mkdir()
    selected_path(folder, "default").touch()
    predictions = module.collect_predictions(evaluation, algorithm, folder, {"default": 3})
    assert len(predictions) == 2 * amount == sum(sizes)
    assert max(sizes) == EVALUATION_BATCH
    entry = module.write_predictions(folder, predictions)
    stored = read_predictions(folder, {"predictions": entry})
    assert bool((stored.logits_of().argmax(1) == stored.label).all())
    assert stored.role.count("validation") == 1000
    logits = 4 * num_classes * 2 * amount
    names = sum(len(text) + 8 for text in (*stored.ids, *stored.role))
    assert (folder / PREDICTIONS_FILE).stat().st_size < logits + 3 * 8 * 2 * amount + names
