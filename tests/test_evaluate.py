"""Measures of predictions by hand, evaluation of runs and studies, the page and the command."""

import re
import subprocess
import sys

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from nbclient import NotebookClient
from PIL import Image
from typer.testing import CliRunner

import hmoe_repro as hm
from hmoe_repro.analysis import measures
from hmoe_repro.analysis.statistics import contrasts
from hmoe_repro.apps.compare import compare
from hmoe_repro.apps.evaluate import (
    Evaluated,
    _reliability_figure,
    _worst_images,
    evaluate,
    predictions,
    text_of_measures,
)
from hmoe_repro.cli.app import app
from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import repo_root
from hmoe_repro.core.style import ALGORITHM_COLOURS
from hmoe_repro.data import registry
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.predictions import PREDICTIONS_FILE, read_predictions
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore


def made_by_hand():
    "Predictions of seven images of two classes, with probabilities that can be summed on paper."
    rows = [  # label, predicted, probability of the predicted class, role, group
        ("cat", "cat", 0.9, "test", "a"),
        ("cat", "cat", 0.6, "test", "a"),
        ("cat", "dog", 0.8, "test", "b"),
        ("dog", "dog", 0.7, "test", "b"),
        ("dog", "dog", 0.95, "validation", "a"),
        ("cat", "cat", 0.85, "validation", "b"),
        ("dog", "cat", 0.75, "validation", "b"),
    ]
    frame = pd.DataFrame(rows, columns=["label", "predicted", "probability", "role", "meta.group"])
    for column in ("label", "predicted"):
        frame[column] = pd.Categorical(frame[column], ["cat", "dog", "fox"])
    frame["correct"] = frame.label.astype(str) == frame.predicted.astype(str)
    of_label = frame.probability.where(frame.correct, 1 - frame.probability)
    frame["loss"] = -np.log(of_label)
    frame["brier"] = 2 * (1 - of_label) ** 2
    frame["energy"] = frame.probability
    frame["domain"] = pd.Categorical(frame.role)
    return frame


def test_scores_of_a_group_are_those_on_paper():
    table = measures.measure_images(made_by_hand(), "role").set_index("role")
    test = table.loc["test"]
    assert test.images == 4
    assert test.accuracy == 0.75
    assert test.balanced_accuracy == pytest.approx((2 / 3 + 1) / 2)
    assert (test.worst_class, test.worst_class_accuracy) == ("cat", pytest.approx(2 / 3))
    assert test.nll == pytest.approx(-np.log([0.9, 0.6, 0.2, 0.7]).mean())
    assert test.brier == pytest.approx(np.mean([0.02, 0.32, 1.28, 0.18]))
    # each image is alone in its bin of width 1/15
    assert test.ece == pytest.approx((0.1 + 0.4 + 0.8 + 0.3) / 4)


def test_calibration_sums_over_bins():
    frame = pd.DataFrame({"probability": [0.5, 0.42, 0.9, 1.0], "correct": [1, 0, 1, 1]})
    frame = frame.assign(label="a", predicted="a", loss=0.0)
    table = measures.reliability(frame, bins=2)
    assert table.images.tolist() == [2, 2]  # 0.5 belongs to the lower bin
    assert table.accuracy.tolist() == [0.5, 1.0]
    assert measures.calibration_error(frame, 2) == pytest.approx(0.5 * 0.04 + 0.5 * 0.05)
    assert measures.calibration_error(frame.assign(probability=1.0, correct=1)) == 0


def test_confusion_counts_labels_by_rows_and_keeps_classes_without_images():
    frame = made_by_hand()
    counts = measures.confusion_matrix(frame)
    assert counts.loc["cat", "dog"] == 1
    assert counts.loc["dog", "cat"] == 1
    assert counts.to_numpy().sum() == len(frame)
    assert counts.loc["fox"].sum() == 0
    fractions = measures.confusion_matrix(frame, normalise=True)
    assert fractions.loc["cat", "cat"] == 0.75
    assert fractions.loc["fox"].isna().all()


