"""Compute what the report says about discovery, its effect on accuracy, and the toy.

Every function returns values or rows as `report_numbers` does, from the published records alone.
"""

import json
import math
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import report_numbers as numbers
from report_numbers import ROOT, Value, minus, record_source, seed_interval

from hmoe_repro.analysis import claims as judged
from hmoe_repro.analysis.published import paper_numbers
from hmoe_repro.analysis.results import results, runs
from hmoe_repro.analysis.statistics import mean_interval, value_grid
from hmoe_repro.report.readme import MIN_NMI, TUNED
from hmoe_repro.studies.study_file import read_study

DN = "algorithm == 'HMOE-DN'"
DL = "algorithm == 'HMOE-DL'"
FIRST = "(restart == 0 or restart != restart)"  # no restart, or a study without restarts
PLAIN = "`hparams.d2v_small_norm` == 'none' and `hparams.code_norm` == 'none'"
NORM = "`hparams.d2v_small_norm` == 'instance'"
UNLABELLED = "`hparams.lambda_d` == 0"


# Discovery


class Setting(NamedTuple):
    """A setting in which HMOE-DN looked for domains.

    Args:
        label: data and setting, as figures print it.
        note: the choice that matters: 'tuned with labels', 'default', ...
        studies: (study, query) of the runs of HMOE-DN.
        ceiling: (study, query) of the runs of HMOE-DL, which has all labels, or None.
        clusters: the study whose ERM runs have k-means, or ''.
        factor: what experts are compared with.
    """

    label: str
    note: str
    studies: tuple[tuple[str, str], ...]
    ceiling: tuple[str, str] | None
    clusters: str = ""
    factor: str = "domain"


PACS_FROZEN = (("pacs-linear", DN), ("pacs-restarts", f"{DN} and restart == 0"))
SETTINGS = (
    Setting("ColoredMNIST", "full scale, colour", (("paper-colored", DN),), None, "", "colour"),
    Setting("ColoredMNIST", "full scale, domain", (("paper-colored", DN),), ("paper-colored", DL)),
    Setting(
        "RotatedMNIST", "small images, 701 updates", (("mnist-rotated", DN),), ("mnist-rotated", DL)
    ),
    Setting(
        "PACS",
        "last stages trained, 150 updates",
        (("pacs-pacs", DN),),
        ("pacs-pacs", DL),
        "pacs-pacs",
    ),
    Setting("PACS", "frozen, 300 updates", PACS_FROZEN, ("pacs-linear", DL), "pacs-restarts"),
    Setting(
        "PACS",
        "frozen, 701 updates",
        (("pacs-payoff", f"{DN} and {UNLABELLED}"),),
        ("pacs-payoff", DL),
    ),
    Setting(
        "digits",
        "default, 701 updates",
        (("quick-discovery", f"{DN} and {PLAIN}"),),
        ("quick-payoff", f"{DL} and {PLAIN}"),
        "quick-discovery",
    ),
    Setting(
        "digits",
        "instance norm, 701 updates",
        (("quick-discovery", f"{DN} and {NORM}"),),
        ("quick-payoff", f"{DL} and {NORM}"),
        "quick-discovery",
    ),
    Setting(
        "digits",
        "instance norm, 1,401 updates (tuned)",
        (("quick-restarts", TUNED),),
        None,
        "quick-restarts",
    ),
    Setting(
        "digits", "paper's rate and updates", (("quick-discovery-long", f"{DN} and {PLAIN}"),), None
    ),
    Setting(
        "digits",
        "paper's rate and updates, instance norm",
        (("quick-discovery-long", f"{DN} and {NORM}"),),
        None,
    ),
    Setting("DigitStyles", "default, 701 updates", (("quick-styles", DN),), None),
    Setting("DigitStyles", "instance norm, 1,401 updates", (("quick-styles-norm", DN),), None),
    Setting(
        "DigitStyles", "paper's rate and updates, instance norm", (("quick-styles-long", DN),), None
    ),
)
KMEANS = ("features", "style", "statistics")  # weakest last: features, their style, colour
KMEANS_WORDS = {
    "features": "features of the trained network",
    "style": "their channel statistics",
    "statistics": "colour and contrast",
}


