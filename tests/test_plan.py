"""Plans and batches: what is missing, what is counted without its data, how a batch ended."""

import inspect
import io
import json
import os
import subprocess
import sys
import time
from typing import get_args

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hmoe_repro.analysis.results import load_study
from hmoe_repro.cli import plan_sweep
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.progress import Progress
from hmoe_repro.data.registry import DATASETS
from hmoe_repro.studies import config_cache
from hmoe_repro.studies import sweep as sweeping
from hmoe_repro.studies.config_cache import cached_configs
from hmoe_repro.studies.estimates import measured_kinds, timings
from hmoe_repro.studies.filters import filter_runs
from hmoe_repro.studies.plan import Plan, StudyPlan, as_time, make_plan, missing_runs, plan_studies
from hmoe_repro.studies.request import Selection, describe_request, requested_studies, runs_of
from hmoe_repro.studies.run_queue import Outcomes
from hmoe_repro.studies.studies import configs_or_reason, count_runs, study_configs
from hmoe_repro.studies.sweep import RunDisplay, SweepOptions, drawn_configs
from hmoe_repro.training.run_config import RunOptions
from hmoe_repro.training.store import RunStore, write_study


def record(config, status="complete", **more):
    "A record of a run, as far as a plan looks at it."
    from hmoe_repro.training.store import RECORD_VERSION

    empty = {"checkpoints": [], "selected": {}, "record_version": RECORD_VERSION}
    return empty | {"run_id": config.run_id, "config": config.to_dict(), "status": status} | more


def test_names_are_artefacts_studies_or_files():
    assert requested_studies(["hmoe_fig3", "digits_table", "digits_fig5"], "quick") == [
        "quick-toy",
        "quick-digits",
    ]
    assert requested_studies(["pacs-limits", "mine.toml"], "quick") == ["pacs-limits", "mine.toml"]
    assert describe_request(["pacs-limits", "mine.toml"], "quick") == "pacs-limits, mine.toml"
    assert describe_request(["pacs-limits", "hmoe_fig3"], "quick") == "profile quick"
    with pytest.raises(HmoeError, match="Valid: hmoe_fig3"):
        requested_studies(["table99"], "quick")
    with pytest.raises(HmoeError, match="Valid: smoke, quick"):
        requested_studies(["hmoe_fig3"], "quik")


def test_failed_and_absent_runs_are_missing_finished_ones_are_not(tmp_path):
    store, configs = RunStore(tmp_path), study_configs("smoke-toy")
    store.write(record(configs[0]))
    store.write(record(configs[1], "failed", reason="the loss is NaN"))
    assert missing_runs(configs, store) == list(configs[1:])
    store.record_path(configs[2].run_id).parent.mkdir()
    store.record_path(configs[2].run_id).write_text("{")
    with pytest.warns(UserWarning, match="is cut"):
        assert missing_runs(configs, store) == list(configs[1:])


def test_a_shared_run_is_planned_in_the_first_study_only(tmp_path):
    studies, store = ["smoke-digits", "smoke-balance"], RunStore(tmp_path)
    digits, balance = plan_studies(studies, store, [])
    assert digits.missing == digits.runs == count_runs("smoke-digits")
    assert balance.runs == count_runs("smoke-balance")
    assert digits.missing + balance.missing == len(runs_of(studies)) < digits.runs + balance.runs


def test_runs_without_their_data_are_counted_and_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_DATA", str(tmp_path / "data"))
    (planned,) = plan_studies(["paper-pacs"], RunStore(tmp_path / "runs"), [])
    assert (planned.runs, planned.missing, planned.seconds) == (count_runs("paper-pacs"), None, [])
    assert planned.runs == 48
    assert planned.time() == "data not available"
    (line,) = Plan([planned], "cpu").lines(jobs=2)
    assert line.startswith("not available: ")
    assert "hmoe data download PACS" in line
    with pytest.raises(HmoeError, match="Did you mean 'quick-digits'"):
        requested_studies(["quick-digit"], "quick")
    with pytest.raises(HmoeError, match="study files are TOML"):
        requested_studies(["mine.yml"], "quick")
    with pytest.raises(HmoeError, match="unknown study"):
        plan_studies(["paper-pac"], RunStore(tmp_path / "runs"), [])