def test_worst_group_and_detection():
    frame = made_by_hand()
    of_test = frame[frame.role == "test"]
    worst = measures.worst_group(of_test, "meta.group")
    assert (worst["meta.group"], worst.accuracy) == ("b", 0.5)
    with pytest.raises(HmoeError) as caught:
        measures.worst_group(of_test, "meta.grup")
    assert "meta.group" in str(caught.value)
    areas = measures.detection(frame)
    seen, unseen = [0.95, 0.85, 0.75], [0.9, 0.6, 0.8, 0.7]
    pairs = [s > u for s in seen for u in unseen]
    assert areas["auroc_msp"] == pytest.approx(np.mean(pairs))
    assert np.isnan(measures.detection(of_test)["auroc_msp"])


def test_top_losses_come_first():
    assert measures.top_losses(made_by_hand(), 2).probability.tolist() == [0.8, 0.75]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    "ERM and IRM on two test domains of the tiny digits, two seeds."
    store = RunStore(tmp_path_factory.mktemp("runs"))
    short = dict(steps=20, jobs=1, network="small_cnn", store=store, hparams={"batch_size": 8})
    return compare(["ERM", "IRM"], "DigitDomainsTiny", 2, ["sketch", "photo"], **short)


def test_measures_of_runs_are_those_of_their_files(compared):
    evaluated = evaluate(compared)
    frame = evaluated.frame
    assert len(frame) == len(compared.frame) == 8
    for row in frame.itertuples():
        stored = read_predictions(compared.store.path(row.run_id), row.record)
        of_test = torch.tensor([role == "test" for role in stored.role])
        logits = stored.logits_of()[of_test].double().numpy()
        label = stored.label[of_test].numpy()
        weights = np.exp(logits - logits.max(1, keepdims=True))
        probability = weights / weights.sum(1, keepdims=True)
        of_label = probability[np.arange(len(label)), label]
        assert row.nll == pytest.approx(-np.log(of_label).mean(), abs=1e-9)
        one_hot = np.eye(len(stored.class_names))[label]
        assert row.brier == pytest.approx(((probability - one_hot) ** 2).sum(1).mean(), abs=1e-9)
        best, right = probability.max(1), probability.argmax(1) == label
        error = 0.0
        for m in range(15):
            of_bin = (best > m / 15) & (best <= (m + 1) / 15)
            if of_bin.any():
                error += of_bin.mean() * abs(right[of_bin].mean() - best[of_bin].mean())
        assert row.ece == pytest.approx(error, abs=1e-9)
        assert row.accuracy == pytest.approx(right.mean(), abs=1e-12)


def test_confusion_and_tables_are_sums_and_means_over_runs(compared):
    evaluated = evaluate(compared)
    counts = evaluated.confusion("IRM", normalise=False)
    of_test = evaluated.images.query("algorithm == 'IRM' and role == 'test'")
    assert counts.to_numpy().sum() == len(of_test)
    assert np.trace(counts.to_numpy()) == of_test.correct.sum()
    table = evaluated.measured("role").set_index(["algorithm", "role"])
    runs = evaluated.frame[evaluated.frame.algorithm == "IRM"]
    of_seeds = runs.groupby("trial_seed").ece.mean()
    row = table.loc[("IRM", "test")]
    assert (row.runs, row.seeds) == (4, 2)
    assert row.ece == pytest.approx(of_seeds.mean())
    assert row.ece_se == pytest.approx(of_seeds.std(ddof=1) / 2**0.5)
    by_class = evaluated.measured(("role", "label"))
    assert set(by_class.label) == set(map(str, range(10)))


def test_other_measures_are_compared_as_accuracy_is(compared):
    frame = evaluate(compared).frame
    (row,) = contrasts(frame, "ERM", metric="nll").query("test_domain == 'Average'").itertuples()
    of_rows = frame.groupby("algorithm").nll.mean()
    assert row.difference == pytest.approx(of_rows["IRM"] - of_rows["ERM"])


