"""Compute every number and every verdict of the report from the published records.

`collect()` returns a dictionary from names to `Value`. The prose in `report.typ` quotes a value by
its name, and the build fails if there is no value of that name. A new study changes the values at
the next build, without any change to the prose.
"""

import json
import math
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

import hmoe_repro as hm
from hmoe_repro.analysis import claims as judged
from hmoe_repro.analysis.answers import part_answer
from hmoe_repro.analysis.published import paper_numbers
from hmoe_repro.analysis.results import load_study, margin_of, results, results_dir, runs
from hmoe_repro.analysis.statistics import (
    contrasts,
    interquartile_mean,
    mean_interval,
    rate,
    value_grid,
)
from hmoe_repro.core.toml import package_toml
from hmoe_repro.report.page import quoted_cost
from hmoe_repro.report.readme import MIN_NMI, README_RUNS, STATUS, scorecard
from hmoe_repro.studies.studies import count_runs
from hmoe_repro.studies.study_file import STUDIES, read_study

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Value:
    """A value that the prose quotes.

    Args:
        text: the value as the report prints it.
        source: the records, figure file or settings file that it is computed from.
    """

    text: str
    source: str


def record_source(*studies: str) -> str:
    """Name the files of studies as the source of a value."""
    return ", ".join(f"results/{study}" for study in studies)


def minus(text: str) -> str:
    """Print hyphens before numbers as minus signs."""
    return re.sub(r"(?<![\w−-])-(?=\d)", "−", text)


# Protocols

SCALES = {"paper": "full", "mnist": "reduced", "pacs": "reduced", "quick": "stand-in"}
FULL_STUDIES = {"quick-toy": "full"}  # at the paper's scale in a profile of another name
OWN_DATA = {"mnist-cues-turn": "own data", "mnist-cues-width": "own data"}


def scale_of(study: str) -> str:
    """Return 'full', 'reduced', 'stand-in', 'own data' or 'measured', the protocol of a study."""
    if study.startswith("bench"):
        return "measured"
    special = FULL_STUDIES | OWN_DATA
    return special.get(study) or SCALES[study.partition("-")[0]]


# Claims

FIRST_WORDS = {
    judged.SUPPORTED: "Yes",
    judged.CONTRADICTED: "No",
    judged.MIXED: "Partly",
    judged.UNDECIDED: "Undecided",
    judged.NEEDS_SCALE: "Undecided",
    judged.UNTESTABLE: "Undecided",
}


DECIDED = (judged.SUPPORTED, judged.CONTRADICTED)


@cache
def claim_frames(store: str = "") -> dict[str, pd.DataFrame]:
    """Return study -> its frame, for all studies that claims read and that a store has."""
    return judged.claim_frames(judged.read_claims(), store)


@cache
def claim_results(store: str = "") -> tuple[judged.ClaimResult, ...]:
    """Judge all claims on the records of a store."""
    return tuple(judged.evaluate_claims(judged.read_claims(), claim_frames(store)))


def part_key(claim: judged.Claim, part: judged.Part) -> str:
    """Name a claim on one benchmark: the claim and the first study that measures it."""
    return f"{claim.key}/{part.studies[0]}"


def part_verdict(claim: judged.Claim, part: judged.Part) -> str:
    """Return the verdict on one benchmark: undecided if the claim needs the paper's scale."""
    if claim.scale or claim.untestable:
        return "undecided"
    return FIRST_WORDS[part.verdict].lower()


def number_text(evidence: judged.Evidence) -> str:
    """Print the number of some evidence with its unit, without the interval."""
    if evidence.hits is not None:
        return f"{evidence.hits} of {evidence.runs}"
    unit = evidence.unit.replace("x ", "times ")
    return minus(f"{evidence.format(evidence.value)} {unit}")


def ends_text(evidence: judged.Evidence) -> str:
    """Print the ends of the interval of some evidence: '−1.4 to +0.6'."""
    if not evidence.measured:
        return "no interval"
    if evidence.hits is not None:
        if getattr(evidence, "groups", {}):  # test domains differ: counts by domain
            return evidence.group_text().replace("_painting", "")
        return f"{evidence.low:.0f} to {evidence.high:.0f} %"
    return minus(f"{evidence.format(evidence.low)} to {evidence.format(evidence.high)}")


def split_answer(text: str) -> tuple[str, str]:
    """Split an answer in its first words ('Yes, within 1 point') and the finding."""
    word, _, finding = text.partition(": ")
    return minus(word), minus(finding)


def claim_values(store: str = "") -> dict[str, Value]:
    """Return the values of every claim on every benchmark.

    A claim on a benchmark has the values `number`, `ends`, `text`, `seeds`, `runs`, `verdict`,
    `word` and `finding`. A claim as a whole has `verdict`, and `pooled` over several studies.
    """
    values = {}
    for result in claim_results(store):
        claim = result.claim
        everything = sorted({study for part in result.parts for study in part.studies})
        whole = f"{claim.key}/verdict"
        values[whole] = Value(FIRST_WORDS[result.verdict].lower(), record_source(*everything))
        if len(result.parts) > 1 and result.evidence.measured:
            text = f"{number_text(result.evidence)} (95 % CI {ends_text(result.evidence)})"
            values[f"{claim.key}/pooled"] = Value(text, record_source(*everything))
        for part in result.parts:
            evidence = part.evidence
            if math.isnan(evidence.value):
                continue
            name = part_key(claim, part)
            source = record_source(*part.studies)
            word, finding = split_answer(part_answer(claim, part).text)
            interval = f"95 % CI {ends_text(evidence)}" if evidence.measured else "no interval"
            texts = {
                "number": number_text(evidence),
                "ends": ends_text(evidence),
                "text": f"{number_text(evidence)} ({interval})",
                "seeds": str(evidence.seeds),
                "runs": str(evidence.runs),
                "verdict": part_verdict(claim, part),
                "word": word,
                "finding": finding,
            }
            for field, text in texts.items():
                values[f"{name}/{field}"] = Value(text, source)
    return values


