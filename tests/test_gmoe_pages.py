"""GMoE's pages: rows that are networks, several data sets, one training domain, costs that are
quoted, and pages of which nothing was run."""

import copy
import json
import math

import invented
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from hmoe_repro.analysis.gmoe_tables import (
    MACS,
    PARAMETERS,
    accuracy_by_dataset,
    against_published,
    between_rows,
    draw_accuracy,
    draw_sizes,
    family,
    improvements,
    learned_line,
    limits_by_dataset,
    lines_against,
    name_by_network,
    name_by_placement,
    paired_by_dataset,
    published_line,
    renamed,
    resnet50_weights,
    single_source_results,
    size_table,
    sized_averages,
    undertrained,
)
from hmoe_repro.analysis.protocol_diff import study_diff
from hmoe_repro.analysis.published import (
    CLASSES,
    min_validation_accuracy,
    trained_verdict,
    undertrained_rows,
)
from hmoe_repro.analysis.results import load_studies
from hmoe_repro.analysis.statistics import minimum_detectable_difference
from hmoe_repro.analysis.tables import MODE_ORDER, run_results
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import repo_root
from hmoe_repro.data.benchmarks import KNOWN
from hmoe_repro.data.registry import DATASETS
from hmoe_repro.networks.model_size import multiply_accumulates, network_size, parameters
from hmoe_repro.report.gallery import evidence_line
from hmoe_repro.report.not_run import not_run, not_run_line, quoted_cost, quoted_step
from hmoe_repro.report.render import page_texts, render
from hmoe_repro.studies.artefacts import ARTEFACTS
from hmoe_repro.training.run_config import RunSpec

pytestmark = pytest.mark.usefixtures("warm_kernels")
NETWORKS = {"ERM": "small_cnn", "ERM-ViT": "small_vit", "GMoE": "gmoe_small"}


def changed(record, **spec):
    "A record with another specification, and the name that belongs to it."
    spec = record["spec"] | spec
    return record | {"spec": spec, "run_id": RunSpec.from_dict(spec).run_id}


def run(algorithm, domain, seed, accuracy=None, dataset="DigitDomains", **hparams):
    "A whole run of a network with or without experts."
    random = np.random.default_rng([seed, len(domain), len(algorithm)])
    made = invented.record("ERM", domain, seed, random)
    if algorithm == "GMoE":
        hparams = {"moe_router": "cosine", "moe_placement": "last-two"} | hparams
    if accuracy is not None:
        made["selected"]["default"]["test_accuracy"] = accuracy
    return changed(
        made,
        algorithm=algorithm,
        network=NETWORKS[algorithm],
        dataset=dataset,
        hparams=made["spec"]["hparams"] | hparams,
    )


def study(dataset="DigitDomains", levels=(0.50, 0.60, 0.62), domains=invented.DOMAINS, seeds=3):
    "Three networks on some domains; seeds lie a point apart."
    return [
        run(algorithm, domain, seed, level + 0.01 * (seed - 1), dataset)
        for algorithm, level in zip(NETWORKS, levels)
        for domain in domains
        for seed in range(seeds)
    ]


# Rows and tables


def test_rows_take_the_name_of_a_setting_and_records_stay_as_they_are():
    records = [run("GMoE", "photo", 0), run("GMoE", "photo", 0, moe_router="linear")]
    names = [r["spec"]["algorithm"] for r in renamed(records, name_by_placement)]
    assert names == ["gmoe_small, last-two, cosine", "gmoe_small, last-two, linear"]
    assert name_by_placement(run("ERM-ViT", "photo", 0)) == "ERM-ViT on small_vit"
    assert name_by_network(run("ERM", "photo", 0)) == "ERM on small_cnn"
    assert {r["spec"]["algorithm"] for r in records} == {"GMoE"}
    with pytest.raises(HmoeError, match="are both GMoE on photo"):
        run_results(records)
    assert len(run_results(renamed(records, name_by_placement))) == 2


@pytest.mark.parametrize(
    "network, kind",
    [
        ("resnet50", "conv"),
        ("alexnet", "conv"),
        ("small_cnn", "conv"),
        ("image_cnn", "conv"),
        ("deit_small", "vision"),
        ("gmoe_s16", "vision"),
        ("small_vit", "vision"),
    ],
)
def test_the_kind_of_a_network(network, kind):
    assert family(network).startswith(kind)


