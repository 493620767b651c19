"""Set-up: every version pinned and admitted by the ranges,
a Makefile that redoes an interrupted install, one version number."""

import ast
import configparser
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packages import PROJECT, normal, pins, requirements
from packaging.requirements import Requirement

PYTHONS = ("3.11.9", "3.13.1")
TARGETS = (
    "reproduce",
    "test",
    "test-slow",
    "check",
    "figures",
    "notebooks",
    "book",
    "archive",
    "clean",
)


def pinned(python):
    "Package -> pinned version for one version of Python."
    place = {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
    chosen = [r for r in pins() if not r.marker or r.marker.evaluate(place)]
    versions = {normal(r.name): str(r.specifier).removeprefix("==") for r in chosen}
    assert len(versions) == len(chosen), "a package is pinned twice"
    return versions


def test_every_line_of_the_constraints_is_one_exact_version():
    inexact = [str(r) for r in pins() if not re.fullmatch(r"==[\w.!]+", str(r.specifier))]
    assert not inexact
    assert len(pins()) > 100


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_satisfy_the_ranges(python):
    versions = pinned(python)
    for extra in (
        "dependencies",
        "notebooks",
        "test",
        "ray",
        "book",
        "browser",
        "export",
        "loggers",
        "check",
    ):
        for need in requirements(extra):
            assert need.specifier.contains(versions[normal(need.name)], prereleases=True), (
                f"{need} on Python {python}"
            )
    assert PROJECT["requires-python"] == ">=3.11"


def test_everything_installed_for_the_project_is_pinned(root):
    if not (root / ".venv").exists() or not os.path.samefile(sys.prefix, root / ".venv"):
        pytest.skip("not in the environment that the Makefile makes")
    versions, seen, waiting = (
        pinned("{}.{}.{}".format(*sys.version_info)),
        set(),
        [(normal(PROJECT["name"]), ("dev",))],
    )
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for need in map(Requirement, metadata.requires(name) or []):
            if not need.marker or any(need.marker.evaluate({"extra": e}) for e in ("", *extras)):
                waiting.append((normal(need.name), tuple(sorted(need.extras))))
    names = {name for name, _ in seen} - {normal(PROJECT["name"])}
    assert len(names) > 100
    assert not {
        n: metadata.version(n)
        for n in names
        if versions.get(n) != metadata.version(n).partition("+")[0]
    }


def test_the_version_is_stated_once_for_all(root):
    settings = configparser.ConfigParser()
    settings.read(root / "settings.ini")
    tree = ast.parse((root / "hmoe_repro" / "__init__.py").read_text(encoding="utf-8"))
    stated = [
        ast.literal_eval(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and n.targets[0].id == "__version__"
    ]
    assert stated == [settings["DEFAULT"]["version"]]
    assert PROJECT["dynamic"] == ["version"]
    assert f"## {stated[0]}" in (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {stated[0]}\n" in (root / "CITATION.cff").read_text(encoding="utf-8")


def test_nbdev_reads_the_settings_that_protect_notebooks(root):
    settings = configparser.ConfigParser()
    settings.read(root / "settings.ini")
    wanted = {
        "allowed_cell_metadata_keys": "tags",
        "clear_all": "False",
        "update_pyproject": "False",
        "recursive": "True",
        "nbs_path": "nbs",
        "lib_path": "hmoe_repro",
    }
    assert {k: settings["DEFAULT"][k] for k in wanted} == wanted
    assert (root / "settings.ini").read_text(encoding="utf-8").endswith("\n")


def test_the_citation_names_the_papers(root):
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert {i["value"] for r in citation["references"] for i in r["identifiers"]} >= {
        f"arXiv:{n}" for n in ("2211.08253", "2206.04046", "2008.12839", "2007.01434")
    }
    assert all(
        a.keys() >= {"given-names", "family-names"}
        for r in citation["references"]
        for a in r["authors"]
    )


def test_continuous_integration_calls_make_test(root):
    script = root / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert "make test" in script.read_text(encoding="utf-8")


# The Makefile, with a stand-in for Python that writes down how it was called.

STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
case "$*" in
  *venv*)  rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/hmoe ;;
  *pip*)   test ! -e "{log}.broken" ;;
  *pytest*|*reproduce*) exit $(cat "{log}.status" 2>/dev/null || echo 0) ;;
