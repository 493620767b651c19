"""Folders of images: which files, which labels, which order; what is refused; and the transforms of
the protocol."""

import io
import os
import random
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from trees import evaluation_transform, training_transform

from hmoe_repro.core.devices import import_torchvision
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import transforms
from hmoe_repro.data.image_folder import (
    IMAGE_SUFFIXES,
    ImageTree,
    scan_tree,
    take_inventory,
    without,
)
from hmoe_repro.data.transforms import (
    augment,
    decode,
    in_threads,
    normalise,
    read_image,
    why_unreadable,
)


def picture(path, size=(12, 9), colour=(200, 30, 60), **options):
    "Write a small image of one colour, its format by suffix."
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)
    return path


def noise(path, size=(40, 30), seed=0, **options):
    "Write an image of random pixels."
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def fill(root, domains=("a", "b"), classes=("cat", "dog"), each=2):
    "A tree of tiny images."
    for domain in domains:
        for name in classes:
            for i in range(each):
                picture(root / domain / name / f"{i}.png")
    return root


def refused(root, *fragments, **options):
    "The message of the HmoeError that scanning raises; it is one line and holds all fragments."
    with pytest.raises(HmoeError) as caught:
        scan_tree(root, **options)
    message = str(caught.value)
    assert "\n" not in message, message
    assert "Fix:" in message, message
    assert all(f in message for f in fragments), message
    return message


def test_the_order_is_that_of_imagefolder(tmp_path):
    generator = random.Random(0)
    names = ["b.png", "a.PNG", "Z.jpg", "ä.webp", "1.bmp", "10.jpeg", "2.JPG"]
    for domain in ("one", "two"):
        for name in ("x", "Y", "y z"):
            for file in generator.sample(names, 4):
                picture(
                    tmp_path
                    / domain
                    / name
                    / generator.choice(["", "sub", "sub/deep", "a b"])
                    / file
                )
    tree = scan_tree(tmp_path)
    ImageFolder = import_torchvision().datasets.ImageFolder
    for position, domain in enumerate(("one", "two")):
        usual = ImageFolder(str(tmp_path / domain))
        assert usual.classes == tree.class_names
        assert [
            (str(tmp_path / f), int(y)) for f, y in zip(tree.files[position], tree.labels[position])
        ] == usual.samples
    assert len(tree) == len(tree.flat) == 24


def test_every_suffix_in_any_case_and_nothing_else(tmp_path):
    fill(tmp_path)
    for suffix in IMAGE_SUFFIXES:
        for name in (suffix, suffix.upper()):
            picture(tmp_path / "a" / "cat" / f"n{name}")
    for name in ("Thumbs.db", "readme.txt", ".hidden.png", "._photo.png", "clip.mp4"):
        (tmp_path / "a" / "cat" / name).write_bytes(b"x")
    tree = scan_tree(tmp_path)
    assert tree.labels[0].bincount().tolist() == [2 + 2 * len(IMAGE_SUFFIXES), 2]
    assert any("left out: 3 files" in n and "Thumbs.db" in n for n in tree.notes)


def test_hidden_and_stray_folders_are_no_domains(tmp_path):
    fill(tmp_path)
    fill(tmp_path, domains=(".cache", "__MACOSX", ".ipynb_checkpoints"))
    (tmp_path / "docs" / "pages").mkdir(parents=True)
    (tmp_path / "docs" / "pages" / "readme.txt").write_text("x")
    picture(tmp_path / "cover.png")
    tree = scan_tree(tmp_path)
    assert tree.domain_names == ["a", "b"]
    assert any("images: docs" in n for n in tree.notes)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_sixteen_bits_are_scaled_by_their_range(channels):
    """A ramp stays a ramp: level by level, and not white above 255 of 65,535."""
    image = decode(png16(channels))
    assert image.mode == "RGB"
    assert (np.asarray(image) == LEVELS[None, :, None]).all()


