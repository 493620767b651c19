"""The comparison of tables with an earlier commit: changes are found unless the map has them."""

import importlib.util
import subprocess

import pytest

OLD = "name,mean,limit\nERM,1.5,2\nDMG,3.25,2\n"
MAP = (
    '[[tables]]\nfile = "quick/*.csv"\ncolumn = "limit"\nbecomes = "new"\nreason = "own variance"\n'
)


@pytest.fixture(scope="module")
def script(root):
    spec = importlib.util.spec_from_file_location("tables", root / ".ci" / "compare_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, tmp_path, capsys):
    "Compare tables in a tree with those of its one commit; returns (status, what is printed)."

    def run(old, new, known=""):
        (tmp_path / ".ci").mkdir()
        (tmp_path / ".ci" / "renamed.toml").write_text(known)
        folder = tmp_path / "figures" / "quick"
        folder.mkdir(parents=True)
        for name, text in old.items():
            (folder / name).write_text(text)
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "old")):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)
        for name in old:
            (folder / name).unlink()
        for name, text in new.items():
            (folder / name).write_text(text)
        return script.main("HEAD", root=tmp_path), capsys.readouterr().out

    return run


def test_equal_tables_in_another_order(run):
    status, said = run({"a.csv": OLD}, {"a.csv": "name,mean,limit\nDMG,3.250,2\nERM,1.5,2\n"})
    assert status == 0
    assert "1 of 1 tables equal" in said


def test_a_changed_value_is_found(run):
    status, said = run({"a.csv": OLD}, {"a.csv": OLD.replace("3.25", "3.26")})
    assert status == 1
    assert "quick/a.csv: row 1, mean: '3.25', now '3.26'" in said


def test_a_mapped_column_is_accepted_and_counted(run):
    status, said = run({"a.csv": OLD}, {"a.csv": OLD.replace(",2\n", ",0.5\n")}, MAP)
    assert status == 0
    assert "changed on purpose: 4 values: own variance" in said


@pytest.mark.parametrize("known", ["", MAP])
def test_an_unmapped_column_row_or_table_is_reported(run, known):
    wide = "name,mean,limit,p\nERM,1.5,2,.1\nDMG,3.25,2,.1\nHMOE,1,2,.1\n"
    status, said = run({"a.csv": OLD, "b.csv": OLD}, {"a.csv": wide, "c.csv": OLD}, known)
    assert status == 1
    assert "quick/a.csv: column 'p' is new" in said
    assert "row HMOE is new" in said
    assert "quick/b.csv: it is gone" in said
    assert "quick/c.csv: it is new" in said


def test_a_table_is_dropped_renamed_or_lacks_rows_on_purpose(run):
    entry = '[[tables]]\nfile = "quick/{}.csv"\nbecomes = "{}"\nreason = "{}"\n'
    known = entry.format("a", "dropped", "gone") + entry.format("b", "c.csv", "renamed")
    known += entry.format("d", "dropped", "rows") + 'column = "name"\nrows = ["DMG"]\n'
    known += entry.format("e", "new", "never")
    less = "name,mean,limit\nERM,1.5,2\n"
    status, said = run(
        {"a.csv": OLD, "b.csv": OLD, "d.csv": OLD}, {"c.csv": OLD, "d.csv": less}, known
    )
    assert status == 0, said
    assert "6 values: gone" in said
    assert "3 values: rows" in said
    assert "an entry that nothing needs: quick/e.csv" in said
