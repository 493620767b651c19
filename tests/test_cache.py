"""The cache of decoded images: the pixels of the files, whole or not there, and what is
remembered of each file."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from trees import evaluation_transform

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import cache as module
from hmoe_repro.data import verify
from hmoe_repro.data.cache import cache_file, cache_root, examine, open_cache
from hmoe_repro.data.image_folder import ImageTree, scan_tree
from hmoe_repro.data.transforms import normalise, read_image

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


@pytest.mark.parametrize("warm", [False, True])
def test_the_list_of_all_files_is_not_made_for_each_file(root, warm, monkeypatch):
    tree = scan_tree(root)
    if warm:
        examine(tree)
    made = []
    flat = ImageTree.flat.fget
    counted = property(lambda self: (made.append(1), flat(self))[1])
    monkeypatch.setattr(ImageTree, "flat", counted)
    digests, reasons = examine(tree)
    assert reasons == [None] * 12
    assert len(set(digests)) == 12
    assert len(made) < 6
    made.clear()
    table = pd.DataFrame({"file": flat(tree)})
    found = SimpleNamespace(notes=[], unreadable=[], missing=[], root=root, table=table)
    verify._open_images(found, tree, 1, None)
    assert len(found.table) == 12
    assert len(made) < 12


def pixels(cache):
    "All of a cache as one tensor."
    return torch.from_numpy(np.array(cache))


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
        assert cache.shape == (12, resolution, resolution, 3)
        assert torch.equal(normalise(pixels(cache)), direct(tree, resolution))


def test_it_lies_beside_the_data_where_no_scan_sees_it(root, monkeypatch, tmp_path):
    tree = scan_tree(root)
    assert cache_root(tree) == root.parent / ".hmoe-cache"
    assert Path(open_cache(tree, 8).path).parent == root.parent / ".hmoe-cache"
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "else where"))
    assert Path(open_cache(tree, 8).path).parent == tmp_path / "else where"


def test_a_second_opening_reads_no_image(root, monkeypatch):
    tree = scan_tree(root)
    first = open_cache(tree, 8)
    monkeypatch.setattr(module, "_build", lambda *a: pytest.fail("built again"))
    again = open_cache(scan_tree(root), 8)
    assert again.path == first.path
    assert torch.equal(pixels(again), pixels(first))
    assert reads(tree) == 0


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
    assert after.path != before.path
    assert torch.equal(normalise(pixels(after)), direct(tree, 8))
    assert not Path(before.path).exists(), "the cache of the old state is still there"
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
    assert all(Path(c.path).exists() for c in kept)


@pytest.mark.parametrize("size", [0, 100, 12 * 8 * 8 * 3 + 1])
def test_a_cache_of_another_size_is_built_again(root, size):
    tree = scan_tree(root)
    os.truncate(open_cache(tree, 8).path, size)
    assert torch.equal(normalise(pixels(open_cache(tree, 8))), direct(tree, 8))


def test_no_permission(root, monkeypatch, tmp_path):
    tree = scan_tree(root)
    (tmp_path / "a file").write_text("x")
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "a file" / "below"))
    with pytest.raises(HmoeError, match="cannot write in .*Fix: HMOE_CACHE=.*source=files"):
        open_cache(tree, 8)
    with pytest.warns(UserWarning, match="HMOE_CACHE"):
        assert examine(tree)[0][0]


def test_a_failed_build_leaves_nothing(root, monkeypatch):
    tree = scan_tree(root)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(HmoeError, match="could not be written.*No space left.*HMOE_CACHE"):
            open_cache(tree, 8)
    assert [n for n in listing(tree) if n.endswith((".u8", ".part"))] == []
    assert torch.equal(normalise(pixels(open_cache(tree, 8))), direct(tree, 8))


def test_an_interrupted_build_leaves_nothing(root):
    tree = scan_tree(root)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_cache(tree, 8, on_progress=interrupt)
    assert not (
        cache_root(tree).exists() and [n for n in listing(tree) if n.endswith((".u8", ".part"))]
    )


BUILD = """
import os, sys, time
from hmoe_repro.data.cache import open_cache
from hmoe_repro.data.image_folder import ImageTree, scan_tree
import hmoe_repro.data.cache as cache
slow = cache.square
def square(*arguments):
    os.write(1, b"image\\n")  # one write: several threads are here
    time.sleep(float(sys.argv[2]))
    return slow(*arguments)
cache.square = square
open_cache(scan_tree(sys.argv[1]), 8)
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
    assert not cache_file(tree, 8).exists()
    assert torch.equal(normalise(pixels(open_cache(tree, 8))), direct(tree, 8))
    assert [n for n in listing(tree) if n.endswith(".part")] == []


@pytest.mark.slow
def test_two_processes_build_once(root):
    tree = scan_tree(root)
    processes = [start(root, 0.02) for _ in range(2)]
    outputs = [p.communicate(timeout=60)[0].splitlines() for p in processes]
    assert all(p.returncode == 0 for p in processes)
    assert sorted(map(len, outputs)) == [1, 13]
    assert torch.equal(normalise(pixels(open_cache(tree, 8))), direct(tree, 8))
    assert len([n for n in listing(tree) if n.endswith(".u8")]) == 1


def test_caches_of_two_sizes_are_built_at_the_same_time(root):
    tree = scan_tree(root)
    others = []

    def build_another(done, total):
        if not others:
            others.append(open_cache(tree, 12))

    rows = open_cache(tree, 8, on_progress=build_another)
    assert torch.equal(normalise(pixels(rows)), direct(tree, 8))
    assert torch.equal(normalise(pixels(others[0])), direct(tree, 12))
    assert [n for n in listing(tree) if n.endswith(".part")] == []


def test_files_that_change_during_a_build_are_refused(root):
    tree = scan_tree(root)
    with pytest.raises(HmoeError, match="changed while"):
        open_cache(
            tree,
            8,
            on_progress=lambda done, total: os.utime(root / "a" / "cat" / "0.jpg", ns=(5, done)),
        )
    assert [n for n in listing(tree) if n.endswith((".u8", ".part"))] == []


def test_unreadable_images_are_black_and_listed(root):
    (root / "a" / "cat" / "1.png").write_bytes(b"junk")
    tree = scan_tree(root)
    row = tree.flat.index("a/cat/1.png")
    cache = open_cache(tree, 8)
    assert not cache[row].any()
    assert cache[row + 1].any()
    assert [bool(r) for r in examine(tree)[1]] == [i == row for i in range(12)]
    assert reads(tree) == 0


# What is remembered of files


def test_only_what_changed_is_read_again(root):
    tree = scan_tree(root)
    assert reads(tree) == 12
    assert reads(tree) == 0
    before = examine(tree)[0]
    write(root / "b" / "dog" / "9.png", 77)
    write(root / "b" / "dog" / "new.png", 78)
    tree = scan_tree(root)
    assert reads(tree) == 2
    after = dict(zip(tree.flat, examine(tree)[0]))
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
    digests, reasons = examine(tree)
    assert digests[0] is None
    assert "No such file" in reasons[0]
    assert reads(tree) == 1
    (root / "kept").rename(root / "a" / "cat" / "0.jpg")
    assert examine(tree)[1][0] is None


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
    assert len(tree) == 13
    assert reads(tree) == 13
    assert reads(tree) == 0
    assert open_cache(tree, 8).shape[0] == 13
