"""Studies as files: the published runs are those the files describe, a mistake names its line, and
an example goes from file to page."""

import functools
import json
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime

import invented
import pytest
from notebooks import page_functions

from hmoe_repro.analysis.results import frame_of
from hmoe_repro.bench.timing import SCALES
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import results_dir
from hmoe_repro.core.toml import line_of
from hmoe_repro.data.image_folder import sample_tree
from hmoe_repro.data.registry import find_dataset
from hmoe_repro.report.study_report import report_study
from hmoe_repro.studies.artefacts import ARTEFACTS, artefact_studies
from hmoe_repro.studies.studies import (
    configs_or_reason,
    count_runs,
    runs_with_arrays,
    study_configs,
    with_settings,
)
from hmoe_repro.studies.study_file import PROFILES, STUDIES, check_study, early_runs, read_study
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.store import RunStore

table_rows = page_functions("study").table_rows
PUBLISHED = {}  # profile and first word of a study -> the published studies that begin so
for name in sorted(path.stem for path in results_dir().glob("*.jsonl")):
    PUBLISHED.setdefault("-".join(name.split("-")[:2]), []).append(name)
EMBEDDED = ("smoke-", "quick-")
PARTLY = {"paper-colored-baselines"}  # published as their runs end
SMALL = """title = "two algorithms"  # a comment, with a = sign
algorithms = [
    "ERM",
    "HMOE-DN",
]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo"]
seeds = [0, 3]
steps = 5
network = "small_cnn"
precisions = ["float32", "bf16"]

[hparams.all]
lr = 0.01

[hparams.HMOE-DN]
lambda_kl = 3.0

[[runs]]
variants = [{}, { batch_size = 8 }]

[[runs]]
algorithms = ["ERM"]
steps = 7
test_domains = "all"
"""


@pytest.fixture
def small(tmp_path):
    "Writes the small study, with changes, and returns its path."

    def write(*changes, name="small.toml"):
        text = SMALL
        for right, wrong in changes:
            assert right in text
            text = text.replace(right, wrong, 1)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# The library's studies


def _slow_with_real_data(alike):
    "MNIST and PACS are decoded at many sizes for their fingerprints."
    marks = [] if alike.startswith(EMBEDDED) else [pytest.mark.slow]
    return pytest.param(alike, marks=marks)


@pytest.mark.parametrize("alike", [_slow_with_real_data(alike) for alike in PUBLISHED])
def test_published_runs_are_those_of_the_file(alike):
    """In content; ids follow from it. Only data can be missing here. Studies that are alike follow
    one another, so that their data are made once."""
    missing = []
    for study in PUBLISHED[alike]:
        lines = (results_dir() / f"{study}.jsonl").read_text().splitlines()
        recorded = {record["run_id"]: record["config"] for record in map(json.loads, lines)}
        published = {i: RunConfig.from_dict(config).to_dict() for i, config in recorded.items()}
        part = study in PARTLY
        assert len(published) < count_runs(study) if part else count_runs(study) == len(published)
        configs, reason = configs_or_reason(study)
        if configs is None:
            assert not study.startswith(EMBEDDED), study
            assert reason.fix, study
            missing.append(study)
            continue
        of_file = {config.run_id: config.to_dict() for config in configs}
        assert published == (
            {run_id: of_file[run_id] for run_id in published} if part else of_file
        ), study
        folder = results_dir() / study
        arrays = {path.stem for path in folder.glob("*.safetensors")} if folder.is_dir() else set()
        wanted = set(runs_with_arrays(study))
        assert arrays == (wanted & published.keys() if part else wanted), study
    if missing:
        pytest.skip(f"not compared, because data are not here: {', '.join(missing)}")


def check_whole(study):
    ids = [config.run_id for config in study_configs(study)]
    kept = runs_with_arrays(study)
    assert len(ids) == len(set(ids)) == count_runs(study)
    assert set(kept) <= set(ids)
    assert bool(kept) == (read_study(study).arrays != "none")


@pytest.mark.slow
def test_planned_studies_on_real_data_are_whole_and_distinct():
    "The paper's are only counted, and the test above compares published ones."
    for study in STUDIES:
        published = (results_dir() / f"{study}.jsonl").exists()
        if study.startswith(("mnist-", "pacs-")) and not published:
            try:
                check_whole(study)
            except HmoeError as error:  # a specification holds the fingerprint of data not here
                assert "Fix:" in str(error)


def test_studies_are_whole_and_distinct():
    for study in STUDIES:
        if study.startswith(EMBEDDED):
            check_whole(study)
        else:
            assert count_runs(study) > 0
    quick = study_configs("quick-digits")
    cells = {(s.algorithm, s.test_domains, s.trial_seed) for s in quick}
    assert len(cells) == 48 == len(quick)
    assert len({s.dataset_fingerprint for s in quick}) == 1
    toys = study_configs("quick-toy")
    assert {t.steps for t in toys} == {20_000}
    assert [t.hparams["seeds"] for t in toys] == [12, [*range(12, 60)], 6, 6, *[12] * 5]
    weights = [(t.hparams["lambda_en"], t.hparams["lambda_kl"]) for t in toys]
    assert weights[:4] == [(1, 1), (1, 1), (0, 1), (0, 0)]
    squared = [t.hparams.get("load_balance") == "cv2" for t in toys[4:]]
    assert [*zip(weights[4:], squared)] == [
        ((1, weight), cv2)
        for weight, cv2 in ((0.5, True), (0.3, False), (0.15, True), (3, False), (1.5, True))
    ]


def test_every_file_is_a_study_of_a_profile_and_says_what_it_is_for():
    from importlib import resources

    folder = resources.files("hmoe_repro") / "study_files"
    files = {file.name for file in folder.iterdir() if file.name.endswith(".toml")}
    own = [study for study in STUDIES if not PROFILES[study.partition("-")[0]].reduces]
    assert files == {f"{study}.toml" for study in own} | {"profiles.toml"}
    assert list(PROFILES) == ["smoke", "quick", "mnist", "pacs", "paper"]
    for study in own:
        text = (folder / f"{study}.toml").read_text()
        assert text.startswith("# "), study
        assert max(map(len, text.splitlines())) <= 100, study
    assert all(read_study(study).title and read_study(study).name == study for study in STUDIES)


