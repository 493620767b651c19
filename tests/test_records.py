"""Identity, damage, state without pickle, locks, publishing."""
import dataclasses
import json

import pytest
import torch

from hmoe_repro.core import HmoeError
from hmoe_repro.records import RunSpec, RunStore, load_state, make_spec, make_toy_spec, outcome, publish, read_record, run_lock, save_state, to_json

SPEC = RunSpec("ERM", "DigitDomains", "f" * 12, ("sketch",), hparams={"lr": 1e-3, "batch_size": 32}, network="small_cnn", resolution=16, steps=10)


def record(spec=SPEC, **more):
    return {"run_id": spec.run_id, "record_version": 1, "status": "complete", "reason": None, "spec": spec.to_dict(), "checkpoints": [], "selected": {}, **more}


def test_every_field_of_the_specification_changes_the_name():
    changes = dict(algorithm="IRM", dataset="PACS", dataset_fingerprint="0", test_domains=("photo",), trial_seed=1, hparams={"lr": 1e-2, "batch_size": 32}, network="mnist_cnn", weights="V1", resolution=28,
                   steps=11, checkpoint_frequency=5, sampler="pooled", evaluate="all", precision="bfloat16", parity=True, protocol_version=2, algorithm_source="abc", images={"source": "cache"}, hparams_seed=1,
                   arithmetic="portable", algorithm_version=2)
    assert set(changes) == {f.name for f in dataclasses.fields(RunSpec)}
    names = {dataclasses.replace(SPEC, **{k: v}).run_id for k, v in changes.items()}
    assert len(names) == len(changes) and SPEC.run_id not in names


def test_the_name_does_not_depend_on_order_or_on_a_trip_through_json():
    other = RunSpec.from_dict(json.loads(json.dumps(SPEC.to_dict())))
    assert other.run_id == SPEC.run_id == dataclasses.replace(SPEC, hparams={"batch_size": 32, "lr": 0.001}).run_id


def test_portable_arithmetic_is_not_promised_of_compiled_code():
    given = dict(algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["photo"], network="small_cnn")
    with pytest.raises(HmoeError, match="exclude each other.*Fix: precision bf16, or native"):
        make_spec(**given, precision="bf16-compile", arithmetic="portable")
    assert make_spec(**given, precision="bf16", arithmetic="portable").arithmetic == "portable"


def test_names_are_stable():
    """The names of published runs; a change here orphans every published record."""
    assert SPEC.run_id == "79db9997c12b"


def test_spec_fills_in_defaults_and_checks(monkeypatch):
    spec = make_spec("HMOE-ND", "DigitDomainsTiny", ["photo"], hparams={"lr": 1}, network="small_cnn", steps=5)
    assert spec.hparams["lr"] == 1.0 and spec.hparams["num_experts"] == 5 and "network" not in spec.hparams and spec.network == "small_cnn"
    assert spec.run_id == make_spec("HMOE-ND", "DigitDomainsTiny", ("photo",), hparams={"lr": 1.0, "eps": 1e-6}, network="small_cnn", steps=5).run_id
    for wrong in (dict(algorithm="GMoEE"), dict(dataset="PACS?"), dict(test_domains=["moon"]), dict(hparams={"lrr": 1}), dict(steps=0), dict(sampler="x"), dict(evaluate="some")):
        with pytest.raises(HmoeError): make_spec(**(dict(algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["photo"]) | wrong))
    with pytest.raises(HmoeError, match="toy"): make_toy_spec(lambda_x=1)


