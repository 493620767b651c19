"""A run: killed and resumed, failing, selected, reloaded."""
import dataclasses
import json
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from hmoe_repro.core import HmoeError
from hmoe_repro.protocol import evaluate, make_splits
from hmoe_repro.records import RunSpec, RunStore, load_state, make_spec, make_toy_spec, outcome
from hmoe_repro.selection import training_domain_validation, validation_accuracy
from hmoe_repro.train import build_dataset, load_model, run

SHORT = dict(network="small_cnn", steps=23, checkpoint_frequency=6)


def short(algorithm="HMOE-DN", **more):
    return make_spec(algorithm, "DigitDomainsTiny", ["photo"], hparams={"batch_size": 8} | more.pop("hparams", {}), **(SHORT | more))


CHILD = """
import json, os, signal, sys
from hmoe_repro.records import RunSpec, RunStore
from hmoe_repro.train import run
def die(step, steps):
    if step >= int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)
run(RunSpec.from_dict(json.loads(sys.argv[1])), RunStore(sys.argv[2]), on_step=die)
"""


def killed(spec, folder, step):
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(spec.to_dict()), str(folder), str(step)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("spec", [short("ERM"), short("HMOE-DN"), short("HMOE-DL", sampler="pooled"), make_toy_spec(80, seeds=2)], ids=["ERM", "HMOE-DN", "HMOE-DL pooled", "toy"])
def test_killed_twice_and_resumed_equals_undisturbed(tmp_path, spec):
    whole = run(spec, RunStore(tmp_path / "whole"))
    assert whole["status"] == "complete" and not whole["resumed"]
    cuts = sorted(random.sample(range(2, spec.steps - 1), 2))
    for step in cuts: killed(spec, tmp_path / "cut", step)
    store = RunStore(tmp_path / "cut")
    assert store.read(spec.run_id) is None
    again = run(spec, store)
    assert again["resumed"], cuts
    assert outcome(again) == outcome(whole), cuts
    from safetensors.numpy import load_file
    for name, array in (load_file(tmp_path / "whole" / spec.run_id / "arrays.safetensors") if spec.algorithm != "ERM" else {}).items():
        np.testing.assert_array_equal(array, load_file(tmp_path / "cut" / spec.run_id / "arrays.safetensors")[name], err_msg=name)


def test_resuming_uses_the_saved_state_and_not_a_new_start(tmp_path):
    """Spoil the saved weights: the resumed run must then differ."""
    from hmoe_repro.records import save_state
    spec, store = short("ERM"), RunStore(tmp_path)
    killed(spec, tmp_path, 15)
    path = store.path(spec.run_id) / "state.safetensors"
    state = load_state(path)
    assert state["trainer"]["step"] == 13
    state["trainer"]["algorithm"]["model"]["classifier.bias"] += 1
    save_state(path, state)
    assert outcome(run(spec, store)) != outcome(run(spec, RunStore(tmp_path / "whole")))


def test_a_state_of_another_library_is_not_continued(tmp_path):
    from hmoe_repro.records import save_state
    spec, store = short("ERM"), RunStore(tmp_path)
    killed(spec, tmp_path, 15)
    path = store.path(spec.run_id) / "state.safetensors"
    save_state(path, load_state(path) | {"library": "another"})
    again = run(spec, store)
    assert not again["resumed"] and outcome(again) == outcome(run(spec, RunStore(tmp_path / "whole")))


def test_a_file_where_the_run_belongs_is_named(tmp_path):
    spec, store = short("ERM"), RunStore(tmp_path)
    store.path(spec.run_id).write_text("in the way")
    with pytest.raises(HmoeError, match="cannot write in"): run(spec, store)


def test_evaluating_everything_selects_the_same(tmp_path):
    """The cheap policy leaves out only what cannot be selected."""
    records = [run(short("HMOE-ND", evaluate=policy), RunStore(tmp_path)) for policy in ("selection", "all")]
    assert records[0]["selected"] == records[1]["selected"] and records[0]["discovery"] == records[1]["discovery"]
    strip = lambda r: [c["losses"] for c in r["checkpoints"]]
    assert strip(records[0]) == strip(records[1])
    assert set(records[1]["checkpoints"][1]["accuracies"]["photo"]) == {"in", "out"}