EQUAL_UPDATES = "discovery pays"


def payoff_values(store: str = "") -> dict[str, Value]:
    """Return how many comparisons of HMOE-DN with ERM at equal updates have which outcome."""
    [result] = [one for one in claim_results(store) if one.claim.key == EQUAL_UPDATES]
    parts = [part for part in result.parts if part.evidence.measured]
    source = record_source(*(study for part in parts for study in part.studies))
    above = sum(part.evidence.low > 0 for part in parts)
    below = sum(part.evidence.high < 0 for part in parts)
    return {
        "payoff/comparisons": Value(str(len(parts)), source),
        "payoff/above": Value(str(above), source),
        "payoff/below": Value(str(below), source),
        "payoff/undecided": Value(str(len(parts) - above - below), source),
    }


def confirmation_values(store: str = "") -> dict[str, Value]:
    """Return the outcome of each claim that was tried again on new seeds."""
    values = {}
    for result in claim_results(store):
        if result.origin is None or result.origin.again is None:
            continue
        again = result.origin.again
        name = f"confirm/{result.claim.key}"
        source = record_source(*again.studies)
        words = "confirmed" if result.origin.confirmed else "did not confirm"
        text = f"{number_text(again.evidence)} (95 % CI {ends_text(again.evidence)})"
        values[f"{name}/words"] = Value(words, source)
        values[f"{name}/text"] = Value(text, source)
        values[f"{name}/seeds"] = Value(str(again.evidence.seeds), source)
        values[f"{name}/verdict"] = Value(FIRST_WORDS[again.verdict].lower(), source)
    return values


def claim_parts(store: str = "") -> dict[str, list[dict]]:
    """Return claim -> its answers, one for each benchmark and study, for the tables of answers."""
    answers = {}
    for result in claim_results(store):
        rows = []
        for part in result.parts:
            if math.isnan(part.evidence.value):
                continue
            rows.append(answer_row(result.claim, part))
        if len(rows) > 1:
            rows.append(pooled_answer(result))
        answers[result.claim.key] = rows
    return answers


def answer_row(claim: judged.Claim, part: judged.Part) -> dict:
    """Return the row of a claim on one benchmark: verdict, number with interval, data, study."""
    evidence = part.evidence
    word, finding = split_answer(part_answer(claim, part).text)
    if getattr(part, "is_replaced", False):
        word = f"{word}; its trial counts"
    number = f"{number_text(evidence)} ({ends_text(evidence)})"
    return {
        "word": word,
        "finding": finding[:1].upper() + finding[1:],
        "number": number if evidence.measured else f"{number_text(evidence)}, no interval",
        "data": part.benchmark,
        "seeds": str(evidence.seeds or "–"),
        "scale": scale_of(part.studies[0]),
        "studies": list(part.studies),
    }


def pooled_answer(result: judged.ClaimResult) -> dict:
    """Return the row of all studies of a claim together.

    It has the verdict, and the pooled number if there are three studies or more.
    """
    finding = "together"
    if result.evidence.hits is None and len(result.parts) > 2:  # two leave one degree of freedom
        finding = f"{number_text(result.evidence)} ({ends_text(result.evidence)})"
    studies = sorted({study for part in result.parts for study in part.studies})
    return {
        "word": FIRST_WORDS[result.verdict],
        "finding": finding,
        "number": finding,
        "data": "all together",
        "seeds": "",
        "scale": "",
        "studies": [f"{len(result.parts)} studies", *studies],
    }


# Full protocol

FULL_COLORED = ("paper-colored", "paper-colored-baselines")
FULL_DOMAINS = ("+90%", "+80%", "-90%")


@cache
def paper_domains() -> dict[tuple[str, str], dict[str, float]]:
    """Return (algorithm, mode) -> test domain -> the accuracy in HMOE's Table 4, in %."""
    table = paper_numbers(artefact="HMOE Table 4")
    quoted = {}
    for key, rows in table.groupby(["algorithm", "mode"]):
        quoted[key] = rows.set_index("test_domain").value.to_dict()
    with open(HERE / "paper_table4.toml", "rb") as file:
        baselines = tomllib.load(file)["accuracy"]
    for algorithm, accuracies in baselines.items():
        quoted[algorithm, "default"] = dict(zip(FULL_DOMAINS, accuracies, strict=True))
    return quoted


