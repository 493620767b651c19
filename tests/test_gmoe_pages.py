"""GMoE's pages: rows that are networks, several data sets, one training domain, costs that are
quoted, and pages of which nothing was run."""

import json

import invented
import numpy as np
import pytest
import torch
from notebooks import page_functions
from torch import nn

from hmoe_repro.analysis.experts import PARAMETERS, size_table
from hmoe_repro.analysis.protocol_diff import protocol_diff
from hmoe_repro.analysis.published import min_validation_accuracy, undertrained
from hmoe_repro.analysis.results import available_results, frame_of
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.benchmarks import KNOWN
from hmoe_repro.data.registry import DATASETS
from hmoe_repro.networks.model_size import multiply_accumulates, network_size, parameters
from hmoe_repro.report.page import not_run, not_run_line, quoted_cost, quoted_step
from hmoe_repro.report.render import page_texts, render
from hmoe_repro.studies.artefacts import ARTEFACTS
from hmoe_repro.training.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("warm_kernels")
NETWORKS = {"ERM": "small_cnn", "ERM-ViT": "small_vit", "GMoE": "gmoe_small"}


def changed(record, **config):
    "A record with another specification, and the name that belongs to it."
    config = record["config"] | config
    return record | {"config": config, "run_id": RunConfig.from_dict(config).run_id}


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
        hparams=made["config"]["hparams"] | hparams,
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


def validated(records, **accuracies):
    "The same runs with these accuracies on validation images, by algorithm."
    for record in records:
        found = accuracies.get(record["config"]["algorithm"], 0.9)
        record["selected"]["default"]["validation_accuracy"] = found
    return records


def moded(records, **accuracies):
    "The records of HMOE-DN with modes of so high an accuracy on validation images."
    for record in records:
        if record["config"]["algorithm"] == "HMOE-DN":
            chosen = record["selected"].pop("default")
            modes = {m: chosen | {"validation_accuracy": a} for m, a in accuracies.items()}
            record["selected"] |= modes
    return records


def named(record, algorithm):
    return record["config"]["algorithm"] == algorithm


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
    assert made_of_digits
    assert all(DATASETS[name].num_classes for name in made_of_digits)


# Beside the paper


def test_a_row_is_undertrained_below_half_of_the_best_a_sixth_of_the_way_or_the_floor():
    frame = frame_of(study(domains=("photo",), seeds=2))
    levels = {"ERM": 0.9, "ERM-ViT": 0.46, "GMoE": 0.44}
    frame["validation_accuracy"] = frame.algorithm.map(levels)
    data = frame.dataset[0]
    assert undertrained(frame) == [(data, "GMoE")]  # 44 % is under half of 90 %
    low = frame.assign(validation_accuracy=frame.algorithm.map({"ERM": 0.26, "ERM-ViT": 0.24}))
    low = low[low.algorithm != "GMoE"]
    assert undertrained(low) == [(data, "ERM-ViT")]  # a sixth of the way from 10 to 100 % is 25 %
    assert undertrained(frame, 4 / 9) == [(data, "ERM-ViT"), (data, "GMoE")]
    with pytest.raises(HmoeError, match="no run is complete"):
        undertrained(frame.assign(status="failed"))


def test_departures_from_the_file_of_a_study_are_named_with_their_owners():
    records = [
        changed(r, dataset="PACS", test_domains=["photo"], network="resnet50", steps=5001)
        for r in study(domains=("photo",), seeds=2)
        if r["config"]["algorithm"] == "ERM"
    ]
    lines = protocol_diff(frame_of(records), "paper-pacs")
    assert "trial seeds: 2 instead of 3" in lines
    assert "not run: HMOE-DL, HMOE-DN, HMOE-ND" in lines
    assert "initial weights: random instead of pretrained" in lines
    assert "test domains of PACS not run: art_painting, cartoon, sketch" in lines
    assert not any(line.startswith(("updates:", "network:", "data:")) for line in lines)
    other = [changed(r, algorithm="GMoE", steps=7) for r in records[:1]] + records[1:]
    assert "not in the paper's table: GMoE" in protocol_diff(frame_of(other), "paper-pacs")
    with pytest.raises(HmoeError, match="unknown study"):
        protocol_diff(frame_of(records), "paper-nothing")


def test_a_part_of_the_data_sets_takes_the_place_of_none():
    records = [
        changed(
            r, dataset="PACS", test_domains=["photo"], network="deit_small", algorithm="ERM-ViT"
        )
        for r in study(domains=("photo",))[:3]
    ]
    lines = protocol_diff(frame_of(records), "paper-gmoe")
    (line,) = [line for line in lines if line.startswith("data: ")]
    assert line == "data: PACS alone, without DomainNet, OfficeHome, TerraIncognita, VLCS"
    both = records + [changed(r, dataset="VLCS") for r in records]
    (line,) = [
        line for line in protocol_diff(frame_of(both), "paper-gmoe") if line.startswith("data: ")
    ]
    assert line == "data: PACS and VLCS alone, without DomainNet, OfficeHome, TerraIncognita"
    digits = [changed(r, dataset="DigitDomains") for r in records]
    (line,) = [
        line for line in protocol_diff(frame_of(digits), "paper-gmoe") if line.startswith("data: ")
    ]
    assert line.startswith("data: DigitDomains instead of DomainNet or OfficeHome or PACS")


