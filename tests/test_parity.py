"""bf16 beside float32 in pairs: who is a twin, the statistics by hand, and a sentence for every
outcome."""

import json
import math
import re

import invented
import numpy as np
import pytest
from scipy.stats import t

from hmoe_repro.analysis.precision_parity import (
    ACCURACY,
    LOSS,
    NMI,
    VALIDATION,
    outcomes,
    paired_runs,
    parity_summary,
    parity_verdict,
    precision_pairs,
    unpaired_notes,
)
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.analysis.tables import run_results
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.report.render import KINDS, render
from hmoe_repro.training.run_config import RunConfig

DOMAINS = ("+90%", "+80%", "-90%")


def run(
    algorithm,
    domain,
    seed,
    precision,
    accuracy=0.5,
    nmi=0.5,
    loss=1.0,
    status="complete",
    steps=301,
):
    "A run of which everything that is compared is given; MAX and OOD are a point apart from MIX."
    made = invented.record(algorithm, "photo", seed, np.random.default_rng(0), steps=steps)
    made["config"] |= {"precision": precision, "dataset": "ColoredDigits", "test_domains": [domain]}
    made["run_id"] = RunConfig.from_dict(made["config"]).run_id
    made["selected"] = {
        mode: {"step": 20, "validation_accuracy": 0.9, "test_accuracy": accuracy + 0.01 * i}
        for i, mode in enumerate(("default",) if algorithm == "ERM" else ("mix", "max", "ood"))
    }
    made["checkpoints"][-1]["losses"] |= (
        {"loss": loss} if algorithm == "ERM" else {"loss": loss, "L_y": loss / 2}
    )
    if algorithm != "ERM":
        made["discovery"] = made["discovery"] | {
            "nmi_domain": nmi,
            "nmi_class": 0.1,
            "nmi_colour": None,
        }
    return made | (
        {
            "status": "failed",
            "reason": "NaN loss at step 9",
            "selected": {},
            "checkpoints": [],
            "discovery": None,
        }
        if status == "failed"
        else {}
    )


def study(shifts, noise=(-0.05, 0.0, 0.05), domains=DOMAINS, algorithms=("ERM", "HMOE-DN")):
    """Both precisions of every cell; `shifts` are added in bf16 to accuracy and NMI, seed by seed,
    in every domain."""
    runs = []
    for algorithm in algorithms:
        for domain in domains:
            for seed, (n, shift) in enumerate(zip(noise, shifts)):
                runs += [
                    run(algorithm, domain, seed, "float32", 0.5 + n, 0.5 + n, 1 + n),
                    run(algorithm, domain, seed, "bf16", 0.5 + n + shift, 0.5 + n + shift, 1 + n),
                ]
    return runs


def summary_of(runs):
    return parity_summary(paired_runs(precision_pairs(frame_of(runs))))


# Twins


def test_twins_differ_in_the_precision_and_in_nothing_else():
    runs = [
        run("ERM", "+90%", 0, "float32"),
        run("ERM", "+90%", 0, "bf16"),
        run("ERM", "+90%", 1, "bf16", steps=11),
        run("ERM", "+90%", 1, "float32"),
        run("ERM", "+80%", 0, "float32-compile"),
    ]
    frame = frame_of(runs)
    pairs = precision_pairs(frame)
    assert [(a.run_id, b.run_id) for a, b in pairs] == [(runs[0]["run_id"], runs[1]["run_id"])]
    assert runs[0]["run_id"] != runs[1]["run_id"]
    notes = unpaired_notes(frame)
    assert len(notes) == 2
    kinds, rows = zip(*(note.split(" (run")[0].split(": ") for note in notes))
    assert [kind.split()[-1] for kind in kinds] == ["bf16", "float32"]
    assert all("no complete run" in kind for kind in kinds)
    assert {*rows} == {"ERM on +90%, seed 1"}
    more = frame_of([*runs, run("ERM", "+80%", 0, "float32")])
    assert len(precision_pairs(more, "float32", "float32-compile")) == 1


def test_a_study_of_precisions_cannot_be_tabulated_unsorted():
    with pytest.raises(HmoeError, match="one kind.*column"):
        run_results(frame_of(study((0, 0, 0))))


