"""Folders of images as people have them: splits around or inside the domains, a level too many or
too few, names in two spellings or encodings, images that occur twice or cannot be read."""

import os
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from hmoe_repro.apps.discover import discover
from hmoe_repro.apps.own_images import read_pool
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.cache import examine
from hmoe_repro.data.image_folder import own_inventory, scan_tree, shared_images
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.registry import find_dataset
from hmoe_repro.data.verify import verify_dataset

DOMAINS, CLASSES = ("art", "photo", "sketch"), ("cat", "dog")
TRAIN = "train --algorithm ERM --network image_cnn --resolution 24 --steps 2 --set batch_size=2"

pytestmark = pytest.mark.usefixtures("own_names")


def tree(root, domains=DOMAINS, classes=CLASSES, count=3):
    "Images of noise, all different, at `root/<domain>/<class>/<number>.png`."
    rng = np.random.default_rng(len(str(root)))
    for domain in domains:
        for name in classes:
            folder = root / domain / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:02d}.png")
    return root


def command(*arguments):
    "The result of a command."
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(root, function=own_inventory):
    "The error that a folder is refused with."
    with pytest.raises(HmoeError) as caught:
        function(root)
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    return caught.value


# Levels


@pytest.mark.parametrize(
    "splits", [("train", "val", "test"), ("Training", "Validation"), ("test", "dev")]
)
def test_a_split_around_the_domains_is_read_as_one_data_set(tmp_path, splits):
    """The images of a domain are those of all parts, in the order of one folder."""
    merged = {}
    for split in splits:
        tree(tmp_path / "data" / split)
        part = tmp_path / "data" / split
        for path in list(part.rglob("*.png")):
            renamed = path.rename(path.with_name(f"{path.stem} {split}.png"))
            merged[str(renamed.relative_to(part))] = renamed.read_bytes()
    found = own_inventory(tmp_path / "data")
    assert found.domains == list(DOMAINS)
    assert found.classes == list(CLASSES)
    assert len(found.table) == len(splits) * 18
    assert any("--splits" in note and sorted(splits)[0] in note for note in found.notes)
    for name, content in merged.items():
        path = tmp_path / "one" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    one = scan_tree(tmp_path / "one")
    parted = found.tree()
    assert [[file.partition("/")[2] for file in files] for files in parted.files] == one.files
    assert all(map(torch.equal, parted.labels, one.labels))


def test_a_pool_with_a_split_around_the_domains_names_one_part(tmp_path):
    for split in ("train", "val"):
        tree(tmp_path / "data" / split)
    error = refusal(tmp_path / "data", read_pool)
    assert str(tmp_path / "data" / "train") in error.fix
    assert "art, photo, sketch" in error.cause


def test_subfolders_of_classes_make_no_domains(tmp_path):
    """train/<class>/<burst>/<image> has classes where domains would be."""
    for split in ("train", "test"):
        for name in CLASSES:
            tree(tmp_path / "data" / split, (name,), (f"{name} 1", f"{name} 2"))
    error = refusal(tmp_path / "data")
    assert str(tmp_path / "data" / "train") in error.fix


def test_a_split_inside_each_domain_is_recognised(tmp_path):
    for domain in DOMAINS:
        tree(tmp_path / "data" / domain, ("train", "val"))
    error = refusal(tmp_path / "data")
    assert "train, val" in error.cause
    assert "in place of classes" in error.cause
    assert refusal(tmp_path / "data", read_pool).cause == error.cause


def test_a_split_in_place_of_domains_is_a_note(tmp_path):
    tree(tmp_path, ("train", "val", "test"))
    assert any("not of domains" in note for note in own_inventory(tmp_path).notes)
    shutil.rmtree(tmp_path / "val")
    tree(tmp_path, ("photo",))
    assert not any("not of domains" in note for note in own_inventory(tmp_path).notes)


def test_one_folder_too_high_names_the_folder_below(tmp_path):
    tree(tmp_path / "up" / "data")
    assert str(tmp_path / "up" / "data") in refusal(tmp_path / "up").fix
    done = command(*TRAIN.split(), "--dataset", tmp_path / "up", "--test-domain", "sketch")
    assert str(tmp_path / "up" / "data") in str(done.exception)


def test_a_pool_one_folder_too_high_has_a_note(tmp_path):
    tree(tmp_path / "up" / "data", count=6)
    (note,) = read_pool(tmp_path / "up").notes
    assert str(tmp_path / "up" / "data") in note
    assert read_pool(tmp_path / "up" / "data").notes == []
    short = "--network image_cnn --resolution 24 --steps 2 --restarts 1 --output".split()
    done = command("discover", tmp_path / "up", *short, tmp_path / "report")
    assert done.exit_code == 0
    assert f"note: {note}" in done.stderr


