"""One computing thread, no windows, runs and figures in a temporary folder, and a lock that lets timing tests run alone."""
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

import pytest

from kernels import fresh_kernels, kernel_server, warm_kernels  # noqa: F401, E402

FIRST = "test_notebooks_run.py"


def is_worker(config):
    "True in a process that pytest-xdist started."
    return hasattr(config, "workerinput")


def pytest_configure(config):
    if not is_worker(config):
        os.environ["HMOE_TEST_SESSION"] = tempfile.mkdtemp(prefix="hmoe-tests-")
    for variable in ("HMOE_RUNS", "HMOE_FIGURES", "HMOE_CACHE"):
        folder = Path(os.environ["HMOE_TEST_SESSION"]) / f"{variable.lower()}-{os.getpid()}"
        folder.mkdir()
        os.environ[variable] = str(folder)


def pytest_unconfigure(config):
    if not is_worker(config):
        shutil.rmtree(os.environ["HMOE_TEST_SESSION"], ignore_errors=True)


def pytest_collection_modifyitems(items):
    "Notebooks first, because they take longest; timing tests last."
    items.sort(key=lambda item: (item.get_closest_marker("serial") is not None, item.path.name != FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    "What `-n auto` means: a worker for each processor, at most four."
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "Notebooks are spread over the workers; any other file stays with one, so that its fixtures are made once."
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return nodeid if file.endswith(FIRST) else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@contextlib.contextmanager
def turn(alone):
    "Hold a lock shared with the other workers' tests, or, if `alone`, one that waits for them to finish and keeps them from starting."
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(Path(os.environ["HMOE_TEST_SESSION"]) / "turn", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    with turn(item.get_closest_marker("serial") is not None):
        return (yield)


@pytest.fixture(scope="session")
def root():
    "The repository."
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def copy_of_tree(root, tmp_path):
    "A copy of what export, cleaning and the notebooks need, so that a test cannot touch the repository."
    target = tmp_path / "tree"
    for name in ("nbs", "hmoe_repro", "results"):
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "_*.ipynb", "*.part"))
    for name in ("settings.ini", "pyproject.toml", "README.md"):
        if (root / name).exists():
            shutil.copy(root / name, target / name)
    return target
