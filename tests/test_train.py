"""A run: killed and resumed, failing, selected, reloaded."""

import json
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.checkpoint_io import is_sealed, load_state, sealed
from hmoe_repro.training.model import build_dataset, load_model, selected_path
from hmoe_repro.training.planning import make_config, make_toy_config
from hmoe_repro.training.protocols import make_splits, mode_accuracies
from hmoe_repro.training.run import failed_record, run, without_paths
from hmoe_repro.training.selection import training_domain_validation, validation_accuracy
from hmoe_repro.training.store import RunStore, outcome, publish_study

SHORT = dict(network="small_cnn", steps=23, checkpoint_frequency=6)


def short(algorithm="HMOE-DN", **more):
    return make_config(
        algorithm,
        "DigitDomainsTiny",
        ["photo"],
        hparams={"batch_size": 8} | more.pop("hparams", {}),
        **(SHORT | more),
    )


CHILD = """
import json, os, signal, sys
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import RunStore
from hmoe_repro.training.run import run
def die(step, steps):
    if step >= int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)
run(RunConfig.from_dict(json.loads(sys.argv[1])), RunStore(sys.argv[2]), on_step=die)
"""


def killed(config, folder, step):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(config.to_dict()), str(folder), str(step)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        short("ERM"),
        short("HMOE-DN"),
        short("HMOE-DL", sampler="pooled"),
        make_toy_config(80, seeds=2),
    ],
    ids=["ERM", "HMOE-DN", "HMOE-DL pooled", "toy"],
)
def test_killed_twice_and_resumed_equals_undisturbed(tmp_path, config):
    whole = run(config, RunStore(tmp_path / "whole"))
    assert whole["status"] == "complete"
    assert not whole["resumed"]
    cuts = sorted(random.sample(range(2, config.steps - 1), 2))
    for step in cuts:
        killed(config, tmp_path / "cut", step)
    store = RunStore(tmp_path / "cut")
    assert store.read(config.run_id) is None
    again = run(config, store)
    assert again["resumed"], cuts
    assert outcome(again) == outcome(whole), cuts
    from safetensors.numpy import load_file

    for name, array in (
        load_file(tmp_path / "whole" / config.run_id / "arrays.safetensors")
        if config.algorithm != "ERM"
        else {}
    ).items():
        np.testing.assert_array_equal(
            array,
            load_file(tmp_path / "cut" / config.run_id / "arrays.safetensors")[name],
            err_msg=name,
        )


@pytest.mark.slow
def test_resuming_uses_the_saved_state_and_not_a_new_start(tmp_path):
    """Spoil the saved weights: the resumed run must then differ."""
    from hmoe_repro.training.checkpoint_io import save_state

    config, store = short("ERM"), RunStore(tmp_path)
    killed(config, tmp_path, 15)
    path = store.path(config.run_id) / "state.safetensors"
    state = load_state(path)
    assert state["trainer"]["step"] == 13
    state["trainer"]["algorithm"]["model"]["classifier.bias"] += 1
    save_state(path, state)
    assert outcome(run(config, store)) != outcome(run(config, RunStore(tmp_path / "whole")))


@pytest.mark.slow
def test_a_state_of_another_library_is_not_continued(tmp_path):
    from hmoe_repro.training.checkpoint_io import save_state

    config, store = short("ERM"), RunStore(tmp_path)
    killed(config, tmp_path, 15)
    path = store.path(config.run_id) / "state.safetensors"
    save_state(path, load_state(path) | {"library": "another"})
    again = run(config, store)
    assert not again["resumed"]
    assert outcome(again) == outcome(run(config, RunStore(tmp_path / "whole")))


def test_a_file_where_the_run_belongs_is_named(tmp_path):
    config, store = short("ERM"), RunStore(tmp_path)
    store.path(config.run_id).write_text("in the way")
    with pytest.raises(HmoeError, match="cannot write in"):
        run(config, store)


