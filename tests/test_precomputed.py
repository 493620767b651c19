"""What frozen stages compute, kept: the rows that the parts give, computed once and shared, whole
or resumed, refused where there is no room."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_hash
from hmoe_repro.data import precomputed as module
from hmoe_repro.data.cache import cache_root, tree_state
from hmoe_repro.data.image_folder import sample_tree, scan_tree
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.precomputed import PrecomputedDataset, view_seeds

ALL = torch.arange(6)
BLOCKS = 4 * 2  # of one version: four domains of six images, in blocks of four and two


class Part:
    """Averages of squares of 8 pixels less their mean over the batch, so that other batches give
    other numbers; `on_call(part)` runs at each call."""

    def __init__(self, key="averages", on_call=None):
        self.key, self.on_call, self.calls = key, on_call, 0
        self.shape = (3, 4, 4)

    def buffers(self):
        return iter(())

    def compute(self, x):
        y = torch.nn.functional.avg_pool2d(x, 8)
        return y - y.mean(0)

    def __call__(self, x):
        self.calls += 1
        if self.on_call:
            self.on_call(self)
        return self.compute(x)


class Plain(Part):
    "A part whose output has no channels: `factor` times the first `length` pixels."

    def __init__(self, key, factor=1.0, length=5):
        super().__init__(key)
        self.factor, self.shape = factor, (length,)

    def compute(self, x):
        return self.factor * x.flatten(1)[:, : self.shape[0]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The root of a folder of 4 domains and 2 classes, 3 images of each."
    return sample_tree(tmp_path_factory.mktemp("precomputed") / "samples", 3, 40).root


@pytest.fixture
def images(whole, tmp_path, monkeypatch):
    "The data set, with a cache of its own and blocks of four images."
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "BLOCK_SIZE", 4)
    monkeypatch.setattr(module, "SYNC_SECONDS", 0)
    return ImageDataset(scan_tree(whole, "samples"), 32, workers=0)


@pytest.fixture
def copied(images, tmp_path):
    "The same with files that a test may change."
    root = shutil.copytree(images.tree.root, tmp_path / "samples")
    return ImageDataset(scan_tree(root, "samples"), 32, workers=0)


def files(data):
    "Names of all tables, finished or not, and of what belongs to them."
    kept = (".f16", ".part", ".rows")
    return sorted(p.name for p in cache_root(data.tree).iterdir() if p.suffix in kept)


def stored(data):
    "The bytes of the only table."
    (name,) = files(data)
    return (cache_root(data.tree) / name).read_bytes()


def expected(part, images, position, seeds=None):
    "Float16 rows of a domain as the part gives them, block by block."
    rows = []
    for indices in ALL.split(4):
        x = images.inputs(position, indices, seeds=None if seeds is None else seeds[indices])
        y = part.compute(x)
        rows.append((y.permute(0, 2, 3, 1) if y.dim() == 4 else y).flatten(1).half().float())
    return torch.cat(rows)


# The rows


def test_rows_are_what_the_parts_compute(images):
    parts = [Part(), Plain("plain"), Part()]
    data = PrecomputedDataset(images, parts)
    assert [p.columns for p in parts] == [slice(0, 48), slice(48, 53), slice(0, 48)]
    for position in range(4):
        rows = data.inputs(position, ALL)
        assert rows.dtype == torch.float32
        assert rows.shape == (6, 53)
        for part in parts:
            assert torch.equal(rows[:, part.columns], expected(part, images, position))
    chosen = torch.tensor([4, 0, 4])
    assert torch.equal(data.inputs(3, chosen), rows[chosen])
    assert torch.equal(data.request(3, chosen)("cpu"), rows[chosen])
    assert parts[0].calls == BLOCKS, "a duplicate is computed too"
    assert parts[2].calls == 0, "a duplicate is computed too"


def regrouped(images, order):
    "The images of the first two domains, of a folder of one's own, dealt in another order."
    tree = images.tree
    files, labels = tree.flat[:12], torch.cat(tree.labels[:2])
    parts = torch.tensor(order).split([7, 5])
    other = replace(
        tree,
        name=f"dealt {order[0]}",
        domain_names=["one", "two"],
        files=[[files[i] for i in part.tolist()] for part in parts],
        labels=[labels[part] for part in parts],
        ledger_name="samples, pooled",
    )
    return ImageDataset(other, 32, {"data_augmentation": False}, workers=0)


def test_rows_of_regrouped_images_are_copied(images, capfd):
    first, second = (regrouped(images, order) for order in (range(12), [*range(11, -1, -1)]))
    part, again = Part(), Part()
    rows = PrecomputedDataset(first, [part])
    before = torch.cat([rows.inputs(i, torch.arange(n)) for i, n in ((0, 7), (1, 5))])
    assert part.calls == 4
    assert "precomputing dealt 0: 1 version of 12 images" in capfd.readouterr().err
    rows = PrecomputedDataset(second, [again])
    after = torch.cat([rows.inputs(i, torch.arange(n)) for i, n in ((0, 7), (1, 5))])
    assert again.calls == 0
    said = capfd.readouterr().err
    assert "copying the precomputed features of dealt 11: 1 version of 12 images" in said
    assert "precomputing" not in said
    assert torch.equal(after, before.flip(0))
    assert len(list(cache_root(first.tree).glob("*pooled*.json"))) == 1, "one ledger for both"


@pytest.mark.parametrize("damage", ["list", "other list", "rows", "no list", "a new image"])
def test_rows_are_computed_if_the_other_table_does_not_fit(copied, damage):
    first, second = (regrouped(copied, order) for order in (range(12), [*range(11, -1, -1)]))
    PrecomputedDataset(first, [Plain("plain")]).inputs(0, torch.arange(7))
    (listing,) = cache_root(first.tree).glob("*.images")
    table = listing.with_suffix(".f16")
    if damage == "list":
        listing.write_text(listing.read_text()[:-9])
    elif damage == "other list":
        content = json.loads(listing.read_text())
        content["images"].reverse()
        listing.write_text(json.dumps(content))
    elif damage == "rows":
        content = bytearray(table.read_bytes())
        content[3] ^= 1
        table.write_bytes(content)
    elif damage == "no list":
        listing.unlink()
    else:
        new = Image.new("RGB", (40, 40), (9, 99, 200))
        new.save(second.tree.root / second.tree.flat[0])
        second = ImageDataset(second.scanned, 32, {"data_augmentation": False}, workers=0)
    part = Plain("plain")
    rows = PrecomputedDataset(second, [part])
    for position, count in ((0, 7), (1, 5)):
        found = rows.inputs(position, torch.arange(count))
        x = second.inputs(position, torch.arange(count))
        assert torch.equal(found, part.compute(x).half().float())
    assert part.calls == (1 if damage == "a new image" else 4)


def test_an_output_of_three_dimensions_keeps_its_order(images):
    part = Plain("tokens")
    part.shape, part.compute = (2, 3), lambda x: x.flatten(1)[:, :6].reshape(-1, 2, 3)
    rows = PrecomputedDataset(images, [part]).inputs(0, ALL)
    assert torch.equal(rows, images.inputs(0, ALL).flatten(1)[:, :6].half().float())


def test_a_wrong_shape_is_not_stored(images):
    part = Plain("plain")
    part.shape, part.compute = (4,), lambda x: x.flatten(1)[:, :5]
    with pytest.raises(ValueError, match="reshape"):
        PrecomputedDataset(images, [part]).inputs(0, ALL)
    assert not files(images)


def test_versions_are_augmented_by_seeds_of_their_own(images):
    part = Part()
    data = PrecomputedDataset(images, [part], views=2)
    assert data.augmented
    assert not PrecomputedDataset(images, [part]).augmented
    for view in (1, 2):
        generator = torch.Generator().manual_seed(seed_hash("view", view))
        of_all = torch.randint(2**31, (24,), generator=generator)
        assert torch.equal(view_seeds(view, 24), of_all)
        for position, seeds in enumerate(of_all.split(6)):
            rows = data.inputs(position, ALL, seeds=torch.full((6,), 2 * position + view - 1))
            assert torch.equal(rows, expected(part, images, position, seeds)), (view, position)
    for position in range(4):
        assert torch.equal(data.inputs(position, ALL), expected(part, images, position))


def test_seeds_choose_a_version(images):
    data = PrecomputedDataset(images, [Part()], views=3)
    same = torch.tensor([2, 2, 2, 2])
    rows = data.inputs(1, same, seeds=torch.tensor([0, 1, 3, 2**31 - 1]))
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[3])
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[1], data.request(1, same[:1], torch.tensor([4]))()[0])


def test_seeds_without_versions_and_in_the_wrong_number(images):
    with pytest.raises(HmoeError, match="have no seeds"):
        PrecomputedDataset(images, [Part()]).inputs(0, ALL, seeds=ALL)
    with pytest.raises(HmoeError, match="6 images need as many seeds, got 1"):
        PrecomputedDataset(images, [Part()], views=1).inputs(0, ALL, seeds=ALL[:1])


def test_versions_need_augmentation(images):
    plain = images.with_options(options={"data_augmentation": False})
    with pytest.raises(HmoeError, match="data_augmentation off.*views=0"):
        PrecomputedDataset(plain, [Part()], views=1)
    assert PrecomputedDataset(plain, [Part()]).inputs(0, ALL).shape == (6, 48)


def test_everything_else_is_that_of_the_images(images):
    data = PrecomputedDataset(images, [Part()], views=1)
    for name in (
        "name domain_names class_names num_classes num_domains resolution input_shape options "
        "fingerprint tree notes factors source_index"
    ).split():
        assert getattr(data, name) == getattr(images, name), name
    assert all(map(torch.equal, data.labels, images.labels))
    assert torch.equal(data.pictures(2, ALL), images.pictures(2, ALL))
    assert data.domain_index(images.domain_names[2]) == 2
    assert data.workers == 0
    assert data.to("cpu") is data
    assert data.with_options(64) is images.with_options(64)
    assert data.with_options(64).resolution == 64
    assert not hasattr(data, "no such thing"), "computed without need"
    assert not files(images), "computed without need"


def test_images_that_are_left_out_have_no_rows(copied):
    (copied.tree.root / copied.tree.files[1][2]).write_bytes(b"junk")
    tree = scan_tree(copied.tree.root, "samples")
    images = ImageDataset(tree, 32, {"unreadable": "skip"}, workers=0)
    with pytest.warns(UserWarning, match="1 of 24 images"):
        data = PrecomputedDataset(images, [Plain("plain")])
        rows = data.inputs(1, torch.tensor([2, 4]))
    after = data.inputs(2, ALL[:1])
    assert torch.equal(rows, images.inputs(1, torch.tensor([2, 4])).flatten(1)[:, :5].half())
    assert torch.equal(after, images.inputs(2, ALL[:1]).flatten(1)[:, :5].half())
    assert data.open()[0].shape == (1, 23, 5)


# The files


def test_what_is_there_is_not_computed_again(images, monkeypatch, capfd):
    first = PrecomputedDataset(images, [Part()], views=1)
    rows = first.inputs(1, ALL)
    folder = cache_root(images.tree)
    said = f"precomputing samples: 2 versions of 24 images, 4.6 kB in {folder}"
    assert capfd.readouterr().err.splitlines()[0] == said  # a slow machine also prints progress
    again, new, newer = Part(), Plain("new"), Plain("newer")
    loads, inputs = [], ImageDataset.inputs
    monkeypatch.setattr(ImageDataset, "inputs", lambda *a, **k: loads.append(a) or inputs(*a, **k))
    other = ImageDataset(images.scanned, 32, workers=0)
    data = PrecomputedDataset(other, [new, again, newer], views=1)
    assert torch.equal(data.inputs(1, ALL)[:, again.columns], rows)
    assert (again.calls, new.calls, newer.calls) == (0, 2 * BLOCKS, 2 * BLOCKS)
    assert len(loads) == 2 * BLOCKS, "images are decoded for each part"
    assert "480 B" not in capfd.readouterr().err
    assert len(files(images)) == 3
    batch = data.open()[0][0, [1, 2]]
    kept = batch.copy()
    batch[:] = 7
    assert (data.open()[0][0, [1, 2]] == kept).all(), "a batch is not a copy"


def test_anything_else_has_another_file(images):
    def added(images, part, views=1):
        before = set(files(images))
        PrecomputedDataset(images, [part], views).open()
        assert before < set(files(images)), "the file of something else"
        return part.calls

    assert added(images, Part()) == 2 * BLOCKS
    assert added(images, Part("other weights")) == 2 * BLOCKS
    assert added(images, Part(), views=2) == 3 * BLOCKS
    assert added(images, Plain("averages")) == 2 * BLOCKS, "another shape"
    assert added(images.with_options(64), Plain("averages")) == 2 * BLOCKS
    assert added(images.with_options(options={"source": "cache"}), Part()) == 2 * BLOCKS
    first = ImageDataset(images.scanned, 32, resize_first=True, workers=0)
    assert added(first, Part()) == 2 * BLOCKS


def test_a_changed_image_is_computed_again(copied):
    before = PrecomputedDataset(copied, [Plain("plain")])
    old, names = before.inputs(2, ALL), files(copied)
    Image.new("RGB", (40, 40), "red").save(copied.tree.root / copied.tree.files[2][1])
    images = ImageDataset(scan_tree(copied.tree.root, "samples"), 32, workers=0)
    new = PrecomputedDataset(images, [Plain("plain")]).inputs(2, ALL)
    assert (new != old).any(1).tolist() == [i == 1 for i in range(6)]
    assert len(files(images)) == 1
    assert files(images) != names
    assert torch.equal(before.inputs(2, ALL), old), "who still uses the old table cannot go on"


def test_files_that_change_meanwhile_are_refused(copied):
    file = copied.tree.root / copied.tree.flat[0]
    part = Part(on_call=lambda part: os.utime(file, ns=(5, part.calls)))
    with pytest.raises(HmoeError, match="changed while"):
        PrecomputedDataset(copied, [part]).open()
    assert not files(copied)


def test_a_truncated_table_is_computed_again(images):
    PrecomputedDataset(images, [Part()]).open()
    whole = stored(images)
    (name,) = files(images)
    os.truncate(cache_root(images.tree) / name, 100)
    PrecomputedDataset(images, [Part()]).open()
    assert stored(images) == whole


def uninterrupted(images, monkeypatch, tmp_path):
    "The bytes of the table with one augmented version, built elsewhere in one go."
    with monkeypatch.context() as patch:
        patch.setenv("HMOE_CACHE", str(tmp_path / "elsewhere"))
        PrecomputedDataset(images, [Part()], views=1).open()
        return stored(images)


@pytest.mark.parametrize("after", [1, 5, 12])
def test_an_interrupted_build_resumes(images, monkeypatch, tmp_path, after):
    def stop(part):
        if part.calls > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PrecomputedDataset(images, [Part(on_call=stop)], views=1).open()
    assert not [name for name in files(images) if name.endswith(".f16")]
    part, new = Part(), Plain("new")
    PrecomputedDataset(images, [part, new], views=1).open()
    assert part.calls == 2 * BLOCKS - after
    assert new.calls == 2 * BLOCKS
    module.Table(images, new, 1, tree_state(images.scanned)).path.unlink()
    assert stored(images) == uninterrupted(images, monkeypatch, tmp_path)


def test_rows_that_were_not_noted_are_computed_again(images, monkeypatch, tmp_path, capfd):
    def stop(part):
        if part.calls > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PrecomputedDataset(images, [Part(on_call=stop)], views=1).open()
    (unfinished,) = cache_root(images.tree).glob("*.part")
    with open(unfinished, "ab") as file:
        file.write(bytes(960))  # ten rows of zeros, as a machine that lost its power may leave
    assert "4.6 kB" in capfd.readouterr().err
    PrecomputedDataset(images, [Part()], views=1).open()
    assert "3.1 kB" in capfd.readouterr().err, "not only what is lacking: 32 of 48 rows"
    assert stored(images) == uninterrupted(images, monkeypatch, tmp_path)


BUILD = """
import sys, time
from test_precomputed import ImageDataset, Part, PrecomputedDataset, module, scan_tree
def slow(part):
    print("block", flush=True)
    time.sleep(float(sys.argv[2]) if part.calls > 3 else 0)