def test_one_folder_too_deep_names_the_folder_above(tmp_path):
    tree(tmp_path / "data")
    assert f"{tmp_path / 'data'}," in refusal(tmp_path / "data" / "art").fix
    done = command(*TRAIN.split(), "--dataset", tmp_path / "data" / "art", "--test-domain", "art")
    assert f"{tmp_path / 'data'}," in str(done.exception)
    shutil.rmtree(tmp_path / "data" / "photo"), shutil.rmtree(tmp_path / "data" / "sketch")
    assert str(tmp_path / "data") + "," not in refusal(tmp_path / "data" / "art").fix


def test_deeper_images_are_images_with_a_note(tmp_path):
    for domain in DOMAINS:
        for name in CLASSES:
            tree(tmp_path / domain, (name,), (f"of {domain} {name}",))
    found = own_inventory(tmp_path)
    assert found.classes == list(CLASSES)
    assert found.domains == list(DOMAINS)
    assert any("below their class folders" in note for note in found.notes)


# Classes


def test_one_class_is_nothing_to_classify(tmp_path):
    tree(tmp_path / "data", classes=("cat",))
    assert (
        "one class, 'cat'" in refusal(tmp_path / "data", lambda root: find_dataset(str(root))).cause
    )


@pytest.mark.parametrize("other", ["Cat", "cat ", " cat", "CAT"])
def test_two_spellings_of_a_class_are_refused(tmp_path, other):
    tree(tmp_path / "data")
    (tmp_path / "data" / "photo" / "cat").rename(tmp_path / "data" / "photo" / other)
    error = refusal(tmp_path / "data")
    assert repr(other) in error.cause
    assert repr("cat") in error.cause
    tree(tmp_path / "data", count=12)
    shutil.rmtree(tmp_path / "data" / "photo" / "cat")
    assert repr(other) in refusal(tmp_path / "data", read_pool).cause


def test_letters_that_are_classes_in_both_cases_are_two_classes(tmp_path):
    found = own_inventory(tree(tmp_path, classes=("a", "A", "b")))
    assert found.classes == ["A", "a", "b"]
    shutil.rmtree(tmp_path / "sketch" / "A")
    assert own_inventory(tmp_path).classes == ["A", "a", "b"]
    tree(tmp_path, domains=("art",), classes=("a ",))
    assert "'a '" in refusal(tmp_path).cause


def test_two_spellings_of_a_domain_are_refused(tmp_path):
    tree(tmp_path, ("art", "Art", "photo"))
    assert "'Art', 'art'" in refusal(tmp_path).cause


def test_an_empty_class_folder_is_noted(tmp_path):
    tree(tmp_path)
    (tmp_path / "art" / "emu").mkdir()
    (tmp_path / "art" / ".hidden").mkdir()
    found = own_inventory(tmp_path)
    assert found.classes == list(CLASSES)
    assert [note for note in found.notes if "art/emu" in note and "hidden" not in note]


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
@pytest.mark.parametrize("level", ["class", "domain", "root"])
def test_names_that_are_not_utf8_are_refused_everywhere(tmp_path, level):
    root = tree(tmp_path / "data", count=12)
    strange = os.fsdecode(b"caf\xe9")
    try:
        if level == "class":
            for domain in DOMAINS:
                os.rename(root / domain / "cat", root / domain / strange)
        elif level == "domain":
            os.rename(root / "photo", root / strange)
        else:
            os.rename(root, tmp_path / strange)
            root = tmp_path / strange
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    assert r"caf\udce9" in refusal(root).cause
    if level != "root":
        assert r"caf\udce9" in refusal(root, read_pool).cause
    for words in (
        (*TRAIN.split(), "--test-domain", "sketch", "--dataset", root),
        ("data", "verify", root),
    ):
        done = command(*words)
        assert isinstance(done.exception, HmoeError)
        assert r"caf\udce9" in str(done.exception)


# Images


def test_images_in_two_domains_are_counted_and_named(tmp_path):
    root = tree(tmp_path / "data")
    shutil.copy(root / "art" / "cat" / "00.png", root / "sketch" / "cat" / "again.png")
    shutil.copy(root / "photo" / "dog" / "01.png", root / "art" / "dog" / "again.png")
    shutil.copy(root / "photo" / "dog" / "01.png", root / "photo" / "dog" / "same domain.png")
    scanned = scan_tree(root)
    digests = dict(zip(scanned.flat, examine(scanned, workers=1)[0]))
    pairs = [
        ("art/dog/again.png", "photo/dog/01.png"),
        ("art/dog/again.png", "photo/dog/same domain.png"),
        ("art/cat/00.png", "sketch/cat/again.png"),
    ]
    assert sorted(shared_images(scanned, digests)) == sorted(pairs)
    images = ImageDataset(scanned, 16, workers=0)
    with pytest.warns(UserWarning, match=r"3 images are also in another domain.*art/cat/00\.png ="):
        assert images.fingerprint
    find_dataset(str(root))
    assert any("3 images are also" in note for note in verify_dataset("data").notes)
    for name in ("sketch/cat/again.png", "art/dog/again.png"):
        (root / name).unlink()
    assert not ImageDataset(scan_tree(root), 16, workers=0).notes


