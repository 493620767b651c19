"""Groups that a user corrects in a table: what is read, what is refused, and what is trained."""

import csv
import io
import re

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from hmoe_repro.apps.discover import (
    discover,
    findings_folder,
    findings_verdict,
    found_domains,
    groups_csv,
    in_words,
    report_html,
    save_findings,
    summarise_findings,
    verdict_sentences,
)
from hmoe_repro.apps.feature_groups import (
    centre_confidence,
    group_means,
    pair_agreement,
    pairs_by_chance,
    shared_pairs,
)
from hmoe_repro.apps.own_images import (
    HELD_OUT,
    discover_config,
    group_name_fault,
    moved_images,
    read_corrected_groups,
    read_pool,
    split_pool,
    write_corrected_groups,
)
from hmoe_repro.apps.predict import load
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.store import RunStore

pytestmark = pytest.mark.usefixtures("own_names")
FILES = ["a/1.png", "a/2.png", "b/ü, 3.png", "b/4.png", "b/=5.png"]
FOUND = ["group 1", "group 1", "group 1", "group 2", "group 2"]
SMALL = {"network": "image_cnn", "steps": 3, "resolution": 24, "device": "cpu"}
SMALL["hparams"] = {"batch_size": 4}


def table_of(groups, found=FOUND):
    "A table of groups as `discover` writes it."
    frame = {"file": FILES, "group": groups, "confidence": "0.9000", "found": found}
    return pd.DataFrame(frame)


def written(folder, frame):
    write_corrected_groups(folder / "groups.csv", frame)
    return folder / "groups.csv"


# Reading and writing


@pytest.mark.parametrize(
    "groups, moved",
    [
        (FOUND, 0),
        (["art", "art", "art", "group 2", "group 2"], 0),  # renamed
        (["group 2", "group 2", "group 2", "x", "x"], 0),  # renamed to another's name
        (["group 1", "group 1", "new", "group 2", "group 2"], 1),  # a group is split
        (["group 1", "group 2", "group 1", "group 2", "group 2"], 1),  # an image is moved
        (["all", "all", "all", "all", "rest"], 1),  # groups are merged, and an image is left
    ],
)
def test_what_is_written_is_read_again(tmp_path, groups, moved):
    frame = table_of(groups)
    table = read_corrected_groups(written(tmp_path, frame), FILES)
    pd.testing.assert_frame_equal(table, frame, check_dtype=False)
    assert moved_images(table.group, table.found) == (moved, 5)
    again = read_corrected_groups(written(tmp_path, table), FILES)
    pd.testing.assert_frame_equal(again, table)


def test_moved_images_are_counted_only_where_the_found_group_is_known():
    groups = pd.Series(["a", "a", "b", "b"])
    assert moved_images(groups, pd.Series(["", "", "", ""])) is None
    assert moved_images(groups, pd.Series(["1", "", "", "1"])) == (1, 2)


def spreadsheet(separator=",", end="\r\n", start="", order=(0, 1), rows=slice(None, None, -1)):
    "The table as a spreadsheet writes it, its rows in another order."
    cells = [(file, "art" if i < 2 else "photo") for i, file in enumerate(FILES)][rows]
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator=end)
    writer.writerow([("File ", "GROUP")[k] for k in order])
    writer.writerows([[row[k] for k in order] for row in cells])
    return start + text.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        spreadsheet().encode(),
        spreadsheet(start="\ufeff").encode(),
        spreadsheet(separator=";").encode(),
        spreadsheet(separator="\t", start="\ufeff").encode("utf-16-le"),
        spreadsheet(end="\n").encode(),
        spreadsheet(end="\r").encode(),
        spreadsheet(order=(1, 0)).encode(),
        (spreadsheet() + "\r\n,,\r\n").encode(),
        spreadsheet().replace("a/1.png", "a\\1.png").encode(),
        spreadsheet().replace("ü", "u\u0308").encode(),
        spreadsheet().replace("b/=5", " b/=5").encode(),
        spreadsheet().replace("art", " art ").encode(),
    ],
)
def test_tables_are_read_as_spreadsheets_write_them(tmp_path, content):
    (tmp_path / "edited.csv").write_bytes(content)
    table = read_corrected_groups(tmp_path / "edited.csv", FILES)
    assert table.file.tolist() == FILES
    assert table.group.tolist() == ["art"] * 2 + ["photo"] * 3
    assert table.found.tolist() == [""] * 5


