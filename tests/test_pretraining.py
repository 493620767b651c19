"""The network's beginnings: what captions, headers and differences say of pretrained networks with
frozen stages, and the claims on PACS in both forms."""

import ast
import json
import re
import shutil

import numpy as np
import pytest
from invented import record

from hmoe_repro.algorithms import algorithm_names
from hmoe_repro.analysis.claims import read_claims
from hmoe_repro.analysis.pretraining import (
    SCRATCH_STUDIES,
    pretraining_lines,
    pretraining_table,
    two_forms,
)
from hmoe_repro.analysis.protocol_diff import protocol_diff
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.core.files import results_dir
from hmoe_repro.networks.pretrained import PIP_PACKAGE
from hmoe_repro.report.provenance import caption, header, initial_weights
from hmoe_repro.studies.study_file import read_study

LABEL = "EfficientNet-Lite0, ImageNet-pretrained, 5 stages frozen"


def lite0(**hparams):
    "The frame of a run of ERM on PACS with a pretrained network."
    made = record("ERM", "photo", 0, np.random.default_rng(0))
    made["config"] |= {
        "dataset": "PACS",
        "network": "efficientnet_lite0",
        "weights": f"{PIP_PACKAGE} 0.1.0 5e389eae8174",
        "resolution": 160,
        "steps": 300,
        "images": {"source": "files"},
        "hparams": {"lr": 0.0003, "frozen_stages": 5, "views": 2} | hparams,
    }
    return frame_of([made])


def test_captions_and_headers_name_network_weights_and_frozen_stages():
    frame = lite0()
    assert f"160 pixels, {LABEL}, 300 updates" in caption(frame)
    assert f"weights: {LABEL} ({PIP_PACKAGE} 0.1.0 5e389eae8174)" in header("pacs", frame)
    assert initial_weights(lite0(frozen_stages="all")).endswith("all stages frozen")
    assert initial_weights(lite0(frozen_stages=0)) == LABEL.rpartition(",")[0]


def test_differences_name_frozen_stages_and_views():
    lines = protocol_diff(lite0(), "paper-pacs")
    assert {
        "network: efficientnet_lite0 instead of resnet50",
        "resolution in pixels: 160 instead of 224",
        "updates: 300 instead of 5,001",
        "frozen stages: 5 instead of none",
        "augmented versions of an image: 2 instead of a new one for each update",
    } <= set(lines)
    lines = protocol_diff(lite0(frozen_stages=0, views=0), "paper-pacs")
    assert not any(line.startswith(("frozen stages", "augmented versions")) for line in lines)
    lines = protocol_diff(lite0(views="fresh"), "paper-pacs")
    assert "frozen stages: 5 instead of none" in lines
    assert not any(line.startswith("augmented versions") for line in lines)


def test_claims_have_both_forms_and_say_which_verdicts_change(tmp_path):
    for name, twin in SCRATCH_STUDIES.items():  # the records from scratch in both places
        for study in (name, twin):
            shutil.copy(results_dir() / f"{twin}.jsonl", tmp_path / f"{study}.jsonl")
    digests = (results_dir() / "SHA256SUMS").read_text().splitlines()
    by_name = dict(line.split("  ")[::-1] for line in digests)
    sums = {
        f"{n}.jsonl": by_name[f"{t}.jsonl"]
        for p in SCRATCH_STUDIES.items()
        for n, t in (p, (p[1],) * 2)
    }
    (tmp_path / "SHA256SUMS").write_text("".join(f"{d}  {n}\n" for n, d in sums.items()))
    table, numbers = pretraining_table(read_claims(), str(tmp_path))
    assert len(table) == len(two_forms(read_claims())) > 15
    assert not numbers.changed.any()
    assert pretraining_lines(numbers)[0].startswith("With pretraining, 0 of ")
    numbers.loc[numbers.claim == "L_ad helps", ["changed", "verdict pretrained"]] = (
        True,
        "supported",
    )
    first = pretraining_lines(numbers)[0]
    answer, which = first.sentences
    assert answer.startswith("With pretraining, 1 of ")
    assert "(95 % CI 0 to " in answer
    assert len(answer.split()) <= 25
    assert which == "They are L_ad helps (inconclusive → supported)."


def test_the_linear_probe_has_every_algorithm_or_a_reason(root):
    (block,) = read_study("pacs-linear").runs
    page = json.loads((root / "nbs" / "paper" / "pacs_linear.ipynb").read_text(encoding="utf-8"))
    (cell,) = (c for c in page["cells"] if c["id"] == "left-out")
    table = ast.literal_eval(re.search(r"\{.*?\}", "".join(cell["source"]), re.S)[0])
    named = {name for key in table for name in key.split(", ")}
    assert named == set(algorithm_names()) - set(block.algorithms)
    assert set(block.algorithms) <= set(algorithm_names())


@pytest.mark.parametrize("name", SCRATCH_STUDIES)
def test_a_study_from_scratch_has_the_runs_of_its_twin(name):
    ours, theirs = read_study(name).runs, read_study(SCRATCH_STUDIES[name]).runs
    assert {a for b in theirs for a in b.algorithms} <= {a for b in ours for a in b.algorithms}
    assert theirs[0].test_domains == ours[0].test_domains
