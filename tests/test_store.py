"""Records and their store: damage, locks, publishing."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save

from hmoe_repro.analysis.results import load_study
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import sha256, write_atomic
from hmoe_repro.studies.export_import import pack_runs
from hmoe_repro.training.checkpoint_io import sealed
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import (
    RunStore,
    outcome,
    publish_study,
    read_record,
    repeats,
    run_lock,
    sealed_record,
    to_json,
    verify_studies,
)

SPEC = RunConfig(
    algorithm="ERM",
    dataset="DigitDomains",
    dataset_fingerprint="f" * 12,
    test_domains=("sketch",),
    hparams={"lr": 1e-3, "batch_size": 32},
    network="small_cnn",
    resolution=16,
    steps=10,
)


def record(config=SPEC, **more):
    return {
        "run_id": config.run_id,
        "record_version": 2,
        "status": "complete",
        "reason": None,
        "config": config.to_dict(),
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
        lambda text: text.replace('"record_version": 2', '"record_version": 99'),
        lambda text: text.replace('"domainbed_compat"', '"purity"'),
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
    assert "Fix:" in str(error.value)
    assert path.read_bytes() == before
    good = SPEC.replace(trial_seed=5)
    store.write(record(good))
    records, damaged = store.scan()
    assert [r["run_id"] for r in records] == [good.run_id]
    assert len(damaged) == 1
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


def test_a_complete_record_is_never_replaced(tmp_path):
    store, failed = RunStore(tmp_path), record() | {"status": "failed", "reason": "late"}
    store.write(failed)
    assert store.write(record()) == record() == store.read(SPEC.run_id)
    assert store.write(failed) == record() == store.read(SPEC.run_id)
    other = SPEC.replace(trial_seed=5)
    store.path(other.run_id).mkdir()
    with run_lock(store.path(other.run_id)):
        with pytest.raises(HmoeError, match=f"{other.run_id} is locked by another process"):
            store.write(record(other))
        assert store.read(other.run_id) is None
        assert store.write(record(other), lock_held=True) == record(other)


def test_a_record_in_the_folder_of_another_run_is_refused(tmp_path):
    store, other = RunStore(tmp_path), SPEC.replace(trial_seed=5).run_id
    store.write(record())
    shutil.copytree(store.path(SPEC.run_id), store.path(other))
    for read in (store.read, store.find, lambda run_id: store.discard_all([run_id])):
        with pytest.raises(
            HmoeError, match=f"record of run {SPEC.run_id}, not of run {other}.*Fix"
        ):
            read(other)
    records, damaged = store.scan()
    assert [r["run_id"] for r in records] == [SPEC.run_id]
    assert other in damaged[0]
    with pytest.warns(UserWarning, match=f"not of run {other}"):
        assert pack_runs(store, tmp_path / "p.tar.gz").startswith("1 finished")


def better(record, entry, field, value):
    "A record in which one mode is said to have done better, or worse."
    mode = next(iter(record[entry]))
    return record | {entry: record[entry] | {mode: record[entry][mode] | {field: value}}}


@pytest.mark.parametrize(
    "change",
    [
        lambda r: better(r, "selected", "test_accuracy", 0.99),
        lambda r: better(r, "selected", "validation_accuracy", 0.99),
        lambda r: better(r, "selected", "step", r["checkpoints"][-1]["step"] + 1),
        lambda r: r | {"selected": {}},
        lambda r: r | {"checkpoints": r["checkpoints"][:0]},
        lambda r: r | {"checkpoints": [{}]},
        lambda r: better(r, "in_domain", "accuracy", 0.99),
        lambda r: {name: value for name, value in r.items() if name != "in_domain"},
    ],
)
def test_what_was_selected_follows_from_the_checkpoints(tmp_path, change):
    made, store = load_study("quick-dmg-short")[0], RunStore(tmp_path)
    edited = change(made)
    store.path(made["run_id"]).mkdir()
    store.record_path(made["run_id"]).write_text(sealed_record(edited))
    with pytest.raises(
        HmoeError, match=f"{made['run_id']}: its entry '(selected|in_domain)' does not"
    ):
        store.read(made["run_id"])
    store.record_path(made["run_id"]).write_text(sealed_record(made))
    assert store.read(made["run_id"]) == made


def test_nan_is_null():
    assert json.loads(to_json({"a": [float("nan"), float("inf"), 1.5], "b": (1,)})) == {
        "a": [None, None, 1.5],
        "b": [1],
    }


def test_one_owner_at_a_time(tmp_path):
    with run_lock(tmp_path) as first, run_lock(tmp_path) as second:
        assert first
        assert not second
    with run_lock(tmp_path) as again:
        assert again
    store = RunStore(tmp_path)
    store.write(record())
    with run_lock(store.path(SPEC.run_id)), pytest.raises(HmoeError, match="another process"):
        store.discard_all([SPEC.run_id])
    assert store.read(SPEC.run_id)


def test_publish_is_sorted_whole_or_nothing(tmp_path):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    configs = [SPEC.replace(trial_seed=s) for s in (2, 0, 1)]
    for config in configs[:2]:
        store.write(record(config))
    with pytest.raises(HmoeError, match="1 of 3 runs"):
        publish_study("s", [x.run_id for x in configs], store, results)
    store.write(record(configs[2]) | {"status": "failed", "reason": "NaN"})
    with pytest.raises(HmoeError, match="NaN"):
        publish_study("s", [x.run_id for x in configs], store, results)
    assert not results.exists()
    store.write(record(configs[2]))
    lines = publish_study("s", [x.run_id for x in configs], store, results).read_text().splitlines()
    assert [json.loads(line)["config"]["trial_seed"] for line in lines] == [0, 1, 2]
    assert (
        publish_study("s", [x.run_id for x in configs[::-1]], store, results)
        .read_text()
        .splitlines()
        == lines
    )


def test_a_published_study_has_a_digest_that_sha256sum_knows(tmp_path, monkeypatch):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    store.write(record())
    for name in ("b", "a.1"):
        publish_study(name, [SPEC.run_id], store, results)
    sums = (results / "SHA256SUMS").read_text()
    digest = sha256(results / "b.jsonl")
    assert sums == f"{digest}  a.1.jsonl\n{digest}  b.jsonl\n"
    verify_studies(results)
    for damage in (
        lambda: (results / "b.jsonl").write_text("edited"),
        lambda: (results / "SHA256SUMS").write_text(sums.splitlines()[0] + "\n"),
        lambda: (results / "b.jsonl").rename(results / "other.jsonl"),
    ):
        damage()
        with pytest.raises(HmoeError, match="study '(b|other)' is not as it was .*SHA256SUMS. Fix"):
            verify_studies(results)
        (results / "other.jsonl").unlink(missing_ok=True)
        publish_study("b", [SPEC.run_id], store, results)
        verify_studies(results)
    written = {p.name: p.read_bytes() for p in results.iterdir()}
    store.write(record(SPEC.replace(trial_seed=5)))
    changed = [SPEC.run_id, SPEC.replace(trial_seed=5).run_id]
    for broken in (1, 2):  # whichever of the two files cannot be written
        calls = iter(range(1, 9))

        def full(*given, broken=broken, calls=calls):
            if next(calls) == broken:
                raise OSError(28, "No space left on device")
            return write_atomic(*given)

        monkeypatch.setattr("hmoe_repro.training.store.write_atomic", full)
        with pytest.raises(OSError, match="No space left"):
            publish_study("b", changed, store, results)
        assert {p.name: p.read_bytes() for p in results.iterdir()} == written


@pytest.mark.parametrize("name", ["..", ".", "../out", "a/b", "", ".hidden", "-x", "a\n", "a."])
def test_what_is_no_name_of_a_study_becomes_no_path(tmp_path, name):
    store = RunStore(tmp_path / "runs")
    store.write(record())
    with pytest.raises(HmoeError, match="cannot be the name of a study.*Fix: letters"):
        publish_study(name, [SPEC.run_id], store, tmp_path / "results")
    with pytest.raises(HmoeError, match="cannot be the name of a study"):
        load_study(name, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}


def test_publish_loses_nothing_when_arrays_are_missing(tmp_path):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    store.write(record())
    file = store.path(SPEC.run_id) / "arrays.safetensors"
    whole = sealed({"a": torch.ones(2)}, run=SPEC.run_id)
    file.write_bytes(whole)
    publish_study("s", [SPEC.run_id], store, results, [SPEC.run_id])
    file.write_bytes(save({"a": torch.zeros(2)}))  # without a seal
    with pytest.raises(HmoeError, match="of study 's' has damaged arrays"):
        publish_study("s", [SPEC.run_id], store, results, [SPEC.run_id])
    file.unlink()
    with pytest.raises(HmoeError, match="no arrays.safetensors"):
        publish_study("s", [SPEC.run_id], store, results, [SPEC.run_id])
    assert (results / "s" / f"{SPEC.run_id}.safetensors").read_bytes() == whole
    assert (results / "s.jsonl").exists()
    assert {p.name for p in results.glob("[!.]*")} == {"s", "s.jsonl", "SHA256SUMS"}


def test_outcome_leaves_out_what_may_differ():
    a = record(environment={"commit": "1"}, wall_time_s=1.0, finished="now", resumed=True)
    assert (
        outcome(a)
        == outcome(record(environment={}, wall_time_s=2.0, finished="then", resumed=False))
        != outcome(record() | {"checkpoints": [1]})
    )


def test_a_repeated_run_has_every_published_entry_and_may_have_more():
    published = {"masks": {"kept": [0.5], "kinds": {"useless": 2}}, "checkpoints": [{"step": 0}]}
    fresh = {"masks": published["masks"] | {"users": [2, 1]}, "checkpoints": [{"step": 0, "x": 1}]}
    assert repeats(fresh, published)
    assert not repeats(published, fresh)
    for other in ({"masks": {"kept": [0.4]}}, {"checkpoints": []}, {"checkpoints": None}):
        assert not repeats(fresh | other, published)


@pytest.mark.parametrize("without, kept", [((), 2), (("panel_*",), 1), (("panel_*", "*_out"), 0)])
def test_publishing_can_leave_arrays_out(tmp_path, without, kept):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    store.write(record())
    arrays = {"code_out": torch.ones(2), "panel_images": torch.zeros(3)}
    (store.path(SPEC.run_id) / "arrays.safetensors").write_bytes(sealed(arrays, run=SPEC.run_id))
    for _ in range(2):  # the second replaces the first
        publish_study("study", [SPEC.run_id], store, results, [SPEC.run_id], without=without)
    published = load_file(results / "study" / f"{SPEC.run_id}.safetensors")
    assert list(published) == list(arrays)[:kept]


def test_a_failed_run_is_published_without_arrays_where_that_is_allowed(tmp_path):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    store.write(record() | {"status": "failed", "reason": "NaN"})
    path = publish_study("s", [SPEC.run_id], store, results, [SPEC.run_id], allow_failed=True)
    assert json.loads(path.read_text())["reason"] == "NaN"
    assert not (results / "s").exists()
