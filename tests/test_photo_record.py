"""docs/discover.md states the numbers of results/bench-photos.json (`.ci/photo_record.py`)."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = " ".join((ROOT / "docs/discover.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "results/bench-photos.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("photo_record", ROOT / ".ci/photo_record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_page_is_that_of_the_record(script):
    assert "\n".join(script.table_lines()) in script.PAGE.read_text(encoding="utf-8")


def test_a_line_of_the_table_by_hand(script):
    stage = {
        "images": 1234,
        "groups": 3,
        "found": True,
        "nmi_domain": 0.954,
        "pairs": [0.5, 0.25],
        "cpu_seconds": 9.6,
        "peak_megabytes": 1750.0,
    }
    older = {"nmi_domain": None}
    line = "| a | 1,234 | 3 | not measured | .95 | .50 (.25) | 10 s | 1.8 GB |"
    assert script.table_line("a", stage, None) == line
    line = "| a | 1,234 | none reliable | – | 1.00 | .50 (.25) | 10 s | 1.8 GB |"
    assert script.table_line("a", stage | {"found": False, "nmi_domain": 1.0}, older) == line
    assert script.table_line("a", None, {"nmi_domain": 0.5}).startswith("| a | not measured |")


def test_each_stage_says_where_it_was_measured(record, script):
    assert set(record) <= set(script.STAGES)
    assert {"corrected", "phone", "serve"} <= set(record)
    for stage in record.values():
        assert stage["environment"]["versions"]["torch"]
        assert stage["other_processes"] >= 0
        commit = stage["environment"]["commit"]
        assert commit is None or re.fullmatch("[0-9a-f]{12}", commit)


def test_retraining_is_as_fast_as_stated(record):
    stage = record["corrected"]
    assert f"takes {stage['cpu_seconds']:.0f} seconds of processor time" in TEXT
    assert f"The first one took {stage['first_cpu_seconds']:.0f} seconds" in TEXT
    assert stage["cpu_seconds"] < stage["first_cpu_seconds"] / 5
    share = f"{stage['recognised']:.0%}".replace("%", " %")
    assert f"the style of {share} of the {stage['held_out']} held-out images" in TEXT


def test_the_server_is_as_fast_as_stated(record):
    stage = record["serve"]
    assert f"With {stage['images']:,} synthetic photographs" in TEXT
    assert f"after {stage['cpu_seconds_to_first_picture']:.1f} seconds of processor time" in TEXT
    assert f"used {stage['peak_megabytes']:.0f} MB of memory" in TEXT


def test_the_folder_of_a_phone_was_grouped_by_its_styles(record):
    stage = record["phone"]
    assert stage["found"]
    assert stage["groups"] == 3
    assert f"made-up phone with {stage['images']} pictures" in TEXT
    assert f"NMI of {stage['nmi_domain']:.2f}".replace("0.", ".") in TEXT
    assert len(stage["left_out"]) == len(set(stage["left_out"]))


def test_many_pictures_take_the_time_and_memory_that_are_stated(record):
    stage = record["many, small"]
    assert f"all {stage['images']:,} of PACS" in TEXT
    assert f"at {stage['resolution']} pixels, took {stage['cpu_seconds']:.0f} seconds" in TEXT
    assert f"and {stage['peak_megabytes']:,.0f} MB" in TEXT
    assert f"their page {stage['page_cpu_seconds']:.1f} seconds more" in TEXT
    assert stage["peak_megabytes"] < record["phone"]["peak_megabytes"]
    assert stage["page_megabytes"] < 2


def test_many_pictures_at_the_default_size(record):
    stage = record["many"]
    assert stage["images"] == record["many, small"]["images"]
    stated = f"{stage['cpu_seconds']:.0f} seconds and {stage['peak_megabytes']:,.0f} MB"
    assert f"default of {stage['resolution']} pixels, they took {stated}" in TEXT


def test_reading_is_as_fast_as_stated(record):
    stage = record["reading"]
    milliseconds = {w: 1000 * s for w, s in stage["cpu_seconds_of_an_image"].items()}
    assert f"took {milliseconds['reduced']:.0f} milliseconds of processor time" in TEXT
    assert f"{milliseconds['whole']:.0f} when it was decoded whole" in TEXT
    assert f"and {milliseconds['torchvision']:.0f} with torchvision's loader" in TEXT
    assert f"({stage['images']} photographs, three rounds)" in TEXT
    assert f"differ by {stage['mean_difference']:.2f} of 255 on average" in TEXT
    assert milliseconds["reduced"] < milliseconds["whole"] / 3


def test_pairs_are_those_of_the_record(record):
    together, without = record["photographs and drawings, four styles, draw 0"]["pairs"]
    assert f"({together:.2f} on 700 images of PACS in three groups)" in TEXT
    assert f"that has no groups ({without:.2f})" in TEXT


def draws():
    "Draws that both records have: the trial before, and the stage."
    stages = json.loads((ROOT / "results/bench-photos.json").read_text(encoding="utf-8"))
    before = json.loads((ROOT / "results/bench-groupings.json").read_text(encoding="utf-8"))
    found = []
    for trial in before["trials"]:
        name = f"{trial['folder']}, draw {trial['draw']}"
        if trial["method"] == "features" and name in stages:
            found.append((trial, stages[name]))
    return found


@pytest.mark.parametrize("trial, stage", draws())
def test_a_draw_that_was_measured_again_has_the_score_of_the_table(trial, stage):
    assert stage["found"] == trial["found"]
    assert stage["groups"] == trial["groups"]
    if trial["nmi_domain"] is not None:
        assert stage["nmi_domain"] == pytest.approx(trial["nmi_domain"], abs=0.02)
