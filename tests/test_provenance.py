"""Reading studies, choosing runs, and saying on a page what its numbers are."""

import copy
import hashlib
import json

import invented
import numpy as np
import pandas as pd
import pytest

from hmoe_repro.analysis.results import (
    arrays,
    frame_of,
    has_arrays,
    load_study,
    results,
    short_path,
    study_file,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import repo_root
from hmoe_repro.report.provenance import (
    SELECTION_RULE,
    TOY_RULE,
    caption,
    devices_text,
    header,
    output_folder,
    plan_words,
    provenance,
    rule_of,
)
from hmoe_repro.studies.study_file import STUDIES, read_study
from hmoe_repro.training.run_config import TOY


@pytest.fixture
def miniature():
    return invented.miniature()


def test_a_study_comes_back_as_it_was_written(tmp_path):
    runs = invented.digits(seeds=(0,), domains=("photo",))
    invented.write_study(tmp_path, "smoke-digits", runs, with_arrays=(0,))
    assert load_study("smoke-digits", tmp_path) == sorted(runs, key=lambda r: r["run_id"])
    rows = results("smoke-digits", tmp_path).drop_duplicates("algorithm").set_index("algorithm")
    erm, hmoe = rows.loc["ERM"], rows.loc["HMOE-ND"]
    assert arrays(hmoe, tmp_path)["gate_out"].shape == (120, 5)
    assert has_arrays(hmoe, tmp_path)
    with pytest.raises(HmoeError, match=f"{erm.run_id}.*hmoe publish smoke-digits"):
        arrays(erm, tmp_path)


def test_a_caption_says_where_settings_have_different_numbers_of_seeds():
    frame = frame_of(invented.digits(seeds=(0, 1, 2)))
    assert caption(frame).endswith(" updates, 3 seeds")
    fewer = frame[(frame.algorithm != "ERM") | (frame.trial_seed < 2)]
    assert caption(fewer).endswith(" updates, 2 to 3 seeds")
    assert caption(fewer[fewer.algorithm == "ERM"]).endswith(" updates, 2 seeds")


@pytest.mark.parametrize(
    "steps, datasets, start",
    [
        ([300], ["PACS"], "PACS, reduced: 300 updates"),
        ([411, 1519], ["PACS", "VLCS"], "PACS and VLCS, reduced: 411 or 1,519 updates"),
        ([564, 411, 519], ["VLCS", "SVIRO", "PACS"], "PACS and 2 others, reduced: 411 to 564 upd"),
    ],
)
def test_a_caption_lists_two_values_at_most(steps, datasets, start):
    rows = [
        {"algorithm": "ERM", "network": "n", "test_domain": "a", "trial_seed": 0}
        | {"dataset": name, "steps": number}
        for number in steps
        for name in datasets
    ]
    assert caption(pd.DataFrame(rows)).startswith(start)


def test_a_relative_store_starts_at_the_root(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert study_file("quick-toy", "results") == repo_root() / "results" / "quick-toy.jsonl"
    monkeypatch.setenv("HMOE_RESULTS", str(tmp_path / "elsewhere"))
    assert study_file("quick-toy") == tmp_path / "elsewhere" / "quick-toy.jsonl"


def line_with(**fields):
    "A line that is a record but for the given fields."
    whole = {"run_id": "a", "record_version": 2, "status": "complete", "config": {}}
    return json.dumps(whole | {"checkpoints": [], "selected": {}} | fields)


@pytest.mark.parametrize(
    "line, complaint",
    [
        ('{"run_id": "a", "rec', "line 2: cut off or not JSON"),
        ('{"env0_in_acc": 0.5}', "line 2 is not a whole run record .missing or wrong: run_id"),
        ("[1, 2]", "line 2 is not a run record"),
        ('"text"', "line 2 is not a run record"),
        (line_with(config=3), "line 2 is not a whole run record .missing or wrong: config"),
        (line_with(record_version=9), "line 2 has record version 9, this library reads 2"),
        (line_with(), "line 2: algorithm is missing"),
        (
            line_with(
                config={
                    "algorithm": "ERM",
                    "dataset": "D",
                    "dataset_fingerprint": "f",
                    "test_domains": 3,
                }
            ),
            "line 2: test_domains must be a valid tuple",
        ),
        ("SAME", "line 2: run [0-9a-f]{12} occurs"),
    ],
)
def test_a_bad_line_is_named_with_the_way_out(tmp_path, line, complaint):
    good = json.dumps(invented.record("ERM", "negative", 0, np.random.default_rng(0)))
    (tmp_path / "quick-digits.jsonl").write_text(
        good + "\n" + (good if line == "SAME" else line) + "\n"
    )
    with pytest.raises(
        HmoeError, match=f"quick-digits.jsonl, {complaint}.*Fix: .hmoe publish quick-digits"
    ) as caught:
        load_study("quick-digits", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_path_is_named_from_the_root_where_it_lies_inside(tmp_path):
    assert short_path(repo_root() / "results" / "quick-toy.jsonl") == "results/quick-toy.jsonl"
    assert short_path(tmp_path / "elsewhere") == str(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "change", [{"trial_seed": 7}, {"test_domains": ["photo"]}, {"hparams": {"lr": 1e-2}}]
)
def test_an_edited_record_is_refused(tmp_path, change):
    whole, edited = (
        invented.record("ERM", "negative", 0, np.random.default_rng(0)),
        invented.record("ERM", "negative", 1, np.random.default_rng(0)),
    )
    edited["config"] |= change
    (tmp_path / "quick-digits.jsonl").write_text(
        json.dumps(whole) + "\n" + json.dumps(edited) + "\n"
    )
    complaint = f"quick-digits.jsonl, line 2 calls itself {edited['run_id']}.*edited.*"
    fix = " Fix: .hmoe publish quick-digits"
    with pytest.raises(HmoeError, match=complaint + fix) as caught:
        load_study("quick-digits", tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("Fix:") == 1


def test_a_missing_empty_or_binary_study(tmp_path):
    with pytest.raises(
        HmoeError, match="quick-digits.jsonl does not exist. Fix: `hmoe reproduce --profile quick`"
    ):
        load_study("quick-digits", tmp_path)
    (tmp_path / "quick-digits.jsonl").write_text("\n\n")
    with pytest.raises(HmoeError, match="holds no record"):
        load_study("quick-digits", tmp_path)
    (tmp_path / "quick-digits.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HmoeError, match="cannot read"):
        load_study("quick-digits", tmp_path)


def test_damaged_arrays_are_named(tmp_path):
    runs = invented.digits(seeds=(0,), domains=("photo",), algorithms=("HMOE-DN",))
    invented.write_study(tmp_path, "smoke-digits", runs)
    (tmp_path / "smoke-digits").mkdir()
    (tmp_path / "smoke-digits" / f"{runs[0]['run_id']}.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(HmoeError, match="is damaged.*Fix"):
        arrays(results("smoke-digits", tmp_path).iloc[0], tmp_path)


# Saying what the numbers are


def test_provenance_is_complete_and_holds_no_time(tmp_path, miniature):
    invented.write_study(tmp_path, "quick-digits", miniature)
    evidence = provenance(
        "digits_table", "quick", frame_of(miniature), tmp_path, "quick-digits", tmp_path
    )
    text = (tmp_path / "digits_table.provenance.json").read_text()
    assert json.loads(text) == evidence
    assert evidence["run_ids"] == sorted(r["run_id"] for r in miniature)
    assert evidence["records"] == len(miniature)
    assert len(evidence["failed"]) == 1
    assert (
        evidence["study_sha256"]
        == hashlib.sha256((tmp_path / "quick-digits.jsonl").read_bytes()).hexdigest()
    )
    assert evidence["trial_seed"] == [0, 1, 2]
    assert evidence["steps"] == [301]
    assert evidence["dataset_fingerprint"] == ["invented"]
    assert evidence["algorithm"] == ["ERM", "HMOE-DN"]
    assert evidence["precision"] == ["float32"]
    assert evidence["evaluate"] == ["selection"]
    assert evidence["dataset"] == ["DigitDomains"]
    assert evidence["runs_environment"]["commit"] == ["0123456789ab"]
    assert evidence["runs_environment"]["versions"] == {"torch": ["2.13.0"]}
    assert "training-domain validation" in evidence["selection_rule"]
    assert "matplotlib" in evidence["rendered_with"]
    said = provenance(
        "other", "quick", frame_of(miniature), tmp_path, selection_rule="after the last update"
    )
    toy = invented.measured("ERM", "photo", 0, default=0.5)
    toy["config"]["dataset"] = "SineIntervals"
    assert said["selection_rule"] == "after the last update"
    assert (
        provenance("other", "quick", frame_of([toy]), tmp_path)["selection_rule"]
        == TOY_RULE
        != SELECTION_RULE
        == evidence["selection_rule"]
    )
    assert str(tmp_path) not in text
    assert not {"time", "date", "finished", "rendered_at"} & set(evidence)
    provenance(
        "digits_table", "quick", frame_of(miniature)[::-1], tmp_path, "quick-digits", tmp_path
    )
    assert (tmp_path / "digits_table.provenance.json").read_text() == text


def test_a_page_of_several_studies_names_them_all(miniature, tmp_path):
    for name in ("quick-digits", "quick-toy"):
        (tmp_path / f"{name}.jsonl").write_text(name)
    given = ("page", "quick", frame_of(miniature), tmp_path, "quick-digits", tmp_path)
    assert "beside" not in provenance(*given, extra_studies=["quick-digits"])
    said = provenance(*given, extra_studies=["quick-toy", "quick-digits"])
    assert said["beside"] == {"quick-toy": hashlib.sha256(b"quick-toy").hexdigest()}


def test_the_header_owns_up(miniature):
    assert "not the paper's protocol" in header("quick", frame_of(miniature))
    assert "1 failed" in header("quick", frame_of(miniature))
    assert "not the paper's" not in header("paper", frame_of(miniature))
    toy = invented.measured("ERM", "photo", 0, default=0.5)
    toy["config"] |= {"dataset": "SineIntervals", "steps": 20_000}
    assert "full scale" in header("quick", frame_of([toy]))


def test_several_devices_are_counted_with_the_algorithms_of_the_rarer_ones():
    devices = ["cuda"] * 3 + ["cpu"] * 2
    algorithms = ["ARM", "ERM", "VREx", "VREx", "ERM"]
    frame = pd.DataFrame({"environment.device": devices, "algorithm": algorithms})
    assert devices_text(frame) == "cuda (3 runs), cpu (2 runs: ERM 1, VREx 1)"
    assert devices_text(frame[:3]) == "cuda"
    assert devices_text(frame.drop(columns="environment.device")) == "not recorded"
    assert devices_text(frame.assign(**{"environment.device": None})) == "not recorded"


def test_the_header_says_which_studies_were_planned(miniature):
    """A plan is in the file of a study; the studies of before have none, and a study of your own
    that has none says nothing."""
    planned = next(name for name in STUDIES if read_study(name).plan)
    plan = read_study(planned).plan
    frame = pd.concat([frame_of(miniature, "quick-digits"), frame_of(miniature, planned)])
    said = plan_words(frame)
    assert f"`{planned}` was planned on {plan.date:%Y-%m-%d %H:%M} UTC" in said
    assert f"margin {plan.margin:g}; {plan.measure}" in said
    assert said.endswith("retrospective, without a plan: `quick-digits`")
    assert header("quick", frame_of(miniature, "quick-digits")).endswith("plan: `quick-digits`")
    assert plan_words(frame_of(miniature, "own")) == ""


def test_the_header_tells_precision_and_caps(miniature):
    assert "; precision: float32\n" in header("quick", frame_of(miniature))
    assert "validation on" not in header("quick", frame_of(miniature))
    capped = copy.deepcopy(miniature[:2])
    for made, precision in zip(capped, ("bf16", "float32")):
        made["config"] |= {"precision": precision, "evaluate": "selection:2000"}
    assert (
        "precision: bf16, float32; validation on at most 2,000 images of each training domain\n"
        in header("mnist", frame_of(capped))
    )
    assert "stand-in study" in header("mnist", frame_of(capped))
    capped[0]["config"]["evaluate"], capped[1]["config"]["evaluate"] = "all", "selection:500"
    assert "validation on at most 500 images of each training domain (all in some runs)" in header(
        "mnist", frame_of(capped)
    )


def test_the_header_names_each_fingerprint_with_its_data(miniature):
    runs = copy.deepcopy(miniature[:4])
    for made, (name, mark) in zip(
        runs, (("Sine", "11"), ("Sine", "00"), ("Another", "zz"), ("Another", "zz"))
    ):
        made["config"] |= {"dataset": name, "dataset_fingerprint": mark}
    assert "data: Another (zz), Sine (00, 11);" in header("quick", frame_of(runs))
    assert "data: none;" in header("quick", frame_of([]))


def test_the_selection_rule_is_of_the_toy_or_of_the_protocol_or_of_both(miniature):
    toy = copy.deepcopy(miniature[:1])
    for record in toy:
        record["config"]["dataset"] = TOY
    assert rule_of(frame_of(miniature)) == SELECTION_RULE
    assert rule_of(frame_of(toy)) == TOY_RULE
    both = rule_of(frame_of([*toy, *miniature]))
    assert both.startswith(f"{SELECTION_RULE}; {TOY}: no validation")


def test_output_folder(tmp_path):
    assert output_folder(tmp_path, "quick") == tmp_path / "quick"
    first, second = output_folder("", "quick"), output_folder("", "quick")
    assert first != second
    assert first.is_dir()
    assert repo_root() not in first.parents
    (tmp_path / "file").write_text("")
    with pytest.raises(HmoeError, match="cannot write"):
        output_folder(tmp_path / "file", "quick")
