"""Image folders as data sets: the same batches from any source and any number of helpers, options,
fingerprint, damaged files, helpers that end."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from trees import evaluation_transform, training_transform

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import loader as module
from hmoe_repro.data.base import MultiDomainDataset
from hmoe_repro.data.image_folder import scan_tree
from hmoe_repro.data.loader import IMAGE_OPTIONS, ImageDataset, checked_options

CACHE = {"source": "cache"}

# Defaults that a record has. Newer options are in a record only if they are changed.
RECORDED = {name: value for name, value in IMAGE_OPTIONS.items() if name != "decoding"}


def write(path, seed):
    "An image of smooth random colours, its size by the seed."
    path.parent.mkdir(parents=True, exist_ok=True)
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8))
    small.resize((40 + seed % 7, 30 + seed % 5), Image.BICUBIC).save(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A folder of 3 domains and 2 classes, 4 images of each."
    root = tmp_path_factory.mktemp("image-data") / "Pets"
    for i in range(24):
        write(
            root
            / "abc"[i // 8]
            / ("cat", "dog")[i % 8 // 4]
            / f"{i}{('.jpg', '.png', '.webp')[i % 3]}",
            i,
        )
    return root


@pytest.fixture
def root(whole, tmp_path):
    "A copy of that folder."
    return Path(shutil.copytree(whole, tmp_path / "Pets"))


@pytest.fixture(scope="module")
def data(whole):
    "A data set for tests that do not change it."
    return ImageDataset(scan_tree(whole), 24)


@pytest.fixture(scope="module")
def helped(whole):
    "The same with two helpers."
    return ImageDataset(scan_tree(whole), 24, workers=2)


def test_it_looks_like_data_of_tensors(data):
    tensors = MultiDomainDataset(
        "t",
        ["a"],
        ["c"],
        [torch.zeros(1, 3, 4, 4, dtype=torch.uint8)],
        [torch.zeros(1, dtype=torch.int64)],
    )
    ours = {n for n in dir(data) if not n.startswith("_")}
    for name in set(dir(tensors)) - {"images"}:
        assert name.startswith("_") or name in ours, name
    assert (data.name, data.domain_names, data.class_names, data.num_domains, data.num_classes) == (
        "Pets",
        ["a", "b", "c"],
        ["cat", "dog"],
        3,
        2,
    )
    assert data.input_shape == (3, 24, 24)
    assert data.resolution == 24
    assert data.augmented is True
    assert data.factors == {}
    assert not data.notes
    assert [y.tolist() for y in data.labels] == [[0] * 4 + [1] * 4] * 3
    assert data.labels[0].dtype == torch.int64
    assert data.domain_index("b") == 1
    assert data.to("cpu") is data
    with pytest.raises(HmoeError, match="unknown domain of Pets 'x'. Valid: a, b, c"):
        data.domain_index("x")


@pytest.mark.parametrize("options", [{}, CACHE])
def test_evaluation_inputs_are_those_of_torchvision(data, options):
    made = data.with_options(options=options)
    for position in range(3):
        indices = torch.tensor([7, 0, 3, 3])
        x = made.inputs(position, indices)
        expected = torch.stack(
            [
                evaluation_transform(24)(
                    Image.open(data.tree.root / data.tree.files[position][i]).convert("RGB")
                )
                for i in indices
            ]
        )
        assert torch.equal(x, expected)
        assert x.dtype == torch.float32
        assert x.is_contiguous(memory_format=torch.channels_last)
        pictures = made.pictures(position, indices)
        assert pictures.dtype == torch.uint8
        assert pictures.shape == (4, 3, 24, 24)
        by_hand = np.asarray(
            Image.open(data.tree.root / data.tree.files[position][7])
            .convert("RGB")
            .resize((24, 24), Image.BILINEAR)
        )
        assert np.array_equal(pictures[0].permute(1, 2, 0).numpy(), by_hand)


@pytest.mark.parametrize("resize_first", [False, True])
def test_augmented_inputs_are_those_of_torchvision(whole, resize_first):
    made = ImageDataset(scan_tree(whole), 24, resize_first=resize_first)
    seeds = torch.tensor([11, 2**31 - 1, 0])
    x = made.inputs(1, torch.tensor([1, 1, 6]), seeds=seeds)
    for row, index, seed in zip(x, (1, 1, 6), seeds):
        torch.manual_seed(int(seed))
        assert torch.equal(
            row,
            training_transform(24, resize_first)(
                Image.open(made.tree.root / made.tree.files[1][index]).convert("RGB")
            ),
        )
    assert not torch.equal(x[0], x[1])


@pytest.mark.parametrize("options", [{}, CACHE])
def test_helpers_change_nothing(data, helped, options):
    alone, shared = data.with_options(options=options), helped.with_options(options=options)
    seeds = torch.arange(8) * 1000
    for n in (8, 5, 1, 0):
        indices = torch.arange(8).flip(0)[:n]
        assert torch.equal(
            alone.inputs(2, indices, seeds=seeds[:n]), shared.inputs(2, indices, seeds=seeds[:n])
        )
        assert torch.equal(alone.inputs(2, indices), shared.inputs(2, indices))
        assert torch.equal(alone.pictures(2, indices), shared.pictures(2, indices))
        assert alone.inputs(0, indices).shape == (n, 3, 24, 24)


def test_augmentation_needs_no_global_generator(data, helped):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a = data.inputs(0, torch.arange(4), seeds=torch.arange(4))
    torch.manual_seed(2)
    assert torch.equal(a, data.inputs(0, torch.arange(4), seeds=torch.arange(4)))
    torch.manual_seed(1)
    helped.inputs(0, torch.arange(4), seeds=torch.arange(4))
    assert torch.equal(state, torch.get_rng_state())


def test_options_are_checked():
    assert checked_options(None) == RECORDED
    assert checked_options({"source": "cache"})["source"] == "cache"
    assert json.loads(json.dumps(IMAGE_OPTIONS)) == IMAGE_OPTIONS
    for bad, fragment in [
        ({"sauce": 1}, "unknown option of image data 'sauce'.* Valid: source"),
        ({"source": "ram"}, "Valid: files, cache"),
        ({"unreadable": True}, "Valid: refuse, skip"),
        ({"val_augment": "False"}, "true or false"),
        ({"data_augmentation": 1}, "true or false"),
    ]:
        with pytest.raises(HmoeError, match=fragment):
            checked_options(bad)


def test_preparing_changes_a_copy(data):
    other = data.with_options(16, {"data_augmentation": False})
    assert (other.resolution, other.augmented, other.inputs(0, torch.tensor([0])).shape) == (
        16,
        False,
        (1, 3, 16, 16),
    )
    assert other.options == RECORDED | {"data_augmentation": False}
    assert data.options == RECORDED
    assert data.resolution == 24
    assert other.with_options().options == other.options
    assert other.with_options(options=IMAGE_OPTIONS).augmented
    with pytest.raises(HmoeError, match="have no seeds"):
        other.inputs(0, torch.tensor([0]), seeds=torch.tensor([0]))
    with pytest.raises(HmoeError, match="as many seeds"):
        data.inputs(0, torch.tensor([0]), seeds=torch.tensor([0, 1]))
    for bad in (0, 4, 5000, -224):
        with pytest.raises(HmoeError, match="resolution"):
            ImageDataset(data.scanned, bad)


def test_the_fingerprint_is_of_the_content(root, tmp_path):
    original = ImageDataset(scan_tree(root), 24)
    name = original.fingerprint
    assert len(name) == 12
    assert int(name, 16) >= 0
    moved = Path(shutil.copytree(root, tmp_path / "elsewhere" / "Other name"))
    same = [
        ImageDataset(scan_tree(moved), 24),
        original.with_options(64),
        original.with_options(options=CACHE),
        ImageDataset(scan_tree(root), 24),
    ]
    assert {d.fingerprint for d in same} == {name}
    changes = {
        "byte": lambda: (moved / "a/cat/0.jpg").write_bytes(
            (moved / "a/cat/0.jpg").read_bytes() + b"\0"
        ),
        "renamed": lambda: (moved / "a/cat/1.png").rename(moved / "a/cat/1b.png"),
        "class": lambda: (moved / "a/cat/2.webp").rename(moved / "a/dog/2.webp"),
        "domain": lambda: (moved / "c").rename(moved / "d"),
        "added": lambda: write(moved / "b/dog/99.png", 99),
        "removed": lambda: (moved / "b/dog/99.png").unlink() or (moved / "b/dog/14.webp").unlink(),
    }
    seen = [name]
    for change in changes.values():
        change()
        seen.append(ImageDataset(scan_tree(moved)).fingerprint)
    assert len(set(seen)) == len(seen)


def test_the_fingerprint_counts_labels_and_not_only_paths(data):
    from dataclasses import replace

    tree = data.scanned
    swapped = replace(tree, labels=[1 - y for y in tree.labels])
    assert ImageDataset(swapped).fingerprint != data.fingerprint


def test_files_are_read_once_for_all_uses(root, monkeypatch):
    made = ImageDataset(scan_tree(root), 24, CACHE)
    made.fingerprint, made.inputs(0, torch.tensor([0]))
    import hmoe_repro.data.cache as cache

    monkeypatch.setattr(cache, "_examine_file", lambda *a: pytest.fail("read again"))
    again = ImageDataset(scan_tree(root), 24, CACHE)
    assert again.fingerprint == made.fingerprint
    assert len(again.labels[0]) == 8
    assert again.with_options(options={"source": "files"}).fingerprint == made.fingerprint


def test_no_folder_to_remember_in(root, monkeypatch, tmp_path):
    expected = ImageDataset(scan_tree(root)).fingerprint
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "file" / "x"))
    made = ImageDataset(scan_tree(root), 24)
    with pytest.warns(UserWarning, match="HMOE_CACHE"):
        assert made.fingerprint == expected
    with pytest.raises(HmoeError, match="source=files"):
        made.with_options(options=CACHE).inputs(0, torch.tensor([0]))


@pytest.mark.parametrize("source", ["files", "cache"])
def test_damaged_files_are_refused_or_skipped(root, source):
    expected = ImageDataset(scan_tree(root), 24)
    expected.labels, expected.fingerprint
    (root / "a" / "cat" / "00 cut.jpg").write_bytes(
        (root / "a" / "cat" / "0.jpg").read_bytes()[:200]
    )
    (root / "b" / "dog" / "text.jpg").write_text("x")
    made = ImageDataset(scan_tree(root), 24, {"source": source})
    for ask in (
        lambda: made.labels,
        lambda: made.fingerprint,
        lambda: made.inputs(0, torch.tensor([0])),
        lambda: made.pictures(0, torch.tensor([0])),
        lambda: made.notes,
    ):
        with pytest.raises(
            HmoeError, match="2 of 26 images cannot be read: a/cat/00 cut.jpg.*b/dog/text.jpg"
        ):
            ask()
    skipping = made.with_options(options={"unreadable": "skip"})
    with pytest.warns(
        UserWarning, match="2 of 26 images cannot be read and are left out: a/cat/00 cut.jpg"
    ):
        skipping.labels
    assert skipping.fingerprint == expected.fingerprint
    assert skipping.notes == [
        "2 of 26 images cannot be read and are left out: a/cat/00 cut.jpg, b/dog/text.jpg"
    ]
    assert all(torch.equal(a, b) for a, b in zip(skipping.labels, expected.labels))
    for position in range(3):
        assert torch.equal(
            skipping.inputs(position, torch.arange(8)), expected.inputs(position, torch.arange(8))
        )


def test_a_file_that_vanishes_in_training_is_named(root, helped):
    made = ImageDataset(scan_tree(root), 24)
    made.labels
    (root / "a" / "cat" / "0.jpg").unlink()
    for workers in (0, 2):
        made.workers = workers
        with pytest.raises(HmoeError, match="a/cat/0.jpg cannot be read .No such file"):
            made.inputs(0, torch.arange(3))
        assert made.inputs(0, torch.arange(1, 3)).shape[0] == 2


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_not_a_wait(helped):
    expected = helped.inputs(0, torch.arange(2))
    workers = list(module._pool(2)._processes)
    for worker in workers:  # both, or the other one may do all of the work
        os.kill(worker, signal.SIGSTOP)
    finish = helped.request(0, torch.arange(2))
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(HmoeError, match="has ended.*Fix: use fewer workers"):
        finish()
    assert torch.equal(helped.inputs(0, torch.arange(2)), expected), (
        "the next request starts a pool"
    )


PARENT = """
import sys, torch
from hmoe_repro.data.loader import ImageDataset, _pool
from hmoe_repro.data.image_folder import scan_tree
data = ImageDataset(scan_tree(sys.argv[1]), 24, workers=1)
data.inputs(0, torch.arange(2))
print(next(iter(_pool(1)._processes)), flush=True)
sys.stdin.readline()
"""


def alive(pid):
    "Is a process running?"
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_no_helper_outlives_a_killed_training(whole):
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).resolve().parents[2])}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(whole)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    helper = int(parent.stdout.readline())
    assert alive(helper)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(helper) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(helper)


class Terminal(io.StringIO):
    "A stream that says it is a terminal."

    def isatty(self):
        return True


def test_what_was_last_prepared_is_kept_until_a_file_changes(root):
    data = ImageDataset(scan_tree(root), 24, CACHE)
    first = data.with_options(16)
    assert data.with_options(16) is first
    assert first.resolution == 16
    assert data.with_options(16, {"val_augment": False}) is not first
    again = data.with_options(16)
    assert again is not first
    assert again.fingerprint == first.fingerprint
    changed, other = (root / file for file in again.tree.flat[:2])
    changed.write_bytes(other.read_bytes())
    now = data.with_options(16)
    assert now is not again
    assert now.fingerprint != first.fingerprint


def test_a_bar_where_somebody_watches_and_nothing_elsewhere(root, monkeypatch, capfd):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    ImageDataset(scan_tree(root), 24, CACHE).labels
    assert capfd.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    other = ImageDataset(scan_tree(root), 25, CACHE)
    other.labels
    assert f"caching {root.name}" in terminal.getvalue()
    assert capfd.readouterr() == ("", "")