def agreements(parts, factor: str = "domain", store: str = "") -> pd.Series:
    """Return the NMI of experts with a factor, by held-out domain, for several queries."""
    return pd.concat([numbers.agreement(study, query, factor, store) for study, query in parts])


def kmeans_nmi(study: str, kind: str, store: str = "") -> pd.Series:
    """Return the NMI of k-means with the domains in the ERM runs of a study, by held-out domain."""
    column = f"clusters.{kind}.nmi_domain"
    frame = runs(results(study, store)).query("status == 'complete' and algorithm == 'ERM'")
    if column not in frame:
        return pd.Series(dtype=float)
    return frame.set_index("test_domain")[column].astype(float).dropna()


@cache
def discovery_rows(store: str = "") -> list[dict]:
    """Return how well experts agree with a factor, a row for each setting.

    Returns:
        Rows with setting, nmi (of all runs), found, runs, mean, ceiling (NMI of HMOE-DL, empty if
        it was not trained) and, for each of `KMEANS`, the mean NMI of k-means (NaN: not measured).
    """
    rows = []
    for setting in SETTINGS:
        nmi = agreements(setting.studies, setting.factor, store)
        ceiling = pd.Series(dtype=float)
        if setting.ceiling:
            ceiling = agreements([setting.ceiling], setting.factor, store)
        row = {"setting": setting, "nmi": nmi, "ceiling": ceiling}
        row |= {"found": int((nmi >= MIN_NMI).sum()), "runs": len(nmi), "mean": nmi.mean()}
        for kind in KMEANS:
            known = kmeans_nmi(setting.clusters, kind, store) if setting.clusters else None
            row[kind] = math.nan if known is None or known.empty else known.mean()
        rows.append(row)
    return rows


def counted(nmi: pd.Series) -> str:
    """Print in how many runs the domains were found: '14 of 20'."""
    return f"{int((nmi >= MIN_NMI).sum())} of {len(nmi)}"


SHORT = {"art_painting": "art"}


def held_out_rows(store: str = "") -> list[dict]:
    """Return discovery on frozen PACS features by the domain that was held out."""
    nmi = agreements(PACS_FROZEN, store=store)
    ceiling = agreements([("pacs-linear", DL)], store=store)
    clusters = {kind: kmeans_nmi("pacs-restarts", kind, store) for kind in KMEANS}
    rows = []
    for domain in sorted(set(nmi.index)):
        row = {"domain": SHORT.get(domain, domain), "nmi": nmi[nmi.index == domain]}
        row["ceiling"] = ceiling[ceiling.index == domain]
        row |= {kind: values[values.index == domain].mean() for kind, values in clusters.items()}
        rows.append(row)
    return rows


def kmeans_contrast(kind: str, store: str = "") -> str:
    """Print the NMI of k-means minus that of HMOE-DN on frozen PACS features, in equal runs."""
    frame = runs(results("pacs-restarts", store)).query("status == 'complete' and restart == 0")
    ours = frame[frame.algorithm == "HMOE-DN"]
    theirs = frame[frame.algorithm == "ERM"]
    grid = value_grid(theirs, f"clusters.{kind}.nmi_domain")
    grid = (grid - value_grid(ours, "discovery.nmi_domain")).dropna()
    mean, low, high = seed_interval(grid)
    return minus(f"{mean:+.2f} ({low:+.2f} to {high:+.2f})")


