"""Many runs: failures isolated, dead workers replaced, nothing done twice."""

import errno
import multiprocessing
import os
import signal

import pytest

from hmoe_repro.analysis.tables import paper_numbers
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import ensure_writable
from hmoe_repro.studies import sweep as sweeping
from hmoe_repro.studies.artefacts import ARTEFACTS, artefact_studies, artefact_study
from hmoe_repro.studies.estimates import comparable_records, estimate, measured_kinds
from hmoe_repro.studies.run_queue import settle_failure
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.studies.study_file import PROFILES, STUDIES, read_study
from hmoe_repro.studies.sweep import SweepOptions, sweep
from hmoe_repro.studies.worker_pools import RunSettings, Worker, WorkerPool
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import failed_record, run
from hmoe_repro.training.store import RunStore, outcome, run_lock


def configs(steps=11, **hparams):
    return [
        make_config(
            "ERM",
            "DigitDomainsTiny",
            [d],
            hparams={"batch_size": 8} | hparams,
            network="small_cnn",
            steps=steps,
            checkpoint_frequency=5,
        )
        for d in ("negative", "photo", "plain", "sketch")
    ]


@pytest.mark.slow
def test_side_by_side_equals_one_at_a_time_and_a_failure_stops_nobody(tmp_path):
    good, bad, store, heard = configs(), configs(lr=1e9)[0], RunStore(tmp_path / "sweep"), []
    results = sweep(
        [bad, *good, good[0]],
        SweepOptions(store, "cpu", jobs=2),
        on_event=lambda *event: heard.append(event),
    )
    assert results[bad.run_id][0] == "failed"
    assert all(results[s.run_id] == ("complete", None) for s in good)
    assert len(results) == 5
    assert sorted(e[1].run_id for e in heard if e[0] == "start") == sorted(r for r in results)
    alone = RunStore(tmp_path / "alone")
    for config in good:
        assert outcome(run(config, alone)) == outcome(store.read(config.run_id))
    heard.clear()
    assert sweep(good, store=store, device="cpu", on_event=lambda *event: heard.append(event)) == {
        s.run_id: ("complete", None) for s in good
    }
    assert not heard


@pytest.mark.slow
def test_a_killed_worker_is_reported_and_its_run_goes_on_later(tmp_path):
    store, long = RunStore(tmp_path), configs(steps=4000)[0]
    others, killed = configs()[1:], []

    def murder(kind, config, *details):
        if (
            kind == "step"
            and config == long
            and not killed
            and (store.path(long.run_id) / "state.safetensors").exists()
        ):
            pid = next(
                p.pid
                for p in multiprocessing.active_children()
                if _works_on(p.pid, store.path(long.run_id))
            )
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    results = sweep([long, *others], store=store, device="cpu", jobs=2, on_event=murder)
    assert killed
    assert results[long.run_id][0] == "failed"
    assert "worker process died" in results[long.run_id][1]
    assert all(results[s.run_id][0] == "complete" for s in others)
    record = store.read(long.run_id)
    assert record["status"] == "failed"
    assert record["checkpoints"]
    assert (store.path(long.run_id) / "state.safetensors").exists()
    ended = []

    def stop_soon(step, steps):
        ended.append(step)
        if len(ended) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(long, store, on_step=stop_soon)
    assert ended[0] == record["checkpoints"][-1]["step"] + 2, (
        "it did not go on from its last checkpoint"
    )


def _works_on(pid, folder):
    return any(
        os.path.realpath(f"/proc/{pid}/fd/{fd}").startswith(str(folder))
        for fd in os.listdir(f"/proc/{pid}/fd")
    )


if not os.path.isdir("/proc/self/fd"):
    test_a_killed_worker_is_reported_and_its_run_goes_on_later = pytest.mark.skip("needs /proc")(
        test_a_killed_worker_is_reported_and_its_run_goes_on_later
    )