@pytest.mark.parametrize("damage", [
    lambda text: text[: len(text) // 2],
    lambda text: "",
    lambda text: "[1, 2]",
    lambda text: '{"hello": "world"}',
    lambda text: text.replace('"trial_seed": 0', '"trial_seed": 4'),  # edited: the name no longer fits
    lambda text: text.replace('"record_version": 1', '"record_version": 99'),
    lambda text: text.replace('"parity"', '"purity"'),
    lambda text: "\x00\xff",
])
def test_damaged_records_are_refused_by_name_and_left_alone(tmp_path, damage):
    store = RunStore(tmp_path)
    store.write(record())
    path = store.record_path(SPEC.run_id)
    path.write_bytes(damage(path.read_text()).encode("latin-1"))
    before = path.read_bytes()
    with pytest.raises(HmoeError, match="record.json") as error: store.read(SPEC.run_id)
    assert "Fix:" in str(error.value) and path.read_bytes() == before
    good = dataclasses.replace(SPEC, trial_seed=5)
    store.write(record(good))
    records, damaged = store.scan()
    assert [r["run_id"] for r in records] == [good.run_id] and len(damaged) == 1
    with pytest.raises(HmoeError): store.discard_all([good.run_id, SPEC.run_id])
    assert store.read(good.run_id)


def test_missing_and_ambiguous_runs(tmp_path):
    store = RunStore(tmp_path)
    assert store.read(SPEC.run_id) is None
    with pytest.raises(HmoeError, match="hmoe runs"): read_record(tmp_path / "none.json")
    with pytest.raises(HmoeError, match="0 runs"): store.find("abc")
    with pytest.raises(HmoeError): store.find("")


def test_nan_is_null():
    assert json.loads(to_json({"a": [float("nan"), float("inf"), 1.5], "b": (1,)})) == {"a": [None, None, 1.5], "b": [1]}


def test_state_keeps_every_type_and_dtype(tmp_path):
    state = {"t": [torch.arange(3, dtype=torch.uint8), torch.randn(2, 2).half(), torch.tensor(3.0)], "d": {0: {"step": 1}, "x": None}, "n": [2**60, 0.1, "s", True], "empty": {}, "shared": None}
    shared = torch.randn(4)
    state["shared"] = [shared, shared[1:3], torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    save_state(tmp_path / "s", state)
    back = load_state(tmp_path / "s")
    assert back["d"] == state["d"] and back["n"] == state["n"] and back["empty"] == {}
    for a, b in zip(state["t"] + state["shared"], back["t"] + back["shared"]): assert torch.equal(a, b) and a.dtype == b.dtype
    assert b"pickle" not in (tmp_path / "s").read_bytes()


def test_cut_state_is_one_clear_error(tmp_path):
    save_state(tmp_path / "s", {"a": torch.zeros(100)})
    content = (tmp_path / "s").read_bytes()
    for cut in (b"", content[:4], content[: len(content) // 2], b"x" * 50):
        (tmp_path / "s").write_bytes(cut)
        with pytest.raises(HmoeError, match="not a saved state"): load_state(tmp_path / "s")


def test_one_owner_at_a_time(tmp_path):
    with run_lock(tmp_path) as first:
        with run_lock(tmp_path) as second: assert first and not second
    with run_lock(tmp_path) as again: assert again
    store = RunStore(tmp_path)
    store.write(record())
    with run_lock(store.path(SPEC.run_id)):
        with pytest.raises(HmoeError, match="another process"): store.discard_all([SPEC.run_id])
    assert store.read(SPEC.run_id)


def test_publish_is_sorted_whole_or_nothing(tmp_path):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    specs = [dataclasses.replace(SPEC, trial_seed=s) for s in (2, 0, 1)]
    for spec in specs[:2]: store.write(record(spec))
    with pytest.raises(HmoeError, match="1 of 3 runs"): publish("s", [x.run_id for x in specs], store, results)
    store.write(record(specs[2]) | {"status": "failed", "reason": "NaN"})
    with pytest.raises(HmoeError, match="NaN"): publish("s", [x.run_id for x in specs], store, results)
    assert not results.exists()
    store.write(record(specs[2]))
    lines = publish("s", [x.run_id for x in specs], store, results).read_text().splitlines()
    assert [json.loads(line)["spec"]["trial_seed"] for line in lines] == [0, 1, 2]
    assert publish("s", [x.run_id for x in specs[::-1]], store, results).read_text().splitlines() == lines


def test_publish_loses_nothing_when_arrays_are_missing(tmp_path):
    store, results = RunStore(tmp_path / "runs"), tmp_path / "results"
    store.write(record())
    (store.path(SPEC.run_id) / "arrays.safetensors").write_bytes(b"first")
    publish("s", [SPEC.run_id], store, results, [SPEC.run_id])
    (store.path(SPEC.run_id) / "arrays.safetensors").unlink()
    with pytest.raises(HmoeError, match="no arrays.safetensors"): publish("s", [SPEC.run_id], store, results, [SPEC.run_id])
    assert (results / "s" / f"{SPEC.run_id}.safetensors").read_bytes() == b"first" and (results / "s.jsonl").exists()
    assert sorted(p.name for p in results.iterdir()) == ["s", "s.jsonl"]


def test_an_algorithm_of_ones_own_is_part_of_the_identity():
    from hmoe_repro.algorithms.base import ALGORITHMS, ERM, register
    def spec(make):
        register("Mine", paper="-", needs_domain_labels=False)(make())
        try: return make_spec("Mine", "DigitDomainsTiny", ["photo"], network="small_cnn")
        finally: del ALGORITHMS["Mine"]
    def one():
        class Mine(ERM):
            def loss(self, minibatches): return {"loss": super().loss(minibatches)["loss"] * 2}
        return Mine
    def two():
        class Mine(ERM):
            def loss(self, minibatches): return {"loss": super().loss(minibatches)["loss"] * 3}
        return Mine
    assert spec(one).run_id == spec(one).run_id != spec(two).run_id and spec(one).algorithm_source
    assert make_spec("ERM", "DigitDomainsTiny", ["photo"]).algorithm_source is None


def test_outcome_leaves_out_what_may_differ():
    a = record(environment={"commit": "1"}, wall_time_s=1.0, finished="now", resumed=True)
    assert outcome(a) == outcome(record(environment={}, wall_time_s=2.0, finished="then", resumed=False)) != outcome(record() | {"checkpoints": [1]})


def test_publishing_can_leave_arrays_out(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file
    from hmoe_repro.records import make_spec, publish
    spec, store = make_spec("ERM", "DigitDomainsTiny", ["photo"], network="small_cnn", steps=1), RunStore(tmp_path / "runs")
    store.path(spec.run_id).mkdir(parents=True)
    store.write({"run_id": spec.run_id, "record_version": 1, "status": "complete", "reason": None, "spec": spec.to_dict(), "checkpoints": [], "selected": {}})
    save_file({"panel_images": torch.zeros(3), "code_out": torch.ones(2)}, store.path(spec.run_id) / "arrays.safetensors")
    for without, kept in ((None, {"panel_images", "code_out"}), ("panel_", {"code_out"})):
        publish("smoke-digits", [spec.run_id], store, tmp_path / "results", [spec.run_id], without=without)
        assert set(load_file(tmp_path / "results" / "smoke-digits" / f"{spec.run_id}.safetensors")) == kept
