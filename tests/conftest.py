"""What every test stands on: one computing thread, no windows, runs and figures in a temporary
folder, a lock that lets timing tests run alone, an order that is drawn anew each time
(pytest-randomly prints its seed; `--randomly-seed=N` repeats it), and a check that each test leaves
things as they were.
"""

import contextlib
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from hmoe_repro.core.determinism import THREADS, set_determinism

os.environ |= {"MPLBACKEND": "Agg", **dict.fromkeys(THREADS, "1")}
set_determinism("portable")
from kernels import fresh_kernels, kernel_server, warm_kernels  # noqa: F401, E402

FIRST = [  # what takes longest, so that no worker ends with it
    f"test_{name}.py"
    for name in "notebooks_run timm_models gmoe algorithms feature_groups export backbones".split()
]
SLOW = {  # fixtures that build the book, train several runs, or render several pages
    "site",
    "class_slides",
    "states",
    "example",
    "rendered",
    "table1_page",
    "pages_of_tables",
}


def is_worker(config):
    "True in a process that pytest-xdist started."
    return hasattr(config, "workerinput")


def pytest_configure(config):
    config.option.randomly_reset_seed = False  # the generators: `pytest_runtest_setup`, below
    if not is_worker(config):
        os.environ["HMOE_TEST_SESSION"] = tempfile.mkdtemp(prefix="hmoe-tests-")
    for variable in ("HMOE_RUNS", "HMOE_FIGURES", "HMOE_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        folder = Path(os.environ["HMOE_TEST_SESSION"]) / f"{variable.lower()}-{os.getpid()}"
        folder.mkdir()
        os.environ[variable] = str(folder)


def pytest_unconfigure(config):
    if not is_worker(config):
        shutil.rmtree(os.environ["HMOE_TEST_SESSION"], ignore_errors=True)


def pytest_collection_modifyitems(items):
    """The files of `FIRST`, then the shuffled order, timing tests last. Whatever needs one of the
    `SLOW` fixtures is slow."""
    for item in items:
        if SLOW & {*item.fixturenames}:
            item.add_marker("slow")
    place = {name: rank for rank, name in enumerate(FIRST)}
    items.sort(
        key=lambda item: (
            item.get_closest_marker("serial") is not None,
            place.get(item.path.name, len(FIRST)),
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    "What `-n auto` means: a worker for each processor, at most four."
    if hasattr(os, "sched_getaffinity"):
        return min(4, len(os.sched_getaffinity(0)))
    return min(4, os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Notebooks are spread over the workers;
    any other file stays with one, so that its fixtures are made once."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return nodeid if file.endswith(FIRST[0]) else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@contextlib.contextmanager
def turn(alone):
    """Hold a lock shared with the other workers' tests, or, if `alone`,
    one that waits for them to finish and keeps them from starting."""
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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """What a test draws depends on no other test. Data are the same in any order and every time;
    `random`, with which tests choose a moment to kill or a bit to flip, follows the printed seed.
    """
    import numpy as np
    import torch

    random.seed(f"{item.config.getoption('randomly_seed', 0)} {item.nodeid}")
    np.random.seed(0)
    torch.manual_seed(0)


LIBRARY = {"loaded": 0, "modules": {}}


def library():
    "The modules of the library that are imported by now; looked for when something was imported."
    if LIBRARY["loaded"] != len(sys.modules):
        LIBRARY["modules"] = {
            name: m for name, m in list(sys.modules.items()) if name.split(".")[0] == "hmoe_repro"
        }
        LIBRARY["loaded"] = len(sys.modules)
    return LIBRARY["modules"]


def registries():
    """(name, dictionary) for each one in the library written in capitals, such as ALGORITHMS, and
    for what `CONFIG` holds."""
    from hmoe_repro.core.config import CONFIG

    found = {id(vars(CONFIG)): ("CONFIG", vars(CONFIG))}
    found |= {
        id(value): (name, value)
        for module in library().values()
        for name, value in list(vars(module).items())
        if name.isupper() and isinstance(value, dict)
    }
    return list(found.values())


def environment():
    "The environment variables, but for those that pytest, and libraries at their import, set."
    others = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
    return {k: v for k, v in os.environ.items() if not k.startswith(others)}


def changes(name, before, after):
    "What differs between two dictionaries, a line each."

    def same(key):
        return (
            key in before
            and key in after
            and (before[key] is after[key] or before[key] == after[key])
        )

    return [f"{name}[{key!r}]" for key in {**before, **after} if not same(key)]


@contextlib.contextmanager
def left_as_found(who):
    """Fail, and put things back, if the body leaves a registry, an environment variable or the
    working directory changed. A body that imports more of the library may add to its registries."""
    folder, variables, modules = os.getcwd(), environment(), set(library())
    held = [(name, registry, dict(registry)) for name, registry in registries()]
    yield
    left = changes("os.environ", variables, environment())
    for key in {**variables, **environment()}:
        if key in variables:
            os.environ[key] = variables[key]
        else:
            del os.environ[key]
    with contextlib.suppress(FileNotFoundError):
        if os.getcwd() == folder:
            folder = None
    if folder:
        left.append("the working directory")
        os.chdir(folder)
    for name, registry, before in held if modules == set(library()) else ():
        left += changes(name, before, registry)
        registry.clear()
        registry.update(before)
    if left:
        pytest.fail(f"{who} leaves changed: {', '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def file_left_as_found(request):
    "For what the fixtures of a whole file do."
    with left_as_found(f"a fixture of {request.node.name}"):
        yield


@pytest.fixture(autouse=True)
def each_left_as_found(file_left_as_found, request):
    "For what a test and its own fixtures do."
    with left_as_found(request.node.nodeid):
        yield


@contextlib.contextmanager
def names_given_back():
    """Whatever the body registers, or tells the process of, is gone after it."""
    import hmoe_repro.apps.own_images  # noqa: F401 (registers what it needs)
    from hmoe_repro.algorithms import FAMILIES, get_algorithm

    for name in FAMILIES:
        get_algorithm(name)  # so that what an import registers is there by now
    held = [(r, dict(r)) for _, r in registries()]
    yield
    for registry, before in held:
        registry.clear()
        registry.update(before)


@pytest.fixture
def own_names():
    "For a test that registers algorithms or data sets of its own."
    with names_given_back():
        yield


@pytest.fixture(scope="module")
def own_names_of_file():
    "For a fixture of a whole file that does so."
    with names_given_back():
        yield


@pytest.fixture(scope="session")
def root():
    "The repository."
    return Path(__file__).resolve().parent.parent


COPIED = ("nbs", "hmoe_repro", "results", "figures", "docs")


def copied_tree(root, target):
    "Copy into `target` what export, cleaning and the notebooks need."
    for name in COPIED:
        if (root / name).is_dir():
            ignore = shutil.ignore_patterns(
                "__pycache__", ".ipynb_checkpoints", "_*.ipynb", "*.part"
            )
            shutil.copytree(root / name, target / name, ignore=ignore)
    for name in ("settings.ini", "pyproject.toml", "README.md"):
        if (root / name).exists():
            shutil.copy(root / name, target / name)
    return target


@pytest.fixture
def copy_of_tree(root, tmp_path):
    "A copy of what export, cleaning and the notebooks need, for a test that changes it."
    return copied_tree(root, tmp_path / "tree")


@pytest.fixture(scope="session")
def shared_tree(root, tmp_path_factory):
    "The same copy for all tests of a worker that only read it, so that none touches the project."
    return copied_tree(root, tmp_path_factory.mktemp("shared") / "tree")
