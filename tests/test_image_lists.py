"""Lists of images: the same data and runs as a folder, splits that are followed, and faults named
by line."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from commands import hmoe
from PIL import Image

from hmoe_repro.apps.evaluate import evaluate as evaluate_runs
from hmoe_repro.apps.export import export_model
from hmoe_repro.apps.predict import load
from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.tables import read_table
from hmoe_repro.data import registry
from hmoe_repro.data.image_folder import own_inventory, scan_tree
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.registry import DATASETS, find_dataset, load_dataset, recorded_dataset
from hmoe_repro.training.model import build_dataset, load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.splits import (
    cached_split_lists,
    find_splits,
    read_split_lists,
    register_splits,
)
from hmoe_repro.training.store import RunStore, check_record, outcome
from hmoe_repro.training.trainer import Trainer

DOMAINS, CLASSES = ("day", "dusk", "night"), ("cat", "dog")

pytestmark = pytest.mark.usefixtures("own_names")


@pytest.fixture
def folder(tmp_path):
    """Images of noise at `<domain>/<class>/<number>.png`, six of each class in each domain."""
    random = np.random.default_rng(0)
    root = tmp_path / "pets"
    for domain in DOMAINS:
        for name in CLASSES:
            (root / domain / name).mkdir(parents=True)
            for i in range(6):
                pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / domain / name / f"{i}.png")
    return root


def rows_of(root, start=None):
    """The lines of a list of a folder, in an order that is not that of the folder."""
    files = sorted(root.rglob("*.png"), key=lambda path: path.name[::-1])
    rows = []
    for path in files:
        file = path.relative_to(start or root).as_posix()
        rows.append({"file": file, "class": path.parts[-2], "domain": path.parts[-3]})
    return rows


def write_list(path, rows, separator=","):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return path


def same_images(a, b):
    return a.files == b.files and all(map(torch.equal, a.labels, b.labels))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_list_is_the_folder_in_whatever_order_its_lines_are(folder, separator):
    listed = scan_tree(write_list(folder / "list.csv", rows_of(folder), separator))
    assert same_images(listed, scan_tree(folder))
    assert (listed.root, listed.name) == (folder, "list")
    assert ImageDataset(listed, 16).fingerprint == ImageDataset(scan_tree(folder), 16).fingerprint


def test_absolute_paths_and_a_list_elsewhere_give_the_same_images(folder, tmp_path):
    rows = [row | {"file": str(folder / row["file"])} for row in rows_of(folder)]
    listed = scan_tree(write_list(tmp_path / "elsewhere" / "my list.csv", rows))
    assert same_images(listed, scan_tree(folder))
    assert listed.root == folder
    beside = scan_tree(write_list(tmp_path / "beside.csv", rows_of(folder, tmp_path)))
    assert beside.files == [[f"pets/{file}" for file in files] for files in listed.files]


def test_a_run_on_a_list_is_bitwise_the_run_on_the_folder(folder, tmp_path, monkeypatch):
    """With the name of the folder, it is even the same run: the name seeds the weights."""
    rows = [row | {"file": str(folder / row["file"])} for row in rows_of(folder)]
    path = write_list(tmp_path / "lists" / "pets.csv", rows)
    given = dict(network="image_cnn", resolution=16, steps=3, hparams={"batch_size": 2})
    records = []
    for source in (folder, path):
        for known in (DATASETS, registry._OWN):  # as in another process
            known.pop("pets", None)
        monkeypatch.setattr(CONFIG, "datasets", ())
        config = make_config("ERM", find_dataset(str(source)), ["night"], **given)
        record = run(config, RunStore(tmp_path / f"runs of {source.name}"))
        assert record["status"] == "complete", record["reason"]
        records.append(outcome(record))
    assert records[0] == records[1]


def test_other_columns_are_metadata_with_types(folder):
    rows = rows_of(folder)
    for number, row in enumerate(rows):
        row |= {"iso": 100 * number, "flash": number % 2 == 0, "camera": f"c{number % 3}, old"}
    data = scan_tree(write_list(folder / "list.csv", rows))
    by_file = {row["file"]: row for row in rows}
    for files, iso, flash, camera in zip(data.files, *data.meta.values()):
        wanted = [by_file[file] for file in files]
        assert iso.tolist() == [row["iso"] for row in wanted]
        assert flash.tolist() == [row["flash"] for row in wanted]
        assert list(camera) == [row["camera"] for row in wanted]


PARTS = ["Train", "train", "training", "val", "test", ""]


def with_parts(folder):
    """Rows whose split goes by the number of the image, with four of twelve images for training."""
    return [row | {"split": PARTS[int(row["file"][-5])]} for row in rows_of(folder)]


def test_the_column_split_is_followed_by_both_protocols(folder, tmp_path):
    path = write_list(folder / "list.csv", with_parts(folder))
    name = find_dataset(str(path))
    data = load_dataset(name)
    read = read_split_lists(path, data)
    assert read.unlisted == 6
    for domain, files in zip(data.domain_names, data.tree.files):
        for part, numbers in (("train", "012"), ("val", "3"), ("test", "4")):
            chosen = [files[i] for i in read.parts[domain][part]]
            assert chosen == [file for file in files if file[-5] in numbers]
    given = dict(network="image_cnn", resolution=16, hparams={"batch_size": 2}, splits=path)
    found = []
    for more in (dict(steps=2), dict(protocol="dmg", epochs=1)):
        config = make_config("ERM", name, ["night"], **given, **more)
        record = run(config, RunStore(tmp_path / "runs"))
        assert record["status"] == "complete", record["reason"]
        found.append(record["test_size"])
    assert found == [2, 2]  # those of the column, although the test domain has twelve images
    assert record["in_domain_size"] == 4
    without = make_config("ERM", name, ["night"], **given | {"splits": None}, steps=2)
    assert without.splits is None
    assert cached_split_lists(register_splits(path), data).digest == read.digest


def test_a_domain_without_training_images_is_refused(folder):
    rows = [row | {"split": "" if row["domain"] == "dusk" else "train"} for row in rows_of(folder)]
    path = write_list(folder / "list.csv", rows)
    data = load_dataset(find_dataset(str(path)))
    with pytest.raises(HmoeError, match="no training image of domain dusk"):
        read_split_lists(path, data)


@pytest.fixture
def parted(folder, tmp_path):
    """The folder as a tree {train,val,test}/<domain>/<class>, with two test images a domain."""
    root = tmp_path / "parted"
    for path in folder.rglob("*.png"):
        part = {"3": "val", "4": "test"}.get(path.stem, "train")
        copy = root / part / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return root


def test_a_folder_of_parts_gives_its_split(parted):
    data = load_dataset(find_dataset(str(parted)))
    read = cached_split_lists(register_splits(parted), data)
    assert read.unlisted == 0
    for domain, files in zip(data.domain_names, data.tree.files):
        for part, positions in read.parts[domain].items():
            named = [i for i, file in enumerate(files) if file.startswith(f"{part}/")]
            assert positions.tolist() == named


OF_TREE = dict(network="image_cnn", resolution=16, hparams={"batch_size": 2, "source": "files"})


@pytest.mark.parametrize("evaluate", ["selection", "all"])
def test_the_final_model_is_scored_on_the_test_part_of_a_tree(parted, tmp_path, evaluate):
    name = find_dataset(str(parted))
    given = OF_TREE | dict(splits=parted, steps=6, checkpoint_frequency=2, evaluate=evaluate)
    config = make_config("ERM", name, ["none"], **given)
    trainer = Trainer(config, build_dataset(config), "cpu")
    for domain, files in zip(trainer.data.domain_names, trainer.data.tree.files):
        parts = trainer.splits[domain]
        tested = {files[i] for i in parts["test"].tolist()}
        assert len(tested) == 2
        assert all(file.startswith("test/") for file in tested)
        used = torch.cat([parts["in"], parts["out"]]).tolist()
        assert not tested & {files[i] for i in used}
    store = RunStore(tmp_path / "runs")
    record = run(config, store)
    assert record["status"] == "complete", record["reason"]
    assert check_record(record, "it") == record
    assert record["in_domain_size"] == 6
    assert "test_accuracy" not in record["selected"]["default"]
    model = load(config.run_id, store=store)
    by_hand = []
    for domain in trainer.data.domain_names:
        found = model.predict(str(parted / "test" / domain))
        by_hand.append(
            np.mean([Path(f).parent.name == c for f, c in zip(found.file, found["class"])])
        )
    scored = record["in_domain"]["default"]
    assert list(scored["domains"].values()) == pytest.approx(by_hand)
    assert scored["accuracy"] == pytest.approx(np.mean(by_hand))
    evaluated = evaluate_runs(config.run_id, store=store, device="cpu")
    of_tests = evaluated.images[evaluated.images.role == "test in domain"]
    assert len(of_tests) == 6
    assert of_tests.groupby("domain", observed=True).correct.mean().mean() == pytest.approx(
        scored["accuracy"]
    )
    assert f"{100 * scored['accuracy']:.1f} % of the images of the test part" in evaluated.verdict
    assert evaluated.confusion(normalise=False).to_numpy().sum() == 6
    page = evaluated.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "test in domain" in page
    path, _ = export_model(model, tmp_path / "out")
    card = (path.parent / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in card.splitlines() if "accuracy on test images" in line]
    assert f"{100 * scored['accuracy']:.1f} %" in line
    assert "6 images" in line
    assert "model-index" not in card


@pytest.mark.parametrize("domain", ["night", "none"])
@pytest.mark.parametrize("follow", [True, False], ids=["given split", "split by seed"])
def test_a_run_on_a_tree_of_parts_is_bitwise_the_run_on_the_folder(
    folder, tmp_path, monkeypatch, domain, follow
):
    """Their ids differ, because files of a tree have other paths. The folder follows the split of
    the tree by a list with the column split."""
    tree = tmp_path / "parted" / "pets"
    rows = rows_of(folder)
    for row in rows:
        row["split"] = {"3": "val", "4": "test"}.get(Path(row["file"]).stem, "train")
        copy = tree / row["split"] / row["file"]
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / row["file"], copy)
    listed = write_list(folder / "split.csv", rows)
    records = []
    weights = []
    for source, splits in ((tree, tree), (folder, listed)):
        for known in (DATASETS, registry._OWN):  # as in another process
            known.pop("pets", None)
        monkeypatch.setattr(CONFIG, "datasets", ())
        given = OF_TREE | dict(steps=3, splits=splits if follow else None)
        config = make_config("ERM", find_dataset(str(source)), [domain], **given)
        store = RunStore(tmp_path / f"runs of {source.parent.name}")
        record = run(config, store)
        assert record["status"] == "complete", record["reason"]
        records.append(record)
        weights.append(load_model(config.run_id, store=store)[0].state_dict())
    tree_record, folder_record = records
    for name in ("checkpoints", "selected", "in_domain"):
        assert tree_record.get(name) == folder_record.get(name)
    for name, values in weights[0].items():
        assert torch.equal(values, weights[1][name]), name
    assert ("in_domain" in tree_record) == (follow and domain == "none")


def test_a_run_with_a_test_domain_does_not_touch_other_test_images(parted):
    config = make_config("ERM", find_dataset(str(parted)), ["day"], splits=parted, **OF_TREE)
    trainer = Trainer(config, build_dataset(config), "cpu")
    assert {tuple(parts) for parts in trainer.splits.values()} == {("in", "out")}


def test_train_prints_the_accuracy_on_the_test_part(parted):
    given = ["train", "--algorithm", "ERM", "--dataset", "parted", "--splits", "parted"]
    given += ["--network", "image_cnn", "--resolution", "16", "--steps", "2", "--device", "cpu"]
    done = hmoe(*given, "--test-domain", "none", folder=parted.parent)
    assert done.returncode == 0, done.stderr
    assert "in-domain accuracy" in done.stdout
    assert "6 images of the test part" in " ".join(done.stdout.split())
    done = hmoe(*given, "--test-domain", "day", folder=parted.parent)
    assert done.returncode == 0, done.stderr
    assert "in-domain" not in done.stdout


FAULTS = {
    "missing file": ("day/cat/none.png,cat,day", "line 3.*no file 'day/cat/none.png'"),
    "unknown class": ("day/cat/1.png,,day", "line 3.*class is empty"),
    "unknown domain": ("day/cat/1.png,cat", "line 3.*domain is empty"),
    "duplicate": ("./day/cat/0.png,cat,night", "line 3.*also in .*line 2"),
    "relative path": ("../day/cat/1.png,cat,day", "line 3.*no file '../day/cat/1.png'"),
    "unquoted comma": ("day/cat/1.png,cat,day,warm", "line 3.*4 cells.*double quotes"),
    "no image": ("list.csv,cat,day", "line 3.*'list.csv' is no image"),
    "two spellings": ("night/cat/1.png,Cat,night", "'Cat', 'cat' differ only in case"),
}


@pytest.mark.parametrize("line, message", FAULTS.values(), ids=FAULTS)
def test_faults_are_named_by_line(folder, line, message):
    path = folder / "list.csv"
    path.write_text(f"file,class,domain\nday/cat/0.png,cat,day\n{line}\n")
    with pytest.raises(HmoeError, match=message) as caught:
        own_inventory(path)
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", "\n\n", "file,label\na.png,cat\n", "file,class,domain\n"])
def test_a_table_without_columns_or_lines_is_refused(folder, text):
    (folder / "list.csv").write_text(text)
    with pytest.raises(HmoeError, match="list.csv"):
        scan_tree(folder / "list.csv")


@pytest.mark.parametrize("domains", [("day",), ("day", "night")])
def test_a_capital_in_one_line_is_no_class_of_its_own(folder, domains):
    rows = rows_of(folder)
    for domain in domains:
        typo = next(row for row in rows if (row["domain"], row["class"]) == (domain, "cat"))
        typo["class"] = "CAT"
    with pytest.raises(HmoeError, match="'CAT', 'cat' differ only in case.*Fix: correct the cells"):
        scan_tree(write_list(folder / "list.csv", rows))


def test_missing_columns_are_named_together(folder):
    (folder / "list.csv").write_text("file,species,site\na.png,cat,day\n")
    with pytest.raises(
        HmoeError, match=r"no column class, domain \(its columns: file, species, site"
    ):
        scan_tree(folder / "list.csv")
    (folder / "list.csv").write_text("file,class,domain,class\na.png,cat,day,dog\n")
    with pytest.raises(HmoeError, match="two columns class"):
        scan_tree(folder / "list.csv")


def test_a_run_finds_its_list_and_its_split_again(folder, tmp_path, monkeypatch):
    """In another process: by the name, in the working directory or in HMOE_FOLDERS."""
    rows = [row | {"file": str(folder / row["file"])} for row in with_parts(folder)]
    path = write_list(tmp_path / "lists" / "traps.csv", rows)
    given = dict(network="image_cnn", resolution=16, hparams={"batch_size": 2}, splits=path)
    name = find_dataset(str(path))
    config = make_config("ERM", name, ["night"], steps=2, **given)
    for known in (DATASETS, registry._OWN):  # as in another process
        known.pop(name, None)
    monkeypatch.setattr(CONFIG, "datasets", ())
    monkeypatch.setattr(CONFIG, "splits", ())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HmoeError, match="traps.*HMOE_FOLDERS"):
        recorded_dataset(name)
    monkeypatch.chdir(path.parent)
    data = load_dataset(recorded_dataset(name))
    assert data.fingerprint == config.dataset_fingerprint
    assert find_splits(config.splits, data).digest == config.splits
    with pytest.raises(HmoeError, match="are in none of the folders"):
        find_splits("0" * 12, data)


def test_an_unknown_part_and_an_empty_cell_of_metadata_are_refused(folder):
    rows = [row | {"split": "train", "iso": 100} for row in rows_of(folder)]
    rows[4] |= {"split": "holdout"}
    with pytest.raises(HmoeError, match="line 6.*'holdout' is no part"):
        scan_tree(write_list(folder / "list.csv", rows))
    rows[4] |= {"split": "", "iso": ""}
    with pytest.raises(HmoeError, match="line 6.*iso is empty"):
        scan_tree(write_list(folder / "list.csv", rows))


def test_tables_are_read_in_utf16_and_with_a_byte_order_mark(tmp_path):
    text = "File\tClass\nä.png\tcat\n"
    path = tmp_path / "list.csv"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_text(text, encoding=encoding)
        (row,) = read_table(path, ["file", "class"])
        assert row.cells == {"file": "ä.png", "class": "cat"}
        assert row.place == "list.csv, line 2"


def test_a_parquet_file_is_a_list(folder, monkeypatch):
    """The package that reads Parquet is optional, so pandas' reader is replaced if it is absent."""
    frame = pd.DataFrame(rows_of(folder)).assign(iso=range(36))
    path = folder / "list.parquet"
    try:
        frame.to_parquet(path)
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(HmoeError, match="no package that reads them"):
            scan_tree(path)
        monkeypatch.setattr(pd, "read_parquet", lambda given: frame)
    listed = scan_tree(path)
    assert same_images(listed, scan_tree(folder))
    assert sorted(torch.cat(listed.meta["iso"]).tolist()) == list(range(36))