def test_transparent_images_are_counted(tmp_path):
    root = tree(tmp_path / "data")
    image = Image.open(root / "art" / "cat" / "00.png").convert("RGBA")
    image.putpixel((0, 0), (9, 9, 9, 0))
    image.save(root / "art" / "cat" / "00.png")
    find_dataset(str(root))
    (note,) = [note for note in verify_dataset("data").notes if "transparent" in note]
    assert note.startswith("1 image has")
    assert "art/cat/00.png" in note


SHORT = {"method": "hmoe", "network": "image_cnn", "steps": 2, "restarts": 1, "experts": 2}
SHORT |= {"resolution": 24, "hparams": {"batch_size": 4}, "device": "cpu"}


@pytest.fixture
def damaged(tmp_path, monkeypatch):
    "Photographs by class, of which one is cut and one is empty."
    for name in ("runs", "cache"):
        monkeypatch.setenv(f"HMOE_{name.upper()}", str(tmp_path / name))
    root = tree(tmp_path / "mine", ("",), ("cat", "dog"), count=20)
    whole = (root / "cat" / "00.png").read_bytes()
    (root / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "dog" / "empty.png").write_bytes(b"")
    return root


def test_discover_leaves_bad_files_out_and_lists_them(damaged, tmp_path):
    done = command(
        *("discover", damaged, "--output", tmp_path / "page", "--method", "hmoe"),
        *("--network", "image_cnn", "--steps", 2, "--restarts", 1, "--experts", 2),
        *("--resolution", 24, "--set", "batch_size=4", "--device", "cpu"),
    )
    assert done.exit_code == 0, done.output
    left_out = [line for line in done.stderr.splitlines() if line.startswith("left out: ")]
    assert [line.split()[2] for line in left_out] == ["cat/cut.png", "dog/empty.png"]
    table = pd.read_csv(tmp_path / "page" / "groups.csv")
    assert len(table) == 40
    assert not table.file.str.contains("cut|empty").any()
    assert "cat/cut.png" in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


def test_discover_refuses_them_if_asked_or_if_too_few_are_left(damaged):
    with pytest.raises(HmoeError, match="2 of 42 images cannot be read.*--skip-unreadable"):
        discover(damaged, skip_unreadable=False, **SHORT)
    for i in range(11):
        (damaged / "cat" / f"{i:02d}.png").write_bytes(b"no picture")
    with pytest.raises(HmoeError, match="13 of 42 images cannot be read.*Too few are left"):
        discover(damaged, **SHORT)


def test_a_whole_folder_keeps_its_run(damaged):
    """Without damaged files, the option of the images is the usual one: no run id changes."""
    for name in ("cat/cut.png", "dog/empty.png"):
        (damaged / name).unlink()
    found = discover(damaged, **SHORT)
    assert found.record["config"]["images"]["unreadable"] == "refuse"
    assert not found.unreadable


def test_the_option_has_one_name_in_every_command(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    commands = get_command(app).commands
    for name, usual in {"train": False, "sweep": False, "predict": False, "discover": True}.items():
        (option,) = [p for p in commands[name].params if "--skip-unreadable" in p.opts]
        assert option.secondary_opts == ["--no-skip-unreadable"]
        assert option.default is usual
    root = tree(tmp_path / "data")
    (root / "art" / "cat" / "00.png").write_bytes(b"no picture")
    words = (*TRAIN.split(), "--test-domain", "sketch", "--dataset", root, "--device", "cpu")
    assert "--skip-unreadable" in str(command(*words).exception)
    with pytest.warns(UserWarning, match="1 of 18 images cannot be read"):
        done = command(*words, "--skip-unreadable")
    assert done.exit_code == 0, done.output


def test_a_folder_is_a_data_set_that_splits_are_drawn_of(tmp_path):
    "The check of arguments takes images of files as it takes tensors."
    from hmoe_repro.training.protocols import make_splits

    images = ImageDataset(scan_tree(tree(tmp_path / "data", count=5)), 16, workers=0)
    assert set(make_splits(images, 0)) == set(DOMAINS)
