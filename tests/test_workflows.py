"""The workflows of the code host, the hooks of pre-commit and `make check` name what exists."""

import json
import re
import sys

import pytest
import yaml
from notebooks import ROOT

sys.path.append(str(ROOT / ".ci"))
import checks  # noqa: E402

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def jobs(path):
    "The jobs of a workflow by name."
    return yaml.safe_load(path.read_text("utf-8"))["jobs"]


def commands(path):
    "Every command line of a workflow."
    for job in jobs(path).values():
        for step in job["steps"]:
            yield from step.get("run", "").splitlines()


def test_there_is_a_workflow_for_tests_nights_the_book_and_releases():
    assert {"tests", "nightly", "pages", "release"} == {path.stem for path in WORKFLOWS}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_uses_actions_of_a_version_and_files_that_exist(path):
    for job in jobs(path).values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
    for command in commands(path):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert re.search(rf"^{target}:", MAKEFILE, re.M), target
        for name in re.findall(r"(?<![\w/])(?:\.ci|tests|docs)/[\w/.-]+", command):
            assert (ROOT / name).exists(), name
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = \[", PROJECT, re.M), extra


def test_tests_run_on_three_systems_and_on_the_declared_pythons():
    matrix = jobs(ROOT / ".github" / "workflows" / "tests.yml")["pinned"]["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest", "windows-latest"]
    first = re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1]
    assert matrix["python"][0] == first


def test_pre_commit_and_make_check_have_one_list():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    hooks = {hook["id"]: hook["entry"] for hook in repository["hooks"]}
    assert list(hooks) == list(checks.CHECKS)
    for name, entry in hooks.items():
        assert entry == f".venv/bin/python .ci/checks.py {name}"
    assert "python .ci/checks.py &&" in MAKEFILE


def test_a_check_fails_if_a_command_does(monkeypatch, capsys):
    python = sys.executable
    good = [[python, "-c", "pass"]]
    bad = [[python, "-c", "raise SystemExit(3)"]]
    monkeypatch.setattr(checks, "CHECKS", {"good": good, "bad": bad})
    assert checks.main(["good"]) == 0
    assert checks.main([]) == 1
    assert checks.main(["nothing"]) == 2
    assert "Valid: good, bad" in capsys.readouterr().out


def test_containers_are_built_by_targets_of_the_makefile():
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text("utf-8"))
    assert (folder / container["build"]["dockerfile"]).exists()
    built = [container["postCreateCommand"]]
    for path in folder.glob("*.Dockerfile"):
        lines = path.read_text("utf-8").splitlines()
        assert any(line.startswith("FROM python:3.") for line in lines)
        built += [line for line in lines if line.startswith("RUN make")]
    targets = [line.rpartition(" ")[2] for line in built]
    assert len(targets) == 3
    for target in targets:
        name = "$(READY)" if target == ".venv/.ready" else target
        assert re.search(rf"^{re.escape(name)}:", MAKEFILE, re.M), target