@pytest.mark.slow
def test_what_a_worker_has_to_say_reaches_the_user(tmp_path):
    """A state that was set aside: one warning in the process that asked, for each such run."""
    store, (first, *others) = RunStore(tmp_path), configs()
    for config in (first, others[0]):
        store.path(config.run_id).mkdir()
        (store.path(config.run_id) / "state.safetensors").write_bytes(b"cut")
    heard = []
    with pytest.warns(UserWarning, match="starts again") as said:
        tell = lambda *event: heard.append(event[0])
        results = sweep([first, *others], store=store, device="cpu", jobs=2, on_event=tell)
    assert set(results.values()) == {("complete", None)}
    assert set(heard) <= {"start", "step", "done"}
    said = sorted(str(w.message) for w in said if "starts again" in str(w.message))
    assert [line.split()[1] for line in said] == sorted([first.run_id, others[0].run_id])


def test_the_first_failure_of_a_kind_stops_its_kind_and_no_other(tmp_path, monkeypatch):
    """Without processes: what a worker would say is said by a table of who fails."""
    store, alike, others = RunStore(tmp_path), configs(), configs(lr=0.1)
    fails, ran, heard = {s.run_id for s in (*alike, others[1])}, [], []

    def train(queue, options):
        while queue.waiting:
            config = queue.take()
            ran.append(config)
            failed = config.run_id in fails
            if failed:
                store.write(
                    failed_record(config, ensure_writable(store.path(config.run_id)), "a bug")
                )
            ended = ("failed", "a bug") if failed else ("complete", None)
            queue.on_message(config, "done", *ended)

    monkeypatch.setattr("hmoe_repro.studies.sweep._train", train)
    given = dict(
        store=store, on_event=lambda *event: heard.append(event), stop_kind_after_failure=True
    )
    mixed = [config for pair in zip(alike, others) for config in pair]
    ended = sweep(mixed, **given)
    assert ran == [alike[0], *others]  # the others' second failure is one run's alone
    assert [event[3] for event in heard if event[1] == alike[0]] == [
        "a bug (3 runs of its kind not started)"
    ]
    assert ended.summary().endswith("2 failed, 3 not started because one of their kind failed")
    assert ended[alike[3].run_id][0] == "stopped"
    assert alike[0].run_id in ended[alike[3].run_id][1]
    with pytest.raises(HmoeError, match="2 of 8 runs failed, 3 not started .*: a bug"):
        ended.refuse_failed()
    # The next sweep begins with one that has not failed; it is complete, so the rest is trained.
    fails -= {alike[1].run_id}
    ran.clear()
    again = sweep(alike, **given)
    assert ran == [alike[1], alike[2], alike[3], alike[0]]
    assert [again[s.run_id][0] for s in alike] == ["failed", "complete", "failed", "failed"]
    ran.clear()
    sweep(configs(lr=0.2), **(given | {"stop_kind_after_failure": False}))
    assert len(ran) == 4
    # Trials of a search go with their trial 0, which alone stops them.
    trials = [
        config.replace(hparams=config.hparams | {"lr": lr}, hparams_seed=seed)
        for config in configs(lr=0.3)
        for seed, lr in enumerate((0.3, 0.31, 0.32))
    ]
    for bad, count in ((1, 12), (0, 1)):
        fails.clear()
        fails.add(trials[bad].run_id)
        ran.clear()
        sweep(trials, store=RunStore(tmp_path / str(bad)), stop_kind_after_failure=True)
        assert len(ran) == count


def test_a_worker_that_died_between_two_runs_is_replaced(monkeypatch):
    "The next run goes to a new worker, and the last one, which is finished, is not called failed."

    class Dead:
        def send(self, given):
            raise BrokenPipeError

    ours, theirs = multiprocessing.Pipe()
    new, config = Worker(None, ours), configs()[0]
    monkeypatch.setattr("hmoe_repro.studies.worker_pools.start_worker", lambda *_: new)
    pool = WorkerPool(RunSettings("", "cpu", None, "{}"), jobs=2)
    pool.idle[config.determinism].append(Worker(None, Dead()))
    pool.start(config)
    assert pool.busy == {ours: (new, config)}
    assert not pool.idle[config.determinism]
    assert theirs.recv() == config.to_dict()
    assert pool.has_room()


