"""Files that `discover` does not use are on its page once, with the reason and what to do; the page
and the command name the next commands, with the user's paths and options."""

import shlex

import pandas as pd
import pytest
from commands import hmoe
from phone_folder import make_phone_folder

from hmoe_repro.apps.own_images import read_pool
from hmoe_repro.data.image_folder import extra_formats
from hmoe_repro.data.image_quality import by_reason, left_out_files

SMALL = "--network image_cnn --method hmoe --steps 2 --restarts 1 --experts 2 --resolution 24"
SMALL = (SMALL + " --set batch_size=4 --device cpu").split()


def test_each_kind_of_file_has_its_reason_and_what_to_do():
    files = ["b/x.MOV", "a.mp4", "s.pdf", "r.CR2", "z.zip", "notes.txt", "ok.jpg", "ok.PNG"]
    found = left_out_files(files)
    assert [entry.file for entry in found] == sorted(set(files) - {"ok.jpg", "ok.PNG"})
    assert all(entry.reason and entry.fix for entry in found)
    reasons = {entry.file: entry.reason for entry in found}
    assert reasons["b/x.MOV"] == reasons["a.mp4"]
    assert len(set(reasons.values())) == 5
    grouped = by_reason(found)
    assert grouped[0][2] == ["a.mp4", "b/x.MOV"]
    assert sum(len(members) for _, _, members in grouped) == len(found)


@pytest.mark.skipif("HEIF" in extra_formats(), reason="HEIC can be read here")
def test_heic_without_its_decoder_says_what_to_install():
    (entry,) = left_out_files(["a.HEIC"])
    assert "hmoe_repro[heif]" in entry.fix


@pytest.fixture(scope="module")
def place(tmp_path_factory, own_names_of_file):
    place = tmp_path_factory.mktemp("left out")
    planted = make_phone_folder(place / "my phone", per_style=24)
    root = place / "my phone"
    (root / "scan.pdf").write_text("x")
    (root / "loose.jpg").write_bytes((root / planted.images[0]).read_bytes())
    words = ("discover", "my phone", "--output", "out", *SMALL)
    done = hmoe(*words, folder=place, HMOE_CACHE=str(place / "cache"))
    assert done.returncode == 0, done.stderr
    page = (place / "out" / "index.html").read_text("utf-8")
    return place, planted, done, page


def test_each_file_is_on_the_page_and_in_the_output_once(place):
    _, planted, done, page = place
    left_out = [*planted.damaged, *planted.unknown, "scan.pdf", "loose.jpg"]
    if not planted.heic_readable:
        left_out += planted.heic
    listed = page.partition("left out</summary>")[2].partition("</details>")[0]
    for file in left_out:
        assert listed.count(file) == 1, file
        assert page.count(f"{file}") == 1, file
        assert done.stderr.count(file) == 1, file
    assert f"{len(left_out)} files left out" in page
    assert not any(file in page for file in planted.hidden)


def test_a_pool_has_them_apart_from_its_notes(place):
    root = place[0] / "my phone"
    pool = read_pool(root)
    assert {"scan.pdf", "loose.jpg"} <= {entry.file for entry in pool.left_out}
    assert not any("scan.pdf" in note or "loose" in note for note in pool.notes)


@pytest.mark.slow
def test_the_next_commands_are_those_of_this_user(place):
    _, _, done, page = place
    lines = done.stdout.splitlines()
    assert lines[-1] == "out/index.html"
    commands = [shlex.split(line) for line in lines if line.startswith("  hmoe ")]
    correct, predict, export = commands
    assert correct[:5] == ["hmoe", "discover", "my phone", "--output", "out"]
    assert correct[-2:] == ["--serve", "--open"]
    pairs = list(zip(correct, correct[1:]))
    assert ("--set", "batch_size=4") in pairs
    assert ("--experts", "2") in pairs
    assert predict[:3] == ["hmoe", "predict", "--model"]
    assert export[2] == predict[3]
    assert "--serve --open</code>" in page
    assert "--groups out/groups.csv</code>" in page
    assert str(place[0]) not in page


def test_all_duplicates_are_in_a_table_that_the_page_names(place):
    at, planted, _, page = place
    assert "<code>image_findings.csv</code>" in page
    table = pd.read_csv(at / "out" / "image_findings.csv", keep_default_na=False)
    pairs = {frozenset(pair) for pair in zip(table.file, table["with"])}
    for pair in planted.same_file + planted.same_pixels:
        assert frozenset(pair) in pairs
    near = table.finding.isin(["near duplicate", "training and test", "two classes"])
    copies = {copy for _, copy in planted.near}
    assert len(copies & (set(table.file[near]) | set(table["with"][near]))) > 0.8 * len(copies)
