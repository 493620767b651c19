"""Groups by pretrained features: what is found, what is refused, and what is kept with a model."""

import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from hmoe_repro.apps import feature_groups
from hmoe_repro.apps.discover import (
    Correction,
    discover,
    findings_verdict,
    found_domains,
    groups_csv,
    report_html,
    summarise_findings,
)
from hmoe_repro.apps.export import export_model, run_graph
from hmoe_repro.apps.feature_groups import (
    FeatureGroups,
    feature_space,
    group_confidence,
    number_of_groups,
    read_groups,
    save_groups,
    stability_table,
)
from hmoe_repro.apps.own_images import image_files, sort_into
from hmoe_repro.apps.predict import load
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.store import RunStore

pytestmark = pytest.mark.usefixtures("own_names", "few_starts")


@pytest.fixture(scope="module")
def few_starts():
    "Groups of so few points are found at once; what is usual otherwise."
    usual = {name: getattr(feature_groups, name) for name in ("STARTS", "HALVINGS")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_groups, "STARTS", 2)
        patch.setattr(feature_groups, "HALVINGS", 4)
        yield usual


def blobs(count=120, groups=3, apart=6.0):
    "Features (count, 6) of two classes in some groups, whose class moves them most."
    draw = np.random.default_rng(0)
    classes, group = np.arange(count) % 2, np.arange(count) // 2 % groups
    centres = np.zeros((groups, 6))
    centres[np.arange(groups), 1 + np.arange(groups)] = apart
    features = centres[group] + draw.normal(size=(count, 6))
    features[:, 0] += 30
    features[:, 5] += 30 * classes
    return features, classes, group


def test_groups_are_those_beside_the_class():
    features, classes, group = blobs()
    space = feature_space(features, classes)
    found = space.with_clusters(3, classes, features).assign(features, classes)
    assert (pd.crosstab(found, group) > 0).sum().tolist() == [1, 1, 1]
    alone = feature_space(features, 0 * classes)
    two = alone.with_clusters(2, 0 * classes, features).assign(features, 0 * classes)
    assert (pd.crosstab(two, classes) > 0).sum().tolist() == [1, 1]


def test_points_by_hand():
    features = np.array([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0], [0.0, 5.0]])
    classes = np.array([0, 0, 1, 1])
    space = feature_space(features, classes)
    means = [[0.3, 0.9], [0.5, 0.5]]  # of (0.6, 0.8), (0, 1) and of (1, 0), (0, 1)
    assert np.allclose(space.means, means)
    axis = np.array([1, -1]) / np.sqrt(2)  # nearly; the residuals are (0.3, -0.1), (0.5, -0.5), ...
    residual = np.array([[0.3, -0.1], [-0.3, 0.1], [0.5, -0.5], [-0.5, 0.5]])
    assert np.allclose(space.project(features, classes) @ space.components, residual)
    assert abs(space.components[0] @ axis) > 0.97
    more = feature_space(features, 2 * classes, 4)  # classes 1 and 3 have no image
    assert np.allclose(more.means[[0, 2]], means)
    assert np.allclose(more.means[1], more.means[3])
    with pytest.raises(HmoeError, match="features are not finite"):
        feature_space(np.full((4, 2), np.nan), classes)


def test_a_number_of_groups_is_found_again_or_none_is():
    features, classes, group = blobs()
    table = stability_table(feature_space(features, classes).project(features, classes), 5)
    assert number_of_groups(table) == 3
    assert table.reliable.tolist()[1]
    assert table.stability[1] > 0.95 > table.stability[2:].max()
    noise = np.random.default_rng(1).normal(size=(120, 6))
    assert not stability_table(noise, 5).reliable.any()
    with pytest.raises(HmoeError, match="19 images are too few"):
        stability_table(noise[:19])


def test_the_comparison_of_numbers_of_groups_says_how_far_it_is():
    noise = np.random.default_rng(1).normal(size=(60, 6))
    steps = []
    table = stability_table(noise, 4, lambda done, total: steps.append((done, total)))
    assert table.groups.tolist() == [2, 3, 4]
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_image_between_two_groups_is_less_sure():
    draw = np.random.default_rng(0)
    points = np.concatenate([draw.normal(size=(60, 2)), draw.normal(size=(60, 2)) + [6, 0]])
    points[0], points[1] = [3, 0], [0, 0]
    groups = (points[:, 0] > 3).astype(int)
    confidence = group_confidence(points, groups, 2)
    assert confidence[1] == 1
    assert confidence[0] < 1
    assert confidence[2:].mean() > 0.99


def test_a_grouping_is_kept_with_its_names(tmp_path):
    features, classes, _ = blobs()
    grouping = feature_space(features, classes).with_clusters(3, classes, features)
    save_groups(tmp_path, ["a", "b", "c"], grouping)
    names, again = read_groups(tmp_path)
    assert names == ["a", "b", "c"]
    assert isinstance(again, FeatureGroups)
    assert np.array_equal(again.assign(features, classes), grouping.assign(features, classes))
    save_groups(tmp_path / "none", [])
    assert read_groups(tmp_path / "none") == (None, None)


