"""The cache of decoded images: the pixels of the files, whole or not there, and what is
remembered of each file."""

import hashlib
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

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import cache as module
from hmoe_repro.data.cache import cache_folder, cache_root, examine, open_cache, read_rows
from hmoe_repro.data.image_folder import scan_tree
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.transforms import evaluation_transform, normalise, read_image

SUFFIXES = (".jpg", ".png", ".webp", ".bmp")


def write(path, seed, size=(30, 21)):
    "An image of random pixels."
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    ).save(path)


@pytest.fixture
def root(tmp_path, monkeypatch):
    "A folder of 2 domains, 2 classes, 3 images each, with a cache folder of its own."
    monkeypatch.delenv("HMOE_CACHE", raising=False)
    for i in range(12):
        write(
            tmp_path
            / "data"
            / "Pets"
            / "ab"[i // 6]
            / ("cat", "dog")[i % 6 // 3]
            / f"{i}{SUFFIXES[i % 4]}",
            i,
            (20 + i, 33 - i),
        )
    return tmp_path / "data" / "Pets"


def reads(tree, **options):
    "How many files a look at a tree reads."
    seen = []
    examine(tree, on_progress=lambda done, total: seen.append(total), **options)
    return seen[-1] if seen else 0


def pixels(cache):
    "All of a cache as one tensor."
    return read_rows(cache, torch.arange(len(cache.images)))


def direct(tree, resolution):
    "The evaluation inputs of all files, from the files."
    return torch.stack(
        [evaluation_transform(resolution)(read_image(tree.root / f)) for f in tree.flat]
    )


def listing(tree):
    "What lies in the cache folder, locks left out."
    return sorted(p.name for p in cache_root(tree).iterdir() if not p.name.endswith(".lock"))


def test_the_pixels_are_those_of_the_files(root):
    tree = scan_tree(root)
    for resolution in (8, 33):
        cache = open_cache(tree, resolution)
        assert cache.images.shape == (12, resolution, resolution, 3) and not cache.notes
        assert torch.equal(normalise(pixels(cache)), direct(tree, resolution))
    rows = torch.tensor([7, 7, 0])
    assert torch.equal(read_rows(cache, rows), pixels(cache)[rows]) and read_rows(
        cache, rows[:0]
    ).shape == (0, 33, 33, 3)
    with pytest.raises(IndexError):
        read_rows(cache, torch.tensor([12]))
    read_rows(cache, rows).zero_()
    assert torch.equal(normalise(pixels(cache)), direct(tree, 33))


def test_it_lies_beside_the_data_where_no_scan_sees_it(root, monkeypatch, tmp_path):
    tree = scan_tree(root)
    assert cache_root(tree) == root.parent / ".hmoe-cache"
    assert open_cache(tree, 8).path.parent == root.parent / ".hmoe-cache"
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "else where"))
    assert open_cache(tree, 8).path.parent == tmp_path / "else where"


def test_a_second_opening_reads_no_image(root, monkeypatch):
    tree = scan_tree(root)
    first = open_cache(tree, 8)
    monkeypatch.setattr(module, "_write_cache", lambda *a: pytest.fail("built again"))
    again = open_cache(scan_tree(root), 8)
    assert (
        again.path == first.path and torch.equal(pixels(again), pixels(first)) and reads(tree) == 0
    )


@pytest.mark.parametrize("change", ["content", "time", "added", "removed", "renamed"])
def test_any_change_of_the_files_makes_a_new_cache(root, change):
    before = open_cache(scan_tree(root), 8)
    file = root / "a" / "cat" / "1.png"
    if change == "content":
        write(file, 99)
    if change == "time":
        os.utime(file, ns=(1, 1))
    if change == "added":
        write(root / "a" / "cat" / "new.png", 99)
    if change == "removed":
        file.unlink()
    if change == "renamed":
        file.rename(file.with_name("zzz.png"))
    tree = scan_tree(root)
    after = open_cache(tree, 8)
    assert after.path != before.path and torch.equal(normalise(pixels(after)), direct(tree, 8))
    assert not before.path.exists(), "the cache of the old state is still there"
    assert torch.isfinite(normalise(pixels(before))).all(), (
        "a process that still uses the old cache can go on"
    )


