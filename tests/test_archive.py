"""The archive of the published results, and the data card that describes them."""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile

import pytest
from notebooks import ROOT

sys.path.append(str(ROOT / ".ci"))
import archive  # noqa: E402
import data_card  # noqa: E402

CARD = (ROOT / archive.CARD).read_text("utf-8")


def columns_of_card():
    "Column -> (meaning, unit), as the table of the card has them."
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| (.*) \|$", CARD.partition("## Columns")[2], re.M)
    assert len(rows) == len({name for name, _, _ in rows})
    return {name: (meaning, unit.strip()) for name, meaning, unit in rows}


@pytest.fixture
def project(tmp_path):
    "A folder with a small part of the project."
    folder = tmp_path / "project"
    names = ["LICENSE", "settings.ini", archive.CARD, *archive.PAGE_DATA]
    names += [
        "results/quick-toy.jsonl",
        "results/SHA256SUMS",
        "hmoe_repro/study_files/quick-toy.toml",
    ]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_equal_content_gives_equal_bytes(project, tmp_path):
    first = archive.write_archive(project, tmp_path / "a")
    for path in project.rglob("*"):
        path.touch()  # another time
    second = archive.write_archive(project, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    (project / "LICENSE").write_text("another")
    assert archive.write_archive(project, tmp_path / "c").read_bytes() != first.read_bytes()


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum")
def test_the_checksums_hold_and_find_damage(project, tmp_path):
    path = archive.write_archive(project, tmp_path)
    check = ["sha256sum", "--check", "--quiet"]
    subprocess.run([*check, f"{path.name}.sha256"], cwd=tmp_path, check=True)
    with tarfile.open(path) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("hmoe_repro-results-*/")
    assert (folder / "README.md").read_text("utf-8") == CARD
    assert (folder / "results" / "quick-toy.jsonl").is_file()
    subprocess.run([*check, "SHA256SUMS"], cwd=folder, check=True)
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert listed == there - {"SHA256SUMS"}
    with open(folder / "results" / "quick-toy.jsonl", "ab") as file:
        file.write(b" ")
    done = subprocess.run([*check, "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert "quick-toy.jsonl: FAILED" in done.stdout


def test_members_have_no_owner_time_or_foreign_path(project, tmp_path):
    with tarfile.open(archive.write_archive(project, tmp_path)) as packed:
        members = packed.getmembers()
    (folder,) = {member.name.partition("/")[0] for member in members}
    assert folder == f"hmoe_repro-results-{archive.version(ROOT)}"
    for member in members:
        assert member.isreg()
        assert (member.mtime, member.uid, member.gid, member.uname, member.mode) == (
            0, 0, 0, "", 0o644
        )  # fmt: skip
        assert ".." not in member.name.split("/")


def test_hidden_and_untracked_files_stay_out(project, tmp_path):
    (project / "results" / ".SHA256SUMS.lock").write_text("")
    assert not [name for name in archive.contents(project) if ".lock" in name]
    names = archive.files_below(ROOT, "results")
    tracked = subprocess.run(
        ["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert not tracked or set(names) <= set(tracked)
    assert "results/quick-toy.jsonl" in names


def test_the_archive_has_what_pages_read():
    for name in archive.PAGE_DATA:
        assert (ROOT / name).is_file()
    known = {p.name for p in (ROOT / "hmoe_repro").glob("*.toml")} | {"paper_numbers.csv"}
    read = {name.rpartition("/")[2] for name in archive.PAGE_DATA}
    assert read <= known


def test_the_card_has_every_column_of_a_frame():
    import hmoe_repro as hm

    known = columns_of_card()
    docs = data_card.hparam_docs()
    for study in ("quick-toy", "pacs-dmg", "mnist-cues-turn"):
        for column in hm.results(study).columns:
            assert known[column] == data_card.described(column, docs), column


@pytest.mark.slow
def test_the_card_is_generated_from_all_studies():
    table = data_card.column_table(data_card.all_columns())
    assert data_card.with_block(CARD, "columns", table) == CARD, "python .ci/data_card.py"


def test_the_card_counts_what_is_there():
    assert data_card.with_block(CARD, "numbers", data_card.numbers()) == CARD
    line = data_card.numbers()
    digests = (ROOT / "results" / "SHA256SUMS").read_text().split("\n")
    assert line.startswith(f"It holds {len([d for d in digests if d])} studies")


def test_a_column_without_meaning_is_an_error():
    with pytest.raises(KeyError, match="discovery.beauty"):
        data_card.described("discovery.beauty", {})
    assert data_card.described("clusters.style.nmi_class", {})[1] == "0 to 1"
    assert data_card.described("environment.versions.torch", {})[0] == "version of torch"


def test_the_units_of_the_card_are_those_of_the_frame():
    import hmoe_repro as hm

    frame = hm.results("quick-digits")
    for column, (_, unit) in columns_of_card().items():
        if column not in frame or unit not in ("0 to 1", "-0.5 to 1"):
            continue
        low = float(unit.partition(" to ")[0])
        values = frame[column].dropna().astype(float)
        assert values.between(low, 1).all(), column


def test_arrays_with_images_are_named_with_their_terms():
    from safetensors import safe_open

    with_images = set()
    for path in (ROOT / "results").glob("*/*.safetensors"):
        with safe_open(path, "numpy") as file:
            names = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            with_images |= {
                name
                for name, part in slices.items()
                if part.get_dtype() == "U8" and len(part.get_shape()) == 4
            }
    assert with_images
    for name in with_images:
        assert f"`{name}`" in CARD.partition("## Licence")[2].partition("## Known")[0], name


def test_the_digest_of_the_sidecar(project, tmp_path):
    path = archive.write_archive(project, tmp_path)
    digest, name = path.with_name(f"{path.name}.sha256").read_text().split()
    assert name == path.name
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
