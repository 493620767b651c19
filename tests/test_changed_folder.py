"""Corrected groups of a folder that has changed: pictures moved, deleted, new, and damaged."""

import hashlib
import json

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from hmoe_repro.apps.correct_groups import GroupFile, Refusal
from hmoe_repro.apps.discover import (
    Correction,
    _with_new_images,
    default_group_names,
    discover,
    group_words,
    groups_csv,
    mistaken_subjects,
    report_html,
    summarise_findings,
)
from hmoe_repro.apps.own_images import (
    digest_text,
    fit_corrected_groups,
    image_files,
    write_corrected_groups,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.store import RunStore

SMALL = {"network": "image_cnn", "steps": 3, "resolution": 24, "device": "cpu"}
SMALL["hparams"] = {"batch_size": 4}


def digest_of(path):
    return digest_text(hashlib.sha256(path.read_bytes()).hexdigest())


def fill(root, names, shades=(0, 150)):
    "Pictures of noise, each its own, in turn dark and bright."
    draw = np.random.default_rng(len(names))
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        low = shades[i % len(shades)]
        Image.fromarray(draw.integers(low, low + 90, (20, 30, 3), dtype=np.uint8)).save(path)
    return root


def table_of(root, path, digests=True):
    "A table of two groups, in turn, of the images of a folder."
    files = image_files(root)
    frame = pd.DataFrame({"file": files, "group": [f"g{i % 2}" for i in range(len(files))]})
    frame["found"] = frame.group
    if digests:
        frame["digest"] = [digest_of(root / file) for file in files]
    write_corrected_groups(path, frame)
    return frame.set_index("file").group.to_dict()


def move(root, old, new):
    (root / new).parent.mkdir(parents=True, exist_ok=True)
    (root / old).rename(root / new)


# Which line is which image


@pytest.mark.parametrize("digests", [True, False])
def test_moved_deleted_and_new_images_are_told_apart(tmp_path, digests):
    root = fill(tmp_path / "p", ["a/1.png", "a/2.png", "b/3.png", "b/4.png", "b/5.png"])
    group = table_of(root, tmp_path / "g.csv", digests)
    move(root, "a/1.png", "c/1.png")
    (root / "b/4.png").unlink()
    fill(root, ["c/8.png", "c/9.png", "c/7.png"], (50,))
    fit = fit_corrected_groups(tmp_path / "g.csv", image_files(root), root)
    assert fit.relocated == {"a/1.png": "c/1.png"}
    assert list(fit.absent) == ["b/4.png"]
    assert fit.absent["b/4.png"]["group"] == group["b/4.png"]
    assert fit.new == ["c/7.png", "c/8.png", "c/9.png"]
    found = fit.table(image_files(root)).set_index("file").group.to_dict()
    assert found.pop("c/1.png") == group["a/1.png"]
    assert found == {file: group[file] for file in ("a/2.png", "b/3.png", "b/5.png")}


def test_a_moved_image_under_another_name_is_known_by_its_content_alone(tmp_path):
    root = fill(tmp_path / "p", ["a/1.png", "a/2.png", "a/3.png"])
    for digests, relocated in ((True, {"a/1.png": "b/x.png"}), (False, {})):
        if not digests:
            move(root, "b/x.png", "a/1.png")
        table_of(root, tmp_path / "g.csv", digests)
        move(root, "a/1.png", "b/x.png")
        fit = fit_corrected_groups(tmp_path / "g.csv", image_files(root), root)
        assert fit.relocated == relocated
        assert fit.new == ([] if digests else ["b/x.png"])


def test_another_picture_under_an_old_name_is_new(tmp_path):
    root = fill(tmp_path / "p", ["a/1.png", "a/2.png", "a/3.png"])
    table_of(root, tmp_path / "g.csv")
    (root / "a/1.png").unlink()
    fill(root, ["b/1.png"], (99,))
    fit = fit_corrected_groups(tmp_path / "g.csv", image_files(root), root)
    assert (fit.relocated, list(fit.absent), fit.new) == ({}, ["a/1.png"], ["b/1.png"])


def test_a_name_that_occurs_twice_says_nothing(tmp_path):
    root = fill(tmp_path / "p", ["a/1.png", "b/1.png", "b/2.png"])
    table_of(root, tmp_path / "g.csv", digests=False)
    move(root, "a/1.png", "c/1.png")
    move(root, "b/1.png", "d/1.png")
    fit = fit_corrected_groups(tmp_path / "g.csv", image_files(root), root)
    assert fit.relocated == {}
    assert sorted(fit.absent) == ["a/1.png", "b/1.png"]


def test_copies_keep_their_own_groups_when_their_folder_is_renamed(tmp_path):
    root = fill(tmp_path / "p", ["a/1.png", "a/3.png"])
    (root / "a/2.png").write_bytes((root / "a/1.png").read_bytes())
    group = table_of(root, tmp_path / "g.csv")
    assert group["a/1.png"] != group["a/2.png"]
    (root / "a").rename(root / "z")
    fit = fit_corrected_groups(tmp_path / "g.csv", image_files(root), root)
    assert fit.relocated == {f"a/{k}.png": f"z/{k}.png" for k in (1, 2, 3)}
    (root / "z/2.png").unlink()  # of two copies one is deleted
    fit = fit_corrected_groups(tmp_path / "g.csv", image_files(root), root)
    assert fit.relocated["a/1.png"] == "z/1.png"
    assert list(fit.absent) == ["a/2.png"]


def test_notes_name_ten_files_and_count_the_others(tmp_path):
    names = [f"a/{k:02d}.png" for k in range(14)]
    root = fill(tmp_path / "p", names)
    table_of(root, tmp_path / "g.csv")
    for name in names[:12]:
        (root / name).unlink()
    (note,) = fit_corrected_groups(tmp_path / "g.csv", image_files(root), root).notes
    assert all(name in note for name in names[:10])
    assert names[10] not in note
    assert "2 more" in note


def test_a_table_of_another_folder_is_still_refused(tmp_path):
    root = fill(tmp_path / "p", ["a/1.png", "a/2.png"])
    other = fill(tmp_path / "q", ["b/8.png", "b/9.png", "b/7.png"])
    table_of(root, tmp_path / "g.csv")
    with pytest.raises(HmoeError, match="names no image of q"):
        fit_corrected_groups(tmp_path / "g.csv", image_files(other), other)


def test_new_images_go_to_the_nearest_mean():
    table = pd.DataFrame({"file": ["a", "b", "d"], "group": ["x", "x", "y"], "found": ""})
    correction = Correction("g.csv", table, new=["c", "e"])
    points = np.array([[0.0, 0], [0, 2], [9, 9], [10, 10], [1, 1]])
    placed = _with_new_images(correction, list("abcde"), points)
    assert placed.table.file.tolist() == list("abcde")
    assert placed.table.group.tolist() == ["x", "x", "y", "y", "x"]
    assert len(placed.notes) == 1


# `discover` on a changed folder


@pytest.fixture(scope="module")
def changed(tmp_path_factory, own_names_of_file):
    "A folder that changed after its groups were corrected, and what `discover` makes of it."
    place = tmp_path_factory.mktemp("changed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_CACHE", str(place / "cache"))
        names = [f"{c}/{i:02d}.png" for c in ("one", "two") for i in range(24)]
        root = fill(place / "mixed", names)
        group = table_of(root, place / "groups.csv")
        move(root, "one/00.png", "two/moved.png")
        (root / "one/01.png").unlink()
        fill(root, ["two/new dark.png", "two/new bright.png"])
        store = RunStore(place / "runs")
        found = discover(root, groups=place / "groups.csv", store=store, **SMALL)
        yield place, root, group, found


def test_corrected_groups_of_a_changed_folder_are_trained_on(changed):
    _, root, group, found = changed
    now = found.images.set_index("file").group.astype(str)
    assert sorted(now.index) == image_files(root)
    assert now["two/moved.png"] == group["one/00.png"]
    assert now["two/new dark.png"] == "g0"
    assert now["two/new bright.png"] == "g1"
    assert found.run_id
    notes = " ".join(found.notes)
    for file in ("one/00.png", "one/01.png", "two/new dark.png"):
        assert file in notes
    page = report_html(found, root)
    assert "one/01.png" in page


def test_the_new_table_has_digests_the_deleted_line_and_marks_new_images(changed):
    place, root, group, found = changed
    (place / "again.csv").write_bytes(groups_csv(found))
    rows = pd.read_csv(place / "again.csv").set_index("file")
    assert rows.digest["two/02.png"] == digest_of(root / "two/02.png")
    assert rows.group["one/01.png"] == group["one/01.png"]
    assert rows.borderline["two/new dark.png"]
    assert rows.subject["two/moved.png"] == "two"
    fit = fit_corrected_groups(place / "again.csv", image_files(root), root)
    assert list(fit.absent) == ["one/01.png"]
    assert not fit.new


def test_mistaken_subjects_are_those_that_a_loop_finds_worst_first(changed):
    _, root, _, found = changed
    table = mistaken_subjects(found)
    rows = found.images.to_dict("records")
    wrong = {row["file"] for row in rows if row["class"] != row["predicted"]}
    assert set(table.file) == wrong
    assert table.probability.is_monotonic_increasing
    assert ((table.probability >= 0) & (table.probability <= 0.5)).all()
    page = report_html(found, root)
    assert page.count('class="mistaken"') == min(24, len(wrong))


def test_every_corrected_group_is_in_the_list_however_small(changed):
    _, _, _, found = changed
    few = found.images.copy()
    few["group"] = pd.Categorical(["tiny"] + ["rest"] * (len(few) - 1), ["rest", "tiny"])
    few["part"] = "training"
    few.loc[few.index[1:], "part"] = "held out"
    found_again = type(found)(**{**vars(found), "images": few})
    assert set(summarise_findings(found_again)["groups"]) == {"rest", "tiny"}


def test_a_folder_without_subjects_is_trained_on_its_groups(tmp_path, monkeypatch, own_names):
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "cache"))
    root = fill(tmp_path / "flat", [f"{i:02d}.png" for i in range(40)])
    group = table_of(root, tmp_path / "groups.csv")
    store = RunStore(tmp_path / "runs")
    found = discover(root, groups=tmp_path / "groups.csv", store=store, **SMALL)
    assert found.learns_groups
    assert found.record["config"]["algorithm"] == "HMOE-ND"
    assert found.model
    assert found.model.class_names == ["g0", "g1"]
    assert found.images.set_index("file").group.astype(str).to_dict() == group
    summary = summarise_findings(found)
    right = (found.held_out.predicted.astype(str) == found.held_out.group.astype(str)).mean()
    assert summary["recognised"] == pytest.approx(right)
    assert summary["nmi_class"] is None
    other = {file: ("g1" if file == "00.png" else name) for file, name in group.items()}
    frame = pd.DataFrame({"file": list(other), "group": list(other.values())})
    write_corrected_groups(tmp_path / "other.csv", frame)
    again = discover(root, groups=tmp_path / "other.csv", store=store, **SMALL)
    assert again.run_id != found.run_id
    frame["group"] = ["few"] * 5 + ["most"] * 35
    write_corrected_groups(tmp_path / "few.csv", frame)
    with pytest.raises(HmoeError, match="'few' has 4 images"):
        discover(root, groups=tmp_path / "few.csv", store=store, **SMALL)