@cache
def full_rows(store: str = "") -> list[dict]:
    """Return the accuracies on full-scale ColoredMNIST, a row for each algorithm and mode.

    Returns:
        Rows with algorithm, mode, the mean for each test domain, `average`, `low`, `high`, `seeds`,
        and `paper`, the average that HMOE's Table 1 prints (NaN: none).
    """
    quoted = paper_numbers(artefact="HMOE Table 1")
    quoted = quoted[quoted.dataset == "ColoredMNIST"].set_index(["algorithm", "mode"]).value
    rows = []
    for study in FULL_COLORED:
        frame = results(study, store)
        frame = frame[frame.accuracy.notna()]
        for (algorithm, mode), subset in frame.groupby(["algorithm", "mode"], sort=False):
            grid = value_grid(subset) * 100
            interval = mean_interval(grid)
            row = {"algorithm": algorithm, "mode": mode, "study": study}
            row |= {domain: float(grid[domain].mean()) for domain in grid}
            row |= {f"runs {domain}": int(grid[domain].count()) for domain in grid}
            row |= {"average": interval.mean, "low": interval.low, "high": interval.high}
            row |= {"seeds": interval.seeds, "domains": grid.shape[1]}
            row["paper"] = float(quoted.get((algorithm, mode), math.nan))
            row["paper domains"] = paper_domains().get((algorithm, mode), {})
            rows.append(row)
    return rows


def full_values(store: str = "") -> dict[str, Value]:
    """Return values about full-scale ColoredMNIST."""
    values = {}
    rows = full_rows(store)
    source = record_source(*FULL_COLORED)
    complete = [row for row in rows if row["domains"] == 3]
    with_paper = [row for row in complete if not math.isnan(row["paper"])]
    inside = [row for row in with_paper if row["low"] <= row["paper"] <= row["high"]]
    hmoe = [row for row in with_paper if row["algorithm"].startswith("HMOE")]
    apart = max(abs(row["average"] - row["paper"]) for row in hmoe)
    outside = [row["algorithm"] for row in with_paper if row not in inside]
    values["full/rows"] = Value(str(len(with_paper)), source)
    values["full/inside"] = Value(str(len(inside)), source)
    values["full/outside"] = Value(", ".join(outside) or "none", source)
    values["full/largest gap of HMOE"] = Value(f"{apart:.1f}", source)
    values |= full_domain_values(with_paper, source)
    for row in complete:
        name = f"full/{row['algorithm']}/{row['mode']}"
        values[f"{name}/average"] = Value(f"{row['average']:.1f}", source)
        ends = f"{row['low']:.1f} to {row['high']:.1f}"
        values[f"{name}/ends"] = Value(minus(ends), source)
        if not math.isnan(row["paper"]):
            values[f"{name}/paper"] = Value(f"{row['paper']:.1f}", "paper_numbers.csv")
        for domain in ("+90%", "+80%", "-90%"):
            values[f"{name}/{domain}"] = Value(f"{row[domain]:.1f}", source)
    arm = value_grid(arm_frame(store)) * 100
    for domain in arm:
        seeds = sorted(arm[domain].dropna())
        text = ", ".join(f"{value:.1f}" for value in seeds[:-1]) + f" and {seeds[-1]:.1f}"
        values[f"full/ARM/seeds {domain}"] = Value(text, source)
    best = max(row["-90%"] for row in complete)
    values["full/best -90%"] = Value(f"{best:.1f}", source)
    quoted = full_quoted_runs()
    values["full/planned runs"] = Value(f"{quoted['planned']}", "study_files/paper-colored*.toml")
    trained = sum(len(runs(results(study, store))) for study in FULL_COLORED)
    values["full/trained runs"] = Value(f"{trained}", source)
    share = 100 * trained / quoted["planned"]
    values["full/share of runs"] = Value(f"{share:.0f}", source)
    values["full/baselines"] = Value(str(full_baselines(rows)), source)
    values["full/planned baselines"] = Value(
        str(quoted["baselines"]), values_source(FULL_COLORED[1])
    )
    return values


def full_domain_values(rows: list[dict], source: str) -> dict[str, Value]:
    """Count the accuracies by test domain that are within the margin of HMOE's Table 4."""
    margin = margin_of("points")
    far = []
    cells = 0
    for row in rows:
        for domain, quoted in row["paper domains"].items():
            cells += 1
            gap = row[domain] - quoted
            if abs(gap) > margin:
                far.append(f"{row['algorithm']} on {domain} by {abs(gap):.1f}")
    arm = next(row for row in rows if row["algorithm"] == "ARM")
    values = {
        "full/models": Value(str(len({row["algorithm"] for row in rows})), source),
        "full/cells": Value(str(cells), source),
        "full/cells within": Value(str(cells - len(far)), source),
        "full/cells far": Value(minus(", ".join(far)) or "none", source),
    }
    for domain in FULL_DOMAINS:
        values[f"full/ARM/{domain}"] = Value(f"{arm[domain]:.1f}", source)
        quoted = arm["paper domains"][domain]
        values[f"full/ARM/paper {domain}"] = Value(f"{quoted:.1f}", "paper_table4.toml")
    own = paper_domains()
    for algorithm, mode in (("HMOE-DN", "mix"), ("ERM", "default")):
        quoted = own[algorithm, mode]["-90%"]
        values[f"full/{algorithm}/paper -90%"] = Value(f"{quoted:.1f}", "paper_table4.toml")
    return values


def values_source(study: str) -> str:
    """Name the settings file of a study as the source of a value."""
    return f"hmoe_repro/study_files/{study}.toml"


def arm_frame(store: str = "") -> pd.DataFrame:
    """Return the rows of ARM on full-scale ColoredMNIST."""
    frame = results(FULL_COLORED[1], store)
    return frame[(frame.algorithm == "ARM") & frame.accuracy.notna()]


def full_baselines(rows: list[dict]) -> int:
    """Count the baselines of HMOE's Table 4, without ERM, that were trained on every domain."""
    return sum(row["study"] == FULL_COLORED[1] and row["domains"] == 3 for row in rows)


