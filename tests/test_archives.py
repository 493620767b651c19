"""Archives that try to escape, to grow without end, or to leave half of themselves behind."""

import contextlib
import io
import random
import shutil
import stat
import tarfile
import zipfile

import pytest
from trees import folder_tree, packed, picture

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.download import unpack


def tar_of(path, *members, mode="w"):
    "A tar file of (name, content or attributes of a member that is no file)."
    with tarfile.open(path, mode) as archive:
        for name, value in members:
            member = tarfile.TarInfo(name)
            if isinstance(value, bytes):
                member.size = len(value)
            else:
                for k, v in value.items():
                    setattr(member, k, v)
            archive.addfile(member, io.BytesIO(value) if isinstance(value, bytes) else None)
    return path


def zip_of(path, *members, mode=0, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, value in members:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, compression
            archive.writestr(info, value)
    return path


def refused(archive, folder, said):
    "Unpacking fails with `said`, and nothing is written outside the target."
    around = set(folder.parent.iterdir())
    with pytest.raises(HmoeError) as caught:
        unpack(archive, folder / "target")
    assert said in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value), str(caught.value)
    shutil.rmtree(folder / "target", ignore_errors=True)
    assert {p.name for p in folder.iterdir()} <= {archive.name}
    assert set(folder.parent.iterdir()) == around


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_what_is_packed_comes_back(suffix, folder, tmp_path):
    folder_tree(tmp_path / "made", ("a ß", "b"), ("cat", "犬"), 2)
    unpack(packed(tmp_path / "made", tmp_path / f"x{suffix}"), folder / "target")
    read = lambda root: {
        p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()
    }
    assert read(folder / "target") == read(tmp_path / "made")
    assert [p.name for p in folder.iterdir()] == ["target"]


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "w"])
def test_every_compression_of_tar(mode, folder):
    unpack(
        tar_of(
            folder / "x.bin", ("./a/b.txt", b"hello"), ("c/", {"type": tarfile.DIRTYPE}), mode=mode
        ),
        folder / "target",
    )
    assert (folder / "target/a/b.txt").read_bytes() == b"hello"
    assert (folder / "target/c").is_dir()


UNSAFE = [
    "../escape",
    "a/../../escape",
    "/escape",
    "//escape",
    "..\\escape",
    "a\\..\\..\\escape",
    "C:\\escape",
    "C:escape",
    "a/..",
]


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_names_that_lead_out_write_nothing_outside(name, kind, folder):
    make = zip_of if kind == "zip" else tar_of
    make(folder / "x", ("good.txt", b"good"), (name, b"bad"))
    with contextlib.suppress(HmoeError):
        unpack(folder / "x", folder / "target")
    assert {p.name for p in folder.iterdir()} <= {"x", "target"}
    assert {p.name for p in folder.parent.iterdir()} == {"secret.txt", "data"}


@pytest.mark.parametrize(
    "link",
    ["../secret.txt", "/etc/passwd", "a/../../../secret.txt", "..", "../../data/../secret.txt"],
)
def test_links_to_the_outside_are_refused(link, folder):
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        (folder / "x").unlink(missing_ok=True)
        up = "../" if kind == tarfile.SYMTYPE else ""
        refused(
            tar_of(
                folder / "x",
                ("good.txt", b"good"),
                ("sub/link", {"type": kind, "linkname": up + link}),
            ),
            folder,
            "Fix: download it again, or from another source",
        )


def test_links_in_a_zip_file_are_files_and_hard_ones_of_a_tar_file_too(folder):
    zip_of(folder / "x", ("link", b"../../secret.txt"), mode=stat.S_IFLNK | 0o777)
    assert not (unpack(folder / "x", folder / "target") / "link").is_symlink()
    shutil.rmtree(folder / "target")
    tar_of(folder / "x", ("a/one", b"1"), ("b/two", {"type": tarfile.LNKTYPE, "linkname": "a/one"}))
    assert (unpack(folder / "x", folder / "target") / "b/two").read_bytes() == b"1"


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_are_refused(kind, folder):
    refused(
        tar_of(folder / "x", ("good", b"good"), ("dev", {"type": kind})),
        folder,
        "is a special file",
    )


@pytest.mark.parametrize("names", [("a/b", "a"), ("a", "a/b")])
def test_a_file_in_the_place_of_a_folder_is_refused(names, folder):
    for make in (tar_of, zip_of):
        (folder / "x").unlink(missing_ok=True)
        refused(make(folder / "x", *((n, b"x") for n in names)), folder, "cannot be unpacked")


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_an_archive_cut_anywhere_leaves_nothing(suffix, folder, tmp_path):
    folder_tree(tmp_path / "made", ("a",), ("cat", "dog"), 3)
    whole = packed(tmp_path / "made", tmp_path / f"whole{suffix}").read_bytes()
    for at in [0, 1, 20, *range(30, len(whole) - 10, max(1, len(whole) // 12))]:
        (folder / "x").write_bytes(whole[:at])
        refused(folder / "x", folder, "Fix: download it again, or from another source")


def test_changed_bytes_are_noticed(folder, tmp_path):
    folder_tree(tmp_path / "made", ("a",), ("cat",), 1)
    whole = bytearray(packed(tmp_path / "made", tmp_path / "whole.zip").read_bytes())
    whole[whole.index(picture("jpg", 0)) + 50] ^= 1
    (folder / "x").write_bytes(whole)
    refused(folder / "x", folder, "CRC")


def test_one_flipped_bit_is_refused_or_changes_nothing(made_of, folder):
    "At many places of the content; a zip file's list has no checksum."
    whole, content = made_of
    end = whole.find(b"PK\1\2") if whole[:2] == b"PK" else len(whole)
    for bit in sorted(random.Random(0).sample(range(8 * end), 60)):
        (folder / "x").write_bytes(flipped(whole, bit))
        try:
            unpack(folder / "x", folder / "target")
        except HmoeError as error:
            assert "Fix: check free space and permissions" not in str(error), (bit, str(error))
        else:
            assert tree_of(folder / "target") == content, bit
        shutil.rmtree(folder / "target", ignore_errors=True)


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def tree_of(folder):
    "path -> content (None for a folder)."
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


NAMES = ("fo", "n", "é/ü.jpg", "d/g")  # one bit makes 'f/' of the first and '.' of the second


@pytest.fixture(params=["zip stored", "zip deflated", "w:gz", "w:bz2", "w:xz"])
def made_of(request, tmp_path):
    "(the bytes of an archive, what it holds)."
    noise = random.Random(1)
    members = [(name, noise.randbytes(20 + 90 * i)) for i, name in enumerate(NAMES)]
    if request.param.startswith("zip"):
        packing = zipfile.ZIP_STORED if "stored" in request.param else zipfile.ZIP_DEFLATED
        path = zip_of(tmp_path / "whole", *members, compression=packing)
    else:
        path = tar_of(tmp_path / "whole", *members, mode=request.param)
    content = path.read_bytes()
    path.unlink()
    folders = {"é": None, "d": None}
    return content, dict(members) | folders


@pytest.mark.parametrize("content", [b"", b"<html>quota</html>", bytes(range(256)) * 12])
def test_what_is_no_archive_is_refused(content, folder):
    (folder / "x").write_bytes(content)
    refused(folder / "x", folder, "damaged or no archive")
