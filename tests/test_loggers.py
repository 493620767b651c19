"""Loggers: what they write is what the record says, and no number depends on them."""

import csv
import importlib.util
import os
import random
import sqlite3
import warnings

import numpy as np
import pytest
import torch
from commands import hmoe, hmoe_process

from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training import loggers
from hmoe_repro.training.loggers import check_loggers, make_notifier
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome

TINY = dict(hparams={"batch_size": 8}, network="small_cnn", steps=9, checkpoint_frequency=3)
COMMAND = "--dataset DigitDomainsTiny --test-domain photo --network small_cnn --steps 4".split()
COMMAND += "--checkpoint-frequency 2 --set batch_size=4 --device cpu".split()


@pytest.fixture
def config():
    return make_config("ERM", "DigitDomainsTiny", ["sketch"], **TINY)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    "The record of the same run without a logger."
    config = make_config("ERM", "DigitDomainsTiny", ["sketch"], **TINY)
    return run(config, RunStore(tmp_path_factory.mktemp("plain")))


def lines(path):
    with open(path, newline="") as file:
        return [tuple(row) for row in csv.reader(file)]


def expected(record):
    "(step, name) -> value of a record's checkpoints, spelled out once more."
    found = {}
    for point in record["checkpoints"]:
        found |= {(point["step"], f"loss/{n}"): v for n, v in point["losses"].items()}
        for domain, splits in point["accuracies"].items():
            for split, modes in splits.items():
                found[point["step"], f"accuracy/{domain}/{split}"] = modes["default"]
    return found


def of_csv(path):
    return {(int(s), n): float(v) for s, n, v in lines(path)[1:] if s != "end"}


def test_a_killed_and_resumed_run_has_each_number_once(config, plain, tmp_path, monkeypatch):
    "Killed in a checkpoint after its lines were written and before its state was."
    monkeypatch.setattr(CONFIG, "log", ("csv",))
    store = RunStore(tmp_path)

    def stop(kind, config, detail):
        if kind == "checkpoint" and detail["step"] == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, store, on_event=stop)
    path = store.path(config.run_id) / "log.csv"
    with open(path, "a") as file:
        file.write("8,loss/loss,77\n")  # of a checkpoint whose state was lost
    record = run(config, store)
    assert record["resumed"]
    assert outcome(record) == outcome(plain)
    assert of_csv(path) == expected(plain)
    assert len(lines(path)) == len(set(lines(path)))
    chosen = plain["selected"]["default"]["test_accuracy"]
    assert ("end", "selected/test_accuracy", str(chosen)) in lines(path)


