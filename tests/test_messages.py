"""What a command says and writes, whatever the terminal, the umask, the names and the editor."""

import ast
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from commands import hmoe
from PIL import Image

from hmoe_repro.analysis.statistics import forest_plot
from hmoe_repro.analysis.writers import csv_text, escape_page
from hmoe_repro.apps.compare import compare
from hmoe_repro.apps.own_images import read_pool
from hmoe_repro.apps.predict import predictions_csv
from hmoe_repro.cli.app import _prepare_output
from hmoe_repro.core import progress
from hmoe_repro.core.files import write_atomic
from hmoe_repro.core.progress import Progress, as_duration, time_left
from hmoe_repro.core.toml import open_settings
from hmoe_repro.studies.study_file import read_study

POSIX = pytest.mark.skipif(os.name == "nt", reason="umask and closed descriptors are POSIX's")
SAYS = """import sys
from hmoe_repro.cli import app
def says():
    print("1 ± 2 × 3 … é 日")
app.app = lambda standalone_mode: says()
app.main()
"""


@pytest.mark.parametrize(
    "encoding, expected",
    [
        ("utf-8", "1 ± 2 × 3 … é 日"),
        ("cp1252", "1 ± 2 × 3 … é \\u65e5"),
        ("ascii", "1 +/- 2 x 3 ... \\xe9 \\u65e5"),
    ],
)
def test_output_in_any_encoding(encoding, expected):
    "In the terminal's characters, and no traceback."
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding).strip() == expected


@POSIX
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_standard_stream_changes_no_status(closed):
    for code, status in ((SAYS, 0), (SAYS.replace("print(", "raise app.HmoeError("), 1)):
        command = f"exec {sys.executable} -c '{code}' {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr, done.stderr


def test_streams_that_cannot_be_reconfigured_are_left(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    _prepare_output()
    print("to the memory")
    print("to nowhere", file=sys.stderr)
    assert sys.stdout.getvalue() == "to the memory\n"


@POSIX
@pytest.mark.parametrize("umask, mode", [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_files_have_the_permissions_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "new.txt", "a")
    finally:
        os.umask(before)
    assert (tmp_path / "new.txt").stat().st_mode & 0o777 == mode


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    "255 bytes, of which none is left for the name of a temporary file."
    path = tmp_path / ("a" * 250 + ".html")
    write_atomic(path, "kept")
    write_atomic(path, "replaced")
    assert path.read_text() == "replaced"
    assert [*tmp_path.iterdir()] == [path]


def test_settings_may_begin_with_a_byte_order_mark(root, tmp_path):
    "As Windows editors write it; lines are counted from the same place."
    text = (root / "docs" / "example_study.toml").read_text(encoding="utf-8")
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "mine.toml").write_text(text, encoding=encoding)
        study = read_study(tmp_path / "mine.toml")
        assert study.title == read_study(root / "docs" / "example_study.toml").title
    settings = open_settings(tmp_path / "mine.toml")
    assert settings.text == text


@pytest.mark.parametrize("names", [["$10_$20", "plain"], ["$x^_$", "a\\b"]], ids=str)
def test_a_dollar_in_a_name_is_a_dollar_in_the_picture(tmp_path, names, own_names):
    "And no formula, which may not even be one. Saved is what was trained for."
    data = {name: (torch.rand(16, 3, 16, 16), torch.arange(16) % 2) for name in names}
    options = {"seeds": 1, "steps": 2, "hparams": {"batch_size": 4}, "jobs": 1}
    compared = compare(["ERM", "CORAL"], data, **options)
    page = compared.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(name in page for name in names)
    table = compared.contrasts
    figure = forest_plot(table.assign(algorithm="Mine ($a_.py)"))
    figure.draw_without_rendering()
    shown = {axis.get_title() for axis in figure.axes}
    assert {name.replace("$", r"\$") for name in names} <= shown


CELLS = ["=1+1", "+90%", "-5", "@name", "plain", "a=b", None]


@pytest.mark.parametrize("kind", [object, "category"])
def test_a_spreadsheet_computes_no_cell(kind):
    "Texts alone: a negative number is a number."
    table = pd.DataFrame({"=column": pd.Series(CELLS, dtype=kind), "number": -0.123456})
    lines = csv_text(table).splitlines()
    assert lines[0] == "'=column,number"
    assert [line.split(",")[0] for line in lines[1:5]] == ["'=1+1", "'+90%", "'-5", "'@name"]
    assert lines[5:7] == ["plain,-0.123456", "a=b,-0.123456"]
    assert predictions_csv(table).decode().splitlines()[1] == "'=1+1,-0.1235"


def test_labels_may_be_a_table_that_this_library_wrote(tmp_path):
    "With its apostrophes, which are no part of names."
    names = [f"={k:02}.png" for k in range(30)]
    for name in names:
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / name)
    domains = ["-90%" if k % 3 else "'quoted'" for k in range(30)]
    text = csv_text(pd.DataFrame({"file": names, "domain": domains}))
    assert "'=00.png,'quoted'" in text
    assert "'=01.png,'-90%" in text
    (tmp_path / "labels.csv").write_text(text)
    assert read_pool(tmp_path, tmp_path / "labels.csv").images.domain.tolist() == domains


