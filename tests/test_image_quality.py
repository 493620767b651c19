"""Duplicates, leakage and doubtful images: found if planted, and hardly elsewhere."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from commands import hmoe
from phone_folder import ALTERED, STYLES, cut, make_phone_folder, outdoors, scanned
from PIL import Image, ImageEnhance, ImageFilter

from hmoe_repro.apps.image_page import findings_html
from hmoe_repro.apps.own_images import findings_csv, read_pool, split_pool
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import cache
from hmoe_repro.data import image_quality as quality
from hmoe_repro.data.image_folder import own_inventory, shared_notes
from hmoe_repro.data.image_quality import (
    GREY_SIDE,
    NEAR,
    NUMBERS,
    ImageMeasures,
    any_folder,
    check_images,
    exact_partners,
    examine_images,
    measure_image,
    near_partners,
    perceptual_hashes,
    quality_section,
    split_findings,
    window_correlation,
)

DUPLICATES = ("duplicate file", "duplicate pixels", "near duplicate")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="module")
def phone(tmp_path_factory):
    "A phone's folder in classes, what was planted, and what was found."
    folder = tmp_path_factory.mktemp("phone")
    planted = make_phone_folder(folder / "camera", 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_CACHE", str(folder / "cache"))
        found = check_images(examine_images(any_folder(folder / "camera")))
    return planted, found


def files_of(found, *kinds):
    return set(found.table.file[found.table.finding.isin(kinds)])


def thumbnail(image):
    return np.asarray(image.convert("L").resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX))


def pairs_planted(planted):
    kinds = (planted.same_file, planted.same_pixels, planted.near, planted.turned, planted.leaks)
    return [pair for kind in kinds for pair in kind]


# A phone's folder.


def test_every_planted_pair_is_one_group_and_no_other_image_is_in_a_group(phone):
    planted, found = phone
    pairs = pairs_planted(planted)
    assert len(pairs) >= 25
    for first, second in pairs:
        assert found.groups[first] == found.groups[second], (first, second)
    assert set(found.groups) == {file for pair in pairs for file in pair}


def test_of_each_group_one_image_is_not_listed(phone):
    _, found = phone
    listed = found.table.file[found.table.finding.isin(DUPLICATES)]
    assert listed.is_unique
    groups = pd.Series(found.groups)
    assert len(listed) == len(groups) - groups.nunique()
    assert groups[~groups.index.isin(set(listed))].is_unique


def test_duplicates_are_named_by_what_is_equal(phone):
    planted, found = phone
    unordered = {}
    for kind in DUPLICATES:
        rows = found.table[found.table.finding == kind]
        unordered[kind] = set(map(frozenset, zip(rows.file, rows["with"])))
    assert unordered["duplicate file"] == set(map(frozenset, planted.same_file))
    assert unordered["duplicate pixels"] == set(map(frozenset, planted.same_pixels))
    exact = found.table[found.table.finding.isin(DUPLICATES[:2])]
    assert (exact.value == 0).all()


@pytest.mark.parametrize(
    "kind, attribute, others",
    [
        ("screenshot", "screenshots", 0),
        ("panorama", "panoramas", 0),
        ("dark", "dark", 0),
        ("blurred", "blurred", 0),
        ("overexposed", "overexposed", 0),
        ("tiny", "tiny", 0),
        ("outlier", "outliers", 4),
    ],
)
def test_all_planted_are_found_and_hardly_any_other(phone, kind, attribute, others):
    planted, found = phone
    wanted = set(getattr(planted, attribute))
    assert wanted
    assert wanted <= files_of(found, kind)
    assert len(files_of(found, kind) - wanted) <= others


def test_damaged_unknown_and_hidden_files_have_no_finding(phone):
    planted, found = phone
    absent = {*planted.damaged, *planted.unknown, *planted.hidden}
    if not planted.heic_readable:
        absent.update(planted.heic)
    assert not absent & {*found.table.file, *found.table["with"]}


@pytest.mark.slow
def test_the_folder_is_the_same_each_time(tmp_path):
    first = make_phone_folder(tmp_path / "a", 24, "domains", seed=3)
    second = make_phone_folder(tmp_path / "b", 24, "domains", seed=3)
    assert first.styles == second.styles
    assert set(first.styles.values()) == set(STYLES)
    for file in first.styles:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# Leakage.


def test_a_copy_in_another_domain_is_leakage(tmp_path):
    planted = make_phone_folder(tmp_path / "camera", 24, "domains")
    found = check_images(examine_images(own_inventory(tmp_path / "camera").tree()))
    leaks = {file for pair in planted.leaks for file in pair}
    assert files_of(found, "two domains") == leaks
    assert not files_of(found, "two classes", "training and test")


def test_a_copy_in_another_part_of_a_split_is_leakage(tmp_path):
    planted = make_phone_folder(tmp_path / "camera", 24, "split")
    found = check_images(examine_images(any_folder(tmp_path / "camera")))
    assert files_of(found, "training and test") == {file for pair in planted.leaks for file in pair}
    assert not files_of(found, "two folders")


def test_a_copy_in_another_class_is_named_so(tmp_path):
    planted = make_phone_folder(tmp_path / "camera", 24, "domains")
    root = tmp_path / "camera"
    first = next(file for file in reversed(planted.images) if "/house/" in file)
    copy = first.replace("/house/", "/tree/").replace("IMG", "COPY")
    shutil.copy(root / first, root / copy)
    found = check_images(examine_images(own_inventory(root).tree()))
    assert files_of(found, "two classes") == {first, copy}


def scattered(folder, count=40):
    """Write `count` images of noise in two classes, c0 and c1, all different."""
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        path = folder / f"c{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((96, 96), Image.Resampling.NEAREST).save(path)


def test_leaked_images_of_another_class_are_counted_by_hand(tmp_path):
    root = tmp_path / "mixed"
    scattered(root)
    tree = split_pool(read_pool(root))
    training, held_out = list(tree.files[0]), tree.files[1]
    of_class = {name: [file for file in held_out if file.startswith(name)] for name in ("c0", "c1")}
    copies = {of_class["c0"][0]: "c0", of_class["c0"][1]: "c1", of_class["c1"][0]: "c0"}
    for file, name in copies.items():
        target = next(f for f in training if f.startswith(name))
        training.remove(target)
        shutil.copy(root / target, root / file)
        copies[file] = target
    found = split_findings(tree)
    leaked = {*copies, *copies.values()}
    other_class = {file for pair in list(copies.items())[1:] for file in pair}
    assert files_of(found, "training and test") == leaked
    assert set(found.conflicting["training and test"]) == other_class
    assert "4 pictures have" in found.meaning("training and test")
    digests, reasons = cache.examine(tree)
    (note,) = shared_notes(tree, digests, reasons)
    assert note.startswith("3 pictures that test the model ")
    assert "domain" not in note
    (note,) = shared_notes(replace(tree, last_is_held_out=False), digests, reasons)
    assert note.startswith("3 images are also in another domain")


def test_files_that_are_not_compared_are_on_the_page_and_in_the_table(tmp_path):
    scattered(tmp_path / "mixed", 4)
    (tmp_path / "mixed/c0/cut.png").write_bytes(b"no image")
    (tmp_path / "mixed/notes.txt").write_text("x")
    found = check_images(examine_images(any_folder(tmp_path / "mixed")))
    assert found.count == 4
    assert list(found.reasons) == ["c0/cut.png"]
    page = findings_html(found)
    assert "c0/cut.png: " in page
    assert "notes.txt" in page
    assert "notes.txt, ..." not in page
    assert "c0/cut.png,unreadable,," in findings_csv(found).decode()


def test_duplicates_across_training_and_held_out_images_are_those_of_the_split(phone):
    planted, _ = phone
    tree = split_pool(read_pool(planted.root))
    held_out = set(tree.files[1])
    groups = split_findings(tree).groups
    members = pd.DataFrame({"file": list(groups), "group": groups.values()})
    members["held_out"] = members.file.isin(held_out)
    across = members.groupby("group").held_out.transform("nunique") == 2
    found = split_findings(tree)
    leaking = files_of(found, "training and test")
    assert leaking
    assert leaking <= set(members.file[across])
    rows = found.table[found.table.finding == "training and test"]
    for file, other in zip(rows.file, rows["with"]):
        assert (file in held_out) != (other in held_out)


# The search.


def brute_force(thumbnails):
    "Pairs of near duplicates, one pair after the other, from the nearest partner of each image on."
    bits = perceptual_hashes(thumbnails) > 0
    pairs = {}
    for i in range(len(bits)):
        tried = 0
        distances = (bits[i] != bits).sum(axis=1)
        for j in np.argsort(distances, kind="stable"):
            different = int(distances[j])
            if i == j or different > quality.DOUBTFUL:
                continue
            if different > NEAR:
                tried += 1
                alike = window_correlation(thumbnails[i : i + 1], thumbnails[j : j + 1])[0]
                if tried > quality.MOST_DOUBTFUL or alike < quality.COPY_CORRELATION:
                    continue
            pairs[i, int(j)] = different
    return pairs


def altered_thumbnails(count=14):
    "Thumbnails of made-up images, and of altered copies of some of them."
    rng = np.random.default_rng(5)
    images = []
    for k in range(count):
        image = (outdoors if k % 2 else scanned)(rng, "tree")
        images.append(image)
        if k % 3 == 0:
            images += [alter(image) for alter in ALTERED.values()]
            images += [cut(image, 0.05, 0), cut(image, 0.08, 1)]
    return np.stack([thumbnail(image) for image in images])


@pytest.mark.parametrize("block, most", [(1, 32), (7, 32), (512, 32), (512, 1)])
def test_the_search_equals_comparing_every_pair(monkeypatch, block, most):
    monkeypatch.setattr(quality, "_BLOCK", block)
    monkeypatch.setattr(quality, "MOST_DOUBTFUL", most)
    thumbnails = altered_thumbnails()
    count = len(thumbnails)
    label = np.arange(count) % 2
    pairs = brute_force(thumbnails)
    assert len(pairs) > 40
    steps = []
    partners, distances, groups = near_partners(
        thumbnails, np.ones(count, bool), [label], lambda *step: steps.append(step)
    )
    ends = [min(start + block, count) for start in range(0, count, block)]
    assert steps == [(end, count) for end in ends]
    for i in range(count):
        own = {j: bits for (first, j), bits in pairs.items() if first == i}
        other = {j: bits for j, bits in own.items() if label[j] != label[i]}
        for row, candidates in enumerate((own, other)):
            if candidates:
                assert distances[row, i] == min(candidates.values())
                assert candidates[partners[row, i]] == distances[row, i]
            else:
                assert partners[row, i] == -1
    expected = list(range(count))  # connected components, by hand
    for i, j in pairs:
        old, new = expected[j], expected[i]
        expected = [new if group == old else group for group in expected]
    same = groups[:, None] == groups[None]
    assert (same == (np.array(expected)[:, None] == np.array(expected)[None])).all()


def test_two_windows_agree_with_a_crop_done_by_pillow():
    image = outdoors(np.random.default_rng(1), "house")
    whole, cropped = thumbnail(image), thumbnail(cut(image, 0.03, 0))
    plain = np.corrcoef(whole.ravel(), cropped.ravel())[0, 1]
    best = window_correlation(whole[None], cropped[None])[0]
    assert best > max(plain, quality.COPY_CORRELATION)
    assert window_correlation(cropped[None], whole[None])[0] == pytest.approx(best, abs=1e-6)
    assert window_correlation(whole[None], whole[None])[0] == pytest.approx(1, abs=1e-5)


def test_images_without_contrast_are_no_near_duplicates():
    flat = np.full((3, GREY_SIDE, GREY_SIDE), 200, np.uint8)
    assert not perceptual_hashes(flat).any()
    partners, _, groups = near_partners(flat, np.ones(3, bool), [])
    assert (partners == -1).all()
    assert len(set(groups)) == 3


def test_hashes_have_256_bits_and_ignore_brightness_and_contrast():
    grey = altered_thumbnails(2)[:1].astype(float)
    hashes = perceptual_hashes(np.concatenate([grey, 0.5 * grey + 40]))
    assert hashes.shape == (2, 256)
    assert set(np.unique(hashes)) == {-1, 1}
    assert (hashes[0] == hashes[1]).all()


def test_equal_keys_are_found_by_hand():
    keys = ["a", "b", "a", None, "", "c", "a", "b", ""]
    label = np.array([0, 0, 0, 0, 0, 0, 1, 0, 1])
    partners = exact_partners(keys, [label])
    assert partners[0].tolist() == [2, 7, 0, -1, -1, -1, 0, 1, -1]
    assert partners[1].tolist() == [6, -1, 6, -1, -1, -1, 0, -1, -1]


# Measures.


def measured(image):
    numbers, small, pixels = measure_image(image)
    return dict(zip(NUMBERS, numbers)), small, pixels


@pytest.mark.parametrize("orientation", [2, 3, 4, 5, 6, 7, 8])
def test_orientation_by_exif_changes_no_measure(tmp_path, orientation):
    upright = outdoors(np.random.default_rng(0), "tree")
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "camera").mkdir()
    upright.save(tmp_path / "camera/a.png")
    upright.transpose(undo[orientation]).save(tmp_path / "camera/b.png", exif=exif)
    measures = examine_images(any_folder(tmp_path / "camera"))
    assert measures.table.iloc[0].equals(measures.table.iloc[1])
    assert (measures.thumbnails[0] == measures.thumbnails[1]).all()
    assert check_images(measures).counts == {"duplicate pixels": 1}


def test_sharpness_falls_with_blur_and_not_with_contrast():
    for maker in (outdoors, scanned):
        image = maker(np.random.default_rng(2), "house")
        sharp = measured(image)[0]["sharpness"]
        faint = measured(ImageEnhance.Contrast(image).enhance(0.5))[0]["sharpness"]
        blurred = [
            measured(image.filter(ImageFilter.GaussianBlur(radius)))[0]["sharpness"]
            for radius in (2, 4, 8)
        ]
        assert sharp > blurred[0] > max(blurred[1:])
        assert faint == pytest.approx(sharp, rel=0.1)
        assert max(blurred[1:]) < quality.BLURRED < min(sharp, faint)


def test_sharpness_of_one_edge_by_hand():
    grey = np.zeros((20, 20), np.float32)
    grey[:, 10:] = 100  # second difference 100, central difference 50
    assert quality._sharpness(grey) == pytest.approx(100 / 51)
    assert np.isnan(quality._sharpness(grey[:7]))


def test_numbers_of_a_small_image_by_hand():
    pixels = np.zeros((2, 4, 3), np.uint8)
    pixels[0] = 200
    pixels[1, :2] = 40
    numbers, small, _ = measured(Image.fromarray(pixels))
    assert (numbers["width"], numbers["height"]) == (4, 2)
    assert numbers["flat"] == pytest.approx(5 / 6)  # of six pairs only one differs
    assert numbers["red"] == numbers["blue"] == pytest.approx((4 * 200 + 2 * 40) / 8)
    assert len(small) == GREY_SIDE * GREY_SIDE
    assert np.isnan(numbers["sharpness"])


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (2, 3)])
def test_the_smallest_images_are_measured(tmp_path, size):
    (tmp_path / "camera").mkdir()
    Image.new("RGB", size, (10, 90, 200)).save(tmp_path / "camera/a.png")
    found = check_images(examine_images(any_folder(tmp_path / "camera")))
    assert found.count == 1


def test_a_finding_of_most_images_is_the_style_of_the_folder(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(12):
        (tmp_path / "digits").mkdir(exist_ok=True)
        noise = rng.integers(0, 256, (28, 28), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"digits/{i}.png")
    found = check_images(examine_images(any_folder(tmp_path / "digits")))
    assert "tiny" not in found.counts
    assert any("tiny" in note for note in found.notes)


# Bad input.


def test_folders_without_images_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.txt").write_text("none")
    for folder in (tmp_path / "empty", tmp_path / "absent", tmp_path / "empty/notes.txt"):
        with pytest.raises(HmoeError):
            any_folder(folder)


def test_features_must_be_of_the_same_images(phone, tmp_path):
    planted, _ = phone
    measures = examine_images(any_folder(Path(planted.root) / "house"))
    count = int(measures.readable.sum())
    with pytest.raises(HmoeError, match="one row for each"):
        check_images(measures, features=np.zeros((count + 1, 3)))
    points = np.random.default_rng(0).normal(size=(count, 3))
    points[4] = 60
    found = check_images(measures, features=points)
    wanted = np.array(measures.tree.flat)[measures.readable][4]
    assert found.outliers == "features of a pretrained network"
    assert wanted in files_of(found, "outlier") | files_of(found, *quality.FINDINGS)


def test_a_folder_that_cannot_be_decoded_has_no_finding(tmp_path):
    (tmp_path / "broken").mkdir()
    for name in "abc":
        (tmp_path / f"broken/{name}.jpg").write_bytes(b"\xff\xd8 no image")
    measures = examine_images(any_folder(tmp_path / "broken"))
    found = check_images(measures)
    assert not measures.readable.any()
    assert found.table.empty
    assert found.count == 0


# The store.


def test_only_new_and_changed_files_are_measured_again(tmp_path, monkeypatch):
    folder = tmp_path / "camera"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(4):
        outdoors(rng, "tree").save(folder / f"{i}.png")
    first = examine_images(any_folder(folder))
    measured_again = []
    monkeypatch.setattr(
        quality, "measure_image", lambda image: measured_again.append(1) or measure_image(image)
    )
    again = examine_images(any_folder(folder))
    assert not measured_again
    pd.testing.assert_frame_equal(first.table, again.table)
    shutil.copy(folder / "0.png", folder / "renamed.png")
    outdoors(rng, "tree").save(folder / "2.png")
    third = examine_images(any_folder(folder))
    assert len(measured_again) <= 2
    assert third.table.iloc[0].equals(first.table.iloc[0])
    assert third.table.pixels[4] == first.table.pixels[0]
    assert third.table.pixels[2] != first.table.pixels[2]


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[::-1]])
def test_a_damaged_store_is_measured_again(tmp_path, damage):
    folder = tmp_path / "camera"
    folder.mkdir()
    outdoors(np.random.default_rng(0), "tree").save(folder / "a.png")
    first = examine_images(any_folder(folder))
    store = quality._store_file(first.tree)
    content = store.read_bytes()
    store.write_bytes(damage(content))
    pd.testing.assert_frame_equal(examine_images(any_folder(folder)).table, first.table)
    assert store.read_bytes() == content


def test_a_store_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "camera").mkdir()
    outdoors(np.random.default_rng(0), "tree").save(tmp_path / "camera/a.png")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="HMOE_CACHE"):
        assert examine_images(any_folder(tmp_path / "camera")).readable.all()


def test_a_killed_process_leaves_what_it_measured(tmp_path):
    folder = tmp_path / "camera"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(60):
        pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
    script = f"""
        import time
        from hmoe_repro.data import cache, image_quality as quality
        cache.SAVE_SECONDS = quality.SAVE_MEASURES_SECONDS = 0
        measure = quality.measure_image
        quality.measure_image = lambda image: time.sleep(0.05) or measure(image)
        quality.examine_images(quality.any_folder({str(folder)!r}), workers=1)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=os.environ)
    tree = any_folder(folder)
    limit = time.monotonic() + 120
    while len(quality._read_store(quality._store_file(tree))) < 10:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    known = len(quality._read_store(quality._store_file(tree)))
    assert 10 <= known < 60
    assert len(cache._read_ledger(tree)) >= 8
    calls = []
    measures = examine_images(tree, on_progress=lambda done, total: calls.append(total))
    assert calls[-1] <= 60 - 8
    assert measures.readable.all()
    fresh = [measure_image(Image.open(folder / file).convert("RGB"))[2] for file in tree.flat]
    assert measures.table.pixels.tolist() == fresh