def test_every_kind_of_source_gives_the_same_images(compared, tmp_path):
    ids = list(dict.fromkeys(compared.frame.run_id))
    expected = hm.predictions(compared)
    folder = compared.store.folder
    for source in (compared.frame, folder, str(folder)):
        images = predictions(source, store=compared.store)
        assert sorted(images.run_id) == sorted(expected.run_id)
    some = predictions([ids[0][:8], ids[1]], store=compared.store)
    assert set(some.run_id) == set(ids[:2])
    train = predictions(ids[0], roles="train", store=compared.store)
    assert set(train.role) == {"train"}
    for wrong in ("no-such-study", "ffffffffffff", tmp_path):
        with pytest.raises(HmoeError):
            predictions(wrong, store=compared.store)
    with pytest.raises(HmoeError) as caught:
        predictions(ids[0], roles="tests", store=compared.store)
    assert "validation" in str(caught.value)


def test_a_run_without_weights_or_predictions_says_so(compared, tmp_path):
    run_id = compared.frame.run_id.iloc[0]
    store = RunStore(tmp_path)
    store.write(compared.store.read(run_id))
    with pytest.raises(HmoeError, match="weights"):
        evaluate(run_id, store=store)


@pytest.mark.slow
def test_the_page_is_whole_and_needs_nothing(compared, tmp_path):
    path = evaluate(compared).save(tmp_path / "new" / "page.html")
    text = path.read_text(encoding="utf-8")
    assert "script" not in text
    addresses = re.findall(r'(?:src|href)="([^"]{1,40})', text)
    assert len(addresses) == 5  # two confusions, two sheets, one diagram
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    for run_id in compared.frame.run_id:
        assert run_id in text
    by_class = text.split("<h2>By class</h2>")[1].split("</table>")[0]
    rows = [re.findall(r"<td>(.*?)</td>", row)[:4] for row in by_class.split("<tr>")[1:]]
    expected = []
    for role in ("test", "validation"):
        for name in ("ERM", "IRM"):
            expected += [[name, "default", role, str(i)] for i in range(10)]
    assert rows == [row for row in expected if row in rows]  # a class may have no image
    assert len(rows) > 30
    files = evaluate(compared).save_tables(tmp_path / "tables")
    images = pd.read_csv(next(f for f in files if f.name == "images.csv"))
    assert len(images) == len(hm.predictions(compared))


@pytest.mark.slow
def test_the_command_trains_keeps_and_measures(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CONFIG, "save_predictions", False)
    train = "train --algorithm ERM --dataset DigitDomainsTiny --test-domain sketch"
    train += " --network small_cnn --steps 10 --set batch_size=8 --save-predictions"
    done = CliRunner().invoke(app, train.split())
    assert done.exit_code == 0, done.output
    ((folder),) = [p for p in (tmp_path / "runs").iterdir() if p.is_dir()]
    assert (folder / PREDICTIONS_FILE).exists()
    assert RunStore(tmp_path / "runs").read(folder.name)["predictions"]["images"] > 0
    arguments = ["evaluate", folder.name[:6], "--by", "domain", "--tables", "tables"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "evaluation.html").exists()
    assert (tmp_path / "tables" / "by_class.csv").exists()
    (folder / PREDICTIONS_FILE).unlink()
    again = CliRunner().invoke(app, train.split())  # finished: predicted from its weights
    assert again.exit_code == 0, again.output
    assert (folder / PREDICTIONS_FILE).exists()


def test_the_ece_of_the_diagram_is_that_of_the_table(compared):
    evaluated = evaluate(compared)
    figure = _reliability_figure(evaluated)
    (axis,) = figure.axes
    lines, texts = axis.get_legend_handles_labels()
    table = evaluated.measured("role").query("role == 'test'").set_index("algorithm")
    assert texts == [f"{name}, ECE {table.ece[name]:.3f}" for name in ("ERM", "IRM")]
    assert lines[0].get_color() == ALGORITHM_COLOURS["ERM"]
    pooled = measures.calibration_error(evaluated.images.query("algorithm == 'ERM'"))
    assert f"{pooled:.3f}" not in texts[0]  # of other images, so the test can fail
    plt.close(figure)
    _, axis = plt.subplots()
    measures.plot_reliability(axis, made_by_hand().query("role == 'test'"), "by hand")
    assert axis.get_legend_handles_labels()[1] == ["by hand, ECE 0.400"]
    plt.close(axis.figure)


