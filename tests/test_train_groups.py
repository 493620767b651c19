"""Training on groups: accuracies by group against those by hand, the worst group first, and a
command that continues after it was stopped."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

import hmoe_repro.apps.train_groups as module
from hmoe_repro.apps.discover import Findings
from hmoe_repro.apps.export import export_model
from hmoe_repro.apps.own_images import HELD_OUT, read_pool
from hmoe_repro.apps.predict import load
from hmoe_repro.apps.train_groups import (
    WORST,
    GroupTraining,
    group_accuracies,
    group_config,
    groups_to_train,
    train_groups,
)
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.registry import load_dataset, recorded_dataset
from hmoe_repro.training.model import load_model
from hmoe_repro.training.store import RunStore

pytestmark = pytest.mark.usefixtures("own_names")
SMALL = {"network": "small_cnn", "steps": 4, "resolution": 16, "device": "cpu"}


@pytest.fixture
def pictures(tmp_path):
    """A folder `<class>/<image>` and the group of each image, 24 bright and 16 dark."""
    random = np.random.default_rng(0)
    groups = {}
    for label in ("cat", "dog"):
        folder = tmp_path / "pets" / label
        folder.mkdir(parents=True)
        for i in range(20):
            bright = i < 12
            pixels = random.integers(0, 100, (16, 16, 3)) + (150 if bright else 0)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
            groups[f"{label}/{i}.png"] = "bright" if bright else "dark"
    return tmp_path / "pets", groups


def rows(name, seed, **right):
    """Rows of images of each group, of which some are right: group=(right, all)."""
    made = []
    for group, (hits, count) in right.items():
        for i in range(count):
            made.append({"name": name, "seed": seed, "group": group, "correct": i < hits})
    return made


def test_accuracies_by_group_are_those_by_hand():
    images = pd.DataFrame(
        rows("ERM", 0, a=(8, 10), b=(1, 4), c=(5, 5))
        + rows("ERM", 1, a=(6, 10), b=(3, 4), c=(5, 5))
        + rows("New", 0, a=(7, 10), b=(3, 4), c=(5, 5))
        + rows("New", 1, a=(6, 10), b=(2, 4), c=(4, 5))
    )
    table = group_accuracies(images, "ERM", "New").set_index("group")
    assert table.index.tolist() == [WORST, "b", "a", "c"]
    assert table.loc["a", ["images", "ERM", "New"]].tolist() == [10, 70, 65]
    assert table.loc["b", ["images", "ERM", "New"]].tolist() == [4, 50, 62.5]
    # the worst group: b (25) and a (60) of ERM, a (70) and b (50) of New
    assert table.loc[WORST, ["ERM", "New", "difference"]].tolist() == [42.5, 60, 17.5]
    for group, differences in {WORST: [45, -10], "a": [-10, 0], "b": [50, -25]}.items():
        found = table.loc[group]
        mean = np.mean(differences)
        half = stats.t.ppf(0.975, 1) * np.std(differences, ddof=1) / np.sqrt(2)
        assert found.difference == pytest.approx(mean)
        assert (found.low, found.high) == pytest.approx((mean - half, mean + half))
        assert found.seeds == 2


def test_equal_differences_have_no_interval_and_the_verdict_says_so():
    images = pd.DataFrame(
        [row for seed in (0, 1) for name in ("ERM", "New") for row in rows(name, seed, a=(1, 2))]
    )
    table = group_accuracies(images, "ERM", "New")
    verdict = GroupTraining("New", table, "0", "").verdict
    assert "no interval" in verdict
    assert "nan" not in verdict


def test_groups_are_domains_of_the_algorithm_and_not_of_erm(pictures):
    folder, groups = pictures
    settings = {name: value for name, value in SMALL.items() if name != "device"}
    trained = group_config("GroupDRO", folder, groups, **settings)
    baseline = group_config("ERM", folder, groups, pooled=True, **settings)
    assert (trained.sampler, baseline.sampler) == ("domain", "pooled")
    assert trained.dataset_fingerprint == baseline.dataset_fingerprint
    assert trained.test_domains == baseline.test_domains == (HELD_OUT,)
    assert trained.steps == baseline.steps == 4
    assert trained.hparams["lr"] == baseline.hparams["lr"]
    assert group_config("IRM", folder, groups, hparams={"irm_lambda": 7.0}, **settings)
    given = group_config("ERM", folder, groups, hparams={"irm_lambda": 7.0}, **settings)
    assert "irm_lambda" not in given.hparams


def test_a_stopped_training_continues_and_its_table_is_that_of_the_models(
    pictures, tmp_path, monkeypatch
):
    folder, groups = pictures
    store = RunStore(tmp_path / "runs")
    sweep = module.sweep
    stopped = []

    def stop_after_one(configs, **options):
        stopped.extend(configs[:1])
        sweep(configs[:1], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "sweep", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        train_groups(folder, groups, seeds=2, store=store, **SMALL)
    monkeypatch.setattr(module, "sweep", sweep)
    first = store.find(stopped[0].run_id)
    found = train_groups(folder, groups, seeds=2, store=store, **SMALL)
    assert len(found.runs) == 4
    assert store.find(stopped[0].run_id)["finished"] == first["finished"]  # not trained again
    table = found.table.set_index("group")
    assert table.index[0] == WORST
    accuracies = {"bright": [], "dark": []}
    for run_id in found.runs:
        algorithm, record = load_model(run_id, store=store)
        if record["config"]["algorithm"] != "GroupDRO":
            continue
        data = module_data(record)
        position = data.domain_index(HELD_OUT)
        count = len(data.labels[position])
        every = np.arange(count)
        files = data.sample_ids(position, torch_of(every))
        right = algorithm.predict(data.inputs(position, torch_of(every))).argmax(1)
        right = (right == data.labels[position]).numpy()
        for group, values in accuracies.items():
            of_group = np.array([groups[file] == group for file in files])
            values.append(100 * right[of_group].mean())
    for group, values in accuracies.items():
        assert table.loc[group, "GroupDRO"] == pytest.approx(np.mean(values))


def test_the_kept_model_is_trained_on_all_images(pictures, tmp_path, monkeypatch):
    folder, groups = pictures
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    found = train_groups(folder, groups, seeds=2, **SMALL)
    assert found.run_id not in found.runs
    # 24 bright and 16 dark images, of which 4 and 3 select the checkpoint
    assert found.sizes == {"training": 20 + 13, "validation": 4 + 3}
    record = RunStore().read(found.run_id)
    assert record["sizes"] == found.sizes
    assert record["config"]["test_domains"] == []
    assert record["config"]["algorithm"] == "GroupDRO"
    assert "test_accuracy" not in record["selected"]["default"]
    data = module_data(record)
    assert data.domain_names == ["bright", "dark"]
    files = {}
    for position, domain in enumerate(data.domain_names):
        every = torch_of(np.arange(len(data.labels[position])))
        files |= dict.fromkeys(data.sample_ids(position, every), domain)
    assert files == groups
    model = load(found.run_id)
    assert model.domain_names == ["bright", "dark"]
    path, _ = export_model(model, tmp_path / "model")
    card = (path.parent / "README.md").read_text(encoding="utf-8")
    assert "33 images; 7 more" in card
    assert "mean over 2 domains, 7 images" in card
    assert "selected the checkpoint, so it is too high" in card
    assert "hmoe predict` needs" not in card
    manifest = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    assert manifest["domains"] == ["bright", "dark"]
    assert manifest["test_domains"] == []
    assert manifest["record"]["sizes"] == found.sizes
    output = tmp_path / "predictions.csv"
    given = ["predict", "--model", found.run_id, str(folder), "--output", str(output)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, (done.output, done.exception)
    predicted = pd.read_csv(output).set_index("file")["class"]
    assert set(predicted.index) == set(groups)
    algorithm, _ = load_model(found.run_id)
    for position in range(2):
        every = torch_of(np.arange(len(data.labels[position])))
        labels = algorithm.predict(data.inputs(position, every)).argmax(1).tolist()
        names = [data.class_names[label] for label in labels]
        assert predicted[data.sample_ids(position, every)].tolist() == names


def test_a_domain_that_measures_is_in_the_final_model(pictures, tmp_path):
    folder, groups = pictures
    places = {}
    for file, group in groups.items():
        label, name = file.split("/")
        place = "beach" if int(name.split(".")[0]) % 2 else "town"
        moved = tmp_path / "trips" / place / label / name
        moved.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / file, moved)
        places[f"{place}/{file}"] = group
    settings = {name: value for name, value in SMALL.items() if name != "device"}
    settings["test_domain"] = "beach"
    compared = group_config("ERM", tmp_path / "trips", places, **settings)
    sizes = [len(labels) for labels in load_dataset(compared.dataset).labels]
    assert sizes == [12, 8, 20]  # bright and dark of the town, the beach
    final = group_config("ERM", tmp_path / "trips", places, final=True, **settings)
    assert final.test_domains == ()
    assert [len(labels) for labels in load_dataset(final.dataset).labels] == [24, 16]


def module_data(record):
    from hmoe_repro.training.model import build_dataset
    from hmoe_repro.training.run_config import RunConfig

    return build_dataset(RunConfig.from_dict(record["config"]))


def torch_of(values):
    import torch

    return torch.from_numpy(values)


@pytest.mark.parametrize(
    "change, options, said",
    [
        (lambda groups: dict.fromkeys(groups, "one"), {}, "1 group"),
        (lambda groups: groups | {"cat/0.png": "alone"}, {}, "'alone' has"),
        (lambda groups: {"cat/0.png": "a", "dog/0.png": "b"}, {}, "have no group"),
        (lambda groups: groups, {"seeds": 1}, "two seeds"),
        (lambda groups: groups, {"algorithm": "GroupDr0"}, "GroupDRO"),
    ],
)
def test_groups_that_cannot_be_trained_are_refused(pictures, tmp_path, change, options, said):
    folder, groups = pictures
    with pytest.raises(HmoeError, match=said):
        train_groups(folder, change(groups), store=RunStore(tmp_path), **SMALL | options)


def test_the_command_trains_on_corrected_groups(pictures, tmp_path, monkeypatch):
    folder, groups = pictures
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    table = pd.DataFrame({"file": list(groups), "group": list(groups.values())})
    table.to_csv(tmp_path / "corrected.csv", index=False)
    given = ["discover", str(folder), "--groups", str(tmp_path / "corrected.csv")]
    given += ["--train", "GroupDRO", "--seeds", "2", "--output", str(tmp_path / "report")]
    given += ["--network", "image_cnn", "--steps", "3", "--resolution", "24", "--device", "cpu"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, (done.output, done.exception)
    written = pd.read_csv(tmp_path / "report" / "group_training.csv")
    assert written.group.tolist()[0] == WORST
    assert set(written.group[1:]) == {"bright", "dark"}
    assert {"ERM", "GroupDRO", "difference", "low", "high", "p", "seeds"} <= set(written)
    kept = RunStore().read(done.output.split("--model ")[-1].split()[0])
    assert kept["config"]["algorithm"] == "GroupDRO"
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    for command in ("predict --model", "export"):
        assert f"hmoe {command} {kept['run_id']}" in page
    assert "--train GroupDRO" not in page  # it was trained


def test_a_killed_training_resumes_with_the_same_table_and_model(pictures, tmp_path):
    folder, groups = pictures
    killed = RunStore(tmp_path / "killed")
    program = f"""
        import os
        from hmoe_repro.apps.train_groups import train_groups
        from hmoe_repro.training.store import RunStore
        from hmoe_repro.training.trainer import Trainer

        update = Trainer.update
        done = []

        def stop(self):
            done.append(1)
            return os._exit(9) if len(done) == 7 else update(self)

        Trainer.update = stop
        store = RunStore({str(killed.folder)!r})
        train_groups({str(folder)!r}, {groups!r}, seeds=2, store=store, **{SMALL!r})
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ})
    assert ended.returncode == 9
    records, _ = killed.scan()
    assert len(records) == 1, "it was killed in the second run"
    resumed = train_groups(folder, groups, seeds=2, store=killed, **SMALL)
    store = RunStore(tmp_path / "whole")
    whole = train_groups(folder, groups, seeds=2, store=store, **SMALL)
    pd.testing.assert_frame_equal(resumed.table, whole.table)
    assert resumed.run_id == whole.run_id
    models = [load_model(whole.run_id, store=s)[0].state_dict() for s in (killed, store)]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_groups_that_nobody_corrected_are_not_called_corrected(
    pictures, tmp_path, monkeypatch, capsys
):
    folder, groups = pictures
    store = RunStore(tmp_path / "runs")
    trained = train_groups(folder, groups, seeds=2, store=store, **SMALL)
    said = capsys.readouterr()
    assert "GroupDRO on pets, by group, test held out, seed 0" in said.out + said.err
    assert "corrected" not in said.out + said.err
    record = store.find(trained.run_id)
    assert record["config"]["dataset"] == "pets, corrected, all images"  # as in runs of before
    monkeypatch.setenv("HMOE_RUNS", str(store.folder))
    listed = CliRunner().invoke(app, ["runs", "--dataset", "pets, by group"])
    assert listed.exit_code == 0, listed.output
    assert listed.output.count("pets, by group") == 4
    assert "corrected" not in listed.output
    of_before = CliRunner().invoke(app, ["runs", "--dataset", "pets, corrected"])
    assert of_before.output == listed.output
    path, _ = export_model(load(trained.run_id, store=store), tmp_path / "out")
    assert json.loads((path.parent / "config.json").read_text())["data"] == (
        "pets, by group, all images"
    )
    assert "corrected" not in (path.parent / "README.md").read_text()


