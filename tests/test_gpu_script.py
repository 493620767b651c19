"""The script for a GPU that is there for minutes, on the CPU: it needs little, stops in time, goes
on where it stopped, and what it sends home fits and is whole."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from test_imports import BLOCKED

from hmoe_repro.analysis.results import load_study
from hmoe_repro.core.files import repo_root
from hmoe_repro.studies.export_import import unpack_runs
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

SCRIPT = repo_root() / ".ci" / "gpu.py"
HOOK = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Block())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    "An environment without notebook tools, pytest and ray, whose home folder cannot be made."
    hook = tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(HOOK)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HMOE_", "XDG_", "OUT"))}
    return kept | {"PYTHONPATH": str(hook), "HOME": "/proc/none", "MPLCONFIGDIR": "/proc/none"}


def gpu(environment, *arguments, **more):
    "The script at smoke size, as a person calls it."
    command = [sys.executable, str(SCRIPT), *map(str, arguments), "--profile", "smoke"]
    return subprocess.run(command, env=environment | more, capture_output=True, text=True)


def there(work, *steps):
    "Arguments of a call that works in `work` on the CPU."
    return (*steps, "--device", "cpu", "--jobs", 2, "--work", work, "--out", work / "out")


def report(work):
    return json.loads((work / "out" / "gpu.json").read_text())


@pytest.fixture(scope="module")
def first(bare, tmp_path_factory):
    "A first call: the runs of Table 4's twin."
    work = tmp_path_factory.mktemp("gpu")
    return work, gpu(bare, *there(work, "colored"))


@pytest.mark.slow
def test_a_smoke_pass_without_notebook_tools_and_without_a_home(first):
    work, done = first
    assert done.returncode == 0, done.stdout + done.stderr
    steps = report(work)["steps"]
    assert list(steps) == ["colored"]
    assert steps["colored"]["ok"]
    assert steps["colored"]["complete"] == steps["colored"]["runs"] == 12
    assert "Traceback" not in done.stdout
    assert "blocked" not in done.stdout + done.stderr
    made = {path.name: path.stat().st_size for path in (work / "out").iterdir()}
    assert set(made) == {"gpu.json", "gpu.log", "colored-1.tar.gz"}
    assert max(made.values()) <= 16 << 20


@pytest.mark.slow
def test_a_second_call_trains_nothing_and_packs_the_same(first, bare):
    work, _ = first
    again = gpu(bare, *there(work, "colored"))
    assert again.returncode == 0, again.stdout
    assert "12 runs, 0 to train" in again.stdout, again.stdout
    assert report(work)["steps"]["colored"]["packed"] == 12


@pytest.mark.slow
def test_records_that_came_home_need_not_be_trained_on_another_machine(first, bare, tmp_path):
    work, _ = first
    unpack_runs(RunStore(tmp_path / "runs"), work / "out" / "colored-1.tar.gz")
    second = tmp_path / "second"
    made = gpu(bare, "prepare", "--work", second, HMOE_RUNS=str(tmp_path / "runs"))
    assert made.returncode == 0, made.stderr
    assert "12 finished and 0 unfinished" in made.stdout, made.stderr
    assert sum(p.stat().st_size for p in (second / "in").iterdir()) < 200_000  # without arrays
    done = gpu(bare, *there(second, "colored"))
    assert done.returncode == 0, done.stdout
    assert "12 runs, 0 to train" in done.stdout, done.stdout
    steps = report(second)["steps"]
    assert steps["colored"]["packed"] == 0
    assert steps["colored"]["complete"] == 12


@pytest.mark.slow
def test_the_record_of_a_benchmark_comes_home(bare, tmp_path):
    done = gpu(bare, *there(tmp_path, "together"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out" / "bench-together-tiny.json").read_text())
    assert set(record["updates_per_second"]["ERM"]) == {"1", "2"}
    assert report(tmp_path)["steps"]["together"]["ok"]


# Pieces of it, in this process


@pytest.fixture
def script(tmp_path, monkeypatch):
    "The script as a module; HMOE_RUNS is the runs folder of its working folder."
    found = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "gpu_script", module)  # dataclasses look there
    found.loader.exec_module(module)
    module.LOG = tmp_path / "log"
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    return module


def test_a_step_for_which_there_is_no_time_says_so(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "set_environment", lambda work, home: None)
    call = ["gpu.py", *there(tmp_path, "colored"), "--minutes", 0.01, "--profile", "smoke"]
    monkeypatch.setattr(script.sys, "argv", [*map(str, call)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 1
    assert report(tmp_path)["steps"]["colored"]["reason"] == "the time was up"


class Stop(KeyboardInterrupt):
    pass


def half_done(store, configs):
    "Runs that were stopped after their second checkpoint, the first one after its first."
    for config in configs:

        def stop(step, steps, at=2 if config is configs[0] else 5):
            if step == at:
                raise Stop

        with pytest.raises(Stop):
            run(config, store, on_step=stop)


@pytest.fixture
def begun(tmp_path):
    "Three half-done runs in the runs folder."
    configs = [
        make_config(
            "ERM",
            "DigitDomainsTiny",
            [d],
            hparams={"batch_size": 8},
            steps=9,
            network="small_cnn",
            checkpoint_frequency=3,
        )
        for d in ("photo", "plain", "sketch")
    ]
    half_done(RunStore(tmp_path / "runs"), configs)
    return configs


def going_home(folder, **limits):
    "Options of a call that works in `folder`, where nothing came from elsewhere."
    (folder / "came").write_text("")
    return argparse.Namespace(work=folder, out=folder / "out", profile="smoke", packed=[], **limits)


@pytest.mark.slow
def test_what_goes_home_is_whole_and_without_weights(script, tmp_path, monkeypatch):
    store, home = RunStore(tmp_path / "runs"), RunStore(tmp_path / "home")
    records = load_study("quick-colored")
    monkeypatch.setattr(script, "ids_of", lambda profile, step: [r["run_id"] for r in records])
    for record in records:
        store.write(record)
        (store.path(record["run_id"]) / "selected-mix.safetensors").write_bytes(b"weights")
    told = script.bring_home(going_home(tmp_path, files=8, mib=16), "colored")
    assert told["runs"] == told["complete"] == told["packed"] == len(records) == 36
    (parcel,) = (tmp_path / "out").iterdir()
    assert parcel.name == "colored-1.tar.gz"
    assert unpack_runs(home, parcel).startswith("36 runs added")
    assert all(home.read(r["run_id"]) == r for r in records)
    assert not list(home.folder.glob("*/selected-*"))


def test_states_travel_as_far_as_files_are_left(script, begun, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ids_of", lambda profile, step: [s.run_id for s in begun])
    size = next((tmp_path / "runs").glob("*/state.safetensors")).stat().st_size
    options = going_home(tmp_path, files=4, mib=1.5 * size / 2**20)  # two are too large for one
    told = script.bring_home(options, "colored")
    assert told["half_done"] == 3
    assert told["complete"] == told["packed"] == 0
    parcels = sorted((tmp_path / "out").iterdir())
    assert len(parcels) == told["state_parcels"] == 2
    away = RunStore(tmp_path / "elsewhere")
    for path in parcels:
        unpack_runs(away, path)
    going_on = [s for s in begun if (away.path(s.run_id) / "state.safetensors").exists()]
    assert going_on == begun[1:]
    assert run(going_on[0], away)["resumed"]


def test_what_came_is_unpacked_once_so_that_no_run_is_set_back(script, begun, tmp_path):
    store, ids = RunStore(tmp_path / "runs"), [s.run_id for s in begun]
    (tmp_path / "in").mkdir()
    script.pack_parts(store, tmp_path / "in", "states", ids, 1 << 20)
    state = store.path(ids[0]) / "state.safetensors"
    assert len(script.unpack_in(tmp_path)) == len(list((tmp_path / "in").iterdir()))
    state.write_bytes(b"further along")
    assert script.unpack_in(tmp_path) == []
    assert state.read_bytes() == b"further along"


# Slots


def test_slots_are_studies_with_runs_and_together_train_each_once(script):
    from hmoe_repro.studies.studies import STUDIES

    parts = [part for slot in script.SLOTS.values() for part in slot]
    assert {part.study for part in parts} <= set(STUDIES)
    assert len(parts) == len(set(parts))
    ids = [set(script.ids_of("smoke", slot)) for slot in script.SLOTS]
    assert all(ids)


def test_a_part_has_the_runs_of_its_algorithms_and_its_seed(script):
    part = script.Part("quick-digits", ("ERM", "HMOE-DN"), 1)
    configs = script.configs_of(part)
    assert {config.algorithm for config in configs} == {"ERM", "HMOE-DN"}
    assert {config.trial_seed for config in configs} == {1}
    assert len(configs) == len({config.run_id for config in configs}) == 8  # four test domains
    words = part.options()
    assert words == ["--algorithm", "ERM", "--algorithm", "HMOE-DN", "--where", "trial_seed=1"]


def test_inputs_are_cut_into_parts_and_come_together_there(script, tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_DATA", "elsewhere")
    source, work = tmp_path / "source", tmp_path / "work"
    (work / "in").mkdir(parents=True)
    source.mkdir()
    for name in "abcde":
        (source / name).write_bytes(name.encode() * 1000)
    files = [(source / name, f"PACS/photo/{name}") for name in "abcde"]
    script.write_parts(work / "in", "pacs", files, limit=2000)
    assert [p.name for p in sorted((work / "in").iterdir())] == [f"pacs-{i}.tar" for i in (1, 2, 3)]
    (work / "in" / "pacs-3.tar").rename(tmp_path / "later.tar")  # the last part comes later
    script.unpack_data(work)
    (tmp_path / "later.tar").rename(work / "in" / "pacs-3.tar")
    (work / "in" / "pacs-1.tar").unlink()
    script.unpack_data(work)
    unpacked = {p.name: p.read_bytes() for p in (work / "data" / "PACS" / "photo").iterdir()}
    assert unpacked == {name: name.encode() * 1000 for name in "abcde"}
    assert os.environ["HMOE_DATA"] == str(work / "data")


def test_folders_stay_home_and_come_back(script, tmp_path, monkeypatch):
    root = tmp_path / "checkout"
    for name in ("results", "figures", "nbs"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text(name)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.setattr(script, "ROOT", root)
    options = argparse.Namespace(work=root / ".gpu")
    script.thin(options)
    assert sorted(p.name for p in root.iterdir()) == [".git", ".gpu", "nbs"]
    script.thin(options)  # nothing is left to move
    script.restore(options)
    assert (root / "results" / "file").read_text() == "results"
    assert (root / "figures" / "file").read_text() == "figures"


def test_without_a_gpu_there_is_no_shared_service(script, tmp_path):
    with script.shared_gpu("cpu", tmp_path) as together:
        assert together is None
    assert not list(tmp_path.iterdir())