def test_no_pair_is_an_error_and_a_failure_a_note():
    alone = [
        run("ERM", "+90%", 0, "float32"),
        run("ERM", "+90%", 0, "bf16", status="failed"),
        run("ERM", "+80%", 0, "float32", status="failed"),
        run("ERM", "-90%", 0, "bf16", status="failed"),
        run("ERM", "-90%", 0, "float32", status="failed"),
    ]
    with pytest.raises(HmoeError, match="both float32.*bf16"):
        precision_pairs(frame_of(alone))
    notes = [re.split(" in |: ERM on |, seed ", n)[:3] for n in unpaired_notes(frame_of(alone))]
    assert [tuple(note) for note in notes] == [
        ("failed", "bf16", "+90%"),
        ("failed", "bf16", "-90%"),
        ("failed", "float32", "+80%"),
        ("failed", "float32", "-90%"),
        ("no complete run", "bf16", "+90%"),
    ]


# Statistics


def test_differences_by_hand():
    frame = paired_runs(precision_pairs(frame_of(study((0.02, 0.0, -0.01)))))
    assert list(dict.fromkeys(zip(frame.measure, frame.row))) == [
        (ACCURACY, "ERM"),
        (ACCURACY, "HMOE-DN MIX"),
        (ACCURACY, "HMOE-DN MAX"),
        (ACCURACY, "HMOE-DN OOD"),
        (VALIDATION, "ERM"),
        (VALIDATION, "HMOE-DN MIX"),
        (VALIDATION, "HMOE-DN MAX"),
        (VALIDATION, "HMOE-DN OOD"),
        (NMI, "HMOE-DN, domain"),
        (NMI, "HMOE-DN, class"),
        (LOSS, "ERM"),
        (LOSS, "HMOE-DN"),
        (LOSS, "HMOE-DN, L_y"),
    ]
    mine = frame[(frame.measure == ACCURACY) & (frame.row == "HMOE-DN MAX")]
    assert list(mine.test_domain) == [d for d in DOMAINS for _ in range(3)]
    assert np.allclose(mine.difference, [2, 0, -1] * 3)
    assert np.allclose(mine.base, [46, 51, 56] * 3)
    row = parity_summary(frame).set_index(["measure", "row"]).loc[(ACCURACY, "HMOE-DN MAX")]
    assert row.pairs == 9
    assert row.difference == pytest.approx(1 / 3)
    assert row.seed_noise == pytest.approx(5)
    assert row.rms == pytest.approx(math.sqrt(5 / 3))
    error = np.std([2, 0, -1], ddof=1) / 3  # three seeds, three domains of equal variance
    assert row.high - row.difference == pytest.approx(t.ppf(0.975, 6) * error)
    assert row.difference - row.low == pytest.approx(t.ppf(0.975, 6) * error)
    assert row.p == pytest.approx(2 * t.sf(1 / 3 / error, 6))
    loss = parity_summary(frame).set_index(["measure", "row"]).loc[(LOSS, "HMOE-DN, L_y")]
    assert loss.base == pytest.approx(0.5)
    assert loss.rms == 0
    assert loss.seed_noise == pytest.approx(0.025)


def test_seed_noise_is_taken_within_domains():
    "Domains of different difficulty do not add to the noise of seeds."
    runs = [
        run("ERM", d, s, p, accuracy=a + 0.01 * s)
        for d, a in zip(DOMAINS, (0.2, 0.5, 0.9))
        for s in range(3)
        for p in ("float32", "bf16")
    ]
    assert summary_of(runs).iloc[0].seed_noise == pytest.approx(1)


# The verdict


@pytest.mark.parametrize(
    "shifts, outcome, said",
    [
        (
            (0.011, -0.010, 0.001),
            "not significant",
            "No change beyond seed noise was detected: no mean paired difference is significant "
            "in any of 10 rows.",
        ),
        (
            (0.020, 0.021, 0.019),
            "shifted",
            "Shifted, but not beyond seed noise: ERM (accuracy +2, 95 % CI +1.92 to +2.08)",
        ),
        (
            (-0.090, -0.091, -0.089),
            "beyond seed noise",
            "Yes: bf16 changes results beyond seed noise in ERM (accuracy -9, 95 % CI -9.08 to "
            "-8.92), HMOE-DN MIX (accuracy -9, 95 % CI -9.08 to -8.92)",
        ),
        (
            (0, 0, 0),
            "equal",
            "No comparison: all pairs are bitwise identical, so bf16 had no effect",
        ),
    ],
)
def test_the_answer_follows_the_records(shifts, outcome, said):
    summary = summary_of(study(shifts))
    line = parity_verdict(summary)[0]
    assert outcomes(summary).iloc[0] == outcome, line
    assert line.startswith(said), line
    # every row admits a shift as large as the seed noise, or none does where one is found
    assert ("Nor is equality shown: " in line) == (outcome == "not significant")


