"""How much a command prints, the bars of a sweep, and the filters of the list of runs."""

import io
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from commands import hmoe
from rich.console import Console

from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.progress import Progress
from hmoe_repro.studies.filters import matching_runs, parse_since
from hmoe_repro.studies.sweep import RunDisplay
from hmoe_repro.studies.worker import checkpoint_listener
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.store import RunStore, RunSummary, summary_of

TINY = {"network": "small_cnn", "steps": 3, "checkpoint_frequency": 1}
TRAIN = (
    "train --algorithm ERM --dataset DigitDomainsTiny --test-domain photo --network small_cnn "
    "--steps 3 --checkpoint-frequency 1 --set batch_size=4 --device cpu"
).split()


def trained(folder, *more):
    "Train a tiny run, with options of `hmoe` before the command; return what was printed."
    done = hmoe(*more, *TRAIN, folder=folder)
    assert done.returncode == 0, done.stderr
    return done


def test_quiet_prints_the_path_and_nothing_else(tmp_path):
    done = trained(tmp_path, "--quiet")
    (line,) = done.stdout.splitlines()
    assert (tmp_path / line.removeprefix("wrote ") / "record.json").is_file()
    assert done.stderr == ""


def test_quiet_does_not_hide_an_error(tmp_path):
    done = hmoe("-q", *TRAIN, "--set", "lrr=1", folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "'lrr'" in done.stderr


def test_quiet_prints_a_table_that_was_asked_for(tmp_path):
    trained(tmp_path)
    assert hmoe("-q", "runs", folder=tmp_path).stdout == hmoe("runs", folder=tmp_path).stdout


def test_quiet_ends_with_its_command(tmp_path):
    trained(tmp_path, "-q")
    assert len(trained(tmp_path).stdout.splitlines()) > 1


def test_verbose_prints_each_checkpoint_and_the_time(tmp_path):
    (tmp_path / "usual").mkdir()
    usual = trained(tmp_path / "usual")
    done = trained(tmp_path, "--verbose")
    checkpoints = re.findall(r"\) (\d)/3 updates, [\d.]+ s: loss/loss [\d.]+", done.stdout)
    assert checkpoints == ["0", "1", "2"]
    assert "updates" not in usual.stdout
    assert re.fullmatch(r"hmoe: \d+\.\d s", done.stderr.splitlines()[-1])
    assert usual.stderr == ""


def test_verbose_shows_the_traceback_of_an_error(tmp_path):
    for flags, shown in (((), False), (("-v",), True)):
        done = hmoe(*flags, "plan", "--profile", "quik", folder=tmp_path)
        assert done.returncode == 1
        assert ("Traceback" in done.stderr) == shown
        assert "hmoe: unknown" in done.stderr


def test_verbose_changes_no_number(tmp_path):
    outcomes = []
    for flags in ((), ("-v",), ("-q",)):
        folder = tmp_path / f"with{''.join(flags)}"
        folder.mkdir()
        trained(folder, *flags)
        [record], _ = RunStore(folder / "runs").scan()
        outcomes.append({k: record[k] for k in ("run_id", "checkpoints", "selected")})
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_both_flags_contradict_each_other_and_precede_the_command(tmp_path):
    done = hmoe("-q", "-v", "list", folder=tmp_path)
    assert done.returncode == 1
    assert "contradict" in done.stderr
    done = hmoe("list", "--quiet", folder=tmp_path)
    assert done.returncode == 2
    assert "`hmoe --quiet COMMAND`" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flag, lines", [("-q", 1), ("-v", 6)])
def test_a_sweep_is_as_quiet_or_verbose(tmp_path, flag, lines):
    done = hmoe(flag, "sweep", "smoke-toy", "--jobs", "1", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-1] == "wrote runs"
    if flag == "-q":
        assert len(said) == lines
    else:
        assert sum("updates, " in line for line in said) >= lines


def test_a_quiet_sweep_says_what_is_left(tmp_path):
    arguments = ("--jobs", "1", "--device", "cpu", "--minutes", "0.01")
    done = hmoe("-q", "sweep", "smoke-toy", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary, path = done.stdout.splitlines()
    assert re.search(r"[1-9] unfinished", summary)
    assert path == "wrote runs"


def test_a_listener_sends_checkpoints_only_if_verbose(monkeypatch):
    sent, heard = [], []

    def on_event(kind, config, detail):
        heard.append(kind)

    def send(*message):
        sent.append(message)

    assert checkpoint_listener(send) is None
    assert checkpoint_listener(send, on_event) is on_event
    monkeypatch.setattr(CONFIG, "output", "verbose")
    report = checkpoint_listener(send, on_event)
    point = {"step": 4, "losses": {"loss": 0.5}, "accuracies": {"photo": {"in": {"default": 1.0}}}}
    report("start", None, [])
    report("checkpoint", None, point)
    assert heard == ["start", "checkpoint"]
    assert sent == [("checkpoint", 4, {"loss/loss": 0.5, "accuracy/photo/in": 1.0})]


@pytest.mark.parametrize("width", [50, 80, 160])
def test_a_terminal_has_one_line_and_one_bar_for_each_job(width):
    console = Console(
        file=io.StringIO(), force_terminal=True, force_jupyter=False, width=width, color_system=None
    )
    configs = [make_config("HMOE-DN", "DigitDomainsTiny", ["photo"], s, **TINY) for s in (0, 1)]
    with Progress(console) as progress:
        display = RunDisplay(8, progress)
        for config in configs:
            display("start", config)
            display("step", config, 2, 3)
        [table] = progress.get_renderables()
        rows = console.render_lines(table)
    lines = ["".join(segment.text for segment in row) for row in rows]
    assert [line.split()[0] for line in lines] == ["all", "HMOE-DN", "HMOE-DN"]
    assert "0/8 runs" in lines[0]
    for line in lines[1:]:
        assert "2/3 updates" in line
        assert "━" in line


def test_a_quiet_display_writes_nothing():
    file = io.StringIO()
    for terminal in (False, True):
        console = Console(file=file, force_terminal=terminal, force_jupyter=False)
        with Progress(console, quiet=True) as progress:
            progress("decoding", 1, 3, "images")
            progress.say("a line")
    assert file.getvalue() == ""


NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)


def summary(algorithm, domains, seed, hours_ago, status="complete", dataset="PACS"):
    config = dict(algorithm=algorithm, dataset=dataset, test_domains=domains, trial_seed=seed)
    ended = (NOON - timedelta(hours=hours_ago)).isoformat()
    return RunSummary(f"{algorithm}{seed}", status, "", 1.0, config, {}, ended)


RUNS = [
    summary("ERM", ["art"], 0, 50),
    summary("HMOE-DN", ["art", "photo"], 10, 30, "failed"),
    summary("HMOE-DL", ["sketch"], 1, 10),
    summary("CORAL", ["art"], 1, 1, dataset="DigitDomains"),
]
CASES = [
    ({}, None, [0, 1, 2, 3]),
    ({"algorithm": ["hmoe*"]}, None, [1, 2]),
    ({"algorithm": ["ERM", "*-DL"]}, None, [0, 2]),
    ({"test_domain": ["photo"]}, None, [1]),
    ({"test_domain": ["p*", "sketch"]}, None, [1, 2]),
    ({"seed": ["1"]}, None, [2, 3]),
    ({"seed": ["1*"]}, None, [1, 2, 3]),
    ({"status": ["complete"], "dataset": ["PACS"]}, None, [0, 2]),
    ({"algorithm": ["ERM"], "test_domain": ["sketch"]}, None, []),
    ({"seed": []}, "12h", [2, 3]),
    ({}, "2026-11-27T06:00+00:00", [1, 2, 3]),
    ({"algorithm": ["*"]}, "3d", [0, 1, 2, 3]),
    ({}, "60min", [3]),
]


@pytest.mark.parametrize("patterns, since, chosen", CASES)
def test_runs_by_patterns_and_time(patterns, since, chosen):
    start = parse_since(since, NOON) if since else None
    assert matching_runs(RUNS, patterns, start) == [RUNS[i] for i in chosen]


def test_a_pattern_of_no_run_is_an_error_with_the_closest_value():
    with pytest.raises(HmoeError) as caught:
        matching_runs(RUNS, {"algorithm": ["HMOE-DM"]})
    assert "Did you mean 'HMOE-D" in str(caught.value)
    assert list(caught.value.choices) == ["CORAL", "ERM", "HMOE-DL", "HMOE-DN"]
    with pytest.raises(HmoeError, match="status"):
        matching_runs(RUNS, {"status": ["complet"]})
    with pytest.raises(HmoeError, match="field"):
        matching_runs(RUNS, {"steps": ["3"]})
    assert matching_runs([], {"algorithm": ["HMOE-DM"]}) == []
    assert matching_runs(RUNS[:1], {"status": ["failed"]}) == []


@pytest.mark.parametrize("text", ["yesterday", "12", "3 months", "2026-13-01", "", "h", "-2d"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(HmoeError, match="no time"):
        parse_since(text, NOON)


def test_a_run_without_its_end_is_not_recent():
    old = RUNS[0]._replace(finished="")
    assert matching_runs([old], {}, NOON) == []
    assert matching_runs([old], {}) == [old]


def test_the_command_filters_by_all_options(tmp_path):
    trained(tmp_path, "-q")
    [record], _ = RunStore(tmp_path / "runs").scan()
    run_id = summary_of(record).run_id
    good = ("--algorithm", "E?M", "--dataset", "Digit*", "--test-domain", "photo", "--seed", "0")
    shown = hmoe("runs", *good, "--status", "complete", "--since", "1h", folder=tmp_path).stdout
    assert run_id in shown
    assert shown.startswith("1 runs")
    for none in (("--status", "failed"), ("--since", "2100-01-01"), ("--study", "smoke-toy")):
        shown = hmoe("runs", *good, *none, folder=tmp_path).stdout
        assert run_id not in shown
        assert shown.startswith("0 of 1 runs")
    done = hmoe("runs", "--dataset", "DigitDomainTiny", folder=tmp_path)
    assert done.returncode == 1
    assert "DigitDomainsTiny" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell(tmp_path, shell):
    code = "import sys; sys.argv[0] = 'hmoe'; from hmoe_repro.cli.app import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"_HMOE_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
    )
    assert "_HMOE_COMPLETE" in shown.stdout, shown.stderr
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(shown.stdout)
        checked = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