def test_evaluating_everything_selects_the_same(tmp_path):
    """The cheap policy leaves out only what cannot be selected."""
    records = [
        run(short("HMOE-ND", evaluate=policy), RunStore(tmp_path))
        for policy in ("selection", "all")
    ]
    assert records[0]["selected"] == records[1]["selected"]
    assert records[0]["discovery"] == records[1]["discovery"]
    strip = lambda r: [c["losses"] for c in r["checkpoints"]]
    assert strip(records[0]) == strip(records[1])
    assert set(records[1]["checkpoints"][1]["accuracies"]["photo"]) == {"in", "out"}


def test_selection_by_hand(tmp_path):
    record = run(short("HMOE-DN"), RunStore(tmp_path))
    for mode, chosen in record["selected"].items():
        means = [
            np.mean([c["accuracies"][d]["out"][mode] for d in ("negative", "plain", "sketch")])
            for c in record["checkpoints"]
        ]
        best = int(np.argmax(np.round(means, 12)))
        assert chosen["step"] == record["checkpoints"][best]["step"]
        assert abs(chosen["validation_accuracy"] - means[best]) < 1e-12
        assert (
            chosen["test_accuracy"]
            == record["checkpoints"][best]["accuracies"]["photo"]["in"][mode]
        )
    assert record["test_size"] == 48
    assert len(record["checkpoints"]) == 5


def test_loaded_model_gives_the_number_of_the_record(tmp_path):
    store, config = RunStore(tmp_path), short("HMOE-DN")
    record = run(config, store)
    data = build_dataset(config)
    for mode in ("mix", "max", "ood"):
        algorithm, _ = load_model(record["run_id"], mode, store)
        assert (
            mode_accuracies(algorithm, data, "photo", make_splits(data, 0)["photo"]["in"])[mode]
            == record["selected"][mode]["test_accuracy"]
        )
    with pytest.raises(HmoeError, match="mix, max, ood"):
        load_model(record["run_id"], "best", store)
    (store.path(record["run_id"]) / "selected-max.safetensors").unlink()
    with pytest.raises(HmoeError, match="train it again"):
        load_model(record["run_id"], "max", store)


def test_nan_is_a_failed_record_with_its_checkpoints_and_can_be_tried_again(tmp_path):
    config, store = short("ERM", hparams={"lr": 1e9}), RunStore(tmp_path)
    record = run(config, store)
    assert record["status"] == "failed"
    assert "loss became" in record["reason"]
    assert "smaller lr" in record["reason"]
    assert store.read(config.run_id) == record
    assert (store.path(config.run_id) / "error.txt").exists()
    assert record["checkpoints"]
    assert run(config, store)["reason"] == record["reason"]


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    "The folder of the killed runs of two seeds, what the first gives undisturbed, and its state."
    folder, configs = tmp_path_factory.mktemp("states"), [short("ERM"), short("ERM", trial_seed=1)]
    for config in configs:
        killed(config, folder, 15)
    whole = run(configs[0], RunStore(folder / "whole"))
    return folder, configs, outcome(whole)


def state_of(folder, config):
    return folder / config.run_id / "state.safetensors"


def restarted(config, folder, content, said):
    "The record of a run that found this state: it started again, and said so in one line."
    path = state_of(folder, config)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=said) as heard:
        record = run(config, RunStore(folder))
    assert len(heard) == 1
    assert "\n" not in str(heard[0].message)
    assert not record["resumed"]
    assert not path.exists()
    assert path.with_name("state.safetensors.damaged").read_bytes() == content
    return record


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "text"])
def test_a_damaged_state_is_set_aside_and_the_run_starts_again(states, tmp_path, how):
    folder, (config, _), expected = states
    whole = state_of(folder, config).read_bytes()
    flipped = bytearray(whole)
    flipped[-1000] ^= 64  # the exponent of a weight: nothing else would notice
    content = {"cut": whole[:-3], "empty": b"", "flipped": bytes(flipped), "text": b"x" * 999}[how]
    record = restarted(config, tmp_path, content, f"run {config.run_id} starts again: .* damaged")
    assert record["status"] == "complete"
    assert outcome(record) == expected


