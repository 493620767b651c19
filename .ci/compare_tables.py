"""Compare every table (csv) in figures/ with those of an earlier commit, through a map of words.

    python .ci/compare_tables.py COMMIT

The map is .ci/renamed.toml: `columns` (old title = "new title") and `words` (old text = "new text",
replaced inside cells). Whatever differs after that is listed, and the exit status is 1.
"""

import csv
import io
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def renamed(text, columns, words):
    "A table, as rows of cells, in the new words."
    head, *rows = csv.reader(io.StringIO(text))
    for old, new in words.items():
        rows = [[cell.replace(old, new) for cell in row] for row in rows]
    return [[columns.get(cell, cell) for cell in head], *rows]


def differences(old, new, columns, words):
    "A line for each cell, or for the shape, in which two tables differ."
    was, now = renamed(old, columns, words), list(csv.reader(io.StringIO(new)))
    if [len(row) for row in was] != [len(row) for row in now]:
        return [f"{len(was)} rows of {len(was[0])}, now {len(now)} of {len(now[0])}"]
    pairs = [(i, a, b) for i, rows in enumerate(zip(was, now)) for a, b in zip(*rows) if a != b]
    return [f"row {i}: {a!r}, now {b!r}" for i, a, b in pairs]


def main(commit):
    known = tomllib.loads((ROOT / ".ci" / "renamed.toml").read_text(encoding="utf-8"))
    names = git("ls-tree", "-r", "--name-only", commit, "figures").splitlines()
    names = [name for name in names if name.endswith(".csv")]
    failed = 0
    for name in names:
        path = ROOT / name
        found = ["it is gone"]
        if path.exists():
            new = path.read_text(encoding="utf-8")
            found = differences(
                git("show", f"{commit}:{name}"), new, known["columns"], known["words"]
            )
        failed += bool(found)
        for line in found[:5]:
            print(f"{name}: {line}")
    print(f"{len(names) - failed} of {len(names)} tables equal those of {commit}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
