"""The command as a person uses it: what it prints, what it refuses, and that nothing is lost."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import warnings

import pytest
from commands import INSTALLED, hmoe, hmoe_process

from hmoe_repro.core.errors import HmoeError

pytestmark = pytest.mark.usefixtures("warm_kernels")

TRAIN = tuple(
    (
        "train --algorithm ERM --dataset DigitDomainsTiny --test-domain photo --network "
        "small_cnn --steps 11 --checkpoint-frequency 5 --device cpu"
    ).split()
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    done = hmoe(*TRAIN, "--set", "batch_size=8", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_train_prints_what_was_selected_and_keeps_a_record(trained):
    folder, said = trained
    (path,) = (folder / "runs").glob("*/record.json")
    record = json.loads(path.read_text())
    assert record["status"] == "complete"
    assert record["run_id"] in said
    assert f"{record['selected']['default']['test_accuracy']:.3f}" in said
    assert record["config"]["hparams"]["batch_size"] == 8


def test_the_same_command_again_only_reads(trained):
    folder, _ = trained
    (path,) = (folder / "runs").glob("*/record.json")
    before = path.stat().st_mtime_ns
    assert hmoe(*TRAIN, "--set", "batch_size=8", folder=folder).returncode == 0
    assert path.stat().st_mtime_ns == before


def test_runs_lists_good_and_damaged(trained):
    folder, _ = trained
    (path,) = (folder / "runs").glob("*/record.json")
    broken = folder / "runs" / "broken"
    broken.mkdir()
    (broken / "record.json").write_text(path.read_text()[:100])
    done = hmoe("runs", folder=folder)
    (broken / "record.json").unlink()
    broken.rmdir()
    assert done.returncode == 1
    assert path.parent.name in done.stdout
    assert "broken/record.json is cut" in done.stderr
    assert "Traceback" not in done.stderr
    assert hmoe("runs", folder=folder).returncode == 0


WRONG = [
    (("train", "--algorithm", "ERN", *TRAIN[3:]), "Valid: ERM, HMOE-DL, HMOE-DN, HMOE-ND"),
    ((*TRAIN[:4], "PACZ", *TRAIN[5:]), "Valid: DigitDomains, DigitDomainsTiny"),
    ((*TRAIN[:6], "moon", *TRAIN[7:]), "Valid: negative, photo, plain, sketch"),
    ((*TRAIN[:4], "ColoredMNIST", "--test-domain", "+95%"), "Valid: +90%, +80%, -90%"),
    ((*TRAIN, "--set", "lrr=1"), "Valid: lr, batch_size"),
    ((*TRAIN, "--set", "lr=fast"), "lr must be float"),
    ((*TRAIN, "--set", "lr"), "name=value"),
    ((*TRAIN, "--set", "batch_size=0"), "batch_size must be at least 1"),
    ((*TRAIN[:-1], "warp9"), "--device cpu"),
    ((*TRAIN, "--set", "lr=1e9"), "Fix: a smaller lr"),
    (("reproduce", "--profile", "quik"), "Valid: smoke, quick"),
    (("reproduce", "table99", "--profile", "smoke"), "Valid: hmoe_fig3"),
    (("reproduce", "--profile", "smoke", "--engine", "slurm"), "Valid: local, ray"),
    (("plan", "--profile", "papper"), "Valid: smoke, quick"),
    (("figures", "nothing"), "Valid: hmoe_fig3"),
    ((*TRAIN, "--set", "lr=NaN"), "must be finite"),
    (("train", "--steps", "abc"), "--steps"),
    (("trian",), "No such command"),
    (("publish", "quick"), "Valid: smoke-toy"),
    (("publish", "smoke-toy"), "have no record yet"),
]


@pytest.mark.parametrize("arguments, message", WRONG, ids=[" ".join(w[0][-2:]) for w in WRONG])
def test_wrong_input_is_one_line_and_a_non_zero_exit(tmp_path, arguments, message):
    done = hmoe(*arguments, folder=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    done = hmoe(*TRAIN, folder=tmp_path)
    assert done.returncode == 1
    assert "cannot write in" in done.stderr
    assert "HMOE_RUNS" in done.stderr


@pytest.mark.slow
def test_a_cut_record_stops_reproduce_and_is_left_alone(tmp_path):
    from hmoe_repro.studies.studies import study_configs

    config = study_configs("smoke-toy")[0]
    path = tmp_path / "runs" / config.run_id / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"run_id": "' + config.run_id)
    for more in ((), ("--fresh",)):
        done = hmoe("reproduce", "hmoe_fig3", "--profile", "smoke", *more, folder=tmp_path)
        assert done.returncode == 1
        assert "record.json is cut" in done.stderr
        assert path.read_text().endswith(config.run_id)
    assert not (tmp_path / "figures" / "smoke").exists()


@pytest.mark.slow
def test_reproduce_publish_and_render_again(tmp_path):
    """The whole way at smoke size: train, render, publish, find the repeated records equal, render
    the same bytes from what was published."""
    first = hmoe("reproduce", "hmoe_fig3", "--profile", "smoke", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "nothing is published" in first.stdout
    assert (tmp_path / "figures/smoke/hmoe_fig3.png").stat().st_size > 10_000
    assert hmoe("publish", "smoke-toy", folder=tmp_path).returncode == 0
    again = hmoe("reproduce", "hmoe_fig3", "--profile", "smoke", "--fresh", folder=tmp_path)
    assert "9 of 9 records equal the published ones" in again.stdout, again.stdout + again.stderr
    done = hmoe("plan", "hmoe_fig3", "--profile", "smoke", folder=tmp_path)
    assert re.search(r"smoke-toy\s+\d+\s+0", done.stdout)


@pytest.mark.slow
def test_interrupting_says_that_nothing_is_lost(tmp_path):
    import signal
    import time

    environment = os.environ | {"HMOE_RUNS": str(tmp_path / "runs")}
    command = [str(INSTALLED), *TRAIN]
    command[command.index("--steps") + 1] = "100000"

    def as_in_a_terminal():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it

    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    )
    try:
        while not list(tmp_path.glob("runs/*/state.safetensors")) and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (
        said.strip()
        == "hmoe: stopped; finished work is kept, and the same command resumes from there."
    )


@pytest.mark.slow
def test_a_run_that_two_studies_share_is_counted_once(tmp_path):
    from hmoe_repro.studies.studies import study_configs

    unique = {s.run_id for study in ("smoke-digits", "smoke-balance") for s in study_configs(study)}
    done = hmoe("sweep", "digits_table", "digits_balance", "--profile", "smoke", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{len(unique)} runs, {len(unique)} to train" in done.stdout
    assert f"[{len(unique)}/{len(unique)}]" in done.stdout


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "hmoe_repro.cli.app", "trian"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("hmoe: No such command")


def test_lists(tmp_path, root):
    from hmoe_repro.algorithms import algorithm_names

    def listed(*what):
        done = hmoe("list", *what, folder=tmp_path, HMOE_RESULTS=str(root / "results"))
        assert done.returncode == 0
        assert not done.stderr
        return done.stdout

    said = listed()
    assert re.search(r"^speed .* published *$", said, re.M)
    assert "bench" in said.splitlines()[1]
    said = listed("--algorithms")
    assert all(
        re.search(rf"^([a-z_]+)? +{re.escape(name)} ", said, re.M) for name in algorithm_names()
    )
    for word in (
        "irm_lambda=100",
        "[10^U(-1, 5)]",
        "Ganin et al., 2016",
        "not needed",
        "All have lr=0.001 / 5e-05 [10^U(-4.5, -2.5) / 10^U(-5, -3.5)]",
    ):
        assert word in " ".join(said.split())
    assert "DigitDomains" in listed("--datasets")


@pytest.mark.slow
def test_a_command_in_this_process_says_what_a_process_says(tmp_path):
    "What most tests here rely on: the same status, the same two streams, and nothing left behind."
    before = dict(os.environ), os.getcwd(), list(sys.argv), warnings.showwarning
    for arguments in (
        ("plan", "hmoe_fig3", "--profile", "smoke", "--data-dir", "data"),
        ("trian",),
        ("data", "verify", "PACS", "--data-dir", "data"),
        ("list", "--help"),
    ):
        folders = [tmp_path / kind / arguments[0] for kind in ("here", "there")]
        for folder in folders:
            folder.mkdir(parents=True)
        here, there = (
            call(*arguments, folder=folder, COLUMNS="120")
            for call, folder in zip((hmoe, hmoe_process), folders)
        )
        assert here.returncode == there.returncode
        for stream in ("stdout", "stderr"):
            said = getattr(here, stream).replace(str(folders[0]), "")
            assert said == getattr(there, stream).replace(str(folders[1]), ""), arguments
    assert (dict(os.environ), os.getcwd(), list(sys.argv), warnings.showwarning) == before


def test_a_traceback_in_this_process_is_one_on_standard_error(tmp_path, monkeypatch):
    monkeypatch.setattr("hmoe_repro.training.store.RunStore.outlines", lambda self: 1 / 0)
    done = hmoe("runs", folder=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_plan_takes_times_from_this_kind_of_device_only(tmp_path):
    "Records of a GPU are no estimate for a processor; the same records of a processor are."
    from hmoe_repro.core.files import results_dir
    from hmoe_repro.training.store import write_study

    lines = (results_dir() / "quick-toy.jsonl").read_text().splitlines()

    def planned(device):
        made = [json.loads(line) for line in lines]
        for record in made:
            record["environment"] |= {"device": device, "device_name": "a device"}
        (tmp_path / "results").mkdir(exist_ok=True)
        write_study(tmp_path / "results" / "quick-toy.jsonl", made, digest=True)
        return hmoe(
            "plan", "hmoe_fig3", "--profile", "quick", "--device", "cpu", folder=tmp_path
        ).stdout

    elsewhere, here = planned("cuda"), planned("cpu")
    assert re.search(r"quick-toy\s+(\d+)\s+\1\s+not measured", elsewhere)
    assert (
        f"{len(lines)} runs are of a kind that was not measured on this device (cpu)" in elsewhere
    )
    assert "About" not in elsewhere
    assert "not measured" not in here
    assert re.search(r"About \d+ minutes with \d+ jobs?, .* on this kind of device \(cpu\)", here)


READERS = (
    ("select", "--study", "quick-digits"),
    ("export-domainbed", "sweep", "--study", "quick-digits"),
    ("plan", "hmoe_fig3", "--profile", "quick"),
    ("reproduce", "hmoe_fig3", "--profile", "quick"),
    ("figures", "hmoe_fig3", "--profile", "quick"),
    ("figures", "--profile", "quick"),
    ("list",),
)


@pytest.fixture
def published(tmp_path):
    "A folder with two published studies."
    from hmoe_repro.analysis.results import load_study
    from hmoe_repro.training.store import write_study

    results = tmp_path / "results"
    results.mkdir()
    for study in ("quick-digits", "quick-toy"):
        write_study(results / f"{study}.jsonl", load_study(study), digest=True)
    return results


@pytest.mark.parametrize("damage", ["edited", "without a digest", "without any"])
def test_no_command_reads_a_study_that_is_not_as_it_was_published(
    published, tmp_path, monkeypatch, damage
):
    from hmoe_repro.analysis.results import results
    from hmoe_repro.report.readme import update_readme

    study, sums = published / "quick-digits.jsonl", published / "SHA256SUMS"
    if damage == "edited":
        before = study.read_text()
        accuracies = r'("(?:\w+_accuracy|default|mix|max|ood)"): [01]\.\d+'
        study.write_text(re.sub(accuracies, r"\1: 0.99", before))
        assert study.read_text().count("0.99") > 100
    elif damage == "without a digest":
        sums.write_text(sums.read_text().splitlines()[1] + "\n")
    else:
        sums.unlink()
    said = r"study 'quick-digits' is not as it was published.*Fix: .*git.*hmoe publish quick-digits"
    for command in READERS:
        done = hmoe(*command, folder=tmp_path)
        assert done.returncode == 1, (command, done.stderr)
        assert re.search(said, done.stderr), (command, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1
        assert "0.99" not in done.stdout
    assert not [*tmp_path.glob("figures/**/*.*"), *tmp_path.glob("sweep/*")]
    monkeypatch.setenv("HMOE_RESULTS", str(published))
    for read in (lambda: results("quick-digits"), update_readme):
        with pytest.raises(HmoeError, match=said):
            read()


def test_a_number_that_no_checkpoint_has_is_refused_with_a_fitting_digest_too(published, tmp_path):
    "But by `plan`, which reads no scores."
    study = published / "quick-digits.jsonl"
    study.write_text(re.sub(r'("test_accuracy"): [01]\.\d+', r"\1: 0.99", study.read_text()))
    digest = hashlib.sha256(study.read_bytes()).hexdigest()
    sums = (published / "SHA256SUMS").read_text().splitlines()[1:]
    (published / "SHA256SUMS").write_text("\n".join([f"{digest}  quick-digits.jsonl", *sums]))
    said = r"quick-digits.jsonl, line 1, run \w+: its entry 'selected' does not follow from its"
    for command in (READERS[0], ("figures", "digits_table", "--profile", "quick")):
        done = hmoe(*command, folder=tmp_path)
        assert done.returncode == 1, (command, done.stderr)
        assert re.search(said, done.stderr), (command, done.stderr)
    assert not list(tmp_path.glob("figures/**/*.png"))


def test_all_commands_are_listed_and_nothing_large_is_imported():
    code = """