def test_all_faulty_lines_are_counted(folder):
    path = folder / "list.csv"
    rows = [{**row, "file": f"wrong/{row['file']}"} for row in rows_of(folder)]
    write_list(path, rows)
    with pytest.raises(HmoeError, match="line 2.*And 35 more lines") as caught:
        own_inventory(path)
    assert "line 3" not in str(caught.value)
    write_list(path, rows_of(folder)[1:] + rows[:1])
    with pytest.raises(HmoeError, match="line 37") as caught:
        own_inventory(path)
    assert "more line" not in str(caught.value)


def test_a_second_line_of_another_class_is_told_from_a_copy(folder):
    path = folder / "list.csv"
    first = rows_of(folder)[0]
    other = {"cat": "dog", "dog": "cat"}[first["class"]]
    write_list(path, [*rows_of(folder), {**first, "class": other}])
    with pytest.raises(HmoeError, match=f"line 38.*line 2, with the class '{first['class']}'"):
        own_inventory(path)
    write_list(path, [*rows_of(folder), first])
    with pytest.raises(HmoeError, match="line 38.*line 2") as caught:
        own_inventory(path)
    assert "with the class" not in str(caught.value)


def test_a_class_that_is_misspelt_once_is_named_with_its_line(folder):
    path = folder / "list.csv"
    rows = rows_of(folder)
    rows[7]["class"] = {"cat": "cta", "dog": "dgo"}[right := rows[7]["class"]]
    write_list(path, rows)
    with pytest.raises(HmoeError, match=f"line 9.*{rows[7]['class']}.*Did you mean '{right}'"):
        own_inventory(path)
    rows[7]["class"] = "elephant"
    write_list(path, rows)
    assert own_inventory(path).classes == ["cat", "dog", "elephant"]
    (folder / "day" / "catt").mkdir()
    shutil.move(folder / "day" / "cat" / "0.png", folder / "day" / "catt" / "0.png")
    path.unlink()
    with pytest.raises(HmoeError, match="day/catt/0.png.*Did you mean 'cat'"):
        own_inventory(folder)
