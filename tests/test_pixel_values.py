"""What the values in a file mean: bit depths, orientation, transparency, and formats that only some
installations read. The same rules hold for files, for images of Pillow and for arrays."""

import hashlib
import io
import struct
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from hmoe_repro.apps.own_images import image_files
from hmoe_repro.apps.predict import _as_image
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import image_folder, transforms
from hmoe_repro.data.cache import examine
from hmoe_repro.data.image_folder import is_image, own_inventory, scan_tree, unsupported_notes
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.transforms import as_rgb, decode, to_levels, why_unreadable

RAMP = np.linspace(0, 1, 32 * 32).reshape(32, 32)
LEVELS = np.rint(255 * RAMP)


def saved(image, kind, **options):
    "The bytes of a file, of an image or of an array."
    buffer = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def grey(image):
    "The first channel of an RGB image whose channels are equal, as integers."
    values = np.asarray(image).astype(int)
    assert image.mode == "RGB"
    assert (values == values[..., :1]).all()
    return values[..., 0]


def tiff_of_12_bits(values):
    "A TIFF of 12 bits a pixel, two pixels in three bytes, which Pillow reads and cannot write."
    packed = bytearray()
    for a, b in values.reshape(-1, 2).tolist():
        packed += bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255])
    height, width = values.shape
    start, entries = 8, []
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: start}
    tags |= {277: 1, 278: height, 279: len(packed)}
    for tag, value in tags.items():
        entries.append(struct.pack("<HHII", tag, 4, 1, value))
    folder = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", start + len(packed)) + bytes(packed) + folder


# Bit depths


@pytest.mark.parametrize(
    "content",
    [
        lambda: saved((RAMP * 65535).round().astype(np.uint16), "PNG"),
        lambda: saved((RAMP * 65535).round().astype(np.uint16), "TIFF"),
        lambda: saved((RAMP * 65535).round().astype(np.int32), "TIFF"),
        lambda: saved(RAMP.astype(np.float32), "TIFF"),
        lambda: tiff_of_12_bits((RAMP * 4095).round().astype(int)),
        lambda: b"P5 32 32 4095 " + (RAMP * 4095).round().astype(">u2").tobytes(),
    ],
    ids=["png 16", "tiff 16", "tiff int32", "tiff float", "tiff 12", "pgm 12"],
)
def test_every_bit_depth_is_a_ramp_of_256_levels(content):
    levels = grey(decode(content()))
    assert abs(levels - LEVELS).max() <= 1
    assert len(np.unique(levels)) == 256
    assert abs(levels.mean() - 127.5) < 0.1


def test_a_tiff_whose_zero_is_white_is_inverted():
    black, white = (struct.pack("<HHIHH", 262, 3, 1, value, 0) for value in (1, 0))
    for values in ((RAMP * 65535).round().astype(np.uint16), RAMP.astype(np.float32)):
        content = saved(values, "TIFF")
        assert content.count(black) == 1
        image = decode(content.replace(black, white))
        assert abs(grey(image) - (255 - LEVELS)).max() <= 1