def run_rows(run_id, seed, test_domain, correct):
    "Test images of a run, of two groups: four of group a, then two of group b."
    rows = pd.concat([made_by_hand().iloc[:1]] * 6, ignore_index=True)
    rows = rows.assign(run_id=run_id, algorithm="ERM", mode="default", dataset="D")
    rows = rows.assign(test_domain=test_domain, trial_seed=seed, correct=correct)
    return rows.assign(**{"meta.group": list("aaaabb")})


def test_the_worst_group_is_the_one_of_each_run():
    images = pd.concat(
        [
            run_rows("r0", 0, "x", [1, 1, 1, 0, 1, 0]),  # a 0.75, b 0.5
            run_rows("r1", 0, "y", [1, 0, 0, 0, 1, 1]),  # a 0.25, b 1.0
            run_rows("r2", 1, "x", [1, 1, 1, 1, 0, 0]),  # a 1.0, b 0.0
            run_rows("r3", 1, "y", [1, 1, 1, 1, 1, 0]),  # a 1.0, b 0.5
        ],
        ignore_index=True,
    )
    (row,) = Evaluated(images, [], None).worst_group("meta.group").itertuples()
    of_seeds = [(0.5 + 0.25) / 2, (0.0 + 0.5) / 2]
    assert (row.role, row.runs, row.seeds, row.worst_group) == ("test", 4, 2, "b")
    assert row.worst_group_accuracy == pytest.approx(np.mean(of_seeds))
    assert row.worst_group_accuracy_se == pytest.approx(abs(of_seeds[0] - of_seeds[1]) / 2)
    assert measures.worst_group(images, "meta.group").accuracy == pytest.approx(0.5)  # pooled
    with pytest.raises(HmoeError):
        Evaluated(images, [], None).worst_group("meta.grup")


def test_differences_and_detection_are_those_of_the_frame(compared):
    evaluated = evaluate(compared)
    table = evaluated.differences()
    assert list(dict.fromkeys(table.measure)) == ["accuracy", "nll", "brier", "ece"]
    frame = evaluated.frame
    means = frame.groupby("algorithm")[["accuracy", "ece"]].mean().loc["IRM"]
    means = means - frame.groupby("algorithm")[["accuracy", "ece"]].mean().loc["ERM"]
    average = table[table.test_domain == "Average"].set_index("measure")
    assert average.difference["ece"] == pytest.approx(means.ece)
    assert average.difference["accuracy"] == pytest.approx(100 * means.accuracy)
    assert average.unit["accuracy"] == "points"
    assert average.corrected_for.tolist() == [1] * 4
    assert set(table[table.test_domain != "Average"].corrected_for) == {2}
    detected = evaluated.detected.set_index("algorithm")
    of_seeds = frame[frame.algorithm == "IRM"].groupby("trial_seed").auroc_energy.mean()
    assert detected.auroc_energy["IRM"] == pytest.approx(of_seeds.mean())
    assert detected.auroc_energy_se["IRM"] == pytest.approx(of_seeds.std(ddof=1) / 2**0.5)
    alone = evaluate(list(frame[frame.algorithm == "ERM"].run_id), store=compared.store)
    with pytest.raises(HmoeError):
        alone.differences()


def test_all_frames_are_written_as_tables(compared, tmp_path):
    evaluated = evaluate(compared)
    written = {f.stem: pd.read_csv(f) for f in evaluated.save_tables(tmp_path / "tables")}
    cells = written["confusion"].query("algorithm == 'IRM'")
    assert cells.images.sum() == len(evaluated.images.query("algorithm == 'IRM' & role == 'test'"))
    right = cells[cells.label == cells.predicted].images.sum()
    assert right == np.trace(evaluated.confusion("IRM", normalise=False))
    bins = written["reliability"].query("algorithm == 'IRM'")
    assert bins.images.tolist() == evaluated.reliability("IRM").images.tolist()
    assert len(written["differences"]) == len(evaluated.differences())
    assert written["detection"].algorithm.tolist() == ["ERM", "IRM"]
    one = evaluate(compared.frame.run_id.iloc[0], store=compared.store)
    names = {f.stem for f in one.save_tables(tmp_path / "one")}
    assert names == set(written) - {"differences"}