def test_one_data_set_has_its_domains_as_columns_and_transformers_first():
    table, numbers = accuracy_by_dataset(study())
    assert [*table] == [
        *("kind", "network", "algorithm", "mode"),
        *("negative", "photo", "plain", "sketch", "Average"),
    ]
    assert table.algorithm.tolist() == ["ERM-ViT", "GMoE", "ERM"]
    assert table.network.tolist() == ["small_vit", "gmoe_small", "small_cnn"]
    error = 100 * np.std([0.61, 0.62, 0.63]) / math.sqrt(3)
    assert table.Average[1] == f"62.0 ± {error:.1f}" and len(numbers) == 3 * 5


def test_a_part_of_the_domains_is_no_average_of_all():
    table, _ = accuracy_by_dataset(study(domains=("photo", "sketch")))
    assert table.columns[-1] == "Average of photo, sketch"


def test_several_data_sets_are_columns_of_averages():
    records = study() + study("DigitDomainsTiny", (0.30, 0.20, 0.40))
    table, numbers = accuracy_by_dataset(records)
    assert [*table][4:] == ["DigitDomains", "DigitDomainsTiny"] and len(numbers) == 6
    assert table.DigitDomainsTiny.str[:4].tolist() == ["20.0", "40.0", "30.0"]
    limits = limits_by_dataset(records)
    assert limits.dataset.tolist() == ["DigitDomains", "DigitDomainsTiny"]
    alone = minimum_detectable_difference(study()).detectable.iloc[-1]
    assert limits.detectable[0] == pytest.approx(alone)
    figure = draw_accuracy(records)
    assert [axis.get_title() for axis in figure.axes] == ["DigitDomains", "DigitDomainsTiny"]


def test_a_row_that_a_data_set_lacks_is_a_dash():
    records = study() + [r for r in study("DigitDomainsTiny") if r["spec"]["algorithm"] != "ERM"]
    table, _ = accuracy_by_dataset(records)
    assert table.set_index("algorithm").loc["ERM", "DigitDomainsTiny"] == "–"


def test_rows_called_by_their_network_need_no_column_for_it():
    table, _ = accuracy_by_dataset(renamed(study(), name_by_network))
    assert [*table][:3] == ["kind", "algorithm", "mode"]


def test_sentences_are_about_each_data_set_and_each_baseline_that_was_run():
    records = study() + study("DigitDomainsTiny", (0.30, 0.60, 0.62))
    lines = lines_against(records, "ERM-ViT", "ERM", "MIRO")
    assert [line.split(": ")[:2] for line in lines] == [
        ["DigitDomains", "Against ERM-ViT"],
        ["DigitDomains", "Against ERM"],
        ["DigitDomainsTiny", "Against ERM-ViT"],
        ["DigitDomainsTiny", "Against ERM"],
    ]
    assert "ERM (-10.0)" in lines[0] and "GMoE (+32.0)" in lines[3]
    assert lines_against(study(), "MIRO") == ["No verdict: no complete run of MIRO."]


def test_named_pairs_are_compared_with_what_is_detectable():
    records = validated(study(levels=(0.50, 0.60, 0.62)), **{"ERM-ViT": 0.7})
    pairs = ("GMoE", "ERM-ViT"), ("ERM-ViT", "ERM"), ("MIRO", "ERM")
    (line,) = between_rows(records, *pairs)
    limit = limits_by_dataset(records).detectable.iloc[-1]
    assert 2 < limit < 10
    assert line == (
        "GMoE − ERM-ViT: +2.0 points in average accuracy, within the minimum detectable difference "
        f"of {limit:.1f}; ERM-ViT − ERM: +10.0 points in average accuracy, larger in "
        f"size than the minimum detectable difference of {limit:.1f}; "
        "undertrained but included: ERM-ViT."
    )
    assert between_rows(records, *pairs, strictly=True) == []
    assert between_rows(validated(study(), GMoE=0.1), ("GMoE", "ERM")) == []
    several = study() + study("DigitDomainsTiny")
    found = between_rows(several, ("GMoE", "ERM"))
    assert [line.split(": ")[0] for line in found] == ["DigitDomains", "DigitDomainsTiny"]


def validated(records, **accuracies):
    "The same runs with these accuracies on validation images, by algorithm."
    for record in records:
        found = accuracies.get(record["spec"]["algorithm"], 0.9)
        record["selected"]["default"]["validation_accuracy"] = found
    return records


