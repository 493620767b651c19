"""Searches: what is trained for them, what a rule chooses, what is missing; and the commands from
training to DomainBed's form, also with an algorithm from a file."""

import copy
import re
import sys
from dataclasses import replace

import pandas as pd
import pytest
from scipy.stats import norm
from test_domainbed import DOMAINS, domainbed_choice, read
from test_domainbed import record as curves
from typer.testing import CliRunner

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.base import ALGORITHMS
from hmoe_repro.analysis.results import load_study
from hmoe_repro.analysis.statistics import minimum_detectable_difference
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import results_dir
from hmoe_repro.data.image_folder import sample_tree
from hmoe_repro.data.registry import DATASETS
from hmoe_repro.studies.filters import filter_runs
from hmoe_repro.studies.search import (
    hparams_note,
    only_algorithms,
    search_configs,
    select_by_rule,
    split_into_tables,
)
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run_config import RunConfig
from hmoe_repro.training.selection import RULES, select_model
from hmoe_repro.training.store import RunStore

pytestmark = pytest.mark.usefixtures("own_names")
PAIRS = [[a, b] for a in DOMAINS for b in DOMAINS if a < b]


def full(held_out, trial=0, draw=0, modes=("default",), **changed):
    "An invented record whose specification is whole."
    made = curves(held_out, trial, draw, modes)
    config = RunConfig.from_dict(
        made["config"]
        | {
            "dataset_fingerprint": f"trial {trial}",
            "evaluate": "all",
            "hparams": {"lr": 1e-3 / (1 + draw)},
        }
        | changed
    )
    return made | {
        "run_id": config.run_id,
        "reason": None,
        "config": config.to_dict(),
        "test_size": 400,
    }


@pytest.fixture(scope="module")
def searched():
    return [
        full(held_out, trial, draw)
        for trial in range(2)
        for draw in range(3)
        for held_out in [["sketch"], ["photo"], *PAIRS]
    ]


@pytest.mark.parametrize("rule", RULES)
def test_each_cell_is_the_rules_choice_within_one_trial_seed(searched, rule):
    rows, missing = select_by_rule(searched, rule)
    assert missing == []
    assert len(rows) == 4
    for row in rows.itertuples():
        assert (
            row.accuracy
            == select_model(
                [r for r in searched if r["config"]["trial_seed"] == row.trial_seed],
                row.test_domain,
                rule,
            )["test_accuracy"]
        )
    first, _ = select_by_rule(searched, rule, n_hparams=1)
    assert set(first.hparams_seed) == {0}
    assert (first.validation <= rows.validation).all()


def test_what_is_missing_has_a_name(searched):
    gone = {("photo",): (1, 2), ("plain", "sketch"): (0, 1)}
    kept = [
        r
        for r in searched
        if gone.get(tuple(r["config"]["test_domains"]))
        != (r["config"]["trial_seed"], r["config"].get("hparams_seed", 0))
    ]
    rows, missing = select_by_rule(kept, "leave-one-domain-out")
    assert len(rows) == 4
    assert len(missing) == 2
    assert "ERM on photo, seed 1, draw 2 of 3: no run held out photo alone" in missing[0]
    assert "ERM on sketch, seed 0, draw 1 of 3" in missing[1]
    assert "missing: sketch+plain" in missing[1]
    dead = copy.deepcopy(searched[0]) | {"status": "failed", "reason": "NaN loss at step 40"}
    notes = select_by_rule([dead, *searched[1:]])[1]
    assert len(notes) == 2
    assert "NaN loss at step 40" in notes[0]
    assert dead["run_id"] in notes[0]
    assert "draw 0 of 3" in notes[1]
    with pytest.raises(HmoeError, match="no run to choose from.*NaN loss"):
        select_by_rule([dead])
    with pytest.raises(HmoeError, match="hmoe runs"):
        select_by_rule([])
    with pytest.raises(HmoeError, match="^unknown selection rule 'best'. Valid: training-domain"):
        select_by_rule(searched, "best")