def test_logits_of_predictions_are_those_of_the_file(compared):
    run_id = compared.frame.run_id.iloc[0]
    images = predictions(run_id, roles="test", store=compared.store, logits=True)
    stored = read_predictions(compared.store.path(run_id))
    of_test = torch.tensor([role == "test" for role in stored.role])
    names = [f"logit {name}" for name in stored.class_names]
    assert np.array_equal(images[names].to_numpy(), stored.logits_of()[of_test].double().numpy())
    assert "logit 0" not in predictions(run_id, store=compared.store)


def test_an_image_is_shown_once_and_tables_by_class_repeat_nothing(compared):
    evaluated = evaluate(compared)
    of_test = evaluated.images.query("algorithm == 'ERM' and role == 'test'")
    assert of_test.duplicated(["domain", "id"]).any()  # a seed for each
    worst = _worst_images(of_test, 300)
    assert not worst.duplicated(["domain", "id"]).any()
    largest = of_test.groupby(["domain", "id"], observed=True).loss.max().nlargest(300)
    assert worst.loss.tolist() == pytest.approx(largest.tolist())
    figure = evaluated.contact_sheet(3, "ERM")
    titles = [axis.get_title() for axis in figure.axes]
    for title, row in zip(titles, worst.itertuples()):
        predicted = f"predicted ({row.probability:.0%}): {row.predicted}"
        assert title == f"label: {row.label}\n{predicted}\n{row.id}"
    plt.close(figure)
    by_class = text_of_measures(evaluated.measured(("role", "label")))
    assert not {"balanced", "worst class"} & set(by_class)
    assert {"balanced", "worst class"} <= set(text_of_measures(evaluated.measured("role")))