def test_what_only_an_algorithm_refuses_is_not_called_missing_data(tmp_path):
    (tmp_path / "own.toml").write_text(
        """title = "t"
datasets = ["DigitDomainsTiny"]
test_domains = ["photo"]
seeds = 1
steps = 5
[[runs]]
algorithms = ["SWAD"]
network = "small_cnn"
hparams.all = { n_converge = 9 }
"""
    )
    with pytest.raises(HmoeError, match=r"own.toml, line 9:.*n_converge"):
        plan_studies([str(tmp_path / "own.toml")], RunStore(tmp_path / "runs"), [])


def test_hours_and_memory_of_a_plan():
    assert as_time(5399) == "90 minutes"
    assert as_time(5400) == "1.5 hours"
    done = StudyPlan("a", 3, 0, [])
    known = StudyPlan("b", 4, 2, [3600.0, 3600.0], memory=2048)
    half = StudyPlan("c", 4, 3, [3600.0])
    assert [done.time(), known.time()] == ["0 minutes", "2.0 hours"]
    assert half.time().endswith("least 60 minutes")
    assert StudyPlan("d", 4, 3, []).time() == "not measured"
    about, unknown, memory = Plan([done, known, half], "a GPU").lines(jobs=2)
    assert "least 1.5 hours" in about
    assert "with 2 jobs" in about
    assert "(a GPU)" in about
    assert unknown.startswith("2 runs")
    assert "not measured" in unknown
    assert "(a GPU)" in unknown
    assert "2.0 GiB" in memory
    assert Plan([done], "cpu").lines(jobs=1)[0].startswith("About 0 minutes")


def test_what_an_estimate_needs_is_what_the_whole_record_says(tmp_path, monkeypatch):
    """Read without its checkpoints, from a published file and from a folder of a run; what is cut
    or quotes the keys in its reason changes nothing."""
    published = []
    (tmp_path / "results").mkdir()
    for study in ("quick-toy", "quick-digits"):
        copy = tmp_path / "results" / f"{study}.jsonl"
        write_study(copy, load_study(study), digest=True)
        published += copy.read_text().splitlines()
    monkeypatch.setenv("HMOE_RESULTS", str(tmp_path / "results"))
    whole = list(map(json.loads, published))
    store = RunStore(tmp_path / "runs")
    for record in whole[:3]:
        store.write(record | {"reason": 'it said "config": {"a": 1}, "environment": {}'})
    (store.path("cut") / "x").mkdir(parents=True)
    store.record_path("cut").write_text(published[0][:300])
    decide = "algorithm dataset network resolution precision protocol steps".split()

    def told(record):
        config, machine = record["config"], record["environment"]
        return (
            *(config[name] for name in decide),
            *(str(config["hparams"].get(name)) for name in ("batch_size", "seeds", "d2v_encoder")),
            *(machine.get(name) for name in ("device", "device_name", "peak_memory_mb")),
            record["status"],
            record["wall_time_s"],
        )

    found = sorted(map(repr, map(told, timings(store))))
    assert found == sorted(map(repr, map(told, [*whole, *whole[:3]])))
    assert len(found) == len(whole) + 3


