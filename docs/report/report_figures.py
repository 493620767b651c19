"""Draw the figures of the report as SVG, from the records alone.

Text is drawn as paths, so a figure is the same on every machine. Every mark differs in shape or
fill, not in colour alone, so the figures survive a black-and-white print.
"""

import math
from pathlib import Path

import matplotlib
import numpy as np
import report_numbers as numbers

from hmoe_repro.core.style import PALETTE, use_style

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

WIDTH = 6.7  # inches, the width of the text
BLUE, ORANGE, GREEN = PALETTE[0], "#D55E00", PALETTE[2]
DARK = "#222222"
SCALE_MARKERS = {"full": "s", "reduced": "o", "stand-in": "^", "own data": "D", "measured": "v"}


def save(figure, folder: Path, name: str):
    """Save a figure as SVG with equal bytes in every build."""
    settings = {"svg.hashsalt": name, "svg.fonttype": "path"}
    with matplotlib.rc_context(settings):
        figure.savefig(folder / f"{name}.svg", format="svg", metadata={"Date": None})
    plt.close(figure)


def draw_forest(axis, rows: list[dict], margin: float = 1.0):
    """Draw differences with their intervals, one row below the other.

    Args:
        axis: the axis.
        rows: dictionaries with label, mean, low, high and scale.
        margin: the smallest difference that matters, drawn as a band around 0.
    """
    positions = np.arange(len(rows))[::-1]
    axis.axvspan(-margin, margin, color="#E8E8E8", zorder=0, linewidth=0)
    axis.axvline(0, color=DARK, linewidth=0.8, zorder=1)
    for position, row in zip(positions, rows):
        decided = row["low"] > 0 or row["high"] < 0
        face = DARK if decided else "white"
        if not math.isnan(row["low"]):
            ends = [row["low"], row["high"]]
            axis.plot(ends, [position] * 2, color=DARK, linewidth=1.2, zorder=2)
        marker = SCALE_MARKERS[row["scale"]]
        style = {"marker": marker, "markersize": 5, "markeredgecolor": DARK, "zorder": 3}
        axis.plot([row["mean"]], [position], color=DARK, markerfacecolor=face, **style)
    axis.set_yticks(positions, [row["label"] for row in rows])
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.grid(axis="y", visible=False)


def mark_outside(axis, rows: list[dict]):
    """Mark the means that lie outside the frame with an arrow at its edge."""
    low, high = axis.get_xlim()
    style = {"color": DARK, "markersize": 5, "clip_on": False, "zorder": 4}
    for position, row in zip(np.arange(len(rows))[::-1], rows):
        if row["mean"] < low:
            axis.plot([low], [position], marker="<", **style)
        elif row["mean"] > high:
            axis.plot([high], [position], marker=">", **style)


def forest_rows(claims: list[str], store: str = "") -> list[dict]:
    """Return the rows of `draw_forest` for claims about a contrast, a row for each study."""
    found = {result.claim.key: result for result in numbers.claim_results(store)}
    rows = []
    for key in claims:
        for part in found[key].parts:
            evidence = part.evidence
            if math.isnan(evidence.value):
                continue
            study = part.studies[0]
            rows.append(
                {
                    "label": f"{study} ({evidence.seeds} seeds)",
                    "mean": evidence.value,
                    "low": evidence.low,
                    "high": evidence.high,
                    "scale": numbers.scale_of(study),
                    "claim": key,
                }
            )
    return rows


def scale_legend(axis, rows: list[dict], **options):
    """Explain the shapes of a forest: the protocol of each study."""
    scales = list(dict.fromkeys(row["scale"] for row in rows))
    style = {"linestyle": "", "markersize": 5, "markeredgecolor": DARK, "color": DARK}
    handles = []
    for scale in scales:
        [handle] = axis.plot([], [], marker=SCALE_MARKERS[scale], label=scale, **style)
        handles.append(handle)
    axis.legend(handles=handles, **options)