def test_caches_of_other_sizes_and_data_sets_stay(root, tmp_path, monkeypatch):
    other = tmp_path / "other" / "Pets"
    shutil.copytree(root, other)
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "shared"))
    kept = [open_cache(scan_tree(root), 9), open_cache(scan_tree(other), 8)]
    open_cache(scan_tree(root), 8)
    write(root / "a" / "cat" / "new.png", 99)
    open_cache(scan_tree(root), 8)
    assert all(c.path.exists() for c in kept)


@pytest.mark.parametrize(
    "damage", ["cut", "longer", "no images", "no manifest", "manifest cut", "other manifest"]
)
def test_a_damaged_cache_is_built_again_and_says_so(root, damage):
    tree = scan_tree(root)
    cache = open_cache(tree, 8)
    images, manifest = cache.path / "images.u8", cache.path / "manifest.json"
    if damage == "cut":
        os.truncate(images, 100)
    if damage == "longer":
        os.truncate(images, images.stat().st_size + 1)
    if damage == "no images":
        images.unlink()
    if damage == "no manifest":
        manifest.unlink()
    if damage == "manifest cut":
        manifest.write_text(manifest.read_text()[:10])
    if damage == "other manifest":
        manifest.write_text(json.dumps({"shape": [12, 4, 16, 3]}))
    again = open_cache(tree, 8)
    assert torch.equal(normalise(pixels(again)), direct(tree, 8)) and "incomplete" in again.notes[0]
    assert not open_cache(tree, 8).notes


def test_a_failed_build_leaves_nothing(root, monkeypatch):
    tree = scan_tree(root)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(HmoeError, match="could not be written.*No space left.*HMOE_CACHE"):
        open_cache(tree, 8)
    monkeypatch.setattr(os, "pwrite", lambda *arguments: 0)
    with pytest.raises(HmoeError, match="could not be written"):
        open_cache(tree, 8)
    monkeypatch.undo()
    assert [n for n in listing(tree) if "Pets-8-" in n] == []
    assert torch.equal(normalise(pixels(open_cache(tree, 8))), direct(tree, 8))


def test_an_interrupted_build_leaves_nothing(root):
    tree = scan_tree(root)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_cache(tree, 8, on_progress=interrupt)
    assert not (cache_root(tree).exists() and [n for n in listing(tree) if "Pets-8-" in n])


def test_no_room_and_no_permission(root, monkeypatch, tmp_path):
    tree = scan_tree(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(HmoeError, match=r"takes 0\.0 GB.*source=files"):
        open_cache(tree, 8)
    monkeypatch.undo()
    (tmp_path / "a file").write_text("x")
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "a file" / "below"))
    with pytest.raises(HmoeError, match="cannot be written. Fix: HMOE_CACHE=.*source=files"):
        open_cache(tree, 8)
    look = examine(tree)
    assert look.digests[0] and "HMOE_CACHE" in look.note


BUILD = """
import sys, time
from hmoe_repro.data.cache import open_cache
from hmoe_repro.data.image_folder import scan_tree
import hmoe_repro.data.cache as cache
slow = cache.as_bytes
def as_bytes(image):
    print("image", flush=True)
    time.sleep(float(sys.argv[2]))
    return slow(image)
cache.as_bytes = as_bytes
open_cache(scan_tree(sys.argv[1]), 8, workers=1)
print("done", flush=True)
"""


def start(root, pause):
    "Another process that builds the cache, waiting `pause` seconds for each image."
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).resolve().parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(root), str(pause)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_killed_build_is_not_taken_for_whole_and_is_cleared_away(root):
    tree, process = scan_tree(root), start(root, 30)
    assert process.stdout.readline() == "image\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    parts = [n for n in listing(tree) if ".part-" in n]
    assert parts and not cache_folder(tree, 8).exists()
    assert torch.equal(normalise(pixels(open_cache(tree, 8))), direct(tree, 8))
    assert [n for n in listing(tree) if ".part-" in n] == []


