"""What a run leaves is bound to it: a record by a digest of its values, arrays and groups by a seal
that names the run. Nothing edited, damaged or exchanged is read."""

import copy
import json
import os
import shutil
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import save

from hmoe_repro.analysis.results import arrays, load_study, results
from hmoe_repro.apps.feature_groups import FeatureGroups, read_groups, save_groups
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import repo_root
from hmoe_repro.core.seals import metadata_of, seal_fault, sealed, sealed_for
from hmoe_repro.studies.estimates import timings
from hmoe_repro.studies.export_import import pack_runs, unpack_runs
from hmoe_repro.studies.plan import missing_runs
from hmoe_repro.training.run import run
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import (
    RunStore,
    outcome,
    publish_study,
    sealed_record,
    to_json,
    unsealed_record,
    write_study,
)

sys.path.append(str(repo_root() / ".ci"))
import seal  # noqa: E402


@pytest.fixture(scope="module")
def published():
    "Two records that measured much: codes, discovery, clusters."
    return [r for r in load_study("quick-digits") if r.get("discovery")][:2]


@pytest.fixture
def store(published, tmp_path):
    "A store of these two runs, each with arrays."
    store = RunStore(tmp_path / "runs")
    for i, record in enumerate(published):
        store.write(record)
        content = sealed({"codes": torch.full((3,), float(i))}, run=record["run_id"])
        (store.path(record["run_id"]) / "arrays.safetensors").write_bytes(content)
    return store


def leaves(value, path=()):
    "The path of every value in a record that holds no others."
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, held in inside:
        if isinstance(held, (dict, list)) and held:
            yield from leaves(held, (*path, key))
        else:
            yield (*path, key)


def other(value):
    "A value of the same type, another one."
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"{value}x" if isinstance(value, str) else "x"


def edited(record, path):
    "A copy in which the value at a path is another one."
    record = copy.deepcopy(record)
    *above, key = path
    inside = record
    for name in above:
        inside = inside[name]
    inside[key] = other(inside[key])
    return record


# Records


def test_no_value_of_a_record_can_be_edited(store, published):
    path = store.record_path(published[0]["run_id"])
    file = json.loads(path.read_text())
    assert path.read_text() == to_json(file, indent=1), "an edit changes the layout, too"
    paths = list(leaves(file))
    assert len(paths) > 150
    assert ("sha256",) in paths
    for place in paths:
        path.write_text(to_json(edited(file, place), indent=1))
        with pytest.raises(HmoeError, match=published[0]["run_id"]):
            store.read(published[0]["run_id"])
    for name in file.keys() - {"sha256"}:  # nothing can be taken out
        path.write_text(to_json({n: v for n, v in file.items() if n != name}, indent=1))
        with pytest.raises(HmoeError, match=published[0]["run_id"]):
            store.read(published[0]["run_id"])
    for name in ("sha257", "SHA256"):  # nor the digest renamed
        path.write_text(path.read_text().replace('"sha256"', f'"{name}"'))
        with pytest.raises(HmoeError, match=published[0]["run_id"]):
            store.read(published[0]["run_id"])
        path.write_text(to_json(file, indent=1))
    path.write_text(to_json({"extra": 1} | file, indent=1))  # nor added
    with pytest.raises(HmoeError, match="does not fit its SHA-256"):
        store.read(published[0]["run_id"])
    path.write_text(to_json(file, indent=1))
    assert store.read(published[0]["run_id"]) == published[0]


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", '"\\ud800"', "[" * 900 + "]" * 900])
def test_no_value_that_json_has_ends_in_a_traceback(store, published, value):
    path = store.record_path(published[0]["run_id"])
    path.write_text(path.read_text().replace('"test_size": ', f'"more": {value},\n "test_size": '))
    with pytest.raises(HmoeError, match=published[0]["run_id"]):
        store.read(published[0]["run_id"])