@pytest.mark.parametrize(
    "changed, name",
    [
        ({"steps": 11}, "steps"),
        ({"network": "mlp"}, "network"),
        ({"dataset": "DigitDomainsTiny"}, "dataset"),
        ({"algorithm_source": "abc"}, "algorithm_source"),
        ({"dataset_fingerprint": "other"}, "dataset_fingerprint"),
        ({"hparams": {"lr": 0.5}}, "lr"),
    ],
)
def test_runs_of_two_kinds_are_refused_and_one_can_be_chosen(changed, name):
    mixed = [full(["sketch"]), full(["photo"]), full(["photo"], **changed)]
    with pytest.raises(HmoeError, match=f"differ in {name} .*--where {name}=") as caught:
        select_by_rule(mixed)
    advice = re.search("--where (.*).$", str(caught.value))[1]
    assert len(select_by_rule(filter_runs(mixed, [advice]))[0]) in (1, 2)
    with pytest.raises(HmoeError, match="Valid: .*steps"):
        filter_runs(mixed, ["stepz=1"])


NO_TABLE = {
    "quick-toy": "fit the toy's function",
    "smoke-toy": "fit the toy's function",
    "quick-gmoe-single": "hold out negative.plain.sketch together",
    "pacs-gmoe-single": "hold out cartoon.photo.sketch together",
}


SELECTED = re.compile(r"^(.*) by training-domain, percent$", re.M)


@pytest.mark.slow
@pytest.mark.parametrize("study", sorted(path.stem for path in results_dir().glob("*.jsonl")))
def test_a_published_study_has_its_tables(hmoe, study):
    said = hmoe("select", "--study", study, fails=NO_TABLE.get(study))
    assert "no table of" not in said
    titles = SELECTED.findall(said)
    assert bool(titles) == (study not in NO_TABLE)
    if study == "quick-balance":
        assert titles == [f"DigitDomains (lambda_kl={n})" for n in ("1.0", "3.0")]
    if study == "quick-clusters":
        assert titles == ["ColoredDigits", "DigitDomains", "RotatedDigits"]
    if study == "quick-gmoe":
        networks = [title.split("network=")[1].split(",")[0] for title in titles]
        assert networks == ["gmoe_small8", "small_cnn", "small_vit8"]
    if study == "pacs-dmg":
        assert titles == ["PACS"]  # as many epochs, though not as many updates


def test_the_tables_of_a_study_are_those_of_its_settings_alone(hmoe):
    hmoe("select", "--study", "quick-balance", "--output", "both.csv")
    both = pd.read_csv("both.csv").set_index("table")
    records = load_study("quick-balance")
    for value in ("1.0", "3.0"):
        alone, _ = select_by_rule(filter_runs(records, [f"lambda_kl={value}"]))
        rows = both.loc[f"DigitDomains (lambda_kl={value})"]
        assert rows.run_id.tolist() == alone.run_id.tolist()
        assert rows.accuracy.tolist() == pytest.approx(alone.accuracy.tolist())


def test_settings_of_a_test_domain_make_no_variant_and_are_named():
    settled = [full(["sketch"]), full(["photo"], hparams={"lr": 0.5})]
    assert [title for title, _ in split_into_tables(settled)] == ["DigitDomains"]
    assert hparams_note(settled) == ["settings differ between test domains: ERM (lr)"]
    pairs = [full(pair, hparams={"lr": 0.5}) for pair in PAIRS]
    with pytest.raises(HmoeError, match="differ in lr"):  # that rule compares them
        select_by_rule([full(["sketch"]), *pairs], "leave-one-domain-out")


def test_a_run_evaluated_twice_is_one_run_and_the_full_record_counts():
    cheap, whole = full(["sketch"], evaluate="selection"), full(["sketch"])
    for point in cheap["checkpoints"]:
        point["accuracies"]["sketch"].pop("out")
    for order in ([cheap, whole], [whole, cheap]):
        assert select_by_rule(order, "oracle")[0].run_id.tolist() == [whole["run_id"]]


def test_one_draw_by_the_papers_rule_is_the_study_itself():
    for study in ("smoke-digits", "smoke-toy"):
        assert search_configs(study_configs(study)) == list(study_configs(study))
    assert {s.run_id for s in study_configs("quick-digits")} <= {
        s.run_id for s in search_configs(study_configs("quick-digits"), 3)
    }
    drawn = search_configs(study_configs("quick-digits"), 3, fixed={"lr": 0.003})
    assert {s.hparams["lr"] for s in drawn} == {0.003}
    assert {s.hparams_seed for s in drawn} == {0, 1, 2}


