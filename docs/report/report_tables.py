"""Make the tables of the report as lists of rows of text, which `report.typ` lays out."""

import math
import re
from collections import Counter

import report_findings as findings
import report_numbers as numbers
from report_numbers import ROOT, Value, minus, thousands

from hmoe_repro.analysis.claims import read_claims
from hmoe_repro.analysis.results import load_study
from hmoe_repro.core.toml import package_toml
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


MAIN_CLAIMS = (
    "toy: intervals",
    "experts are domains, PACS",
    "as ERM, full-scale ColoredMNIST",
    "as ERM, PACS",
    "competitive with ERM",
    "MAX is safe",
    "OOD is safe",
    "L_ad helps",
    "experts beat dense twin",
    "experts follow content",
    "masks beat one network",
    "right mask beats wrong",
)


def scope_table(store: str = "") -> list[list[str]]:
    """Return the main claims: place in the paper, claim, the paper's number, verdict together."""
    found = {result.claim.key: result for result in numbers.claim_results(store)}
    rows = []
    for key in MAIN_CLAIMS:
        if key not in found:
            continue
        result = found[key]
        paper = minus(result.claim.paper_number) or "in words"
        place = claim_place(result.claim)
        rows.append([place, result.claim.short, paper, WORDS[result.verdict].lower()])
    return rows


def claim_place(claim) -> str:
    """Name the place of a claim: 'HMOE 4.2.4', 'GMoE Table 16', 'our question'."""
    if not claim.section or claim.ours:
        return "our question"
    return f"{claim.paper} {claim.section}"


NEAREST = ("full", "reduced", "own data", "stand-in", "measured")


def nearest_part(result):
    """Return the part of a claim whose study is closest to the paper's protocol, or None.

    Of two timings it is the one on a GPU.
    """
    parts = [part for part in result.parts if not math.isnan(part.evidence.value)]

    def distance(part) -> tuple[int, bool]:
        study = part.studies[0]
        return NEAREST.index(numbers.scale_of(study)), not study.endswith("-gpu")

    return min(parts, key=distance, default=None)


def scorecard_table(store: str = "") -> list[list[str]]:
    """Return the scorecard: number, artefact, claim, paper, ours, study, protocol, verdicts.

    The number, its protocol and its verdict are those of the study that is closest to the paper's
    protocol. The last column is the verdict over all studies of the claim.
    """
    results = {one.claim.short: one for one in numbers.claim_results(store)}
    rows = []
    for number, score in numbered_scores():
        paper = minus(score.paper_number.replace(", mean of three networks", "")) or "–"
        paper = paper.replace("mean of five data sets", "five sets")
        paper = paper.replace("mean of six data sets", "six sets")
        status = score.status.partition(" (")[0]
        ours, protocol, verdict, over_all = "–", status, "–", "–"
        result = results.get(score.claim)
        part = nearest_part(result) if result and number else None
        if part:
            evidence = part.evidence
            ours = f"{numbers.number_text(evidence)} ({numbers.ends_text(evidence)})"
            protocol = numbers.scale_of(part.studies[0])
            verdict = numbers.part_verdict(result.claim, part)
            over_all = WORDS[result.verdict].lower()
        rows.append([number, score.artefact, score.claim, paper, ours, protocol, verdict, over_all])
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
                batch_text(size, configs[0]["protocol"]),
                f"{rate:g}",
                str(len({config["trial_seed"] for config in configs})),
            ]
        )
    return rows + [list(row) for row in PAPER_SETTINGS]


# Settings of the papers: HMOE 4.2.2, DMG 4.1 and 7.5. A dash: not stated, or several.
PAPER_SETTINGS = (
    ("HMOE's paper", "Colored and RotatedMNIST", "–", "ConvNet", "28", "5,000", "64", "0.001", "3"),
    ("HMOE's paper", "photographs", "–", "ResNet-50", "224", "5,000", "32", "5e-05", "3"),
    ("DMG's paper", "PACS", "–", "ResNet-18 and others", "–", "–", "64 in all", "0.0001", "–"),
)


def batch_text(size: int, protocol: str) -> str:
    """Print a batch size: of each training domain, or in DMG's protocol of all together."""
    return f"{size} in all" if protocol == "dmg" else str(size)


MODES = {"default": "", "mix": "MIX", "max": "MAX", "ood": "OOD"}