def test_nothing_is_decided_about_rows_that_hardly_trained():
    records = validated(study(), GMoE=0.4)
    assert undertrained(records) == [("DigitDomains", "GMoE")]
    assert "about them: GMoE (under 45 %)" in learned_line(records)
    (line,) = lines_against(records, "ERM")
    assert "different from ERM in average accuracy (more than" in line and "ERM-ViT (+10.0)" in line
    assert "GMoE (" not in line and "of 4 differences" in line
    assert line.endswith(" Excluded, because undertrained: GMoE.")
    limit = limits_by_dataset(records).detectable.iloc[-1]
    assert f"more than {limit:.1f} points" in line, "the limit of the table on the page"
    trained = [r for r in records if r["spec"]["algorithm"] != "GMoE"]
    assert limit == minimum_detectable_difference(trained).detectable.iloc[-1], (
        "of the compared rows"
    )
    (whole,) = lines_against(validated(records), "ERM")
    assert "GMoE (+12.0)" in whole and "of 8 differences" in whole and "Excluded" not in whole


def moded(records, **accuracies):
    "The records of HMOE-DN with modes of so high an accuracy on validation images."
    for record in records:
        if record["spec"]["algorithm"] == "HMOE-DN":
            chosen = record["selected"].pop("default")
            modes = {m: chosen | {"validation_accuracy": a} for m, a in accuracies.items()}
            record["selected"] |= modes
    return records


def named(record, algorithm):
    return record["spec"]["algorithm"] == algorithm


def test_a_mode_may_be_too_low_where_its_algorithm_has_learned():
    records = copy.deepcopy(validated(study(), GMoE=0.9))
    for record in records:
        if record["spec"]["algorithm"] == "GMoE":
            record["spec"]["algorithm"] = "HMOE-DN"
    records = moded(records, mix=0.9, max=0.85, ood=0.6)
    for record in records:  # what OOD reaches scatters over seeds, the other modes do not
        if record["spec"]["algorithm"] == "HMOE-DN":
            record["selected"]["ood"]["test_accuracy"] = 0.1 + 0.3 * record["spec"]["trial_seed"]
    assert undertrained(records, min_validation_accuracy) == []
    assert undertrained_rows(records) == [("HMOE-DN", "ood")]
    line = trained_verdict(records, "ERM")
    assert line.endswith("so it is not compared: HMOE-DN OOD (under 80 %).")
    assert "nothing is concluded" not in line and "HMOE-DN 90 %" in line
    apart, _, failing = line.split(" Accuracy on")[0].partition(" Excluded, because the mode ")
    means = {
        name: np.mean([r["selected"][mode]["test_accuracy"] for r in records if named(r, name)])
        for name, mode in (("HMOE-DN", "ood"), ("ERM", "default"))
    }
    gap = 100 * (means["HMOE-DN"] - means["ERM"])
    assert failing.endswith(f"are trained: HMOE-DN OOD ({gap:+.1f}).") and "OOD" not in apart
    without = [copy.deepcopy(r) for r in records]
    for record in without:
        record["selected"].pop("ood", None)
    limit = minimum_detectable_difference(without).detectable.iloc[-1]
    assert (
        minimum_detectable_difference(records, undertrained_rows(records)).detectable.iloc[-1]
        == limit
    )
    assert minimum_detectable_difference(records).detectable.iloc[-1] > 3 * limit
    assert trained_verdict(without, "ERM").split(" Accuracy on")[0] == apart
    young = learned_line(moded(copy.deepcopy(validated(study(), GMoE=0.9)), mix=0.9))
    assert "Undertrained" not in young
    everything = [(name, mode) for name in ("ERM", "ERM-ViT", "HMOE-DN") for mode in MODE_ORDER]
    whole = minimum_detectable_difference(records, everything)
    assert whole.equals(minimum_detectable_difference(records)), (
        "of all rows, where none is compared"
    )


