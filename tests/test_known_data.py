"""Known data sets against slow readings of their layouts, and everything that may be wrong with a
folder."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from trees import (
    COUNTRIES,
    camelyon_tree,
    classes_of,
    fmow_tree,
    folder_tree,
    known_tree,
    picture,
    put,
)

from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.benchmarks import KNOWN, count_notes, known_state, read_known
from hmoe_repro.data.registry import DATASETS, find_dataset
from hmoe_repro.data.verify import findings, verify_dataset

pytestmark = pytest.mark.usefixtures("own_names")
FOLDERS = [name for name, known in KNOWN.items() if known.layout == "folders"]
SMALL = [name for name in FOLDERS if name != "DomainNet"]
PACS = Path(os.environ.get("HMOE_DATA", "nowhere")).expanduser().absolute() / "PACS"


def content(root):
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_label_is_that_of_its_folder(name, tmp_path):
    root = known_tree(tmp_path, name, 1)
    tree = read_known(name, tmp_path)
    assert list(tree.domain_names) == sorted(KNOWN[name].domains)
    assert tuple(tree.class_names) == classes_of(name)
    for domain, files, labels in zip(tree.domain_names, tree.files, tree.labels):
        assert [f.split("/")[:2] for f in files] == [
            [domain, tree.class_names[y]] for y in labels.tolist()
        ]
        assert labels.dtype == torch.int64
        assert files == sorted(
            p.relative_to(root).as_posix() for p in (root / domain).rglob("*.jpg")
        )
    assert any("images here" in note for note in tree.notes)


def test_the_registry_holds_the_protocol():
    assert {n: DATASETS[n].checkpoint_frequency for n in KNOWN} == {
        n: 1000 if n == "DomainNet" else 100 if n.startswith(("WILDS", "Spawrious")) else 300
        for n in KNOWN
    }
    assert all(
        DATASETS[n].domain_names == tuple(k.domains) and DATASETS[n].licence and k.citation
        for n, k in KNOWN.items()
    )
    assert sum(KNOWN["DomainNet"].copies["duplicates removed"]) == 586_575
    assert list(KNOWN["TerraIncognita"].known_totals.values()) == [24_788, 24_330]
    assert [
        sum(KNOWN[n].copies[c])
        for n, c in (
            ("VLCS", "DomainBed's copy"),
            ("PACS", "the authors' copy"),
            ("OfficeHome", "the authors' copy"),
        )
    ] == [10_729, 9_991, 15_588]


@pytest.mark.parametrize("name", KNOWN)
def test_an_entry_is_consistent(name):
    known = KNOWN[name]
    assert len(known.classes) in (0, known.num_classes)
    assert known.places or list(known.domains) == sorted(known.domains)
    counts = tuple(map(sum, known.class_counts.values()))
    assert not counts or counts in known.copies.values()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_missing_domain_is_refused_by_name(name, tmp_path):
    root = known_tree(tmp_path, name, 1)
    first, *_, last = KNOWN[name].domains
    for domain in (first, last):
        (root / domain).rename(tmp_path / f"away {domain}")
    with pytest.raises(HmoeError) as caught:
        read_known(name, tmp_path)
    assert first in str(caught.value)
    assert last in str(caught.value)
    assert "\n" not in str(caught.value)
    assert known_state(name, tmp_path).startswith("incomplete: lacks")


@pytest.mark.parametrize("name", [n for n in SMALL if KNOWN[n].complete])
@pytest.mark.parametrize("emptied", [False, True])
def test_a_missing_or_empty_class_is_refused_by_name(name, emptied, tmp_path):
    root = known_tree(tmp_path, name, 1)
    domain, c = list(KNOWN[name].domains)[1], classes_of(name)[2]
    for p in (root / domain / c).iterdir():
        p.unlink()
    if not emptied:
        (root / domain / c).rmdir()
    with pytest.raises(HmoeError) as caught:
        read_known(name, tmp_path)
    assert domain in str(caught.value)
    assert c in str(caught.value)


def test_a_class_missing_everywhere_is_refused_even_without_its_name(tmp_path):
    root = known_tree(tmp_path, "SVIRO", 1)
    for car in KNOWN["SVIRO"].domains:
        (root / car / "class_003").rename(tmp_path / car)
    with pytest.raises(HmoeError, match="exactly 7 classes .there are 6."):
        read_known("SVIRO", tmp_path)
    assert verify_dataset("SVIRO", tmp_path).missing == ["exactly 7 classes (there are 6)"]


def test_a_location_may_lack_a_class_and_labels_do_not_shift(tmp_path):
    root = known_tree(tmp_path, "TerraIncognita", 2)
    for p in (root / "location_38" / "bobcat").iterdir():
        p.unlink()
    (root / "location_38" / "bobcat").rmdir()
    tree = read_known("TerraIncognita", tmp_path)
    assert all(
        tree.class_names[y] == f.split("/")[1]
        for files, labels in zip(tree.files, tree.labels)
        for f, y in zip(files, labels.tolist())
    )
    assert 1 not in tree.labels[1]
    assert set(tree.labels[1].tolist()) == {0, *range(2, 10)}
    assert any("location_38/bobcat" in n for n in tree.notes)
    assert not verify_dataset("TerraIncognita", tmp_path).missing
    for location in ("100", "43", "46"):
        (root / f"location_{location}" / "bobcat").rename(tmp_path / location)
    with pytest.raises(HmoeError, match="bobcat"):
        read_known("TerraIncognita", tmp_path)
    assert verify_dataset("TerraIncognita", tmp_path).missing == ["*/bobcat"]


@pytest.mark.parametrize("name", ["PACS", "TerraIncognita"])
def test_strays_change_nothing(name, tmp_path):
    root = known_tree(tmp_path, name, 1)
    before = read_known(name, tmp_path)
    for stray in (
        ".git/x/1.jpg",
        "__MACOSX/cat/1.jpg",
        "aaa domain/cat/1.jpg",
        f"{before.domain_names[0]}/.thumbs/1.jpg",
        f"{before.domain_names[0]}/Thumbs.db",
        "readme.jpg",
    ):
        put(root / stray, picture())
    after = read_known(name, tmp_path)
    assert after.files == before.files
    assert after.class_names == before.class_names
    assert after.domain_names == before.domain_names


def test_counts_of_known_copies_say_nothing_and_others_say_what_is_known():
    for name, known in KNOWN.items():
        for counts in known.copies.values():
            assert count_notes(name, dict(zip(known.domains, counts))) == []
    terra = KNOWN["TerraIncognita"]
    (note,) = count_notes("TerraIncognita", dict(zip(terra.domains, (4879, 9767, 4020, 6000))))
    assert all(
        s in note
        for s in (
            "24,666",
            "24,788",
            "24,330",
            "the copy most papers used",
            "location_46 6,000 instead of 6,122",
        )
    )
    assert "location_38" not in note
    mixed = dict(zip(terra.domains, (4741, 9736, 3970, 6341)))  # the right total by accident
    assert sum(mixed.values()) == 24_788
    assert count_notes("TerraIncognita", mixed)


@pytest.mark.skipif(not PACS.is_dir(), reason="PACS is not here (HMOE_DATA)")
def test_the_real_pacs_is_what_is_known():
    tree = read_known("PACS", PACS.parent)
    assert [len(f) for f in tree.files] == [2048, 2344, 1670, 3929]
    assert not tree.notes


def test_camelyon_row_by_row(tmp_path):
    frame = camelyon_tree(tmp_path / "camelyon17_v1.0")
    tree = read_known("WILDSCamelyon", tmp_path)
    for h in range(5):
        rows = [r for r in frame.to_dict("records") if r["center"] == h]
        assert tree.labels[h].tolist() == [r["tumor"] for r in rows]
        expected = []
        for r in rows:
            slide = f"patient_{r['patient']}_node_{r['node']}"
            spot = f"x_{r['x_coord']}_y_{r['y_coord']}"
            expected.append(f"patches/{slide}/patch_{slide}_{spot}.png")
        assert tree.files[h] == expected
    assert all((tree.root / f).is_file() for files in tree.files for f in files)
    assert "patient_004" in tree.files[0][0]


def test_fmow_row_by_row(tmp_path):
    frame = fmow_tree(tmp_path / "fmow_v1.1")
    tree = read_known("WILDSFMoW", tmp_path)
    expected = {r: [] for r in ("Asia", "Europe", "Africa", "Americas", "Oceania", "Other")}
    for i, row in enumerate(frame.to_dict("records")):
        if row["split"] != "seq":
            expected[COUNTRIES[row["country_code"]] or "Other"].append(
                (f"images/rgb_img_{i}.png", sorted(classes_of("WILDSFMoW")).index(row["category"]))
            )
    assert [list(zip(f, y.tolist())) for f, y in zip(tree.files, tree.labels)] == list(
        expected.values()
    )
    assert sum(map(len, tree.files)) == (frame.split != "seq").sum() < len(frame)


def spoil(root, table, change):
    frame = pd.read_csv(root / table, dtype=str, keep_default_na=False)
    change(frame).to_csv(root / table, index=False)


@pytest.mark.parametrize(
    "name, table, change, said",
    [
        (
            "WILDSCamelyon",
            "metadata.csv",
            lambda f: f.drop(columns="center"),
            "metadata.csv cannot be read",
        ),
        ("WILDSCamelyon", "metadata.csv", lambda f: f[f.center != "3"], "lacks hospital_3"),
        ("WILDSCamelyon", "metadata.csv", lambda f: f.assign(center="7"), "unknown center 7"),
        ("WILDSCamelyon", "metadata.csv", lambda f: f.assign(tumor="0"), "lacks tumor"),
        (
            "WILDSFMoW",
            "rgb_metadata.csv",
            lambda f: f.assign(category="castle"),
            "unknown category castle",
        ),
        ("WILDSFMoW", "rgb_metadata.csv", lambda f: f[f.country_code != "FJI"], "lacks region_4"),
        (
            "WILDSFMoW",
            "country_code_mapping.csv",
            lambda f: f.rename(columns={"region": "r"}),
            "mapping.csv cannot be read",
        ),
        (
            "WILDSFMoW",
            "country_code_mapping.csv",
            lambda f: f.replace("Asia", "Atlantis"),
            "unknown region Atlantis",
        ),
    ],
)
def test_a_spoilt_table_is_refused(name, table, change, said, tmp_path):
    spoil(known_tree(tmp_path, name), table, change)
    with pytest.raises(HmoeError, match=said):
        read_known(name, tmp_path)


@pytest.mark.parametrize(
    "name, table", [("WILDSCamelyon", "metadata.csv"), ("WILDSFMoW", "country_code_mapping.csv")]
)
def test_a_missing_or_binary_table_is_refused(name, table, tmp_path):
    root = known_tree(tmp_path, name)
    (root / table).write_bytes(b"\xff\xfe\x00\x01" * 50)
    with pytest.raises(HmoeError, match=table):
        read_known(name, tmp_path)
    (root / table).unlink()
    with pytest.raises(HmoeError, match=f"lacks {table}"):
        read_known(name, tmp_path)
    assert known_state(name, tmp_path) == f"incomplete: lacks {table}"


@pytest.mark.parametrize("inside", [True, False])
def test_duplicates_of_domain_net_are_left_out_and_stay_on_disk(inside, tmp_path):
    root = known_tree(tmp_path, "DomainNet", 2)
    assert any("no domain_net_duplicates.txt" in n for n in read_known("DomainNet", tmp_path).notes)
    named = [
        "clipart/class_000/000.jpg",
        "sketch/class_344/001.jpg",
        "real/class_007/not there.jpg",
    ]
    put(
        (root if inside else tmp_path) / "domain_net_duplicates.txt",
        ("\n".join(named) + "\r\n").encode(),
    )
    tree = read_known("DomainNet", tmp_path)
    files = {f for names in tree.files for f in names}
    assert not files & set(named)
    assert (root / named[0]).exists()
    assert len(files) == sum(1 for _ in root.rglob("*.jpg")) - 2
    assert tree.labels[0].tolist()[:2] == [0, 1]
    assert all(
        int(f.split("class_")[1][:3]) == y
        for names, ys in zip(tree.files, tree.labels)
        for f, y in zip(names, ys.tolist())
    )


def test_missing_data_say_where_and_how(tmp_path):
    with pytest.raises(HmoeError) as caught:
        read_known("OfficeHome", tmp_path)
    assert str(tmp_path / "office_home") in str(caught.value)
    assert "hmoe data download OfficeHome" in str(caught.value)
    assert known_state("OfficeHome", tmp_path) == "missing"
    with pytest.raises(HmoeError, match="VLCS, PACS"):
        read_known("pacs", tmp_path)


def test_verify_names_every_kind_of_damage_and_touches_nothing(tmp_path):
    root = known_tree(tmp_path, "VLCS", 2)
    put(root / "LabelMe/car/000.jpg", picture("jpg", 1, 64)[:-400])
    put(root / "LabelMe/car/001.jpg", b"")
    put(root / "SUN09/dog/000.jpg", b"<html>quota exceeded</html>")
    for p in (root / "VOC2007/bird").iterdir():
        p.unlink()
    put(root / "Caltech101/bird/notes.txt", b"x")
    put(root / "Caltech101/zebra/1.jpg")
    put(root / "loose.png")
    before = content(root)
    report = verify_dataset("VLCS", tmp_path)
    assert content(root) == before
    assert report.missing
    assert report.missing == ["VOC2007/bird"]
    assert report.extra == ["Caltech101/bird/notes.txt", "Caltech101/zebra/1.jpg", "loose.png"]
    assert sorted(f for f, _ in report.unreadable) == [
        "LabelMe/car/000.jpg",
        "LabelMe/car/001.jpg",
        "SUN09/dog/000.jpg",
    ]
    assert all(reason for _, reason in report.unreadable)
    assert list(report.counts.index) == list(classes_of("VLCS"))
    assert report.counts.at["bird", "VOC2007"] == 0
    assert report.counts.at["person", "LabelMe"] == 3
    assert any("10,729" in n for n in report.notes)
    assert "LabelMe/dog: 3 images instead of 42" in report.notes
    assert [line for line in findings(report) if line.startswith("unreadable: SUN09/dog/000.jpg: ")]


def test_verify_reports_all_that_reading_would_refuse(tmp_path):
    root = known_tree(tmp_path, "PACS", 1)
    for domain in ("photo", "sketch"):
        (root / domain).rename(tmp_path / domain)
    report = verify_dataset("PACS", tmp_path)
    assert report.missing == ["photo", "sketch"]
    assert report.counts["cartoon"].sum() == 14
    assert report.counts["photo"].sum() == 0
    for domain in ("art_painting", "cartoon"):
        (root / domain).rename(tmp_path / domain)
    assert verify_dataset("PACS", tmp_path).missing == list(KNOWN["PACS"].domains)


@pytest.mark.parametrize("name", ["WILDSCamelyon", "WILDSFMoW"])
def test_verify_compares_the_table_of_wilds_with_the_files(name, tmp_path):
    root = known_tree(tmp_path, name)
    assert not findings(verify_dataset(name, tmp_path))[1:]
    tree = read_known(name, tmp_path)
    gone, cut = tree.files[1][0], tree.files[2][0]
    (root / gone).unlink()
    put(root / cut, picture("png", 0, 64)[:60])
    report = verify_dataset(name, tmp_path)
    assert report.missing == [gone]
    assert [f for f, _ in report.unreadable] == [cut]
    assert report.counts.iloc[:, 1].sum() == len(tree.files[1]) - 1


def test_long_lists_are_cut_in_print_but_not_in_the_report(tmp_path):
    root = known_tree(tmp_path, "PACS", 5)
    for k, p in enumerate(sorted(root.rglob("*.jpg"))):
        if k % 3 == 0:
            p.write_bytes(b"")
    report = verify_dataset("PACS", tmp_path)
    assert len(report.unreadable) > 20
    assert sum(line.startswith("unreadable") for line in findings(report, 20)) == 21


WORDS = ("my [bold]things", "Ünïcode – 写真", "with space")


@pytest.mark.parametrize("name", WORDS)
def test_a_folder_of_ones_own_keeps_its_names(name, tmp_path):
    folder_tree(tmp_path / name, ("b [red]", "a ß"), ("Katze 1", "[x]", "犬"), 2, "png")
    assert find_dataset(name, tmp_path) == name == find_dataset(str(tmp_path / name) + "/")
    assert DATASETS[name].domain_names == ("a ß", "b [red]")
    assert str(tmp_path) not in repr(
        (DATASETS[name].summary, DATASETS[name].files, DATASETS[name].licence)
    )
    report = verify_dataset(name)
    assert not report.missing
    assert list(report.counts.index) == sorted(("Katze 1", "[x]", "犬"))
    assert report.counts.values.sum() == 6 + 9
    assert CONFIG.datasets == (str(tmp_path / name),)


@pytest.mark.slow
def test_another_process_finds_ones_own_data_by_name(tmp_path):
    folder_tree(tmp_path / "pets", ("day", "night"), ("cat", "dog"))
    (tmp_path / "noise.py").write_text(
        "from hmoe_repro.data.digits import digit_domains\n"
        "def Noise(): return digit_domains(per_domain=2, name='Noise')\n"
    )
    find_dataset(str(tmp_path / "pets")), find_dataset("noise.py:Noise", tmp_path)
    code = (
        "import sys; from hmoe_repro.core.config import CONFIG; "
        "from hmoe_repro.data.registry import DATASETS, find_dataset; "
        "CONFIG.datasets or CONFIG.restore(sys.argv[1]); "
        "print(DATASETS[find_dataset('pets')].domain_names, find_dataset(sys.argv[2]))"
    )
    shell = os.environ | {"HMOE_FOLDERS": str(tmp_path / "pets")}
    for env, told, other in ((os.environ, CONFIG.to_json(), "Noise"), (shell, "", "PACS")):
        command = [sys.executable, "-c", code, told, other]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.stdout == f"('day', 'night') {other}\n", done.stderr


def test_names_that_would_be_confused_are_refused(tmp_path):
    for place in ("one", "two", "three"):
        name = "PACS" if place == "three" else "pets"
        folder_tree(tmp_path / place / name, ("day", "night"), ("cat", "dog"))
    find_dataset("pets", tmp_path / "one")
    with pytest.raises(HmoeError, match="a data set of yours has that name. Fix: rename"):
        find_dataset(str(tmp_path / "two" / "pets"))
    with pytest.raises(HmoeError, match="--dataset PACS"):
        find_dataset(str(tmp_path / "three" / "PACS"))
    with pytest.raises(HmoeError, match="DigitDomains"):
        put(tmp_path / "DigitDomains/a/b/1.png") or find_dataset(str(tmp_path / "DigitDomains"))
    with pytest.raises(HmoeError, match="nor is it the path of a folder"):
        find_dataset(str(tmp_path / "none"))
    with pytest.raises(HmoeError):
        find_dataset("/")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HmoeError):
        find_dataset(str(tmp_path / "empty"))
    assert "empty" not in DATASETS
    assert CONFIG.datasets == (str(tmp_path / "one" / "pets"),)


def test_a_class_missing_in_one_domain_of_ones_own_is_a_note(tmp_path):
    folder_tree(tmp_path / "pets", ("day", "night"), ("cat", "dog", "eel"), 1)
    for p in (tmp_path / "pets/day/cat").iterdir():
        p.unlink()
    find_dataset("pets", tmp_path)
    report = verify_dataset("pets")
    assert not report.missing
    assert report.counts["day"].tolist() == [0, 1, 1]
    assert any("day/cat" in n for n in report.notes)
    (tmp_path / "pets/night/eel/loop").symlink_to(tmp_path / "pets", target_is_directory=True)
    assert verify_dataset("pets").counts.equals(report.counts)


def test_the_registry_builds_image_data_and_warns_of_another_number(tmp_path):
    for name, first in (("PACS", False), ("WILDSCamelyon", True)):
        known_tree(tmp_path, name)
        with pytest.warns(UserWarning, match=f"{name} has .* images here"):
            data = DATASETS[name].build(0, str(tmp_path))
        assert data.name == name
        assert tuple(data.domain_names) == DATASETS[name].domain_names
        assert data.resize_first is first
        assert [len(y) for y in data.labels] == [len(f) for f in read_known(name, tmp_path).files]
        x = data.with_options(16).inputs(1, torch.tensor([0, 2]))
        assert x.shape == (2, 3, 16, 16)
        assert x.is_contiguous(memory_format=torch.channels_last)


def test_a_folder_of_ones_own_is_built_by_name(tmp_path):
    folder_tree(tmp_path / "pets", ("day", "night"), ("cat", "dog"))
    data = DATASETS[find_dataset("pets", tmp_path)].build(0, None)
    assert (data.name, data.domain_names, data.class_names) == (
        "pets",
        ["day", "night"],
        ["cat", "dog"],
    )
    assert str(tmp_path) not in data.fingerprint