def full_quoted_runs() -> dict[str, int]:
    """Count the runs and baselines that the full protocol of ColoredMNIST plans."""
    planned = sum(count_runs(read_study(study)) for study in FULL_COLORED)
    baselines = {name for block in read_study(FULL_COLORED[1]).runs for name in block.algorithms}
    return {"planned": planned, "baselines": len(baselines)}


# What experts follow


def _counted(name: str, nmi: pd.Series, source: str) -> dict[str, Value]:
    """Return how often an NMI reaches `MIN_NMI`: 'N of M' and its interval."""
    hits, number = int((nmi >= MIN_NMI).sum()), len(nmi)
    _, low, high = rate(hits, number)
    return {
        f"{name}/count": Value(f"{hits} of {number}", source),
        f"{name}/ends": Value(f"{100 * low:.0f} to {100 * high:.0f} %", source),
        f"{name}/mean": Value(minus(f"{nmi.mean():.2f}"), source),
    }


def agreement(study: str, query: str, factor: str, store: str = "") -> pd.Series:
    """Return the NMI of experts with a factor in the complete runs that a query selects."""
    rows = runs(results(study, store)).query("status == 'complete'").query(query)
    return rows.set_index("test_domain")[f"discovery.nmi_{factor}"].astype(float)


def agreement_of(benchmark: str, store: str = "") -> pd.Series:
    """Return the NMI of experts with domains in the runs of a benchmark that the README counts."""
    parts = [agreement(study, query, "domain", store) for study, query in README_RUNS[benchmark]]
    return pd.concat(parts)


def discovery_values(store: str = "") -> dict[str, Value]:
    """Return values about what the experts of HMOE follow."""
    own = "algorithm == 'HMOE-DN'"
    values = {}
    source = record_source("paper-colored")
    for factor in ("colour", "domain", "class"):
        nmi = agreement("paper-colored", own, factor, store)
        values |= _counted(f"experts/full/{factor}", nmi, source)
    for benchmark, studies in README_RUNS.items():
        nmi = agreement_of(benchmark, store)
        source = record_source(*(study for study, _ in studies))
        values |= _counted(f"experts/{benchmark}", nmi, source)
        held_out = sorted({name.partition("_")[0] for name in nmi[nmi >= MIN_NMI].index})
        values[f"experts/{benchmark}/held out"] = Value(", ".join(held_out) or "none", source)
    styles = agreement("quick-styles", own, "domain", store)
    values |= _counted("experts/styles", styles, record_source("quick-styles"))
    values["experts/threshold"] = Value(f"{MIN_NMI:g}", "hmoe_repro.report.readme.MIN_NMI")
    return values


CUES = "figures/mnist/cues.csv"
BALANCED = "figures/mnist/cues_balanced.csv"
CHANGES = {
    "lambda_ad 0": "no L_ad",
    "lambda_kl 2": "twice L_kl",
    "labelled_fraction 0.05": "labels",
}


def cue_table() -> pd.DataFrame:
    """Return how often experts follow the hue, and the second cue, for each pair of strengths."""
    return pd.read_csv(ROOT / CUES)


def cue_values() -> dict[str, Value]:
    """Return values about the crossed cues."""
    table = cue_table()
    values = {}
    for second, part in table.groupby("second cue"):
        total = int(part.runs.sum())
        for name, column in (("hue", "hue wins"), ("second", "second wins")):
            hits = int(part[column].sum())
            _, low, high = rate(hits, total)
            values[f"cues/{second}/{name}"] = Value(f"{hits} of {total}", CUES)
            ends = f"{100 * low:.0f} to {100 * high:.0f} %"
            values[f"cues/{second}/{name}/ends"] = Value(ends, CUES)
        strongest = part.sort_values(["hue", "strength"], ascending=[False, True]).iloc[0]
        hits = f"{int(strongest['hue wins'])} of {int(strongest.runs)}"
        values[f"cues/{second}/strongest hue"] = Value(hits, CUES)
        weakest = part[part.hue == part.hue.min()]
        hits = f"{int(weakest['hue wins'].sum())} of {int(weakest.runs.sum())}"
        values[f"cues/{second}/weakest hue"] = Value(hits, CUES)
        corner = part.sort_values(["hue", "strength"], ascending=[True, False]).iloc[0]
        for name, column in (("hue", "hue wins"), ("second", "second wins")):
            hits = f"{int(corner[column])} of {int(corner.runs)}"
            values[f"cues/{second}/strongest second/{name}"] = Value(hits, CUES)
    balanced = pd.read_csv(ROOT / BALANCED)
    values["cues/balanced/seeds"] = Value(f"{balanced.seeds.min():.0f}", BALANCED)
    for row in balanced.itertuples():
        text = f"{row.mean:+.2f} ({row.low:+.2f} to {row.high:+.2f})"
        values[f"cues/balanced/{CHANGES[row.change]}"] = Value(minus(text), BALANCED)
    return values


# All algorithms

ALGORITHM_STUDIES = {
    "digits": "quick-table1",
    "frozen": "pacs-linear",
    "pacs": "pacs-pacs",
    "power": "pacs-power",
}


