"""DMG's tables: views of records, masks on every domain, published rows; numbers by hand."""

import pandas as pd
import pytest

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.hparams import merge_hparams
from hmoe_repro.analysis.published import (
    comparison,
    mode_lines,
    own_trainings,
    stated_rows,
    with_paper_column,
)
from hmoe_repro.analysis.results import frame_of, results
from hmoe_repro.analysis.tables import accuracy_table, in_domain_view, only_modes
from hmoe_repro.networks.registry import network_options
from hmoe_repro.report.page import Page
from hmoe_repro.studies.artefacts import ARTEFACTS, artefact_studies, artefact_study
from hmoe_repro.studies.studies import count_runs
from hmoe_repro.studies.study_file import check_study, read_study
from hmoe_repro.training.run_config import RunConfig

DOMAINS = ("negative", "photo", "plain", "sketch")


def record(algorithm, target, seed, network="small_cnn", protocol=True, **accuracies):
    "A complete run; accuracies of its modes on the target, and 0.1 more in domain."
    asked = {"protocol": "dmg"} if protocol else {}
    asked |= dict(algorithm=algorithm, dataset="DigitDomains", dataset_fingerprint="0")
    asked |= dict(test_domains=(target,), trial_seed=seed, network=network)
    config = RunConfig(resolution=16, steps=320, **asked)
    chosen = {"step": 9, "validation_accuracy": 0.9}
    made = {
        "run_id": config.run_id,
        "status": "complete",
        "config": config.to_dict(),
        "checkpoints": [],
        "selected": {m: chosen | {"test_accuracy": a} for m, a in accuracies.items()},
        "test_size": 450,
        "in_domain_size": 268,
    }
    if protocol:
        made["protocol"] = {"name": "dmg", "epochs": 20, "splits": "72/8/20 by trial seed"}
        made["in_domain"] = {m: chosen | {"accuracy": a + 0.1} for m, a in accuracies.items()}
    return made


def masked(target, seed, by_mask, combined=0.5):
    "A run of DMG with the accuracies of its masks, domain by domain."
    sources = [d for d in DOMAINS if d != target]
    accuracy = {
        domain: {"split": "in" if domain == target else "test", "images": 9, "by_mask": list(row)}
        for domain, row in zip((*sources, target), by_mask)
    }
    at = {d: {m["split"]: {"pred-ens": combined}} for d, m in accuracy.items()}
    return record("DMG", target, seed, **{"pred-ens": combined, "mask-ens": combined}) | {
        "masks": {"domains": sources, "accuracy": accuracy},
        "checkpoints": [{"step": 9, "losses": {}, "accuracies": at}],
    }


def test_modes_that_are_not_asked_for_are_left_out_but_never_the_only_one():
    both = [
        record("Aggregate", "photo", 0, default=0.5),
        record("DMG", "photo", 0, **{"pred-ens": 0.6, "mask-ens": 0.7}),
    ]
    assert list(accuracy_table(only_modes(frame_of(both), "mask-ens"))["mode"]) == [
        "default",
        "mask-ens",
    ]
    assert list(both[1]["selected"]) == ["pred-ens", "mask-ens"]


def several(**gaps):
    "Runs of DMG on two targets and three seeds; modes lie above averaged predictions by `gaps`."
    runs = []
    for target, shift in (("photo", 0.0), ("sketch", 0.01)):
        for seed in range(3):
            level = 0.6 + 0.05 * seed
            moved = level + shift + 0.0001 * (seed - 1)  # equal gaps have no interval
            modes = {mode.replace("_", "-"): moved + gap for mode, gap in gaps.items()}
            runs.append(record("DMG", target, seed, **{"pred-ens": level}, **modes))
    return frame_of(runs)


def test_modes_are_compared_within_one_model():
    "The seeds lie ten times as far apart as the modes, and the pairs do not see it."
    places = ("on the target", "on training domains")
    outside, inside = mode_lines(several(mask_ens=0.004), "mask-ens", *places)
    said = "On the target, MASK-ENS minus PRED-ENS is +0.9 (95 % CI +0.9 to +0.9) points"
    assert outside.startswith(said)
    assert "significant (small_cnn, 6 models, 3 seeds)" in outside
    assert inside.startswith("On training domains, MASK-ENS minus PRED-ENS is +0.9")
    (known,) = mode_lines(several(kd=-0.02), "kd", "on the training domains")
    assert known.startswith("On the training domains, KD minus PRED-ENS is -1.5 (95 % CI -1.5")
    assert mode_lines(several(mask_ens=0.1), "kd", "on the training domains") == []
    equal, _ = mode_lines(several(mask_ens=-0.005), "mask-ens", *places)
    assert "points, undecided (small_cnn, 6 models" in equal
    assert "significant" not in equal


