"""Large JPEG files decoded to a half, a quarter or an eighth of their size."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.cache import examine, open_cache
from hmoe_repro.data.image_folder import scan_tree
from hmoe_repro.data.loader import ImageDataset, checked_options
from hmoe_repro.data.transforms import decode, least_side, read_image, square, why_unreadable

SIZE = (640, 480)


def smooth_picture(width: int = SIZE[0], height: int = SIZE[1]) -> Image.Image:
    "Return a picture without detail that a smaller decoding would lose."
    rows, columns = np.indices((height, width))
    waves = [120 + 100 * np.sin((rows + slope * columns) / 90) for slope in (0.2, 0.7, 1.3)]
    return Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8))


def encoded(image: Image.Image, format: str = "JPEG", **settings) -> bytes:
    "Return an image as a file."
    buffer = io.BytesIO()
    image.save(buffer, format, **settings)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_CACHE", str(tmp_path / "cache"))
    for number, domain in enumerate(("garden", "street")):
        for label, width in (("cat", 640), ("dog", 656)):
            place = tmp_path / "animals" / domain / label
            place.mkdir(parents=True)
            image = smooth_picture(width, 480 + 16 * number)
            (place / "large.jpg").write_bytes(encoded(image, quality=95))
            image.resize((40, 30)).save(place / "small.jpg", quality=95)
            image.save(place / "large.png")
    return tmp_path / "animals"


@pytest.mark.parametrize(
    "least, width",
    [(None, 640), (480, 640), (241, 640), (240, 320), (121, 320), (120, 160), (60, 80), (1, 80)],
)
def test_the_smallest_size_that_suffices_is_decoded(least, width):
    image = decode(encoded(smooth_picture()), least)
    assert image.size == (width, width * 3 // 4)


def test_both_sides_suffice_for_a_tall_and_a_wide_picture():
    for size in ((1600, 200), (200, 1600)):
        assert min(decode(encoded(smooth_picture(*size)), least=90).size) == 100


def test_other_formats_and_small_files_stay_whole():
    picture = smooth_picture(96, 72)
    for format in ("PNG", "BMP", "WEBP"):
        assert decode(encoded(picture, format), least=8).size == (96, 72)
    assert decode(encoded(picture), least=72).size == (96, 72)
    assert decode(encoded(picture), least=1000).size == (96, 72)


@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"subsampling": 0}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_square_of_a_reduced_picture_is_that_of_the_whole(mode, settings):
    content = encoded(smooth_picture().convert(mode), quality=95, **settings)
    whole = np.asarray(square(decode(content), 32), int)
    reduced = np.asarray(square(decode(content, least_side(32, "reduced")), 32), int)
    assert np.abs(whole - reduced).max() <= 6
    assert whole.std() > 20


def test_a_reduced_picture_is_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    content = encoded(smooth_picture(), exif=exif)
    assert decode(content, least=100).size == (120, 160)
    assert decode(content, least=100).info["reading"] == "upright"


def test_damage_is_found_at_the_smallest_size_as_in_the_whole():
    "Cut at every length, and with zeros for the rest: the same files are accepted."
    content = encoded(smooth_picture(96, 72), quality=80)
    accepted = []
    for end in range(0, len(content) + 1, 7):
        for damaged in (content[:end], content[:end] + bytes(len(content) - end)):
            outcomes = []
            for least in (None, 1):
                try:
                    decode(damaged, least)
                    outcomes.append(True)
                except ValueError:
                    outcomes.append(False)
            assert outcomes[0] == outcomes[1], (end, len(damaged))
            accepted.append(outcomes[0])
    assert not all(accepted)


def test_flipped_bytes_give_the_same_verdict():
    content = bytearray(encoded(smooth_picture(96, 72), quality=80))
    random = np.random.default_rng(0)
    verdicts = []
    for _ in range(150):
        damaged = bytearray(content)
        for place in random.integers(0, len(content), 3):
            damaged[place] = random.integers(0, 256)
        outcomes = []
        for least in (None, 1):
            try:
                decode(bytes(damaged), least)
                outcomes.append(True)
            except ValueError:
                outcomes.append(False)
        assert outcomes[0] == outcomes[1]
        verdicts.append(outcomes[0])
    assert True in verdicts
    assert False in verdicts


def test_digests_do_not_depend_on_the_decoding(folder):
    tree = scan_tree(folder)
    sizes = []
    digests, reasons = examine(tree, visit=lambda row, image: sizes.append(image.size), least=100)
    assert reasons == [None] * 12
    assert {(160, 120), (640, 480)} < set(sizes)
    assert examine(tree)[0] == digests
    assert why_unreadable(folder / "garden" / "cat" / "large.jpg") is None


def test_a_data_set_decodes_as_it_is_told(folder):
    tree = scan_tree(folder)
    whole = ImageDataset(tree, 32, {"data_augmentation": False})
    reduced = whole.with_options(options={"decoding": "reduced"})
    every = torch.arange(6)
    differences = (whole.inputs(0, every) - reduced.inputs(0, every)).abs().amax((1, 2, 3))
    large = torch.tensor(["large.jpg" in file for file in tree.files[0]])
    assert (differences[large] > 0).all()
    assert (differences[~large] == 0).all()
    assert differences.max() < 0.2  # of a standard deviation
    assert whole.fingerprint == reduced.fingerprint
    cached = reduced.with_options(options={"source": "cache"})
    assert torch.equal(cached.inputs(0, every), reduced.inputs(0, every))
    assert not torch.equal(cached.inputs(0, every), whole.inputs(0, every))
    assert cached.cache.path != open_cache(tree, 32).path


def test_a_crop_is_made_of_at_least_the_resolution(folder):
    "The smallest crop has 70 % of the area at an aspect of 4:3."
    whole = ImageDataset(scan_tree(folder), 32)
    reduced = whole.with_options(options={"decoding": "reduced"})
    every = torch.arange(6)
    of_whole = whole.inputs(0, every, seeds=every)
    of_reduced = reduced.inputs(0, every, seeds=every)
    of_others = whole.inputs(0, every, seeds=every + 6)
    assert 0 < (of_whole - of_reduced).abs().mean() < 0.1  # its corners are whole pixels
    assert (of_whole - of_others).abs().mean() > 0.3


def test_the_default_is_not_recorded_and_an_unknown_value_is_refused():
    assert "decoding" not in checked_options({"decoding": "whole"})
    assert checked_options({"decoding": "reduced"})["decoding"] == "reduced"
    assert "decoding" not in checked_options({"decoding": "whole"}, {"decoding": "reduced"})
    with pytest.raises(HmoeError, match="whole, reduced"):
        checked_options({"decoding": "half"})


def test_reading_a_file_that_is_too_small_for_the_request(tmp_path):
    smooth_picture(20, 10).save(tmp_path / "a.jpg")
    assert read_image(tmp_path / "a.jpg", least=500).size == (20, 10)
