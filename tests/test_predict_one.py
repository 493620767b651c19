"""`hmoe predict` on one photograph, and `predict` on what is no image."""

import csv

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from test_hostile import trained  # noqa: F401
from typer.testing import CliRunner

import hmoe_repro
from hmoe_repro.apps.predict import predict_folder
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError


@pytest.fixture
def photo(tmp_path, monkeypatch):
    "A photograph in a folder with other files, which is the current one."
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    return tmp_path / "photo.png"


@pytest.fixture
def model(trained, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HMOE_RUNS", str(trained.folder))
    return hmoe_repro.load(trained.scan()[0][0]["run_id"], store=trained)


def command(model, *arguments):
    run = model.record["run_id"]
    given = [*map(str, arguments), "--model", run, "--device", "cpu", "--output", "out.csv"]
    return CliRunner().invoke(app, ["predict", *given])


@pytest.mark.parametrize("absolute", [False, True])
def test_one_photograph_is_one_row_equal_to_python(model, photo, absolute):
    done = command(model, photo if absolute else photo.name)
    assert done.exit_code == 0, done.output
    (row,) = csv.DictReader((photo.parent / "out.csv").open(encoding="utf-8"))
    expected = model.predict(photo)
    assert row["file"] == "photo.png"
    assert row["class"] == expected["class"]
    assert float(row["probability"]) == pytest.approx(expected["probability"], abs=5e-5)


def test_one_photograph_that_is_absent_or_damaged(model, photo):
    assert "absent.png cannot be read" in str(command(model, "absent.png").exception)
    for more in ((), ("--skip-unreadable",)):
        error = command(model, "broken.png", *more).exception
        assert isinstance(error, HmoeError)
        assert "--skip-unreadable" not in error.fix
        assert "1 of 1 images" in error.cause
    assert not (photo.parent / "out.csv").exists()


def test_a_folder_is_predicted_and_every_other_file_is_listed(model, photo):
    folder = photo.parent / "new"
    folder.mkdir()
    photo.rename(folder / photo.name)
    (photo.parent / "broken.png").rename(folder / "broken.png")
    for name in ("MOV_1.mov", "raw.CR2", "notes.txt"):
        (folder / name).write_bytes(b"x")
    done = command(model, "new")
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    with (photo.parent / "out.csv").open(encoding="utf-8") as file:
        assert [row["file"] for row in csv.DictReader(file)] == ["photo.png"]
    for name in ("broken.png", "MOV_1.mov", "raw.CR2", "notes.txt"):
        assert done.stderr.count(name) == 1, name
    assert "4 files left out" in done.stdout
    assert command(model, "new", "--skip-unreadable", "--overwrite").exit_code == 0
    for name in ("broken.png", "raw.CR2"):
        (folder / name).unlink()
    done = command(model, "new", "--overwrite")  # a film and a text are no pictures
    assert done.exit_code == 0
    assert "2 files left out" in done.stdout


def test_a_folder_leaves_the_damaged_one_out_if_told_to(model, photo):
    table, unreadable = predict_folder(model, photo.parent, skip_unreadable=True)
    assert list(table.file) == ["photo.png"]
    assert [file for file, _ in unreadable] == ["broken.png"]


@pytest.mark.parametrize(
    "images", [None, 5, b"x", {"photo.png"}, pd.Series(["photo.png"]), np.zeros((2, 9, 9, 3))]
)
def test_what_is_no_image_is_told_what_is(model, photo, images):
    with pytest.raises(HmoeError) as caught:
        model.predict(images)
    assert "a path" in caught.value.fix
    assert "as a list" in caught.value.fix