@pytest.mark.slow
def test_a_plan_reads_no_checkpoint_and_needs_no_torch_the_second_time(tmp_path):
    code = """
import sys
from hmoe_repro.cli.app import main
sys.argv = ["hmoe", "plan", "quick-digits", "--device", "cpu"]
try:
    main()
finally:
    print(sorted({"torch", "pandas", "sklearn", "matplotlib"} & set(sys.modules)))
"""
    given = {"HMOE_RUNS": str(tmp_path)}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | given
        ).stdout.splitlines()
        for _ in range(2)
    )
    assert first[:-1] == second[:-1]
    assert "quick-digits  48    48" in "\n".join(second)
    assert "torch" in first[-1]
    assert second[-1] == "[]"


def test_names_of_runs_are_remembered_until_something_else_may_be_true(tmp_path, monkeypatch):
    store, asked = RunStore(tmp_path / "runs"), []
    monkeypatch.setenv("HMOE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(
        config_cache, "configs_or_reason", lambda study: asked.append(1) or configs_or_reason(study)
    )

    def count(study="smoke-digits"):
        before = len(asked)
        cached_configs(str(study), store)
        return len(asked) - before

    assert [count(), count()] == [1, 0]
    assert cached_configs("smoke-digits", store) == configs_or_reason("smoke-digits")
    monkeypatch.setattr(config_cache, "library_hash", lambda: "another")
    assert [count(), count()] == [1, 0]
    (store.folder / "plans" / "smoke-digits.json").write_text("{")
    assert [count(), count()] == [1, 0]
    # Data from files: kept as long as there are none at all.
    assert [count("paper-pacs"), count("paper-pacs")] == [1, 0]
    assert cached_configs("paper-pacs", store)[0] is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PACS").touch()
    assert [count("paper-pacs"), count("paper-pacs"), count()] == [1, 1, 0]
    # Runs of a file of one's own are kept until it changes, unless they depend on other files.
    own = tmp_path / "own.toml"
    own.write_text("""title = "t"
algorithms = ["ERM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo"]
seeds = 1
steps = 5
""")
    assert [count(own), count(own)] == [1, 0]
    assert cached_configs(str(own), store) == configs_or_reason(str(own))
    own.write_text(own.read_text().replace("steps = 5", "steps = 6"))
    assert [count(own), count(own)] == [1, 0]
    assert {config.steps for config in cached_configs(str(own), store)[0]} == {6}
    plain = cached_configs(str(own), store)[0]
    assert config_cache._follows_from_file(plain)
    for other in ({"algorithm_source": "abc"}, {"splits": "abc"}, {"weights": "abc"}):
        changed = plain[0].model_copy(update=other)
        assert not config_cache._follows_from_file([*plain, changed])


def test_a_part_of_a_study(tmp_path):
    digits = study_configs("quick-digits")
    part = filter_runs(digits, ["algorithm=HMOE-DN", "test_domain=sketch", "lr=0.003"])
    assert [s.trial_seed for s in part] == [0, 1, 2]
    assert {s.algorithm for s in part} == {"HMOE-DN"}
    assert {s.algorithm for s in filter_runs(digits, ["lambda_kl=3"])} >= {"ERM", "HMOE-DN"}
    for wrong, said in (
        ("algoritm=ERM", "unknown field or hyper-parameter 'algoritm'.* Valid: algorithm, "),
        ("algorithm=EMR", "no run has algorithm=EMR. Valid: ERM, HMOE-DL, HMOE-DN, HMOE-ND"),
        ("test_domain=sky", "no run has test_domain=sky. Valid: negative, photo, plain, sketch"),
        ("lambda_kl=7", "no run has lambda_kl=7. Valid: 0.0, 3.0"),
        ("lr", "is not a setting"),
    ):
        with pytest.raises(HmoeError, match=said):
            filter_runs(digits, [wrong])
    studies, where = ["quick-toy", "quick-digits", "paper-pacs"], ["lambda_kl=3", "trial_seed=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_DATA", str(tmp_path / "data"))
        made = make_plan(studies, RunStore(tmp_path / "runs"), [], "cpu", Selection(where))
    found = [(s.runs, s.missing) for s in made.studies]
    kept = runs_of(studies[:2], Selection(where, {"lr": 0.01}))
    assert found[0] == (0, 0)
    assert found[1] == (len(kept), len(kept))
    assert found[2] == (None, None)
    assert {(s.trial_seed, s.hparams["lr"]) for s in kept} == {(1, 0.01)}


