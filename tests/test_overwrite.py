"""No command replaces a file of the user, unless the user says so; the rule holds for all."""

from pathlib import Path

import pytest
import typer
from commands import hmoe

from hmoe_repro.cli.app import COMMANDS, app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.model import load_model, selected_path
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome

PATHS = {
    "output",
    "tables",
    "file",
    "folder_of_export",
    "picture",
}  # parameters that name what is written
# new-algorithm and soup never replace a file, and export-domainbed has a rule for its whole folder
WITHOUT = {"new-algorithm", "soup"}
STUDY = Path(__file__).parent.parent / "docs/example_study.toml"
FIND = ("find-lr", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--test-domain", "photo")
BEFORE = {  # command -> arguments, and the files that must stay
    "predict": (("predict", "photos", "--model", "x", "--output", "mine.csv"), ["mine.csv"]),
    "predict, default": (("predict", "photos", "--model", "x"), ["predictions.csv"]),
    "evaluate": (("evaluate", "x", "--output", "mine.html"), ["mine.html"]),
    "evaluate, default": (("evaluate", "x"), ["evaluation.html"]),
    "evaluate, tables": (("evaluate", "x", "--tables", "out"), ["out/by_class.csv"]),
    "select": (("select", "--output", "mine.csv"), ["mine.csv"]),
    "report": (("report", str(STUDY), "--output", "out"), ["out/example_study.html"]),
    "report, notebook": (
        ("report", str(STUDY), "--notebook"),
        ["reports/example_study/study.ipynb"],
    ),
    "embed": (("embed", "x", "--output", "mine.npz"), ["mine.npz"]),
    "embed, picture": (("embed", "x", "--picture", "mine.png"), ["mine.png"]),
    "find-lr": ((*FIND, "--output", "mine.png"), ["mine.png"]),
    "find-lr, record": ((*FIND, "--output", "mine.png"), ["mine.json"]),
    "find-lr, default": (FIND, ["learning_rate.png"]),
    "show": (("data", "show", "photos", "--output", "mine.png"), ["mine.png"]),
    "show, default": (("data", "show", "photos"), ["data_sheet.png"]),
    "pack": (("pack", "mine.tar.gz"), ["mine.tar.gz"]),
    "verify": (("data", "verify", "photos", "--images"), ["image_findings.csv"]),
    "verify, page": (
        ("data", "verify", "photos", "--images", "--output", "out"),
        ["out/image_findings.html"],
    ),
    "discover": (("discover", "photos", "--output", "out"), ["out/index.html"]),
    "discover, findings": (("discover", "photos", "--output", "out"), ["out/image_findings.csv"]),
    "new-algorithm": (("new-algorithm", "Mine", "--output", "mine.py"), ["mine.py"]),
}


def all_commands():
    "Every command by name, those of groups included."
    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {n}": c for n, c in inner.items()} if inner else {name: command}
    return found


def test_every_command_that_writes_to_a_path_has_the_option():
    writing = set()
    for name, command in all_commands().items():
        names = {parameter.name for parameter in command.params}
        if names & PATHS:
            writing.add(name)
            assert ("overwrite" in names) == (name not in WITHOUT), name
    tested = {
        words[0] if words[0] != "data" else " ".join(words[:2]) for words, _ in BEFORE.values()
    }
    assert writing - {"export", "soup"} == tested  # tests/test_export.py, tests/test_soup.py
    assert len(COMMANDS) >= len(writing)


def test_no_command_replaces_a_file(tmp_path):
    for case, (words, files) in BEFORE.items():
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text("my work")
        (tmp_path / "photos").mkdir(exist_ok=True)
        done = hmoe(*words, folder=tmp_path)
        assert done.returncode == 1, case
        (line,) = [text for text in done.stderr.splitlines() if text.startswith("hmoe: ")][-1:]
        assert files[0].rpartition("/")[2] in line, (case, line)
        assert "--overwrite" in line or case == "new-algorithm", (case, line)
        for file in files:
            assert (tmp_path / file).read_text() == "my work", case
            (tmp_path / file).unlink()


@pytest.mark.usefixtures("own_names")
def test_with_the_option_the_file_is_replaced(tmp_path):
    from hmoe_repro.data.image_folder import sample_tree

    sample_tree(tmp_path / "photos", per_class=1, size=40)
    words = ("data", "verify", "photos", "--images")
    variables = {"folder": tmp_path, "HMOE_CACHE": str(tmp_path / "cache")}
    table = tmp_path / "image_findings.csv"
    table.write_text("my work")
    assert hmoe(*words, **variables).returncode == 1
    assert table.read_text() == "my work"
    assert hmoe(*words, "--overwrite", **variables).returncode == 0
    assert table.read_text().startswith("file,finding")


def test_train_says_that_weights_are_missing_and_trains_again_if_asked(tmp_path):
    given = ["train", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--network"]
    given += ["small_cnn", "--steps", "4", "--device", "cpu", "--test-domain"]
    for domain in ("photo", "sketch"):
        assert hmoe(*given, domain, folder=tmp_path).returncode == 0
    store = RunStore(tmp_path / "runs")
    options = {"network": "small_cnn", "steps": 4}
    run_id, other = [
        make_config("ERM", "DigitDomainsTiny", [domain], **options).run_id
        for domain in ("photo", "sketch")
    ]
    first = store.read(run_id)
    kept = store.read(other)
    weights = selected_path(store.path(run_id), "default")
    before = weights.read_bytes()
    assert "--overwrite" not in hmoe(*given, "photo", folder=tmp_path).stdout
    weights.unlink()
    seen = hmoe(*given, "photo", folder=tmp_path)
    assert seen.returncode == 0
    assert "--overwrite" in seen.stdout
    assert not weights.exists()
    assert store.read(run_id) == first
    with pytest.raises(HmoeError, match="--overwrite"):
        load_model(run_id, store=store)
    again = hmoe(*given, "photo", "--overwrite", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "--overwrite" not in again.stdout
    assert weights.read_bytes() == before
    assert outcome(store.read(run_id)) == outcome(first)
    assert store.read(run_id)["wall_time_s"] != first["wall_time_s"]
    assert store.read(other) == kept


def test_overwrite_continues_a_training_that_was_stopped(tmp_path):
    def stop(step, steps):
        if step == 9:
            raise KeyboardInterrupt

    options = {"network": "small_cnn", "steps": 12, "checkpoint_frequency": 3}
    config = make_config("ERM", "DigitDomainsTiny", ["photo"], **options)
    store = RunStore(tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt):
        run(config, store, on_step=stop)
    given = ["train", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--network"]
    given += ["small_cnn", "--steps", "12", "--checkpoint-frequency", "3", "--device", "cpu"]
    done = hmoe(*given, "--test-domain", "photo", "--overwrite", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert store.read(config.run_id)["resumed"]
