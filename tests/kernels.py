"""Fixtures for tests that run notebooks: the kernels of `warm_kernels`, or an ordinary one each."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().with_name("warm_kernels.py")


@pytest.fixture(scope="session")
def kernel_server():
    """A folder for JUPYTER_PATH in which `python3` is a forked kernel;
    None where nothing forks well."""
    if sys.platform != "linux":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="hmoe-kernels-", dir="/tmp"))  # a socket's path is short
    path, spec = folder / "socket", folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = ["python", "-IS", str(SCRIPT), str(path), "-f", "{connection_file}"]
    described = {"argv": argv, "display_name": "python3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(described))
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), "serve", str(path)], env=environment, stdin=subprocess.PIPE
    )
    while not path.exists() and server.poll() is None:
        time.sleep(0.02)
    assert server.poll() is None, "the server of kernels did not start"
    yield folder
    server.stdin.close()
    server.wait(60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def warm_kernels(kernel_server):
    "Notebooks of this module run in forked kernels."
    with pytest.MonkeyPatch.context() as patch:
        if kernel_server:
            patch.setenv("JUPYTER_PATH", str(kernel_server))
        yield


@pytest.fixture
def fresh_kernels(warm_kernels, monkeypatch):
    "The next notebooks run in ordinary kernels."
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
