"""`hmoe train --dry-run` and `--config FILE`: the options of a run in a file."""

import tomllib

import pytest
from commands import hmoe

RUN = (
    "train --algorithm ERM --dataset DigitDomainsTiny --test-domain photo --network small_cnn "
    "--checkpoint-frequency 5 --device cpu"
).split()


@pytest.fixture
def options(tmp_path):
    "A file of options, as --dry-run prints it."
    done = hmoe(*RUN, "--steps", 11, "--set", "batch_size=8", "--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()
    path = tmp_path / "run.toml"
    path.write_text(done.stdout)
    return path


def dry_run(*arguments, folder):
    done = hmoe("train", *arguments, "--dry-run", folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_printed_file_names_the_same_run(options, tmp_path):
    read = tomllib.loads(options.read_text())
    assert read["test_domains"] == ["photo"]
    assert read["resolution"] == 16
    assert read["hparams"]["batch_size"] == 8
    assert "lr" in read["hparams"]
    assert dry_run("--config", options, folder=tmp_path) == options.read_text()


@pytest.mark.parametrize(
    "more",
    [
        ("--protocol", "dmg", "--epochs", 1),
        ("--algorithm", "HMOE-DN", "--hparams-seed", 2),
        ("--domainbed-compat", "--evaluate", "all:50"),
    ],
)
def test_other_runs_are_printed_completely(tmp_path, more):
    base = [a for a in RUN[1:] if a not in ("--checkpoint-frequency", "5")]
    printed = dry_run(*base, *more, folder=tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(printed)
    assert dry_run("--config", path, folder=tmp_path) == printed


def test_the_command_line_overrides_the_file(options, tmp_path):
    more = ("--config", options, "--seed", 3, "--test-domain", "plain", "--set", "lr=0.25")
    changed = tomllib.loads(dry_run(*more, folder=tmp_path))
    assert changed["trial_seed"] == 3
    assert changed["test_domains"] == ["plain"]
    assert changed["hparams"]["lr"] == 0.25
    assert changed["hparams"]["batch_size"] == 8
    assert changed["steps"] == 11


def test_a_yaml_file_is_read(options, tmp_path):
    yaml = pytest.importorskip("yaml")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tomllib.loads(options.read_text())))
    assert dry_run("--config", path, folder=tmp_path) == options.read_text()


@pytest.mark.parametrize(
    "text, message",
    [
        ("stepz = 3", "steps"),
        ("steps = ", "line 1: not TOML"),
        ("steps = 'many'", "--steps"),
        ("hparams = 3", "[hparams]"),
        ("[hparams]\nlrr = 1", "lrr"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    done = hmoe(*RUN, "--config", path, "--dry-run", folder=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_search_is_not_printed_as_one_run(tmp_path):
    done = hmoe(*RUN, "--n-hparams", 3, "--dry-run", folder=tmp_path)
    assert done.returncode == 1
    assert "--hparams-seed" in done.stderr