def write_photos(folder, count):
    "Images of three domains: dark ones of class x and bright ones of class y, some of them close."
    for domain in "abc":
        for label in "xy":
            place = folder / domain / label
            place.mkdir(parents=True)
            for i in range(count):
                shade = (0 if label == "x" else 90) + 160 * i // count
                noise = np.random.default_rng([i, *map(ord, domain + label)])
                pixels = shade + noise.integers(0, 5, (16, 16, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")


def test_a_page_without_the_data_set_has_no_pictures_and_says_so(tmp_path, monkeypatch, own_names):
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos", 10)
    store = RunStore(tmp_path / "runs")
    hparams = {"batch_size": 4}
    options = {"network": "small_cnn", "resolution": 16, "steps": 2, "hparams": hparams}
    config = make_config("ERM", "photos", ["a"], **options)
    record = run(config, store, save_predictions=True)
    evaluated = evaluate(config.run_id, store=store)
    text = evaluated.save("with.html").read_text(encoding="utf-8")
    assert text.count("<img") == 3  # confusion, diagram, sheet
    CONFIG.datasets = ()  # as in a new process, in another folder
    del registry.DATASETS["photos"], registry._OWN["photos"]
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.warns(UserWarning, match="photos"):
        text = evaluated.save(tmp_path / "without.html").read_text(encoding="utf-8")
    assert text.count("<img") == 2
    assert "photos" in text
    with pytest.raises(HmoeError) as caught:
        evaluated.contact_sheet()
    assert "--dataset" not in str(caught.value)
    assert caught.value.choices is None
    assert record["predictions"]["images"] == 60


def test_validation_images_are_those_of_the_record_only_without_augmentation(tmp_path, own_names):
    "The record scores augmented validation images of a folder, predictions never do."
    write_photos(tmp_path / "photos", 40)
    options = {"network": "small_cnn", "resolution": 16, "steps": 60}
    equal = {}
    for augmented in (False, True):
        hparams = {"batch_size": 8, "val_augment": augmented}
        config = make_config(
            "ERM",
            str(tmp_path / "photos"),
            ["a"],
            hparams=hparams,
            checkpoint_frequency=5,
            **options,
        )
        store = RunStore(tmp_path / "runs")
        record = run(config, store, save_predictions=True)
        images = predictions(config.run_id, store=store)
        selected = record["selected"]["default"]
        of_test = images[images.role == "test"].correct.mean()
        assert of_test == pytest.approx(selected["test_accuracy"], abs=1e-12)
        validated = images[images.role == "validation"]
        of_domains = validated.groupby("domain", observed=True).correct.mean()
        point = next(p for p in record["checkpoints"] if p["step"] == selected["step"])
        stated = [point["accuracies"][domain]["out"]["default"] for domain in of_domains.index]
        equal[augmented] = of_domains.tolist() == pytest.approx(stated, abs=1e-12)
    assert equal[False]
    assert not equal[True]


def test_the_script_of_the_docs_gives_the_numbers_of_evaluate(compared, monkeypatch, capsys):
    text = (repo_root() / "docs" / "evaluate.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    (script,) = [block for block in blocks if "safe_open" in block]
    assert "hmoe_repro" not in script
    monkeypatch.chdir(compared.store.folder.parent)
    for row in evaluate(compared).frame.itertuples():
        found = {}
        folder = compared.store.path(row.run_id).as_posix()
        exec(script.replace("runs/RUN", folder), found)
        assert found["accuracy"] == pytest.approx(row.accuracy, abs=1e-9)
        assert found["ece"] == pytest.approx(row.ece, abs=1e-9)
        assert f"ECE {row.ece:.4f}" in capsys.readouterr().out


# Memory

MEASURED = """
import os, resource, sys, tempfile
from pathlib import Path

import torch

import hmoe_repro as hm

work = tempfile.TemporaryDirectory()
os.environ["HMOE_RUNS"] = work.name


def peak():
    "The most memory that this process has used so far, in MiB."
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


size = int(sys.argv[1]) // 3
labels = torch.arange(size) % 7
images = torch.arange(size * 3 * 16 * 16).to(torch.uint8).reshape(size, 3, 16, 16)
data = {domain: (images, labels, {"camera": labels % 3}) for domain in "abc"}
options = {"test_domains": ["a"], "steps": 2, "network": "small_cnn", "jobs": 1}
compared = hm.compare(["ERM"], data, seeds=1, save_predictions=True, **options)
before = peak()
evaluated = hm.evaluate(compared)
evaluated.measured(("role", "meta.camera"))
evaluated.save(Path(work.name) / "page.html")
print(len(evaluated.images), round(peak() - before))
work.cleanup()
"""


@pytest.mark.slow
def test_an_evaluation_of_twelve_thousand_images_needs_little_memory():
    pytest.importorskip("resource")  # not on Windows
    command = [sys.executable, "-c", MEASURED, "30000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    images, grown = map(int, ended.stdout.split()[-2:])
    assert images == 8_000 + 2 * 2_000  # of the test domain, and of validation
    assert grown < 200  # MiB: pages, pictures and tables


# The notebook of docs/


@pytest.mark.slow
def test_the_notebook_from_a_file_to_a_page_runs_without_pacs(tmp_path, monkeypatch):
    for name in ("HMOE_DATA", "HMOE_RUNS", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(repo_root() / "docs" / "from_file_to_page.ipynb", 4)
    stored = {cell.id: cell.outputs for cell in notebook.cells if cell.get("outputs")}
    assert {"compare", "evaluate", "figure", "pacs", "pacs-mistakes"} <= set(stored)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, startup_timeout=300, resources=where).execute()
    printed = {
        c.id: "".join(o.get("text", "") for o in c.outputs)
        for c in notebook.cells
        if c.get("outputs")
    }
    assert "PACS is not here" in printed["pacs-data"]
    assert "pacs" not in printed
    (page,) = [c for c in notebook.cells if c.id == "page"]
    assert "digits.html" in str(page.outputs)