def flat_folder(place):
    "A folder of 40 images without class folders."
    place.mkdir()
    for i in range(40):
        Image.fromarray(np.full((16, 16, 3), 5 * i, np.uint8)).save(place / f"{i:02d}.png")
    return place


@pytest.mark.parametrize(
    "algorithm, flat, said", [("Grupdro", False, "GroupDRO"), ("GroupDRO", True, "within a group")]
)
def test_a_training_that_cannot_be_is_refused_before_anything_is_grouped(
    pictures, tmp_path, monkeypatch, algorithm, flat, said
):
    folder = flat_folder(tmp_path / "flat") if flat else pictures[0]
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    report = tmp_path / "report"
    given = ["discover", str(folder), "--train", algorithm, "--output", str(report)]
    done = CliRunner().invoke(app, given)
    assert isinstance(done.exception, HmoeError)
    assert said in str(done.exception)
    assert not report.exists()
    assert not (tmp_path / "runs").exists()


def test_groups_that_are_the_classes_are_not_trained(tmp_path):
    images = pd.DataFrame({"file": ["a", "b"], "class": ["x", "y"], "group": ["x", "y"]})
    learned = Findings(images, np.zeros((2, 1)), np.zeros((2, 1)), {}, learns_groups=True)
    with pytest.raises(HmoeError, match="within a group"):
        groups_to_train(learned)
    subjects = Findings(images, np.zeros((2, 1)), np.zeros((2, 1)), {})
    assert groups_to_train(subjects) == {"a": "x", "b": "y"}


