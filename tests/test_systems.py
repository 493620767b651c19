"""Three systems side by side: the differences to ERM, and what the picture of costs shows."""

import pytest
from notebooks import page_functions

from hmoe_repro.analysis.results import frame_of
from hmoe_repro.analysis.writers import Line
from hmoe_repro.bench.sweep_overhead import SWEEPS

PAGE = page_functions("systems")
DOMAINS = ("negative", "photo", "plain", "sketch")
NAMES = ("ERM", "CORAL", "SWAD", "HMOE-DN", "DMG", "ERM-ViT", "GMoE")


def study(seeds, domains, behind=0.1, names=("ERM", "CORAL")):
    "Complete runs: every system after the first is `behind` the one before, in each cell."
    records = []
    for rank, name in enumerate(names):
        for d, domain in enumerate(DOMAINS[:domains]):
            for seed in range(seeds):
                accuracy = 0.8 - behind * rank - 0.05 * d + 0.01 * seed
                config = {"algorithm": name, "dataset": "DigitDomains", "test_domains": [domain]}
                config |= {"trial_seed": seed, "network": "small_cnn", "hparams": {}}
                chosen = {"step": 1, "validation_accuracy": 0.9, "test_accuracy": accuracy}
                made = {"run_id": f"{name}{domain}{seed}", "status": "complete", "config": config}
                records.append(made | {"selected": {"default": chosen}, "test_size": 100_000})
    return frame_of(records)


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_the_interval_is_that_of_the_contrast(seeds):
    frame = study(seeds, 2)
    cell = PAGE.systems_table(frame, None)["minus ERM"].iloc[1]
    assert cell == ("-10.0 (one seed)" if seeds == 1 else "-10.0 (equal in all seeds)")
    (line,) = PAGE.systems_verdict(frame, None)
    said = "one trial seed" if seeds == 1 else "no variance over seeds"
    assert line.startswith(f"Not decided: {said}")
    assert "CORAL -10.0" in line


def test_the_answer_is_the_first_sentence_of_the_verdict(monkeypatch):
    said = [Line("GMoE is worse.", "The others are undecided."), "One row is undertrained."]
    monkeypatch.setitem(PAGE.systems_verdict.__globals__, "verdict_lines", lambda *given: said)
    (line,) = PAGE.systems_verdict(study(2, 2), None)
    assert line.sentences == (*said[0].sentences, said[1])


def test_the_overhead_of_a_sweep_is_percent_of_a_minute_and_seconds_of_a_tiny_run():
    seconds = {"tiny": {"loop": [0.5] * 3, "sweep": [0.6, 0.65, 0.8]}}
    seconds["minute"] = {"loop": [60.0] * 3, "sweep": [60.6, 60.9, 63.0]}
    record = {"what": "sweep", "scale": "full", "bf16": "amx", "seconds": seconds}
    table = SWEEPS.target_table(record)
    assert table["median"].round(6).tolist() == [1.5, 0.15]
    assert table.verdict.str.startswith("met").all()


@pytest.mark.slow
def test_a_sweep_is_timed_without_the_start_of_its_process():
    record = SWEEPS.run(1, "tiny", say=lambda line: None)
    assert record["what"] == "sweep"
    assert {*record["seconds"]} == {"tiny", "minute"}
    for times in record["seconds"].values():
        assert 0 < times["loop"][0]
        assert 0 < times["sweep"][0] < 5