@pytest.mark.parametrize("study", ["pacs-dmg", "quick-dmg"])
@pytest.mark.parametrize("view", ["target", "training domains"])
def test_tables_with_other_rows_agree_about_the_stated_contrast(study, view):
    """Tables 2 and 5 (and 3 and 5) show DMG against Aggregate among different rows."""
    frame = results(study)
    if view == "training domains":
        frame = in_domain_view(frame)
    stated = {}
    for modes in (("pred-ens",), ("pred-ens", "kd"), ("pred-ens", "mask-ens", "kd")):
        rows = only_modes(frame, *modes)
        assert stated_rows(rows, "Aggregate") == [("DMG", "pred-ens")]
        table = comparison(rows, "Aggregate")
        averages = table[table.test_domain == "Average"]
        (row,) = averages[averages.stated].itertuples()
        assert row.p_holm == row.p
        assert set(averages[~averages.stated].corrected_for) == {len(averages) - 1}
        stated[modes] = row.difference, row.p_holm, row.significant
    assert len(set(stated.values())) == 1
    if view == "target":
        assert row.significant  # +3.2 points on PACS, +2.5 on digits


def test_accuracies_on_training_domains_take_the_place_of_those_on_the_target():
    frame = several()
    inside = in_domain_view(frame)
    assert (100 * inside.accuracy).round(6).tolist() == (100 * frame.accuracy + 10).round(
        6
    ).tolist()
    assert set(inside.test_size) == {268}
    assert set(frame.test_size) == {450}


PAGES = [f"dmg_table{n}" for n in range(1, 6)]


@pytest.mark.parametrize("name", PAGES)
def test_every_table_has_its_studies(name):
    artefact = ARTEFACTS[name]
    data = "domainnet" if name[-1] in "1345" else "pacs"
    assert artefact_study(name, "paper") == f"paper-dmg-{data}"
    assert "paper" in artefact.optional
    if "quick" in artefact.profiles:
        assert artefact_studies(name, "quick") == ["quick-dmg"]
    assert ("quick" in artefact.optional) == (name != "dmg_table1")


def test_the_papers_studies_are_whole():
    counts = {"paper-dmg-domainnet": 3 * 5 * 6, "paper-dmg-pacs": 3 * 3 * 4}
    for name, count in counts.items():
        check_study(name)
        study = read_study(name)
        assert count_runs(name) == count
        assert len(study.runs) == 3
        assert [runs.network for runs in study.runs] == ["alexnet", "resnet18", "resnet50"]
        assert {(r.protocol, r.epochs, r.resolution) for r in study.runs} == {("dmg", 50, 224)}
    settings = read_study("paper-dmg-domainnet").runs[0].settings
    assert settings("DMG", {})["schedule"] == "inverse"
    assert settings("DMG", {})["near_zero"]
    assert "schedule" not in settings("Aggregate-SGD", {})


@pytest.mark.parametrize("name", ["paper-dmg-domainnet", "paper-dmg-pacs"])
def test_the_papers_baselines_train_alexnet_with_its_dropout_and_dmg_without(name):
    "'Treating dropout as usual' (section 4.1); the networks that are built say so."
    dropout = {}
    for runs in read_study(name).runs:
        for algorithm in runs.algorithms:
            given = runs.settings(algorithm, {}) | {"network": runs.network}
            merged = merge_hparams(get_algorithm(algorithm).HPARAMS, given)
            dropout[runs.network, algorithm] = network_options(merged)["dropout"]
    assert {algorithm for _, algorithm in dropout} >= {"Aggregate", "Multi-Headed", "DMG"}
    for (network, algorithm), p in dropout.items():
        assert p == (0.5 if network == "alexnet" and algorithm != "DMG" else 0), (
            network,
            algorithm,
        )


def test_the_papers_numbers_beside_ours_are_its_own_training_with_the_closest_network():
    frame = several().assign(network="image_cnn")
    numbers = own_trainings("DMG Table 2", frame)
    ours = pd.DataFrame({"algorithm": ["DMG", "SWAD"], "mode": ["pred-ens", "default"]})
    ours["Average"] = "70.0 ± 0.1"
    beside = with_paper_column(ours, numbers, True)
    assert list(beside) == ["algorithm", "mode", "Average", "paper (other protocol)"]
    assert beside["paper (other protocol)"].tolist() == [
        "73.3",
        "–",
    ]  # AlexNet's, not a mean of networks
    several_networks = own_trainings(
        "DMG Table 2", pd.DataFrame({"network": ["alexnet", "resnet50"]})
    )
    by_network = pd.concat([ours[:1]] * 2).assign(network=["resnet50", "alexnet"])
    assert with_paper_column(by_network, several_networks, False).paper.tolist() == ["83.4", "73.3"]


def test_a_further_picture_of_a_page_has_a_finding_of_its_own(tmp_path):
    page = Page("dmg_short", "quick", output=str(tmp_path))
    page.finding = "DMG is above Aggregate"
    rows = only_modes(page.frame, "pred-ens")
    page.contrasts("Aggregate", frame=rows)
    page.contrasts("Aggregate", frame=in_domain_view(rows), part="inside")
    assert page.findings["dmg_short.png"] == "DMG is above Aggregate"
    assert page.findings["dmg_short_inside.png"] == "1 of 2 rows differ from Aggregate"
