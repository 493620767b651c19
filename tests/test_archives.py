"""Archives that try to escape, to grow without end, or to leave half of themselves behind."""

import contextlib
import gzip
import io
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import time
import zipfile

import pytest
from trees import folder_tree, packed, picture

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import archives
from hmoe_repro.data.archives import alone, unpack


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
    "Unpacking fails with `said`, and `folder` holds afterwards what it held before."
    before = sorted(p.relative_to(folder.parent).as_posix() for p in folder.parent.rglob("*"))
    with pytest.raises(HmoeError) as caught:
        unpack(archive, folder / "target")
    assert said in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    assert (
        sorted(p.relative_to(folder.parent).as_posix() for p in folder.parent.rglob("*")) == before
    )


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
    assert read(folder / "target") == read(tmp_path / "made") and [
        p.name for p in folder.iterdir()
    ] == ["target"]


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "w"])
def test_every_compression_of_tar(mode, folder):
    unpack(
        tar_of(
            folder / "x.bin", ("./a/b.txt", b"hello"), ("c/", {"type": tarfile.DIRTYPE}), mode=mode
        ),
        folder / "target",
    )
    assert (folder / "target/a/b.txt").read_bytes() == b"hello" and (folder / "target/c").is_dir()


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
            ". Fix: another source",
        )


def test_symbolic_links_are_refused_and_hard_ones_are_files(folder):
    link = ("d", {"type": tarfile.SYMTYPE, "linkname": "."})
    refused(tar_of(folder / "x", link, ("d/g", b"2")), folder, "is a symbolic link")
    (folder / "x").unlink()
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


def test_bombs_are_refused_before_they_are_written(folder):
    refused(
        zip_of(folder / "x", ("zeros", b"\0" * (80 << 20)), compression=zipfile.ZIP_DEFLATED),
        folder,
        "more than 100 times its size",
    )
    (folder / "x").unlink()
    sparse = tarfile.TarInfo("huge")
    sparse.size = 1 << 50
    (folder / "x").write_bytes(sparse.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)
    refused(folder / "x", folder, "more than 100 times its size")