def finding_discovery_values(store: str = "") -> dict[str, Value]:
    """Return values about discovery in each setting, its ceiling and k-means."""
    values = {}
    for row in discovery_rows(store):
        setting = row["setting"]
        source = record_source(*(study for study, _ in setting.studies))
        name = f"found/{setting.label}, {setting.note}"
        values[f"{name}/count"] = Value(f"{row['found']} of {row['runs']}", source)
        values[f"{name}/mean"] = Value(minus(f"{row['mean']:.2f}"), source)
        if len(row["ceiling"]):
            source = record_source(setting.ceiling[0])
            values[f"{name}/ceiling"] = Value(counted(row["ceiling"]), source)
            values[f"{name}/ceiling mean"] = Value(f"{row['ceiling'].mean():.2f}", source)
    source = record_source(*(study for study, _ in PACS_FROZEN), "pacs-linear")
    nmi = agreements(PACS_FROZEN, store=store)
    art = nmi.index == "art_painting"
    values["held out/art"] = Value(counted(nmi[art]), source)
    values["held out/others"] = Value(counted(nmi[~art]), source)
    payoff = agreements([("pacs-payoff", DL)], store=store)
    hard = payoff.index.isin(["cartoon", "sketch"])
    source = record_source("pacs-payoff")
    values["ceiling/cartoon or sketch"] = Value(counted(payoff[hard]), source)
    values["ceiling/art or photo"] = Value(counted(payoff[~hard]), source)
    for kind in KMEANS:
        text = kmeans_contrast(kind, store)
        values[f"kmeans/{kind}"] = Value(text, record_source("pacs-restarts"))
    seeds = runs(results("pacs-restarts", store)).query("algorithm == 'ERM'").trial_seed.nunique()
    values["kmeans/seeds"] = Value(str(seeds), record_source("pacs-restarts"))
    photo = claim_runs("unseen is like nearest", store)
    values["unseen/seeds"] = Value(str(photo.trial_seed.nunique()), "results/pacs-pacs, pacs-photo")
    return values


def claim_runs(key: str, store: str = "") -> pd.DataFrame:
    """Return the runs that a claim's first benchmark counts."""
    [claim] = [one for one in judged.read_claims() if one.key == key]
    frames = [numbers.claim_frames(store)[study] for study in claim.arguments["studies"]]
    return runs(judged.rows_where(pd.concat(frames), claim.arguments["where"]))


# Does discovery pay?

MODES = ("mix", "max", "ood")


class Comparison(NamedTuple):
    """HMOE and ERM at equal updates, rate and batch.

    Args:
        benchmark: data and updates, as tables print it.
        labels: the domain labels that HMOE gets, and its encoder if that differs.
        studies: the studies of HMOE and ERM.
        query: the runs of HMOE.
        main: is it one of the five main comparisons, HMOE without labels?
    """

    benchmark: str
    labels: str
    studies: tuple[str, ...]
    query: str
    main: bool = False


TENTH = "`hparams.lambda_d` > 0 and `hparams.labelled_fraction` < 1"
DIGITS = ("quick-payoff",)
DOUBLE = ("quick-payoff-double",)
LONG = ("quick-discovery-long", "quick-payoff-long")
COLORED = ("mnist-payoff",)
ROTATED = ("mnist-rotated",)
PACS = ("pacs-payoff",)
UP = "701 updates"
COMPARISONS = (
    Comparison(f"digits, {UP}", "none", DIGITS, f"{DN} and {UNLABELLED} and {PLAIN}"),
    Comparison(f"digits, {UP}", "none; norm", DIGITS, f"{DN} and {UNLABELLED} and {NORM}", True),
    Comparison(f"digits, {UP}", "a tenth; norm", DIGITS, f"{DN} and {TENTH} and {NORM}"),
    Comparison(f"digits, {UP}", "all; norm", DIGITS, f"{DL} and {NORM}"),
    Comparison("digits, 1,401 updates", "none", DOUBLE, f"{DN} and {UNLABELLED} and {PLAIN}"),
    Comparison(
        "digits, 1,401 updates", "none; norm", DOUBLE, f"{DN} and {UNLABELLED} and {NORM}", True
    ),
    Comparison("digits, 1,401 updates", "a tenth; norm", DOUBLE, f"{DN} and {TENTH} and {NORM}"),
    Comparison("digits, 1,401 updates", "all; norm", DOUBLE, f"{DL} and {NORM}"),
    Comparison("digits, 5,001 updates", "none", LONG, f"{DN} and {PLAIN}"),
    Comparison("digits, 5,001 updates", "none; norm", LONG, f"{DN} and {NORM}", True),
    Comparison(f"ColoredMNIST, {UP}", "none", COLORED, f"{DN} and {UNLABELLED}", True),
    Comparison(f"ColoredMNIST, {UP}", "all", COLORED, DL),
    Comparison(f"RotatedMNIST, {UP}", "none", ROTATED, f"{DN} and {UNLABELLED}", True),
    Comparison(f"RotatedMNIST, {UP}", "all", ROTATED, DL),
    Comparison(f"PACS, frozen, {UP}", "none", PACS, f"{DN} and {UNLABELLED}", True),
    Comparison(f"PACS, frozen, {UP}", "a tenth", PACS, f"{DN} and {TENTH}"),
    Comparison(f"PACS, frozen, {UP}", "all", PACS, DL),
)


