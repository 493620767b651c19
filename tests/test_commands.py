"""Sweeps in pieces, parcels, data commands: what is kept, what is refused, what is said."""

import hashlib
import io
import os
import random
import re
import shutil
import tarfile

import pytest
from commands import hmoe

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.studies.estimates import JOBS_ON_GPU, default_jobs
from hmoe_repro.studies.export_import import pack_runs, unpack_runs
from hmoe_repro.studies.sweep import SweepOptions, sweep
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome, run_lock, sealed_record, unsealed_record

OPTIONS = dict(hparams={"batch_size": 8}, network="small_cnn", steps=9, checkpoint_frequency=3)


def short_config(domain="sketch", **changed):
    return make_config("ERM", "DigitDomainsTiny", [domain], **(OPTIONS | changed))


class Stop(KeyboardInterrupt):
    pass


def half_done(store, of):
    def stop(step, steps):
        if step == 5:
            raise Stop

    with pytest.raises(Stop):
        run(of, store, on_step=stop)


@pytest.fixture
def store(tmp_path):
    """A store with one finished run and one half-done one."""
    store = RunStore(tmp_path / "runs")
    run(short_config(), store)
    half_done(store, short_config("photo"))
    return store


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [0, 1])
def test_a_sweep_in_slices_ends_with_the_records_of_an_undisturbed_one(tmp_path, jobs):
    long, sliced = short_config(steps=200, checkpoint_frequency=20), RunStore(tmp_path / "a")
    seconds, slices = (2.0, 0) if jobs else (0.2, 0)  # they grow: a worker takes long to start
    while True:
        how = SweepOptions(sliced, "cpu", jobs, minutes=seconds / 60)
        ended = sweep(long, how)[long.run_id]
        if ended.status == "complete":
            break
        assert ended == ("unfinished", "the time was up")
        assert not sliced.record_path(long.run_id).exists()
        seconds, slices = 2 * seconds, slices + 1
    assert slices
    assert outcome(sliced.read(long.run_id)) == outcome(run(long, RunStore(tmp_path / "b")))


def test_default_jobs():
    import os

    assert default_jobs("cpu") == os.cpu_count()
    assert default_jobs("cuda:0") == JOBS_ON_GPU


def test_half_done_runs_travel_and_go_on(store, tmp_path):
    said = pack_runs(store, tmp_path / "p.tar.gz")
    assert "1 finished" in said
    assert "1 half-done" in said
    home = RunStore(tmp_path / "home")
    assert unpack_runs(home, tmp_path / "p.tar.gz").startswith("2 runs added, 0")
    assert outcome(home.read(short_config().run_id)) == outcome(store.read(short_config().run_id))
    resumed = run(short_config("photo"), home)
    assert resumed["resumed"]
    assert outcome(resumed) == outcome(run(short_config("photo"), RunStore(tmp_path / "alone")))


def test_without_states_only_finished_runs_travel(store, tmp_path):
    pack_runs(store, tmp_path / "p.tar.gz", states=False)
    with tarfile.open(tmp_path / "p.tar.gz") as archive:
        assert archive.getnames() == [f"{short_config().run_id}/record.json"]
    pack_runs(store, tmp_path / "w.tar.gz", states=False, weights=True)
    with tarfile.open(tmp_path / "w.tar.gz") as archive:
        assert sorted(n.split("/")[1] for n in archive.getnames()) == [
            "record.json",
            "selected-default.safetensors",
        ]