def test_text_that_a_spreadsheet_would_compute_survives(tmp_path):
    files = ["=1.png", "'=2.png", "3.png"]
    frame = pd.DataFrame({"file": files, "group": ["-b", "-b", "+c"], "found": ["", "@d", ""]})
    path = written(tmp_path, frame)
    assert "'=1.png,'-b" in path.read_text()
    pd.testing.assert_frame_equal(read_corrected_groups(path, files), frame, check_dtype=False)


def test_images_without_a_group_to_read_may_be_listed(tmp_path):
    frame = table_of(FOUND)
    table = read_corrected_groups(written(tmp_path, frame), FILES[1:], FILES[:1])
    assert table.file.tolist() == FILES[1:]


@pytest.mark.parametrize(
    "old, new, place, said",
    [
        ("b/4.png,group 2", "b/9.png,group 2", "line 5", "no image 'b/9.png'"),
        ("b/4.png,group 2", "a/2.png,group 2", "line 5", "also in line 3"),
        ("b/4.png,group 2", "b/4.png, ", "line 5", "empty"),
        ("b/4.png,group 2", "b/4.png,../x", "line 5", "slash"),
        ("b/4.png,group 2", "b/4.png,..", "line 5", "meaning of its own"),
        ("b/4.png,group 2", f"b/4.png,{HELD_OUT}", "line 5", "meaning of its own"),
        ("b/4.png,group 2", f"b/4.png,{'x' * 101}", "line 5", "100 characters"),
        ("b/4.png,group 2", "b/4.png,gr\udcfcn", "line 5", "UTF-8"),
        ("b/4.png,group 2", "b/4.png,a\u202eb", "line 5", "direction"),
        ("file,group", "file,domain", "edited.csv", "rename its column domain"),
        ("b/4.png,group 2", "b/4.png,group 2,1,2,3,4", "line 5", "6 cells"),
        ("b/4.png,group 2", 'b/4.png,"a\nb"', "line 6", "cannot be shown"),
        ("b/4.png,group 2", "b/4.png,Group 1", "edited.csv", "differ only in case"),
        ("b/4.png,group 2\n", "", "edited.csv", "no line for 1 image: b/4.png"),
        ("file,group", "file,groups", "edited.csv", "no column group"),
        ("file,group", "file,group,file", "edited.csv", "two columns file"),
    ],
)
def test_a_wrong_table_is_refused_with_the_line(tmp_path, old, new, place, said):
    text = "file,group\n" + "".join(f'"{f}",{g}\n' for f, g in zip(FILES, FOUND))
    text = text.replace('"b/4.png"', "b/4.png")
    assert old in text
    content = text.replace(old, new).encode("utf-8", "surrogateescape")
    (tmp_path / "edited.csv").write_bytes(content)
    with pytest.raises(HmoeError) as caught:
        read_corrected_groups(tmp_path / "edited.csv", FILES)
    assert place in str(caught.value)
    assert said in str(caught.value)
    assert "Fix:" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00", b"file;group"])
def test_an_empty_table_is_refused(tmp_path, content):
    (tmp_path / "edited.csv").write_bytes(content)
    with pytest.raises(HmoeError):
        read_corrected_groups(tmp_path / "edited.csv", FILES)
    with pytest.raises(HmoeError):
        read_corrected_groups(tmp_path / "missing.csv", FILES)


def test_names_that_people_write_are_valid():
    for name in ("Füße 日本", "1990s", "black & white", "a.b", "smile 👩‍👩‍👧", "no\xa0break"):
        assert group_name_fault(name) == ""


# Confidence


def test_means_and_confidence_of_given_groups():
    points = np.array([[0.0, 0], [0, 2], [10, 0], [10, 2]])
    groups = np.array([0, 0, 2, 2])
    means = group_means(points, groups, 3)
    assert means[[0, 2]].tolist() == [[0, 1], [10, 1]]
    assert np.isinf(means[1]).all()
    far = np.repeat([[0.0, 0], [10, 0]], 20, axis=0) + np.linspace(0, 1, 80).reshape(40, 2)
    given = np.repeat([0, 1], 20)
    given[0] = 1  # this one is among the others
    confidence = centre_confidence(far, given, 2)
    assert confidence[0] == 0
    assert (confidence[1:] == 1).all()


# Training


def fill(root, count=12):
    "Pictures of noise of two classes in two shades, whose files do not say which."
    draw = np.random.default_rng(0)
    for c in ("one", "two"):
        (root / c).mkdir(parents=True)
        for i in range(2 * count):
            low = 150 * (i % 2)
            pixels = draw.integers(low, low + 100, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / c / f"{i:02d}.png")
    return root