def draw_full(folder: Path, store: str = ""):
    """Draw the averages on full-scale ColoredMNIST next to those of HMOE's Table 1."""
    rows = [row for row in numbers.full_rows(store) if row["domains"] == 3]
    names = []
    for row in rows:
        mode = "" if row["mode"] == "default" else f" {row['mode'].upper()}"
        names.append(f"{row['algorithm']}{mode}")
    figure, axis = plt.subplots(figsize=(WIDTH, 0.165 * len(rows) + 0.7))
    positions = np.arange(len(rows))[::-1]
    for position, row in zip(positions, rows):
        axis.plot([row["low"], row["high"]], [position] * 2, color=BLUE, linewidth=1.4)
    averages = [row["average"] for row in rows]
    paper = [row["paper"] for row in rows]
    axis.plot(averages, positions, "o", color=BLUE, markersize=5, label="ours, 95 % CI")
    style = {"color": ORANGE, "markersize": 7, "markeredgewidth": 1.6, "linestyle": ""}
    axis.plot(paper, positions, marker="x", label="HMOE, Table 1", **style)
    axis.set_yticks(positions, names)
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set_xlabel("accuracy, mean of the three test domains (%)")
    axis.legend(loc="lower right")
    axis.grid(axis="y", visible=False)
    save(figure, folder, "full")


def draw_experts(folder: Path, store: str = ""):
    """Draw how far experts agree with a factor: a dot for each run."""
    own = "algorithm == 'HMOE-DN'"
    coloured = "full-scale ColoredMNIST"
    strips = [
        (f"{coloured}: colour", numbers.agreement("paper-colored", own, "colour", store)),
        (f"{coloured}: domain", numbers.agreement("paper-colored", own, "domain", store)),
        ("PACS: domain", numbers.agreement_of("PACS", store)),
        ("DigitStyles, untuned: domain", numbers.agreement("quick-styles", own, "domain", store)),
        ("digits, tuned: domain", numbers.agreement_of("digits", store)),
    ]
    figure, axis = plt.subplots(figsize=(WIDTH, 2.1))
    random = np.random.default_rng(0)
    axis.axvline(numbers.MIN_NMI, color=DARK, linewidth=0.9, linestyle="--")
    for position, (_, values) in zip(range(len(strips))[::-1], strips):
        heights = position + random.uniform(-0.27, 0.27, len(values))
        style = {"markersize": 3.2, "alpha": 0.65, "markeredgewidth": 0, "color": BLUE}
        axis.plot(values, heights, "o", **style)
        hits = int((values >= numbers.MIN_NMI).sum())
        axis.text(1.03, position, f"{hits} of {len(values)}", va="center", fontsize=8)
    axis.set_yticks(range(len(strips))[::-1], [name for name, _ in strips])
    axis.set_xlim(-0.03, 1.13)
    axis.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axis.set_xlabel("NMI of experts and factor (dashed: found)")
    axis.grid(axis="y", visible=False)
    save(figure, folder, "experts")


def draw_cues(folder: Path, store: str = ""):
    """Draw in how many runs the experts follow either cue, for each pair of strengths."""
    table = numbers.cue_table()
    seconds = list(dict.fromkeys(table["second cue"]))
    size = (2.6 * len(seconds) + 0.9, 2.25)
    figure, axes = plt.subplots(1, len(seconds), figsize=size, squeeze=False)
    for axis, second in zip(axes[0], seconds):
        part = table[table["second cue"] == second]
        grid = part.pivot(index="hue", columns="strength", values="hue wins").sort_index()
        other = part.pivot(index="hue", columns="strength", values="second wins").sort_index()
        number = part.pivot(index="hue", columns="strength", values="runs").sort_index()
        image = grid / number
        axis.imshow(image, cmap="Greys", vmin=0, vmax=1.4, origin="lower", aspect="auto")
        for row, hue in enumerate(grid.index):
            for column, strength in enumerate(grid.columns):
                hits = f"{grid.loc[hue, strength]} | {other.loc[hue, strength]}"
                text = f"{hits} of {number.loc[hue, strength]}"
                axis.text(column, row, text, ha="center", va="center", fontsize=9)
        axis.set_xticks(range(len(grid.columns)), [f"{value:g}" for value in grid.columns])
        axis.set_yticks(range(len(grid.index)), [f"{value:g}" for value in grid.index])
        axis.set_xlabel(f"strength of the {second}")
        axis.set_ylabel("strength of the hue")
        axis.grid(visible=False)
    save(figure, folder, "cues")