import sys
from hmoe_repro.cli.app import main
sys.argv = ["hmoe", *sys.argv[1:]]
try: main()
except SystemExit: print({"torch", "pandas", "matplotlib", "sklearn"} & set(sys.modules))
"""
    for group in ((), ("data",)):
        done = subprocess.run(
            [sys.executable, "-c", code, *group, "--help"], capture_output=True, text=True
        )
        said = done.stdout.splitlines()
        assert said[-1] == "set()", done.stderr
        for name in ("verify",) if group else ("train", "export-domainbed", "report", "data"):
            assert any(line.startswith(f"│ {name} ") for line in said), name


def help_of(*command):
    """The help of a command at 80 columns."""
    from typer.testing import CliRunner

    from hmoe_repro.cli.app import app

    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0, shown.output
    return shown.output


def all_commands():
    """Words that call a command -> the command, of every command."""
    from typer.main import get_command

    from hmoe_repro.cli.app import app

    found = {}
    for name, command in get_command(app).commands.items():
        for sub, inner in getattr(command, "commands", {"": command}).items():
            found[(name, sub) if sub else (name,)] = inner
    return found


def test_help_lists_the_commands_in_groups():
    from hmoe_repro.cli.app import GROUPS

    titles = re.findall(r"^╭─ (.+?) ─+╮$", help_of(), re.M)
    assert titles == ["Options", *GROUPS]
    shown = re.findall(r"^│ ([a-z][a-z-]+)  ", help_of(), re.M)
    assert shown == [name for names in GROUPS.values() for name in names]
    assert {words[0] for words in all_commands()} == set(shown)
    assert "--install-completion" in help_of()


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_every_command_has_an_example_that_it_takes(words):
    example = all_commands()[words].epilog.removeprefix("Example:\n")
    lines = example.replace("\\\n", " ").splitlines()
    assert 1 <= len(example.splitlines()) <= 2
    assert all(len(line) <= 78 for line in example.splitlines())  # on one line of the help
    for line in lines:
        called = shlex.split(line)
        assert called[: len(words) + 1] == ["hmoe", *words]
        all_commands()[words].make_context(line, called[len(words) + 1 :])
    shown = [line.strip() for line in help_of(*words).splitlines()]
    assert all(line.strip() in shown for line in example.splitlines())


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_help_of_long_commands_has_panels_and_no_option_is_cut(words):
    from hmoe_repro.cli.options import MANY_OPTIONS, PANEL_OF

    shown = help_of(*words)
    flags = re.findall(r"--[a-z0-9-]+", shown)
    command = all_commands()[words]
    options = [p for p in command.params if p.param_type_name == "option"]
    for param in options:
        assert set(param.opts) <= set(flags), param.name
    assert "…" not in shown
    titles = set(re.findall(r"^╭─ (.+?) ─+╮$", shown, re.M)) - {"Arguments"}
    if len(options) + 1 >= MANY_OPTIONS:
        assert titles == {PANEL_OF[param.name] for param in options} | {"Help"}
    else:
        assert titles == {"Options"}


def test_the_shell_completes_commands():
    environment = os.environ | {
        "_HMOE_COMPLETE": "complete_bash",
        "COMP_WORDS": "hmoe disc",
        "COMP_CWORD": "1",
    }
    code = "import sys; sys.argv[0] = 'hmoe'; from hmoe_repro.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["discover"], done.stderr


MINE = """
title = "ERM, twice"
algorithms = ["ERM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo"]
seeds = 2
steps = 3
checkpoint_frequency = 1
network = "small_cnn"
evaluate = "all"
determinism = "portable"

