"""Compare every table (csv) in figures/ with those of an earlier commit, through a map.

    python .ci/compare_tables.py COMMIT

The map is .ci/renamed.toml: `columns` (old title = "new title"), `words` (old text = "new text",
replaced inside cells), and `tables`, the deliberate changes, which are counted by their reason.
Every other value is equal (numbers to nine digits; rows of another order are matched by their
text columns), or it is listed and the exit status is 1.
"""

import io
import subprocess
import sys
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent


def git(*arguments, root=ROOT):
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


def table(text):
    "A table whose cells are texts."
    return pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)


def renamed(text, known):
    "A table of the earlier commit in the new words."
    was = table(text).rename(columns=known.get("columns", {}))
    for old, new in known.get("words", {}).items():
        was = was.map(lambda cell, old=old, new=new: cell.replace(old, new))
    return was


def equal(a, b):
    "Are two cells the same text, or the same number to nine digits?"
    try:
        return a == b or abs(float(a) - float(b)) <= 1e-9 * max(abs(float(a)), abs(float(b)), 1e-6)
    except ValueError:
        return False


def keyed(part, texts):
    "The table with its rows named by their text columns, and by a number where these repeat."
    names = part[texts].agg(" | ".join, axis=1) if texts and len(part) else part.index.astype(str)
    again = part.groupby(pd.Series(names, index=part.index)).cumcount()
    return part.set_axis([f"{n} ({i + 1})" if i else n for n, i in zip(names, again)])


def differences(was, now, entries, accept):
    """A line for each value in which two tables differ, but for those that an entry of the map
    explains: `accept(entry, number of values)`."""
    sides = [was, now]
    for entry in entries:
        column, becomes = entry["column"], entry["becomes"]
        for i, side in enumerate(sides):
            if column not in side:
                continue
            if "rows" in entry:
                there = side[column].isin(entry["rows"])
                accept(entry, int(there.sum()) * side.shape[1])
                sides[i] = side[~there]
            elif becomes in ("new", "dropped"):
                accept(entry, len(side))
                sides[i] = side.drop(columns=column)
            elif i == 0:
                accept(entry, len(side))
                sides[i] = side.rename(columns={column: becomes})
    was, now = (side.reset_index(drop=True) for side in sides)
    lines = [f"column {name!r} is gone" for name in was if name not in now]
    lines += [f"column {name!r} is new" for name in now if name not in was]
    both = [name for name in was if name in now]
    texts = [
        c for c in both if pd.to_numeric(was[c].replace("", "0"), errors="coerce").isna().any()
    ]
    if len(was) != len(now) or not was[texts].equals(now[texts]):
        was, now = keyed(was, texts), keyed(now, texts)
    lines += [f"row {name} is gone" for name in was.index if name not in now.index]
    lines += [f"row {name} is new" for name in now.index if name not in was.index]
    for name in was.index.intersection(now.index):
        for column in both:
            a, b = was.loc[name, column], now.loc[name, column]
            if not equal(a, b):
                lines.append(f"row {name}, {column}: {a!r}, now {b!r}")
    return lines


def compare(old, new, known):
    """(lines, values by reason, entries that nothing needed) of two sets of tables, path below
    `figures` -> text."""
    entries, counts, used, lines = known.get("tables", []), Counter(), set(), []
    new = dict(new)

    def accept(entry, values):
        counts[entry["reason"]] += values
        used.add(id(entry))

    def whole(path):
        mine = [e for e in entries if fnmatch(path, e["file"]) and "column" not in e]
        return mine[0] if mine else None

    for path, text in old.items():
        entry, target = whole(path), path
        if entry and entry["becomes"] in ("new", "dropped"):
            accept(entry, table(text).size)
            new.pop(path, None)
            continue
        if entry:
            target = str(Path(path).with_name(entry["becomes"]))
            accept(entry, 0)
        if target not in new:
            lines.append(f"{path}: it is gone")
            continue
        mine = [e for e in entries if fnmatch(path, e["file"]) and "column" in e]
        found = differences(renamed(text, known), table(new.pop(target)), mine, accept)
        lines += [f"{path}: {line}" for line in found]
    for path, text in new.items():
        entry = whole(path)
        if entry and entry["becomes"] == "new":
            accept(entry, table(text).size)
        else:
            lines.append(f"{path}: it is new")
    return lines, counts, [e for e in entries if id(e) not in used]


def main(commit, root=ROOT, shown=5):
    known = tomllib.loads((root / ".ci" / "renamed.toml").read_text(encoding="utf-8"))
    names = git("ls-tree", "-r", "--name-only", commit, "figures", root=root).splitlines()
    names = [name for name in names if name.endswith(".csv")]
    old = {
        name.removeprefix("figures/"): git("show", f"{commit}:{name}", root=root) for name in names
    }
    paths = sorted((root / "figures").rglob("*.csv"))
    new = {p.relative_to(root / "figures").as_posix(): p.read_text(encoding="utf-8") for p in paths}
    lines, counts, unused = compare(old, new, known)
    by_file = {}
    for line in lines:
        by_file.setdefault(line.partition(": ")[0], []).append(line)
    for found in by_file.values():
        more = [f"{len(found) - shown} more"] if len(found) > shown else []
        print(*found[:shown], *more, sep="\n")
    for reason, values in counts.items():
        print(f"changed on purpose: {values} values: {reason}")
    for entry in unused:
        print(f"an entry that nothing needs: {entry['file']} {entry.get('column', '')}")
    same = len(old) - len(by_file.keys() & old.keys())
    print(f"{same} of {len(old)} tables equal those of {commit}, but for what is on purpose")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