def test_every_reader_names_the_run_whose_record_was_edited(store, published, tmp_path):
    bad, good = [record["run_id"] for record in published]
    configs = [RunConfig.from_dict(record["config"]) for record in published]
    path = store.record_path(bad)
    file = json.loads(path.read_text())
    path.write_text(to_json(file | {"wall_time_s": file["wall_time_s"] + 1}, indent=1))
    for read in (
        lambda: store.read(bad),
        lambda: store.find(bad[:8]),
        lambda: results(store.folder),
        lambda: run(configs[0], store),
        lambda: publish_study("s", [bad, good], store, tmp_path / "published"),
        lambda: store.discard_all([good, bad]),
    ):
        with pytest.raises(HmoeError, match=f"{bad}.*SHA-256.*Fix: "):
            read()
    assert not (tmp_path / "published").exists()
    assert store.read(good)
    records, damaged = store.scan()
    assert [record["run_id"] for record in records] == [good]
    assert len(damaged) == 1
    assert bad in damaged[0]
    with pytest.warns(UserWarning, match=bad):
        assert missing_runs(configs, store) == configs[:1]
    with pytest.warns(UserWarning, match=bad):
        assert pack_runs(store, tmp_path / "a.tar.gz").startswith("1 finished")
    with pytest.warns(UserWarning, match=f"left out: .*{bad}"):
        unpack_runs(RunStore(tmp_path / "home"), store.folder)
    assert [p.name for p in (tmp_path / "home").glob("?" * 12)] == [good]
    assert file["wall_time_s"] + 1 not in [r["wall_time_s"] for r in timings(store)]


def test_the_digest_is_not_part_of_the_record(store, published, tmp_path):
    records, _ = store.scan()
    assert sorted(records, key=lambda r: r["run_id"]) == sorted(
        published, key=lambda r: r["run_id"]
    )
    assert [outcome(r) for r in records]
    assert not any("sha256" in record for record in records)
    ids = [record["run_id"] for record in published]
    path = publish_study("s", ids, store, tmp_path / "again")
    write_study(tmp_path / "s.jsonl", published)
    assert path.read_bytes() == (tmp_path / "s.jsonl").read_bytes()