def test_a_folder_that_is_not_there_or_has_no_images_at_their_place(tmp_path):
    refused(tmp_path / "nowhere", "there is no folder", "HMOE_DATA")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "there is no folder")
    refused(tmp_path, "has no images")
    picture(tmp_path / "one" / "1.png"), picture(tmp_path / "one" / "2.png")
    refused(tmp_path / "one", "2 images, but not in class folders", "root/<domain>/<class>/<image>")
    picture(tmp_path / "two" / "cat" / "1.png"), picture(tmp_path / "two" / "dog" / "1.png")
    refused(tmp_path / "two", "(cat/1.png)", "one folder for each domain")


@pytest.mark.parametrize("how", ["nothing in it", "empty class folder", "images beside"])
def test_a_folder_without_images_is_no_domain_with_a_note(tmp_path, how):
    fill(tmp_path)
    (tmp_path / "sketch" / ("cat" if how == "empty class folder" else "")).mkdir(parents=True)
    if how == "images beside":
        picture(tmp_path / "sketch" / "1.png")
    tree = scan_tree(tmp_path)
    assert tree.domain_names == ["a", "b"]
    assert any("sketch" in note for note in tree.notes)


def test_a_class_missing_in_one_domain_shifts_no_label(tmp_path):
    fill(tmp_path, classes=("ant", "bee", "cow"))
    for file in (tmp_path / "b" / "ant").iterdir():
        file.unlink()
    for _ in range(2):
        tree = scan_tree(tmp_path)
        assert tree.class_names == ["ant", "bee", "cow"]
        assert tree.labels[1].tolist() == [1, 1, 2, 2]
        assert all(
            tree.class_names[y] == f.split("/")[1]
            for files, ys in zip(tree.files, tree.labels)
            for f, y in zip(files, ys)
        )
        assert tree.notes == ["no image of b/ant (the classes keep their numbers)"]
        if (tmp_path / "b" / "ant").exists():
            (tmp_path / "b" / "ant").rmdir()
    known = take_inventory(tmp_path, "Insects", ["a", "b"], ["ant", "bee", "cow"], complete=True)
    assert known.missing == ["b/ant"]
    assert known.counts["b"].tolist() == [0, 2, 2]


def test_one_domain_is_scanned_with_a_note(tmp_path):
    tree = scan_tree(fill(tmp_path, domains=("only",)))
    assert tree.domain_names == ["only"]
    assert any("one domain" in n for n in tree.notes)


def test_names_with_spaces_unicode_and_markup(tmp_path):
    domains, classes = (
        ["Real World", "<b>bold</b>".replace("/", "∕"), "スケッチ"],
        ["a & b", "Zoë", "$x^2$", "100%", "[link](x)"],
    )
    fill(tmp_path, domains, classes, each=1)
    tree = scan_tree(tmp_path)
    assert tree.domain_names == sorted(domains)
    assert tree.class_names == sorted(classes)
    assert [read_image(tree.root / tree.files[0][i]).size for i in range(5)] == [(12, 9)] * 5


def test_two_spellings_of_one_letter_are_one_class(tmp_path):
    fill(tmp_path, domains=("a",), classes=("Zo\u00eb", "dog"))
    fill(tmp_path, domains=("b",), classes=("Zoe\u0308", "dog"))
    tree = scan_tree(tmp_path)
    assert tree.class_names == ["Zo\u00eb", "dog"]
    assert tree.labels[0].tolist() == tree.labels[1].tolist()
    assert all((tree.root / tree.files[1][i]).is_file() for i in range(4))


def test_links_are_followed_and_loops_are_not(tmp_path):
    fill(tmp_path / "data")
    (tmp_path / "data" / "a" / "cat" / "again").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "a" / "cat" / "self").symlink_to("self")
    picture(tmp_path / "more" / "far.png")
    (tmp_path / "data" / "b" / "cat" / "linked").symlink_to(tmp_path / "more")
    tree = scan_tree(tmp_path / "data")
    assert "b/cat/linked/far.png" in tree.files[1]
    assert len(tree.files[1]) == 5
    assert sum("again" in f for f in tree.files[0]) <= 8
    assert tree.labels[0].bincount().tolist()[1] == 2