@cache
def comparison_rows(store: str = "") -> list[dict]:
    """Return HMOE minus ERM in each comparison and inference mode.

    Returns:
        Rows with comparison, seeds, erm (accuracy, %), nmi (mean), and for each mode a dictionary
        mean, low, high (the interval of the report), seed_low, seed_high (t over seed means).
    """
    rows = []
    for comparison in COMPARISONS:
        parts = [numbers.planned_rows(study, store) for study in comparison.studies]
        frame = pd.concat(parts, ignore_index=True).query("status == 'complete'")
        erm = value_grid(frame[(frame.algorithm == "ERM") & frame.accuracy.notna()])
        own = frame.query(comparison.query)
        row = {"comparison": comparison}
        for mode in MODES:
            rows_of_mode = own[(own["mode"] == mode) & own.accuracy.notna()]
            grid = 100 * (value_grid(rows_of_mode) - erm).dropna(how="all")
            interval = mean_interval(grid)
            _, low, high = seed_interval(grid)
            ends = {"low": interval.low, "high": interval.high}
            row[mode] = {"mean": interval.mean} | ends | {"seed_low": low, "seed_high": high}
        common = erm.loc[grid.index, grid.columns]
        row |= {"seeds": interval.seeds, "erm": 100 * float(common.mean().mean())}
        row["nmi"] = float(runs(own)["discovery.nmi_domain"].astype(float).mean())
        rows.append(row)
    return rows


def difference_text(found: dict) -> str:
    """Print a difference with its interval: '−1.7 (−2.8 to −0.6)'."""
    return minus(f"{found['mean']:+.1f} ({found['low']:+.1f} to {found['high']:+.1f})")


FOLLOWED = 0.5  # NMI from which experts follow a factor