def test_a_full_disk_is_said_before_writing(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    refused(tar_of(folder / "x", ("big", b"x" * 2000)), folder, "GiB free. Fix: free disk space")


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_an_archive_cut_anywhere_leaves_nothing(suffix, folder, tmp_path):
    folder_tree(tmp_path / "made", ("a",), ("cat", "dog"), 3)
    whole = packed(tmp_path / "made", tmp_path / f"whole{suffix}").read_bytes()
    for at in [0, 1, 20, *range(30, len(whole) - 10, max(1, len(whole) // 12))]:
        (folder / "x").write_bytes(whole[:at])
        refused(folder / "x", folder, "Fix: fetch it again, or from another source")


def test_changed_bytes_are_noticed(folder, tmp_path):
    folder_tree(tmp_path / "made", ("a",), ("cat",), 1)
    whole = bytearray(packed(tmp_path / "made", tmp_path / "whole.zip").read_bytes())
    whole[whole.index(picture("jpg", 0)) + 50] ^= 1
    (folder / "x").write_bytes(whole)
    refused(folder / "x", folder, "CRC")


def test_one_flipped_bit_is_refused_or_changes_nothing(made_of, folder):
    "At many places; more at both ends and in a zip file's list, where lengths and checksums are."
    whole, content = made_of
    draw, end = random.Random(0), 8 * len(whole)
    bits = {*draw.sample(range(end), 50), *range(0, 160, 8), *range(end - 200, end, 5)}
    entries = [m.start() for m in re.finditer(b"PK\1\2", whole)]
    listed = [8 * at + bit for at in entries for bit in (*range(224, 272), *range(304, 400))]
    bits |= set(draw.sample(listed, 110)) if entries else set()
    refusals = 0
    for bit in sorted(bits):
        (folder / "x").write_bytes(flipped(whole, bit))
        try:
            unpack(folder / "x", folder / "target")
        except HmoeError as error:
            assert "Fix: free space and permissions" not in str(error), (bit, str(error))
            refusals += 1
        else:
            assert tree_of(folder / "target") == content, bit
            shutil.rmtree(folder / "target")
        assert sorted(p.name for p in folder.iterdir()) == ["x"]
    assert refusals > len(bits) / 3


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


def test_a_header_that_is_none_does_not_end_a_tar_file(folder):
    "Without compression only headers have checksums; a damaged one must not hide what follows it."
    whole = tar_of(folder / "x", *((f"f{i}", b"x" * 700) for i in range(3))).read_bytes()
    for bit in (8 * 1540, 8 * 3080 + 5, 8 * 4608 + 3):  # headers 2 and 3, the mark of the end
        (folder / "x").write_bytes(flipped(whole, bit))
        refused(folder / "x", folder, "is damaged or no zip or tar archive")
    (folder / "x").write_bytes(whole[:3072])
    refused(folder / "x", folder, "is damaged or no zip or tar archive")


def test_what_never_ends_behind_the_end_is_refused(folder, monkeypatch):
    monkeypatch.setattr(archives, "MOST_BEHIND", 1 << 20)
    plain = tar_of(folder / "x", ("a", b"1")).read_bytes()
    (folder / "x").write_bytes(gzip.compress(plain + b"\0" * (3 << 20)))
    refused(folder / "x", folder, "continues after its end")
    (folder / "x").write_bytes(gzip.compress(plain + b"\0" * 500_000))
    assert (unpack(folder / "x", folder / "target") / "a").read_bytes() == b"1"


def test_members_are_counted_with_zip64_too(folder, monkeypatch):
    "Beyond 65,535 members the number stands in the record of zip64."
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 3)
    many = zip_of(folder / "x", *((f"{i}", b"") for i in range(8)))
    with zipfile.ZipFile(many) as opened:
        archives._check_number(opened)
    whole = bytearray(many.read_bytes())
    assert whole[-98:-94] == b"PK\6\6"
    whole[-98 + 32] ^= 1
    many.write_bytes(whole)
    said = pytest.raises(zipfile.BadZipFile, match="8 entries instead of 9")
    with zipfile.ZipFile(many) as opened, said:
        archives._check_number(opened)


@pytest.mark.parametrize("content", [b"", b"<html>quota</html>", bytes(range(256)) * 12])
def test_what_is_no_archive_is_refused(content, folder):
    (folder / "x").write_bytes(content)
    refused(folder / "x", folder, "damaged or no zip or tar archive")


def test_an_existing_target_is_never_touched(folder):
    (folder / "target").mkdir()
    refused(tar_of(folder / "x", ("a", b"1")), folder, "exists already")
    with pytest.raises(HmoeError, match="does not exist"):
        unpack(folder / "none.zip", folder / "other")


def test_a_killed_unpacking_is_taken_for_nothing_and_begun_anew(folder):
    tar_of(folder / "x", *((f"f{i}", b"x" * 1000) for i in range(400)), mode="w:gz")
    code = (
        "import time, hmoe_repro.data.archives as a; "
        f"a.unpack({str(folder / 'x')!r}, {str(folder / 'target')!r}, lambda n: time.sleep(0.01))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    for _ in range(600):
        if (folder / ".target.unpacking/f5").exists():
            break
        time.sleep(0.05)
    with pytest.raises(HmoeError, match="another process"):
        unpack(folder / "x", folder / "target")
    process.kill()
    process.wait()
    assert (folder / ".target.unpacking").exists() and not (folder / "target").exists()
    unpack(folder / "x", folder / "target")
    assert len(list((folder / "target").iterdir())) == 400 and sorted(
        p.name for p in folder.iterdir()
    ) == ["target", "x"]


def test_the_lock_is_given_back(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), alone(tmp_path, "thing"):
            raise KeyError
    assert not list(tmp_path.iterdir())
