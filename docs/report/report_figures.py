"""Draw the figures of the report as SVG, from the records alone.

Text is drawn as paths, so a figure is the same on every machine. Every mark differs in shape or
fill, not in colour alone, so the figures survive a black-and-white print.
"""

import math
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import report_findings as findings
import report_numbers as numbers
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import hmoe_repro as hm
from hmoe_repro.core.style import PALETTE, use_style
from hmoe_repro.data.mnist import crossed_cues, embedded_digits

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
    """Draw how far experts agree with a factor: a dot for each run, and what others reach."""
    rows = findings.discovery_rows(store)
    figure, axis = plt.subplots(figsize=(WIDTH, 0.235 * len(rows) + 0.75))
    random = np.random.default_rng(0)
    axis.axvline(numbers.MIN_NMI, color=DARK, linewidth=0.9, linestyle="--")
    positions = list(range(len(rows)))[::-1]
    bound = {"marker": "D", "markersize": 5.5, "linestyle": "", "zorder": 4}
    for position, row in zip(positions, rows):
        nmi = row["nmi"]
        heights = position + random.uniform(-0.3, 0.3, len(nmi))
        style = {"markersize": 3, "alpha": 0.55, "markeredgewidth": 0, "color": BLUE}
        axis.plot(nmi, heights, "o", **style)
        if len(row["ceiling"]):
            mean = row["ceiling"].mean()
            axis.plot(mean, position, color=DARK, markerfacecolor="white", **bound)
        best = np.nanmax([row[kind] for kind in findings.KMEANS] + [-1])
        if best >= 0:
            axis.plot(
                best, position, "x", color=ORANGE, markersize=6, markeredgewidth=1.8, zorder=5
            )
        axis.text(1.03, position, f"{row['found']} of {row['runs']}", va="center", fontsize=8)
    names = [f"{row['setting'].label}: {row['setting'].note}" for row in rows]
    axis.set_yticks(positions, names)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xlim(-0.03, 1.15)
    axis.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axis.set_xlabel("NMI of experts with the domain (first row: with the colour)")
    axis.plot([], [], "o", color=BLUE, markersize=3, label="HMOE-DN, a run")
    axis.plot([], [], color=DARK, markerfacecolor="white", label="HMOE-DL, mean", **bound)
    style = {"color": ORANGE, "markersize": 6, "markeredgewidth": 1.8, "linestyle": ""}
    axis.plot([], [], marker="x", label="best k-means, mean", **style)
    axis.legend(loc="upper center", bbox_to_anchor=(0.42, 1.1), ncols=3, frameon=False)
    axis.grid(axis="y", visible=False)
    save(figure, folder, "experts")


# A unit of strength in degrees or dilations, as `hmoe_repro.data.mnist` draws it.
CUE_UNITS = {"hue": 15.0, "turn": 45.0, "width": 1.0}
CUE_WORDS = {
    "turn": ("Hue against rotation", "angle between the rotations (degrees)"),
    "width": ("Hue against stroke width", "difference of widths (dilations)"),
}


def draw_cues(folder: Path, store: str = ""):
    """Draw in how many runs the experts follow either cue, for each pair of strengths."""
    table = numbers.cue_table()
    seconds = list(dict.fromkeys(table["second cue"]))
    figure, axes = plt.subplots(1, len(seconds), figsize=(WIDTH, 2.2), squeeze=False)
    for axis, second in zip(axes[0], seconds):
        part = table[table["second cue"] == second]
        grid = part.pivot(index="hue", columns="strength", values="hue wins").sort_index()
        other = part.pivot(index="hue", columns="strength", values="second wins").sort_index()
        number = part.pivot(index="hue", columns="strength", values="runs").sort_index()
        lead = (grid - other) / number
        axis.imshow(lead, cmap="PuOr_r", vmin=-1.6, vmax=1.6, origin="lower", aspect="auto")
        for row, hue in enumerate(grid.index):
            for column, strength in enumerate(grid.columns):
                text = f"{grid.loc[hue, strength]} | {other.loc[hue, strength]}"
                axis.text(column, row, text, ha="center", va="center", fontsize=10, color="black")
        title, label = CUE_WORDS[second]
        runs = int(number.to_numpy().max())
        axis.set_title(f"{title} ({runs} runs a cell)")
        ticks = [f"{value * CUE_UNITS[second]:g}" for value in grid.columns]
        axis.set_xticks(range(len(ticks)), ticks)
        ticks = [f"{value * CUE_UNITS['hue']:g}" for value in grid.index]
        axis.set_yticks(range(len(ticks)), ticks)
        axis.set_xlabel(label)
        axis.set_ylabel("between the hues (degrees)")
        axis.grid(visible=False)
    save(figure, folder, "cues")


def save_forest(rows: list[dict], difference: str, folder: Path, name: str):
    """Draw differences with their intervals, a row each, and save the figure."""
    figure, axis = plt.subplots(figsize=(WIDTH, 0.17 * len(rows) + 0.65))
    draw_forest(axis, rows)
    axis.set_xlabel(f"{difference}, points (grey: within the margin)")
    scale_legend(axis, rows, loc="lower right")
    save(figure, folder, name)