def shades(files):
    "The shade of each file of `fill`."
    return ["bright" if int(file[-6:-4]) % 2 else "dark" for file in files]


@pytest.fixture(scope="module")
def place(tmp_path_factory, own_names_of_file):
    "A folder, groups that were found in it, and its corrected groups with a model."
    place = tmp_path_factory.mktemp("corrected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_CACHE", str(place / "cache"))
        folder = fill(place / "mixed")
        store = RunStore(place / "runs")
        found = discover(folder, experts=2, restarts=1, store=store, **SMALL)
        (place / "groups.csv").write_bytes(groups_csv(found))
        table = read_corrected_groups(place / "groups.csv", list(found.images.file))
        table["group"] = shades(table.file)
        write_corrected_groups(place / "edited.csv", table)
        corrected = discover(folder, groups=place / "edited.csv", store=store, **SMALL)
        yield {
            "at": place,
            "folder": folder,
            "store": store,
            "found": found,
            "corrected": corrected,
        }


def test_the_table_of_found_groups_remembers_what_was_found(place):
    found = place["found"]
    table = pd.read_csv(place["at"] / "groups.csv")
    assert table.group.tolist() == table.found.tolist()
    assert table.group.tolist() == found.images.sort_values("file").group.tolist()


def test_corrected_groups_are_the_groups(place):
    findings = place["corrected"]
    images = findings.images
    assert images.group.tolist() == shades(images.file)
    found = place["found"].images.set_index("file").group
    assert images.found.tolist() == found[images.file].tolist()
    moved, known = findings.correction.moved
    assert known == len(images) == 48
    usual = pd.crosstab(images.found, images.group).max(axis=1).sum()
    assert moved == 48 - usual
    rows = pd.read_csv(io.BytesIO(groups_csv(findings)))
    assert rows.group.tolist() == shades(rows.file)
    summary = summarise_findings(findings)
    assert found_domains(summary)
    assert summary["groups"] == {"bright": 0.5, "dark": 0.5}
    assert f"{moved} of 48" in findings_verdict(summary)
    page = report_html(findings, place["folder"])
    assert "bright" in page
    assert "group 1" not in findings_verdict(summary)
    assert summary["leaked"] == (0, 0)
    sentences = len(verdict_sentences(summary))
    leaking = verdict_sentences(summary | {"leaked": (3, 0)})
    assert len(leaking) == sentences + 1
    assert re.findall(r"\d+", (set(leaking) - set(verdict_sentences(summary))).pop()) == ["3"]


def test_a_model_is_trained_with_the_groups_as_domains(place):
    findings = place["corrected"]
    record = findings.record
    assert record["config"]["algorithm"] == "HMOE-DL"
    assert record["config"]["test_domains"] == [HELD_OUT]
    assert record["config"]["hparams"]["lambda_d"] == 1
    model = load(record["run_id"], store=place["store"])
    assert model.domain_names == ["bright", "dark"]
    assert model.group_names == ["bright", "dark"]
    files = list(findings.images.file)[:3]
    predicted = model.predict([place["folder"] / file for file in files])
    assert predicted.nearest_domain.tolist() == findings.images.expert.tolist()[:3]
    gate = findings.images.gate_value[:3]
    assert np.allclose(predicted.gate_value, gate, atol=1e-5)


def test_the_held_out_images_are_those_of_the_first_run(place):
    first, second = place["found"], place["corrected"]
    assert sorted(first.held_out.file) == sorted(second.held_out.file)
    counts = second.images.part.value_counts()
    assert counts[HELD_OUT] == 8
    assert counts["validation"] == sum(
        size // 5
        for size in second.images[second.images.part != HELD_OUT].group.value_counts().tolist()
    )


def test_the_id_depends_on_the_groups_and_not_on_the_table(place, tmp_path):
    folder = place["folder"]
    files = list(read_pool(folder).images.file)
    options = {name: SMALL[name] for name in ("network", "steps", "resolution", "hparams")}
    groups = dict(zip(files, shades(files)))
    run_id = place["corrected"].record["run_id"]
    assert discover_config(folder, groups=groups, **options).run_id == run_id
    backwards = dict(reversed(groups.items()))
    assert discover_config(folder, groups=backwards, **options).run_id == run_id
    for other in (
        groups | {files[0]: "bright"},
        {file: name.upper() for file, name in groups.items()},
    ):
        assert discover_config(folder, groups=other, **options).run_id != run_id


