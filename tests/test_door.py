"""What a newcomer tries first: the version, the module as a program, and the paths that commands
print at their end. The names of the package are in test_public_names.py."""

import inspect
import os
import subprocess
import sys

import pytest
from commands import hmoe
from typer.testing import CliRunner

import hmoe_repro
import hmoe_repro.core.files
from hmoe_repro.cli import data, discover_predict, plan_sweep, select_report, train
from hmoe_repro.cli.app import app
from hmoe_repro.cli.options import path_from_here

TINY = "train --algorithm ERM --dataset DigitDomainsTiny --test-domain photo --network small_cnn"
TRAIN = [*TINY.split(), "--steps", "2", "--set", "batch_size=4", "--device", "cpu"]
WRITERS = {  # those that no test below calls
    select_report: ("publish", "figures", "report", "bench"),
    plan_sweep: ("reproduce",),
    discover_predict: ("discover", "predict"),
    data: ("data_download",),
    train: ("train",),
}


@pytest.mark.parametrize("arguments", [("--version",), ("--version", "list")])
def test_the_version_is_printed_and_nothing_else(arguments, tmp_path):
    done = hmoe(*arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"hmoe_repro {hmoe_repro.__version__}\n")


def test_the_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "hmoe_repro", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"hmoe_repro {hmoe_repro.__version__}\n")


def test_plan_sweep_and_figures_have_the_same_profile():
    commands = plan_sweep.plan_command, plan_sweep.sweep_command, select_report.figures_command
    defaults = [inspect.signature(command).parameters["profile"].default for command in commands]
    assert defaults == ["quick"] * 3


def test_a_path_is_shown_as_it_is_opened_from_here(tmp_path, monkeypatch):
    below = tmp_path / "here"
    below.mkdir()
    monkeypatch.chdir(below)
    assert path_from_here(below / "runs" / "a.csv") == os.path.join("runs", "a.csv")
    assert path_from_here("a.csv") == "a.csv"
    assert path_from_here(tmp_path / "elsewhere") == str(tmp_path / "elsewhere")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A folder with a trained run, its id, and what the command printed."
    folder = tmp_path_factory.mktemp("trained")
    done = hmoe(*TRAIN, folder=folder)
    assert done.returncode == 0, done.stderr
    (run,) = [path.name for path in (folder / "runs").iterdir() if path.is_dir()]
    return folder, run, done.stdout


def test_training_ends_with_the_folder_of_the_run(trained):
    folder, run, said = trained
    assert said.splitlines()[-1] == f"wrote {os.path.join('runs', run)}"


@pytest.mark.parametrize(
    "command, written",
    [
        ("select --study quick-digits --output chosen.csv", "chosen.csv"),
        ("new-algorithm MyLoss", "MyLoss.py"),
        ("pack runs.tar.gz --overwrite", "runs.tar.gz"),
        ("export-domainbed sweep", "sweep"),
        ("export {run} --output model", "model"),
        ("unpack runs.tar.gz", "runs"),
    ],
)
def test_a_command_that_writes_ends_with_a_path_that_can_be_opened(trained, command, written):
    folder, run, _ = trained
    words = command.format(run=run).split()
    more = {}
    if words[0] == "select":  # the published records
        more["HMOE_RESULTS"] = str(hmoe_repro.core.files.repo_root() / "results")
    if words[0] == "export-domainbed":
        assert hmoe(*TRAIN, "--evaluate", "all", folder=folder).returncode == 0
        words += ["--where", "evaluate=all"]
    if words[0] == "unpack":
        assert hmoe("pack", "runs.tar.gz", "--overwrite", folder=folder).returncode == 0
    done = hmoe(*words, folder=folder, **more)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert written in last.split()
    assert (folder / written).exists()


def test_a_sweep_ends_with_how_it_ended_and_the_folder_of_the_runs(tmp_path, monkeypatch):
    """Without training: the time is up at once, and is counted from the start of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    left = []
    monkeypatch.setattr("hmoe_repro.studies.sweep._train", lambda queue, how: left.append(how))
    done = CliRunner().invoke(app, ["sweep", "smoke-toy", "--device", "cpu", "--minutes", "5"])
    first, *_, summary, last = done.output.splitlines()
    assert done.exit_code == 0
    assert first == "smoke-toy: 9 runs, 9 to train on cpu"
    assert summary.startswith("0 of 9 runs complete, 9 unfinished (0 begun)")
    assert last == "wrote runs"
    assert 4 < left[0].minutes < 5
    assert left[0].stop_kind_after_failure


@pytest.mark.parametrize("module, names", WRITERS.items(), ids=lambda value: str(value)[-40:-20])
def test_other_commands_that_write_name_what_they_wrote(module, names):
    for name in names:
        source = inspect.getsource(getattr(module, f"{name}_command"))
        named = ("print_written(", "path_from_here(", "_say_page(")  # the last prints the page
        assert any(function in source for function in named), name