def test_a_study_of_smoke_is_one_of_quick_reduced():
    small, large = read_study("smoke-digits"), read_study("quick-digits")
    assert small.file.content == large.file.content
    assert small.title == large.title
    (few,), (many,) = small.runs, large.runs
    assert few.datasets == ("DigitDomainsTiny",)
    assert (few.steps, few.checkpoint_frequency) == (11, 5)
    assert few.seeds == (0,)
    assert many.seeds == (0, 1, 2)
    assert few.replace(**{n: getattr(many, n) for n in type(many).model_fields}) == many
    assert [v["seeds"] for v in read_study("smoke-toy").runs[0].variants] == [1, [12], *[1] * 7]
    assert {r.epochs for r in read_study("smoke-dmg").runs} == {2}


def test_restarts_are_further_runs_of_each_seed(tmp_path):
    text = read_study("smoke-digits").file.text
    path = tmp_path / "again.toml"
    path.write_text(text.replace("seeds = 3", "seeds = 1\nrestarts = [0, 2]"), encoding="utf-8")
    once = study_configs(path)
    both = {(s.algorithm, s.test_domains, str(s.hparams)): set() for s in once}
    for config in once:
        both[config.algorithm, config.test_domains, str(config.hparams)].add(config.restart)
    assert set(map(frozenset, both.values())) == {frozenset({0, 2})}
    assert count_runs(path) == len(once) == 2 * len(both)


def test_every_study_has_a_page_and_every_page_a_study():
    "A planned study has none as long as it has no results."
    pages = {
        study
        for name, artefact in ARTEFACTS.items()
        for profile in artefact.profiles
        if profile != "bench"
        for study in artefact_studies(name, profile)
    }
    for size in SCALES["soups"].values():  # shown by a benchmark's page
        pages |= set(size["studies"])
    waiting = {
        study
        for study in STUDIES
        if read_study(study).plan and not (results_dir() / f"{study}.jsonl").exists()
    }
    assert pages <= set(STUDIES)
    assert set(STUDIES) - pages <= waiting


# Planned studies whose runs have the settings of a published study, on other trial seeds.
SAME_SETTINGS = {
    "quick-confirm-erm": "quick-discovery",
    "quick-confirm-masks": "quick-dmg",
    "quick-confirm-sharing": "quick-experts",
    "quick-confirm-losses": "quick-gmoe-losses",
    "pacs-power": "pacs-pacs",
}
SAME_FILE = {
    "mnist-payoff": "mnist-colored",
    "mnist-confirm-colored": "mnist-colored",
    "mnist-confirm-rotated": "mnist-rotated",
}


@pytest.mark.parametrize("planned", SAME_SETTINGS)
def test_a_planned_study_repeats_a_published_one_on_new_seeds(planned):
    configs, reason = configs_or_reason(planned)
    if configs is None:
        pytest.skip(str(reason))
    lines = (results_dir() / f"{SAME_SETTINGS[planned]}.jsonl").read_text().splitlines()
    published = {}  # settings -> trial seeds
    for line in lines:
        config = RunConfig.from_dict(json.loads(line)["config"]).to_dict()
        alike = json.dumps(config | {"trial_seed": None}, sort_keys=True)
        published.setdefault(alike, set()).add(config["trial_seed"])
    for config in configs:
        alike = json.dumps(config.to_dict() | {"trial_seed": None}, sort_keys=True)
        assert config.trial_seed not in published[alike]
    assert {config.trial_seed for config in configs} == set(read_study(planned).plan.seeds)


@pytest.mark.parametrize("planned", SAME_FILE)
def test_a_planned_study_of_mnist_has_the_settings_of_the_published_one(planned):
    "Without MNIST, whose digits are in another order for each seed."
    other = ("title", "seeds", "arrays", "plan", "runs", "algorithms")
    new, old = (
        {key: value for key, value in read_study(name).file.content.items() if key not in other}
        for name in (planned, SAME_FILE[planned])
    )
    assert new == old
    seeds = {seed for runs in read_study(SAME_FILE[planned]).runs for seed in runs.seeds}
    assert not seeds & set(read_study(planned).plan.seeds)


def test_runs_are_counted_without_data_or_torch():
    counts = {
        "paper-rotated-baselines": 234,
        "paper-pacs": 48,
        "pacs-limits": 26,
        "mnist-parity": 12,
    }
    code = f"""
import sys
from hmoe_repro.studies.studies import count_runs
from hmoe_repro.studies.study_file import STUDIES, read_study
print([count_runs(name) for name in {list(counts)}], all(map(count_runs, STUDIES)))
print(sorted({{"torch", "pandas", "sklearn", "matplotlib"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{list(counts.values())} True", "[]"]


def test_what_was_checked_is_told_from_data_that_are_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_DATA", str(tmp_path))  # what is kept is kept for each folder
    configs, reason = configs_or_reason("mnist-rotated")
    assert configs is None
    assert "data download MNIST" in reason.fix
    assert "mnist-rotated.toml, line" in str(reason)
    assert count_runs("mnist-rotated") == 54


def test_the_runs_of_a_study_are_kept_for_each_data_folder(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "hmoe_repro.studies.studies._distinct_configs", lambda study: made.append(study) or ()
    )
    for folder in ("a", "b", "a"):
        monkeypatch.setenv("HMOE_DATA", str(tmp_path / folder))
        study_configs("smoke-toy")
    assert len(made) == 2


# Plans

PLAN = """[plan]
date = 2026-11-27T18:00:00Z
seeds = [3]
margin = 1.0
measure = "accuracy"
question = "Is HMOE-DN better than ERM?"
contrast = "HMOE-DN - ERM"

