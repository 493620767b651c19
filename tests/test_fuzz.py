"""Invented bad values, other ones in each run: for every option of a command, every key of a study
file, every field of a record, every byte range of an archive. None may end in a traceback, a hang,
or in success with another effect than documented. HMOE_FUZZ_SEED repeats a run, HMOE_FUZZ_CASES
sets how many cases it has."""

import json
import os
import random
import time
import tomllib

import click
import pytest
import typer
from commands import hmoe
from test_hostile import STUDY, copy_of, soon, trained  # noqa: F401

from hmoe_repro.cli.app import app
from hmoe_repro.training.store import RunStore

CASES = int(os.environ.get("HMOE_FUZZ_CASES", 100))
SEED = int(os.environ.get("HMOE_FUZZ_SEED", time.time_ns() % 10**9))
pytestmark = pytest.mark.slow

TEXTS = [
    "", " ", "\0", "\x1b[2J", "a\nb", "-1", "1e400", "nan", "-inf", "9" * 30, "9" * 5000, "0x10",
    "..", "../" * 40, "~nosuchuser/x", "*", "a" * 300, "[" * 3000, "{}", "null", "true", "é\u202e",
    "/dev/zero", "/proc/self/mem", "=1+1", "x=y=z", "lr=[1]", "\udcff", "1/0", "--", ";", "%s",
]  # fmt: skip
VALUES = [
    None, True, -1, 1.5, 2**64, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 300,
    [], [[]], {},
    {"a": {"b": []}}, ["a", "a"], [None], "\x1b[2J", "/dev/zero", "all", -0.0, [2**64],
]  # fmt: skip
TRAIN = "train --algorithm ERM --dataset DigitDomainsTiny --test-domain sketch".split()
TRAIN += "--network small_cnn --steps 1 --seed 7".split()
BASES = {  # what a command is called with besides the option in question: nothing that takes long
    "list": ["list"],
    "runs": ["runs"],
    "plan": ["plan", "mine.toml"],
    "train": TRAIN,
    "sweep": ["sweep", "mine.toml", "--jobs", "1"],
    "pack": ["pack", "out.tar.gz"],
    "select": ["select"],
    "report": ["report", "mine.toml"],
    "export-domainbed": ["export-domainbed", "out"],
    "discover": ["discover", "nowhere"],
    "evaluate": ["evaluate", "000000000000"],
    "predict": ["predict", "nowhere", "--model", "000000000000"],
    "export": ["export", "000000000000"],
    "new-algorithm": ["new-algorithm", "Mine"],
    "unpack": ["unpack", "nowhere"],
    "merge": ["merge", "nowhere"],
    "publish": ["publish", "mine.toml"],
}
COMMANDS = typer.main.get_command(app).commands


def ended_well(done, case):
    "In success, or in one line that names the cause; never in a traceback."
    assert "Traceback" not in done.stderr + done.stdout, (SEED, case, done.stderr[-2000:])
    assert done.returncode in (0, 1, 2), (SEED, case, done.returncode)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        assert lines, (SEED, case, done.stderr)
        assert lines[-1].startswith("hmoe: "), (SEED, case, done.stderr)
    control = [c for c in done.stdout + done.stderr if not c.isprintable() and c not in "\n\r\t"]
    assert not control, (SEED, case, control)
    return done


@pytest.mark.parametrize("case", range(CASES // 2))
def test_no_value_of_an_option_ends_in_a_traceback(case, tmp_path, own_names):
    draw = random.Random(f"{SEED} option {case}")
    name = draw.choice(sorted(BASES))
    (tmp_path / "mine.toml").write_text(STUDY)
    options = [p for p in COMMANDS[name].params if isinstance(p, click.Option) and not p.is_flag]
    words = list(BASES[name])
    if options and draw.random() < 0.8:
        words += [draw.choice(options).opts[0], draw.choice(TEXTS)]
    else:
        words.insert(1, draw.choice(TEXTS))
    ended_well(hmoe(*words, folder=tmp_path), words)
    for path in (tmp_path / "runs").glob("*/record.json"):
        assert json.loads(path.read_text())["status"] in ("complete", "failed"), (SEED, words)


def as_toml(value) -> str:
    "A value as TOML; None as nothing at all."
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {as_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(as_toml(v) for v in value)}]"
    return (
        "" if value is None else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")
    )


@pytest.mark.parametrize("case", range(CASES // 4))
def test_no_value_in_a_study_file_ends_in_a_traceback(case, tmp_path, own_names):
    from hmoe_repro.studies.study_file import RunGrid

    draw = random.Random(f"{SEED} study {case}")
    keys = [*RunGrid.model_fields, "title", "arrays", "search", "runs", "no_such_key"]
    key, value = draw.choice(keys), draw.choice(VALUES)
    kept = [line for line in STUDY.splitlines() if not line.startswith(f"{key} =")]
    text = "\n".join([*kept, f"{key} = {as_toml(value)}", ""])
    (tmp_path / "mine.toml").write_text(text)
    done = ended_well(hmoe("plan", "mine.toml", folder=tmp_path), text)
    if done.returncode == 0:  # then it can be trained, or its data are not here
        said = tomllib.loads(text).get(key)
        assert said == value or value is None or said != said, (SEED, text)


def places(value, above=()):
    "The paths of all values inside a record."
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, held in inside:
        yield (*above, key)
        if isinstance(held, (dict, list)):
            yield from places(held, (*above, key))


@pytest.mark.parametrize("case", range(CASES // 8))
def test_no_value_in_a_record_ends_in_a_traceback(case, trained, tmp_path):  # noqa: F811
    draw = random.Random(f"{SEED} record {case}")
    store = copy_of(trained, tmp_path)
    path = draw.choice(sorted(store.folder.glob("*/record.json")))
    record = json.loads(path.read_text())
    *above, key = draw.choice(sorted(places(record), key=str))
    inside, value = record, draw.choice(VALUES)
    for name in above:
        inside = inside[name]
    inside[key] = value
    path.write_text(json.dumps(record))
    before = path.read_bytes()
    (tmp_path / "mine.toml").write_text(STUDY.replace("seeds = 1", "seeds = 2"))
    for words in (["runs"], ["plan", "mine.toml"], ["select"], ["pack", "out.tar.gz"]):
        ended_well(hmoe(*words, folder=tmp_path), (words, above, key, value))
    assert path.read_bytes() == before


@pytest.mark.parametrize("case", range(CASES // 8))
def test_no_range_of_bytes_of_an_archive_ends_in_a_traceback(case, trained, tmp_path):  # noqa: F811
    from hmoe_repro.studies.export_import import pack_runs

    draw = random.Random(f"{SEED} archive {case}")
    pack_runs(trained, tmp_path / "a.tar.gz")
    content = bytearray((tmp_path / "a.tar.gz").read_bytes())
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice([1, 8, 512, len(content)]))
    new = draw.choice(
        [b"", bytes(end - start), draw.randbytes(end - start), b"\xff" * (end - start)]
    )
    (tmp_path / "a.tar.gz").write_bytes(content[:start] + new + content[end:])
    done = ended_well(hmoe("unpack", "a.tar.gz", folder=tmp_path), (start, end, new[:20]))
    found = {p.parent.name: p.read_bytes() for p in (tmp_path / "runs").glob("*/record.json")}
    for run_id, text in found.items():
        assert text == RunStore(trained.folder).record_path(run_id).read_bytes(), (SEED, start, end)
    assert done.returncode == 0 or not found, "all or nothing"
