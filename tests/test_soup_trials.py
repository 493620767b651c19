"""The record of soups: differences to the best run by hand, the answer of the page, and what is
averaged."""

import numpy as np
import pandas as pd
import pytest
from notebooks import page_functions
from scipy import stats

from hmoe_repro.bench.soup_trials import SOUPS, soup_gain, soup_table, soup_trials
from hmoe_repro.bench.timing import SCALES
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.studies.studies import study_configs


def record_of(gains, losses=(-2.0, -3.0, -4.0), study="quick-soups", dataset="DigitDomains"):
    "One test domain, and in each trial seed what the greedy soup gains and the uniform one loses."
    rows = []
    for trial_seed, (gain, loss) in enumerate(zip(gains, losses, strict=True)):
        for recipe, change, runs in (
            ("best single", 0, 1),
            ("uniform", loss, 8),
            ("greedy", gain, 3),
        ):
            row = {"study": study, "dataset": dataset, "test_domain": "sketch"}
            row |= {"trial_seed": trial_seed, "recipe": recipe}
            row |= {"runs": runs, "available": 8, "validation_accuracy": 0.9}
            rows.append(row | {"accuracy": 0.5 + (trial_seed + change) / 100})
    return {"soups": rows, "sizes": {"studies": {study: ["sketch"]}}}


def both(digits, pacs):
    "The record of two studies, by what the greedy soup gains in each."
    rows = record_of(digits)["soups"] + record_of(pacs, study="pacs-soups", dataset="PACS")["soups"]
    return {
        "soups": rows,
        "sizes": {"studies": {"quick-soups": ["sketch"], "pacs-soups": ["sketch"]}},
    }


def test_gains_are_paired_with_the_best_run_of_their_seed():
    record = record_of([2.0, 3.0, 4.0])
    gain = soup_gain(record, "quick-soups", "greedy")
    half = stats.t.ppf(0.975, 2) * 1 / np.sqrt(3)
    assert gain.mean == pytest.approx(3)
    assert (gain.low, gain.high) == pytest.approx((3 - half, 3 + half))
    table = soup_table(record).set_index("recipe")
    assert list(table.index) == ["best single", "uniform", "greedy"]
    assert table["minus best"].dropna().to_dict() == pytest.approx({"uniform": -3, "greedy": 3})
    assert table["runs averaged"].tolist() == [1, 8, 3]
    assert table.accuracy.tolist() == pytest.approx([51, 48, 54])
    alone = stats.ttest_1samp([2.0, 3.0, 4.0], 0).pvalue
    assert (table.p["uniform"], table.p["greedy"]) == pytest.approx((2 * alone, 2 * alone))


@pytest.mark.parametrize(
    "gains, answer",
    [
        ([4.0, 4.1, 3.9], "Yes: on DigitDomains the greedy soup"),
        ([0.1, 0.0, -0.1], "No: on DigitDomains the uniform soup"),
        ([0.0, 0.0, 0.0], "No: on DigitDomains the uniform soup"),
        ([4.0, -4.0, 1.0], "Undecided: on DigitDomains the uniform soup"),
    ],
)
def test_the_answer_follows_the_rule_of_the_page(gains, answer):
    lines = page_functions("soups").soups_answer(record_of(gains), {"quick-soups": 1.0})
    first, other, alone = lines
    assert first.startswith(answer)
    assert "in 0 of 3 groups" in alone
    assert ("-3.0" in first) != ("-3.0" in other)


@pytest.mark.parametrize(
    "digits, pacs, answer",
    [
        ([0.0, 0.1, -0.1], [4.0, 4.1, 3.9], "Partly: on PACS the greedy soup is +4.0"),
        ([4.0, 4.1, 3.9], [0.0, 0.1, -0.1], "Partly: on DigitDomains the greedy soup is +4.0"),
        ([4.0, 4.1, 3.9], [5.0, 5.1, 4.9], "Yes: on DigitDomains the greedy soup is +4.0"),
        ([0.0, 0.1, -0.1], [0.0, 0.1, -0.1], "No: on DigitDomains the uniform soup is -3.0"),
        ([0.0, 0.1, -0.1], [4.0, -4.0, 1.0], "Undecided: on PACS the uniform soup is -3.0"),
    ],
)
def test_the_answer_of_two_studies_is_of_both(digits, pacs, answer):
    margins = {"quick-soups": 1.0, "pacs-soups": 1.0}
    lines = page_functions("soups").soups_answer(both(digits, pacs), margins)
    assert lines[0].startswith(answer)
    assert len(lines[0].split()) <= 25
    assert [line.count("PACS") for line in lines[1:]] == [0, 0, 0, 1, 1, 1]


def test_each_study_has_its_own_correction():
    table = soup_table(both([2.0, 3.0, 4.0], [4.0, -4.0, 1.0]))
    alone = soup_table(record_of([2.0, 3.0, 4.0]))
    assert table.dataset.tolist() == ["DigitDomains"] * 3 + ["PACS"] * 3
    pd.testing.assert_frame_equal(table[:3], alone)


def test_the_runs_of_a_group_start_alike_and_differ_in_their_rates():
    configs = study_configs("quick-soups")
    assert set(SCALES["soups"]["full"]["studies"]) == {"quick-soups", "pacs-soups"}
    assert len(configs) == 8 * 4 * 3
    assert {config.hparams_seed for config in configs} == {0}
    for trial_seed in (4, 5, 6):
        group = [c for c in configs if c.trial_seed == trial_seed and c.test_domains == ("photo",)]
        assert len({config.hparams["lr"] for config in group}) == 8


def test_a_run_that_fails_is_named(monkeypatch):
    class Failed:
        status = "failed"

    functions = soup_trials.__globals__
    monkeypatch.setitem(functions, "sweep", lambda configs, **_: {configs[0].run_id: Failed()})
    with pytest.raises(HmoeError, match="smoke-soups is failed"):
        SOUPS.run(1, "tiny", say=lambda line: None)


def test_a_group_of_one_run_has_a_soup_that_is_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path))
    functions = soup_trials.__globals__
    first = study_configs("smoke-soups")[:1]
    monkeypatch.setitem(functions, "study_configs", lambda study: first)
    size = {"studies": {"smoke-soups": first[0].test_domains}, "jobs": 0}
    monkeypatch.setitem(SCALES["soups"], "tiny", size)
    rows = pd.DataFrame(SOUPS.run(1, "tiny", say=lambda line: None)["soups"])
    assert rows.accuracy.nunique() == rows.validation_accuracy.nunique() == 1
    assert rows.runs.tolist() == [1, 1, 1]
