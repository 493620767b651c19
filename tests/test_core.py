"""Seeds, generators, folders, atomic files and the torchvision guard."""

import functools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys

import pytest
import torch
from commands import hmoe

from hmoe_repro.cli.options import writable_file
from hmoe_repro.core import devices, environment, errors, files, seeds


def test_seed_hash_vectors():
    assert [seeds.seed_hash(0, 0), seeds.seed_hash(0, 1), seeds.seed_hash(1, 3)] == [
        894182419,
        1514274641,
        1739848239,
    ]
    assert (
        seeds.seed_hash("PACS", "ERM", [0], 0, 0)
        == 94828300
        != seeds.seed_hash("PACS", "ERM", (0,), 0, 0)
    )


def test_random_state_survives_json_and_tensors():
    seeds.seed_everything(3)
    import random

    import numpy as np

    random.gauss(0, 1), np.random.randn()  # leave a cached second gaussian behind in both
    state = seeds.random_state()
    first = [random.gauss(0, 1), np.random.randn(), torch.randn(2).tolist()]
    seeds.restore_random_state(state)
    assert first == [random.gauss(0, 1), np.random.randn(), torch.randn(2).tolist()]


def test_write_atomic_keeps_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    target = tmp_path / "record.json"
    files.write_atomic(target, "old")

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomic(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
@pytest.mark.parametrize("link", [False, True])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, monkeypatch, kind, link):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    if kind == "device":
        try:
            os.mknod("it", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except (AttributeError, PermissionError):
            pytest.skip("only root makes devices")
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind("it")
    else:
        (os.mkfifo if kind == "FIFO" else os.mkdir)("it")
    os.symlink("it", "link")
    target, before = "link" if link else "it", os.lstat("it")
    said = "a folder" if kind == "folder" else "no regular file"
    for write in (functools.partial(files.write_atomic, content="table"), writable_file):
        with pytest.raises(errors.HmoeError, match=f"cannot write .*{target}: it is {said}.*Fix"):
            write(target)
    if kind != "folder":
        done = hmoe("pack", tmp_path / target, folder=tmp_path)
        assert done.returncode == 1
        assert f"it is {said}" in done.stderr
    assert os.lstat("it").st_mode == before.st_mode
    assert os.path.islink("link")
    files.write_atomic("new", "a file")
    files.write_atomic("new", "another")
    assert not [name for name in os.listdir() if name.startswith(".")]


def test_unwritable_folder_is_one_clear_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(errors.HmoeError, match="cannot write in .*Fix") as error:
        files.ensure_writable(blocked / "runs")
    assert "\n" not in str(error.value)


def test_folders_follow_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HMOE_RUNS", "here")
    assert files.runs_dir() == tmp_path / "here"
    assert files.runs_dir().is_absolute()


def test_unknown_device_lists_the_way_out():
    with pytest.raises(errors.HmoeError, match="--device cpu"):
        devices.resolve_device("warp:3")


def test_auto_finds_an_accelerator_only_if_the_machine_may_have_one():
    assert not (devices.no_accelerator() and devices.resolve_device("auto").type != "cpu")


def test_a_tensor_is_copied_only_to_another_device():
    numbers = torch.arange(3)
    assert devices.on_device(numbers, "cpu") is numbers
    assert devices.on_device(numbers, "meta").is_meta


def test_single_thread_restores_the_number_of_threads():
    before = torch.get_num_threads()
    with devices.single_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_one_seed_gives_the_same_numbers():
    drawn = []
    for _ in range(2):
        seeds.seed_everything(7)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_environment_names_no_machine():
    text = json.dumps(environment.environment())
    import platform

    assert platform.node() not in text
    assert os.path.expanduser("~") not in text
    assert "torch" in text


GUARD = """
import sys, importlib.abc
class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        import importlib.machinery
        return importlib.machinery.ModuleSpec(name, self) if name == "torchvision" else None
    def create_module(self, spec): return None
    def exec_module(self, module):
        calls.append(1)
        if len(calls) <= times: raise RuntimeError(message)
sys.meta_path.insert(0, Broken())
from hmoe_repro.core import devices
import torch
for times, message in eval(sys.argv[1]):
    calls = []
    sys.modules.pop("torchvision", None)
    try: devices.import_torchvision(); print("imported", len(calls))
    except RuntimeError as error: print("raised", len(calls))
"""


def test_guard_acts_on_that_one_error_only():
    missing = "operator torchvision::nms does not exist"
    expected = {
        (0, ""): "imported 1",  # a normal installation: nothing is declared
        (9, "something else is broken"): "raised 1",  # any other error is not ours to hide
        (1, missing): "imported 2",  # the CUDA build beside CPU torch
        (9, missing): "raised 2",  # declared, and it was of no use
    }
    command = [sys.executable, "-c", GUARD, repr(list(expected))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == list(expected.values()), done.stderr


@pytest.mark.parametrize(
    "message, line",
    [("", "ValueError"), ("\n  the cause \nmore", "the cause"), ("x" * 200, "x" * 160)],
)
def test_the_first_line_of_an_error(message, line):
    assert errors.first_line(ValueError(message)) == line


def test_the_hash_of_the_library_is_that_of_what_was_imported(root, tmp_path):
    shutil.copytree(root / "hmoe_repro", tmp_path / "hmoe_repro")
    code = """
from pathlib import Path
from hmoe_repro.core import environment
path = Path(environment.__file__).with_name("seeds.py")
before = environment.library_hash.__wrapped__()
path.write_text(path.read_text() + "edited = True\\n")
print(before == environment.library_hash() != environment.library_hash.__wrapped__())
"""
    where = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=where, capture_output=True
    )
    assert done.stdout == b"True\n", done.stderr


@pytest.mark.parametrize(
    "value, valid, similar",
    [
        ("ERN", ["ERM", "HMOE-DN"], "ERM"),
        ("hmoe-dn", ["ERM", "HMOE-DN"], "HMOE-DN"),
        ("lrr", ["batch_size", "lr"], "lr"),
        ("slurm", ["local", "ray"], ""),
        (3, [1, 2], ""),
        ("", ["a"], ""),
    ],
)
def test_the_most_similar_valid_name_is_suggested(value, valid, similar):
    assert errors.closest(value, valid) == similar
    with pytest.raises(errors.HmoeError) as raised:
        errors.check_choice(value, valid, "name")
    assert (f"Did you mean '{similar}'?" in str(raised.value)) == bool(similar)
    assert raised.value.choices == valid