# Names


def test_found_groups_have_no_name_of_a_subject():
    assert default_group_names(2, ["art", "photo"]) == ["group 1", "group 2"]
    taken = ["Group 1", "group 2", "found group 7"]
    assert not set(default_group_names(8, taken)) & {name.lower() for name in taken}
    assert group_words("house") != "house"
    assert group_words("group 12") == "group 12"


# The groups of the page


@pytest.fixture
def sorted_folder(tmp_path):
    names = [f"{c}/{i:02d}.png" for c in ("one", "two") for i in range(20)]
    root = fill(tmp_path / "sorted", names)
    table_of(root, tmp_path / "groups.csv")
    return root, tmp_path / "groups.csv"


def test_the_page_has_new_images_apart_and_none_that_are_gone(sorted_folder):
    root, path = sorted_folder
    (root / "one/03.png").unlink()
    fill(root, ["two/new.png"])
    (root / "two/broken.png").write_bytes(b"no picture")
    (root / "loose.png").write_bytes((root / "one/00.png").read_bytes())
    groups = GroupFile(root, path)
    listed = groups.as_dict()
    new = [listed["files"][i] for i in listed["new"]]
    assert new == ["two/new.png"]
    assert "one/03.png" not in listed["files"]
    left_out = [file for entry in listed["left_out"] for file in entry["files"]]
    assert sorted(left_out) == ["loose.png", "two/broken.png"]
    sent = listed["groups"]
    groups.save(sent, listed["version"])  # the new one stays in no group
    rows = pd.read_csv(path).set_index("file").group
    assert "two/new.png" not in rows
    assert "one/03.png" in rows
    sent[0]["images"].append(listed["new"][0])
    groups.save(sent, groups.version)
    assert pd.read_csv(path).set_index("file").group["two/new.png"] == sent[0]["name"]
    assert GroupFile(root, path).new == set()