@pytest.mark.slow
def test_two_processes_build_once(root):
    tree = scan_tree(root)
    processes = [start(root, 0.02) for _ in range(2)]
    outputs = [p.communicate(timeout=60)[0].splitlines() for p in processes]
    assert all(p.returncode == 0 for p in processes) and sorted(map(len, outputs)) == [1, 13]
    assert (
        torch.equal(normalise(pixels(open_cache(tree, 8))), direct(tree, 8))
        and len([n for n in listing(tree) if n.startswith("Pets-8-")]) == 1
    )


def test_without_locks_the_first_to_rename_wins(root, monkeypatch):
    def no_locks_here(path):
        raise HmoeError("cannot lock")

    tree, real = scan_tree(root), module._write_cache
    monkeypatch.setattr(module, "locked", no_locks_here)

    def other_was_faster(*arguments):
        monkeypatch.setattr(module, "_write_cache", real)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        open_cache(tree, 8)
        real(*arguments)

    monkeypatch.setattr(module, "_write_cache", other_was_faster)
    assert torch.equal(normalise(pixels(open_cache(tree, 8))), direct(tree, 8))
    assert [n for n in listing(tree) if ".part-" in n] == []


def test_files_that_change_during_a_build_are_refused(root):
    tree = scan_tree(root)
    with pytest.raises(HmoeError, match="changed while"):
        open_cache(
            tree,
            8,
            on_progress=lambda done, total: os.utime(root / "a" / "cat" / "0.jpg", ns=(5, done)),
        )
    assert [n for n in listing(tree) if "Pets-8-" in n] == []


def test_unreadable_images_are_black_and_listed(root):
    (root / "a" / "cat" / "1.png").write_bytes(b"junk")
    tree = scan_tree(root)
    row = tree.flat.index("a/cat/1.png")
    cache = open_cache(tree, 8)
    assert not cache.images[row].any() and cache.images[row + 1].any()
    assert [bool(r) for r in examine(tree).reasons] == [i == row for i in range(12)] and reads(
        tree
    ) == 0


# What is remembered of files


def test_only_what_changed_is_read_again(root):
    tree = scan_tree(root)
    assert reads(tree) == 12 and reads(tree) == 0
    before = examine(tree).digests
    write(root / "b" / "dog" / "9.png", 77)
    write(root / "b" / "dog" / "new.png", 78)
    tree = scan_tree(root)
    assert reads(tree) == 2
    after = dict(zip(tree.flat, examine(tree).digests))
    assert [f for f, d in zip(scan_tree(root).flat, after.values()) if d not in before] == [
        "b/dog/9.png",
        "b/dog/new.png",
    ]
    (root / "b" / "dog" / "new.png").unlink()
    assert reads(scan_tree(root)) == 0


def test_a_file_that_vanishes_is_read_until_it_is_back(root):
    tree = scan_tree(root)
    examine(tree)
    (root / "a" / "cat" / "0.jpg").rename(root / "kept")
    look = examine(tree)
    assert look.digests[0] is None and "No such file" in look.reasons[0] and reads(tree) == 1
    (root / "kept").rename(root / "a" / "cat" / "0.jpg")
    assert examine(tree).reasons[0] is None


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "{",
        "[]",
        '{"files": {}}',
        '{"decoder": 2, "files": 3}',
        '{"decoder": 2, "files": {"a/cat/0.jpg": [1]}}',
    ],
)
def test_a_damaged_memory_is_forgotten(root, junk):
    tree = scan_tree(root)
    expected = examine(tree).digests
    memory = next(cache_root(tree).glob("*-files.json"))
    memory.write_text(junk)
    assert examine(tree).digests == expected and reads(tree) == 0