def test_what_each_rule_needs_is_planned_once(monkeypatch):
    order = DATASETS["DigitDomains"].domain_names
    first = study_configs("quick-digits")[0]
    base = first.replace(evaluate="selection:400", test_domains=("photo",))
    oracle, pairs = (
        search_configs([base], 2, "oracle"),
        search_configs([base, base.replace(test_domains=("sketch",))], 2, "leave-one-domain-out"),
    )
    assert {s.evaluate for s in oracle + pairs} == {"all:400"}
    assert len(oracle) == 2
    for draw in (0, 1):
        held_out = [s.test_domains for s in pairs if s.hparams_seed == draw]
        assert sorted(held_out) == sorted(
            [
                ("photo",),
                ("sketch",),
                *(
                    (a, b)
                    for i, a in enumerate(order)
                    for b in order[i + 1 :]
                    if {a, b} & {"photo", "sketch"}
                ),
            ]
        )
    assert (
        oracle[1].hparams["lr"]
        == make_config(
            "ERM", "DigitDomains", ["photo"], network="small_cnn", hparams_seed=1
        ).hparams["lr"]
        != base.hparams["lr"]
    )
    monkeypatch.setitem(
        DATASETS, "Two", replace(DATASETS["DigitDomains"], domain_names=("photo", "sketch"))
    )
    with pytest.raises(HmoeError, match="nothing would be left to train on"):
        search_configs([base.replace(dataset="Two")], 1, "leave-one-domain-out")
    with pytest.raises(HmoeError, match="Valid: training-domain"):
        search_configs([base], 1, "best")


def test_the_resolvable_difference_counts_the_test_images_of_each_photograph_domain():
    sizes = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    rows = pd.DataFrame(
        [
            {
                "algorithm": a,
                "mode": "default",
                "test_domain": d,
                "trial_seed": 0,
                "accuracy": 0.5,
                "dataset": "PACS",
                "test_size": n,
            }
            for a in ("ERM", "HMOE-DN")
            for d, n in sizes.items()
        ]
    )
    found = minimum_detectable_difference(rows.assign(status="complete", run_id=range(8)))
    found, sure = found.set_index("test_domain"), norm.isf(0.025) + norm.isf(0.2)
    for domain, n in sizes.items():
        by_hand = 100 * sure * (2 * 0.25 / n) ** 0.5
        assert found.detectable[domain] == pytest.approx(by_hand, rel=1e-3)
        assert found.test_images[domain] == n
    by_hand = 100 * sure * (2 * sum(0.25 / n for n in sizes.values())) ** 0.5 / 4
    assert found.detectable["Average"] == pytest.approx(by_hand, rel=1e-3)
    assert list(found.index) == [*sizes, "Average"]


@pytest.fixture
def hmoe(tmp_path, monkeypatch):
    "The command in a folder of its own."
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments, fails=None):
        done = CliRunner().invoke(app, [str(a) for a in arguments])
        if fails is None:
            assert done.exit_code == 0, (done.output, done.exception)
        else:
            assert re.search(fails, f"{done.output} {done.exception}"), (
                done.output,
                done.exception,
            )
        return done.output

    return call


TINY = (
    "--dataset",
    "DigitDomainsTiny",
    "--network",
    "small_cnn",
    "--steps",
    2,
    "--checkpoint-frequency",
    1,
    "--device",
    "cpu",
    "--set",
    "batch_size=4",
)
MINE = """
from hmoe_repro.algorithms.base import ERM, HParam

class Mine(ERM):
    HPARAMS = ERM.HPARAMS | {"strength": HParam(0.5, "weight of nothing")}
"""


