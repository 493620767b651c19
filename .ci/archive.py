"""Pack the published results, and what their pages read, into one archive with checksums.

    python .ci/archive.py [FOLDER]

The archive is FOLDER/hmoe_repro-results-VERSION.tar.gz, and the default folder is build/. It
unpacks into one folder, which holds the records and arrays of `results/`, the tables that the
pages read, the data card as README.md, the licence, and SHA256SUMS for `sha256sum -c`. Equal
content gives equal bytes. This script needs Python alone.
"""

import configparser
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CARD = "results/README.md"
# What a page reads besides the records: its title, claims, the papers' numbers, units and studies.
PAGE_DATA = (
    "hmoe_repro/claims.toml",
    "hmoe_repro/hyperparameters.toml",
    "hmoe_repro/metrics.toml",
    "hmoe_repro/pages.toml",
    "hmoe_repro/paper_numbers.csv",
)
PAGE_FOLDERS = ("hmoe_repro/study_files",)


def version(root: Path) -> str:
    "Return the version of the library."
    settings = configparser.ConfigParser()
    settings.read(root / "settings.ini", encoding="utf-8")
    return settings["DEFAULT"]["version"]


def files_below(root: Path, folder: str) -> list[str]:
    "Return the files of a folder that git tracks, sorted; without git, all that are not hidden."
    command = ["git", "-C", str(root), "ls-files", "-z", "--", folder]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        names = listed.stdout.strip("\0").split("\0")
        return sorted(name for name in names if (root / name).is_file())
    paths = (path for path in (root / folder).rglob("*") if path.is_file())
    names = (path.relative_to(root).as_posix() for path in paths)
    return sorted(name for name in names if "/." not in name)


def contents(root: Path) -> dict[str, bytes]:
    "Return path in the archive -> content, with the checksums last."
    names = ["LICENSE", *files_below(root, "results"), *PAGE_DATA]
    for folder in PAGE_FOLDERS:
        names += files_below(root, folder)
    packed = {"README.md": (root / CARD).read_bytes()}
    for name in sorted(set(names) - {CARD}):
        packed[name] = (root / name).read_bytes()
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in packed.items()]
    packed["SHA256SUMS"] = "".join(lines).encode()
    return packed


def tar_gz(packed: dict[str, bytes], folder: str) -> bytes:
    "Return a .tar.gz of these files below a folder, without times, owners and other facts of here."
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in packed.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(stream.getvalue(), compresslevel=9, mtime=0)


def write_archive(root: Path, output: Path) -> Path:
    "Write the archive and a file with its checksum next to it; return the archive."
    name = f"hmoe_repro-results-{version(root)}"
    data = tar_gz(contents(root), name)
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.tar.gz"
    path.write_bytes(data)
    line = f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
    path.with_name(f"{path.name}.sha256").write_text(line, encoding="utf-8", newline="\n")
    return path


def main() -> None:
    "Write the archive of this checkout, and print where it is."
    path = write_archive(ROOT, Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build")
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB) and {path.name}.sha256")


if __name__ == "__main__":
    main()