def test_a_folder_without_permission(tmp_path):
    fill(tmp_path)
    (tmp_path / "b" / "dog").chmod(0)
    try:
        if os.access(tmp_path / "b" / "dog", os.R_OK):
            pytest.skip("this user may read everything")
        refused(tmp_path, "cannot be read")
    finally:
        (tmp_path / "b" / "dog").chmod(0o755)


def test_a_tree_checks_itself(tmp_path):
    y = torch.zeros(1, dtype=torch.int64)
    for arguments, fragment in [
        ((["a"], ["c"], [[]], [y[:0]]), "no images"),
        ((["a", "a"], ["c"], [["f"]] * 2, [y] * 2), "same name"),
        ((["a"], ["c"], [["f"]], [y + 1]), "outside 0..0"),
        ((["a"], ["c"], [["f", "g"]], [y]), "2 images and 1 labels"),
        ((["a", "b"], ["c"], [["f"]], [y]), "differ in number"),
    ]:
        with pytest.raises(HmoeError, match=fragment):
            ImageTree(tmp_path, "t", *arguments)


def test_leaving_files_out(tmp_path):
    tree = scan_tree(fill(tmp_path))
    tree.factors = {"camera": [torch.arange(4), torch.arange(4)]}
    less = without(tree, ["a/cat/1.png", "b/dog/0.png"])
    assert less.files[0] == ["a/cat/0.png", "a/dog/0.png", "a/dog/1.png"]
    assert less.labels[0].tolist() == [0, 1, 1]
    assert less.factors["camera"][1].tolist() == [0, 1, 3]
    assert len(tree) == 8
    with pytest.raises(HmoeError, match="no image of domain 'a'"):
        without(tree, tree.files[0])


# Reading


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    "A tree with one file of each kind of damage in class 'bad'."
    root = tmp_path_factory.mktemp("damaged")
    fill(root, classes=("bad", "good"))
    for suffix in ("jpg", "png", "webp", "bmp"):
        whole = noise(root / "a" / "bad" / f"whole.{suffix}").read_bytes()
        (root / "a" / "bad" / f"cut.{suffix}").write_bytes(whole[: len(whole) * 2 // 3])
    (root / "a" / "bad" / "empty.jpg").touch()
    (root / "a" / "bad" / "text.jpg").write_text("this is no picture")
    (root / "a" / "bad" / "web.jpg").write_text("<!DOCTYPE html><html>404</html>")
    (root / "b" / "good" / "gone.png").symlink_to(root / "nowhere.png")
    return scan_tree(root, "Damaged")


def test_every_damage_is_found_and_named(damaged):
    found = in_threads(lambda file: why_unreadable(damaged.root / file), damaged.flat, 2)
    reasons = {file: reason for file, reason in zip(damaged.flat, found) if reason}
    assert set(reasons) == {
        f"a/bad/{n}"
        for n in ("cut.jpg", "cut.png", "cut.webp", "cut.bmp", "empty.jpg", "text.jpg", "web.jpg")
    } | {"b/good/gone.png"}
    assert "truncated" in reasons["a/bad/cut.jpg"]
    assert reasons["a/bad/empty.jpg"] == "empty file"
    assert "no image" in reasons["a/bad/text.jpg"]
    assert not any("\n" in r or "0x" in r for r in reasons.values())


def zeros_from(content, place):
    return content[:place] + bytes(len(content) - place)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "lossless.webp", "gif"])