def test_the_same_table_again_trains_nothing(place):
    weights = sorted((place["at"] / "runs").rglob("*.safetensors"))
    before = [path.stat().st_mtime_ns for path in weights if path.name != "groups.safetensors"]
    again = discover(
        place["folder"], groups=place["at"] / "edited.csv", store=place["store"], **SMALL
    )
    after = [path.stat().st_mtime_ns for path in weights if path.name != "groups.safetensors"]
    assert before == after
    assert again.record["run_id"] == place["corrected"].record["run_id"]
    pd.testing.assert_frame_equal(again.images, place["corrected"].images)


def test_one_group_is_read_but_not_trained_on(place):
    files = list(place["found"].images.file)
    single = pd.DataFrame({"file": files, "group": "one"})
    write_corrected_groups(place["at"] / "single.csv", single)
    assert set(read_corrected_groups(place["at"] / "single.csv", files).group) == {"one"}
    with pytest.raises(HmoeError, match="one group"):
        discover(place["folder"], groups=place["at"] / "single.csv", **SMALL)


@pytest.mark.parametrize(
    "options, said", [({"experts": 3}, "experts"), ({"names": ["a", "b"]}, "names")]
)
def test_what_the_table_says_cannot_be_said_again(place, options, said):
    with pytest.raises(HmoeError, match=f"leave out {said}"):
        discover(place["folder"], groups=place["at"] / "edited.csv", **options, **SMALL)


def test_a_group_needs_images_to_train_on(place, tmp_path):
    pool = read_pool(place["folder"])
    files = list(pool.images.file)
    groups = dict.fromkeys(files, "most") | dict.fromkeys(files[:2], "few")
    with pytest.raises(HmoeError, match="the group 'few' has [012] image"):
        split_pool(pool, groups=groups)
    del groups[files[-1]]
    with pytest.raises(HmoeError, match=re.escape(f"1 image of mixed have no group: {files[-1]}")):
        split_pool(pool, groups=groups)


def test_labels_score_corrected_groups(place, tmp_path):
    files = list(read_pool(place["folder"]).images.file)
    origins = pd.DataFrame({"file": files, "domain": shades(files)})
    origins.to_csv(tmp_path / "origins.csv", index=False)
    findings = discover(
        place["folder"],
        tmp_path / "origins.csv",
        groups=place["at"] / "edited.csv",
        store=place["store"],
        **SMALL,
    )
    assert findings.record["run_id"] == place["corrected"].record["run_id"]
    assert summarise_findings(findings)["nmi_domain"] == pytest.approx(1)


# The folder of a report


@pytest.fixture
def here(tmp_path, monkeypatch):
    "An empty current folder, with a folder of images."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    return tmp_path


def test_the_default_folder_is_never_among_the_images(here, monkeypatch):
    assert findings_folder("photos") == here / "groups_of_photos"
    monkeypatch.chdir(here / "photos" / "cats")
    assert findings_folder("..") == here / "groups_of_photos"
    assert findings_folder(here / "photos") == here / "groups_of_photos"


@pytest.mark.parametrize("output", ["photos", "photos/report", "photos/cats/../x", "link/x"])
def test_a_folder_among_the_images_is_refused(here, output):
    (here / "link").symlink_to(here / "photos")
    with pytest.raises(HmoeError, match="among the images"):
        findings_folder("photos", output)
    assert not (here / "photos" / "report").exists()


def test_the_name_of_a_page_is_refused_with_the_fix(here):
    for name in ("report.html", "old.HTM"):
        with pytest.raises(HmoeError, match=f"--output {name[:-4].rstrip('.')}"):
            findings_folder("photos", name)
    (here / "taken").touch()
    with pytest.raises(HmoeError, match="name of a file"):
        findings_folder("photos", "taken")
    assert sorted(path.name for path in here.iterdir()) == ["photos", "taken"]


def test_a_report_replaces_only_what_a_report_wrote(place, tmp_path):
    found, corrected, root = place["found"], place["corrected"], place["folder"]
    report = findings_folder(root, tmp_path / "report")
    page = save_findings(found, root, report)
    (report / "notes.txt").write_text("mine")
    first = page.read_bytes()
    save_findings(found, root, findings_folder(root, report))
    assert page.read_bytes() == first
    assert (report / "notes.txt").read_text() == "mine"

    table = report / "groups.csv"
    table.write_bytes(table.read_bytes().replace(b",group 1,", b",art,"))
    edited = table.read_bytes()
    with pytest.raises(HmoeError, match="was edited"):
        findings_folder(root, report)
    with pytest.raises(HmoeError, match="was edited"):
        findings_folder(root, report, place["at"] / "edited.csv")
    assert findings_folder(root, report, table) == report
    assert table.read_bytes() == edited

    save_findings(corrected, root, report)
    with pytest.raises(HmoeError, match="corrected by hand"):
        findings_folder(root, report)
    assert findings_folder(root, report, place["at"] / "edited.csv") == report


