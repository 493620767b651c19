"""Fixtures for tests that run notebooks: kernels of `report.warm_kernels`, or an ordinary
one each."""

import pytest

from hmoe_repro.report import warm_kernels as server


@pytest.fixture(scope="session")
def kernel_server():
    "The folder for JUPYTER_PATH in which `python3` is a forked kernel; None off Linux."
    with server.warm_kernels() as folder:
        yield folder


@pytest.fixture(scope="module")
def warm_kernels(kernel_server):
    "Notebooks of this module run in forked kernels."
    with pytest.MonkeyPatch.context() as patch:
        if kernel_server:
            patch.setenv("JUPYTER_PATH", kernel_server)
        yield


@pytest.fixture
def fresh_kernels(warm_kernels, monkeypatch):
    "The next notebooks run in ordinary kernels."
    monkeypatch.delenv("JUPYTER_PATH", raising=False)