@cache
def algorithm_contrasts(study: str, store: str = "") -> pd.DataFrame:
    """Compare each algorithm of a study with ERM: averages over test domains, Holm-corrected."""
    frame = results(study, store)
    table = contrasts(frame[frame.accuracy.notna()])
    table = table[table.test_domain == "Average"]
    keep = table["mode"].isin(["default", "mix", "pred-ens"])
    return table[keep].reset_index(drop=True)


def has_study(study: str, store: str = "") -> bool:
    """Return whether a study has published records."""
    folder = Path(store) if store else results_dir()
    return (folder / f"{study}.jsonl").exists()


def algorithm_values(store: str = "") -> dict[str, Value]:
    """Return how many algorithms differ from ERM, for the studies of many algorithms."""
    values = {"algorithms/registry": Value(str(len(hm.list_algorithms())), "hm.list_algorithms()")}
    for name, study in ALGORITHM_STUDIES.items():
        if not has_study(study, store):
            continue
        table = algorithm_contrasts(study, store)
        source = record_source(study)
        decided = table[table.significant]
        better = decided[decided.difference > 0]
        worse = decided[decided.difference < 0]
        values[f"algorithms/{name}/compared"] = Value(str(len(table)), source)
        values[f"algorithms/{name}/better"] = Value(str(len(better)), source)
        values[f"algorithms/{name}/worse"] = Value(str(len(worse)), source)
        values[f"algorithms/{name}/better names"] = Value(listed(better.algorithm), source)
        values[f"algorithms/{name}/worse names"] = Value(listed(worse.algorithm), source)
        values[f"algorithms/{name}/seeds"] = Value(seeds_text(table.seeds), source)
        width = float((table.high - table.low).median() / 2)
        values[f"algorithms/{name}/half width"] = Value(f"{width:.1f}", source)
        if name == "digits":
            values |= paper_gap_values(width)
        best = table.loc[table.difference.idxmax()]
        values[f"algorithms/{name}/best"] = Value(str(best.algorithm), source)
        ends = f"{best.difference:+.1f} points, 95 % CI {best.low:+.1f} to {best.high:+.1f}"
        values[f"algorithms/{name}/best text"] = Value(minus(ends), source)
    return values


def paper_gap_values(width: float) -> dict[str, Value]:
    """Count the differences of HMOE's Table 1 to ERM that are at least `width` points."""
    quoted = paper_numbers(artefact="HMOE Table 1")
    erm = quoted[quoted.algorithm == "ERM"].set_index("dataset").value
    others = quoted[(quoted["mode"] == "default") & (quoted.algorithm != "ERM")]
    gaps = (others.value - others.dataset.map(erm)).abs()
    return {
        "paper/baselines": Value(str(len(gaps)), "paper_numbers.csv"),
        "paper/far baselines": Value(str(int((gaps >= width).sum())), "paper_numbers.csv"),
    }


def listed(names) -> str:
    """Join names with commas, or say 'none'."""
    return ", ".join(dict.fromkeys(names)) or "none"


def seeds_text(seeds: pd.Series) -> str:
    """Print a number of seeds, or its range: '3', '2 to 3'."""
    low, high = int(seeds.min()), int(seeds.max())
    return str(low) if low == high else f"{low} to {high}"


# Statistics


def signed_rank_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate with the exact 95 % interval of the signed-rank test.

    Args:
        values: one difference for each seed.

    Returns:
        The median of the means of all pairs of values, and the ends of its interval. The ends are
        NaN if no test of these many values can reach 5 %.
    """
    n = len(values)
    first, second = np.triu_indices(n)
    means = np.sort((values[first] + values[second]) / 2)
    counts = np.ones(1)
    for rank in range(1, n + 1):
        grown = np.zeros(len(counts) + rank)
        grown[: len(counts)] += counts
        grown[rank:] += counts
        counts = grown
    below = np.cumsum(counts) / 2.0**n
    cut = int((below <= 0.025).sum())  # that many pair means are outside at each end
    estimate = float(np.median(means))
    if cut == 0:
        return estimate, math.nan, math.nan
    return estimate, float(means[cut - 1]), float(means[len(means) - cut])


ANALYSED = {  # claim -> its studies in the table of three analyses ((): all of them)
    "as ERM, full-scale ColoredMNIST": (),
    "ARM, full-scale ColoredMNIST": (),
    "discovery pays": (),
    "masks beat one network": (),
    "experts beat dense twin": (),
}


def contrast_grid(claim: judged.Claim, studies: tuple[str, ...], store: str = "") -> pd.DataFrame:
    """Return the differences behind a claim about a contrast: trial seeds by test domains.

    Args:
        claim: a claim that `contrast_measure` judges.
        studies: the studies of one of its benchmarks, or of its fresh trial.
        store: folder of records.
    """
    tables = [*claim.tables, claim.confirm]
    changes = next(table for table in tables if tuple(table.get("studies", ())) == studies)
    arguments = claim.arguments | changes
    parts = [planned_rows(study, store) for study in studies]
    frame = pd.concat(parts, ignore_index=True).drop_duplicates(["run_id", "mode"])
    grids = []
    for side in (arguments["a"], arguments["b"]):
        rows = judged.rows_where(frame, side)
        groups = [rows]
        if arguments.get("over"):
            groups = [part for _, part in rows.groupby(list(arguments["over"]))]
        grids.append(sum(value_grid(part) for part in groups) / len(groups))
    grid = (grids[0] - grids[1]).dropna(how="all").dropna(how="all", axis=1)
    return 100 * grid


def planned_rows(study: str, store: str = "") -> pd.DataFrame:
    """Return the rows of a study for its claims, limited to its planned seeds if it has a plan."""
    frame = claim_frames(store)[study]
    plan = read_study(study).plan
    return frame if plan is None else frame[frame.trial_seed.isin(plan.seeds)]


def seed_interval(grid: pd.DataFrame) -> tuple[float, float, float]:
    """Return the mean and the 95 % interval of Student's t over seed means, however few."""
    means = grid.dropna().mean(axis=1)
    if len(means) < 2:
        return float(means.mean()), math.nan, math.nan
    low, high = stats.t.interval(0.95, len(means) - 1, means.mean(), stats.sem(means))
    return float(means.mean()), float(low), float(high)