def save_forest(rows: list[dict], difference: str, folder: Path, name: str):
    """Draw differences with their intervals, a row each, and save the figure."""
    figure, axis = plt.subplots(figsize=(WIDTH, 0.17 * len(rows) + 0.65))
    draw_forest(axis, rows)
    axis.set_xlabel(f"{difference}, points (grey: within the margin)")
    scale_legend(axis, rows, loc="lower right")
    save(figure, folder, name)


def draw_payoff(folder: Path, store: str = ""):
    """Draw HMOE-DN minus ERM in all studies that compare the two."""
    keys = ["as ERM, full-scale ColoredMNIST", "discovery pays", "competitive with ERM"]
    rows = []
    for row in forest_rows(keys, store):
        if row["label"] not in {other["label"] for other in rows}:
            rows.append(row)
    save_forest(rows, "HMOE-DN (MIX) minus ERM", folder, "payoff")


def draw_dmg(folder: Path, store: str = ""):
    """Draw DMG minus its two baselines on unseen domains, and in domain."""
    titles = {
        "masks beat one network": "minus Aggregate",
        "masks beat heads": "minus Multi-Headed",
        "in-domain kept": "minus Aggregate, in domain",
    }
    rows = forest_rows(list(titles), store)
    for row in rows:
        row["label"] = f"{titles[row['claim']]}: {row['label']}"
    save_forest(rows, "DMG minus baseline", folder, "dmg")


def draw_algorithms(folder: Path, store: str = ""):
    """Draw every algorithm minus ERM, in the two studies with the most algorithms."""
    panels = [("digits", "digit stand-ins"), ("frozen", "PACS, frozen features")]
    if numbers.has_study(numbers.ALGORITHM_STUDIES["power"], store):
        panels[1] = ("power", "PACS, six stages frozen")
    tables = []
    for name, _ in panels:
        table = numbers.algorithm_contrasts(numbers.ALGORITHM_STUDIES[name], store)
        tables.append(table.sort_values("difference", ascending=False))
    height = 0.132 * max(map(len, tables)) + 0.8
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, height))
    for axis, (name, title), table in zip(axes, panels, tables):
        scale = numbers.scale_of(numbers.ALGORITHM_STUDIES[name])
        seeds = numbers.seeds_text(table.seeds)
        rows = []
        for row in table.itertuples():
            values = {"mean": row.difference, "low": row.low, "high": row.high}
            rows.append({"label": row.algorithm, "scale": scale} | values)
        draw_forest(axis, rows)
        limit = 1.05 * max(table.difference.abs().quantile(0.9), 3)
        axis.set_xlim(-2.2 * limit, 1.6 * limit)
        mark_outside(axis, rows)
        axis.set_title(f"{title} ({scale}, {seeds} seeds)")
        axis.set_xlabel("minus ERM, points")
        axis.set_ylim(len(rows) - 0.4 - max(map(len, tables)), len(rows) - 0.4)
        for label, holm in zip(axis.get_yticklabels(), table.significant):
            label.set_fontweight("bold" if holm else "normal")
    save(figure, folder, "algorithms")


DRAWINGS = (draw_full, draw_experts, draw_cues, draw_payoff, draw_dmg, draw_algorithms)


def draw_all(folder: Path, store: str = ""):
    """Draw every figure of the report into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    use_style()
    for draw in DRAWINGS:
        draw(folder, store)
