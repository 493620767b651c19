"""The sheet of a data set: which images it shows, with and without augmentation; its command."""

import os
import subprocess
import sys
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import as_dataset
from hmoe_repro.data.data_sheet import MOST_CLASSES, data_sheet
from hmoe_repro.data.image_folder import sample_tree
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.registry import load_dataset


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def pictures_of(figure):
    """The pictures of a sheet, (row, column) -> (H, W, 3), None where a cell is empty."""
    return [axis.images[0].get_array() if axis.images else None for axis in figure.axes]


def shades(values):
    """Grey images (N, 1, 8, 8), each of one shade, given in 255ths."""
    return torch.tensor(values, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, -1, 8, 8)


def test_a_cell_has_images_of_its_class_and_domain():
    data = as_dataset(
        {
            "a": (shades([10, 11, 20]), torch.tensor([0, 0, 1])),
            "b": (shades([30, 40, 41]), torch.tensor([1, 0, 0])),
        },
        classes=["zero", "one"],
    )
    figure = data_sheet(data, count=2)
    seen = [sorted(set(np.unique(picture)) - {255}) for picture in pictures_of(figure)]
    assert seen == [[10, 11], [40, 41], [20], [30]]
    assert [axis.get_title() for axis in figure.axes[:2]] == ["a\n3 images", "b\n3 images"]
    assert [axis.get_ylabel() for axis in figure.axes[::2]] == ["zero", "one"]


def test_a_class_that_a_domain_lacks_leaves_its_cell_empty():
    data = as_dataset(
        {
            "a": (shades([10, 20]), torch.tensor([0, 1])),
            "b": (shades([30, 30]), torch.tensor([1, 1])),
        },
        classes=["zero", "one"],
    )
    shown = pictures_of(data_sheet(data, count=1))
    assert [picture is None for picture in shown] == [False, True, False, False]


def test_images_are_those_of_training_and_repeat_with_their_seed(tmp_path):
    data = ImageDataset(sample_tree(tmp_path / "samples"), resolution=32)
    sheets = [data_sheet(data, 2, seed=seed) for seed in (0, 0, 1)]
    first, again, other = [np.stack(pictures_of(sheet)) for sheet in sheets]
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    plain = pictures_of(data_sheet(data, 2, augmented=False))
    assert not np.array_equal(first, np.stack(plain))
    label = data.class_names.index(data.class_names[0])
    own = data.pictures(0, (data.labels[0] == label).nonzero().flatten())
    own = {picture.permute(1, 2, 0).numpy().tobytes() for picture in own}
    assert all(half.tobytes() in own for half in np.split(plain[0], 2, axis=1))


@pytest.mark.parametrize("name", ["ColoredDigits", "DigitDomainsTiny"])
def test_any_number_of_channels_is_shown(name):
    data = load_dataset(name)
    pictures = [picture for picture in pictures_of(data_sheet(data, 1)) if picture is not None]
    assert {picture.shape[-1] for picture in pictures} == {3}


def test_many_classes_are_cut_and_unknown_ones_refused():
    labels = torch.arange(30) % 15
    images = shades(list(range(30)))
    names = [f"c{i:02d}" for i in range(15)]
    data = as_dataset({"a": (images, labels), "b": (images, labels)}, classes=names)
    figure = data_sheet(data, 1)
    assert len(figure.axes) == 2 * MOST_CLASSES
    assert str(15 - MOST_CLASSES) in figure._supxlabel.get_text()
    assert len(data_sheet(data, 1, classes=["c13"]).axes) == 2
    with pytest.raises(HmoeError, match="no class 'c99'"):
        data_sheet(data, 1, classes=["c99"])


def test_the_command_writes_a_picture(tmp_path, own_names):
    sample_tree(tmp_path / "samples")
    target = tmp_path / "sheet.png"
    given = [
        "data",
        "show",
        str(tmp_path / "samples"),
        "--resolution",
        "32",
        "--output",
        str(target),
    ]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    with Image.open(target) as picture:
        assert picture.width > picture.height > 100


def test_a_killed_sheet_leaves_nothing_and_can_be_repeated(tmp_path):
    """Killed while it draws, and while it writes: half a picture would be in the way."""
    target = tmp_path / "sheet.png"
    given = ["data", "show", "DigitDomainsTiny", "--class", "3", "--output", str(target)]
    program = f"""
        import os
        import sys
        from matplotlib.figure import Figure
        from hmoe_repro.cli.app import app

        def stop(self, file, **options):
            if hasattr(file, "write"):
                file.write(b"half")
            else:
                open(file, "wb").write(b"half")
            os._exit(9)

        if sys.argv.pop() == "kill":
            Figure.savefig = stop
        app({given!r})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run([*command, "kill"], env={**os.environ}).returncode == 9
    assert not list(tmp_path.iterdir())
    assert subprocess.run([*command, "whole"], env={**os.environ}).returncode == 0
    with Image.open(target) as picture:
        assert picture.width > 100