def test_a_search_is_trained_chosen_and_exported(hmoe, tmp_path):
    said = hmoe(
        "train",
        "--algorithm",
        "HMOE-DN",
        "--test-domain",
        "photo",
        *TINY,
        "--evaluate",
        "all",
        "--n-hparams",
        2,
    )
    records = RunStore().scan()[0]
    assert {r["config"].get("hparams_seed", 0) for r in records} == {0, 1}
    assert {r["config"]["hparams"]["batch_size"] for r in records} == {4}
    assert len({r["config"]["hparams"]["lr"] for r in records}) == 2
    for mode in ("mix", "max", "ood"):
        assert re.search(rf"{mode} +{select_model(records, 'photo', mode=mode)['run_id']} ", said)
    hmoe("select", "--rule", "oracle", "--output", "chosen.csv")
    chosen = pd.read_csv("chosen.csv").set_index("mode")
    hmoe("export-domainbed", "sweep", "--algorithm", "HMOE-DN")
    for mode in ("mix", "max", "ood"):
        lines = [
            line
            for line in read(tmp_path / "sweep")
            if line["args"]["algorithm"] == f"HMOE-DN-{mode.upper()}"
        ]
        assert len(lines) == 2 * 2
        assert chosen.accuracy[mode] == domainbed_choice(
            lines, lines[0]["args"]["test_envs"][0], "oracle"
        )
    hmoe("select", "--rule", "leave-one-domain-out", fails="photo and one more .missing: photo\\+")
    hmoe("train", "--algorithm", "ERM", "--test-domain", "photo", *TINY)
    hmoe("export-domainbed", "other", fails="evaluate=all")
    assert "2 runs in 6 folders" in (
        told := hmoe("export-domainbed", "those", "--where", "evaluate=all")
    )
    assert "not of DigitDomainsTiny unless" in told
    assert "missing: ERM on photo, seed 0, draw 1 of 2" in hmoe("select")
    assert not (tmp_path / "other").exists()
    hmoe("select", "--algorithm", "HMOE", fails="Valid: ERM, HMOE-DN")
    hmoe(
        *"train --algorithm ERM --test-domain photo --test-domain plain".split(),
        *TINY,
        "--n-hparams",
        2,
        fails="one --test-domain",
    )


