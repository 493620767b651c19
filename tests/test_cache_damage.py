"""Damaged and stale caches: no bit of a cache, of its ledger or of an unfinished build that changed
is trained on, and images that were replaced unseen are found."""

import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import hmoe
from PIL import Image

from hmoe_repro.core import row_files
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.row_files import RowWriter, build_once, open_rows
from hmoe_repro.data import cache as module
from hmoe_repro.data import loader, precomputed
from hmoe_repro.data.cache import (
    cache_file,
    cache_root,
    code_digest,
    contents_digest,
    examine,
    open_cache,
)
from hmoe_repro.data.image_folder import scan_tree
from hmoe_repro.data.loader import ImageDataset, decode_task
from hmoe_repro.data.precomputed import PrecomputedDataset


def picture(path, shade):
    "A picture whose file has the same size whatever its shade."
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 12), (shade, 255 - shade, 7)).save(path)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    "A folder of 3 domains and 2 classes, 4 images of each, with a cache folder of its own."
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(precomputed, "BLOCK_SIZE", 4)
    monkeypatch.setattr(precomputed, "SYNC_SECONDS", 0)
    for i in range(24):
        picture(tmp_path / "im" / "abc"[i // 8] / "xy"[i % 8 // 4] / f"{i}.bmp", 3 * i)
    return scan_tree(tmp_path / "im", "im")


class Part:
    "The means of the halves of an image; `calls` counts blocks."

    key, shape = "means", (6,)

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return torch.cat([x[..., :4].mean((2, 3)), x[..., 4:].mean((2, 3))], 1)


def dataset(tree, **options):
    "A fresh look at the folder, as another process takes it."
    return ImageDataset(scan_tree(tree.root, "im"), 8, options, workers=0)


def opened_anew():
    "Forget what this process has checked."
    row_files._opened.clear()


def rows_of(tree, part=None):
    "All rows of the precomputed table."
    data = PrecomputedDataset(dataset(tree), [part or Part()])
    return torch.cat([data.inputs(d, torch.arange(8)) for d in range(3)])


def flipped(path, position, bit=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)


def only(tree, suffix):
    (path,) = cache_root(tree).glob(f"[!.]*{suffix}")
    return path


def replaced(tree, files):
    "Replace images by others of the same size and modification time."
    for file in files:
        path = tree.root / file
        before = path.stat()
        picture(path, 255)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size


# Rows


def test_each_wrong_bit_of_a_cache_is_refused_or_changes_nothing(tree):
    whole = np.array(open_cache(tree, 8))
    path = only(tree, ".u8")
    content, draw = path.read_bytes(), random.Random(0)
    refused = 0
    for position in draw.sample(range(len(content)), 60) + [0, len(content) - 1]:
        path.write_bytes(content)
        flipped(path, position, 1 << draw.randrange(8))
        opened_anew()
        try:
            pixels = np.array(open_cache(tree, 8))
        except HmoeError as error:
            refused += 1
            assert str(path) in str(error)
            assert "SHA-256" in str(error)
            assert not path.exists()
            assert np.array_equal(open_cache(tree, 8), whole), "not built again"
        else:
            assert np.array_equal(pixels, whole)
    assert refused > 40


def test_a_block_is_checked_when_it_is_first_read_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_BLOCK_BYTES", 100)
    values, path = np.arange(1000, dtype=np.uint16).reshape(50, 20), tmp_path / "rows"
    writer = RowWriter(path, 40, 50, tmp_path / "part")  # blocks of two rows
    writer.begin()
    writer.write(0, values.tobytes())
    writer.finish(contents_digest([]))
    flipped(path, 40 * 9)
    rows = open_rows(path, np.uint16, (5, 10, 20), 2)
    assert np.array_equal(rows[4, [1, 1, 7]], values[[41, 41, 47]])
    assert np.flatnonzero(rows._checked).tolist() == [20, 23]
    assert open_rows(path, np.uint16, (5, 10, 20), 2) is rows, "what is checked is forgotten"
    with pytest.raises(HmoeError, match="rows 8 to 9 do not fit.*start again"):
        rows[0, 8]  # its neighbour is damaged
    assert np.array_equal(rows[1:3], values[10:30].reshape(2, 10, 20)), "the map is still there"


def test_rows_come_in_any_order_and_missing_ones_are_zeros(tmp_path):
    writer = RowWriter(tmp_path / "rows", 4, 5, tmp_path / "part")
    (tmp_path / "part").write_bytes(b"left by another build, and longer than the rows")
    writer.begin()
    for row in (3, 0):
        writer.write(row, bytes([row + 1]) * 4, safely=row == 0)
    assert not (tmp_path / "rows").exists()
    writer.finish(b"c" * 32)
    assert not (tmp_path / "part").exists()
    rows = open_rows(tmp_path / "rows", np.uint8, (5, 4), contents=b"c" * 32)
    assert rows[:, 0].tolist() == [1, 0, 0, 4, 0]
    assert open_rows(tmp_path / "rows", np.uint8, (5, 4), contents=b"d" * 32) is None


def test_rows_that_are_not_what_was_written_are_refused(tmp_path):
    writer = RowWriter(tmp_path / "rows", 4, 1, tmp_path / "part")
    writer.begin()
    writer.write(0, b"abcd")
    with pytest.raises(HmoeError, match="cannot be read back"):
        writer.finish(b"c" * 32, whole="0" * 64)
    assert not (tmp_path / "rows").exists()
    writer.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_built_is_built_once(tmp_path, fails):
    builds, rows = [], []

    def build():
        builds.append(1)
        rows.extend([] if fails else [7])

    found = [build_once(tmp_path / "lock", "x", lambda: rows or None, build) for _ in range(3)]
    assert found == ([None] * 3 if fails else [[7]] * 3)
    assert len(builds) == (3 if fails else 1)


@pytest.mark.parametrize("suffix, build", [(".u8", lambda t: open_cache(t, 8)), (".f16", None)])
def test_an_old_file_in_use_is_left_and_stops_nobody(tree, monkeypatch, suffix, build):
    build = build or rows_of
    build(tree)
    old = only(tree, suffix)
    picture(tree.root / "a" / "x" / "more.bmp", 99)  # another state of the folder
    unlink = type(old).unlink

    def in_use(path, **given):
        if path == old:
            raise PermissionError(13, "in use")
        return unlink(path, **given)

    monkeypatch.setattr(type(old), "unlink", in_use)
    tree = scan_tree(tree.root, "im")
    build(tree) if suffix == ".u8" else PrecomputedDataset(dataset(tree), [Part()]).open()
    assert old.exists()
    assert len(list(cache_root(tree).glob(f"[!.]*{suffix}"))) == 2


def test_a_cache_that_another_process_builds_again_is_not_removed(tree, tmp_path):
    rows = open_cache(tree, 8)
    path = only(tree, ".u8")
    content = path.read_bytes()
    shutil.copy(path, tmp_path / "copy")
    flipped(path, 5)
    rows = row_files.Rows(path, np.uint8, rows.shape)
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(HmoeError, match="is damaged"):
        rows[0]
    assert path.read_bytes() == content


def test_a_cache_under_the_name_of_another_is_built_again(tree):
    eight, sizes = np.array(open_cache(tree, 8)), {}
    for how in ("bilinear", "bicubic"):
        sizes[how] = open_cache(tree, 8, how=how).path
    other = sizes["bicubic"].read_bytes()
    sizes["bilinear"].write_bytes(other)
    opened_anew()
    assert np.array_equal(open_cache(tree, 8), eight)
    assert sizes["bilinear"].read_bytes() != other


def test_workers_check_what_they_read(tree):
    data = dataset(tree, source="cache")
    task = data.task(1, torch.arange(8), torch.arange(8))
    expected = decode_task(task)
    flipped(only(tree, ".u8"), 8 * 8 * 3 * 12)
    opened_anew()
    with pytest.raises(HmoeError, match="is damaged"):
        decode_task(task)
    with pytest.raises(HmoeError, match="was removed or damaged"):
        opened_anew()
        decode_task(task)
    again = dataset(tree, source="cache")
    assert np.array_equal(decode_task(again.task(1, torch.arange(8), torch.arange(8))), expected)


def test_a_cache_that_was_removed_serves_those_who_have_it_open(tree):
    data = dataset(tree, source="cache")
    task = data.task(1, torch.arange(8), torch.arange(8))
    expected = decode_task(task)
    data.cache.path.unlink()
    assert np.array_equal(decode_task(task), expected)


# Precomputed stages


def test_each_wrong_bit_of_precomputed_rows_is_refused_or_changes_nothing(tree):
    whole = rows_of(tree)
    path = only(tree, ".f16")
    content, draw, refused = path.read_bytes(), random.Random(1), 0
    for position in draw.sample(range(len(content)), 40):
        path.write_bytes(content)
        flipped(path, position, 1 << draw.randrange(8))
        opened_anew()
        try:
            assert torch.equal(rows_of(tree), whole)
        except HmoeError as error:
            refused += 1
            assert str(path) in str(error)
            assert torch.equal(rows_of(tree), whole), "not computed again"
    assert refused > 20


@pytest.mark.parametrize("damage", ["rows", "note", "count", "cut", "images"])
def test_a_damaged_unfinished_build_starts_again(tree, damage):
    whole = rows_of(tree)
    finished = only(tree, ".f16")
    content = finished.read_bytes()
    finished.unlink()
    opened_anew()

    class Stops(Part):
        def __call__(self, x):
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().__call__(x)

    Stops.__module__ = Part.__module__
    with pytest.raises(KeyboardInterrupt):
        rows_of(tree, Stops())
    part, note = only(tree, ".part"), only(tree, ".rows")
    said = json.loads(note.read_text())
    assert said["rows"] == 16
    if damage == "rows":
        flipped(part, 7)
    if damage == "note":
        note.write_text("{")
    if damage == "count":
        note.write_text(json.dumps(said | {"rows": 17}))
    if damage == "cut":
        os.truncate(part, 100)
    if damage == "images":
        note.write_text(json.dumps(said | {"contents": "0" * 64}))
    again = Part()
    assert torch.equal(rows_of(tree, again), whole), "resumed"
    assert again.calls == 6, "resumed"
    assert only(tree, ".f16").read_bytes() == content


def test_the_name_of_precomputed_rows_holds_versions_and_code(tree, monkeypatch):
    rows_of(tree)
    names = {only(tree, ".f16").name}

    def added(where, name, value):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            part = Part()
            rows_of(tree, part)
        found = {path.name for path in cache_root(tree).glob("*.f16")}
        assert part.calls == 6, (name, value)
        assert len(found - names) == 1, (name, value)
        names.update(found)

    version, maker = precomputed.metadata.version, precomputed._maker(Part())
    for package in ("torch", "timm"):
        newer = lambda name, package=package: version(name) + "+new" * (name == package)
        added(precomputed.metadata, "version", newer)
    for changed in (Part.__module__, precomputed.__name__):
        other = lambda name, changed=changed: code_digest(name) + "x" * (name == changed)
        added(precomputed, "code_digest", other)
    added(precomputed, "pixel_maker", lambda: "another decoder")
    monkeypatch.setattr(Part, "device", torch.device("cuda"), raising=False)
    assert precomputed._maker(Part()) != maker, "rows of a GPU are others"


def test_the_name_of_a_cache_holds_the_decoder_and_the_rest_stays_while_there_is_room(
    tree, monkeypatch
):
    first = open_cache(tree, 8).path
    with monkeypatch.context() as patch:
        patch.setattr(module, "code_digest", lambda name: "another")
        other = open_cache(tree, 8).path
        assert other != first, "a run of another version may use it"
        assert first.exists(), "a run of another version may use it"
        other.unlink()
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
        assert open_cache(tree, 8).path == other
        assert not first.exists()
    assert not cache_file(tree, 8).exists()


def test_a_code_digest_ignores_comments_and_documentation(tmp_path, monkeypatch):
    def digest(text):
        (tmp_path / "some_code.py").write_text(text)
        code_digest.cache_clear()
        return code_digest("some_code")

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_code.py").write_text("")
    import some_code  # noqa: F401

    plain = digest("def f(x):\n    return x + 1\n")
    said = (
        '"""Module."""\n# comment\ndef f(x):\n    """Return the next number."""\n    return x + 1\n'
    )
    assert digest(said) == plain != digest("def f(x):\n    return x + 2\n")
    code_digest.cache_clear()


# Images that were replaced


def test_images_replaced_at_equal_size_and_time_are_noticed_and_every_cache_is_made_again(tree):
    data = dataset(tree, source="cache")
    before, pixels, rows = data.fingerprint, np.array(data.cache), rows_of(tree)
    stale = only(tree, ".u8").read_bytes()
    opened_anew()
    replaced(tree, tree.flat[3:9])
    with pytest.warns(UserWarning, match="6 of 24 images of im were replaced.*a/x/3.bmp"):
        after = dataset(tree, source="cache")
        assert after.fingerprint != before
    different = (np.array(after.cache) != pixels).any((1, 2, 3))
    assert np.flatnonzero(different).tolist() == list(range(3, 9))
    assert only(tree, ".u8").read_bytes() != stale
    assert (rows_of(tree) != rows).any(1).nonzero().flatten().tolist() == list(range(3, 9))
    assert dataset(tree).fingerprint == after.fingerprint


def test_without_a_change_time_a_sample_is_compared_at_each_start(tree, monkeypatch):
    "As on systems that keep none: 20 of 24 images are replaced, and 8 compared at each start."
    facts = module.file_facts
    for place in (module, loader):
        monkeypatch.setattr(place, "file_facts", lambda tree: [f[:2] + [0] for f in facts(tree)])
    monkeypatch.setattr(module, "SAMPLE", 8)
    before, kept = dataset(tree).fingerprint, examine(tree)[0]
    assert dataset(tree).fingerprint == before
    replaced(tree, tree.flat[2:22])
    with pytest.warns(UserWarning, match="20 of 24 images"):
        now = examine(tree)[0]
    assert [a != b for a, b in zip(now, kept)] == [2 <= i < 22 for i in range(24)]
    assert dataset(tree).fingerprint != before


def test_verify_reads_all_and_says_what_was_replaced(tree, tmp_path, own_names):
    for said in ("", "1 of 24 images of im were replaced"):
        done = hmoe("data", "verify", str(tree.root), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr, done.stderr
        assert ("replaced" in done.stderr) == bool(said)
        replaced(tree, tree.flat[5:6])


def test_other_permissions_make_nothing_again(tree, recwarn):
    path, before = open_cache(tree, 8).path, dataset(tree).fingerprint
    content = path.stat().st_mtime_ns
    os.chmod(tree.root / tree.flat[0], 0o600)
    assert dataset(tree, source="cache").cache.path == path
    assert path.stat().st_mtime_ns == content
    assert dataset(tree).fingerprint == before
    assert not [w for w in recwarn if "replaced" in str(w.message)]


@pytest.mark.parametrize("damage", ["digest", "reason", "junk", "entry"])
def test_an_edited_ledger_is_not_believed(tree, damage):
    digests, _ = examine(tree)
    ledger = only(tree, ".json")
    known = json.loads(ledger.read_text())
    file = tree.flat[4]
    if damage == "digest":
        known[file][2] = "0" * 64
    if damage == "reason":
        known[file][3] = "damaged"
    if damage == "entry":
        known[file] = 3
    ledger.write_text("[1, 2]" if damage == "junk" else json.dumps(known))
    assert examine(tree) == (digests, [None] * 24)


def test_a_ledger_of_an_earlier_version_is_used_and_its_contents_are_compared(tree):
    digests, _ = examine(tree)
    ledger = only(tree, ".json")
    known = json.loads(ledger.read_text())
    known.pop("")
    ledger.write_text(json.dumps({file: entry[:4] for file, entry in known.items()}))
    read = []
    assert examine(tree, on_progress=lambda done, total: read.append(total))[0] == digests
    assert not read
    assert "" in json.loads(ledger.read_text())
    ledger.write_text(json.dumps({file: entry[:4] for file, entry in known.items()}))
    replaced(tree, tree.flat[:2])
    with pytest.warns(UserWarning, match="2 of 24 images"):
        assert examine(tree)[0][2:] == digests[2:]


def test_the_digest_of_contents_tells_missing_files(tmp_path):
    assert contents_digest(["a", None]) != contents_digest(["a", "None"]) != contents_digest(["a"])
    assert open_rows(tmp_path / "none", np.uint8, (1, 2)) is None
    assert not Path(tmp_path / "none").exists()