def test_one_seed_decides_nothing():
    one = summary_of(study((0.03,), noise=(0.0,), domains=("+90%",)))
    assert parity_verdict(one)[0].startswith("Not decided: one")
    runs = [run("ERM", d, 0, "float32") for d in DOMAINS]
    runs += [run("ERM", d, 0, "bf16", accuracy=0.53 + 0.001 * i) for i, d in enumerate(DOMAINS)]
    assert outcomes(summary_of(runs)).iloc[0] == "unknown"


def test_a_difference_counts_by_holms_correction_and_the_loss_is_answered_apart():
    "One of thirteen rows beyond its own limit: a chance of 0.02 is not one of 0.02 in thirteen."
    summary = summary_of(study((0.011, -0.010, 0.001)))
    row = summary.index[(summary["row"] == "ERM") & (summary.measure == LOSS)][0]
    summary.loc[row, ["difference", "low", "high", "rms"]] = 0.0002, 0.00002, 0.00038, 0.0003
    summary.loc[row, ["seed_noise", "p"]] = 0.0001, 0.036
    assert outcomes(summary)[row] == "not significant"
    results, loss = parity_verdict(summary)[:2]
    assert results.startswith("No change beyond")
    assert "loss" not in results
    assert "No change beyond" in loss
    rest = loss.partition("without Holm's")[2]
    assert "ERM (final loss" in rest
    assert re.findall(r"\+[\d.e-]+\d", rest) == ["+0.0002", "+2e-05", "+0.00038"]
    summary.loc[row, "p"] = 0.000005
    assert outcomes(summary)[row] == "beyond seed noise"
    results, loss = parity_verdict(summary)[:2]
    assert results.startswith("No change")
    assert "Yes: bf16 changes" in loss
    assert outcomes(summary.loc[[row]].assign(p=0.036))[row] == "beyond seed noise"


def test_what_could_have_been_seen_is_said():
    lines = parity_verdict(
        summary_of(study((0.06, -0.06, 0.01), domains=("-90%",), algorithms=("ERM",)))
    )
    assert lines[-1].endswith("excluded: ERM (accuracy).")
    sharp = parity_verdict(summary_of(study((0.002, -0.002, 0.001))))
    assert not any("is not excluded" in line for line in sharp)


# The page


@pytest.mark.slow
def test_the_page(warm_kernels, tmp_path):
    runs = study((0.011, -0.010, 0.001), domains=("-90%",))
    lost = next(
        r
        for r in runs
        if r["config"]["precision"] == "bf16"
        and r["config"]["trial_seed"] == 2
        and r["config"]["algorithm"] == "HMOE-DN"
    )
    runs = [r for r in runs if r is not lost] + [run("HMOE-DN", "-90%", 2, "bf16", status="failed")]
    invented.write_study(tmp_path / "store", "mnist-parity", runs)
    place = {"store": tmp_path / "store", "output": tmp_path}
    render("precision_parity", "mnist", **place, formats=KINDS)
    page = (tmp_path / "mnist" / "precision_parity.ipynb").read_text()
    for said in (
        "precision: bf16, float32",
        "5 pairs of runs differ in nothing but the precision",
        "failed in bf16: HMOE-DN on -90%, seed 2",
        "no complete run in bf16: HMOE-DN on -90%, seed 2",
        "No change beyond seed noise",
        "is not excluded",
    ):
        assert said in page, said
    head = (tmp_path / "mnist" / "precision_parity.md").read_text().splitlines()[2]
    columns = "measure row pairs float32 difference low high p".split()
    assert head == f"| {' | '.join([*columns, 'seed noise', 'rms'])} |"
    assert len(
        (tmp_path / "mnist" / "precision_parity_pairs.csv").read_text().splitlines()
    ) == 1 + 3 * (2 + 1) + 2 * (2 * 3 + 2 + 2)
    facts = json.loads((tmp_path / "mnist" / "precision_parity.provenance.json").read_text())
    assert facts["precision"] == ["bf16", "float32"]
    assert facts["failed"] == [lost["run_id"]]
    assert (tmp_path / "mnist" / "precision_parity.png").stat().st_size > 5000
