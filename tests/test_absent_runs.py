"""`hmoe select STUDY` with runs that were never trained: no table looks complete that is not."""

import re

import pytest
from typer.testing import CliRunner

from hmoe_repro.analysis.results import load_study
from hmoe_repro.cli.app import app
from hmoe_repro.report.study_report import absent_notes
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.studies.sweep import sweep

STUDY = """
title = "Some runs are missing"
algorithms = ["ERM", "CORAL"]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo", "sketch"]
seeds = 3
steps = 2
checkpoint_frequency = 1
network = "small_cnn"
[hparams.all]
batch_size = 4
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    "The file of a study of 12 runs, and their configurations."
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(STUDY)
    return study_configs(tmp_path / "mine.toml")


def of(configs, keep):
    "As much of records as is compared with a study."
    return [{"run_id": config.run_id} for config in configs if keep(config)]


def missing_of(lines):
    "Algorithm -> (which of its runs are missing, their places)."
    found = (re.fullmatch(r"missing: (\S+), (.*) runs: (.*)", line) for line in lines)
    return {match[1]: (match[2], match[3]) for match in found if match}


def test_a_missing_seed_and_a_missing_algorithm_are_named(study):
    assert len(study) == 12
    assert absent_notes("mine.toml", of(study, lambda config: True)) == []
    lines = absent_notes(
        "mine.toml", of(study, lambda s: s.algorithm == "ERM" and s.trial_seed < 2)
    )
    assert "8 of 12 runs of mine" in lines[0]
    assert lines[-1].endswith("hmoe sweep mine.toml")
    missing = missing_of(lines)
    assert missing["ERM"] == ("2 of 6", "photo, seed 2, sketch, seed 2")
    assert missing["CORAL"][0] == "all"
    assert len(missing) == 2
    one = absent_notes("mine.toml", of(study, lambda config: config is not study[5]))
    assert "1 of 12 runs" in one[0]
    assert list(missing_of(one)) == [study[5].algorithm]


def test_only_the_runs_that_were_asked_for_are_counted(study):
    records = of(study, lambda config: config.algorithm == "ERM")
    assert absent_notes("mine.toml", records, algorithms=["ERM"]) == []
    assert absent_notes("mine.toml", records, settings=["trial_seed=7"]) == []
    (first, *_) = absent_notes("mine.toml", records, settings=["test_domain=photo"])
    assert "3 of 6 runs" in first
    assert absent_notes("mine.toml", records, dataset="PACS") == []


def test_select_says_so_before_its_table(study):
    chosen = [s for s in study if s.algorithm == "ERM" and s.trial_seed < 2]
    sweep(chosen, device="cpu", jobs=0)
    said = CliRunner().invoke(app, ["select", "mine.toml"])
    assert said.exit_code == 0, said.output
    assert said.output.index("INCOMPLETE: 8 of 12 runs") < said.output.index("percent")
    assert set(missing_of(said.output.splitlines())) == {"ERM", "CORAL"}
    sweep(study, device="cpu", jobs=0)
    assert "INCOMPLETE" not in CliRunner().invoke(app, ["select", "mine.toml"]).output


def test_a_published_study_is_compared_too(monkeypatch):
    records = load_study("quick-balance")
    assert absent_notes("quick-balance", records) == []
    assert "1 of 6 runs" in absent_notes("quick-balance", records[1:])[0]
    monkeypatch.setenv("HMOE_DATA", "nowhere")
    (line,) = absent_notes("pacs-photo", [])
    assert line.startswith("not checked for missing runs: ")
    assert "PACS" in line