[plan.outcomes]
supported = "It is."
contradicted = "It is worse."
inconclusive = "Nobody knows."

[hparams.all]"""


@functools.cache
def _plan_at(root, commit: str, study: str) -> dict | None:
    """What a study's file plans in a commit: {} if nothing, None if git does not know the commit.
    Its words may be corrected later; date, seeds, margin and measure may not."""

    def git(*args):
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)

    commit = commit.partition("+")[0]
    if git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        return None
    shown = git("show", f"{commit}:hmoe_repro/study_files/{study}.toml")
    plan = {} if shown.returncode else tomllib.loads(shown.stdout).get("plan", {})
    return {name: plan.get(name) for name in ("date", "seeds", "margin", "measure")}


def test_runs_of_a_planned_study_are_finished_after_its_plan(root):
    """The commit that a run was made from holds the plan, if git knows that commit."""
    for study in STUDIES:
        plan, path = read_study(study).plan, results_dir() / f"{study}.jsonl"
        if plan is None or not path.is_file():
            continue
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert early_runs(plan, records) == [], study
        now = read_study(study).file.content["plan"]
        for record in records:
            if record["config"]["trial_seed"] not in plan.seeds:
                continue
            then = _plan_at(root, record["environment"].get("commit") or "", study)
            assert then is None or then == {name: now[name] for name in then}, record["run_id"]


def test_a_plan_is_read_and_renames_no_run(small):
    before = [config.run_id for config in study_configs(small())]
    path = small(("[hparams.all]", PLAN))
    plan = read_study(path).plan
    assert plan.date == datetime(2026, 11, 27, 18, tzinfo=UTC)
    assert (plan.seeds, plan.margin, plan.measure) == ((3,), 1.0, "accuracy")
    assert plan.contrast == "HMOE-DN - ERM"
    assert plan.question.endswith("ERM?")
    assert plan.outcomes.model_dump() == {
        "supported": "It is.",
        "contradicted": "It is worse.",
        "inconclusive": "Nobody knows.",
    }
    assert [config.run_id for config in study_configs(path)] == before
    assert read_study(small()).plan is None
    as_text = PLAN.replace("2026-11-27T18:00:00Z", '"2026-11-27T18:00:00+00:00"')
    assert read_study(small(("[hparams.all]", as_text))).plan == plan


@pytest.mark.parametrize(
    "right, wrong, line, message",
    [
        ("margin = 1.0", "margin = 1.0\nalpha = 0.1", 17, "unknown option 'alpha'"),
        ("margin = 1.0\n", "", 13, "margin is missing"),
        ("margin = 1.0", "margin = -1", 16, "margin must be greater than or equal to 0"),
        ("margin = 1.0", 'margin = "1"', 16, "margin must be a valid number"),
        ("seeds = [3]\nmargin", "seeds = [4]\nmargin", 15, "unknown trial seed .* 4. Valid: 0, 3"),
        ("seeds = [3]\nmargin", "seeds = 3\nmargin", 15, "seeds must be a list of different"),
        ("18:00:00Z", "18:00:00", 14, "date must be a date-time in UTC"),
        ("18:00:00Z", "18:00:00+01:00", 14, "date must be a date-time in UTC"),
        ("2026-11-27T18:00:00Z", '"soon"', 14, "date must be a date-time in UTC"),
        ("2026-11-27T18:00:00Z", "2026-11-27", 14, "date must be a date-time in UTC"),
        ('measure = "accuracy"', "measure = 1", 17, "measure must be a valid string"),
        ('supported = "It is."', 'supported = "Yes."\nyes = "1"', 23, "unknown option 'yes'"),
        ('supported = "It is."\n', "", 21, "supported is missing"),
        ('supported = "It is."', 'supported = ""', 22, "supported must be"),
    ],
)
def test_a_wrong_plan_names_its_line(small, right, wrong, line, message):
    assert right in PLAN
    path = small(("[hparams.all]", PLAN.replace(right, wrong, 1)))
    with pytest.raises(HmoeError, match=f"line {line}: {message}"):
        read_study(path)


def test_runs_from_before_the_plan_are_found(small):
    def record(seed, finished):
        config = {"trial_seed": seed}
        return {"run_id": f"{seed}-{finished}", "config": config, "finished": finished}

    plan = read_study(small(("[hparams.all]", PLAN))).plan
    late, early = "2026-11-27T18:00:01+00:00", "2026-11-27T17:59:59+00:00"
    records = [record(seed, end) for seed in (0, 3) for end in (late, early, "")]
    assert early_runs(plan, records) == [f"3-{early}", "3-"]


def test_a_reduced_study_has_no_plan(monkeypatch):
    """It has the first of the seeds, and the plan is about all of them."""
    from hmoe_repro.studies import study_file

    real = study_file.open_settings

    def planned(path, name=""):
        file = real(path, name)
        plan = tomllib.loads(PLAN.replace("[3]", "[1, 2]").replace("[hparams.all]", ""))
        return study_file.SettingsFile(file.name, file.text, file.content | plan, file.folder)

    monkeypatch.setattr(study_file, "open_settings", planned)
    assert read_study("quick-digits").plan.seeds == (1, 2)
    assert read_study("smoke-digits").plan is None


# A file of one's own


def test_a_file_is_products_of_runs_in_order(small):
    path = small()
    study, configs = read_study(path), study_configs(str(path))
    assert study.name == "small"
    assert len(study.runs) == 2
    assert len(configs) == count_runs(path) == 2 * 2 * 2 * 2 + 2 * 2 * 4
    assert [s.trial_seed for s in configs] == [0] * 8 + [3] * 8 + [0] * 8 + [3] * 8
    assert [s.precision for s in configs[:4]] == ["float32", "bf16"] * 2
    assert [s.hparams["batch_size"] for s in configs[:4]] == [64, 64, 8, 8]
    assert {s.hparams["lr"] for s in configs} == {0.01}
    assert {s.steps for s in configs[16:]} == {7}
    assert {s.hparams.get("lambda_kl") for s in configs} == {None, 3.0}
    assert [s.test_domains[0] for s in configs[-8:-4]] == ["negative", "photo", "plain", "sketch"]
    assert runs_with_arrays(path) == []


def test_what_stands_nearer_wins_and_arrays_are_chosen(small):
    path = small(
        ("steps = 7", "steps = 7\nhparams.all = { lr = 0.02 }\nhparams.ERM = { batch_size = 4 }"),
        ("[hparams.all]", '[arrays]\nalgorithms = ["ERM"]\nseeds = [3]\n\n[hparams.all]'),
    )
    configs = study_configs(path)
    assert {(s.hparams["lr"], s.hparams["batch_size"]) for s in configs if s.steps == 7} == {
        (0.02, 4)
    }
    chosen = runs_with_arrays(path)
    assert chosen == [s.run_id for s in configs if (s.algorithm, s.trial_seed) == ("ERM", 3)]


def test_a_search_keeps_what_the_file_gives_and_draws_the_rest(small):
    path = small(
        ("[hparams.all]", '[search]\ntrials = 3\nrule = "oracle"\n\n[hparams.all]'),
        ('precisions = ["float32", "bf16"]', 'evaluate = "selection:20"'),
    )
    configs = study_configs(path)
    assert len(configs) == count_runs(path)
    assert {s.evaluate for s in configs} == {"all:20"}
    assert {s.hparams_seed for s in configs} == {0, 1, 2}
    assert {s.hparams["lr"] for s in configs} == {0.01}
    assert len({s.hparams["batch_size"] for s in configs if s.algorithm == "ERM"}) > 2
    path = small(("[hparams.all]", '[search]\nrule = "leave-one-domain-out"\n\n[hparams.all]'))
    configs = study_configs(path)
    assert len(configs) == count_runs(path) == 2 * 2 * 2 * 2 * 4 + 2 * 2 * (4 + 6)
    assert {len(s.test_domains) for s in configs} == {1, 2}


SPACE = """[search]
trials = 4
lr = { log_uniform = [0.1, 0.4] }
batch_size = { int = [4, 6] }
weight_decay = { uniform = [0.2, 0.3] }