@pytest.mark.parametrize("name", ["index.html", "groups.csv"])
@pytest.mark.parametrize("note", [None, "{}", "[1]", "{", '{"index.html": 3}'])
def test_foreign_files_stay(here, name, note):
    (here / "report").mkdir()
    (here / "report" / name).write_text("foreign")
    if note is not None:
        (here / "report" / ".hmoe-discover.json").write_text(note)
    with pytest.raises(HmoeError, match="was not written by"):
        findings_folder("photos", "report")
    assert (here / "report" / name).read_text() == "foreign"


# Pairs


def counted_by_hand(first, second):
    "Pairs together in both, in the first and in the second, each pair looked at."
    counts = [0, 0, 0, 0]
    for i in range(len(first)):
        for k in range(i):
            a, b = first[i] == first[k], second[i] == second[k]
            counts = [old + new for old, new in zip(counts, (a and b, a, b, True))]
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_pairs_are_those_that_counting_all_pairs_finds(seed):
    draw = np.random.default_rng(seed)
    first, second = draw.integers(0, 2 + seed, 30), draw.integers(0, 4, 30)
    both, one, other, every = counted_by_hand(first, second)
    assert pair_agreement(first, second) == pytest.approx((both / one + both / other) / 2)
    assert pair_agreement(second, first) == pytest.approx(pair_agreement(first, second))
    assert pairs_by_chance(first, second) == pytest.approx((one + other) / 2 / every)
    assert shared_pairs(first, second) == pytest.approx((both / one, other / every))


def test_pairs_at_the_limits():
    assert pair_agreement([0, 0, 1, 1], ["b", "b", "a", "a"]) == 1
    assert pair_agreement([0, 0, 1, 1], [0, 1, 0, 1]) == 0
    assert pair_agreement([0, 0, 0, 0], [0, 0, 1, 1]) == pytest.approx((2 / 6 + 1) / 2)
    assert pair_agreement([0, 1, 2], [0, 0, 0]) == 0
    independent = [[i % 2, i // 2 % 3] for i in range(600)]
    halves, thirds = zip(*independent)
    assert pair_agreement(halves, thirds) == pytest.approx(
        pairs_by_chance(halves, thirds), abs=0.01
    )


def test_fractions_in_words():
    assert in_words(0.91, 0.62) == ["9 of 10", "6 of 10"]
    assert in_words(0.91, 0.87) == ["91 of 100", "87 of 100"]
    assert in_words(0.97, 0.3) == ["97 of 100", "30 of 100"]
    assert in_words(0.65) == ["7 of 10"]
    assert in_words(1.0) == ["100 of 100"]
    assert in_words(0.0) == ["0 of 100"]


# The command


def test_the_last_line_is_the_page_and_groups_are_given_back(place, here, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(place["at"] / "runs"))
    monkeypatch.setenv("HMOE_CACHE", str(place["at"] / "cache"))
    small = "--network image_cnn --steps 3 --resolution 24 --set batch_size=4 --device cpu".split()
    folder = str(place["folder"])

    def last_line(*arguments):
        result = CliRunner().invoke(app, ["discover", folder, *arguments, *small])
        if result.exception:
            raise result.exception
        return result.output.splitlines()[-1]

    page = last_line("--experts", "2", "--restarts", "1")
    assert page == "groups_of_mixed/index.html"
    assert (here / page).is_file()
    table = here / "groups_of_mixed" / "groups.csv"
    frame = pd.read_csv(table)
    frame["group"] = shades(frame.file)
    frame.to_csv(table, index=False, sep=";")
    again = last_line("--groups", "groups_of_mixed/groups.csv")
    assert again == page
    assert "bright" in (here / page).read_text(encoding="utf-8")
    assert pd.read_csv(table).group.tolist() == frame.group.tolist()
    run_id = place["corrected"].record["run_id"]
    assert run_id in (here / page).read_text(encoding="utf-8")
    last_line("--groups", "groups_of_mixed/groups.csv")  # a second time
    with pytest.raises(HmoeError, match="corrected by hand"):
        last_line("--experts", "2", "--restarts", "1")
    with pytest.raises(HmoeError, match="leave out names"):
        last_line("--groups", "groups_of_mixed/groups.csv", "--names", "a,b")