def flags_of(name):
    "Flag of a command -> (type, default, help, whether it may be repeated)."
    command = typer.main.get_command(app).commands[name]
    kinds = inspect.signature(getattr(plan_sweep, f"{name}_command")).parameters
    found = {}
    for option in command.params:
        kind = get_args(kinds[option.name].annotation)
        default = kinds[option.name].default
        found[option.opts[0]] = (kind[0], kind[1].min, kind[1].max, default, option.help)
    return found


def test_a_plan_takes_the_flags_of_a_sweep():
    """All that say which runs are meant, with the same types, defaults and words; how they are
    trained is asked of a sweep alone."""
    plan, sweep = flags_of("plan"), flags_of("sweep")
    assert plan == {flag: sweep[flag] for flag in plan}
    trains = {"--engine", "--gpus-per-run", "--minutes", "--log", "--resume-anyway"}
    trains |= {"--save-predictions"}
    assert sweep.keys() - plan.keys() == trains
    selecting = {"--algorithm", "--n-hparams", "--rule", "--where", "--set", "--shard"}
    assert selecting <= plan.keys()
    assert plan["--n-hparams"][:4] == (int, 1, 10_000, 1)


MINE = "from hmoe_repro.algorithms.base import ERM\nclass Mine(ERM):\n    pass\n"
REQUESTS = [
    ["smoke-digits", "smoke-toy", "smoke-balance"],
    ["smoke-digits", "smoke-toy", "--algorithm", "ERM"],
    ["smoke-digits", "smoke-toy", "--algorithm", "mine.py:Mine", "--shard", "2/3"],
    ["smoke-digits", "--algorithm", "ERM", "--algorithm", "mine.py:Mine", "--n-hparams", "2"],
    ["smoke-digits", "--rule", "leave-one-domain-out", "--where", "test_domain=sketch"],
    ["smoke-digits", "--rule", "oracle", "--n-hparams", "3", "--shard", "1/2"],
    ["--profile", "smoke", "hmoe_fig3", "digits_table", "--where", "trial_seed=0"],
    ["smoke-digits", "smoke-balance", "--set", "lr=0.01", "--where", "algorithm=ERM"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", REQUESTS, ids=" ".join)
def test_a_plan_counts_what_a_sweep_trains(words, tmp_path, monkeypatch, own_names):
    """The same words to both commands; the sweep's runs are recorded instead of trained."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    planned = CliRunner().invoke(app, ["plan", *words, "--device", "cpu"])
    assert planned.exit_code == 0, planned.output
    rows = [line.split() for line in planned.output.splitlines() if line.startswith("smoke-")]
    missing = sum(int(row[2]) for row in rows if row[-1] != "once)")
    trained = []
    monkeypatch.setattr(sweeping, "_train", lambda queue, _: trained.extend(queue.waiting) or 1 / 0)
    swept = CliRunner().invoke(app, ["sweep", *words, "--device", "cpu"])
    assert isinstance(swept.exception, ZeroDivisionError), swept.output
    ids = {config.run_id for config in trained}
    assert len(ids) == len(trained) == missing > 0
    assert f": {missing} runs, {missing}" in swept.output
    assert "on cpu" in swept.output
    if "--n-hparams" in words:
        assert {config.hparams_seed for config in trained} == set(
            range(int(words[words.index("--n-hparams") + 1]))
        )


def test_what_a_sweep_refuses_a_plan_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    for words, said in (
        (["smoke-toy", "--algorithm", "ERM"], "none of ERM"),
        (["smoke-digits", "--algorithm", "EMR"], "Valid:"),
        (["smoke-digits", "--shard", "4/3"], "is no part"),
        (["smoke-digits", "--where", "lr=7"], "no run has lr=7"),
        (["smoke-digits", "--rule", "best"], "training-domain"),
        (["smoke-digits", "--set", "lrr=7"], "lrr"),
    ):
        errors = []
        for command in ("plan", "sweep"):
            done = CliRunner().invoke(app, [command, *words, "--device", "cpu"])
            assert isinstance(done.exception, HmoeError), (command, words, done.output)
            errors.append(str(done.exception))
        assert errors[0] == errors[1]
        assert said in errors[0]


def test_a_study_without_its_data_is_not_counted_if_the_request_is_narrow(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_DATA", str(tmp_path / "data"))
    store = RunStore(tmp_path / "runs")
    for narrow in (Selection(shard="1/2"), Selection(n_hparams=2), Selection(algorithms=["ERM"])):
        _, absent = plan_studies(["smoke-digits", "paper-pacs"], store, [], narrow)
        assert (absent.runs, absent.missing) == (None, None)
        assert "PACS" in absent.reason.fix


def test_options_refuse_what_does_not_exist_before_anything_starts(tmp_path):
    with pytest.raises(HmoeError, match="Valid: local, ray"):
        SweepOptions(RunStore(tmp_path), engine="slurm")
    with pytest.raises(HmoeError, match="--device cpu"):
        SweepOptions(RunStore(tmp_path), device="warp9")


def test_outcomes_are_counted_and_refused(tmp_path):
    store = RunStore(tmp_path)
    (store.path("begun")).mkdir()
    (store.path("begun") / "state.safetensors").touch()
    mixed = Outcomes(
        {
            "fine": ("complete", None),
            "begun": ("unfinished", "the time was up"),
            "waits": ("unfinished", "the time was up"),
            "bad": ("failed", "the loss is NaN"),
            "theirs": ("elsewhere", "locked by another process"),
        },
        store,
    )
    complete, unfinished, locked, failed = mixed.summary().split(", ")
    assert complete.startswith("1 of 5")
    assert unfinished == "2 unfinished (1 begun)"
    assert locked.startswith("1 locked")
    assert failed == "1 failed"
    with pytest.raises(HmoeError, match="1 of 5.*failed.*bad: the loss"):
        mixed.refuse_failed()
    with pytest.raises(HmoeError, match=r"process \(theirs, ...\)"):
        mixed.refuse_elsewhere()
    with pytest.raises(HmoeError, match="begun.*unfinished: the time"):
        mixed.refuse_incomplete()
    fine = Outcomes({"fine": ("complete", None)}, store)
    fine.refuse_failed(), fine.refuse_elsewhere(), fine.refuse_incomplete()


SMALL = {"network": "small_cnn", "steps": 3, "checkpoint_frequency": 3}


def some_draws(domains, n_hparams=None, **more):
    given = dict(algorithm="ERM", dataset="DigitDomainsTiny", test_domains=domains, **SMALL)
    return drawn_configs(RunOptions(**given, **more), n_hparams)


def test_draws_of_one_run_and_what_cannot_be_searched():
    assert [s.hparams_seed for s in some_draws(["photo"], 3)] == [0, 1, 2]
    assert [s.hparams_seed for s in some_draws(["photo"], hparams_seed=5)] == [5]
    for domains, more in ((["photo", "plain"], {}), (["photo"], {"hparams_seed": 5})):
        with pytest.raises(HmoeError, match="leave --hparams-seed out"):
            some_draws(domains, 2, **more)


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_a_log_has_a_line_for_each_run_and_a_terminal_for_what_went_wrong(terminal):
    screen = io.StringIO()
    console = Console(
        file=screen, force_terminal=terminal, force_jupyter=False, width=120, color_system=None
    )
    good, bad = some_draws(["photo"], 2)
    with Progress(console) as progress:
        display = RunDisplay(2, progress)
        for config, *ending in ((good, "complete", None), (bad, "failed", "the loss is NaN")):
            display("start", config)
            for step in (1, 2, 3):
                display("step", config, step, 3)
            display("done", config, *ending)
        if terminal:
            assert "1/2 runs" in drawn(progress)
            assert str(good) not in drawn(progress)
    said = screen.getvalue()
    assert f"[2/2] {bad} ({bad.run_id}): failed:" in said
    assert "is NaN" in said
    assert (f"[1/2] {good} ({good.run_id}): 0 s" in said) != terminal
    if not terminal:
        assert len(said.splitlines()) == 2


def test_a_log_says_every_ten_seconds_where_all_runs_are(monkeypatch):
    screen, clock, (first, second) = io.StringIO(), [100.0], some_draws(["photo"], 2)
    monkeypatch.setattr("hmoe_repro.studies.sweep.time.monotonic", lambda: clock[0])
    console = Console(file=screen, force_terminal=False, force_jupyter=False, width=200)
    with Progress(console) as progress:
        display = RunDisplay(3, progress)
        for seconds in range(25):
            clock[0] = 100.0 + seconds
            display("step", first, seconds, 40)
            display("step", second, 2 * seconds, 60)
        display("done", first, "complete", None)
        clock[0] = 131.0
        display("step", second, 59, 60)
    said = screen.getvalue().splitlines()
    assert [line.partition(" ")[0] for line in said] == ["[0/3]", "[0/3]", "[1/3]", "[1/3]"]
    assert f"({first.run_id}) 10/40; " in said[0]
    assert f"({second.run_id}) 18/60 updates" in said[0]
    assert first.run_id not in said[3]
    assert f"({second.run_id}) 59/60 updates" in said[3]


def drawn(progress):
    "What the bars of a display say now."
    tasks = progress.tasks
    return "\n".join(f"{task.description} {task.fields['amount']}" for task in tasks)


MANY = """title = "Many"
algorithms = ["ERM", "HMOE-DN"]
datasets = ["DigitDomainsTiny", "RotatedDigits"]
test_domains = "all"
seeds = 3
restarts = 2
steps = 2
checkpoint_frequency = 1
network = "small_cnn"
"""


def test_runs_that_differ_in_seeds_are_named_as_if_each_were_resolved(tmp_path):
    from hmoe_repro.training.planning import make_config

    (tmp_path / "many.toml").write_text(MANY)
    configs = study_configs(str(tmp_path / "many.toml"))
    assert len(configs) == 2 * 3 * 2 * (4 + len(DATASETS["RotatedDigits"].domain_names))
    for config in configs:
        alone = make_config(
            config.algorithm,
            config.dataset,
            config.test_domains,
            trial_seed=config.trial_seed,
            restart=config.restart,
            steps=2,
            checkpoint_frequency=1,
            network="small_cnn",
        )
        assert config == alone
        assert config.run_id == alone.run_id


@pytest.mark.serial
def test_ten_thousand_runs_are_planned_in_three_seconds(tmp_path):
    text = MANY.replace('"RotatedDigits"', "").replace("seeds = 3", "seeds = 625")
    (tmp_path / "many.toml").write_text(text)
    study_configs("smoke-digits")  # whatever is read once
    started = time.process_time()
    (planned,) = plan_studies([str(tmp_path / "many.toml")], RunStore(tmp_path / "runs"), [])
    assert (planned.runs, planned.missing) == (10_000, 10_000)
    assert time.process_time() - started < 3


def test_a_record_of_no_updates_ends_no_plan():
    (record,) = [r for r in load_study("quick-toy") if r["status"] == "complete"][:1]
    record = record | {"config": record["config"] | {"steps": 0}, "wall_time_s": 3.0}
    (measured,) = measured_kinds([record]).values()
    assert measured.seconds == 3