def test_a_page_may_ask_for_a_least_accuracy():
    records = validated(study(), GMoE=0.79)
    assert undertrained(records) == [] == undertrained(records, lambda dataset: 79)
    assert undertrained(records, min_validation_accuracy) == [("DigitDomains", "GMoE")]
    assert "about them: GMoE (under 80 %)" in learned_line(records, min_validation_accuracy)
    line = learned_line(records)
    assert line.endswith(
        " Undertrained but included, so conclusions hold for this length of training only: "
        "GMoE (under 80 %)."
    )
    enough = validated(study(), GMoE=0.8)
    assert undertrained(enough, min_validation_accuracy) == [] and learned_line(enough).endswith(
        "GMoE 80 %."
    )
    assert undertrained(validated(study("mine"), GMoE=0.46), min_validation_accuracy) == []


def test_from_where_a_row_is_trained():
    "Seven ninths of the way from guessing to all true labels, of which colour has three of four."
    assert min_validation_accuracy("PACS") == pytest.approx(100 / 7 + (100 - 100 / 7) * 7 / 9)
    assert (
        min_validation_accuracy("ColoredMNIST")
        == min_validation_accuracy("ColoredDigits")
        == pytest.approx(69.4444, abs=1e-4)
    )
    assert (
        min_validation_accuracy("RotatedDigits")
        == min_validation_accuracy("DigitDomains")
        == pytest.approx(80)
    )
    assert min_validation_accuracy("a folder of one's own") == 0
    made_of_digits = {name for name in DATASETS if name not in KNOWN}
    assert made_of_digits and made_of_digits <= {*CLASSES}


def test_nothing_is_decided_against_a_baseline_that_hardly_trained():
    records = validated(study(), GMoE=0.4)
    lines = lines_against(records, "GMoE", "ERM")
    assert lines[0] == "Against GMoE: nothing is compared, because GMoE is undertrained."
    assert lines[1].startswith("Against ERM: Significantly different")
    alone = validated(records, GMoE=0.4, **{"ERM-ViT": 0.3})
    (line,) = lines_against(alone, "ERM")
    wanted = "nothing is compared, because every other row is undertrained (ERM-ViT, GMoE)."
    assert line == f"Against ERM: {wanted}"


def test_names_of_settings_are_those_of_the_rows_that_are_left_out():
    rows = renamed(validated(study(), GMoE=0.4), name_by_network)
    (line,) = lines_against(rows, "ERM on small_cnn")
    assert line.endswith("undertrained: GMoE on gmoe_small.")
    assert "GMoE on gmoe_small (under 45 %)" in learned_line(rows)


def test_a_row_may_have_trained_on_one_data_set_alone():
    poor = validated(study("DigitDomainsTiny"), GMoE=0.4)
    records = validated(study()) + poor
    assert undertrained(records) == [("DigitDomainsTiny", "GMoE")]
    assert "about them: DigitDomainsTiny, GMoE (under 45 %)." in learned_line(records)
    lines = lines_against(records, "ERM")
    assert "Excluded" not in lines[0] and "Excluded" in lines[1]


def test_pairs_to_a_baseline_of_each_data_set():
    pairs = paired_by_dataset(study(), "ERM-ViT").set_index("algorithm")
    assert pairs.difference["GMoE"] == pytest.approx(2) and pairs.pairs["GMoE"] == 12
    assert pairs.difference["ERM"] == pytest.approx(-10) and pairs.ahead["ERM"] == 0
    assert paired_by_dataset(study(), "MIRO").empty


# Beside the paper


def test_only_whole_rows_are_set_beside_the_paper():
    numbers = pd.DataFrame(
        {
            "dataset": "DigitDomains",
            "algorithm": ["ERM", "GMoE", "Fish"],
            "mode": "default",
            "value": [49.5, 52.0, 40.0],
        }
    )
    table = against_published(study(), numbers).set_index("algorithm")
    assert table.difference.round(6).to_dict() == {"ERM": 0.5, "GMoE": 10.0}
    limit = minimum_detectable_difference(study()).detectable.iloc[-1]
    assert table.detectable["ERM"] == pytest.approx(limit) and 0.5 < limit < 10
    line = published_line(table.reset_index())
    assert line.startswith("Against the paper: 1 of 2 averages") and "+10.0 points (GMoE" in line
    gone = [r for r in study() if (r["spec"]["algorithm"], r["spec"]["trial_seed"]) != ("GMoE", 2)]
    assert against_published(gone, numbers).algorithm.tolist() == ["ERM"]
    assert published_line(against_published(study(), numbers[2:])).startswith("No row")