[hparams.all]"""


def test_a_search_draws_what_it_names_and_nothing_else(small):
    space, alone = ("[hparams.all]", SPACE), ("variants = [{}, { batch_size = 8 }]", "steps = 6")
    searched = study_configs(small(space, alone))
    rates = {s.hparams_seed: set() for s in searched}
    for s in searched:
        rates[s.hparams_seed].add((s.trial_seed, s.hparams["lr"]))
    assert {lr for _, lr in rates.pop(0)} == {0.01}
    for found in rates.values():  # one rate for all algorithms and domains of a draw and a seed
        assert len(found) == 2
        assert all(0.1 < lr < 0.4 for _, lr in found)
    assert len(set.union(*rates.values())) == 6
    assert {s.hparams["batch_size"] for s in searched} == {64, 4, 5, 6}
    decays = {s.hparams["weight_decay"] for s in searched}
    assert len(decays) == 1 + 3 * 2
    assert all(0.2 < decay < 0.3 for decay in decays - {0.0})
    free = ("lr", "batch_size", "weight_decay")
    apart = {a: set() for a in ("ERM", "HMOE-DN")}
    for s in searched:
        apart[s.algorithm].add(json.dumps({n: v for n, v in s.hparams.items() if n not in free}))
    assert [len(found) for found in apart.values()] == [1, 1]


def test_what_follows_a_drawn_value_follows_it_and_domainbeds_trials_draw_the_rest(small):
    names, space = ('"HMOE-DN",', '"DANN",'), ("[hparams.all]", SPACE)
    changes = (names, ("[hparams.HMOE-DN]\nlambda_kl = 3.0\n", ""))
    dann = [s.hparams for s in study_configs(small(*changes, space)) if s.algorithm == "DANN"]
    assert all(h["lr_d"] == h["lr_g"] == h["lr"] for h in dann)
    assert len({h["lr"] for h in dann}) == 1 + 3 * 2
    assert {h["lambda"] for h in dann} == {1.0}
    both = ("[hparams.all]", SPACE.replace("trials = 4", "trials = 4\ndomainbed = true"))
    more = [s.hparams for s in study_configs(small(*changes, both)) if s.algorithm == "DANN"]
    assert {h["lr"] for h in more} == {h["lr"] for h in dann}
    assert len({h["lambda"] for h in more}) == 1 + 3 * 2 < len({h["lr_d"] for h in more}) + 1


def test_trials_from_one_start_differ_only_in_what_is_drawn(small):
    space = ("[hparams.all]", SPACE)
    apart = study_configs(small(space))
    together = study_configs(small(space, ("trials = 4", "trials = 4\none_start = true")))
    assert [config.hparams for config in together] == [config.hparams for config in apart]
    assert {config.hparams_seed for config in apart} == {0, 1, 2, 3}
    assert {config.hparams_seed for config in together} == {0}
    assert len({config.run_id for config in together}) == len(apart)
    for one, other in zip(together, apart):
        assert one == other.replace(hparams_seed=0)
    read = read_study(small(space, ("trials = 4", "trials = 4\none_start = true")))
    assert (read.trials, read.selectable_trials) == (4, 1)
    changed = with_settings(read, [together[1].run_id], {"weight_decay": 0.5})[0]
    assert changed.hparams == together[1].hparams | {"weight_decay": 0.5}
    assert changed.hparams_seed == 0
    oracle = SPACE.replace("trials = 4", 'trials = 4\none_start = true\nrule = "oracle"')
    with pytest.raises(HmoeError, match="line 15: trials from one start are averaged"):
        read_study(small(("[hparams.all]", oracle)))


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("lr =", "lambda_x =", "line 15: unknown hyper-parameter of these algorithms 'lambda_x'"),
        ("[0.1, 0.4]", "[0.4, 0.1]", "line 15: .* is not a distribution. Fix: log_uniform = .low"),
        ("[0.1, 0.4]", "[0, 0.1]", "line 15: .* is not a distribution"),
        ("[0.1, 0.4]", '"wide"', "line 15: .* is not a distribution"),
        ("[4, 6]", "[4, 6.5]", "line 16: .* for int whole numbers from 0"),
        ("{ int = [4, 6] }", "{ uniform = [4, 6] }", r"line 16: .* must be int, got 4.0"),
        ("{ int = [4, 6] }", "{ choice = [] }", r"line 16: .*Fix: choice = \[value, ...\]"),
        ("{ int = [4, 6] }", "{ normal = [4, 6] }", "line 16: .*Valid: choice, int, uniform, log"),
        ("{ int = [4, 6] }", "4", r"line 16: unknown option 'batch_size'. Valid: .*log_uniform"),
        ("trials = 4", "trails = 4", r"line 14: unknown option 'trails'.* Valid: trials, rule"),
        ("trials = 4\n", "", "the only trial, 0, draws nothing"),
        (SPACE.partition("lr =")[2].partition("\n\n")[0], " { choice = [-1.0] }", "at least 0"),
    ],
)
def test_a_wrong_search_names_its_line(small, old, new, said):
    assert old in SPACE
    with pytest.raises(HmoeError, match=said):
        check_study(small(("[hparams.all]", SPACE.replace(old, new, 1))))


def test_an_algorithm_without_anything_to_search_is_refused(small):
    only = "[search]\ntrials = 4\nlambda_kl = { uniform = [0.1, 3.0] }\n\n[hparams.all]"
    with pytest.raises(HmoeError, match="ERM.*none.*lambda_kl"):
        check_study(small(("[hparams.all]", only)))


def test_a_grid_is_every_combination(small):
    grid = "grid = { lr = [0.1, 0.2], batch_size = [4, 8, 16] }"
    path = small(("variants = [{}, { batch_size = 8 }]", grid))
    configs = [s for s in study_configs(path) if s.steps == 5]
    found = [(s.hparams["lr"], s.hparams["batch_size"]) for s in configs[:12:2]]
    assert found == [(lr, size) for lr in (0.1, 0.2) for size in (4, 8, 16)]
    assert len(configs) == 2 * 2 * 6 * 2
    assert count_runs(path) == len(study_configs(path))
    above = small(("seeds =", f"{grid}\nseeds ="))  # the block's variants are more specific
    assert [len(runs.variants) for runs in read_study(above).runs] == [2, 6]
    for wrong, said in (
        ("grid = { lr = [0.1, 0.1] }", "line 20: grid must be a list of different values"),
        ("grid = { lr = [] }", "line 20: grid must be a list of different values, at least one"),
        ("grid = { lr = 0.1 }", "line 20: grid must be"),
        ("grid = { lambda_kl = [1.0] }", "line 20: ERM: unknown hyper-parameter 'lambda_kl'"),
        ("grid = { lr = [-1.0] }", "line 20: ERM: hyper-parameter lr must be at least 0"),
        (f"variants = [{{}}]\n{grid}", "line 21: a grid and variants exclude"),
    ):
        with pytest.raises(HmoeError, match=said):
            check_study(small(("variants = [{}, { batch_size = 8 }]", wrong)))


def test_arrays_are_published_for_the_runs_of_a_figure_only():
    assert len(runs_with_arrays("quick-digits")) == 8
    assert len(runs_with_arrays("quick-toy")) == 9
    assert runs_with_arrays("paper-rotated-baselines") == []


def test_a_sweep_may_set_what_a_study_gives_or_draws(small):
    path = small(("[hparams.all]", SPACE))
    kept = {s.run_id for s in study_configs(path) if s.hparams_seed == 2}
    found = with_settings(path, kept, {"lr": 0.3, "batch_size": 9})
    assert len({s.run_id for s in found}) == len(kept)
    assert {s.hparams_seed for s in found} == {2}
    assert {(s.hparams["lr"], s.hparams["batch_size"]) for s in found} == {(0.3, 9)}
    with pytest.raises(HmoeError, match="ERM.*DigitDomainsTiny.*'lambda"):
        with_settings(path, kept, {"lambda_kl": 1.0})


def test_domains_held_out_together_and_by_data_set(small):
    changed = '[["photo", "plain"], "sketch"]'
    configs = study_configs(small(('["photo"]', changed)))
    assert {s.test_domains for s in configs if s.steps == 5} == {("photo", "plain"), ("sketch",)}
    table = '{ DigitDomainsTiny = ["photo"], RotatedDigits = ["0", "75"] }'
    both = '["DigitDomainsTiny", "RotatedDigits"]'
    path = small(('["photo"]', table), ('["DigitDomainsTiny"]', both))
    assert count_runs(path) == len(study_configs(path)) == 16 * 3 + 4 * (4 + 6)


def test_a_run_that_two_blocks_describe_is_one_run(small):
    path = small(("[[runs]]\nvariants = [{}, { batch_size = 8 }]", "[[runs]]\nsteps = 7"))
    assert count_runs(path) == 2 * 2 * 2 + 4 * 4
    assert len(study_configs(path)) == count_runs(path) - 4


MISTAKES = [
    ('"HMOE-DN",\n]', '"HMOE-ON",\n]', 4, "unknown algorithm 'HMOE-ON'.* Valid: ERM, HMOE-DL"),
    ('"DigitDomainsTiny"', '"DigitDomain"', 6, "unknown data set .*DigitDomains, DigitDomainsTiny"),
    ('["photo"]', '["photo", "foto"]', 7, "unknown domain of DigitDomainsTiny 'foto'.*negative"),
    ("[0, 3]", "[]", 8, r"seeds must be a list of different values, .* got \[\]"),
    ("[0, 3]", "[1, 1]", 8, "seeds must be a list of different values"),
    ("[0, 3]", "true", 8, "seeds must be"),
    ("steps = 5", "steps = 0", 9, "steps must be greater than or equal to 1, got 0"),
    ("steps = 5", 'stepz = "5"', 9, "unknown option 'stepz'.* Valid: title, .*steps"),
    ('"small_cnn"', '"large_cnn"', 10, "unknown network 'large_cnn'.* Valid: mnist_cnn, small_cnn"),
    ('"bf16"', '"bf17"', 11, "unknown precisions 'bf17'.* Valid: float32"),
    ("lr = 0.01", "larning_rate = 1", 14, "unknown hyper-parameter 'larning_rate'.* Valid: lr"),
    ("lr = 0.01", 'lr = "fast"', 14, "ERM: hyper-parameter lr must be float"),
    ("[hparams.HMOE-DN]", "[hparams.HMOE]", 16, "unknown algorithm in hparams 'HMOE'.* Valid: all"),
    ("lambda_kl = 3.0", "lambda_k = 3.0", 17, "HMOE-DN: unknown hyper-parameter 'lambda_k'"),
    ("batch_size = 8", "batch_siz = 8", 20, "unknown hyper-parameter 'batch_siz'"),
    ("[{}, { batch_size = 8 }]", "[]", 20, "variants must be a list of different values"),
    ("steps = 7", "steps = 7.5", 24, "steps must be .*got 7.5"),
    ("steps = 7", 'title = "x"', 24, "unknown option 'title'"),
    ("steps = 7", 'sampler = "pool"', 24, "unknown sampler 'pool'.* Valid: domain, pooled"),
    (
        "steps = 7",
        'sampler = { IRM = "pooled" }',
        24,
        "unknown algorithm in sampler 'IRM'.* Valid: all, ERM",
    ),
    (
        "steps = 7",
        'evaluate = "some"',
        24,
        "evaluate must be a text .*got 'some'. It means: selection .* or all",
    ),
    ("steps = 7", 'determinism = "exact"', 24, "unknown determinism 'exact'. Valid: native"),
    ('"all"', '"every"', 25, 'test_domains must be "all"'),
    ("seeds = [0, 3]", "seeds = [0,", 9, "not TOML"),
    ("steps = 7", "steps = ", 24, "not TOML: Invalid value. Fix"),
    ('title = "two algorithms"', "", 1, "title is missing. Fix"),
    ("seeds = [0, 3]\n", "", 18, r"seeds is missing. Fix: add seeds at the top, or to every \[\["),
    (
        "[hparams.all]",
        "[search]\nrules = 1\n[hparams.all]",
        14,
        "unknown option 'rules'.* Valid: trials, rule",
    ),
    (
        "[hparams.all]",
        '[search]\nrule = "best"\n[hparams.all]',
        14,
        "unknown rule 'best'. Valid: training-domain",
    ),
    ("[hparams.all]", 'arrays.algorithms = ["CORAL"]\n[hparams.all]', 13, "unknown algorithm in a"),
    ("steps = 5", "save_predictions = true", 9, "no setting .*hmoe sweep --save-predictions"),
    ("steps = 7", "save_predictions = true", 24, "no setting .*hmoe sweep --save-predictions"),
    ('["DigitDomainsTiny"]', '["SineIntervals"]', 2, "the toy has other algorithms. Fix"),
]


@pytest.mark.parametrize("right, wrong, line, message", MISTAKES, ids=[m[1] for m in MISTAKES])
def test_a_mistake_names_its_line_and_what_is_valid(small, right, wrong, line, message):
    path = small((right, wrong))
    with pytest.raises(HmoeError, match=message) as caught:
        check_study(path)
    assert str(caught.value).startswith(f"{path}, line {line}: "), caught.value
    assert str(caught.value).count("\n") == 0


def test_what_only_the_data_can_tell_names_its_line_too(small):
    "A hyper-parameter that exists only beside another value of a second one."
    path = small(("batch_size = 8", "resnet_dropout = 0.5"))
    with pytest.raises(HmoeError, match="line 20: ERM.*resnet_dropout"):
        study_configs(path)


def test_files_and_names_that_are_no_studies(tmp_path, small):
    for name, message in [
        ("quick-digit", "unknown study .*quick-digits"),
        ("mine.yaml", "mine.yaml is YAML, but study files are TOML"),
        (str(tmp_path / "none.toml"), "cannot read .*none.toml .No such file"),
        (str(tmp_path), "unknown study"),
    ]:
        with pytest.raises(HmoeError, match=message):
            read_study(name)
    (tmp_path / "latin.toml").write_bytes(b"title = '\xe9'")
    with pytest.raises(HmoeError, match="not UTF-8"):
        read_study(tmp_path / "latin.toml")
    with pytest.raises(HmoeError, match="/quick-digits.toml: .*_files/quick-digits"):
        read_study(small(name="quick-digits.toml"))
    for name in ("...toml", "-x.toml", "a b.toml"):
        with pytest.raises(HmoeError, match="the name.*Fix: letters"):
            report_study(small(name=name), output=tmp_path / "pages" / "reports")
    assert not (tmp_path / "pages").exists()


def test_two_files_of_one_name_share_no_page_and_no_records(small, tmp_path, monkeypatch):
    from hmoe_repro.report.publish import publish_studies

    monkeypatch.setattr("hmoe_repro.report.study_report.collect_study", lambda *_: ([], []))
    monkeypatch.setattr("hmoe_repro.report.study_report.render", lambda *_, **__: "page")
    first, second, same = (tmp_path / folder / "small.toml" for folder in "abc")
    texts = small().read_text(), small(("steps = 5", "steps = 6")).read_text()
    for path, text in zip((first, second, same), (*texts, texts[0])):
        path.parent.mkdir()
        path.write_text(text)
    reports = tmp_path / "reports"
    for _ in range(2):
        assert report_study(first, output=reports) == "page"
    kept = (reports / "small.toml").read_text()
    assert kept.splitlines()[0].endswith(" ../a/small.toml")
    assert kept.endswith(texts[0])
    both = f"{second} and {first} are two studies of one name, and .*small.jsonl can .* Fix: rename"
    with pytest.raises(HmoeError, match=both):
        report_study(second, output=reports)
    assert (
        report_study(same, output=reports)
        == report_study(second, output=tmp_path / "other")
        == "page"
    )
    with pytest.raises(HmoeError, match="a/small.toml.*tmp.*small.toml.*two studies"):
        report_study(first, output=second.parent)  # which would replace a file of one's own
    assert second.read_text() == texts[1]
    with pytest.raises(HmoeError, match="a/small.toml.*b/small.toml.*Fix: rename"):
        publish_studies([str(first), str(second)], RunStore(tmp_path / "runs"))
    same.unlink()
    assert report_study(first, output=reports) == "page"  # a file that was moved


def test_a_study_is_published_as_its_runs_end(tmp_path, monkeypatch):
    from hmoe_repro.report.publish import publish_studies
    from hmoe_repro.training.run import run

    monkeypatch.setenv("HMOE_RESULTS", str(tmp_path / "results"))
    store, path = RunStore(tmp_path / "runs"), tmp_path / "two.toml"
    head = 'title = "two"\nalgorithms = ["ERM"]\ndatasets = ["DigitDomainsTiny"]\n'
    head += 'test_domains = ["photo"]\n'
    path.write_text(f'{head}seeds = 2\nsteps = 1\nnetwork = "small_cnn"\n')
    first, second = study_configs(str(path))
    with pytest.raises(HmoeError, match="no run.*'two'.*hmoe sweep"):
        publish_studies([str(path)], store, partial=True)
    run(first, store)
    assert publish_studies([str(path)], store, True) == {tmp_path / "results" / "two.jsonl": 1}
    kept = (tmp_path / "results" / "two.jsonl").read_text()
    with pytest.raises(HmoeError, match="1 of 2.*'two'"):
        publish_studies([str(path)], store)
    store.path(first.run_id).rename(tmp_path / "elsewhere")
    run(second, store)
    with pytest.raises(HmoeError, match=f"1 published.*lost: {first.run_id}"):
        publish_studies([str(path)], store, partial=True)
    assert (tmp_path / "results" / "two.jsonl").read_text() == kept
    (tmp_path / "elsewhere").rename(store.path(first.run_id))
    for partial in (True, False):
        assert publish_studies([str(path)], store, partial)[tmp_path / "results" / "two.jsonl"] == 2


def test_lines_are_found_whatever_stands_around_them():
    text = 'a = """\nb = 1\n"""\n# b = 2\nb = 3\n[c]\nb = { d = 1, e = [\n  2,\n  3] }\n'
    text += "[[f]]\n[[f]]\nb = 4\n"
    places = {("b",): 5, ("a",): 1, ("c", "b", "d"): 7, ("c", "b", "e", 1): 9, ("f", 1, "b"): 12}
    assert {keys: line_of(text, *keys) for keys in places} == places


# Beside the file


ALGORITHM = """
from hmoe_repro.algorithms.base import ERM, HParam

