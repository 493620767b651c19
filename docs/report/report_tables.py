"""Make the tables of the report as lists of rows of text, which `report.typ` lays out."""

import math
import re
import tomllib
from collections import Counter

import pandas as pd
import report_numbers as numbers
from report_numbers import ROOT, Value, minus, thousands

from hmoe_repro.analysis.claims import read_claims
from hmoe_repro.analysis.results import load_study
from hmoe_repro.report.readme import scorecard

# The verdict of a row of the scorecard, in the four words of the report.
WORDS = numbers.FIRST_WORDS | {"": "–"}


def plain(text: str) -> str:
    """Remove the Markdown of a table's cell: links, bold, code and the dollars of formulas."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[*`$]", "", text)
    text = text.replace("\\_", "_").replace("\\,", " ")
    return re.sub(
        r" \(table under.*?\)|The tables below give the reason for each", "", text
    ).strip()


def numbered_scores() -> list[tuple[str, object]]:
    """Return (number, row) for each row of the scorecard: H1, G1, D1, ... for judged claims."""
    counts = {}
    found = []
    for score in scorecard():
        number = ""
        if score.verdict:
            letter = score.artefact[0]
            counts[letter] = counts.get(letter, 0) + 1
            number = f"{letter}{counts[letter]}"
        found.append((number, score))
    return found


def scope_table() -> list[list[str]]:
    """Return the judged claims: number, place in the paper, claim, the paper's number."""
    rows = []
    for number, score in numbered_scores():
        if number:
            paper = minus(score.paper_number) or "–"
            rows.append([number, score.artefact, score.claim, paper])
    return rows


def scorecard_table(store: str = "") -> list[list[str]]:
    """Return the scorecard: number, artefact, claim, paper, ours, protocol, verdict, together."""
    together = {one.claim.short: one.verdict for one in numbers.claim_results(store)}
    rows = []
    for number, score in numbered_scores():
        ours = minus(score.ours) or "–"
        verdict = WORDS[score.verdict].lower()
        over_all = WORDS[together[score.claim]].lower() if number else "–"
        paper = minus(score.paper_number.replace(", mean of three networks", "")) or "–"
        paper = paper.replace("mean of five data sets", "five sets")
        status = score.status.partition(" (")[0]
        cells = [score.artefact, score.claim, paper, ours, status]
        rows.append([number, *cells, verdict, over_all])
    return rows


STUDIES = (
    ("paper-colored", "ColoredMNIST, the paper's protocol"),
    ("mnist-colored", "ColoredMNIST, smaller images"),
    ("mnist-rotated", "RotatedMNIST, smaller images"),
    ("pacs-pacs", "PACS, six of seven stages frozen"),
    ("pacs-linear", "PACS, frozen features"),
    ("pacs-dmg", "PACS, DMG's protocol"),
    ("pacs-gmoe", "PACS, transformers from random weights"),
    ("quick-digits", "digit stand-ins"),
)


def _span(values) -> str:
    """Print the values of a setting: one value, or the lowest to the highest."""
    values = sorted(set(values))
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:,}" if isinstance(values[0], int) else f"{values[0]:g}"
    return f"{values[0]:,} to {values[-1]:,}"


def protocol_table(store: str = "") -> list[list[str]]:
    """Return the settings of the main studies, from the configurations of their records."""
    rows = []
    for study, words in STUDIES:
        if not numbers.has_study(study, store):
            continue
        records = load_study(study, store)
        configs = [record["config"] for record in records]
        rates = Counter(config["hparams"]["lr"] for config in configs if "lr" in config["hparams"])
        sizes = Counter(config["hparams"].get("batch_size") for config in configs)
        names = Counter(config["network"] for config in configs if config["network"])
        rate, size = rates.most_common(1)[0][0], sizes.most_common(1)[0][0]
        network = ", ".join(name for name, _ in names.most_common(2))
        pixels = {config["resolution"] for config in configs if config["resolution"]}
        rows.append(
            [
                study,
                words,
                numbers.scale_of(study),
                network,
                _span(pixels) if pixels else "28" if "MNIST" in configs[0]["dataset"] else "16",
                _span([config["steps"] for config in configs]),
                str(size),
                f"{rate:g}",
                str(len({config["trial_seed"] for config in configs})),
            ]
        )
    return rows


MODES = {"default": "", "mix": "MIX", "max": "MAX", "ood": "OOD"}


def full_table(store: str = "") -> list[list[str]]:
    """Return the accuracies on full-scale ColoredMNIST, with the paper's averages."""
    rows = []
    for row in numbers.full_rows(store):
        if row["domains"] < 3:
            continue
        name = f"{row['algorithm']} {MODES.get(row['mode'], row['mode'])}".strip()
        cells = [f"{row[domain]:.1f}" for domain in ("+90%", "+80%", "-90%")]
        interval = f"{row['average']:.1f} ({row['low']:.1f} to {row['high']:.1f})"
        paper = "–" if math.isnan(row["paper"]) else f"{row['paper']:.1f}"
        inside = "–"
        if paper != "–":
            inside = "inside" if row["low"] <= row["paper"] <= row["high"] else "outside"
        rows.append([name, *cells, minus(interval), paper, inside])
    return rows


PAYOFF = "figures/quick/payoff.csv"