@cache
def three_analyses(store: str = "") -> list[dict]:
    """Analyse the main contrasts in three ways.

    Returns:
        Rows with claim, study, and (estimate, low, high) of each analysis: `t` (Student's t, as
        everywhere in the report), `seeds` (Student's t over seed means, however few), `iqm`
        (interquartile mean, stratified bootstrap) and `rank` (Hodges-Lehmann on seed means, exact
        signed-rank test). NaN: the analysis needs more seeds.
    """
    rows = []
    for result in claim_results(store):
        if result.claim.key not in ANALYSED:
            continue
        for part in result.parts:
            if math.isnan(part.evidence.value):
                continue
            grid = contrast_grid(result.claim, part.studies, store)
            interval = mean_interval(grid)
            complete = grid.dropna()
            rows.append(
                {
                    "claim": result.claim,
                    "part": part,
                    "t": (interval.mean, interval.low, interval.high),
                    "seeds": seed_interval(grid),
                    "iqm": interquartile_mean(grid),
                    "rank": signed_rank_interval(complete.mean(axis=1).to_numpy()),
                }
            )
    return rows


def sign_of(low: float, high: float) -> str:
    """Return 'above', 'below' or 'includes 0', or '' if there is no interval."""
    if math.isnan(low):
        return ""
    if low > 0:
        return "above"
    return "below" if high < 0 else "includes 0"


def analysis_values(store: str = "") -> dict[str, Value]:
    """Return how often the three analyses agree about the sign of a contrast."""
    rows = three_analyses(store)
    source = "results/*.jsonl, rows of three_analyses"
    different = []
    compared = 0
    for row in rows:
        signs = [sign_of(*row[name][1:]) for name in ("t", "seeds", "iqm", "rank")]
        signs = [sign for sign in signs if sign]
        compared += len(signs) > 1
        if len(set(signs)) > 1:
            different.append(row["part"].studies[0])
    ranks = sum(math.isnan(row["rank"][1]) for row in rows)
    return {
        "analyses/contrasts": Value(str(len(rows)), source),
        "analyses/compared": Value(str(compared), source),
        "analyses/different": Value(str(len(different)), source),
        "analyses/different studies": Value(", ".join(different) or "none", source),
        "analyses/no rank interval": Value(str(ranks), source),
    }


# Released code


RELEASED = "quick-released"  # each algorithm with and without the released behaviour


def released_effect(fault: dict, store: str = "") -> str:
    """Return the effect of a fault on accuracy: released minus corrected, in points.

    Args:
        fault: a row of the library's `faults.toml`. `option` is the setting that repeats the
            released behaviour, with its values `released` and `corrected`. A fault without an
            option has a text in `effect`.
        store: folder of records.
    """
    option = fault.get("option")
    if not option:
        return fault["effect"]
    if not has_study(RELEASED, store):
        return "not measured"
    frame = results(RELEASED, store)
    frame = frame[(frame.algorithm == fault["algorithm"]) & frame.accuracy.notna()]
    column = f"hparams.{option}"
    if column not in frame:
        return "not measured"
    values = frame[column]
    sides = (values == fault["released"], (values == fault["corrected"]) | values.isna())
    grids = []
    for side in sides:  # a run without the option is corrected
        rows = frame[side]
        if rows.empty:
            return "not measured"
        grids.append(value_grid(rows[rows["mode"] == rows["mode"].iloc[0]]))
    grid = 100 * (grids[0] - grids[1]).dropna(how="all").dropna(how="all", axis=1)
    if grid.empty:
        return "not measured"
    interval = mean_interval(grid)
    return minus(f"{interval.mean:+.1f} ({interval.low:+.1f} to {interval.high:+.1f})")


# Runs and their cost


@dataclass(frozen=True)
class StudyFacts:
    """Facts of a published study.

    Args:
        name: the study.
        algorithms: number of algorithms.
        datasets: its data sets.
        seeds: number of trial seeds.
        runs: number of records.
        failed: number of records of failed runs.
        updates: smallest and largest number of updates.
        cpu_hours: hours of training on a processor, one thread a run.
        gpu_hours: hours of training on a GPU.
        gpu_runs: number of runs on a GPU.
        commits: commits of the code, the most frequent first.
        digest: SHA-256 of the file.
        finished: when its last run finished.
    """

    name: str
    algorithms: int
    datasets: tuple[str, ...]
    seeds: int
    runs: int
    failed: int
    updates: tuple[int, int]
    cpu_hours: float
    gpu_hours: float
    gpu_runs: int
    commits: tuple[str, ...]
    digest: str
    finished: str


def digests(folder: Path) -> dict[str, str]:
    """Return file -> SHA-256, from the list beside the records ('' if there is none)."""
    path = folder / "SHA256SUMS"
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line.split()[1].lstrip("*"): line.split()[0] for line in lines if line.strip()}