def full_table(store: str = "") -> list[list[str]]:
    """Return the accuracies on full-scale ColoredMNIST, each with that of the paper."""
    rows = []
    for row in numbers.full_rows(store):
        if row["domains"] < 3:
            continue
        name = f"{row['algorithm']} {MODES.get(row['mode'], row['mode'])}".strip()
        cells = []
        for domain in numbers.FULL_DOMAINS:
            quoted = row["paper domains"].get(domain, math.nan)
            paper = "–" if math.isnan(quoted) else f"{quoted:.1f}"
            cells.append(f"{row[domain]:.1f} | {paper}")
        interval = f"{row['average']:.1f} ({row['low']:.1f} to {row['high']:.1f})"
        paper = "–" if math.isnan(row["paper"]) else f"{row['paper']:.1f}"
        inside = "–"
        if paper != "–":
            inside = "inside" if row["low"] <= row["paper"] <= row["high"] else "outside"
        rows.append([name, *cells, minus(interval), paper, inside])
    return rows


def payoff_table(store: str = "") -> list[list[str]]:
    """Return HMOE minus ERM at equal updates in each inference mode, and the NMI of experts."""
    rows = []
    for row in findings.comparison_rows(store):
        comparison = row["comparison"]
        mark = " *" if comparison.main else ""
        cells = [comparison.benchmark, f"{comparison.labels}{mark}", str(row["seeds"])]
        cells += [f"{row['erm']:.0f}", f"{row['nmi']:.2f}".replace("-0.00", "0.00")]
        rows.append(cells + [findings.difference_text(row[mode]) for mode in findings.MODES])
    return rows


def _score(value: float) -> str:
    """Print an NMI, or a dash if there is none."""
    return "–" if math.isnan(value) else minus(f"{value:.2f}").replace("−0.00", "0.00")


def discovery_table(store: str = "") -> list[list[str]]:
    """Return discovery in every setting: HMOE-DN, HMOE-DL and three k-means baselines."""
    rows = []
    for row in findings.discovery_rows(store):
        setting = row["setting"]
        ceiling = row["ceiling"]
        bound = f"{findings.counted(ceiling)}, {_score(ceiling.mean())}" if len(ceiling) else "–"
        own = f"{row['found']} of {row['runs']}, {_score(row['mean'])}"
        kmeans = [_score(row[kind]) for kind in findings.KMEANS]
        rows.append([setting.label, setting.note, own, bound, *kmeans])
    return rows


def held_out_table(store: str = "") -> list[list[str]]:
    """Return discovery on frozen PACS features by the domain that was held out."""
    rows = []
    for row in findings.held_out_rows(store):
        cells = [row["domain"]]
        for name in ("nmi", "ceiling"):
            cells.append(f"{findings.counted(row[name])}, {_score(row[name].mean())}")
        rows.append(cells + [_score(row[kind]) for kind in findings.KMEANS])
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
        analyses = [_interval(row[name]) for name in ("t", "seeds", "iqm", "rank")]
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
        same_data = [part for part in result.parts if part.benchmark == again.benchmark]
        firsts = [part for part in same_data if part.studies != again.studies]
        before = max(firsts, key=lambda part: part.evidence.seeds, default=None)
        cells = []
        for part in (before, again):
            if part is None:
                cells.append("–")
                continue
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
    faults = package_toml("faults.toml")["faults"]
    for fault in faults:
        effect = numbers.released_effect(fault, store)
        rows.append([fault["where"], fault["code"], fault["text"], effect])
    return rows


def fault_values(store: str = "") -> dict[str, Value]:
    """Return how many of the faults that an option repeats have a measured effect."""
    effects = [row[-1] for row in faults_table(store)]
    measured = sum(effect[:1] in "+−0" for effect in effects)
    waiting = effects.count("not measured")
    source = f"{numbers.values_source(numbers.RELEASED)}, hmoe_repro/faults.toml"
    return {
        "faults/measured": Value(str(measured), source),
        "faults/with option": Value(str(measured + waiting), source),
    }


def answers_table(store: str = "") -> dict[str, list[dict]]:
    """Return the answers to each claim, a row for each benchmark and study."""
    return numbers.claim_parts(store)


def places_of_claims() -> dict[str, list[str]]:
    """Return claim -> [the claim in a few words, its place: 'HMOE 4.2.4']."""
    return {claim.key: [claim.short, claim_place(claim)] for claim in read_claims()}


def all_tables(store: str = "") -> dict:
    """Return every table of the report, by name."""
    return {
        "scope": scope_table(store),
        "scorecard": scorecard_table(store),
        "protocol": protocol_table(store),
        "full": full_table(store),
        "payoff": payoff_table(store),
        "discovery": discovery_table(store),
        "held out": held_out_table(store),
        "cost": cost_table(store),
        "analyses": analyses_table(store),
        "confirmations": confirmation_table(store),
        "deviations": deviations_table(),
        "studies": studies_table(store),
        "faults": faults_table(store),
        "answers": answers_table(store),
        "places": places_of_claims(),
    }