def test_a_model_card_has_no_links_and_no_cells_from_names():
    given = "a|b [see](http://x.org) www.y.org *bold* <b>"
    said = escape_page(given)
    assert not re.search(r"(?<!\\)[|*<\[]", said)
    assert "http:" not in said
    assert "www." not in said


def test_the_first_part_of_the_work_says_nothing_of_the_rest(monkeypatch):
    "An update that loads everything would be multiplied by all of them: '50198 s'."
    assert time_left(10, 1, 5001) == "" == time_left(10, 0, 10) == time_left(10, 5, None)
    assert time_left(10, 250, 5000) == ", about 3 min left"
    assert [as_duration(s) for s in (0.4, 99, 100, 5999, 50198)] == [
        "0 s", "99 s", "2 min", "100 min", "13.9 hours",
    ]  # fmt: skip
    clock, said = iter([0, 11, 22, 33]), []
    monkeypatch.setattr(progress, "time", type("", (), {"monotonic": lambda: next(clock)}))
    shown = Progress()
    monkeypatch.setattr(shown, "say", said.append)
    for done in (0, 1, 100, 500):
        shown("training", done, 1000, "updates")
    assert said[1] == "training: 1/1,000 updates"
    assert said[2:] == [
        "training: 100/1,000 updates, about 3 min left",
        "training: 500/1,000 updates, about 33 s left",
    ]


def test_damaged_records_are_named_with_what_to_do(tmp_path):
    folder = tmp_path / "runs" / ("a" * 12)
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{")
    done = hmoe("runs", folder=tmp_path)
    assert done.returncode == 1
    assert "see above" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "a" * 12 in last
    assert "Fix: restore that folder, or remove it" in last


def text_of(node, names):
    """The text of an expression as it is written; what is computed is `{}`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left, names) + text_of(node.right, names)
    if isinstance(node, ast.IfExp):
        return max(text_of(node.body, names), text_of(node.orelse, names), key=len)
    if isinstance(node, ast.Name) and node.id in names:
        return text_of(names[node.id], {})
    return "{}"


def written_messages(path):
    """(line, cause, fix, whether valid choices are listed) of each `HmoeError(...)` of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        names = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "HmoeError":
                named = {keyword.arg: keyword.value for keyword in node.keywords}
                given = dict(zip(("cause", "fix", "choices"), node.args)) | named
                cause, fix = (text_of(given.get(k), names) for k in ("cause", "fix"))
                fix = fix if "fix" in given else ""
                found.append((node.lineno, cause, fix, "choices" in given))
    return found


LIBRARY = sorted(
    path
    for path in (Path(__file__).resolve().parents[1] / "hmoe_repro").rglob("*.py")
    if path.name != "_modidx.py" and written_messages(path)
)
# The cause is an error, with its own fix, or a finding that a command prints at its end.
WITHOUT_FIX = {
    "analysis/claims.py": 3,
    "apps/compare.py": 1,
    "networks/pretrained.py": 1,  # its valid values are part of the cause
    "report/render.py": 1,
    "report/render_many.py": 1,
    "report/reproduce.py": 1,
    "studies/run_queue.py": 2,
    "studies/search.py": 1,
}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_error_has_one_cause_and_a_fix(path):
    name = f"{path.parent.name}/{path.name}"
    messages = {(line, cause, fix, valid) for line, cause, fix, valid in written_messages(path)}
    for line, cause, fix, _ in messages:
        said = f"{cause} Fix: {fix}"
        assert "see above" not in said, line
        assert "\n" not in said, line
        assert said.count(";") <= 1, f"{line}: {said}"
    bare = [line for line, cause, fix, valid in messages if not (fix or valid) and cause != "{}"]
    assert len(bare) == WITHOUT_FIX.get(name, 0), bare