def comparison_values(store: str = "") -> dict[str, Value]:
    """Return counts and differences of the comparisons at equal updates."""
    rows = comparison_rows(store)
    main = [row for row in rows if row["comparison"].main]
    source = record_source(*(study for row in main for study in row["comparison"].studies))
    values = {}
    for row in rows:
        comparison = row["comparison"]
        own = record_source(*comparison.studies)
        name = f"compare/{comparison.benchmark}/{comparison.labels}"
        values[f"{name}/nmi"] = Value(minus(f"{row['nmi']:.2f}"), own)
        values[f"{name}/erm"] = Value(f"{row['erm']:.0f}", own)
        values[f"{name}/seeds"] = Value(str(row["seeds"]), own)
        for mode in MODES:
            values[f"{name}/{mode}"] = Value(difference_text(row[mode]), own)
            ends = f"{row[mode]['seed_low']:+.1f} to {row[mode]['seed_high']:+.1f}"
            values[f"{name}/{mode}/by seeds"] = Value(minus(ends), own)
    for mode in MODES:
        above = sum(row[mode]["low"] > 0 for row in main)
        below = sum(row[mode]["high"] < 0 for row in main)
        counts = {"above": above, "below": below, "undecided": len(main) - above - below}
        for word, count in counts.items():
            values[f"compare/{mode}/{word}"] = Value(str(count), source)
    widths = [(row["mix"]["high"] - row["mix"]["low"]) / 2 for row in main]
    hidden = sum(row["nmi"] < FOLLOWED for row in main)
    has_plan = [any(read_study(name).plan for name in row["comparison"].studies) for row in main]
    values["compare/main"] = Value(str(len(main)), source)
    values["compare/planned"] = Value(str(sum(has_plan)), source)
    values["compare/without discovery"] = Value(str(hidden), source)
    values["compare/with discovery"] = Value(str(len(main) - hidden), source)
    values["compare/smallest half width"] = Value(f"{min(widths):.1f}", source)
    values["compare/largest half width"] = Value(f"{max(widths):.1f}", source)
    values["compare/wide"] = Value(str(sum(width > 1 for width in widths)), source)
    values["experts/follow"] = Value(f"{FOLLOWED:g}", "report_findings.FOLLOWED")
    return values


def paper_values() -> dict[str, Value]:
    """Return gains over ERM in HMOE's Table 1."""
    table = paper_numbers(artefact="HMOE Table 1")
    source = "paper_numbers.csv"
    grid = table.pivot_table(index=["algorithm", "mode"], columns="dataset", values="value")
    erm = grid.loc["ERM", "default"]
    values = {}
    for algorithm in ("HMOE-DN", "HMOE-ND"):
        for mode in MODES:
            gain = grid.loc[algorithm, mode] - erm
            mean = round(float(gain.mean()), 2) + 0.0
            name = f"paper/{algorithm}/{mode}"
            values[f"{name}/mean"] = Value(minus(f"{mean:+.1f}"), source)
            for dataset in ("ColoredMNIST", "PACS", "TerraIncognita"):
                text = minus(f"{gain[dataset]:+.1f}")
                values[f"{name}/{dataset}"] = Value(text, source)
    others = grid[~grid.index.get_level_values(0).str.startswith("HMOE")]
    best = others.PACS.idxmax()
    lead = grid.loc["HMOE-ND", "ood"].PACS - others.PACS.max()
    values["paper/PACS/next"] = Value(f"{best[0]}", source)
    values["paper/PACS/lead"] = Value(minus(f"{lead:+.1f}"), source)
    values["paper/PACS/best"] = Value(f"{grid.loc['HMOE-ND', 'ood'].PACS:.1f}", source)
    terra = grid.loc["HMOE-DN", "max"].TerraIncognita
    values["paper/TerraIncognita/best"] = Value(f"{terra:.1f}", source)
    values["paper/data sets"] = Value(str(grid.shape[1]), source)
    return values


# DMG


MASK_STUDIES = ("quick-dmg", "quick-confirm-masks", "pacs-dmg", "pacs-linear", "pacs-pacs")


def mask_values(store: str = "") -> dict[str, Value]:
    """Return DMG minus Aggregate on unseen domains in each study, and if the trial repeats it."""
    values = {}
    lows = {}
    for study in MASK_STUDIES:
        frame = numbers.planned_rows(study, store)
        frame = frame[frame.accuracy.notna() & (frame.status == "complete")]
        dmg = frame[(frame.algorithm == "DMG") & (frame["mode"] == "pred-ens")]
        aggregate = frame[frame.algorithm == "Aggregate"]
        grid = 100 * (value_grid(dmg) - value_grid(aggregate)).dropna(how="all")
        interval = mean_interval(grid)
        lows[study] = interval.low
        source = record_source(study)
        text = f"{interval.mean:+.1f} ({interval.low:+.1f} to {interval.high:+.1f})"
        _, low, high = seed_interval(grid)
        values[f"masks/{study}"] = Value(minus(text), source)
        values[f"masks/{study}/by seeds"] = Value(minus(f"{low:+.1f} to {high:+.1f}"), source)
        values[f"masks/{study}/seeds"] = Value(str(interval.seeds), source)
    repeated = lows["quick-dmg"] > 0 and lows["quick-confirm-masks"] > 0
    words = "shows it again" if repeated else "does not show it again"
    values["masks/repetition"] = Value(words, record_source("quick-dmg", "quick-confirm-masks"))
    return values