def payoff_table() -> list[list[str]]:
    """Return HMOE against ERM at equal updates, with none, a tenth and all of the labels."""
    table = pd.read_csv(ROOT / PAYOFF)
    rows = []
    for row in table.itertuples(index=False):
        benchmark, setting, seeds, accuracy, difference, low, high, nmi, follow = row
        text = f"{difference:+.1f} ({low:+.1f} to {high:+.1f})"
        rows.append([benchmark, setting, str(seeds), minus(text), f"{nmi:.2f}", follow])
    return rows


def cost_table(store: str = "") -> list[list[str]]:
    """Return what was not run: study, data, runs, GPU hours, GB of memory, GB of images."""
    rows = []
    for row in numbers.cost_rows(store):
        hours = "not known" if math.isnan(row["hours"]) else thousands(row["hours"])
        if 0 < row["timed"] < row["runs"]:
            hours += f" ({row['timed']} runs)"
        if row["basis"] == "measured":
            hours += " (H200)"
        memory = "–" if math.isnan(row["memory"]) else f"{row['memory']:.0f}"
        images = "–" if math.isnan(row["images"]) else f"{row['images']:.0f}"
        data = ", ".join(row["datasets"])
        rows.append([row["study"], data, thousands(row["runs"]), hours, memory, images])
    return rows


def _interval(triple) -> str:
    """Print (estimate, low, high), or the reason for no interval."""
    estimate, low, high = triple
    if math.isnan(estimate):
        return "too few seeds"
    if math.isnan(low):
        return minus(f"{estimate:+.1f} (too few seeds)")
    return minus(f"{estimate:+.1f} ({low:+.1f} to {high:+.1f})")


def analyses_table(store: str = "") -> list[list[str]]:
    """Return the main contrasts in three analyses, a row for each study."""
    rows = []
    for row in numbers.three_analyses(store):
        part = row["part"]
        analyses = [_interval(row[name]) for name in ("t", "iqm", "rank")]
        contrast = CONTRASTS[row["claim"].key]
        rows.append([contrast, part.studies[0], str(part.evidence.seeds), *analyses])
    return rows


CONTRASTS = {
    "as ERM, full-scale ColoredMNIST": "HMOE-DN − ERM",
    "ARM, full-scale ColoredMNIST": "ARM − the others",
    "discovery pays": "HMOE-DN − ERM",
    "masks beat one network": "DMG − Aggregate",
    "experts beat dense twin": "GMoE − ViT",
}


def confirmation_table(store: str = "") -> list[list[str]]:
    """Return the claims that were tried again on new seeds: before, on new seeds, same verdict."""
    rows = []
    for result in numbers.claim_results(store):
        if result.origin is None or result.origin.again is None:
            continue
        again = result.origin.again
        before = result.strongest.get(again.benchmark)
        cells = []
        for part in (before, again):
            evidence = part.evidence
            word = numbers.FIRST_WORDS[part.verdict]
            cells.append(f"{word}: {numbers.number_text(evidence)} ({numbers.ends_text(evidence)})")
        same = "yes" if result.origin.confirmed else "no"
        rows.append([result.claim.short, *cells, again.studies[0], same])
    return rows


def deviations_table() -> list[list[str]]:
    """Return the most important deviations of `docs/deviations.md`."""
    text = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    section = text.partition("## The most important ones")[2].partition("\n## ")[0]
    rows = []
    for line in section.splitlines():
        cells = [plain(cell.strip()) for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "what":
            rows.append(cells)
    return rows


def deviations_count() -> Value:
    """Return the number of deviations in `docs/deviations.md`."""
    text = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [
        line for line in lines if not line.startswith(("| what |", "| **[")) and "|---" not in line
    ]
    return Value(str(len(rows)), "docs/deviations.md")


def studies_table(store: str = "") -> list[list[str]]:
    """Return every study: seeds, runs, the commit of most runs, and the digest of its file."""
    rows = []
    for study in numbers.all_studies(store):
        more = len(study.commits) - 1
        commit = study.commits[0][:7] + (f" +{more}" if more else "")
        counts = [str(study.seeds), thousands(study.runs)]
        rows.append([study.name, *counts, commit, study.digest[:10] or "–"])
    return rows


def faults_table(store: str = "") -> list[list[str]]:
    """Return faults of released code with their effect on accuracy, if a study measured it."""
    rows = []
    with open(numbers.HERE / "faults.toml", "rb") as file:
        faults = tomllib.load(file)["faults"]
    for fault in faults:
        effect = numbers.released_effect(fault["algorithm"], store)
        rows.append([fault["where"], fault["text"], effect])
    return rows


def answers_table(store: str = "") -> dict[str, list[dict]]:
    """Return the answers to each claim, a row for each benchmark and study."""
    return numbers.claim_parts(store)


def places_of_claims() -> dict[str, list[str]]:
    """Return claim -> [the claim in a few words, its place: 'HMOE, Section 4.2.4']."""
    places = {}
    for claim in read_claims():
        section = claim.section
        place = section if section.startswith("Table") else f"Section {section}"
        where = f"{claim.paper}, {place}" if section else "our question"
        places[claim.key] = [claim.short, where]
    return places


def all_tables(store: str = "") -> dict:
    """Return every table of the report, by name."""
    return {
        "scope": scope_table(),
        "scorecard": scorecard_table(store),
        "protocol": protocol_table(store),
        "full": full_table(store),
        "payoff": payoff_table(),
        "cost": cost_table(store),
        "analyses": analyses_table(store),
        "confirmations": confirmation_table(store),
        "deviations": deviations_table(),
        "studies": studies_table(store),
        "faults": faults_table(store),
        "answers": answers_table(store),
        "places": places_of_claims(),
    }