def test_records_without_a_digest_are_refused_until_their_store_is_sealed(published, tmp_path):
    store = RunStore(tmp_path / "old")
    for record in published:
        store.path(record["run_id"]).mkdir(parents=True)
        store.record_path(record["run_id"]).write_text(json.dumps(record))
    records, damaged = store.scan()
    assert records == []
    assert len(damaged) == 2
    with pytest.raises(HmoeError, match=r"has no SHA-256.*Fix: .*\.ci/seal\.py"):
        store.read(published[0]["run_id"])
    assert seal.seal_store(store) == (2, 2)
    assert seal.seal_store(store) == (0, 2)
    store.folder.rename(tmp_path / "sealed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(RunStore(tmp_path / "sealed").scan()[0]) == 2


def test_a_kill_at_any_moment_leaves_a_record_with_its_digest_or_none(
    published, tmp_path, monkeypatch
):
    "Record and digest are one file: one rename puts both there."
    store, replaced = RunStore(tmp_path), []
    monkeypatch.setattr("os.replace", lambda *files: replaced.append(files))
    store.write(published[0])
    assert len(replaced) == 1
    assert store.read(published[0]["run_id"]) is None
    monkeypatch.undo()
    os.replace(*replaced[0])
    assert store.read(published[0]["run_id"]) == published[0]


def test_the_file_of_a_study_that_has_a_digest_beside_it_is_checked(store, published, tmp_path):
    ids = [record["run_id"] for record in published]
    path = publish_study("s", ids, store, tmp_path / "store")
    assert len(load_study("s", str(path.parent))) == 2
    text = path.read_text()
    path.write_text(text.replace('"wall_time_s": ', '"wall_time_s": 1'))
    with pytest.raises(HmoeError, match="'s' is not as it was published.*SHA-256"):
        load_study("s", str(path.parent))
    with pytest.raises(HmoeError, match="SHA-256"):
        results(str(path))


# Arrays


def exchange(first, second):
    "Let two files change places."
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def test_arrays_of_another_run_are_not_published(store, published, tmp_path):
    ids = [record["run_id"] for record in published]
    files = [store.path(run_id) / "arrays.safetensors" for run_id in ids]
    publish_study("s", ids, store, tmp_path / "results", ids)
    exchange(*files)
    with pytest.raises(HmoeError, match=f"run {ids[0]} of study 's'.*that of run {ids[1]}"):
        publish_study("s", ids, store, tmp_path / "results", ids)
    for i, run_id in enumerate(ids):
        kept = load_file(tmp_path / "results" / "s" / f"{run_id}.safetensors")
        assert (kept["codes"] == i).all()


@pytest.mark.parametrize("without", [(), ("panel_*",), ("*_in", "panel_*")])
def test_published_arrays_name_their_run(store, published, tmp_path, without):
    (ids := [record["run_id"] for record in published]).sort()
    file = store.path(ids[0]) / "arrays.safetensors"
    values = {"codes": torch.ones(3), "panel_x": torch.ones(1), "code_in": torch.ones(2)}
    file.write_bytes(sealed(values))  # whose they are, nobody knows
    with pytest.raises(HmoeError, match=f"run {ids[0]} .*has damaged arrays"):
        publish_study("s", ids, store, tmp_path, ids, without=without)
    file.write_bytes(sealed(values, run=ids[0]))
    publish_study("s", ids, store, tmp_path, ids, without=without)
    for run_id in ids:
        content = (tmp_path / "s" / f"{run_id}.safetensors").read_bytes()
        assert seal_fault(content, run_id) is None
    row = pd.Series({"study": "s", "run_id": ids[0]})
    left = arrays(row, str(tmp_path))
    assert (left["codes"] == 1).all()
    assert ("panel_x" in left) == ("panel_*" not in without)
    assert ("code_in" in left) == ("*_in" not in without)


def test_arrays_that_no_page_draws_are_not_published():
    files = sorted((repo_root() / "results").glob("*/*.safetensors"))
    assert files
    for file in files:
        with safe_open(file, "np") as content:
            names = list(content.keys())
        assert not [name for name in names if name.endswith("_in")], file


def test_a_page_reads_no_arrays_of_another_run_and_none_without_a_seal(store, published, tmp_path):
    ids = [record["run_id"] for record in published]
    publish_study("s", ids, store, tmp_path, ids)
    files = [tmp_path / "s" / f"{run_id}.safetensors" for run_id in ids]
    whole, row = files[0].read_bytes(), pd.Series({"study": "s", "run_id": ids[0]})
    exchange(*files)
    with pytest.raises(HmoeError, match=f"{ids[0]}.*that of run {ids[1]}"):
        arrays(row, str(tmp_path))
    for content in (save({"codes": torch.ones(3)}), sealed({"codes": torch.ones(3)}), whole[:-1]):
        files[0].write_bytes(content)
        with pytest.raises(HmoeError, match=ids[0]):
            arrays(row, str(tmp_path))


def test_all_published_arrays_are_sealed_for_their_run():
    files = sorted((repo_root() / "results").glob("*/*.safetensors"))
    faults = {file: seal_fault(file.read_bytes(), file.stem) for file in files}
    assert len(files) >= 175
    assert not [file for file, fault in faults.items() if fault]


def test_sealing_published_arrays_keeps_every_bit_and_is_done_once(tmp_path):
    plain = {"a": torch.tensor([0.1, float("nan")]), "b": torch.arange(3, dtype=torch.int16)}
    (tmp_path / "study").mkdir()
    for name, content in (("1" * 12, save(plain)), ("2" * 12, sealed(plain))):
        (tmp_path / "study" / f"{name}.safetensors").write_bytes(content)
    assert seal.seal_published(tmp_path) == (2, 2)
    assert seal.seal_published(tmp_path) == (0, 2)
    for file in (tmp_path / "study").iterdir():
        kept = load_file(file)
        assert sealed_for(file.read_bytes()) == file.stem
        assert {n: x.tobytes() for n, x in kept.items()} == {
            n: x.numpy().tobytes() for n, x in plain.items()
        }
    shutil.copy(file, tmp_path / "study" / f"{'3' * 12}.safetensors")
    with pytest.raises(AssertionError, match="is that of run"):
        seal.seal_published(tmp_path)


@pytest.mark.parametrize("name", ["arrays", "selected-default", "groups"])
def test_files_of_another_run_are_not_packed_and_not_unpacked(store, published, tmp_path, name):
    bad, good = [record["run_id"] for record in published]
    content = sealed({"x": torch.ones(1)}, run=good)
    (store.path(bad) / f"{name}.safetensors").write_bytes(content)
    for shown in ("that of run", "another one"):
        with pytest.warns(UserWarning, match=f"{bad}.*{name}.safetensors is .*{shown}"):
            assert pack_runs(store, tmp_path / "a.tar.gz", weights=True).startswith("1 finished")
        with pytest.warns(UserWarning, match=f"left out: .*{bad}.*{shown}"):
            unpack_runs(RunStore(tmp_path / shown), store.folder)
        assert [p.name for p in (tmp_path / shown).glob("?" * 12)] == [good]
        damaged = bytearray(content)
        damaged[-1] ^= 1
        (store.path(bad) / f"{name}.safetensors").write_bytes(damaged)


# Groups


def test_groups_are_those_of_their_run_and_whole(tmp_path):
    grouping = FeatureGroups(np.zeros((2, 3)), np.ones((2, 3)), np.full((2, 2), 0.5))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_groups(tmp_path / name, [f"{name} one", f"{name} two"], grouping)
    names, kept = read_groups(tmp_path / "a")
    assert names == ["a one", "a two"]
    assert np.array_equal(kept.centres, grouping.centres)
    file = tmp_path / "a" / "groups.safetensors"
    whole = file.read_bytes()
    exchange(file, tmp_path / "b" / "groups.safetensors")
    with pytest.raises(HmoeError, match="that of run b.*Fix"):
        read_groups(tmp_path / "a")
    assert read_groups(tmp_path / "a", "b")[0] == ["b one", "b two"]
    for i in range(0, len(whole), 17):
        content = bytearray(whole)
        content[i] ^= 4
        file.write_bytes(content)
        with pytest.raises(HmoeError, match="are damaged"):
            read_groups(tmp_path / "a")
    for content in (b"", whole[:50], save({"a": torch.ones(1)}, {"names": '["a"]'})):
        file.write_bytes(content)
        with pytest.raises(HmoeError, match="are damaged"):
            read_groups(tmp_path / "a")


def test_the_header_of_no_safetensors_file_names_no_run():
    for content in (b"", b"\xff" * 20, save({"a": torch.ones(1)}), b"\2\0\0\0\0\0\0\0[]"):
        assert metadata_of(content) == {}
        assert sealed_for(content) is None
        assert seal_fault(content, "0" * 12) == "has no SHA-256"


def test_a_record_without_digest_gets_the_digest_of_its_values():
    text = sealed_record({"b": float("nan"), "a": (1, 2)})
    assert json.loads(text) | {"sha256": ""} == {"b": None, "a": [1, 2], "sha256": ""}
    assert unsealed_record(text.encode()) == ({"b": None, "a": [1, 2]}, True)
    for content in (text.replace("1", "3"), text + "\n", text.replace('": "', '":"')):
        assert unsealed_record(content.encode())[1] is False
    assert unsealed_record(b'{"a": 1}') == ({"a": 1}, None)
    assert unsealed_record(b"[]") == ([], None)


def test_tensors_of_any_memory_layout_are_sealed(tmp_path):
    images = torch.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    last = images.contiguous(memory_format=torch.channels_last)
    content = sealed({"images": last, "turned": images.mT}, run="0" * 12)
    assert content == sealed({"images": images, "turned": images.mT.contiguous()}, run="0" * 12)
    path = tmp_path / "arrays.safetensors"
    path.write_bytes(content)
    assert (load_file(path)["images"] == images.numpy()).all()


@pytest.fixture
def study(store, published, tmp_path):
    "The file of a study with these two runs, of which the first has published arrays."
    ids = [record["run_id"] for record in published]
    return publish_study("some-study", ids, store, tmp_path / "results", with_arrays=ids[:1])


def test_a_published_study_is_added_to_a_store(study, store, published, tmp_path):
    home = RunStore(tmp_path / "home")
    assert unpack_runs(home, study) == "2 runs added, 0 here already"
    for record in published:
        assert home.read(record["run_id"]) == record
    first, second = (home.path(record["run_id"]) for record in published)
    kept = load_file(first / "arrays.safetensors")
    assert kept["codes"].tolist() == [0.0, 0.0, 0.0]
    assert sorted(os.listdir(second)) == ["record.json"]
    assert unpack_runs(home, study) == "0 runs added, 2 here already"
    assert unpack_runs(store, study) == "0 runs added, 2 here already"
    configs = [RunConfig.from_dict(record["config"]) for record in published]
    assert missing_runs(configs, home) == []


def test_a_study_that_was_edited_adds_nothing(study, tmp_path):
    home = RunStore(tmp_path / "home")
    study.write_text(study.read_text().replace('"wall_time_s": ', '"wall_time_s": 1'))
    with pytest.raises(HmoeError, match="is not as it was published"):
        unpack_runs(home, study)
    (study.parent / "SHA256SUMS").unlink()
    lines = study.read_text().splitlines()
    study.write_text(f"{lines[0]}\n{lines[1][:-20]}\n")
    with pytest.raises(HmoeError, match="some-study.jsonl is cut"):
        unpack_runs(home, study)
    edited = json.loads(lines[1])
    edited["run_id"] = "../" * 4
    study.write_text(f"{lines[0]}\n{json.dumps(edited)}\n")
    with pytest.raises(HmoeError, match="line 2 calls itself"):
        unpack_runs(home, study)
    assert not any(home.folder.iterdir())


def test_arrays_of_another_run_in_a_study_are_left_out(study, published, tmp_path):
    folder = study.with_suffix("")
    first, second = (record["run_id"] for record in published)
    (folder / f"{first}.safetensors").rename(folder / f"{second}.safetensors")
    home = RunStore(tmp_path / "home")
    with pytest.warns(UserWarning, match=f"run {second}"):
        assert unpack_runs(home, study).startswith("1 run added")
    assert home.read(second) is None