def test_a_second_half_of_zeros_is_damage(suffix, tmp_path):
    options = {"lossless": True} if suffix == "lossless.webp" else {}
    whole = noise(tmp_path / f"x.{suffix}", (64, 64), **options).read_bytes()
    decode(whole)
    if suffix in ("jpg", "png"):
        decode(whole + bytes(40))  # padded, as some cameras do
    with pytest.raises(ValueError, match="truncated or damaged"):
        decode(zeros_from(whole, len(whole) // 2))


def test_zeros_at_the_end_of_a_webp_file_can_be_its_image(tmp_path):
    pixels = np.zeros((300, 400, 3), np.uint8)
    pixels[:150] = np.random.default_rng(0).integers(0, 256, (150, 400, 3))
    for options in ({"lossless": True, "quality": 0}, {"quality": 1}):
        for exif in (b"", b"Exif\0\0" + bytes(60)):
            path = tmp_path / "x.webp"
            Image.fromarray(pixels).save(path, exif=exif, method=0, **options)
            content = path.read_bytes()
            assert exif or content.endswith(bytes(100))
            decode(content)
            with pytest.raises(ValueError, match="zeros that are no part|truncated or damaged"):
                decode(zeros_from(content, len(content) // 2))


def test_reading_is_rgb_and_complete(tmp_path):
    for mode in ("L", "P", "LA", "RGBA", "1", "CMYK", "I;16"):
        name = tmp_path / f"{mode.replace(';', '')}.{'jpg' if mode == 'CMYK' else 'png'}"
        visible = Image.new(mode, (5, 4))
        if mode in ("LA", "RGBA"):
            visible.putalpha(255)
        visible.save(name)
        assert (read_image(name).mode, read_image(name).size) == ("RGB", (5, 4))
    with pytest.raises(HmoeError, match="no such|No such"):
        read_image(tmp_path / "none.png")
    with pytest.raises(HmoeError, match="it is a folder"):
        read_image(tmp_path)


RAMP = np.tile(np.arange(256, dtype=np.uint16) * 257, (3, 1))  # 0 to 65,535: 256 levels of 16 bits
LEVELS = np.arange(256)


def saved(image, kind, **options):
    "The bytes of a file."
    buffer = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png16(channels):
    "A PNG of 16 bits a channel, which Pillow cannot write: the ramp in every channel."
    kind, (height, width) = {1: 0, 2: 4, 3: 2, 4: 6}[channels], RAMP.shape
    rows = [b"\0" + np.repeat(row[:, None], channels, 1).astype(">u2").tobytes() for row in RAMP]
    number = lambda value: struct.pack(">I", value)
    chunk = lambda name, data: number(len(data)) + name + data + number(zlib.crc32(name + data))
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"".join(rows)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def test_scaling_rounds_to_the_nearest_level():
    values = np.random.default_rng(0).integers(0, 65536, (40, 50)).astype(np.uint16)
    levels = np.asarray(decode(saved(values, "PNG")))[..., 0]
    assert (levels == np.rint(values / 257)).all()


def eight_bits():
    "A picture with every level in every channel, and in each of Pillow's modes of 8 bits or fewer."
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 4), np.uint8)
    rgb, rgba = Image.fromarray(noise[..., :3].copy()), Image.fromarray(noise, "RGBA")
    indexed = rgb.quantize(200)
    seen = {mode: rgb.convert(mode) for mode in ("L", "1", "RGB", "CMYK", "YCbCr")}
    seen |= {"P": indexed, "RGBA": rgba, "LA": rgba.convert("LA")}
    return seen, indexed


@pytest.mark.parametrize(
    "mode, kind",
    [(m, "PNG") for m in ("L", "LA", "P", "1", "RGB", "RGBA")]
    + [(m, "JPEG") for m in ("CMYK", "YCbCr", "L")]
    + [(m, "BMP") for m in ("L", "1", "P")],
)
def test_eight_bits_are_decoded_as_ever(mode, kind):
    """Exactly Pillow's RGB: data sets of 8 bits stay what they were; transparency is dropped."""
    images, indexed = eight_bits()
    content = saved(images[mode], kind)
    image = decode(content)
    with Image.open(io.BytesIO(content)) as plain:
        expected = np.asarray(plain.convert("RGB"))
    assert image.mode == "RGB"
    assert (np.asarray(image) == expected).all()
    if mode == "P" and kind == "PNG":
        content = saved(indexed, kind, transparency=bytes(range(200)))
        assert (np.asarray(decode(content)) == expected).all()
    if mode == "1":
        assert set(np.unique(np.asarray(image))) == {0, 255}
    if mode in ("RGBA", "LA"):
        assert (np.asarray(image) == np.asarray(images[mode])[..., :-1]).all()


def test_no_format_that_starts_a_program(tmp_path):
    (tmp_path / "x.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    assert "no image" in why_unreadable(tmp_path / "x.jpg")


def test_threads_keep_the_order_and_report(tmp_path):
    told = []
    assert in_threads(
        lambda x: x * x, range(100), 3, lambda done, total: told.append((done, total))
    ) == [x * x for x in range(100)]
    assert told[-1] == (100, 100)
    assert told == sorted(told)
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda x: 1 // x, [1, 0, 2])
    assert in_threads(str, []) == []


# Transforms


@pytest.fixture(scope="module")
def photograph():
    "An oblong image that is not symmetric."
    across, down = np.meshgrid(np.arange(90) * 2, np.arange(61) * 4)
    ramp = np.stack([across, down, np.full_like(down, 70)], -1).astype(np.uint8)
    return Image.fromarray(ramp)


def test_evaluation_is_resize_and_imagenet_statistics(photograph):
    x = evaluation_transform(32)(photograph)
    by_hand = (
        np.asarray(photograph.resize((32, 32), Image.BILINEAR), np.float32).transpose(2, 0, 1) / 255
    )
    mean, std = (
        np.array([0.485, 0.456, 0.406], np.float32)[:, None, None],
        np.array([0.229, 0.224, 0.225], np.float32)[:, None, None],
    )
    assert x.shape == (3, 32, 32)
    assert np.allclose(x.numpy(), (by_hand - mean) / std, atol=1e-6)


def test_training_is_the_protocols_list(photograph):
    text = " ".join(str(training_transform(224)).split())
    for step in (
        "RandomResizedCrop(size=(224, 224), scale=(0.7, 1.0), ratio=(0.75, 1.3333), ",
        "interpolation=bilinear",
        "RandomHorizontalFlip(p=0.5)",
        "hue=(-0.3, 0.3)",
        "RandomGrayscale(p=0.1)",
        "Normalize",
    ):
        assert step in text
    for factor in ("brightness", "contrast", "saturation"):
        assert re.search(rf"{factor}=\(?\[?0\.7, 1\.3", text)
    names = [type(t).__name__ for t in training_transform(224, resize_first=True).transforms]
    assert names == [
        "Resize",
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "ColorJitter",
        "RandomGrayscale",
        "ToTensor",
        "Normalize",
    ]


@pytest.mark.parametrize("resize_first", [False, True])
def test_augmentation_is_torchvisions_under_the_seed(photograph, resize_first):
    for seed in range(25):
        torch.manual_seed(seed)
        expected = training_transform(24, resize_first)(photograph)
        torch.manual_seed(12345)
        ours = normalise(
            torch.from_numpy(np.asarray(augment(photograph, seed, 24, resize_first))[None].copy())
        )[0]
        assert torch.equal(ours, expected)
        assert torch.initial_seed() == 12345


def test_augmentation_leaves_the_generators_alone(photograph):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = torch.rand(2)
    augment(photograph, 99, 16)
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)
    assert len({np.asarray(augment(photograph, s, 16)).tobytes() for s in range(20)}) == 20
    assert (
        np.asarray(augment(photograph, torch.tensor(4), 16)).tobytes()
        == np.asarray(augment(photograph, 4, 16)).tobytes()
    )


def test_normalising_a_batch_is_normalising_each(photograph):
    T = import_torchvision().transforms
    batch = torch.randint(0, 256, (5, 17, 17, 3), dtype=torch.uint8)
    expected = torch.stack(
        [
            T.Normalize(transforms.MEAN, transforms.STD)(
                T.ToTensor()(Image.fromarray(image.numpy()))
            )
            for image in batch
        ]
    )
    x = normalise(batch)
    assert torch.equal(x, expected)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.dtype == torch.float32
    assert normalise(batch[:0]).shape == (0, 3, 17, 17)