def test_a_group_with_a_typo_is_told_from_a_small_group(pictures, tmp_path):
    folder, groups = pictures
    with pytest.raises(HmoeError, match="did you mean 'bright'"):
        train_groups(folder, groups | {"cat/0.png": "brightt"}, store=RunStore(tmp_path), **SMALL)
    with pytest.raises(HmoeError) as raised:
        train_groups(folder, groups | {"cat/0.png": "other"}, store=RunStore(tmp_path), **SMALL)
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["mixed, corrected", "a, b, pooled without x", "mixed, all images"]
)
def test_a_data_set_of_discover_is_no_folder_to_name(name):
    with pytest.raises(HmoeError) as raised:
        recorded_dataset(name)
    of_discover = name != "mixed, all images"
    assert ("HMOE_FOLDERS" not in str(raised.value)) == of_discover


def test_a_list_is_no_folder(tmp_path):
    (tmp_path / "list.csv").write_text("file,label\na.png,x\n")
    with pytest.raises(HmoeError, match="hmoe train --dataset"):
        read_pool(tmp_path / "list.csv")


def test_no_difference_is_said():
    same = [row for seed in (0, 1) for name in ("ERM", "New") for row in rows(name, seed, a=(1, 2))]
    better = [row for seed in (0, 1) for row in rows("New", seed, a=(2, 2))]
    better += [row for row in same if row["name"] == "ERM"]
    table = group_accuracies(pd.DataFrame(same), "ERM", "New")
    assert "No difference" in GroupTraining("New", table, "0", "").verdict
    table = group_accuracies(pd.DataFrame(better), "ERM", "New")
    assert "+50.0 points" in GroupTraining("New", table, "0", "").verdict
    assert "No difference" not in GroupTraining("New", table, "0", "").verdict