def test_numbers_stay_when_the_folder_changes_during_a_session(sorted_folder):
    root, path = sorted_folder
    groups = GroupFile(root, path)
    before = list(groups.files)
    (root / "one/00.png").unlink()
    fill(root, ["one/000.png"])
    groups.read()
    assert groups.files[: len(before)] == before
    assert groups.files[len(before) :] == ["one/000.png"]
    listed = groups.as_dict()
    assert listed["gone"] == [before.index("one/00.png")]
    assert listed["new"] == [len(before)]
    json.dumps(listed)


def test_the_sizes_of_the_page_are_those_of_the_training(sorted_folder):
    root, path = sorted_folder
    groups = GroupFile(root, path)
    held_out = groups.as_dict()["held_out"]
    assert sum(held_out) == 8  # a fifth of each subject
    for group in groups.as_dict()["groups"]:
        kept = sum(not held_out[i] for i in group["images"])
        assert groups.training_sizes()[group["name"]] == kept
    groups.check_sizes()
    numbers = [i for i, held in enumerate(held_out) if not held]
    few = [*numbers[:4], *(i for i, held in enumerate(held_out) if held)]
    rest = [i for i in range(len(held_out)) if i not in few]
    groups.save([{"name": "few", "images": few}, {"name": "rest", "images": rest}], groups.version)
    assert groups.training_sizes() == {"few": 4, "rest": len(rest)}
    with pytest.raises(Refusal, match="4 pictures"):
        groups.check_sizes()
