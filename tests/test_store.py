"""Records and their store: damage, locks, publishing."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hmoe_repro.core import HmoeError
from hmoe_repro.runs.spec import RunSpec
from hmoe_repro.runs.store import RunStore, outcome, publish_study, read_record, run_lock, to_json

SPEC = RunSpec(
    "ERM",
    "DigitDomains",
    "f" * 12,
    ("sketch",),
    hparams={"lr": 1e-3, "batch_size": 32},
    network="small_cnn",
    resolution=16,
    steps=10,
)


def record(spec=SPEC, **more):
    return {
        "run_id": spec.run_id,
        "record_version": 1,
        "status": "complete",
        "reason": None,
        "spec": spec.to_dict(),
        "checkpoints": [],
        "selected": {},
        **more,
    }


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: '{"hello": "world"}',
        lambda text: text.replace(
            '"trial_seed": 0', '"trial_seed": 4'
        ),  # edited: the name no longer fits
        lambda text: text.replace('"record_version": 1', '"record_version": 99'),
        lambda text: text.replace('"parity"', '"purity"'),
        lambda text: "\x00\xff",
    ],
)
def test_damaged_records_are_refused_by_name_and_left_alone(tmp_path, damage):
    store = RunStore(tmp_path)
    store.write(record())
    path = store.record_path(SPEC.run_id)
    path.write_bytes(damage(path.read_text()).encode("latin-1"))
    before = path.read_bytes()
    with pytest.raises(HmoeError, match="record.json") as error:
        store.read(SPEC.run_id)
    assert "Fix:" in str(error.value) and path.read_bytes() == before
    good = dataclasses.replace(SPEC, trial_seed=5)
    store.write(record(good))
    records, damaged = store.scan()
    assert [r["run_id"] for r in records] == [good.run_id] and len(damaged) == 1
    with pytest.raises(HmoeError):
        store.discard_all([good.run_id, SPEC.run_id])
    assert store.read(good.run_id)


def test_missing_and_ambiguous_runs(tmp_path):
    store = RunStore(tmp_path)
    assert store.read(SPEC.run_id) is None
    with pytest.raises(HmoeError, match="hmoe runs"):
        read_record(tmp_path / "none.json")
    with pytest.raises(HmoeError, match="0 runs"):
        store.find("abc")
    with pytest.raises(HmoeError):
        store.find("")


def test_nan_is_null():
    assert json.loads(to_json({"a": [float("nan"), float("inf"), 1.5], "b": (1,)})) == {
        "a": [None, None, 1.5],
        "b": [1],
    }


def test_one_owner_at_a_time(tmp_path):
    with run_lock(tmp_path) as first:
        with run_lock(tmp_path) as second:
            assert first and not second
    with run_lock(tmp_path) as again:
        assert again
    store = RunStore(tmp_path)
    store.write(record())
    with run_lock(store.path(SPEC.run_id)):
        with pytest.raises(HmoeError, match="another process"):
            store.discard_all([SPEC.run_id])
    assert store.read(SPEC.run_id)


def test_publish_is_sorted_whole_or_nothing(tmp_path):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    specs = [dataclasses.replace(SPEC, trial_seed=s) for s in (2, 0, 1)]
    for spec in specs[:2]:
        store.write(record(spec))
    with pytest.raises(HmoeError, match="1 of 3 runs"):
        publish_study("s", [x.run_id for x in specs], store, results)
    store.write(record(specs[2]) | {"status": "failed", "reason": "NaN"})
    with pytest.raises(HmoeError, match="NaN"):
        publish_study("s", [x.run_id for x in specs], store, results)
    assert not results.exists()
    store.write(record(specs[2]))
    lines = publish_study("s", [x.run_id for x in specs], store, results).read_text().splitlines()
    assert [json.loads(line)["spec"]["trial_seed"] for line in lines] == [0, 1, 2]
    assert (
        publish_study("s", [x.run_id for x in specs[::-1]], store, results).read_text().splitlines()
        == lines
    )


def test_publish_loses_nothing_when_arrays_are_missing(tmp_path):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    store.write(record())
    (store.path(SPEC.run_id) / "arrays.safetensors").write_bytes(b"first")
    publish_study("s", [SPEC.run_id], store, results, [SPEC.run_id])
    (store.path(SPEC.run_id) / "arrays.safetensors").unlink()
    with pytest.raises(HmoeError, match="no arrays.safetensors"):
        publish_study("s", [SPEC.run_id], store, results, [SPEC.run_id])
    assert (results / "s" / f"{SPEC.run_id}.safetensors").read_bytes() == b"first" and (
        results / "s.jsonl"
    ).exists()
    assert sorted(p.name for p in results.iterdir()) == ["s", "s.jsonl"]


def test_outcome_leaves_out_what_may_differ():
    a = record(environment={"commit": "1"}, wall_time_s=1.0, finished="now", resumed=True)
    assert (
        outcome(a)
        == outcome(record(environment={}, wall_time_s=2.0, finished="then", resumed=False))
        != outcome(record() | {"checkpoints": [1]})
    )


def test_outcome_leaves_out_counts_that_older_records_lack():
    place = {"kept": [0.5], "kinds": {"useless": 2}}
    older = {"masks": {"places": {"fc": place}, "overall": place}}
    counted = place | {"users": [2, 1]}
    newer = {"masks": {"places": {"fc": counted}, "overall": counted}}
    assert outcome(record() | older) == outcome(record() | newer)
    other = {"masks": {"places": {"fc": counted | {"kept": [0.4]}}, "overall": counted}}
    assert outcome(record() | older) != outcome(record() | other)
    assert newer["masks"]["overall"]["users"] == [2, 1]


@pytest.mark.parametrize("without, kept", [(None, 2), ("panel_", 1), ("", 0)])
def test_publishing_can_leave_arrays_out(tmp_path, without, kept):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    store.write(record())
    arrays = {"code_out": torch.ones(2), "panel_images": torch.zeros(3)}
    save_file(arrays, store.path(SPEC.run_id) / "arrays.safetensors")
    for _ in range(2):  # the second replaces the first
        publish_study("study", [SPEC.run_id], store, results, [SPEC.run_id], without=without)
    published = load_file(results / "study" / f"{SPEC.run_id}.safetensors")
    assert list(published) == list(arrays)[:kept]


def test_a_failed_run_is_published_without_arrays_where_that_is_allowed(tmp_path):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    store.write(record() | {"status": "failed", "reason": "NaN"})
    path = publish_study("s", [SPEC.run_id], store, results, [SPEC.run_id], allow_failed=True)
    assert json.loads(path.read_text())["reason"] == "NaN" and not (results / "s").exists()
