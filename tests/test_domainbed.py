"""The export, read by an independent reader that does what DomainBed's collect_results does."""

import copy
import json
from collections import defaultdict

import numpy as np
import pytest

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.studies.domainbed_export import domainbed_lines, export_domainbed
from hmoe_repro.training.selection import RULES, select_model

DOMAINS = ["negative", "photo", "plain", "sketch"]


def record(held_out, trial=0, hseed=0, modes=("default",), seed=0):
    rng = np.random.default_rng([seed, trial, hseed, *(DOMAINS.index(d) for d in held_out)])
    points = [
        {
            "step": 100 * t,
            "losses": {"loss": float(rng.random())},
            "accuracies": {
                d: {s: {m: float(rng.integers(101)) / 100 for m in modes} for s in ("in", "out")}
                for d in DOMAINS
            },
        }
        for t in range(6)
    ]
    return {
        "run_id": f"{trial}{hseed}{''.join(str(DOMAINS.index(d)) for d in held_out)}".ljust(
            12, "a"
        ),
        "status": "complete",
        "checkpoints": points,
        "selected": {m: {} for m in modes},
        "config": {
            "algorithm": "ERM" if len(modes) == 1 else "HMOE-DN",
            "dataset": "DigitDomains",
            "test_domains": list(held_out),
            "trial_seed": trial,
            "hparams_seed": hseed,
            "steps": 501,
            "checkpoint_frequency": 100,
            "hparams": {"lr": 1e-3},
        },
    }


def read(folder):
    "Lines of every run, as DomainBed's load_records reads them."
    return [
        json.loads(line)
        for run in sorted(folder.iterdir())
        for line in (run / "results.jsonl").read_text().splitlines()
    ]


def by_run(lines):
    runs = defaultdict(list)
    for line in lines:
        runs[
            line["args"]["output_dir"],
            tuple(line["args"]["test_envs"]),
            line["args"]["hparams_seed"],
        ].append(line)
    return runs


def domainbed_choice(lines, test, rule):
    "Test accuracy by DomainBed's three selection methods, by the protocol and its order of ties."
    found = []
    for (_, envs, hseed), points in by_run(lines).items():
        if list(envs) != [test]:
            continue
        points = sorted(points, key=lambda p: p["step"])
        if rule == "oracle":
            scored = [(points[-1][f"env{test}_out_acc"], points[-1])]
        elif rule == "training-domain":
            scored = [
                (np.mean([p[f"env{i}_out_acc"] for i in range(4) if i != test]), p) for p in points
            ]
        else:
            pairs = {
                v: {
                    p["step"]: p
                    for (_, e, h), ps in by_run(lines).items()
                    if set(e) == {test, v} and h == hseed
                    for p in ps
                }
                for v in range(4)
                if v != test
            }
            scored = [
                (np.mean([pairs[v][p["step"]][f"env{v}_in_acc"] for v in pairs]), p) for p in points
            ]
        best = max(score for score, _ in scored)
        found.append(
            (best, hseed, next(p for score, p in scored if score == best)[f"env{test}_in_acc"])
        )
    return max(found)[2]


@pytest.mark.parametrize("rule", RULES)
def test_an_independent_reader_chooses_what_we_choose(rule, tmp_path):
    singles, pairs = [["sketch"], ["photo"]], [[a, b] for a in DOMAINS for b in DOMAINS if a < b]
    records = [record(held_out, hseed=h) for h in range(3) for held_out in singles + pairs]
    export_domainbed(records, tmp_path / "sweep")
    lines = read(tmp_path / "sweep")
    assert len(lines) == 6 * len(records)
    for test in ("sketch", "photo"):
        assert select_model(records, test, rule)["test_accuracy"] == domainbed_choice(
            lines, DOMAINS.index(test), rule
        )


def test_modes_become_algorithms(tmp_path):
    folders = export_domainbed(
        [record(["sketch"], modes=("mix", "max", "ood"))], tmp_path / "sweep"
    )
    assert {
        json.loads((f / "results.jsonl").read_text().splitlines()[0])["args"]["algorithm"]
        for f in folders
    } == {"HMOE-DN-MIX", "HMOE-DN-MAX", "HMOE-DN-OOD"}
    assert all((f / "done").exists() for f in folders)


def test_what_cannot_be_exported_is_refused_before_anything_is_written(tmp_path):
    lacking = copy.deepcopy(record(["sketch"]))
    del lacking["checkpoints"][3]["accuracies"]["photo"]["in"]
    with pytest.raises(
        HmoeError, match=r"at step 300 it has no accuracy of photo \(in\).*evaluate=all"
    ):
        export_domainbed([record(["photo"]), lacking], tmp_path / "new")
    with pytest.raises(HmoeError, match="no complete run"):
        export_domainbed([], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(HmoeError, match="thesis.tex"):
        export_domainbed([record(["photo"])], tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_an_export_can_be_repeated_also_after_collect_results(tmp_path):
    (place,) = export_domainbed([record(["photo"])], tmp_path / "sweep")
    before = (place / "results.jsonl").read_bytes()
    for name in ("results.txt", "results.tex"):
        (tmp_path / "sweep" / name).write_text("its tables")
    export_domainbed([record(["photo"]), record(["sketch"])], tmp_path / "sweep")
    assert (place / "results.jsonl").read_bytes() == before
    with pytest.raises(HmoeError, match="holds other things"):
        export_domainbed([record(["sketch"])], tmp_path / "sweep")


@pytest.mark.parametrize(
    "change", [{"steps": 9}, {"algorithm_source": "0123456789ab"}, {"hparams": {"lr": 0.5}}]
)
def test_runs_that_domainbed_would_take_for_one_are_refused(tmp_path, change):
    one = record(["photo"])
    other = one | {"run_id": "b" * 12, "config": one["config"] | change}
    (name,) = change
    with pytest.raises(HmoeError, match=f"differ only in {name}.*--where {name}="):
        export_domainbed([one, other], tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_another_name_is_one_of_domainbeds_with_room_for_all_domains(tmp_path):
    "Only the name changes; two data sets, or columns that are missing, are refused."
    records = [record([domain]) for domain in DOMAINS]
    export_domainbed(records, tmp_path / "own")
    export_domainbed(records, tmp_path / "pacs", "PACS")
    own, named = read(tmp_path / "own"), read(tmp_path / "pacs")
    assert {line["args"].pop("dataset") for line in own} == {"DigitDomains"}
    assert {line["args"].pop("dataset") for line in named} == {"PACS"}
    assert own == named
    other = copy.deepcopy(record(["photo"], trial=1))
    other["config"]["dataset"] = "DigitDomainsTiny"
    for given, name, said in (
        (
            records,
            "ColoredMNIST",
            "has 4 domains, .* have 3. Fix: another name: RotatedMNIST, VLCS",
        ),
        ([*records, other], "PACS", "DigitDomains and DigitDomainsTiny would be one.*--dataset"),
        (records, "Digits", "unknown data set of DomainBed 'Digits'"),
    ):
        with pytest.raises(HmoeError, match=said):
            export_domainbed(given, tmp_path / "new", name)
    assert not (tmp_path / "new").exists()


def test_names_are_spelled_as_domainbed_spells_them():
    made = record(["photo"])
    for ours, theirs in (("ERM++", "ERMPlusPlus"), ("IB-IRM", "IB_IRM"), ("IRM", "IRM")):
        made["config"]["algorithm"] = ours
        assert {line["args"]["algorithm"] for line in domainbed_lines(made, "default")} == {theirs}
