"""The page of a study: its numbers, its figures, what is missing, and what it needs to be shown."""

import re

import pytest

from hmoe_repro.analysis.results import frame_of, load_study, with_omitted_defaults
from hmoe_repro.analysis.statistics import contrasts
from hmoe_repro.apps.study_page import environment_table, study_page
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.predictions import PREDICTIONS_FILE
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

STUDY = """
title = "Two algorithms"
algorithms = ["ERM", "IRM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo", "sketch"]
seeds = 2
steps = 10
checkpoint_frequency = 5
network = "small_cnn"

[hparams.all]
batch_size = 8
"""


def stored(records, folder):
    "A store with these records, without weights."
    store = RunStore(folder)
    for record in records:
        store.path(record["run_id"]).mkdir(parents=True)
        store.write(record)
    return store


def test_the_numbers_are_those_of_the_statistics(tmp_path):
    records = load_study("quick-balance")
    page = study_page("quick-balance", stored(records, tmp_path / "runs"), tmp_path)
    text = page.read_text(encoding="utf-8")
    frame = frame_of(records)
    weights = with_omitted_defaults(frame).set_index("run_id")["hparams.lambda_kl"].to_dict()
    for weight in set(weights.values()):
        assert f"lambda_kl={weight}" in text
        part = [r for r in records if weights[r["run_id"]] == weight]
        table = contrasts(frame_of(part), ("HMOE-DN", "mix"))
        for row in table.itertuples():
            assert re.search(rf"<td>{row.difference:.2f}</td>\s*<td>{row.low:.2f}</td>", text)
    assert text.count("<svg") == 2 * len(set(weights.values()))
    assert "script" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text)


def test_missing_runs_are_named_and_counted(tmp_path):
    records = load_study("quick-balance")
    store = stored(records[1:], tmp_path / "runs")
    text = study_page("quick-balance", store, tmp_path).read_text(encoding="utf-8")
    assert records[0]["run_id"] in text
    assert f"{len(records) - 1} runs" in text
    with pytest.raises(HmoeError, match="hmoe sweep quick-balance"):
        study_page("quick-balance", RunStore(tmp_path / "none"), tmp_path)
    with pytest.raises(HmoeError, match="toy"):
        study_page("smoke-toy", store, tmp_path)


def test_saved_predictions_become_confusion_matrices(tmp_path):
    from hmoe_repro.studies.studies import study_configs

    file = tmp_path / "two.toml"
    file.write_text(STUDY)
    store = RunStore(tmp_path / "runs")
    configs = study_configs(file)
    for config in configs:
        run(config, store, save_predictions=config.algorithm == "IRM")
    text = study_page(file, store, tmp_path / "pages").read_text(encoding="utf-8")
    assert "IRM, percent of a class" in text
    assert "ERM, percent of a class" not in text
    assert text.count("<svg") == 3  # differences, curves, confusion of IRM
    for config in configs:
        (store.path(config.run_id) / PREDICTIONS_FILE).unlink(missing_ok=True)
    text = study_page(file, store, tmp_path / "pages").read_text(encoding="utf-8")
    assert "--save-predictions" in text
    assert text.count("<svg") == 2


def test_circumstances_count_the_runs_of_each_commit_and_device():
    records = load_study("quick-balance")[:3]
    records[0] = records[0] | {"environment": records[0]["environment"] | {"commit": "abc"}}
    table = environment_table(frame_of(records))
    assert table.runs.sum() == 3
    assert table[table.commit == "abc"].runs.tolist() == [1]
    bare = frame_of([record | {"environment": {}} for record in records])
    assert environment_table(bare).runs.tolist() == [3]
