"""What conftest promises: the order is drawn from a seed, and a test that leaves traces is
named."""

import os
import re
import shutil
import subprocess
import sys

import pytest

LEAKING = """
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hmoe_repro.algorithms.base import ALGORITHMS

HERE, DRAWN = Path.cwd(), {}

def test_environment(): os.environ["LEFT"] = "1"
def test_folder(tmp_path): os.chdir(tmp_path)
def test_registry(): ALGORITHMS["Mine"] = object
def test_given_back(own_names): ALGORITHMS["Mine"] = object

@pytest.mark.parametrize("i", range(3))
def test_clean(i):
    assert "LEFT" not in os.environ and "Mine" not in ALGORITHMS and Path.cwd() == HERE
    DRAWN[i] = (float(torch.rand(())), float(np.random.rand()))
    assert len(set(DRAWN.values())) == 1
"""
ORDERED = """
import pytest

@pytest.mark.parametrize("i", range(4))
def test_any(i): pass

@pytest.mark.serial
def test_serial(): pass
"""


@pytest.fixture
def pytest_in(root, tmp_path):
    "Run pytest on files in a folder of their own, under this folder's conftest."
    shutil.copyfile(root / "tests" / "conftest.py", tmp_path / "conftest.py")
    quiet = ("-p", "no:cacheprovider", "-p", "no:xdist", "-o", "markers=serial")

    def run(*options, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        paths = (str(root), str(root / "tests"), os.environ.get("PYTHONPATH", ""))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", *quiet, *options, str(tmp_path)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        return done.stdout

    return run


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_test_that_leaves_traces_is_named_and_hurts_no_other(pytest_in, seed):
    said = pytest_in("--randomly-seed", seed, test_leaking=LEAKING)
    left = dict(re.findall(r"::(test_\w+) leaves changed: (.*)", said))
    assert left == {
        "test_environment": "os.environ['LEFT']",
        "test_registry": "ALGORITHMS['Mine']",
        "test_folder": "the working directory",
    }, said
    assert "7 passed, 3 errors" in said and f"Using --randomly-seed={seed}" in said


def test_files_stay_whole_notebooks_come_first_and_serial_tests_last(pytest_in):
    files = {name: ORDERED for name in ("test_a", "test_b", "test_c", "test_notebooks_run")}
    orders = []
    for seed in ("1", "4", "1"):
        said = pytest_in("--co", "-q", "--randomly-seed", seed, **files)
        orders.append(re.findall(r"(test_\w+)\.py::(.*)", said))
        names = [file for file, test in orders[-1] if test != "test_serial"]
        assert len(names) == 16 and names[:4] == ["test_notebooks_run"] * 4
        assert len([1 for a, b in zip(names, names[1:]) if a != b]) == 3
        assert [test for _, test in orders[-1][-4:]] == ["test_serial"] * 4
    assert orders[0] == orders[2] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert [f for f, _ in orders[0]] != [f for f, _ in orders[1]]