def test_departures_from_the_file_of_a_study_are_named_with_their_owners():
    records = [
        changed(r, dataset="PACS", test_domains=["photo"], network="resnet50", steps=5001)
        for r in study(domains=("photo",), seeds=2)
        if r["spec"]["algorithm"] == "ERM"
    ]
    lines = study_diff(records, "paper-pacs")
    assert "trial seeds: 2 instead of 3" in lines and "not run: HMOE-DL, HMOE-DN, HMOE-ND" in lines
    assert "initial weights: random instead of pretrained" in lines
    assert "test domains of PACS not run: art_painting, cartoon, sketch" in lines
    assert not any(line.startswith(("updates:", "network:", "data:")) for line in lines)
    other = [changed(r, algorithm="GMoE", steps=7) for r in records[:1]] + records[1:]
    assert "not in the paper's table: GMoE" in study_diff(other, "paper-pacs")
    with pytest.raises(HmoeError, match="unknown study"):
        study_diff(records, "paper-nothing")


def test_a_part_of_the_data_sets_takes_the_place_of_none():
    records = [
        changed(
            r, dataset="PACS", test_domains=["photo"], network="deit_small", algorithm="ERM-ViT"
        )
        for r in study(domains=("photo",))[:3]
    ]
    lines = study_diff(records, "paper-gmoe")
    (line,) = [line for line in lines if line.startswith("data: ")]
    assert line == "data: PACS alone, without DomainNet, OfficeHome, TerraIncognita and VLCS"
    both = records + [changed(r, dataset="VLCS") for r in records]
    (line,) = [line for line in study_diff(both, "paper-gmoe") if line.startswith("data: ")]
    assert line == "data: PACS and VLCS alone, without DomainNet, OfficeHome and TerraIncognita"
    digits = [changed(r, dataset="DigitDomains") for r in records]
    (line,) = [line for line in study_diff(digits, "paper-gmoe") if line.startswith("data: ")]
    assert line.startswith("data: DigitDomains instead of DomainNet or OfficeHome or PACS")


VERDICTS = ("algorithms", "losses", "placement", "short", "table15", "wilds")


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_begins_with_what_was_learned_and_says_it_once(name):
    page = (repo_root() / "nbs" / "paper" / f"gmoe_{name}.ipynb").read_text(encoding="utf-8")
    assert page.count("learned_line(") == 1 and "lines = [learned_line(" in page


# One training domain


def single(algorithm, seed, inside, **outside):
    "A run that was trained on paper, with two checkpoints, the second of which was chosen."
    later = {"paper": {"out": {"default": inside}}}
    later |= {name: {"in": {"default": value}} for name, value in outside.items()}
    first = {"paper": {"out": {"default": 0.1}}}
    return {
        "status": "complete",
        "spec": {"algorithm": algorithm, "trial_seed": seed, "test_domains": [*outside]},
        "selected": {"default": {"step": 9}},
        "checkpoints": [{"step": 0, "accuracies": first}, {"step": 9, "accuracies": later}],
    }


def test_improvements_are_means_of_ratios_seed_by_seed():
    records = [
        single("ERM", 0, 0.6, ink=0.2, chalk=0.3),
        single("ERM", 1, 0.5, ink=0.2, chalk=0.4),
        single("GMoE", 0, 0.66, ink=0.24, chalk=0.4),
        single("GMoE", 1, 0.6, ink=0.3, chalk=0.4),
        {"status": "failed", "spec": {}},
    ]
    results = single_source_results(records)
    assert len(results) == 12 and set(results.trained_on) == {"paper"}
    table = improvements(results, "ERM").set_index("algorithm")
    assert table.iid["GMoE"] == pytest.approx(15)
    assert table.ood["GMoE"] == pytest.approx(((20 + 100 / 3) / 2 + 25) / 2)
    assert table["IID improvement, %"]["GMoE"] == "15.0 ± 3.5"
    with pytest.raises(HmoeError, match="no complete run of the baseline 'ViT'. Valid: ERM, GMoE"):
        improvements(results, "ViT")


# Sizes


def test_parameters_and_products_are_counted():
    layer = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Flatten(), nn.Linear(5 * 16, 2))
    assert parameters(layer) == 5 * 27 + 5 + 160 + 2
    layer.train()
    assert multiply_accumulates(layer, (3, 4, 4)) == 16 * 5 * 27 + 160 and layer.training