def test_selection_by_hand(tmp_path):
    record = run(short("HMOE-DN"), RunStore(tmp_path))
    for mode, chosen in record["selected"].items():
        means = [np.mean([c["accuracies"][d]["out"][mode] for d in ("negative", "plain", "sketch")]) for c in record["checkpoints"]]
        best = int(np.argmax(np.round(means, 12)))
        assert chosen["step"] == record["checkpoints"][best]["step"] and abs(chosen["validation_accuracy"] - means[best]) < 1e-12
        assert chosen["test_accuracy"] == record["checkpoints"][best]["accuracies"]["photo"]["in"][mode]
    assert record["test_size"] == 48 and len(record["checkpoints"]) == 5


def test_loaded_model_gives_the_number_of_the_record(tmp_path):
    store, spec = RunStore(tmp_path), short("HMOE-DN")
    record = run(spec, store)
    data = build_dataset(spec)
    for mode in ("mix", "max", "ood"):
        algorithm, _ = load_model(record["run_id"], mode, store)
        assert evaluate(algorithm, data, "photo", make_splits(data, 0)["photo"]["in"])[mode] == record["selected"][mode]["test_accuracy"]
    with pytest.raises(HmoeError, match="mix, max, ood"): load_model(record["run_id"], "best", store)
    (store.path(record["run_id"]) / "selected-max.safetensors").unlink()
    with pytest.raises(HmoeError, match="train the run again"): load_model(record["run_id"], "max", store)


def test_nan_is_a_failed_record_with_its_checkpoints_and_can_be_tried_again(tmp_path):
    spec, store = short("ERM", hparams={"lr": 1e9}), RunStore(tmp_path)
    record = run(spec, store)
    assert record["status"] == "failed" and "loss became" in record["reason"] and "smaller lr" in record["reason"]
    assert store.read(spec.run_id) == record and (store.path(spec.run_id) / "error.txt").exists() and record["checkpoints"]
    assert run(spec, store)["reason"] == record["reason"]


def test_damaged_state_fails_with_the_file_named(tmp_path):
    spec, store = short("ERM"), RunStore(tmp_path)
    killed(spec, tmp_path, 15)
    path = store.path(spec.run_id) / "state.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    assert "state.safetensors is not a saved state" in run(spec, store)["reason"]


def test_other_data_under_the_same_name_is_refused(tmp_path):
    spec = dataclasses.replace(short("ERM"), dataset_fingerprint="0" * 12)
    assert "the images differ" in run(spec, RunStore(tmp_path))["reason"]


def test_threads_are_put_back_and_a_second_owner_is_told(tmp_path):
    from hmoe_repro.records import run_lock
    spec, store = short("ERM"), RunStore(tmp_path)
    before = torch.get_num_threads()
    store.path(spec.run_id).mkdir()
    with run_lock(store.path(spec.run_id)): assert run(spec, store) is None
    record = run(spec, store)
    assert record["environment"]["threads"] == 1 and torch.get_num_threads() == before


def test_rule_ties_and_missing_tests():
    point = lambda step, val, test: {"step": step, "accuracies": {"a": {"out": {"m": val}}, "t": {"in": {"m": test}} if test is not None else {}}}
    points = [point(0, 0.5, 0.1), point(5, 0.7, 0.2), point(10, 0.7, 0.9)]
    assert training_domain_validation(points, ["t"], ["m"])["m"] == {"step": 5, "validation_accuracy": 0.7, "test_accuracy": 0.2}
    assert validation_accuracy({"a": {"out": {"m": 1.0}}, "b": {"out": {"m": 0.0}}, "t": {"out": {"m": 1.0}}}, ["t"], "m") == 0.5
    with pytest.raises(HmoeError, match="not evaluated"): training_domain_validation([point(0, 0.5, None)], ["t"], ["m"])
    with pytest.raises(HmoeError, match="no checkpoint"): training_domain_validation([], ["t"], ["m"])