def test_no_bit_of_a_state_may_change_and_no_byte_may_miss(states, tmp_path):
    folder, (config, _), _ = states
    whole, path = state_of(folder, config).read_bytes(), tmp_path / "state"
    draw, header = random.Random(0), 8 + int.from_bytes(whole[:8], "little")
    bits = [*range(64), *draw.sample(range(8 * header), 60)]
    bits += draw.sample(range(8 * len(whole)), 60)
    for bit in bits:
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(HmoeError, match="not a saved state"):
            load_state(path)
    cuts = [0, 7, 8, header - 1, header, len(whole) - 1, *draw.sample(range(len(whole)), 20)]
    for length in cuts:
        path.write_bytes(whole[:length])
        with pytest.raises(HmoeError, match="not a saved state"):
            load_state(path)
    path.write_bytes(whole)
    assert load_state(path)["run"] == config.run_id


def test_the_states_of_two_runs_cannot_be_swapped(states, tmp_path):
    folder, (config, other), expected = states
    foreign = state_of(folder, other).read_bytes()
    record = restarted(
        config, tmp_path, foreign, f"run {config.run_id} .* that of run {other.run_id}"
    )
    assert outcome(record) == expected


def test_a_failed_record_takes_no_checkpoints_from_another_runs_state(states, tmp_path):
    folder, (config, other), _ = states
    assert failed_record(config, folder / config.run_id, "x")["checkpoints"]
    assert not failed_record(config, folder / other.run_id, "x")["checkpoints"]


@pytest.mark.parametrize("toy", [False, True])
def test_the_seal_of_weights_and_arrays(tmp_path, toy):
    """One wrong bit in the weights is refused, and in the arrays before they are published."""
    config = make_toy_config(4, seeds=1) if toy else short("HMOE-DN", steps=2)
    store = RunStore(tmp_path / "runs")
    run(config, store)
    files = list(store.path(config.run_id).glob("*.safetensors"))
    assert len(files) == (1 if toy else 5)
    for path in files:
        assert is_sealed(path.read_bytes())
        spoil(path)
    with pytest.raises(HmoeError, match="damaged arrays"):
        publish_study("s", [config.run_id], store, tmp_path / "results", [config.run_id])
    assert not (tmp_path / "results").exists()
    if not toy:
        with pytest.raises(HmoeError, match="SHA-256"):
            load_model(config.run_id, "max", store)


def spoil(path, at=-9):
    content = bytearray(path.read_bytes())
    content[at] ^= 64
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, said",
    [
        ("cut", "cut, damaged or another model's"),
        ("empty", "cut, damaged or another model's"),
        ("no safetensors", "cut, damaged or another model's"),
        ("unsealed", "its SHA-256 is another one, or none"),
        ("not a number", "classifier.bias is not finite"),
        ("another run's", "written for run {other}, mode max"),
        ("another mode's", "written for run {run}, mode mix"),
    ],
)
def test_only_whole_and_finite_weights_of_this_run_and_mode_are_loaded(two_runs, damage, said):
    store, config, other = two_runs
    path, mix, others = (
        selected_path(store.path(run_id), mode)
        for run_id, mode in [(config, "max"), (config, "mix"), (other, "max")]
    )
    content = path.read_bytes()
    load_model(config, "max", store)
    weights, header = load(content), content[8 : 8 + int.from_bytes(content[:8], "little")]
    metadata = json.loads(header)["__metadata__"]
    name = list(weights)[-1]
    broken = weights | {name: weights[name] / 0}
    path.write_bytes(
        {
            "cut": content[:-4],
            "empty": b"",
            "no safetensors": b"x" * 40,
            "unsealed": save(weights, {n: v for n, v in metadata.items() if n != "sha256"}),
            "not a number": sealed(broken, **metadata),
            "another run's": others.read_bytes(),
            "another mode's": mix.read_bytes(),
        }[damage]
    )
    said = said.format(run=config, other=other).replace("classifier.bias", name)
    with pytest.raises(HmoeError, match=f"{said}.*Fix: copy them again, or remove"):
        load_model(config, "max", store)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    "A store, and the names of two of its runs with weights of the same shapes."
    store = RunStore(tmp_path_factory.mktemp("two"))
    configs = [short("HMOE-DN", steps=2), short("HMOE-DN", steps=3)]
    for config in configs:
        assert run(config, store)["status"] == "complete"
    return store, *(config.run_id for config in configs)