esac
"""


@pytest.fixture
def make(root, tmp_path):
    """`make` in a folder of its own;
    called with a target, it returns the finished process and what was run."""
    if not shutil.which("make"):
        pytest.skip("there is no make here")
    folder, log = tmp_path / "a place", tmp_path / "log"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, folder / name)
    for name in (".ci", "hmoe_repro", "nbs", "tests"):
        (folder / name / "__pycache__").mkdir(parents=True)
    python = tmp_path / "standin"
    python.write_text(STAND_IN.format(log=log))
    python.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}

    def call(target, cwd=folder):
        log.write_text("")
        done = subprocess.run(
            ["make", target, f"PYTHON={python}"],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done, log.read_text().splitlines()

    call.folder, call.log = folder, log
    return call


def test_a_second_call_installs_nothing(make):
    done, first = make("test")
    assert done.returncode == 0, done.stderr
    assert len(first) == 3
    assert "venv" in first[0]
    assert "constraints.txt" in first[1]
    assert "pytest" in first[2]
    assert len(make("test")[1]) == 1


def test_an_interrupted_install_is_done_again(make):
    broken = make.log.with_name("log.broken")
    broken.touch()
    done, _ = make("test")
    assert done.returncode
    assert not (make.folder / ".venv" / ".ready").exists()
    broken.unlink()
    assert ["venv" in line for line in make("test")[1]] == [True, False, False]


def test_an_edited_pin_is_installed_and_a_moved_folder_starts_again(make):
    make("test")
    later = (make.folder / ".venv" / ".ready").stat().st_mtime + 5
    os.utime(make.folder / "constraints.txt", (later, later))
    assert ["pip" in line for line in make("test")[1]] == [True, False]
    moved = make.folder.rename(make.folder.with_name("another place"))
    assert ["venv" in line for line in make("test", moved)[1]][0]


@pytest.mark.parametrize("target", ["test", "reproduce"])
def test_time_is_printed_and_failure_passed_on(make, target):
    make.log.with_name("log.status").write_text("0")
    done, _ = make(target)
    assert done.returncode == 0
    assert re.search(rf"make {target}: \d+ s", done.stdout.splitlines()[-1])
    make.log.with_name("log.status").write_text("1")
    done, _ = make(target)
    assert done.returncode
    assert re.search(rf"make {target}: \d+ s", done.stdout)


def test_the_targets_are_there(make):
    shown = make("help")[0].stdout
    assert all(f"make {target}" in shown for target in TARGETS)
    for target in TARGETS:
        done, _ = make(target)
        assert done.returncode == 0, done.stderr
    left = {p.relative_to(make.folder).as_posix() for p in make.folder.rglob("*")}
    assert ".venv" not in left, "clean comes last"
    assert "nbs" in left, "clean comes last"
    assert "nbs/__pycache__" not in left, "clean comes last"


def test_the_lock_of_uv_has_the_pinned_versions_of_what_numbers_depend_on(root):
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    lock = tomllib.loads((root / "uv.lock").read_text("utf-8"))
    versions = {package["name"]: package.get("version") for package in lock["package"]}
    pins = pinned("3.11.7")
    constraints = [Requirement(line) for line in project["tool"]["uv"]["constraint-dependencies"]]
    assert {"torch", "torchvision", "numpy"} < {need.name for need in constraints}
    for need in constraints:
        assert str(need.specifier) == f"=={pins[need.name]}"
        assert versions[need.name] == pins[need.name]
    urls = set(re.findall(r"[a-z]+://[^/\"]+", (root / "uv.lock").read_text("utf-8")))
    assert urls == {"https://pypi.org", "https://files.pythonhosted.org"}