@pytest.mark.parametrize(
    "text, name, said",
    [
        (
            "class Mine: pass",
            "Mine",
            r"no algorithm 'Mine' \(Mine exists, but is not a subclass of Algorithm\)",
        ),
        (
            "x = 1\ndef (",
            "Mine",
            r"algorithm file my own.py cannot be imported: SyntaxError: [^()]+ \(line 2\)\. Fix: "
            r"correct that line of my own.py",
        ),
        (
            "\nimport nothing_of_that_name",
            "Mine",
            r"ModuleNotFoundError: .* \(line 2\)\. Fix: correct that line of my own.py",
        ),
        (MINE, "My Mine", r"no algorithm 'My Mine'\. Fix: use one of its algorithms: Mine"),
        (None, "Mine", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_such_algorithm_is_refused_in_a_line(hmoe, tmp_path, text, name, said):
    if text:
        (tmp_path / "my own.py").write_text(text)
    hmoe("train", "--algorithm", f"my own.py:{name}", "--test-domain", "photo", *TINY, fails=said)


@pytest.mark.parametrize(
    "body, line, said",
    [
        (
            "    def __init__(self, *given):\n        super().__init__(*given)\n        "
            "self.depth = self.hparams['deep']",
            9,
            r"KeyError: 'deep'",
        ),
        (
            "    def loss(self, minibatches):\n        return {'loss': minibatches.mean()}",
            8,
            "AttributeError",
        ),
        (
            "    def predict(self, x):\n        assert self.training\n        return "
            "super().predict(x)",
            8,
            "AssertionError",
        ),
        *(
            (f"    def {start}\n        raise SystemExit(0)", 8, "SystemExit: 0")
            for start in ("__init__(self, *given):", "loss(self, batches):", "predict(self, x):")
        ),
    ],
    ids=["construction", "update", "evaluation", "exit 1", "exit 2", "exit 3"],
)
def test_a_mistake_in_an_own_algorithm_names_its_file_and_line(hmoe, tmp_path, body, line, said):
    (tmp_path / "mine.py").write_text(MINE + "\n" + body + "\n")
    text = (tmp_path / "mine.py").read_text().splitlines()[line - 1].strip()
    train = ("train", "--algorithm", "mine.py:Mine", "--test-domain", "photo", *TINY)
    printed = hmoe(*train, fails=said)
    (record,) = RunStore().scan()[0]
    assert record["status"] == "failed"
    assert f"algorithm Mine failed in line {line} of mine.py (`{text}`): " in record["reason"]
    assert "Fix: correct that line" in record["reason"]
    assert "\n" not in record["reason"]
    assert str(tmp_path) not in record["reason"]
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("line", ["return {'loss': minibatches.mean()}", "raise SystemExit(0)"])
def test_a_mistake_in_an_own_algorithm_is_named_by_a_worker_too(hmoe, tmp_path, line):
    (tmp_path / "mine.py").write_text(f"{MINE}\n    def loss(self, minibatches):\n        {line}\n")
    hmoe(
        "sweep",
        "digits_table",
        "--profile",
        "smoke",
        "--jobs",
        1,
        "--device",
        "cpu",
        "--algorithm",
        "mine.py:Mine",
        fails=re.escape(f"line 8 of mine.py (`{line}`)"),
    )


@pytest.mark.parametrize(
    "body, said",
    [
        (
            "    def update(self, minibatches, unlabeled=None):\n        return "
            "super().loss(minibatches)['loss']",
            "not a dictionary of numbers. Fix",
        ),
        (
            "    def loss(self, minibatches):\n        return super().loss(minibatches)['loss']",
            "loss of Mine must return a dictionary",
        ),
    ],
    ids=["update", "loss"],
)
def test_an_update_that_returns_a_tensor_is_refused_at_once(hmoe, tmp_path, body, said):
    (tmp_path / "mine.py").write_text(MINE + "\n" + body + "\n")
    hmoe("train", "--algorithm", "mine.py:Mine", "--test-domain", "photo", *TINY, fails=said)
    (record,) = RunStore().scan()[0]
    assert record["checkpoints"] == []
    assert said in record["reason"]


@pytest.mark.slow
def test_an_algorithm_from_a_file_in_a_sweep_and_after_the_file_changed(hmoe, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    sweep = (
        "sweep",
        "digits_table",
        "--profile",
        "smoke",
        "--jobs",
        2,
        "--device",
        "cpu",
        "--algorithm",
        "mine.py:Mine",
    )
    assert "4 of 4 runs complete" in hmoe(*sweep)
    assert "0 to train" in hmoe(*sweep)
    old = RunStore().scan()[0]
    assert {r["config"]["algorithm"] for r in old} == {"Mine (mine.py)"}
    assert old[0]["config"]["hparams"]["strength"] == 0.5
    assert {r["config"]["trial_seed"] for r in old} == {0}
    train = (
        *(
            "train --algorithm mine.py:Mine --dataset DigitDomainsTiny --test-domain "
            "photo --network small_cnn --steps"
        ).split(),
        11,
        "--checkpoint-frequency",
        5,
        *"--device cpu --set lr=0.003 --set batch_size=16 --determinism portable".split(),
    )
    hmoe(*train)
    assert "Mine" in hmoe("select"), "the sweep's run was trained again"
    assert len(RunStore().scan()[0]) == 4, "the sweep's run was trained again"
    (tmp_path / "mine.py").write_text(MINE + "# a remark\n")
    hmoe(*train)
    assert len(RunStore().scan()[0]) == 4, "a remark is no other algorithm"
    (tmp_path / "mine.py").write_text(MINE + "Mine.changed = True\n")
    hmoe(*train)
    now = RunStore().scan()[0]
    assert len(now) == 5
    assert {r["run_id"] for r in old} < {r["run_id"] for r in now}
    hmoe("select", fails="runs of Mine .mine.py. differ in algorithm_source")
    for key in {r["config"]["algorithm_source"] for r in now}:
        assert "Mine" in hmoe("select", "--where", f"algorithm_source={key}")
    hmoe(*train, "--set", "strengh=1", fails="strength")
    hmoe(*train, "--set", "strength=much", fails="strength must be float")
    hmoe(*train, "--set", "strength=true", fails="strength must be float")


def test_code_that_came_with_a_store_is_run_only_if_it_is_trusted(hmoe, tmp_path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').close()\n{MINE}")
    hmoe("train", "--algorithm", "mine.py:Mine", "--test-domain", "photo", *TINY)
    (record,) = RunStore().scan()[0]
    sample_tree(tmp_path / "pictures", per_class=1, size=32)
    predict = ("predict", "pictures", "--model", record["run_id"], "--device", "cpu")
    key = record["config"]["algorithm_source"]
    del sys.modules[f"hmoe_own_{key}_mine_py"], ALGORITHMS["Mine (mine.py)"]  # another process
    (tmp_path / "ran").unlink()
    hmoe(*predict, fails=rf"Mine .mine.py. is code .*algorithms/{key}.py, .*Fix: .*--trust-code")
    with pytest.raises(HmoeError, match="trust_code=True"):
        load_model(record["run_id"])
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "predictions.csv").exists()
    assert "8 images in predictions.csv" in hmoe(*predict, "--trust-code")
    assert (tmp_path / "ran").exists()
    load_model(record["run_id"])  # its file is known to this process by now


SHADOWS = """
title = "three of one name"
algorithms = ["ERM", "shadow.py:ERM", "other.py:ERM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["photo"]
seeds = 1
steps = 2
checkpoint_frequency = 1
network = "small_cnn"
hparams.all.batch_size = 4
"""


@pytest.mark.slow
def test_algorithms_of_one_name_are_trained_beside_each_other(hmoe, tmp_path):
    alone = make_config("ERM", "DigitDomainsTiny", ["photo"], network="small_cnn").run_id
    for name in ("shadow", "other", "else/shadow"):
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
        text = "from hmoe_repro.algorithms import base\n"
        text += f"class ERM(base.ERM): place = {name!r}\n"
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "study.toml").write_text(SHADOWS)
    assert "3 of 3 runs complete" in hmoe("sweep", "study.toml", "--jobs", 1, "--device", "cpu")
    names = {"ERM", "ERM (shadow.py)", "ERM (other.py)"}
    configs = [RunConfig.from_dict(record["config"]) for record in RunStore().scan()[0]]
    assert {s.algorithm: bool(s.algorithm_source) for s in configs} == {
        n: n != "ERM" for n in names
    }
    for listed in (hmoe("select", "study.toml"), hmoe("runs")):
        assert all(name in listed for name in names)
        assert re.search(r"\bERM +[^ (]", listed)
    assert get_algorithm("ERM").__module__ == "hmoe_repro.algorithms.base"
    assert make_config("ERM", "DigitDomainsTiny", ["photo"], network="small_cnn").run_id == alone
    (tmp_path / "study.toml").write_text(SHADOWS.replace("other.py", "else/shadow.py"))
    hmoe("plan", "study.toml", fails="have the same name, by which .* Fix: rename one of them")


def test_guests_are_trained_as_erm_is(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE.replace("Mine", "Guest"))
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    study = study_configs("smoke-digits")
    erm, guests = (
        [s for s in study if s.algorithm == "ERM"],
        only_algorithms(study, [f"{tmp_path}/mine.py:Guest"]),
    )
    assert [(g.test_domains, g.trial_seed, g.steps, g.network, g.hparams) for g in guests] == [
        (s.test_domains, s.trial_seed, s.steps, s.network, s.hparams | {"strength": 0.5})
        for s in erm
    ]
    assert guests[0].algorithm_source
    assert only_algorithms(study, ["ERM"]) == erm
    with pytest.raises(HmoeError, match="none of ERM"):
        only_algorithms(study_configs("smoke-balance"), [f"{tmp_path}/mine.py:Guest"])


def test_a_folder_of_images_gets_its_table(hmoe, tmp_path):
    sample_tree(tmp_path / "pictures", per_class=4, size=32)
    for seed in (0, 1):
        hmoe(
            "train",
            "--algorithm",
            "ERM",
            "--dataset",
            tmp_path / "pictures",
            "--test-domain",
            "sketch",
            "--network",
            "image_cnn",
            "--resolution",
            32,
            "--steps",
            2,
            "--device",
            "cpu",
            "--set",
            "batch_size=2",
            "--seed",
            seed,
        )
    said, records = hmoe("select", "--dataset", "pictures"), RunStore().scan()[0]
    assert f"trial seeds: 2, test images: {records[0]['test_size']};" in said
    assert "no run holds out" in said
