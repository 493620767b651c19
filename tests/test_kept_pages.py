"""A page that was kept is the page that would be made: what changes a page makes it anew."""

import json
import math

import pandas as pd
import pytest
from many_runs import many_records, write_store

from hmoe_repro.analysis.results import checkpoints, frame_of
from hmoe_repro.apps.study_page import study_page
from hmoe_repro.studies import config_cache
from hmoe_repro.studies.kept_pages import written_or_kept
from hmoe_repro.studies.search import _distinct, _texts
from hmoe_repro.training.store import PREDICTIONS_FILE, RunStore, sealed_record

RUNS = 16


@pytest.fixture
def store(tmp_path):
    "A store with all runs of its study `generated.toml`."
    write_store(tmp_path / "runs", RUNS)
    return RunStore(tmp_path / "runs")


@pytest.fixture
def ask(store, tmp_path):
    "Ask for the page, and return whether it was made, with its text."
    made = []
    page = tmp_path / "page.html"

    def write():
        made.append(1)
        page.write_text(f"page {len(made)}")
        return page

    def ask():
        before = len(made)
        file = str(store.folder / "generated.toml")
        assert written_or_kept(file, store, page, write) == page
        return len(made) > before, page.read_text()

    return ask


def record_file(store):
    return sorted(store.folder.glob("*/record.json"))[0]


def another_accuracy(store):
    path = record_file(store)
    record = json.loads(path.read_text())
    del record["sha256"]
    record["wall_time_s"] += 1
    path.write_text(sealed_record(record))


def no_record(store):
    record_file(store).unlink()


def another_title(store):
    file = store.folder / "generated.toml"
    file.write_text(file.read_text().replace("title =", "# changed\ntitle ="))


def damaged_page(store):
    (kept,) = (store.folder / "plans").glob("*-page.json")
    kept.write_text(kept.read_text().replace("page 1", "page 9"))


CHANGES = (another_accuracy, no_record, another_title, damaged_page)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_page_is_made_again_after_a_change(store, ask, change):
    assert ask() == (True, "page 1")
    assert ask() == (False, "page 1")
    change(store)
    assert ask() == (True, "page 2")
    assert ask() == (False, "page 2")


def test_another_library_makes_the_page_again(store, ask, monkeypatch):
    assert [ask()[0], ask()[0]] == [True, False]
    monkeypatch.setattr(config_cache, "library_hash", lambda: "another")
    assert [ask()[0], ask()[0]] == [True, False]


def test_a_page_with_saved_predictions_is_not_kept(store, ask):
    (record_file(store).parent / PREDICTIONS_FILE).touch()
    assert [ask()[0], ask()[0]] == [True, True]


def test_a_record_that_changes_while_the_page_is_made_is_noticed(store, tmp_path):
    page = tmp_path / "page.html"

    def write():
        another_accuracy(store)
        page.write_text("old")
        return page

    file = str(store.folder / "generated.toml")
    written_or_kept(file, store, page, write)
    assert not list((store.folder / "plans").glob("*-page.json"))


def test_a_missing_store_has_no_page(tmp_path):
    absent = RunStore(tmp_path / "absent")
    page = tmp_path / "page.html"
    assert written_or_kept("quick-digits", absent, page, lambda: page) == page
    assert not absent.folder.exists()


def test_the_kept_page_has_the_bytes_of_the_page(store, tmp_path):
    file = str(store.folder / "generated.toml")
    made = study_page(file, store, tmp_path / "made").read_bytes()
    pages = []
    for name in ("first", "second"):
        path = tmp_path / name / "generated.html"
        write = lambda path=path: study_page(file, store, path.parent)
        pages.append(written_or_kept(file, store, path, write).read_bytes())
    assert pages == [made, made]


def test_checkpoints_from_the_store_are_those_of_the_records(store):
    records, _ = store.scan()
    outlines, _ = store.outlines()
    expected = checkpoints(frame_of(records))
    pd.testing.assert_frame_equal(checkpoints(frame_of(outlines), store), expected)
    by_hand = []
    for record in records:
        for point in record["checkpoints"]:
            by_hand += [value for value in (point.get("losses") or {}).values()]
    losses = expected[~expected.quantity.str.endswith("accuracy")]
    assert sorted(losses.value.dropna()) == sorted(v for v in by_hand if v is not None)


def test_records_in_turn_are_all_records(store):
    records, _ = store.scan()
    run_ids = [record["run_id"] for record in records][::-1]
    assert list(store.in_turn(run_ids)) == records[::-1]
    digests = store.digests(run_ids)
    assert list(digests) == run_ids
    assert all(len(digest) == 64 for digest in digests.values())


def test_texts_of_distinct_dictionaries_are_those_of_all():
    values = [1, 1.0, True, "1", None, [1, 2], {"b": 1, "a": 2}, 0.0, -0.0]
    rows = [{"x": value, "y": 3} for value in values] + [{"y": 3}, {"x": 1}, {"x": "1", "y": 3}]
    texts = _texts(pd.Series(rows, index=range(5, 5 + len(rows))))
    assert list(texts.index) == list(range(5, 5 + len(rows)))
    for number, row in enumerate(rows):
        for name in ("x", "y"):
            text = texts[name].iloc[number]
            if name in row:
                assert text == json.dumps(row[name], sort_keys=True)
            else:
                assert math.isnan(text)
    distinct, positions = _distinct(rows)
    assert [distinct[position] for position in positions] == rows
    assert len(distinct) < len(rows)


def test_generated_records_are_whole_and_differ():
    records = list(many_records(40))
    assert len({record["run_id"] for record in records}) == 40
    assert min(record["config"]["trial_seed"] for record in records) == 1000