def test_what_an_earlier_decoder_found_does_not_count(root):
    """It took floating-point pixels for readable and made white pictures of 16 bits: neither its
    list of files nor its cache is used, and a data set with such files has another fingerprint."""
    deep, fraction = root / "a" / "cat" / "deep.png", root / "a" / "cat" / "fraction.png"
    plain = ImageDataset(scan_tree(root)).fingerprint
    for path, number in ((deep, np.uint16), (fraction, np.float32)):
        Image.fromarray(np.full((9, 9), 30_000, number)).save(path, "TIFF")
    tree = scan_tree(root)
    rows = {file: i for i, file in enumerate(tree.flat)}
    memory, facts = module._ledger_path(tree), module.file_facts(tree)
    digest = lambda file: hashlib.sha256((root / file).read_bytes()).hexdigest()
    entries = {file: [*facts[i], digest(file), None] for file, i in rows.items()}
    memory.parent.mkdir(exist_ok=True)
    memory.write_text(json.dumps({"files": entries}))
    look = examine(tree)
    assert [f for f, reason in zip(tree.flat, look.reasons) if reason] == ["a/cat/fraction.png"]
    fraction.unlink()
    tree = scan_tree(root)
    row = tree.flat.index("a/cat/deep.png")
    assert (open_cache(tree, 8).images[row] == round(30_000 / 257)).all()
    assert sum(str(digest).endswith(" scaled") for digest in examine(tree).digests) == 1
    digests = [digest.removesuffix(" scaled") for digest in examine(tree).digests]
    assert fingerprint(tree, digests) != ImageDataset(tree).fingerprint
    deep.unlink()
    tree = scan_tree(root)
    assert ImageDataset(tree).fingerprint == plain == fingerprint(tree, examine(tree).digests)


def fingerprint(tree, digests):
    "That of a data set whose files have these digests: how it was always computed."
    contents, labels = dict(zip(tree.flat, digests)), [y.tolist() for y in tree.labels]
    text = repr((tree.domain_names, tree.class_names))
    for files, ys in zip(tree.files, labels):
        text += "".join(f"{file}\0{y}\0{contents[file]}\n" for file, y in zip(files, ys))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def test_names_that_are_no_utf8(root):
    name = os.fsencode(root / "a" / "cat") + b"/\xff\xfe.png"
    try:
        Path(os.fsdecode(name)).write_bytes((root / "a" / "cat" / "1.png").read_bytes())
    except OSError:
        pytest.skip("this file system takes only UTF-8")
    tree = scan_tree(root)
    assert len(tree) == 13 and reads(tree) == 13 and reads(tree) == 0
    assert open_cache(tree, 8).images.shape[0] == 13


@pytest.mark.serial
def test_a_warm_cache_gives_4000_images_a_second(tmp_path, monkeypatch):
    images = np.memmap(tmp_path / "images.u8", np.uint8, "w+", shape=(600, 224, 224, 3))
    images[:] = 7
    cache = module.ImageCache(
        tmp_path,
        np.memmap(tmp_path / "images.u8", np.uint8, "r", shape=images.shape).view(np.ndarray),
    )
    batches = torch.randperm(600, generator=torch.Generator().manual_seed(0)).split(32)
    for batch in batches:
        read_rows(cache, batch)
    rates = []
    for _ in range(5):
        started = time.process_time()
        for batch in batches:
            read_rows(cache, batch)
        rates.append(600 / (time.process_time() - started))
    assert max(rates) >= 4000, rates


MEMORY = """
import sys, numpy as np, torch
from pathlib import Path
from hmoe_repro.data.cache import ImageCache, read_rows
def held(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(kind))
folder, n = Path(sys.argv[1]), 1000
with open(folder / "images.u8", "wb") as file:
    for _ in range(n): file.write(bytes(range(256)) * (224 * 224 * 3 // 256))
mapped = np.memmap(folder / "images.u8", np.uint8, "r", shape=(n, 224, 224, 3))
cache = ImageCache(folder, mapped.view(np.ndarray))
read_rows(cache, torch.arange(32))
before = held("RssAnon"), held("RssFile")
for rows in torch.randperm(n).split(32): read_rows(cache, rows)
print(held("RssAnon") - before[0], held("RssFile") - before[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_reading_everything_keeps_no_memory_of_its_own(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    own, mapped = map(int, done.stdout.split())
    assert own < 30 and mapped > 100, (own, mapped)