def test_a_sweep_takes_configurations_or_studies_and_options_by_name(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(sweeping, "_train", lambda queue, how: taken.append((queue.waiting, how)))
    store, (first, second, *_) = RunStore(tmp_path), configs()
    study = study_configs("smoke-toy")
    for given, runs in (
        (first, [first]),
        ([first, second, first], [first, second]),
        (iter([second]), [second]),
        ("smoke-toy", list(study)),
        ([first, "smoke-toy"], [first, *study]),
    ):
        ended = sweep(given, store=store, display=False)
        assert taken.pop()[0] == runs
        assert list(ended) == [config.run_id for config in runs]
        assert set(ended.values()) == {("unfinished", "the time was up")}
    usual = SweepOptions(store, "cpu", display=False)
    sweep(first, usual, jobs=3)
    assert taken.pop()[1].jobs == 3
    assert usual.jobs is None
    assert sweep([], usual) == {}
    assert not taken
    for given, options, said in (
        ("smoke-toys", {}, "Valid: .*smoke-toy"),
        (5, {}, "5 .int. is no run"),
        ([first, 5], {}, "5 .int. is no run"),
        (first, {"job": 3}, "unknown option of a sweep 'job'.* Valid: store, device, jobs"),
        (first, {"jobs": -1}, "-1 jobs"),
        (first, {"jobs": 0, "engine": "ray"}, "Ray"),
    ):
        with pytest.raises(HmoeError, match=said):
            sweep(given, store=store, **options)


@pytest.mark.parametrize("kind", ["full disk", "damaged", "no time", "interrupted"])
def test_a_sweep_in_this_process_ends_as_one_of_workers(tmp_path, monkeypatch, kind):
    """A full disk stops it, a damaged record is a failed run, without time nothing begins, and
    Ctrl-C ends it."""
    store, (first, second, *_) = RunStore(tmp_path), configs()
    how = SweepOptions(store, "cpu", jobs=0, display=False)
    ran = []

    def run_instead(config, *_, **__):
        ran.append(config)
        if kind == "interrupted":
            raise KeyboardInterrupt
        if kind == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device", "a/b")
        return run(config, store)

    monkeypatch.setattr("hmoe_repro.studies.worker_pools.run", run_instead)
    if kind == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            sweep([first, second], how)
    elif kind == "full disk":
        with pytest.raises(HmoeError, match="No space left on device: a/b. Fix: make room"):
            sweep([first, second], how)
    elif kind == "no time":
        ended = sweep([first, second], how, minutes=0)
        assert set(ended.values()) == {("unfinished", "the time was up")}
        assert ended.records() == []
    else:
        store.path(first.run_id).mkdir()
        store.record_path(first.run_id).write_text("{")
        with pytest.warns(UserWarning, match="is cut"):
            ended = sweep([first, second], how)
        assert [one.status for one in ended.values()] == ["failed", "complete"]
        assert "cut or not JSON" in ended[first.run_id].reason
        assert store.record_path(first.run_id).read_text() == "{"
    expected = {"damaged": [first, second], "no time": []}
    assert ran == expected.get(kind, [first])


def test_engines_are_checked(tmp_path):
    with pytest.raises(HmoeError, match="local, ray"):
        sweep(configs(), store=RunStore(tmp_path), engine="slurm")


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [0, 1])
def test_runs_of_another_process_are_left_to_it(tmp_path, jobs):
    store, (mine, theirs, *_) = RunStore(tmp_path), configs()
    store.path(theirs.run_id).mkdir()
    with run_lock(store.path(theirs.run_id)):
        results = sweep([mine, theirs], store=store, device="cpu", jobs=jobs)
    assert results[theirs.run_id][0] == "elsewhere"
    assert results[mine.run_id][0] == "complete"
    assert store.read(theirs.run_id) is None