VERDICTS = ("algorithms", "losses", "placement", "short", "table15", "wilds")


# One training domain


def single(algorithm, seed, inside, **outside):
    "A run that was trained on paper, with two checkpoints, the second of which was chosen."
    later = {"paper": {"out": {"default": inside}}}
    later |= {name: {"in": {"default": value}} for name, value in outside.items()}
    first = {"paper": {"out": {"default": 0.1}}}
    return {
        "status": "complete",
        "config": {"algorithm": algorithm, "trial_seed": seed, "test_domains": [*outside]},
        "selected": {"default": {"step": 9}},
        "checkpoints": [{"step": 0, "accuracies": first}, {"step": 9, "accuracies": later}],
    }


# Sizes


def test_parameters_and_products_are_counted():
    layer = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Flatten(), nn.Linear(5 * 16, 2))
    assert parameters(layer) == 5 * 27 + 5 + 160 + 2
    layer.train()
    assert multiply_accumulates(layer, (3, 4, 4)) == 16 * 5 * 27 + 160
    assert layer.training


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
    assert sparse[0] > 2 * dense[0]
    assert 1 < sparse[1] / dense[1] < 1.2
    table = size_table(("small_vit",), 10, 16, 1)
    assert table.iloc[0, 2] * 1e6 == pytest.approx(dense[0] + (dense[2] + 1) * 10)


def test_accuracy_stands_beside_the_size_of_its_network():
    points = (
        page_functions("gmoe_parameters").sized_averages(frame_of(study())).set_index("algorithm")
    )
    assert points.accuracy.round(6).to_dict() == {"ERM": 50, "ERM-ViT": 60, "GMoE": 62}
    assert points[PARAMETERS]["ERM"] == network_size("small_cnn", 16, 3)[0] / 1e6


# Pages without records


def test_studies_that_are_absent_are_named_and_damaged_ones_refused(tmp_path):
    invented.write_study(tmp_path, "quick-balance", study())
    names = ["quick-balance", "quick-digits"]
    frame, absent = available_results(names, str(tmp_path))
    assert frame.run_id.nunique() == 36
    assert absent == ["quick-digits"]
    (tmp_path / "quick-digits.jsonl").write_text("{")
    with pytest.raises(HmoeError, match="quick-digits.jsonl, line 1: cut off"):
        available_results(names, str(tmp_path))


def test_the_cost_of_an_update_is_quoted_and_scaled():
    assert quoted_step("resnet50", "ERM", 160) == (1.01, 13.4)
    assert quoted_step("deit_small", "ERM-ViT", 80) == pytest.approx((0.45, 11.15 / 2))
    seconds, memory = quoted_step("gmoe_s16", "Fishr", 160)
    assert seconds == pytest.approx(0.98 * 1.10 / 1.01)
    assert memory == 12.28
    assert quoted_step("gmoe_s16", "MMD", 160) == quoted_step("gmoe_s16", "GMoE", 160)
    assert quoted_step("gmoe_b16", "GMoE", 160) is None


def test_the_cost_of_a_study_is_that_of_its_runs():
    cost = quoted_cost("paper-pacs")
    hours = 48 * 5001 * 1.01 * (3 * 32 / 160) / 3600
    assert (cost["runs"], cost["timed"]) == (48, 48)
    assert cost["hours"] == pytest.approx(hours)
    assert cost["memory"] == pytest.approx(13.4 * 96 / 160)
    assert quoted_cost("paper-colored")["timed"] == 0 == quoted_cost("pacs-pacs")["timed"]


def test_a_page_without_records_says_what_it_would_take(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    text = not_run("hmoe_table7", "paper", ["paper-pacs"])
    assert text.startswith("**Not run: there are no records of study `paper-pacs`.**")
    assert "| paper-pacs | 48 |" in text
    assert "hmoe plan hmoe_table7 --profile paper" in text
    assert str(tmp_path) not in text
    assert not_run("page", "quick", []) == ""
    assert not_run_line(["quick-digits"]) == "Not run: `quick-digits` (48 runs)."
    many = not_run_line(["quick-digits"] * 7)
    assert many.endswith("`quick-digits` (48 runs), and 4 other studies (192 runs).")
    assert many.count("quick-digits") == 3
    line = not_run_line(["paper-pacs", "quick-digits"])
    assert line.startswith("Not run: `paper-pacs` (48 runs, 40 hours on a V100 by quoted times)")
    assert line.endswith("`quick-digits` (48 runs).")


PAGES = [name for name in ARTEFACTS if name.startswith("gmoe_")]
TABLES = [
    name
    for name in PAGES
    if ARTEFACTS[name].study.startswith("gmoe") and "paper" in ARTEFACTS[name].profiles
]


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
    assert evidence["records"] == 0
    assert evidence["study"] is None
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
    assert "DigitDomains, stand-in: " in texts["gmoe_algorithms.md"]
    assert "88.1" not in texts["gmoe_algorithms.md"]
    assert "88.1 ± 0.1" in texts["gmoe_algorithms_paper.md"]
    verdict = texts["gmoe_algorithms_verdict.md"]
    assert "against ERM-ViT" in verdict
    assert "the paper" not in verdict
    assert (
        json.loads((page.parent / "gmoe_algorithms.provenance.json").read_text())["records"] == 36
    )
