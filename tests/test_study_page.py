"""The page of a study: its numbers, its figures, what is missing, and what it needs to be shown."""

import re

import matplotlib.pyplot as plt
import pytest

from hmoe_repro.analysis.results import checkpoints, frame_of, load_study, with_omitted_defaults
from hmoe_repro.analysis.statistics import contrasts
from hmoe_repro.apps.study_page import (
    _curves_figure,
    _losses_not_drawn,
    environment_table,
    protocol_table,
    study_page,
)
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


def test_settings_name_the_algorithms_whose_values_differ():
    records = load_study("quick-balance")[:4]
    for record, algorithm in zip(records, ("A", "A", "B", "B")):
        config = record["config"] | {"algorithm": algorithm, "trial_seed": 0}
        config["hparams"] = config["hparams"] | {"lr": 0.5 if algorithm == "B" else 0.25}
        record["config"] = config
    records[1]["config"]["trial_seed"] = 1
    records[3]["config"]["trial_seed"] = 1
    value = protocol_table(frame_of(records)).set_index("setting").value
    assert value["network"] == "small_cnn"
    assert value["learning rate"] == "0.25 (A), 0.5 (B)"
    assert value["trial seeds"] == "0, 1"
    assert (value["updates"], value["pixels a side"]) == ("701", "16")
    assert value["validation images"] == "not augmented"
    records[2]["config"]["images"] = {"val_augment": True}
    records[3]["config"]["images"] = {"val_augment": True}
    value = protocol_table(frame_of(records)).set_index("setting").value
    assert value["validation images"].startswith("not augmented (A), augmented")


def test_losses_without_a_panel_are_named(tmp_path):
    records = load_study("quick-balance")
    curves = checkpoints(frame_of(records))
    losses = [q for q in curves.quantity.unique() if not q.endswith("_accuracy")]
    assert len(losses) > 2
    drawn = [axis.get_title() for axis in _curves_figure(curves).axes]
    plt.close("all")
    left_out = _losses_not_drawn(curves)
    assert set(losses) - set(drawn) == set(left_out)
    text = study_page("quick-balance", stored(records, tmp_path / "runs"), tmp_path)
    assert f"Logged but not drawn: {', '.join(left_out)}." in text.read_text(encoding="utf-8")


def test_circumstances_count_the_runs_of_each_commit_and_device():
    records = load_study("quick-balance")[:3]
    records[0] = records[0] | {"environment": records[0]["environment"] | {"commit": "abc"}}
    table = environment_table(frame_of(records))
    assert table.runs.sum() == 3
    assert table[table.commit == "abc"].runs.tolist() == [1]
    bare = frame_of([record | {"environment": {}} for record in records])
    assert environment_table(bare).runs.tolist() == [3]