@pytest.mark.parametrize(
    "values, said",
    [
        ((RAMP * 255).astype(np.float32), "float32 values from 0 to 255"),
        (np.where(RAMP > 0.5, np.nan, RAMP).astype(np.float32), "float32 values from nan to nan"),
        ((RAMP - 0.5).astype(np.float32), "float32 values from -0.5 to 0.5"),
        ((RAMP * 100_000).astype(np.int32), "int32 values from 0 to 100,000"),
        ((RAMP * 255).astype(np.int32), "int32 values from 0 to 255"),
        ((RAMP * 4095).astype(np.uint16), "uint16 values from 0 to 4,095"),
        ((RAMP * 60 - 30).astype(np.int32), "int32 values from -30 to 30"),
    ],
)
def test_other_values_are_refused_by_name_as_file_image_and_array(values, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        decode(saved(values, "TIFF"))
    for given in (values, torch.from_numpy(values), Image.fromarray(values)):
        with pytest.raises(HmoeError, match=said):
            _as_image(given)
    (tmp_path / "x.tif").write_bytes(saved(values, "TIFF"))
    assert said in why_unreadable(tmp_path / "x.tif")


def test_sixteen_bits_of_colour_that_use_twelve_are_refused():
    from test_images import png16

    whole = decode(png16(3))
    assert np.asarray(whole).max() == 255
    dark = bytearray(saved((RAMP * 4095).astype(np.uint16), "PNG"))
    with pytest.raises(ValueError, match="4,095"):
        decode(bytes(dark))
    image = Image.fromarray(np.full((4, 4, 3), 15, np.uint8))
    image.tile = [("zip", (0, 0, 4, 4), 0, "RGB;16B")]  # as Pillow opens a PNG of 16 bits a channel
    with pytest.raises(ValueError, match="12 of its 16 bits"):
        as_rgb(image)
    image.tile = []
    assert np.asarray(as_rgb(image)).max() == 15  # of 8 bits


def test_black_is_black_in_every_type():
    for kind in (np.uint8, np.uint16, np.int32, np.float32, bool):
        assert not to_levels(np.zeros((2, 2), kind)).any()
    assert to_levels(np.ones((2, 2), bool)).min() == to_levels(np.ones((2, 2))).min() == 255


def test_an_image_of_pillow_is_read_as_its_file(tmp_path):
    deep = (RAMP * 65535).round().astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    of_file = np.asarray(_as_image(tmp_path / "deep.png"))
    for given in (Image.open(tmp_path / "deep.png"), Image.fromarray(deep), deep):
        assert (np.asarray(_as_image(given)) == of_file).all()
    fractions = np.asarray(_as_image(RAMP.astype(np.float32)))
    assert (fractions == np.asarray(_as_image(Image.fromarray(RAMP.astype(np.float32))))).all()


def test_an_array_with_the_channels_first_is_told_how_to_turn_it():
    with pytest.raises(HmoeError, match=r"\(3, 8, 9\).*permute\(1, 2, 0\)"):
        _as_image(torch.rand(3, 8, 9))


def test_a_picture_above_the_limit_is_not_called_truncated():
    for sides in ((20_000, 10_000), (60_000, 6_000)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="^more than 64,000,000 pixels$"):
                decode(saved(Image.new("1", sides), "PNG"))


def test_a_tiff_that_pillow_does_not_read_is_called_one():
    content = bytearray(saved(np.zeros((4, 4), np.float32), "TIFF"))
    content = bytes(content).replace(
        struct.pack("<HHIHH", 258, 3, 1, 32, 0), struct.pack("<HHIHH", 258, 3, 1, 24, 0)
    )
    with pytest.raises(ValueError, match="^a TIFF of a type that Pillow does not read"):
        decode(content)


# Orientation


def photograph(orientation=None, kind="JPEG"):
    "The bytes of a picture whose corners differ, with an orientation."
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[:12, :20], pixels[:12, 20:] = (250, 0, 0), (0, 250, 0)
    pixels[12:, :20] = (0, 0, 250)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
    return saved(pixels, kind, exif=exif, **options)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(orientation, kind, tmp_path):
    content = photograph(orientation, kind)
    with Image.open(io.BytesIO(content)) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    assert (np.asarray(decode(content)) == expected).all()
    with Image.open(io.BytesIO(content)) as opened:
        assert (np.asarray(_as_image(opened)) == expected).all()
    assert expected.shape[:2] == ((24, 40) if orientation < 5 else (40, 24))


def test_damaged_or_impossible_orientations_change_nothing():
    upright = np.asarray(decode(photograph()))
    for orientation in (0, 9, 77):
        assert (np.asarray(decode(photograph(orientation))) == upright).all()
    content = photograph(6)
    cut = content.replace(b"Exif\0\0", b"Exif\0\0\xff", 1)
    assert decode(cut).size in ((40, 24), (24, 40))


def tree_of(root, content, suffix="jpg"):
    "A small image folder, in which one file has this content."
    for domain in ("a", "b"):
        for name in ("cat", "dog"):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for i in range(2):
                shade = hash_of(domain + name + str(i))
                (folder / f"{i}.jpg").write_bytes(
                    saved(np.full((9, 9, 3), shade, np.uint8), "JPEG")
                )
    (root / "a" / "cat" / f"z.{suffix}").write_bytes(content)
    return scan_tree(root, "tree")


def hash_of(text):
    "A number from 0 to 255, different for each of a few texts."
    return hashlib.sha256(text.encode()).digest()[0]


@pytest.mark.parametrize(
    "content, suffix, changes",
    [
        (photograph(), "jpg", False),
        (photograph(1), "jpg", False),
        (photograph(6), "jpg", True),
        (saved((RAMP * 65535).astype(np.uint16), "PNG"), "png", False),
        (saved(RAMP.astype(np.float32), "TIFF"), "tif", True),
        (tiff_of_12_bits((RAMP * 4095).astype(int)), "tif", True),
    ],
    ids=["no exif", "upright", "turned", "16 bits", "fractions", "12 bits"],
)
def test_only_files_that_are_read_otherwise_get_another_digest(content, suffix, changes, tmp_path):
    tree = tree_of(tmp_path / "tree", content, suffix)
    digests, reasons = examine(tree, workers=1)
    assert not any(reasons)
    for file, digest in zip(tree.flat, digests):
        plain = hashlib.sha256((tree.root / file).read_bytes()).hexdigest()
        assert (digest != plain) == (changes and f"z.{suffix}" in file)


def test_a_turned_photograph_changes_the_fingerprint(tmp_path):
    lying, upright = photograph(6), photograph(1)
    prints = set()
    for name, content in (("lying", lying), ("upright", upright)):
        prints.add(ImageDataset(tree_of(tmp_path / name, content), 16, workers=0).fingerprint)
    assert len(prints) == 2


# Transparency


def test_an_image_without_a_visible_pixel_is_refused():
    rgba = Image.fromarray(
        np.dstack([np.full((8, 8, 3), 90, np.uint8), np.zeros((8, 8), np.uint8)])
    )
    indexed = Image.new("P", (8, 8), 0)
    indexed.putpalette([255, 0, 0] * 256)
    for content in (
        saved(rgba, "PNG"),
        saved(indexed, "PNG", transparency=0),
        saved(rgba, "WEBP", exact=True),
    ):
        with pytest.raises(ValueError, match="every pixel is transparent"):
            decode(content)
    with pytest.raises(HmoeError, match="every pixel is transparent"):
        _as_image(rgba)
    rgba.putpixel((3, 3), (90, 90, 90, 1))  # one pixel that is nearly visible: as in DomainBed
    assert (grey(decode(saved(rgba, "PNG"))) == 90).all()


# Formats that only some installations read


@pytest.fixture
def no_extras(monkeypatch):
    "An installation that reads neither HEIF nor AVIF nor JPEG 2000."
    for module in (image_folder, transforms):
        monkeypatch.setattr(module, "extra_formats", tuple)


def test_formats_that_are_not_read_are_named_once(no_extras, tmp_path):
    from test_images import fill

    root = fill(tmp_path / "tree")
    for i in range(3):
        (root / "a" / "cat" / f"{i}.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
    (root / "b" / "dog" / "x.avif").write_bytes(b"\0\0\0\x18ftypavif\0\0\0\0")
    notes = [
        note for note in own_inventory(root).notes if "left out" in note and "read them" in note
    ]
    assert len(notes) == 2
    assert "3 HEIF images" in " ".join(notes)
    assert sum("pip install 'hmoe_repro[heif]'" in note for note in notes) == 1
    with pytest.warns(UserWarning, match="3 files left out.*HEIF"):
        assert len(image_files(root)) == 8
    assert not is_image("photo.heic")
    assert not is_image("photo.jp2")
    for start, said in (
        (b"\0\0\0\x18ftypheic", "HEIF image, which needs pip install"),
        (b"\0\0\0\x1cftypavif", "AVIF image"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000 image"),
    ):
        with pytest.raises(ValueError, match=said):
            decode(start + b"\0" * 40)


def test_a_folder_of_nothing_else_says_what_reads_it(no_extras, tmp_path):
    folder = tmp_path / "tree" / "a" / "cat"
    folder.mkdir(parents=True)
    (folder / "x.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
    with pytest.raises(HmoeError, match=r"1 HEIF image.*pip install 'hmoe_repro\[heif\]'"):
        scan_tree(tmp_path / "tree")


@pytest.mark.parametrize("kind, suffix", [("AVIF", ".avif"), ("JPEG2000", ".jp2")])
def test_avif_and_jpeg_2000_are_read_if_pillow_can(kind, suffix):
    if kind not in image_folder.extra_formats():
        pytest.skip(f"this Pillow has no {kind}")
    assert is_image(f"x{suffix}")
    assert is_image(f"x{suffix.upper()}")
    image = decode(saved(np.full((16, 16, 3), 90, np.uint8), kind))
    assert image.mode == "RGB"
    assert abs(grey(image) - 90).max() <= 3
    assert not unsupported_notes([f"x{suffix}"])


def test_heif_is_read_with_the_extra(monkeypatch):
    """A module of that name registers a format with Pillow, as pillow-heif does."""

    class Heif(Image.Image):
        format = "HEIF"

    def opened(file, name):
        image = Heif()
        plain = Image.new("RGB", (6, 4), (1, 2, 3))
        image._im, image._mode, image._size = plain.im, "RGB", plain.size
        return image

    def register():
        Image.register_open("HEIF", opened, lambda start: start[4:12] == b"ftypheic")

    fake = types.ModuleType("pillow_heif")
    fake.register_heif_opener = register
    monkeypatch.setitem(sys.modules, "pillow_heif", fake)
    image_folder.extra_formats.cache_clear()
    try:
        assert "HEIF" in image_folder.extra_formats()
        assert is_image("IMG_0001.HEIC")
        assert decode(b"\0\0\0\x18ftypheic" + b"\0" * 40).getpixel((0, 0)) == (1, 2, 3)
    finally:
        image_folder.extra_formats.cache_clear()
        Image.OPEN.pop("HEIF", None)
        Image.ID.remove("HEIF")