MODE_MARKERS = {"mix": "o", "max": "s", "ood": "^"}
PAYOFF_FRAME = (-9.5, 9.5)


def draw_payoff(folder: Path, store: str = ""):
    """Draw HMOE-DN minus ERM: the main comparisons in three modes, then the other studies."""
    main = [row for row in findings.comparison_rows(store) if row["comparison"].main]
    keys = ["as ERM, full-scale ColoredMNIST", "competitive with ERM"]
    others = []
    known = {study for row in main for study in row["comparison"].studies}
    for row in forest_rows(keys, store):
        study = row["label"].partition(" ")[0]
        if study not in known and row["label"] not in {other["label"] for other in others}:
            others.append(row)
    height = 0.34 * len(main) + 0.15 * len(others) + 0.8
    figure, axis = plt.subplots(figsize=(WIDTH, height))
    axis.axvspan(-1, 1, color="#E8E8E8", zorder=0, linewidth=0)
    axis.axvline(0, color=DARK, linewidth=0.8, zorder=1)
    place = 0.0
    ticks = []
    for row in main:
        comparison = row["comparison"]
        label = f"{comparison.benchmark} ({row['seeds']} seeds, ERM {row['erm']:.0f} %)"
        ticks.append((place - 0.65, label))
        for mode, marker in MODE_MARKERS.items():
            draw_mark(axis, place, row[mode], marker, DARK)
            place -= 0.65
        place -= 0.75
    place -= 0.5
    border = place + 0.2
    axis.axhline(border, color="#888888", linewidth=0.8)
    axis.text(PAYOFF_FRAME[1] - 0.1, border + 0.12, "below: other studies, MIX, not counted above",
              ha="right", va="bottom", fontsize=8, color="#555555")  # fmt: skip
    place -= 0.6
    for row in others:
        draw_mark(axis, place, row, "o", "#777777")
        ticks.append((place, f"{row['label']}, {row['scale']}"))
        place -= 0.85
    axis.set_xlim(*PAYOFF_FRAME)
    axis.set_ylim(place + 0.2, 0.7)
    axis.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks])
    axis.set_xlabel("HMOE-DN minus ERM, points (grey: within the margin)")
    style = {"linestyle": "", "markersize": 5, "color": DARK, "markerfacecolor": "white"}
    for mode, marker in MODE_MARKERS.items():
        axis.plot([], [], marker=marker, label=mode.upper(), **style)
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
    axis.grid(axis="y", visible=False)
    save(figure, folder, "payoff")


def draw_mark(axis, place: float, found: dict, marker: str, colour: str):
    """Draw a mean with its interval, filled if the interval excludes 0, or an arrow at the edge."""
    low, high = PAYOFF_FRAME
    decided = found["low"] > 0 or found["high"] < 0
    ends = np.clip([found["low"], found["high"]], low, high)
    axis.plot(ends, [place] * 2, color=colour, linewidth=1.1, zorder=2)
    face = colour if decided else "white"
    style = {"color": colour, "markersize": 5, "markeredgecolor": colour, "markerfacecolor": face}
    if found["mean"] < low:
        axis.plot([low], [place], marker="<", clip_on=False, zorder=4, **style)
        text = f" {found['mean']:.0f}".replace("-", "−")
        axis.text(low + 0.2, place - 0.08, text, va="bottom", fontsize=8)
        return
    axis.plot([found["mean"]], [place], marker=marker, zorder=3, **style)


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


def examples(count: int) -> list[tuple[str, list[tuple[str, np.ndarray]]]]:
    """Return embedded images of several data sets: title -> (domain, images side by side)."""
    crossed = crossed_cues("crossed", *embedded_digits(), hue=2, second="turn", strength=2)
    shown = {
        "digits": hm.load_dataset("DigitDomains"),
        "DigitStyles": hm.load_dataset("DigitStyles"),
        "ColoredMNIST": hm.load_dataset("ColoredDigits"),
        "RotatedMNIST": hm.load_dataset("RotatedDigits"),
        "crossed cues": crossed,
    }
    groups = []
    for title, data in shown.items():
        rows = []
        for position, domain in enumerate(data.domain_names):
            images = data.images[position][3 : 3 + count]
            rows.append((domain, tile(images.numpy())))
        groups.append((title, rows))
    return groups


def tile(images: np.ndarray) -> np.ndarray:
    """Put images (N, C, H, W) uint8 side by side: (H, N W, 3). Two channels are red and green."""
    if images.shape[1] == 1:
        images = np.repeat(images, 3, axis=1)
    if images.shape[1] == 2:
        empty = np.zeros_like(images[:, :1])
        images = np.concatenate([images, empty], axis=1)
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=255)
    return np.concatenate(list(padded.transpose(0, 2, 3, 1)), axis=1)