def test_a_finished_run_is_not_called_failed_by_another_coordinator(tmp_path, monkeypatch):
    """One coordinator lost its worker; another one finishes the run before, or while, the first
    one writes that it failed."""
    store, (first, second, *_) = RunStore(tmp_path), configs()
    finished = [run(first, store)]

    def finish_meanwhile(config, *given):
        finished.append(run(config, RunStore(tmp_path)))
        return failed_record(config, *given)

    monkeypatch.setattr("hmoe_repro.studies.run_queue.failed_record", finish_meanwhile)
    results = [settle_failure(config, store, "its worker died") for config in (first, second)]
    assert results == [("complete", None), ("failed", "its worker died")]
    assert store.read(first.run_id) == finished[0]
    assert finished[1:] == [None]
    assert run(second, store)["status"] == "complete"


def test_unknown_names_list_the_valid_ones():
    for call, message in [
        (lambda: study_configs("quick"), "smoke-toy"),
        (lambda: artefact_study("table1", "quick"), "hmoe_fig3"),
        (lambda: artefact_study("hmoe_fig3", "papers"), "smoke, quick"),
    ]:
        with pytest.raises(HmoeError, match=message):
            call()


def test_every_artefact_has_its_notebook():
    from hmoe_repro.core.files import repo_root

    assert {p.stem for p in (repo_root() / "nbs" / "paper").glob("*.ipynb")} == {
        *ARTEFACTS,
        "study",  # any study's page: no artefact
    }
    assert set(PROFILES) >= {"smoke", "quick"}


def test_estimate_is_the_median_per_update():
    config = configs()[0]
    record = lambda t, status="complete": {
        "status": status,
        "wall_time_s": t,
        "config": config.to_dict() | {"steps": 100},
    }
    known = measured_kinds([record(1), record(2), record(50), record(1000, "failed")])
    assert estimate(config, known) == (pytest.approx(0.02 * 11), 0)
    assert estimate(config, {}) is None


def test_an_estimate_mixes_no_devices():
    "Seconds of a processor say nothing about a GPU, nor one GPU's about another's."
    config = configs()[0]

    def record(seconds, **made):
        return {
            "status": "complete",
            "wall_time_s": seconds,
            "config": config.to_dict(),
            "environment": made,
        }

    known = [
        record(1, device="cpu", device_name="a"),
        record(3, device="cpu", device_name="b"),
        record(10, device="cuda", device_name="large"),
        {"environment": None},
    ]

    def seconds(**here):
        found = estimate(config, measured_kinds(comparable_records(known, here)))
        return found and found[0]

    assert seconds(device="cpu", device_name="c") == 2
    assert seconds(device="cuda", device_name="large") == 10
    assert seconds(device="cuda", device_name="small") is None


def test_table_1_of_the_paper_is_17_algorithms_in_the_order_in_which_they_are_wanted():
    assert [s.removeprefix("paper-") for s in artefact_studies("hmoe_table1", "paper")] == [
        "colored",
        "rotated",
        "colored-baselines",
        "rotated-baselines",
    ]
    (runs,), (others,) = (read_study(f"paper-colored{end}").runs for end in ("-baselines", ""))
    baselines = {*runs.algorithms}
    assert len(baselines) == 13
    assert others.algorithms == ("ERM", "HMOE-DL", "HMOE-DN", "HMOE-ND")
    assert {*paper_numbers(artefact="HMOE Table 1").algorithm} == {*baselines, *others.algorithms}
    assert len(baselines) + len(others.algorithms) == 17
    assert runs.hparams == ({}, {})


def test_published_records_are_whole_and_tell_their_origin():
    "That they are the runs of their study's file is tested in test_studies."
    from hmoe_repro.analysis.results import load_study
    from hmoe_repro.core.files import results_dir
    from hmoe_repro.training.store import check_record

    published = {p.stem for p in results_dir().glob("*.jsonl")}
    assert (
        {
            "quick-toy",
            "quick-digits",
            "quick-balance",
            "mnist-colored",
            "mnist-rotated",
            "pacs-pacs",
            "pacs-limits",
            "quick-table1",
        }
        <= published
        <= set(STUDIES)
    )
    for study in sorted(published):
        records = load_study(study)
        for record in records:
            check_record(record, study)
            assert record["status"] == "complete"
            assert record["environment"]["commit"]
            assert "+changes" not in record["environment"]["commit"]
