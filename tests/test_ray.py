"""Runs on a Ray cluster whose nodes share nothing: nodes leave and join, tasks and the sweep itself
are killed at any moment, and every record equals that of a run on this machine.

HMOE_RAY="200 50 5" makes the test of kills larger: runs, kills of tasks, kills of the sweep."""

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hmoe_repro.core.environment import library_hash
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.studies.sweep import SweepOptions, sweep
from hmoe_repro.studies.worker import lost_task_outcome
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome

COUNTS = tuple(map(int, os.environ.get("HMOE_RAY", "12 5 1").split()))


def configs(count, steps=11, lr=0.001):
    small = {"network": "small_cnn", "steps": steps, "checkpoint_frequency": max(5, steps // 10)}
    domains, hparams = ("negative", "photo", "plain", "sketch"), {"batch_size": 8, "lr": lr}
    return [
        make_config("ERM", "DigitDomainsTiny", [domains[i % 4]], i // 4, hparams, **small)
        for i in range(count)
    ]


def equal_to_local(wanted, store, folder):
    local = RunStore(folder)
    sweep(wanted, store=local, device="cpu")
    return all(outcome(store.read(s.run_id)) == outcome(local.read(s.run_id)) for s in wanted)


@pytest.fixture
def environment_again():
    "Ray sets variables, and leaves them set."
    before = dict(os.environ)
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    os.environ.clear()
    os.environ.update(before)


class Nodes:
    """A cluster on this machine: a head without processors, and nodes with one each, every one
    with a temporary folder of its own and another library of our name in its path."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        other = folder / "other" / "hmoe_repro"
        other.mkdir(parents=True)
        (other / "__init__.py").write_text("raise ImportError('the library of a node')\n")
        self.folder, self.count, self.cluster = folder, 0, Cluster()
        self.patiently(num_cpus=0, include_dashboard=False)

    def patiently(self, **given):
        "A node; on a busy machine its processes may begin too late for Ray, then again."
        for left in (2, 1, 0):
            with contextlib.ExitStack() as stack:
                if left:
                    stack.enter_context(contextlib.suppress(Exception))
                return self.cluster.add_node(**given)
        return None

    def add(self):
        own, self.count = self.folder / f"node-{self.count}", self.count + 1
        own.mkdir()
        path = os.pathsep.join([str(self.folder / "other"), os.environ.get("PYTHONPATH", "")])
        where = {"TMPDIR": str(own), "HMOE_RUNS": str(own / "runs"), "PYTHONPATH": path}
        return self.patiently(num_cpus=1, env_vars=where)

    def working(self):
        "The processes of tasks whose run has a checkpoint: those whose state is in a folder here."
        if not list(self.folder.glob("node-*/hmoe-ray-*/*/state.safetensors")):
            return []
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (path / "cmdline").read_bytes().startswith(b"ray::_ray_task"):
                    folders = [os.readlink(fd) for fd in (path / "fd").iterdir()]
                    if any(f.startswith(str(self.folder)) for f in folders):
                        found.append(int(path.name))
        return found


@pytest.fixture
def nodes(tmp_path, monkeypatch, environment_again):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    made = Nodes(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", made.cluster.address)
    made.add(), made.add()
    yield made
    sys.modules["ray"].shutdown()
    made.cluster.shutdown()


def test_ray_gives_the_same_records(tmp_path, environment_again):
    pytest.importorskip("ray")
    good, bad, heard = configs(2), configs(1, lr=1e9)[0], []
    store = RunStore(tmp_path / "ray")
    results = sweep(
        [bad, *good],
        store=store,
        device="cpu",
        jobs=2,
        engine="ray",
        on_event=lambda kind, config, *details: heard.append(kind),
    )
    assert results[bad.run_id][0] == "failed" == store.read(bad.run_id)["status"]
    assert [results[s.run_id] for s in good] == [("complete", None)] * 2
    assert heard.count("done") == 3 <= heard.count("step")
    for config in good:
        assert outcome(store.read(config.run_id)) == outcome(
            run(config, RunStore(tmp_path / "local"))
        )
        assert not (store.path(config.run_id) / "state.safetensors").exists()
    (long,) = configs(1, steps=100_000)
    long = long.replace(checkpoint_frequency=50)
    how = SweepOptions(store, "cpu", engine="ray", minutes=0.25)
    assert sweep(long, how)[long.run_id].status == "unfinished"
    assert (store.path(long.run_id) / "state.safetensors").exists()


@pytest.mark.parametrize("kind", ["closed", "silent", "name", "client"])
def test_a_cluster_that_does_not_answer_is_named_soon(tmp_path, monkeypatch, kind):
    pytest.importorskip("ray")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if kind == "silent":
            listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        named = {"name": "no-such-host.invalid:6379", "client": f"ray://{address}"}
        monkeypatch.setenv("RAY_ADDRESS", named.get(kind, address))
        began = time.monotonic()
        with pytest.raises(HmoeError, match="no Ray cluster answers at RAY_ADDRESS=.*ray start"):
            sweep(configs(1), store=RunStore(tmp_path), engine="ray")
        assert time.monotonic() - began < 20


def test_a_full_disk_behind_errors_of_ray_stops_the_sweep():
    outer, inner = RuntimeError("of the task"), RuntimeError("of the actor")
    outer.cause, inner.cause = inner, OSError(errno.ENOSPC, "No space left on device", "a/b")
    status, reason = lost_task_outcome(outer)
    assert status == "no room"
    assert reason.startswith("No space left on device: a/b. Fix: make room")
    inner.cause = OSError(errno.EACCES, "Permission denied", "a/b")
    status, reason = lost_task_outcome(outer)
    assert status == "failed"
    assert "PermissionError" in reason
    assert "resumes" in reason


def test_shares_of_a_gpu_need_ray(tmp_path):
    with pytest.raises(HmoeError, match="--engine ray"):
        sweep(configs(1), store=RunStore(tmp_path), gpus_per_run=0.25)


SWEEP = """
import json, sys
from hmoe_repro.studies.sweep import sweep
from hmoe_repro.studies.worker import lost_task_outcome
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import RunStore
specs = [RunConfig.from_dict(each) for each in json.load(open(sys.argv[1]))]
ended = sweep(specs, store=RunStore(sys.argv[2]), device="cpu", engine="ray")
sys.exit(any(status != "complete" for status, _ in ended.values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_nodes_tasks_and_sweeps_may_die(nodes, tmp_path):
    import json

    runs, kills, coordinators = COUNTS
    wanted, store = configs(runs, max(60, 3600 // runs)), RunStore(tmp_path / "home")
    plan = tmp_path / "specs.json"
    plan.write_text(json.dumps([config.to_dict() for config in wanted]))
    command = [sys.executable, "-c", SWEEP, str(plan), str(store.folder)]
    deeds = ["task"] * kills + ["sweep"] * coordinators
    random.shuffle(deeds)
    deeds.insert(len(deeds) // 2, "node")
    process, again = subprocess.Popen(command), coordinators + kills // 4
    try:
        while process.poll() != 0 or deeds:
            if process.poll() is not None:  # killed, or with a run whose task was killed four times
                assert process.returncode, f"too few runs for {deeds}, or they fail"
                assert again, f"too few runs for {deeds}, or they fail"
                process, again = subprocess.Popen(command), again - 1
            time.sleep(random.uniform(0.2, 1))
            working = nodes.working()
            if not deeds or not working:
                continue
            deed = deeds.pop(0)
            if deed == "task":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(random.choice(working), signal.SIGKILL)
            elif deed == "sweep":
                process.kill()
                process.wait()
            else:
                nodes.add()
                nodes.cluster.remove_node(min(nodes.cluster.worker_nodes, key=id), False)
    finally:
        process.kill()
    records = [store.read(config.run_id) for config in wanted]
    assert {record["environment"]["library"] for record in records} == {library_hash()}
    assert any(record["resumed"] for record in records)
    assert equal_to_local(wanted, store, tmp_path / "local")