def draw_images(folder: Path, store: str = ""):
    """Draw images of the domains of the embedded data, a row of images for each domain."""
    groups = examples(count=4)
    height = max(len(rows) for _, rows in groups)
    size = (WIDTH, 0.36 * height + 0.25)
    figure, axes = plt.subplots(height, len(groups), figsize=size, layout="none")
    for column, (title, rows) in enumerate(groups):
        axes[0, column].set_title(title, fontsize=9, loc="left")
        for line in range(height):
            axis = axes[line, column]
            axis.axis("off")
            if line >= len(rows):
                continue
            domain, image = rows[line]
            axis.imshow(image, interpolation="nearest")
            axis.text(-0.03, 0.5, domain, transform=axis.transAxes, ha="right", va="center",
                      fontsize=8)  # fmt: skip
    spaces = {"left": 0.08, "right": 0.995, "top": 0.9, "bottom": 0.01}
    figure.subplots_adjust(**spaces, wspace=0.85, hspace=0.08)
    save(figure, folder, "images")


METHOD_BOXES = {  # name: (left, bottom, width, text, colour)
    "image": (0.0, 1.3, 0.9, "image\n$x$", "#FFFFFF"),
    "featurizer": (1.5, 2.2, 1.5, "featurizer $h_z$", "#CFE3F2"),
    "encoder": (1.5, 0.4, 1.5, "encoder $h_v$", "#FBE3C8"),
    "embeddings": (3.75, 1.3, 1.75, "embeddings\n$e_1, \\ldots, e_K$", "#FBE3C8"),
    "gate": (6.1, 0.4, 1.35, "gate", "#FBE3C8"),
    "hypernetwork": (6.1, 1.3, 1.35, "hyper-\nnetwork", "#D5ECDF"),
    "experts": (6.1, 2.2, 1.35, "experts\n$f_1, \\ldots, f_K$", "#CFE3F2"),
    "prediction": (8.6, 1.3, 1.25, "prediction\n$\\Sigma\\, p_k f_k(z)$", "#FFFFFF"),
}
BOX_HEIGHT = 0.62
METHOD_ARROWS = (  # from, to, words, (x, y) of the words
    ("image", "featurizer", "", None),
    ("image", "encoder", "", None),
    ("featurizer", "experts", "features $z$", (4.6, 2.62)),
    ("encoder", "gate", "code $v$", (4.6, 0.56)),
    ("embeddings", "gate", "distances", (5.28, 0.98)),
    ("embeddings", "hypernetwork", "", None),
    ("hypernetwork", "experts", "weights $\\theta_k$", (7.4, 2.06)),
    ("gate", "prediction", "weights $p_k$", (8.4, 0.75)),
    ("experts", "prediction", "", None),
)


def draw_method(folder: Path, store: str = ""):
    """Draw HMOE: the two paths of an image, the gate, the hypernetwork and the experts."""
    figure, axis = plt.subplots(figsize=(WIDTH, 1.9))
    axis.set(xlim=(-0.1, 9.95), ylim=(0.25, 2.95))
    axis.axis("off")
    for left, bottom, width, text, colour in METHOD_BOXES.values():
        box = FancyBboxPatch((left, bottom), width, BOX_HEIGHT, boxstyle="round,pad=0.04",
                             facecolor=colour, edgecolor=DARK, linewidth=0.8)  # fmt: skip
        axis.add_patch(box)
        place = (left + width / 2, bottom + BOX_HEIGHT / 2)
        axis.text(*place, text, ha="center", va="center", fontsize=9)
    for start, end, words, place in METHOD_ARROWS:
        axis.add_patch(arrow_between(METHOD_BOXES[start], METHOD_BOXES[end]))
        if words:
            axis.text(*place, words, ha="center", va="center", fontsize=8)
    save(figure, folder, "method")


def arrow_between(start: tuple, end: tuple) -> FancyArrowPatch:
    """Return an arrow from the edge of one box to that of another."""
    middle = BOX_HEIGHT / 2
    if abs(start[0] - end[0]) < 0.01:  # one above the other
        upwards = end[1] > start[1]
        x = start[0] + start[2] / 2
        tail = (x, start[1] + (BOX_HEIGHT + 0.05 if upwards else -0.05))
        head = (x, end[1] + (-0.05 if upwards else BOX_HEIGHT + 0.05))
    else:
        tail = (start[0] + start[2] + 0.05, start[1] + middle)
        head = (end[0] - 0.05, end[1] + middle)
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 0.9, "color": DARK}
    return FancyArrowPatch(tail, head, shrinkA=0, shrinkB=0, **style)


DRAWINGS = (
    draw_method,
    draw_images,
    draw_full,
    draw_experts,
    draw_cues,
    draw_payoff,
    draw_dmg,
    draw_algorithms,
)


def draw_all(folder: Path, store: str = ""):
    """Draw every figure of the report into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    use_style()
    for draw in DRAWINGS:
        draw(folder, store)
