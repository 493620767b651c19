"""Portable arithmetic: asked for by identity, used by workers,
and the same bits on another vendor's processor."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import warnings

import pytest

from hmoe_repro.core.determinism import (
    DETERMINISM_MODES,
    PORTABLE,
    THREADS,
    begin_process,
    determinism_in_use,
    process_variables,
    set_determinism,
    warn_of_determinism,
    with_determinism,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.studies.study_file import STUDIES, read_study
from hmoe_repro.training.planning import make_toy_config
from hmoe_repro.training.run import run
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import RunStore, outcome

UNPINNED = {name: value for name, value in os.environ.items() if name not in PORTABLE}
UPDATES = """
import hashlib
import torch
from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.core.seeds import seed_everything
torch.set_num_threads(1)
seed_everything(0)
for name, settings in (("ERM", {}), ("HMOE-DN", {"d2v_stride": 2})):
    algorithm = get_algorithm(name)((3, 16, 16), 4, 2, {"network": "small_cnn"} | settings)
    algorithm.update([(torch.rand(2, 3, 16, 16), torch.randint(4, (2,))) for _ in range(2)])
    tensors = [p.detach().contiguous().numpy() for p in algorithm.state_dict().values()]
    print(name, hashlib.sha256(b"".join(p.tobytes() for p in tensors)).hexdigest())
"""
COMMAND = [sys.executable, "-m", "hmoe_repro.cli.app"]
pinnable = pytest.mark.skipif(
    determinism_in_use() != "portable",
    reason="this processor cannot compute portably: no AVX2, or no MKL",
)


def test_the_tests_compute_portably_wherever_the_processor_can():
    import torch

    can = (
        torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and torch.backends.mkl.is_available()
    )
    assert determinism_in_use() == ("portable" if can else "native")


def test_an_environment_gets_the_variables_and_keeps_the_others():
    given = {"HOME": "here", "ATEN_CPU_CAPABILITY": "avx512"}
    assert with_determinism("portable", given) == {"HOME": "here", **PORTABLE}
    assert with_determinism("native", given) == given
    assert given["ATEN_CPU_CAPABILITY"] == "avx512"
    with pytest.raises(HmoeError, match="unknown determinism 'exact'. Valid: native, portable"):
        with_determinism("exact", given)


def test_a_process_begins_with_its_variables_and_its_parent_keeps_its_own(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before, context = dict(os.environ), multiprocessing.get_context("spawn")
    for mode in DETERMINISM_MODES:
        ours, theirs = context.Pipe()
        begins = process_variables(mode), "begun", "tell_variables", (theirs,)
        process = context.Process(target=begin_process, args=begins)
        process.start()
        seen, torch_is_there = ours.recv()
        process.join()
        assert {seen[name] for name in THREADS} == {"1"}
        assert not torch_is_there
        if mode == "portable":
            assert {name: seen[name] for name in PORTABLE} == PORTABLE
        else:
            assert seen["ATEN_CPU_CAPABILITY"] == "default"
            assert "MKL_CBWR" not in seen
    assert dict(os.environ) == before


PARENT = """
import multiprocessing
from hmoe_repro.core.determinism import begin_process
work = "import time; print('working', flush=True); time.sleep(60)"
context = multiprocessing.get_context("spawn")
worker = context.Process(target=begin_process, args=({}, "builtins", "exec", (work,)))
worker.start()
worker.join()
"""


@pytest.mark.parametrize("killed_by", [signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_worker_ends_with_its_parent(killed_by):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "working\n"
    parent.send_signal(killed_by)
    rest, _ = parent.communicate(timeout=20)  # until the worker, too, has closed its output
    assert parent.returncode == -killed_by
    assert not rest


def test_too_late_changes_nothing_and_says_so(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    before = dict(os.environ)
    with pytest.warns(UserWarning, match="requested after torch was imported.*Fix"):
        set_determinism("portable")
    assert dict(os.environ) == before
    assert determinism_in_use() == "native"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_determinism("native")
        warn_of_determinism("native")
        warn_of_determinism("portable", "meta")


@pinnable
def test_a_process_that_could_be_portable_and_is_not_is_warned(monkeypatch):
    monkeypatch.delenv("MKL_CBWR")
    with pytest.warns(UserWarning, match="set_determinism"):
        warn_of_determinism("portable")


def test_small_profiles_ask_for_it_and_the_others_do_not():
    for study in STUDIES:
        small = study.startswith(("smoke-", "quick-"))
        assert {runs.determinism for runs in read_study(study).runs} == {
            "portable" if small else "native"
        }
    for study in ("smoke-toy", "smoke-digits", "smoke-table1", "smoke-parity", "quick-collapse"):
        assert {s.determinism for s in study_configs(study)} == {"portable"}
    assert make_toy_config().determinism == "native"
    with pytest.raises(HmoeError, match="determinism 'precise'"):
        make_toy_config(determinism="precise")


@pytest.mark.slow
@pinnable
def test_other_settings_of_the_environment_do_not_change_a_published_record(tmp_path):
    """The command is started under another capability of PyTorch;
    its workers compute portably all the same."""
    environment = UNPINNED | {"ATEN_CPU_CAPABILITY": "default", "HMOE_RUNS": str(tmp_path)}
    command = [
        *COMMAND,
        *("sweep digits_table --profile smoke --algorithm HMOE-DN --device cpu --jobs 1").split(),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone = RunStore(tmp_path / "alone")
    fresh, damaged = RunStore(tmp_path).scan()
    assert len(fresh) == 4
    assert not damaged
    assert {r["environment"]["determinism"] for r in fresh} == {"portable"}
    for record in fresh:
        here = run(RunConfig.from_dict(record["config"]), alone)
        assert outcome(record) == outcome(here)


@pytest.mark.slow
@pinnable
def test_a_single_run_takes_the_arithmetic_it_is_told(tmp_path):
    for determinism in ("native", "portable"):
        command = [
            *COMMAND,
            *(
                "train --algorithm ERM --dataset DigitDomainsTiny --test-domain photo "
                "--network small_cnn --steps 2 --set batch_size=4 --device cpu "
                "--determinism"
            ).split(),
            determinism,
        ]
        done = subprocess.run(
            command, env=UNPINNED | {"HMOE_RUNS": str(tmp_path)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
    records, _ = RunStore(tmp_path).scan()
    assert {
        r["config"].get("determinism", "native"): r["environment"]["determinism"] for r in records
    } == {"native": "native", "portable": "portable"}


def updates(*before, **variables):
    "What `UPDATES` prints in a process of its own."
    done = subprocess.run(
        [*before, sys.executable, "-c", UPDATES],
        env=UNPINNED | variables | dict.fromkeys(THREADS, "1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pinnable
@pytest.mark.skipif(
    not shutil.which("qemu-x86_64"),
    reason="qemu-x86_64 is not installed (Debian: apt-get install qemu-user)",
)
def test_another_vendors_processor_computes_the_same_bits():
    """An update of ERM and of HMOE-DN here, and on an emulated AMD processor of 2019."""
    assert updates("qemu-x86_64", "-cpu", "EPYC-Rome", **PORTABLE) == updates(**PORTABLE)