def test_attention_counts_although_it_is_fused():
    tokens, width, depth = 1 + 4, 64, 0
    block = nn.TransformerEncoderLayer(width, 4, 128, batch_first=True, dropout=0.0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(
                *(torch.zeros(1, 4, tokens, width // 4) for _ in range(3))
            )

    products = 2 * 4 * tokens * tokens * (width // 4) + depth
    assert multiply_accumulates(Net(), (3, 4, 4)) == products


def test_experts_add_parameters_and_hardly_any_work():
    random = torch.get_rng_state()
    dense, sparse = network_size("small_vit", 16, 1), network_size("gmoe_small", 16, 1)
    assert torch.equal(random, torch.get_rng_state())
    assert sparse[0] > 2 * dense[0] and 1 < sparse[1] / dense[1] < 1.2
    table = size_table(("small_vit",), 10, 16, 1)
    assert table.iloc[0, 2] * 1e6 == pytest.approx(dense[0] + (dense[2] + 1) * 10)


def test_accuracy_stands_beside_the_size_of_its_network():
    points = sized_averages(study()).set_index("algorithm")
    assert points.accuracy.round(6).to_dict() == {"ERM": 50, "ERM-ViT": 60, "GMoE": 62}
    assert points[PARAMETERS]["ERM"] == network_size("small_cnn", 16, 3)[0] / 1e6
    figure = draw_sizes(points.reset_index())
    assert [axis.get_xlabel() for axis in figure.axes] == [PARAMETERS, MACS]
    heights = sorted(text.xyann[1] for text in figure.axes[0].texts)
    assert min(np.diff(heights)) >= 12 / 22 - 1e-9


def test_torchvision_states_its_weights():
    stated = resnet50_weights().set_index("weights")
    assert stated["accuracy on ImageNet, %"].round(1).to_dict() == {
        "IMAGENET1K_V1": 76.1,
        "IMAGENET1K_V2": 80.9,
    }


# Pages without records


def test_studies_that_are_absent_are_named_and_damaged_ones_refused(tmp_path):
    invented.write_study(tmp_path, "quick-balance", study())
    names = ["quick-balance", "quick-digits"]
    records, absent = load_studies(names, str(tmp_path))
    assert len(records) == 36 and absent == ["quick-digits"]
    (tmp_path / "quick-digits.jsonl").write_text("{")
    with pytest.raises(HmoeError, match="quick-digits.jsonl, line 1: cut off"):
        load_studies(names, str(tmp_path))


def test_the_cost_of_an_update_is_quoted_and_scaled():
    assert quoted_step("resnet50", "ERM", 160) == (1.01, 13.4)
    assert quoted_step("deit_small", "ERM-ViT", 80) == pytest.approx((0.45, 11.15 / 2))
    seconds, memory = quoted_step("gmoe_s16", "Fishr", 160)
    assert seconds == pytest.approx(0.98 * 1.10 / 1.01) and memory == 12.28
    assert quoted_step("gmoe_s16", "MMD", 160) == quoted_step("gmoe_s16", "GMoE", 160)
    assert quoted_step("gmoe_b16", "GMoE", 160) is None


def test_the_cost_of_a_study_is_that_of_its_runs():
    cost = quoted_cost("paper-pacs")
    hours = 48 * 5001 * 1.01 * (3 * 32 / 160) / 3600
    assert (cost.runs, cost.timed) == (48, 48) and cost.hours == pytest.approx(hours)
    assert cost.memory == pytest.approx(13.4 * 96 / 160)
    assert quoted_cost("paper-colored").timed == 0 == quoted_cost("pacs-pacs").timed


def test_a_page_without_records_says_what_it_would_take(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    text = not_run("hmoe_table7", "paper", ["paper-pacs"])
    assert text.startswith("**Not run: there are no records of study `paper-pacs`.**")
    assert "| paper-pacs | 48 |" in text and "hmoe plan hmoe_table7 --profile paper" in text
    assert str(tmp_path) not in text and not_run("page", "quick", []) == ""
    assert not_run_line(["quick-toy"]) == "Not run: `quick-toy` (3 runs)."
    line = not_run_line(["paper-pacs", "quick-digits"])
    assert line.startswith("Not run: `paper-pacs` (48 runs, 40 hours on a V100 by quoted times)")
    assert line.endswith("`quick-digits` (48 runs).")


def test_the_gallery_says_that_nothing_was_run():
    assert evidence_line({"records": 0}) == "From no run: the numbers are the paper's."


PAGES = [name for name in ARTEFACTS if name.startswith("gmoe_")]
TABLES = [
    name
    for name in PAGES
    if ARTEFACTS[name].study.startswith("gmoe") and "paper" in ARTEFACTS[name].profiles
]


def test_how_well_networks_learned_is_the_mean_over_runs_of_the_best_mode():
    def chosen(**modes):
        selected = {mode: {"validation_accuracy": a} for mode, a in modes.items()}
        return {"status": "complete", "selected": selected}

    hmoe = [{"algorithm": "HMOE-DN", "dataset": "PACS"}] * 2
    runs = [
        {"spec": hmoe[0]} | chosen(mix=0.5, max=0.9),
        {"spec": hmoe[1]} | chosen(mix=0.7, max=0.1),
        {"spec": {"algorithm": "ERM", "dataset": "PACS"}} | chosen(default=0.84),
        {"spec": {"algorithm": "ERM", "dataset": "PACS"}, "status": "failed"},
    ]
    line = "Accuracy on validation images of the training domains: HMOE-DN 60 %; ERM 84 %."
    young = " Undertrained but included, so conclusions hold for this length of training only: "
    assert learned_line(runs) == f"{line}{young}HMOE-DN (under 81 %)."
    runs[2]["spec"]["dataset"] = "VLCS"
    assert "PACS, HMOE-DN 60 %; VLCS, ERM 84 %." in learned_line(runs)
    runs[2]["spec"]["dataset"], runs[2]["selected"]["default"]["validation_accuracy"] = "PACS", 0.2
    hardly = " Undertrained, so nothing is concluded about them: "
    assert f"ERM 20 %.{hardly}ERM (under 30 %).{young}HMOE" in learned_line(runs)
    runs[0]["selected"] = runs[1]["selected"] = {"mix": {"validation_accuracy": 0.28}}
    runs[2]["selected"]["default"]["validation_accuracy"] = 0.29
    assert f"ERM 29 %.{hardly}HMOE-DN (under 29 %).{young}" in learned_line(runs)  # 1/7 + 6/7/6
    for run in runs:
        run["spec"]["dataset"] = "a folder of one's own"
    assert hardly not in learned_line(runs) and young not in learned_line(runs)
    with pytest.raises(HmoeError, match="no run is complete"):
        learned_line(runs[3:])


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_page_of_which_nothing_was_run_renders_and_says_so(name, tmp_path, monkeypatch):
    "In the paper's protocol, with a store that is empty."
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    page = render(name, "paper", store=str(tmp_path), output=str(tmp_path / "figures"))
    texts, study = page_texts(page), f"paper-{ARTEFACTS[name].study}"
    verdict = texts[f"{name}_verdict.md"]
    assert f"Not run: `{study}`" in verdict
    evidence = json.loads((page.parent / f"{name}.provenance.json").read_text())
    assert evidence["records"] == 0 and evidence["study"] is None
    text = page.read_text(encoding="utf-8")
    assert f"there are no records of study `{study}`" in text
    assert f"hmoe plan {name} --profile paper" in text
    published = [t for t in texts.values() if "not from this study" in t or "not this study" in t]
    assert published or name in ("gmoe_losses", "gmoe_recipes", "gmoe_selection", "gmoe_fourier")


def test_a_page_of_invented_runs_keeps_the_papers_numbers_apart(tmp_path):
    invented.write_study(tmp_path, "quick-gmoe", study())
    page = render("gmoe_algorithms", "quick", store=str(tmp_path), output=str(tmp_path / "figures"))
    texts = page_texts(page)
    assert "| GMoE | default | 62.0" in texts["gmoe_algorithms.md"]
    assert "a reduced study, not the paper's protocol" in texts["gmoe_algorithms.md"]
    assert "88.1" not in texts["gmoe_algorithms.md"]
    assert "88.1 ± 0.1" in texts["gmoe_algorithms_paper.md"]
    verdict = texts["gmoe_algorithms_verdict.md"]
    assert verdict.startswith("- Accuracy on validation images of the training domains: ERM-ViT ")
    assert "Against ERM-ViT" in verdict and "Against the paper" not in verdict
    assert (
        json.loads((page.parent / "gmoe_algorithms.provenance.json").read_text())["records"] == 36
    )
