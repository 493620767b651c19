"""From pip to a page: the wheel has what the clone has, and outside the clone it compares three
algorithms on a folder of images."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pandas as pd
import pytest

from hmoe_repro.data.image_folder import sample_tree

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_names")]
STUDY = """title = "three algorithms on my images"
algorithms = ["ERM", "CORAL", "HMOE-DN"]
datasets = ["my_images"]
test_domains = "all"
seeds = 1
steps = 4
checkpoint_frequency = 2
network = "image_cnn"
resolution = 16
hparams.all = { batch_size = 2 }
"""


@pytest.fixture(scope="module")
def built(root, tmp_path_factory):
    "A folder with the sources that a wheel is made of, and `dist` with the wheel."
    folder = tmp_path_factory.mktemp("sources")
    junk = shutil.ignore_patterns("__pycache__", "_*.ipynb", ".ipynb_checkpoints")
    for name in ("hmoe_repro", "nbs/paper"):
        shutil.copytree(root / name, folder / name, ignore=junk)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", "dist", "."], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def outside(built, tmp_path_factory):
    """Runs a program of a bare environment, in a folder that is no clone: the library is that of
    the wheel, the libraries that it needs are those of this environment."""
    folder = tmp_path_factory.mktemp("outside")
    bare = folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    pip = [sys.executable, "-m", "pip", "--python", bare / "bin" / "python", "install", "-q"]
    (wheel,) = (built / "dist").iterdir()
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    (packages,) = (bare / "lib").glob("*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    ours = ("PYTHON", "HMOE_", "VIRTUAL_ENV")
    bare_environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}

    def call(program, *arguments):
        return subprocess.run(
            [bare / "bin" / program, *arguments],
            cwd=folder,
            env=bare_environment,
            capture_output=True,
            text=True,
        )

    call.folder = folder
    return call


def test_the_wheel_has_every_file_of_the_package_and_all_pages(built):
    (wheel,) = (built / "dist").iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    there = {p.relative_to(built).as_posix() for p in (built / "hmoe_repro").rglob("*.*")}
    there |= {f"hmoe_repro/pages/{p.name}" for p in (built / "nbs" / "paper").glob("*.ipynb")}
    kinds = {name.rpartition(".")[2] for name in there}
    suffixes = {"py", "toml", "csv", "mplstyle", "html", "css", "js", "md", "txt", "ipynb", "typed"}
    assert kinds == suffixes
    assert not there - names


def test_three_algorithms_are_compared_from_outside_a_clone(outside):
    found = outside("python", "-c", "import hmoe_repro; print(hmoe_repro.__file__)")
    assert found.stdout.startswith(str(outside.folder)), found.stderr
    sample_tree(outside.folder / "my_images", per_class=4, size=24)
    (outside.folder / "study.toml").write_text(STUDY)
    how = {"seeds": 2, "steps": 4, "resolution": 16, "hparams": {"batch_size": 2}, "jobs": 1}
    call = f'hmoe_repro.compare(["ERM", "CORAL", "HMOE-DN"], "my_images", **{how})'
    code = f"import hmoe_repro; found = {call}; print(found); found.save()"
    done = outside("python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert "HMOE-DN" in (outside.folder / "comparison.html").read_text()
    for name in ("ERM", "CORAL", "HMOE-DN"):
        assert name in done.stdout
    commands = ["sweep study.toml --jobs 2", "report study.toml", "report study.toml --notebook"]
    for command in commands:
        done = outside("hmoe", *command.split())
        assert done.returncode == 0, done.stderr
    page = (outside.folder / "reports" / "study.html").read_text(encoding="utf-8")
    assert all(f"<td>{name}</td>" in page for name in ("ERM", "CORAL", "HMOE-DN"))
    table = pd.read_csv(outside.folder / "reports" / "study" / "study.csv")
    assert set(table.iloc[:, 0].str.split(" ").str[0]) >= {"ERM", "CORAL", "HMOE-DN"}
    assert (outside.folder / "reports" / "study" / "study.ipynb").stat().st_size > 10_000


def test_what_needs_a_clone_says_so_before_anything_is_trained(outside):
    for command in ("reproduce", "figures", "select --study quick-digits"):
        done = outside("hmoe", *command.split())
        assert done.returncode == 1, done.stdout
        assert "are in a clone of the project, not in the installed package. Fix:" in done.stderr
    planned = outside("hmoe", "plan", "hmoe_fig3")
    assert re.search(r"quick-toy +(\d+) +\1 +not measured", planned.stdout), planned.stderr
    assert "minutes" not in planned.stdout
    assert "memory" not in planned.stdout