module.BLOCK_SIZE, module.SYNC_SECONDS = 4, 0
images = ImageDataset(scan_tree(sys.argv[1], "samples"), 32, workers=0)
PrecomputedDataset(images, [Part(on_call=slow)], views=1).open()
"""


def start(images, pause):
    "Another process that builds, waiting `pause` seconds in each block after the third."
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join([str(tests.parent), str(tests)])
    command = [sys.executable, "-c", BUILD, str(images.tree.root), str(pause)]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_build_resumes(images, monkeypatch, tmp_path):
    process = start(images, 60)
    assert [process.stdout.readline() for _ in range(4)] == ["block\n"] * 4
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    part = Part()
    PrecomputedDataset(images, [part], views=1).open()
    assert part.calls == 2 * BLOCKS - 3
    assert stored(images) == uninterrupted(images, monkeypatch, tmp_path)


@pytest.mark.slow
def test_two_processes_build_once(images):
    processes = [start(images, 0.2) for _ in range(2)]
    outputs = [p.communicate(timeout=120)[0].splitlines() for p in processes]
    assert all(p.returncode == 0 for p in processes)
    assert sorted(map(len, outputs)) == [0, 2 * BLOCKS]


# What can go wrong


def test_a_disk_without_room_is_refused(images, monkeypatch):
    room = SimpleNamespace(free=4607)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    part = Part()
    data = PrecomputedDataset(images, [part], views=1)
    with pytest.raises(HmoeError) as error:
        data.inputs(0, ALL)
    assert f"need 4.6 kB in {cache_root(images.tree)}, where 4.6 kB are free" in str(error.value)
    assert error.value.fix.startswith("HMOE_CACHE=<a folder with free space>, fewer views, or")
    assert not files(images)
    assert part.calls == 0
    room.free = 4608
    assert data.inputs(0, ALL).shape == (6, 48)


def test_a_disk_that_fills_up(images, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    def fill(part):
        if part.calls == 3:
            monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(HmoeError, match="need 4.6 kB.*free .No space left.*HMOE_CACHE"):
        PrecomputedDataset(images, [Part(on_call=fill)], views=1).inputs(0, ALL)
    assert not files(images)


def test_a_folder_that_cannot_be_written(images, monkeypatch, tmp_path):
    (tmp_path / "a file").write_text("x")
    images.fingerprint
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "a file" / "below"))
    with pytest.raises(HmoeError, match="cannot write in .*Fix: HMOE_CACHE="):
        PrecomputedDataset(images, [Part()]).open()


@pytest.mark.parametrize("factor", [1e6, float("nan")])
def test_what_float16_does_not_have_is_refused(images, factor):
    with pytest.raises(HmoeError, match="stage 3 of a network.*float16"):
        PrecomputedDataset(images, [Plain("stage 3 of a network", factor)]).open()
    assert not [name for name in files(images) if name.endswith(".f16")]


def test_nothing_of_the_process_changes(images, monkeypatch):
    seen = []

    def draw(part):
        torch.rand(3), np.random.rand(3), random.random()
        seen.append((torch.get_num_threads(), torch.is_grad_enabled()))

    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    torch.rand(1), np.random.rand(1)
    before, threads = state(), torch.get_num_threads()
    PrecomputedDataset(images, [Part(on_call=draw)], views=1).open()
    assert state() == before
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert set(seen) == {(3, False)}
    assert threads != 3