def study_facts(name: str, store: str = "") -> StudyFacts:
    """Read a study and return its facts."""
    records = load_study(name, store)
    folder = Path(store) if store else results_dir()
    hours = {"cpu": 0.0, "cuda": 0.0}
    gpu_runs = 0
    for record in records:
        kind = record["environment"]["device"].partition(":")[0]
        if math.isfinite(record["wall_time_s"] or 0):
            hours[kind] += (record["wall_time_s"] or 0) / 3600
        gpu_runs += kind == "cuda"
    configs = [record["config"] for record in records]
    updates = [config["steps"] for config in configs if config.get("steps")]
    commits = Counter(record["environment"]["commit"] for record in records)
    return StudyFacts(
        name=name,
        algorithms=len({config["algorithm"] for config in configs}),
        datasets=tuple(sorted({config["dataset"] for config in configs})),
        seeds=len({config["trial_seed"] for config in configs}),
        runs=len(records),
        failed=sum(record["status"] != "complete" for record in records),
        updates=(min(updates, default=0), max(updates, default=0)),
        cpu_hours=hours["cpu"],
        gpu_hours=hours["cuda"],
        gpu_runs=gpu_runs,
        commits=tuple(commit for commit, _ in commits.most_common()),
        digest=digests(folder).get(f"{name}.jsonl", ""),
        finished=max((record["finished"] or "" for record in records), default=""),
    )


@cache
def all_studies(store: str = "") -> tuple[StudyFacts, ...]:
    """Return the facts of every published study, by name."""
    folder = Path(store) if store else results_dir()
    return tuple(study_facts(path.stem, store) for path in sorted(folder.glob("*.jsonl")))


def thousands(number: float) -> str:
    """Print a whole number with commas."""
    return f"{number:,.0f}"


def cost_values(store: str = "") -> dict[str, Value]:
    """Return the numbers of studies and runs, and the hours that they took."""
    studies = all_studies(store)
    source = "results/*.jsonl"
    values = {
        "all/studies": Value(str(len(studies)), source),
        "all/runs": Value(thousands(sum(study.runs for study in studies)), source),
        "all/failed": Value(thousands(sum(study.failed for study in studies)), source),
        "all/gpu runs": Value(thousands(sum(study.gpu_runs for study in studies)), source),
        "all/cpu hours": Value(thousands(sum(study.cpu_hours for study in studies)), source),
        "all/gpu hours": Value(f"{sum(study.gpu_hours for study in studies):.1f}", source),
    }
    few = sum(study.seeds <= 3 for study in studies)
    values["all/studies of at most three seeds"] = Value(str(few), source)
    newest = max(study.finished for study in studies)[:10]
    values["all/newest"] = Value(newest, source)
    return values


# What was not run


def absent_studies(store: str = "") -> list[str]:
    """Return the studies of the papers' protocol that have no published record."""
    names = [name for name in STUDIES if name.startswith("paper-")]
    return [name for name in sorted(names) if not has_study(name, store)]


def gpu_hours_per_run(store: str = "") -> float:
    """Return the median hours of a full ColoredMNIST run on the GPU that trained them."""
    times = []
    for study in FULL_COLORED:
        for record in load_study(study, store):
            if record["environment"]["device"].startswith("cuda"):
                times.append(record["wall_time_s"] / 3600)
    return float(np.median(times))


def image_gigabytes(dataset: str, pixels: int = 224) -> float:
    """Return the size of the decoded images of a data set in gigabytes (NaN: number unknown)."""
    entry = package_toml("benchmarks.toml").get(dataset, {})
    copies = entry.get("copies", {})
    if not copies:
        return math.nan
    images = max(sum(counts) for counts in copies.values())
    return images * pixels * pixels * 3 / 1e9


def cost_rows(store: str = "") -> list[dict]:
    """Return the cost of each study that was not run.

    Returns:
        Rows with study, runs, hours, timed (number of runs that the hours are about), memory in
        GB, images (GB of decoded images), and basis ('quoted', 'measured' or '').
    """
    rows = []
    per_run = gpu_hours_per_run(store)
    for study in absent_studies(store):
        planned = read_study(study)
        cost = quoted_cost(study)
        datasets = list(dict.fromkeys(name for block in planned.runs for name in block.datasets))
        sizes = [image_gigabytes(name) for name in datasets]
        known = [size for size in sizes if not math.isnan(size)]
        row = {"study": study, "datasets": datasets, "runs": cost["runs"]}
        row |= {"hours": math.nan, "timed": cost["timed"], "memory": math.nan, "basis": ""}
        row["images"] = sum(known) if known else math.nan
        if cost["timed"]:
            row |= {"hours": cost["hours"], "memory": cost["memory"], "basis": "quoted"}
        elif set(datasets) == {"RotatedMNIST"}:
            row |= {"hours": per_run * cost["runs"], "timed": cost["runs"], "basis": "measured"}
        rows.append(row)
    return rows