class Beside(ERM):
    HPARAMS = ERM.HPARAMS | {"push": HParam(1.0, "how hard")}
"""
DATA = """
import torch
from hmoe_repro.data.base import MultiDomainDataset

def Noise(trial_seed):
    torch.manual_seed(trial_seed)
    images = [torch.randint(255, (30, 1, 8, 8), dtype=torch.uint8) for _ in range(3)]
    return MultiDomainDataset("Noise", list("abc"), ["0", "1"], images, [torch.arange(30) % 2] * 3)
"""


@pytest.mark.usefixtures("own_names")
def test_algorithms_data_and_folders_are_looked_for_beside_the_file(small, tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text(ALGORITHM)
    (tmp_path / "noise.py").write_text(DATA)
    sample_tree(tmp_path / "pictures", per_class=4, size=32)
    path = small(
        ('"HMOE-DN"', '"beside.py:Beside"'),
        ("HMOE-DN]", '"beside.py:Beside"]'),
        ("lambda_kl = 3.0", "push = 2.0"),
        ('["DigitDomainsTiny"]', '["noise.py:Noise", "pictures"]'),
        ('["photo"]', '"all"'),
        ('"small_cnn"', '"image_cnn"'),
    )
    monkeypatch.chdir("/")
    configs = study_configs(path)
    assert {s.dataset for s in configs} == {"Noise", "pictures"}
    assert {(s.algorithm, s.hparams.get("push")) for s in configs} == {
        ("ERM", None),
        ("Beside (beside.py)", 2.0),
    }
    noise = {s.trial_seed: s.dataset_fingerprint for s in configs if s.dataset == "Noise"}
    assert len(set(noise.values())) == 2  # drawn from the trial seed
    assert {s.test_domains for s in configs if s.dataset == "Noise"} == {("a",), ("b",), ("c",)}
    with pytest.raises(HmoeError, match="line 6: .*noise.py.*'Nose'"):
        check_study(small(('"DigitDomainsTiny"', '"noise.py:Nose"')))
    with pytest.raises(HmoeError, match="small.toml, line 4: "):
        check_study(small(('"HMOE-DN"', '"beside_it.py:Beside"')))


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize(
    "body, message",
    [
        ("x = 1 / 0", "ZeroDivisionError: .*Fix: line 1 of data.py"),
        ("def Mine(:", "SyntaxError.*line 1 of data.py"),
        ("def Mine(seed):\n    pass", "unknown argument of Mine in data.py: 'seed'"),
        ("def Mine():\n    return 3", "Mine in data.py returned int. Fix"),
        ("def Mine():\n    return x", "NameError.*Fix: line 2 of data.py"),
        ("raise SystemExit", "SystemExit: . Fix: line 1 of data.py"),
        ("def Mine():\n    raise SystemExit(0)", "SystemExit: 0. Fix: line 2 of data.py"),
        ("Mine = 3", "has no function 'Mine'"),
        ("def PACS():\n    pass", "a data set of this library has that name"),
    ],
)
def test_a_data_file_that_fails_says_where(tmp_path, body, message):
    (tmp_path / "data.py").write_text(body)
    name = "PACS" if "PACS" in body else "Mine"
    with pytest.raises(HmoeError, match=message):
        find_dataset(f"data.py:{name}", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("own_names")
def test_other_processes_train_on_a_data_file(tmp_path, monkeypatch):
    from hmoe_repro.studies.sweep import sweep
    from hmoe_repro.training.planning import make_config

    (tmp_path / "noise.py").write_text(DATA)
    options = {"network": "small_cnn", "steps": 2, "checkpoint_frequency": 1}
    given = {"batch_size": 4}
    configs = [
        make_config("ERM", f"{tmp_path}/noise.py:Noise", [d], 0, given, **options) for d in "ab"
    ]
    results = sweep(configs, store=RunStore(tmp_path / "runs"), device="cpu", jobs=2)
    assert list(results.values()) == [("complete", None)] * 2


# From file to page


@pytest.fixture(scope="module")
def example(root, tmp_path_factory, own_names_of_file):
    "The example study, trained; one run is taken away again and one fails."
    from hmoe_repro.training.run import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_RUNS", str(tmp_path_factory.mktemp("runs")))
        store = RunStore()
        path = root / "docs" / "example_study.toml"
        for config in study_configs(path):
            assert run(config, store)["status"] == "complete"
        yield path, store


@pytest.mark.slow
@pytest.mark.usefixtures("warm_kernels")
def test_the_example_goes_from_file_to_page(example, tmp_path):
    path, store = example
    page = report_study(path, store, tmp_path / "reports")
    assert page == tmp_path / "reports" / "example_study" / "study.ipynb"
    made = {p.name for p in page.parent.iterdir()}
    stems = {"study", "study_curves", "study_resolvable"}
    assert {"study.csv", "study.provenance.json"} <= made
    assert {f"{stem}.png" for stem in stems - {"study_resolvable"}} <= made
    text = page.read_text()
    for said in (
        "ERM against a loss that weights the worst domain",
        "the data have no counterpart in the papers, so no setting is compared",
        "No run is missing, none failed.",
        "WorstDomain (example\\\\_algorithm.py) | default",
    ):
        assert said in text, said
    assert str(tmp_path) not in text
    records = (tmp_path / "reports" / "example_study.jsonl").read_text().splitlines()
    assert len(records) == 8
    evidence = json.loads((page.parent / "study.provenance.json").read_text())
    assert evidence["study"] == "example_study"
    assert evidence["records"] == 8


def test_the_page_about_files_shows_the_table_of_the_example(example, root):
    from typer.testing import CliRunner

    from hmoe_repro.cli.app import app

    def without_numbers(text):
        return re.sub(r"\d+\.\d", "#", text).split()

    cells = json.loads((root / "nbs/04_algorithms/22_from_file.ipynb").read_text())["cells"]
    shown = next("".join(c["source"]) for c in cells if c["id"] == "md-row").split("```\n")[3]
    said = CliRunner().invoke(app, ["select", str(example[0])])
    assert said.exit_code == 0, said.output
    assert without_numbers(shown) == without_numbers(said.output)


@pytest.mark.usefixtures("warm_kernels")
def test_missing_and_failed_runs_are_named_with_the_fix(example, tmp_path):

    path, store = example
    part = RunStore(tmp_path / "runs")
    configs = study_configs(path)
    for config in configs[1:]:
        part.path(config.run_id).mkdir(parents=True)
        failed = {"status": "failed", "reason": "NaN loss at step 7", "selected": {}}
        part.write(store.read(config.run_id) | (failed if config == configs[-1] else {}))
    page = report_study(path, part, tmp_path / "reports").read_text()
    assert f"record: {configs[0]} (run" in page
    assert configs[0].run_id in page
    assert "NaN loss" in page
    assert f"hmoe sweep {path}" in page
    with pytest.raises(HmoeError, match=f"no run.*example_study.*hmoe sweep {path}"):
        report_study(path, RunStore(tmp_path / "none"), tmp_path / "reports")
    with pytest.raises(HmoeError, match="hmoe reproduce hmoe_fig3"):
        report_study("smoke-toy", part, tmp_path / "reports")


def test_draws_become_one_run_by_the_rule_and_variants_rows():
    records = [
        r | {"config": r["config"]} for r in invented.digits(seeds=(0, 1), domains=("photo",))
    ]
    better = []
    for r in records:
        config = RunConfig.from_dict(r["config"] | {"hparams_seed": 1})
        points = json.loads(json.dumps(r["checkpoints"]))
        for splits in (point["accuracies"] for point in points):
            for domain in set(splits) - {"photo"}:
                splits[domain]["out"] = {mode: 0.99 for mode in splits[domain]["out"]}
        chosen = {"run_id": config.run_id, "config": config.to_dict(), "checkpoints": points}
        better.append(r | chosen)
    tables, missing = table_rows(frame_of(records + better), "training-domain", 2)
    (rows,) = tables.values()
    assert set(rows.run_id) == {r["run_id"] for r in better}
    assert not missing
    for r in better:  # two modes of one algorithm may choose two trials
        for splits in (point["accuracies"] for point in r["checkpoints"]):
            for domain in set(splits) - {"photo"}:
                splits[domain]["out"] |= {m: 0.0 for m in splits[domain]["out"] if m == "max"}
    tables, _ = table_rows(frame_of(records + better), "training-domain", 2)
    (apart,) = tables.values()
    assert set(apart.algorithm) == set(rows.algorithm)
    assert len(apart) == len(rows)
    assert set(apart.run_id) > {r["run_id"] for r in better}
    plain = frame_of(records)
    assert table_rows(plain)[0]["DigitDomains"].equals(plain)
    tables, _ = table_rows(frame_of(invented.balance(seeds=(0, 1))))
    (named,) = tables.values()
    assert set(named.algorithm) == {"HMOE-DN, lambda_kl 1.0", "HMOE-DN, lambda_kl 3.0"}