# A folder of images


@pytest.fixture(scope="module")
def styles(tmp_path_factory, own_names_of_file, few_starts):
    "Flat and striped pictures in two classes, grouped by features: the folder and the findings."
    place, draw = tmp_path_factory.mktemp("styles"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("runs", "cache"):
            patch.setenv(f"HMOE_{name.upper()}", str(place / name))
        for i in range(60):
            style, size = ("flat", "striped")[i % 2 or i < 8], (8, 20)[i // 2 % 2]
            pixels = np.full((32, 32, 3), 200) + draw.integers(-20, 20, (32, 32, 3))
            pixels[16 - size // 2 : 16 + size // 2, 16 - size // 2 : 16 + size // 2] = 60
            if style == "striped":  # inside and outside alike
                pixels[::3] = 255 - pixels[::3]
            file = place / "images" / style / f"side {size}" / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(file)
        how = {"resolution": 64, "device": "cpu", "steps": 20, "network": "efficientnet_lite0"}
        how |= {"experts": 2, "restarts": 1}
        yield place / "images", how, discover(place / "images", names=["lines", "dull"], **how)


def test_pretrained_features_find_styles_and_a_model_learns_beside(styles):
    folder, _, seen = styles
    said = summarise_findings(seen)
    assert seen.method == "features"
    assert found_domains(said)
    assert said["nmi_domain"] == 1
    assert said["nmi_class"] < 0.1
    assert len(seen.held_out) == 12
    assert 0 <= said["accuracy"] <= 1
    assert set(said["groups"]) == {"dull", "lines"}
    assert said["num_experts"] == len(seen.centres)
    page = report_html(seen, folder)
    assert "How many groups?" in page
    assert "What colour and brightness alone" in page


def test_new_images_get_their_group_from_a_run_and_from_its_export(styles, tmp_path):
    folder, _, seen = styles
    run_id, store = seen.record["run_id"], RunStore(folder.parent / "runs")
    files = list(seen.images.file[:20])
    model = load(run_id, store=store)
    table = model.predict([folder / file for file in files])
    right = table["class"].to_numpy() == seen.images["class"][:20].to_numpy()
    assert right.any()
    assert list(table.group[right]) == list(seen.images.group[:20][right])
    export_model(model, tmp_path / "model")
    again = load(tmp_path / "model").predict([folder / file for file in files])
    pd.testing.assert_frame_equal(again, table)


@pytest.mark.slow
def test_a_graph_gives_the_groups_of_its_run(styles, tmp_path):
    folder, _, seen = styles
    model = load(seen.record["run_id"], store=RunStore(folder.parent / "runs"))
    files = list(seen.images.file[:20])
    table = model.predict([folder / file for file in files])
    path, _ = export_model(model, tmp_path / "graph", "torch-export", as_bytes=True)
    pictures = [model.pixels(Image.open(folder / file).convert("RGB")) for file in files]
    outputs = run_graph(path, torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2))
    assert [model.group_names[k] for k in outputs["group"]] == list(table.group)


def test_names_are_kept_with_the_groups_until_others_are_given(styles):
    folder, how, seen = styles
    again = discover(folder, **how)
    assert list(again.images.group) == list(seen.images.group)
    run_id, store = seen.record["run_id"], RunStore(folder.parent / "runs")
    names, grouping = read_groups(store.path(run_id))
    assert names == ["lines", "dull"]
    assert len(grouping.centres) == 2


def test_names_that_do_not_fit_and_methods_that_cannot_are_refused(styles):
    folder, how, _ = styles
    with pytest.raises(HmoeError, match="1 name for 2 groups"):
        discover(folder, names=["only"], **how)
    with pytest.raises(HmoeError, match="cannot have the name '..'"):
        discover(folder, names=["a", ".."], **how)
    with pytest.raises(HmoeError, match="60 images are too few for 7 groups. Fix: at most 6"):
        discover(folder, **how | {"experts": 7})
    with pytest.raises(HmoeError, match="efficientnet_lite0.*hmoe_repro.pretrained"):
        discover(folder, method="features", **how | {"network": "image_cnn"})
    with pytest.raises(HmoeError, match="not sorted by class, so that nothing can be trained"):
        discover(folder, classes=False, **how | {"network": "image_cnn"})


@pytest.mark.slow
def test_images_without_classes_are_grouped_and_nothing_is_trained(styles, tmp_path):
    folder, how, _ = styles
    flat = tmp_path / "flat"
    flat.mkdir()
    for file in image_files(folder):
        shutil.copy(folder / file, flat / file.replace("/", " "))
    runs = set((folder.parent / "runs").glob("*/record.json"))
    alone, unsorted = discover(flat, **how), discover(folder, classes=False, **how)
    for seen in (alone, unsorted):
        groups = seen.images.set_index("file").group
        striped = groups.index.str.contains("striped")
        assert seen.model is None
        assert found_domains(summarise_findings(seen))
        assert pd.crosstab(striped, groups.to_numpy()).min(axis=1).tolist() == [0, 0]
        page = report_html(seen, flat if seen is alone else folder)
        assert "hmoe predict" not in page
        assert ">resolution<" in page
        for setting in ("algorithm", "steps", "sampler", "hparams"):  # nothing was trained
            assert f">{setting}<" not in page
        assert page.count('<p class="command">') == 2  # to correct the groups
        assert "p.command {" in page
    assert set((folder.parent / "runs").glob("*/record.json")) == runs


def test_images_are_sorted_into_folders_of_their_groups(styles, tmp_path):
    folder, _, seen = styles
    for links in (False, True):
        assert sort_into(seen.images, folder, tmp_path / str(links), links) == 60
        assert len(image_files(tmp_path / str(links) / "lines" / "striped")) == 34
        file = tmp_path / str(links) / "dull" / image_files(folder)[0]
        assert file.is_symlink() == links
        assert file.read_bytes()
        with pytest.raises(HmoeError, match="is not empty"):
            sort_into(seen.images, folder, tmp_path / str(links))
    (tmp_path / "file").touch()
    with pytest.raises(HmoeError, match="is a file"):
        sort_into(seen.images, folder, tmp_path / "file")
    with pytest.raises(HmoeError, match="lies among the images"):
        sort_into(seen.images, folder, folder / "by group")


@pytest.mark.slow
@pytest.mark.skipif("HMOE_DATA" not in os.environ, reason="needs PACS")
def test_the_styles_of_pacs_are_found_without_training_on_them(tmp_path, monkeypatch, few_starts):
    for name, usual in few_starts.items():
        monkeypatch.setattr(feature_groups, name, usual)
    for name in ("runs", "cache"):
        monkeypatch.setenv(f"HMOE_{name.upper()}", str(tmp_path / name))
    draw, pacs = np.random.default_rng(0), Path(os.environ["HMOE_DATA"]) / "PACS"
    for folder in sorted(path for path in pacs.glob("*/*") if path.is_dir()):
        target = tmp_path / "photos" / folder.relative_to(pacs)
        target.mkdir(parents=True)
        for file in draw.choice(sorted(folder.iterdir()), 25, replace=False):
            shutil.copy(file, target)
    said = summarise_findings(discover(tmp_path / "photos", device="cpu", restarts=1))
    assert said["nmi_domain"] >= 0.7
    assert found_domains(said)
    assert len(said["groups"]) == 4
    assert said["nmi_domain"] > said["nmi_plain_domain"] + 0.2
    assert said["nmi_class"] < 0.1


def test_an_unedited_table_keeps_the_verdict_of_the_groups(tmp_path, monkeypatch, own_names):
    for name in ("runs", "cache"):
        monkeypatch.setenv(f"HMOE_{name.upper()}", str(tmp_path / name))
    draw = np.random.default_rng(3)
    (tmp_path / "flat").mkdir()
    for i in range(60):
        pixels = draw.integers(0, 255, (32, 32, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "flat" / f"{i:02d}.png")
    how = {"resolution": 64, "device": "cpu", "steps": 2, "network": "efficientnet_lite0"}
    found = discover(tmp_path / "flat", experts=3, **how)
    (tmp_path / "groups.csv").write_bytes(groups_csv(found))
    again = discover(tmp_path / "flat", groups=tmp_path / "groups.csv", **how)
    assert again.pairs == found.pairs
    assert again.agreement == found.agreement
    assert not found_domains(summarise_findings(found))
    said = summarise_findings(again)
    assert not found_domains(said)
    assert said["without_groups"] == summarise_findings(found)["without_groups"]
    assert "No reliable groups" in findings_verdict(said)
    assert "by hand" not in findings_verdict(said)
    assert not again.correction.is_edited
    # one picture moves: the groups are the user's
    table = pd.read_csv(tmp_path / "groups.csv")
    other = table.group[table.group != table.group[0]].iloc[0]
    table.loc[0, "group"] = other
    table.to_csv(tmp_path / "edited.csv", index=False)
    edited = discover(tmp_path / "flat", groups=tmp_path / "edited.csv", **how)
    assert edited.correction.is_edited
    assert not edited.correction.is_unchanged
    assert edited.ranking is None
    assert found_domains(summarise_findings(edited))
    assert f"1 of {len(table)}" in findings_verdict(summarise_findings(edited))


@pytest.mark.parametrize(
    "group, found, unchanged, edited",
    [
        ("aab", "112", True, True),  # renamed
        ("112", "112", True, False),
        ("aaa", "112", False, True),  # merged
        ("abc", "112", False, True),  # split
        ("aba", "112", False, True),
    ],
)
def test_a_partition_is_compared_without_its_names(group, found, unchanged, edited):
    table = pd.DataFrame({"file": list("xyz"), "group": list(group), "found": list(found)})
    correction = Correction("groups.csv", table)
    assert correction.is_unchanged == unchanged
    assert correction.is_edited == edited