@pytest.mark.parametrize(
    "text, public",
    [
        ("cannot read /runs/ab12/x.png (no room)", "cannot read (runs)/ab12/x.png (no room)"),
        ("image /big disk/data/PACS/a b.jpg is cut", "image (data)/PACS/a b.jpg is cut"),
        (
            "No such file: '/home/jane doe/my photos/1.jpg'",
            "No such file: '(home)/my photos/1.jpg'",
        ),
        ("No such file: '/else where/1.jpg'", "No such file: '(outside)/1.jpg'"),
        ("OSError: /etc/secret.", "OSError: (outside)/secret."),
        (
            'from C:\\Users\\jane\\x.pt, or "D:\\a b\\y.pt"',
            'from (outside)/x.pt, or "(outside)/y.pt"',
        ),
        (
            "/runs2/x and https://a.b/c/d, root/<domain>/<class>/<image>",
            "(outside)/x and https://a.b/c/d, root/<domain>/<class>/<image>",
        ),
    ],
)
def test_reasons_without_absolute_paths(text, public):
    folders = {"runs": "/runs", "data": "/big disk/data", "home": "/home/jane doe", "top": "/"}
    assert without_paths(text, **folders) == public


def test_a_failed_record_has_no_absolute_path(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error", str(tmp_path / "a b" / "secret.txt"))

    monkeypatch.setattr("hmoe_repro.training.run._train", fail)
    record = run(short("ERM"), RunStore(tmp_path / "runs"), data_dir=tmp_path)
    assert record["reason"] == "OSError: [Errno 5] Input/output error: '(data)/a b/secret.txt'"
    assert str(tmp_path) not in json.dumps(record)
    error = tmp_path / "runs" / record["run_id"] / "error.txt"
    assert "secret.txt" in error.read_text()
    assert str(tmp_path) in error.read_text()


def test_other_data_under_the_same_name_is_refused(tmp_path):
    config = short("ERM").replace(dataset_fingerprint="0" * 12)
    assert "data or labels differ" in run(config, RunStore(tmp_path))["reason"]


def test_threads_are_put_back_and_a_second_owner_is_told(tmp_path):
    from hmoe_repro.training.store import run_lock

    config, store = short("ERM"), RunStore(tmp_path)
    before = torch.get_num_threads()
    store.path(config.run_id).mkdir()
    with run_lock(store.path(config.run_id)):
        assert run(config, store) is None
    record = run(config, store)
    assert record["environment"]["threads"] == 1
    assert torch.get_num_threads() == before


def test_rule_ties_and_missing_tests():
    point = lambda step, val, test: {
        "step": step,
        "accuracies": {
            "a": {"out": {"m": val}},
            "t": {"in": {"m": test}} if test is not None else {},
        },
    }
    points = [point(0, 0.5, 0.1), point(5, 0.7, 0.2), point(10, 0.7, 0.9)]
    assert training_domain_validation(points, ["t"], ["m"])["m"] == {
        "step": 5,
        "validation_accuracy": 0.7,
        "test_accuracy": 0.2,
    }
    assert (
        validation_accuracy(
            {"a": {"out": {"m": 1.0}}, "b": {"out": {"m": 0.0}}, "t": {"out": {"m": 1.0}}},
            ["t"],
            "m",
        )
        == 0.5
    )
    with pytest.raises(HmoeError, match="not evaluated"):
        training_domain_validation([point(0, 0.5, None)], ["t"], ["m"])
    with pytest.raises(HmoeError, match="no checkpoint"):
        training_domain_validation([], ["t"], ["m"])