[hparams.all]
batch_size = 4

[search]
trials = 2
rule = "oracle"
"""


@pytest.mark.slow
def test_a_study_of_ones_own_is_planned_trained_and_selected(tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    planned = hmoe("plan", "mine.toml", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert re.search(r"^mine.toml +4 +4 ", planned.stdout, re.M)
    refused = hmoe("select", "mine.toml", folder=tmp_path)
    assert refused.returncode == 1
    assert "Fix: hmoe sweep mine.toml." in refused.stderr
    swept = hmoe("sweep", "mine.toml", "--jobs", "1", "--device", "cpu", folder=tmp_path)
    assert swept.returncode == 0, swept.stderr
    assert "mine.toml: 4 runs, 4 to train on cpu" in swept.stdout
    assert "4 of 4 runs complete" in swept.stdout
    assert re.search(r"^mine.toml +4 +0 ", hmoe("plan", "mine.toml", folder=tmp_path).stdout, re.M)
    assert hmoe(*TRAIN, folder=tmp_path).returncode == 0  # a run that is not of the study
    selected = hmoe("select", "mine.toml", folder=tmp_path)
    assert "DigitDomainsTiny by oracle, percent" in selected.stdout, selected.stderr
    assert "trial seeds: 2" in selected.stdout
    reported = hmoe("report", "mine.toml", "--output", "pages", folder=tmp_path)
    assert reported.returncode == 0, reported.stderr
    page = tmp_path / "pages" / "mine.html"
    assert reported.stdout.split() == ["wrote", "pages/mine.html"]
    assert page.read_text(encoding="utf-8").count("<svg") >= 1
    reported = hmoe("report", "mine.toml", "--output", "pages", "--notebook", folder=tmp_path)
    assert reported.returncode == 0, reported.stderr
    assert reported.stdout.strip().startswith("rendered ")
    assert list(tmp_path.glob("pages/**/*.png"))