# The toy, and the cost of an update


def toy_values(store: str = "") -> dict[str, Value]:
    """Return how often HMOE identifies the intervals of the toy, and how often MIX is best."""
    frame = numbers.claim_frames(store)["quick-toy"]
    one = (frame["hparams.lambda_en"] == 1) & (frame["hparams.lambda_kl"] == 1)
    frame = frame[one & (frame["hparams.load_balance"] == "kl")]
    source = record_source("quick-toy")
    values = {}
    for name, column in (
        ("all points", "intervals_found"),
        ("majority", "majority_found"),
        ("mix best", "mix_best"),
    ):
        hits = int(frame[column].astype(bool).sum())
        values[f"toy/{name}"] = Value(f"{hits} of {len(frame)}", source)
    return values


def update_values() -> dict[str, Value]:
    """Return how the times of an update compare on the GPU: GMoE, its dense twin, ERM."""
    name = "bench-algorithms-gpu.json"
    record = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    times = record["seconds"]["training"]
    median = {algorithm: float(np.median(seconds)) for algorithm, seconds in times.items()}
    source = "results/bench-algorithms-gpu"
    pairs = {
        "ViT by ERM": median["ERM-ViT"] / median["ERM"],
        "GMoE by ViT": median["GMoE"] / median["ERM-ViT"],
    }
    values = {f"update/{name}": Value(f"{ratio:.2f}", source) for name, ratio in pairs.items()}
    quoted = paper_numbers(artefact="GMoE Table 16")
    return values | paper_update_values(quoted)


def paper_update_values(quoted: pd.DataFrame) -> dict[str, Value]:
    """Return the ratio of update times in GMoE's Table 16."""
    rows = quoted[quoted.quantity.str.contains("training") & (quoted.unit == "s")]
    times = rows.set_index("algorithm").value
    if not {"GMoE", "ERM-ViT"} <= set(times.index):
        return {}
    ratio = times["GMoE"] / times["ERM-ViT"]
    return {"paper/GMoE by ViT": Value(f"{ratio:.2f}", "paper_numbers.csv")}


def accuracy_values(store: str = "") -> dict[str, Value]:
    """Return mean accuracies of studies, in %, where the prose names them."""
    values = {}
    for study, algorithms in (
        ("pacs-gmoe", ("GMoE", "ERM-ViT", "ERM")),
        ("pacs-dmg", ("DMG", "Aggregate", "Multi-Headed")),
    ):
        frame = results(study, store)
        frame = frame[frame.accuracy.notna()]
        source = record_source(study)
        for algorithm in algorithms:
            rows = frame[frame.algorithm == algorithm]
            rows = rows[rows["mode"] == rows["mode"].iloc[0]]
            mean = 100 * float(value_grid(rows).mean().mean())
            values[f"accuracy/{study}/{algorithm}"] = Value(f"{mean:.0f}", source)
        domains = ", ".join(sorted(frame.test_domain.unique())).replace("_painting", "")
        values[f"accuracy/{study}/domains"] = Value(domains, source)
    return values


def collect(store: str = "") -> dict[str, Value]:
    """Return every value of this module, by name."""
    values = {}
    for part in (
        finding_discovery_values(store),
        comparison_values(store),
        mask_values(store),
        toy_values(store),
        accuracy_values(store),
        paper_values(),
        update_values(),
    ):
        values |= part
    return values