def absent_values(store: str = "") -> dict[str, Value]:
    """Return the total cost of what was not run."""
    rows = cost_rows(store)
    quoted = [row for row in rows if row["basis"] == "quoted"]
    source = "hmoe_repro/study_files/paper-*.toml, GMoE Table 16"
    hours = sum(row["hours"] for row in quoted)
    unknown = [row for row in rows if not row["basis"]]
    return {
        "absent/studies": Value(str(len(rows)), source),
        "absent/runs": Value(thousands(sum(row["runs"] for row in rows)), source),
        "absent/quoted hours": Value(thousands(hours), source),
        "absent/quoted runs": Value(thousands(sum(row["timed"] for row in quoted)), source),
        "absent/memory": Value(f"{max(row['memory'] for row in quoted):.0f}", source),
        "absent/without estimate": Value(str(len(unknown)), source),
        "absent/minutes": Value(
            f"{60 * gpu_hours_per_run(store):.1f}", record_source(*FULL_COLORED)
        ),
    }


# The scorecard


def scorecard_values() -> dict[str, Value]:
    """Return how many figures and tables have which status and verdict."""
    scores = scorecard()
    source = "figures/*/*.provenance.json"
    statuses = Counter(score.status.partition(" (")[0] for score in scores)
    values = {"score/artefacts": Value(str(len(scores)), source)}
    for status in [*STATUS, "explained"]:
        values[f"score/{status}"] = Value(str(statuses[status]), source)
    verdicts = Counter(score.verdict for score in scores if score.verdict)
    values["score/judged"] = Value(str(verdicts.total()), source)
    for verdict in judged.VERDICTS:
        values[f"score/{verdict}"] = Value(str(verdicts[verdict]), source)
    return values


def verdict_counts(store: str = "") -> dict[str, Value]:
    """Return how many claims have which verdict and origin."""
    found = claim_results(store)
    source = "hmoe_repro/claims.toml, results/*.jsonl"
    papers = [result for result in found if not result.claim.ours]
    values = {
        "claims/all": Value(str(len(found)), source),
        "claims/of papers": Value(str(len(papers)), source),
        "claims/ours": Value(str(len(found) - len(papers)), source),
    }
    verdicts = Counter(result.verdict for result in papers)
    for verdict in judged.VERDICTS:
        values[f"claims/{verdict}"] = Value(str(verdicts[verdict]), source)
    planned = looked = 0
    for result in found:
        planned += any(part.origin and part.origin.kind == judged.PLANNED for part in result.parts)
        looked += result.claim.looked
    again = [result for result in found if result.origin and result.origin.again]
    confirmed = [result for result in again if result.origin.confirmed]
    decided = [one for one in again if one.origin.again.verdict in DECIDED]
    replicated = [one for one in decided if one.origin.confirmed]
    values["claims/decided again"] = Value(str(len(decided)), source)
    values["claims/replicated"] = Value(str(len(replicated)), source)
    values["claims/undecided again"] = Value(str(len(again) - len(decided)), source)
    values["claims/planned"] = Value(str(planned), source)
    values["claims/looked"] = Value(str(looked), source)
    values["claims/tried again"] = Value(str(len(again)), source)
    values["claims/same verdict"] = Value(str(len(confirmed)), source)
    return values


def protocol_values() -> dict[str, Value]:
    """Return the settings that the prose names, from study files and configurations."""
    values = {}
    for study in (
        "paper-colored", "mnist-colored", "pacs-pacs", "pacs-linear", "pacs-payoff", "pacs-dmg",
        "quick-digits", "quick-table1", "quick-payoff", "quick-toy", "mnist-cues-turn",
        "quick-restarts", "quick-confirm-masks", "quick-discovery-long", "pacs-power",
        "quick-payoff-double",
    ):  # fmt: skip
        source = values_source(study)
        blocks = read_study(study).runs
        steps = sorted({block.steps for block in blocks if block.steps})
        if steps:
            values[f"{study}/updates"] = Value(" to ".join(map(thousands, steps)), source)
        pixels = sorted({block.resolution for block in blocks if block.resolution})
        if pixels:
            values[f"{study}/pixels"] = Value(str(pixels[0]), source)
        algorithms = {name for block in blocks for name in block.algorithms}
        values[f"{study}/algorithms"] = Value(str(len(algorithms)), source)
        epochs = sorted({block.epochs for block in blocks if block.epochs})
        if epochs:
            values[f"{study}/epochs"] = Value(str(epochs[0]), source)
        seeds = {seed for block in blocks for seed in block.seeds}
        values[f"{study}/seeds"] = Value(str(len(seeds)), source)
    gain = paper_numbers(artefact="HMOE Table 1").query("mode in ['mix', 'default']")
    own = gain[gain.algorithm == "HMOE-DN"].set_index("dataset").value
    erm = gain[gain.algorithm == "ERM"].set_index("dataset").value
    average = round(float((own - erm).mean()), 1) + 0.0
    values["paper/gain of HMOE-DN"] = Value(minus(f"{average:+.1f}"), "paper_numbers.csv")
    values["margin"] = Value(f"{margin_of('points'):g}", "hmoe_repro/metrics.toml")
    return values


def collect(store: str = "") -> dict[str, Value]:
    """Return every value of the report, by name.

    Args:
        store: folder of records. '' is the folder of the published records.
    """
    values = {}
    for part in (
        claim_values(store),
        verdict_counts(store),
        payoff_values(store),
        confirmation_values(store),
        full_values(store),
        discovery_values(store),
        cue_values(),
        algorithm_values(store),
        analysis_values(store),
        cost_values(store),
        absent_values(store),
        scorecard_values(),
        protocol_values(),
    ):
        values |= part
    return values


def as_json(values: dict[str, Value]) -> str:
    """Return values as JSON, sorted by name."""
    plain = {name: {"text": value.text, "source": value.source} for name, value in values.items()}
    return json.dumps(plain, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