def test_what_a_listener_draws_or_breaks_changes_nothing(config, plain, tmp_path):
    heard = []

    def draws(kind, of_run, detail):
        heard.append(kind)
        assert detail is not None
        assert of_run == config
        return random.random(), np.random.rand(), torch.rand(3)

    def breaks(kind, of_run, detail):
        draws(kind, of_run, detail)
        if kind == "checkpoint":
            raise OSError("disk full")

    for listener, count in ((draws, 6), (breaks, 2)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            record = run(config, RunStore(tmp_path / listener.__name__), on_event=listener)
        assert outcome(record) == outcome(plain)
        assert len(heard) == count
        said = [str(w.message) for w in said if "logger" in str(w.message)]
        assert len(said) == (listener is breaks)
        assert all("breaks failed" in s for s in said)
        heard.clear()


def test_a_logger_that_cannot_begin_is_said_once(config, tmp_path, monkeypatch):
    class Absent:
        def __init__(self, *arguments):
            raise ConnectionError("no server")

    monkeypatch.setitem(loggers.LOGGERS, "wandb", Absent)
    notify = make_notifier(config, ["wandb", "csv"], tmp_path)
    with pytest.warns(UserWarning, match="logger wandb failed .*ConnectionError: no server") as all:
        for event in (("start", []), ("done", {"status": "failed"})):
            notify(*event)
    assert len(all) == 1
    assert (tmp_path / config.run_id / "log.csv").exists()


def test_a_failed_run_and_the_toy_are_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(CONFIG, "log", ("csv",))
    store, ended = RunStore(tmp_path), []
    wild = make_config("ERM", "DigitDomainsTiny", ["sketch"], **TINY | {"hparams": {"lr": 1e9}})
    toy = make_config("HMOE", "SineIntervals", [], hparams={"seeds": 2}, steps=6)
    for each in (wild, toy):
        run(each, store, on_event=lambda kind, config, detail: ended.append((kind, detail)))
    assert [d["status"] for kind, d in ended if kind == "done"] == ["failed", "complete"]
    record = store.read(toy.run_id)
    means = {p["step"]: sum(p["losses"]["loss"]) / 2 for p in record["checkpoints"]}
    found = of_csv(store.path(toy.run_id) / "log.csv")
    assert {step: found[step, "loss/loss"] for step in means} == means
    assert len(means) > 2


def test_names_are_checked_before_training(tmp_path, monkeypatch):
    said = hmoe("train", "--algorithm", "ERM", *COMMAND, "--log", "neptune", folder=tmp_path)
    assert said.returncode == 1
    assert "unknown logger 'neptune'. Valid: csv" in said.stderr
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(HmoeError, match=r"wandb is not installed. Fix: .*hmoe_repro\[loggers\]"):
        check_loggers(["wandb"])
    assert not (tmp_path / "runs").exists()


def test_train_logs(tmp_path):
    call = ["train", "--algorithm", "ERM", *COMMAND, "--log", "csv", "--log", "csv"]
    said = hmoe(*call, folder=tmp_path)
    assert said.returncode == 0, said.stderr
    (path,) = (tmp_path / "runs").glob("*/log.csv")
    assert {step for step, *_ in lines(path)} == {"step", "0", "2", "3", "end"}


@pytest.mark.slow
def test_the_workers_of_a_sweep_log_their_runs(tmp_path):
    call = "sweep digits_table --profile smoke --algorithm ERM --jobs 2 --log csv".split()
    said = hmoe_process(*call, "--device", "cpu", folder=tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr
    runs = [path.parent for path in (tmp_path / "runs").glob("*/record.json")]
    assert len(runs) > 1
    assert all(lines(folder / "log.csv")[-1][0] == "end" for folder in runs)


def logged(name, config, plain, folder, monkeypatch):
    "The store of a run that was stopped and resumed with a logger; its record is the plain one."
    for variable in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(CONFIG, "log", (name,))

    def stop(step, steps):
        if step == 5:
            raise KeyboardInterrupt

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            run(config, RunStore(folder), on_step=stop)
        record = run(config, RunStore(folder))
    assert record["resumed"]
    assert outcome(record) == outcome(plain)
    assert not [w for w in said if "logger" in str(w.message)]
    return folder


@pytest.mark.slow
def test_tensorboard_reads_its_event_files_back(config, plain, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (
        logged("tensorboard", config, plain, tmp_path, monkeypatch) / "tensorboard"
    ).iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    found = {
        (e.step, name): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)
    }
    assert found == pytest.approx(expected(plain))
    assert config.run_id in folder.name


@pytest.mark.slow
def test_wandb_writes_offline(config, plain, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for variable, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(variable, value)
    folder = logged("wandb", config, plain, tmp_path, monkeypatch) / "wandb"
    wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # its service's address, which it leaves
    files = sorted(folder.glob(f"offline-run-*{config.run_id}/run-{config.run_id}.wandb"))
    content = b"".join(path.read_bytes() for path in files)
    assert b"accuracy/sketch/in" in content
    assert b"selected/test_accuracy" in content


@pytest.mark.slow
def test_mlflow_keeps_one_run_in_its_database(config, plain, tmp_path, monkeypatch):
    if not importlib.util.find_spec("mlflow") or not importlib.util.find_spec("alembic"):
        pytest.skip("mlflow-skinny, sqlalchemy and alembic are not installed")
    folder = logged("mlflow", config, plain, tmp_path, monkeypatch)
    with sqlite3.connect(folder / "mlflow.db") as database:
        ((status, name),) = database.execute("select status, name from runs").fetchall()
        rows = database.execute("select step, key, value from metrics").fetchall()
        params = dict(database.execute("select key, value from params").fetchall())
    found = {(step, key): value for step, key, value in rows if not key.startswith("selected")}
    assert found == pytest.approx(expected(plain))
    assert (status, name) == ("FINISHED", str(config))
    assert params["batch_size"] == "8"
    assert params["algorithm"] == "ERM"