# Memory.


@pytest.mark.parametrize("count", [3000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_images_are_compared_in_bounded_memory(count):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
    thumbnails = np.repeat(np.repeat(noise, 4, axis=1), 4, axis=2)
    thumbnails[2000:2003] = thumbnails[17]
    tracemalloc.start()
    partners, _, groups = near_partners(thumbnails, np.ones(count, bool), [])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.flatnonzero(partners[0] >= 0).tolist() == [17, 2000, 2001, 2002]
    assert len(set(groups[[17, 2000, 2001, 2002]])) == 1
    assert len(set(groups)) == count - 3
    assert most < 40_000 * count  # 512 rows of distances, and not 10,000


def test_a_thousand_equal_images_are_one_group():
    thumbnails = np.repeat(altered_thumbnails(1)[:1], 1500, axis=0)
    partners, distances, groups = near_partners(thumbnails, np.ones(1500, bool), [])
    assert len(set(groups)) == 1
    assert (distances[0] == 0).all()
    assert (partners[0] != np.arange(1500)).all()


@pytest.mark.slow
def test_ten_thousand_files_are_measured_in_bounded_memory(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(10_000):
        noise = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((96, 72)).save(folder / f"{i:05d}.png", compress_level=1)
    tree = any_folder(folder)
    tracemalloc.start()
    measures = examine_images(tree)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(measures, ImageMeasures)
    assert measures.readable.all()
    assert most < 150e6  # 10 kB of an image's thumbnail, numbers and names


# Pages and the command.


def test_pages_show_pairs_and_escape_names(phone, tmp_path):
    planted, found = phone
    section = quality_section(found, most=2)
    kinds = {kind["kind"]: kind for kind in section["kinds"]}
    assert {name: kind["count"] for name, kind in kinds.items()} == found.counts
    assert all(len(example) == 2 for example in kinds["near duplicate"]["examples"])
    assert all(len(example) == 1 for example in kinds["screenshot"]["examples"])
    assert all(len(kind["examples"]) <= 2 for kind in section["kinds"])
    folder = tmp_path / "<b>camera"
    folder.mkdir()
    for name in ("<script>alert(1)<.png", "=1+1.png"):
        shutil.copy(Path(planted.root) / planted.screenshots[0], folder / name)
    other = check_images(examine_images(any_folder(folder)))
    page = findings_html(other)
    assert "<script" not in page
    assert "<b>" not in page
    assert "http" not in page.partition("</head>")[2]
    assert "\n=1" not in findings_csv(other).decode()


def test_the_command_lists_writes_and_fails_only_for_damaged_files(phone, tmp_path, own_names):
    planted, _ = phone
    checked = tmp_path / "checked"
    options = ("--images", "--output", checked)
    done = hmoe("data", "verify", planted.root, *options, folder=tmp_path)
    assert done.returncode == 1
    assert "1 unreadable" in done.stderr
    table = pd.read_csv(checked / "image_findings.csv", keep_default_na=False)
    assert list(table) == ["file", "finding", "value", "with"]
    assert table.file[table.finding == "unreadable"].tolist() == planted.damaged[:1]
    counts = table.finding[table.finding != "unreadable"].value_counts()
    for kind, count in counts.items():
        title = quality.FINDINGS[kind][0]
        assert any(line.startswith(f"{title}: {count} ") for line in done.stdout.splitlines()), kind
    page = (checked / "image_findings.html").read_text()
    assert page.count("<img") > 30
    (Path(planted.root) / planted.damaged[0]).rename(tmp_path / "damaged.jpg")
    try:
        plain = hmoe("data", "verify", planted.root, "--images", folder=tmp_path)
    finally:
        (tmp_path / "damaged.jpg").rename(Path(planted.root) / planted.damaged[0])
    assert plain.returncode == 0, plain.stderr
    assert (tmp_path / "image_findings.csv").exists()


def test_the_command_checks_a_data_set_too(tmp_path, own_names):
    planted = make_phone_folder(tmp_path / "camera", 24, "domains")
    (tmp_path / "camera" / planted.damaged[0]).unlink()
    done = hmoe("data", "verify", str(tmp_path / "camera"), "--images", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "in two domains: 6 pictures" in done.stdout
    assert "every image can be read" in done.stdout


# The thresholds, on PACS.

PACS = Path(os.environ.get("HMOE_DATA") or "shared/data") / "PACS"


@pytest.mark.slow
@pytest.mark.skipif(not PACS.is_dir(), reason="needs PACS")
def test_false_alarms_on_pacs():
    found = check_images(examine_images(own_inventory(PACS).tree()))
    assert found.count == 9991
    counts = found.counts
    assert counts["blurred"] <= 10
    assert counts["overexposed"] <= 20
    assert counts["near duplicate"] <= 60
    assert counts["outlier"] <= 40
    assert not {"dark", "no contrast", "tiny", "screenshot", "panorama"} & set(counts)
    blurred = found.table.file[found.table.finding == "blurred"]
    assert not blurred.str.startswith("sketch/").any()