def rewritten(source, target, change, sealed=True):
    """A parcel with the record of the finished run changed, its digest too."""
    with tarfile.open(source) as old, tarfile.open(target, "w:gz") as new:
        for member in old:
            content = old.extractfile(member).read()
            if member.name.endswith("record.json"):
                record, _ = unsealed_record(content)
                content = sealed_record(change(record)).encode()
            member.size = len(content)
            digest = hashlib.sha256(content).hexdigest()
            member.pax_headers = {"HMOE.sha256": digest} if sealed else {}
            new.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda r: r | {"config": r["config"] | {"steps": 10}}, "its configuration is that of run"),
        (lambda r: {"status": "complete"}, "not a whole run record"),
    ],
)
def test_records_that_do_not_fit_are_left_out_and_nothing_is_written(store, tmp_path, change, said):
    pack_runs(store, tmp_path / "p.tar.gz")
    rewritten(tmp_path / "p.tar.gz", tmp_path / "bad.tar.gz", change)
    home = RunStore(tmp_path / "home")
    with pytest.warns(UserWarning, match=said):
        unpack_runs(home, tmp_path / "bad.tar.gz")
    assert not home.record_path(short_config().run_id).exists()


def test_a_finished_run_is_never_replaced_by_a_different_one(store, tmp_path):
    pack_runs(store, tmp_path / "p.tar.gz")
    rewritten(tmp_path / "p.tar.gz", tmp_path / "other.tar.gz", lambda r: r | {"test_size": 1})
    before = store.record_path(short_config().run_id).read_bytes()
    with pytest.raises(HmoeError, match="different outcomes"):
        unpack_runs(store, tmp_path / "other.tar.gz")
    assert store.record_path(short_config().run_id).read_bytes() == before


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/x", "abc/record.json", "0123456789ab/run.sh"]
)
def test_foreign_members_are_refused(tmp_path, name):
    with tarfile.open(tmp_path / "f.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(HmoeError, match="an archive of"):
        unpack_runs(RunStore(tmp_path / "home"), tmp_path / "f.tar.gz")


def test_links_cut_files_and_empty_stores(store, tmp_path):
    link = tarfile.TarInfo("0123456789ab/record.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "l.tar.gz", "w:gz") as archive:
        archive.addfile(link)
    pack_runs(store, tmp_path / "p.tar.gz")
    (tmp_path / "c.tar.gz").write_bytes((tmp_path / "p.tar.gz").read_bytes()[:3000])
    for name, said in (
        ("l", "not an archive"),
        ("c", "cut or not an archive"),
        ("none", "does not exist"),
    ):
        with pytest.raises(HmoeError, match=said):
            unpack_runs(RunStore(tmp_path / "home"), tmp_path / f"{name}.tar.gz")
    with pytest.raises(HmoeError, match="to pack"):
        pack_runs(RunStore(tmp_path / "nothing"), tmp_path / "x.tar.gz")


def contents(folder):
    "Path -> content of all files of a store but its locks."
    files = (p for p in folder.rglob("*") if p.name != ".lock" and p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


@pytest.fixture
def home(store, tmp_path):
    """Another store, with one run half-done that comes finished in `q.tar.gz`; `p.tar.gz` brings
    a new one."""
    pack_runs(store, tmp_path / "p.tar.gz", runs=[short_config().run_id], weights=True)
    home = RunStore(tmp_path / "home")
    half_done(home, short_config("photo"))
    run(short_config("photo"), store)
    pack_runs(store, tmp_path / "q.tar.gz", runs=[short_config("photo").run_id], weights=True)
    return home


def test_parcels_are_added_all_or_none(store, home, tmp_path):
    before = contents(home.folder)
    (tmp_path / "cut.tar.gz").write_bytes((tmp_path / "q.tar.gz").read_bytes()[:-100])
    rewritten(tmp_path / "p.tar.gz", tmp_path / "o.tar.gz", lambda r: r | {"test_size": 1})
    for second, said in (("cut", "cut or not an archive"), ("o", "different outcomes")):
        files = tmp_path / "p.tar.gz", tmp_path / f"{second}.tar.gz"
        done = hmoe("unpack", *files, folder=tmp_path, HMOE_RUNS=str(home.folder))
        assert done.returncode == 1
        assert said in done.stderr
        assert contents(home.folder) == before
    with run_lock(home.path(short_config("photo").run_id)):
        files = tmp_path / "p.tar.gz", tmp_path / "q.tar.gz"
        done = hmoe("unpack", *files, folder=tmp_path, HMOE_RUNS=str(home.folder))
        assert done.returncode == 1
        assert "another process" in done.stderr
    assert contents(home.folder) == before
    assert {p.name for p in home.folder.iterdir()} == {short_config("photo").run_id}
    twice = [tmp_path / f"{name}.tar.gz" for name in ("q", "p", "q")]
    done = hmoe("unpack", *twice, folder=tmp_path, HMOE_RUNS=str(home.folder))
    added = [re.findall(r"\d+", line) for line in done.stdout.split("\n")[:2]]
    assert added == [["1", "0"]] * 2, done.stderr
    assert contents(home.folder) == contents(store.folder)


def moves(act, at):
    "Functions in the place of `os.replace` and `os.rename` that `act` instead of the call `at`."
    calls = iter(range(10**6))

    def study_overrides(move):
        return lambda *given: act() if next(calls) == at else move(*given)

    return study_overrides(os.replace), study_overrides(os.rename)


def test_an_error_in_unpacking_takes_back_what_was_added(home, store, tmp_path, monkeypatch):
    before, files = contents(home.folder), [tmp_path / "p.tar.gz", tmp_path / "q.tar.gz"]

    def full():
        raise OSError(28, "No space left on device")

    for at in range(100):
        with monkeypatch.context() as patch:
            for name, move in zip(("replace", "rename"), moves(full, at)):
                patch.setattr(os, name, move)
            done = hmoe("unpack", *files, folder=tmp_path, HMOE_RUNS=str(home.folder))
        if done.returncode == 0:
            break
        assert "No space left" in done.stderr
        assert "nothing was added" in done.stderr
        assert contents(home.folder) == before, at
    assert at > 5
    assert contents(home.folder) == contents(store.folder)


def test_a_kill_in_unpacking_leaves_whole_runs(home, store, tmp_path):
    whole, ended = contents(store.folder), 0
    for at in range(100):
        started = RunStore(tmp_path / f"home-{at}")
        shutil.copytree(home.folder, started.folder, dirs_exist_ok=True)
        if not (child := os.fork()):
            os.replace, os.rename = moves(lambda: os._exit(9), at)
            unpack_runs(started, tmp_path / "p.tar.gz", tmp_path / "q.tar.gz")
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        records, damaged = started.scan()
        assert not damaged
        for record in records:
            names = [name for name in whole if name.startswith(record["run_id"])]
            assert all(contents(started.folder)[name] == whole[name] for name in names)
        unpack_runs(started, tmp_path / "p.tar.gz", tmp_path / "q.tar.gz")
        kept = contents(started.folder).items()
        assert {n: c for n, c in kept if not n.startswith(".unpack-")} == whole
        if ended == 0:
            break
    assert at > 5


def test_one_flipped_bit_in_a_parcel_is_refused_or_changes_nothing(store, tmp_path):
    pack_runs(store, tmp_path / "p.tar.gz", weights=True)
    whole, home = (tmp_path / "p.tar.gz").read_bytes(), tmp_path / "home"
    unpack_runs(RunStore(tmp_path / "good"), tmp_path / "p.tar.gz")
    good, end = contents(tmp_path / "good"), 8 * len(whole)
    bits = {*range(80), *range(end - 64, end), *random.Random(0).sample(range(end), 150)}
    for bit in sorted(bits):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x.tar.gz").write_bytes(changed)
        shutil.rmtree(home, ignore_errors=True)
        try:
            unpack_runs(RunStore(home), tmp_path / "x.tar.gz")
        except HmoeError:
            assert not list(home.iterdir()), bit
        else:
            assert contents(home) == good, bit
            assert bit < 80, bit  # only gzip's header may differ


def test_files_of_a_parcel_are_what_was_packed(store, tmp_path):
    """Also where somebody wrote the archive anew, so that gzip's checksum fits."""
    pack_runs(store, tmp_path / "p.tar.gz")
    rewritten(tmp_path / "p.tar.gz", tmp_path / "bare.tar.gz", dict, sealed=False)
    other = tmp_path / "other.tar.gz"
    with tarfile.open(tmp_path / "p.tar.gz") as old, tarfile.open(other, "w:gz") as new:
        for member in old:
            content = bytearray(old.extractfile(member).read())
            content[-20] ^= 1
            new.addfile(member, io.BytesIO(content))
    for name, said in (
        ("bare", "not what was packed .its SHA-256: none"),
        ("other", "is not what was packed"),
    ):
        home = RunStore(tmp_path / "home")
        with pytest.raises(HmoeError, match=said):
            unpack_runs(home, tmp_path / f"{name}.tar.gz")
        assert not list(home.folder.iterdir())


def test_a_parcel_says_nothing_of_who_packed_it_and_when(store, tmp_path):
    for name in ("p", "again"):
        pack_runs(store, tmp_path / f"{name}.tar.gz", weights=True)
    with tarfile.open(tmp_path / "p.tar.gz") as archive:
        said = {(m.uname, m.gname, m.uid, m.gid, m.mtime, m.mode) for m in archive}
    assert said == {("", "", 0, 0, 0, 0o644)}
    assert (tmp_path / "p.tar.gz").read_bytes() == (tmp_path / "again.tar.gz").read_bytes()


def invoke(*arguments):
    from typer.testing import CliRunner

    from hmoe_repro.cli.app import app

    return CliRunner().invoke(app, list(arguments))


@pytest.mark.slow
def test_sweep_command_counts_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path))
    said = invoke(*"sweep hmoe_fig8 --profile smoke --minutes 0.05 --jobs 1 --device cpu".split())
    assert said.exit_code == 0
    assert "0 failed" in said.output
    assert "of 4 runs" in said.output
    assert (
        "4 of 4"
        in invoke(
            "sweep", "hmoe_fig8", "--profile", "smoke", "--jobs", "1", "--device", "cpu"
        ).output
    )


def test_data_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_DATA", str(tmp_path))
    listed = invoke("data", "list").output
    assert "DigitDomains" in listed
    assert "embedded" in listed
    assert "missing" in listed
    for command in ("verify",):
        refused = invoke("data", command, "MNIST")
        assert isinstance(refused.exception, HmoeError)
        assert str(tmp_path / "MNIST" / "raw") in str(refused.exception)
    assert "ColoredMNIST" in str(invoke("data", "verify", "MNISTT").exception)


def test_profiles_on_real_data_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_DATA", str(tmp_path))
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    planned = invoke("plan", "hmoe_table4", "--profile", "paper")
    assert planned.exit_code == 0
    assert planned.output.count("data download MNIST") == 1
    assert re.search(r"paper-colored\s+36\s+\?.*not available", planned.output)
    for command in ("sweep", "reproduce"):
        refused = invoke(command, "hmoe_table4", "--profile", "paper")
        assert isinstance(refused.exception, HmoeError)
        assert "data download MNIST" in str(refused.exception)


def test_train_takes_precision_and_parity(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path))
    arguments = (
        "train --algorithm ERM --dataset ColoredDigits --test-domain -90% --network "
        "small_cnn --steps 2 --set batch_size=4 --evaluate selection:20 --device cpu"
    ).split()
    assert invoke(*arguments, "--domainbed-compat").exit_code == 0
    (record,), _ = RunStore(tmp_path).scan()
    assert record["config"]["domainbed_compat"]
    assert record["config"]["evaluate"] == "selection:20"
    assert record["config"]["precision"] == "float32"
    assert "bf16-compile" in invoke(*arguments, "--precision", "fp16").output
