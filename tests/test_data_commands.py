"""`hmoe data` as a person uses it."""

import os
import shutil
import subprocess
import sys

import pytest
from commands import hmoe
from trees import folder_tree, known_tree, packed, put
from typer.testing import CliRunner

from hmoe_repro.cli.app import app
from hmoe_repro.cli.options import print_table
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.registry import KNOWN, find_dataset


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, own_names):
    monkeypatch.setenv("HMOE_DATA", str(tmp_path / "data"))


def data(*arguments):
    return CliRunner().invoke(app, ["data", *arguments])


def refused(*arguments):
    done = data(*arguments)
    assert isinstance(done.exception, HmoeError), done.output
    assert "\n" not in str(done.exception), done.output
    return str(done.exception)


def test_list_shows_every_data_set_its_state_terms_and_citation(tmp_path):
    known_tree(tmp_path / "data", "VLCS", 1)
    root = known_tree(tmp_path / "data", "PACS", 1)
    shutil.rmtree(root / "sketch")
    folder_tree(tmp_path / "my [red]pets", ("day", "night"), ("cat", "dog"))
    find_dataset("my [red]pets", tmp_path)
    said = data("list").output
    rows = {line.split("  ")[0]: line for line in said.splitlines()}
    assert "here (unverified)" in rows["VLCS"]
    assert "data verify NAME" in said
    assert "incomplete: lacks" in rows["PACS"]
    assert "missing" in rows["OfficeHome"]
    assert "embedded" in rows["DigitDomains"]
    assert "yours" in rows["my [red]pets"]
    flat = " ".join(said.split())
    for known in KNOWN.values():
        assert known.name in flat
        assert known.citation in flat
        assert known.licence.split()[0] in flat


def test_verify_prints_counts_terms_and_succeeds(tmp_path):
    known_tree(tmp_path / "data", "PACS", 3)
    done = data("verify", "PACS")
    assert done.exit_code == 0
    assert "be read" in done.output
    assert "9,991" in done.output
    assert KNOWN["PACS"].citation in done.output
    row = next(line for line in done.output.splitlines() if line.startswith("total"))
    assert row.split() == ["total", "21", "28", "21", "28", "98"]


def test_verify_names_what_is_wrong_and_fails(tmp_path):
    root = known_tree(tmp_path / "data", "PACS", 3)
    put(root / "photo/dog/000.jpg", b"")
    shutil.rmtree(root / "cartoon/horse")
    done = data("verify", "PACS")
    assert done.exit_code
    assert all(
        s in done.output for s in ("unreadable: photo/dog/000.jpg", "missing: cartoon/horse")
    )
    assert "1 missing, 1 unreadable" in str(done.exception)


def test_a_folder_of_ones_own_by_path_then_by_name(tmp_path):
    folder_tree(tmp_path / "my [b]pets", ("day", "night"), ("[red]cat", "dög"))
    done = data("verify", str(tmp_path / "my [b]pets"))
    assert done.exit_code == 0
    assert "[b]pets: every image" in done.output
    assert "[red]cat" in done.output
    lines = done.output.splitlines()
    assert any(line.startswith("my [b]pets: images") for line in lines)
    assert data("verify", "my [b]pets").exit_code == 0
    assert "to download" in refused("download", "my [b]pets")


def test_a_table_prints_every_name_as_it_is(capsys):
    print_table(
        "runs of [bold]my[/bold] :cat: " + "long " * 20,
        ["[red]day", ":dog:"],
        [["[/b]", ":smile:"]],
    )
    assert [line.strip().split("  ") for line in capsys.readouterr().out.splitlines()] == [
        ["runs of [bold]my[/bold] :cat: " + ("long " * 20).strip()],
        ["[red]day", ":dog:"],
        ["[/b]", "", "", ":smile:"],
    ]


def test_one_domain_alone_is_a_note(tmp_path):
    folder_tree(tmp_path / "pets", ("day",), ("cat", "dog"))
    assert "one domain, 'day'" in data("verify", str(tmp_path / "pets")).output


def test_mistakes_are_one_line_with_a_fix(tmp_path):
    assert "VLCS, PACS" in refused("verify", "PACSS")
    assert "Valid: MNIST, ColoredMNIST" in refused("download", "DigitDomains")
    assert "data download TerraIncognita" in refused("verify", "TerraIncognita")
    assert "without --archive" in refused("download", "PACS", "--sha256", "0" * 64)
    given = ("--archive", "a.zip", "--sha256", "0" * 64, "--sha256", "1" * 64)
    assert "2 checksums for 1 archives" in refused("download", "PACS", *given)
    assert "does not exist" in refused("download", "PACS", "--archive", str(tmp_path / "no.zip"))
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


def test_download_from_an_archive_shows_terms_and_the_next_step(tmp_path):
    known_tree(tmp_path / "made", "VLCS", 1)
    archive = packed(tmp_path / "made", tmp_path / "VLCS.tar.gz")
    done = data("download", "VLCS", "--archive", str(archive))
    assert done.exit_code == 0, done.exception
    assert KNOWN["VLCS"].licence in " ".join(done.output.split())
    assert "data verify VLCS" in done.output
    assert (tmp_path / "data/VLCS/SUN09").is_dir()
    assert "VLCS is there" in data("download", "VLCS").output
    assert "exists already" in refused("download", "VLCS", "--archive", str(archive))


@pytest.mark.slow
def test_the_real_command_prints_no_traceback_and_fails_with_one(tmp_path):
    root = known_tree(tmp_path / "data", "PACS", 1)
    put(root / "photo/dog/000.jpg", b"no")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from hmoe_repro.cli.app import main; main()",
            "data",
            "verify",
            "PACS",
        ],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hmoe: PACS:")
    assert "1 unreadable. Fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_repaired_is_said_in_lines_without_a_place_in_the_code(tmp_path):
    folder_tree(tmp_path / "pets", ("day", "night"), ("cat", "dog"), 6)
    shutil.rmtree(tmp_path / "pets/night/cat")
    put(tmp_path / "pets/day/dog/text.jpg", b"text")
    train = [
        "train",
        "--algorithm",
        "ERM",
        "--dataset",
        str(tmp_path / "pets"),
        *(
            "--test-domain night --network image_cnn --resolution 16 --steps 1 --device "
            "cpu --set batch_size=2 --set unreadable=skip"
        ).split(),
    ]
    done = hmoe(*train, folder=tmp_path, HMOE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    absent, unread = done.stderr.splitlines()
    assert "image of night/cat" in absent
    assert "1 of 20" in unread
    assert unread.endswith(": day/dog/text.jpg")
