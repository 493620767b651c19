"""Draws readme_picture.png, the picture of the README: `python docs/readme_picture.py`.

Left: what HMOE does. Right: what was found, the agreement of its experts with the domains in every
run, beside k-means. The numbers come from the published records; the same numbers and the same file
give the same picture, and the digest of both is kept in the picture's keywords.
"""

import hashlib
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from hmoe_repro.report.readme import found_by_experts, found_by_kmeans

ROOT = Path(__file__).resolve().parents[1]
PNG = ROOT / "docs/readme_picture.png"
BLUE, SAND, GREEN, INK, GREY = "#CFE3F2", "#FBE3C8", "#D5ECDF", "#1f2933", "#5b6770"
EXPERTS, KMEANS = "#0072B2", "#D55E00"
FONT = {"font.family": "DejaVu Sans", "font.size": 8, "mathtext.fontset": "dejavusans"}
BENCHMARKS = {  # as in `found_by_experts`: title of the group, its rows in order
    "ColoredMNIST": (
        "ColoredMNIST: experts agree",
        {"colour": "with the colour", "domain": "with the domain"},
    ),
    "digits": (
        "Digits, tuned with true domains; held out:",
        {"photo": "photo", "negative": "negative", "plain": "plain", "sketch": "sketch"},
    ),
    "PACS": (
        "PACS, frozen features; held out:",
        {"art_painting": "art", "cartoon": "cartoon", "photo": "photo", "sketch": "sketch"},
    ),
}
BOXES = {  # name: (place, text, colour)
    "x": ((0.62, 1.5), "image", "#ffffff"),
    "z": ((2.25, 2.75), "featurizer:\nwhat is seen", BLUE),
    "v": ((2.25, 0.25), "encoder:\nwhich style", SAND),
    "experts": ((4.75, 2.75), "experts", BLUE),
    "hyper": ((4.75, 1.95), "hypernetwork", GREEN),
    "e": ((4.75, 1.1), "expert\nembeddings", SAND),
    "gate": ((4.75, 0.25), "gate", SAND),
    "y": ((6.75, 1.5), "class", "#ffffff"),
}
ARROWS = [  # (start, end, what is handed on, where it is written)
    ("x", "z", "", None),
    ("x", "v", "", None),
    ("z", "experts", "features", (3.67, 2.87)),
    ("v", "gate", "style code", (3.73, 0.37)),
    ("e", "gate", "", None),
    ("e", "hyper", "", None),
    ("hyper", "experts", "weights", (4.15, 2.27)),
    ("experts", "y", "", None),
    ("gate", "y", "gate values", (6.5, 0.6)),
]


def digest() -> str:
    """The digest of the numbers that are drawn, and of what draws them."""
    source = Path(__file__).read_text(encoding="utf-8")
    numbers = [found_by_experts(), found_by_kmeans()]
    texts = [frame.round(6).to_csv(index=False) for frame in numbers]
    return hashlib.sha256("\n".join([source, *texts]).encode()).hexdigest()


def is_stale() -> bool:
    """Tell whether the picture was drawn from other numbers, by other code, or never."""
    if not PNG.exists():
        return True
    with Image.open(PNG) as picture:
        return picture.info.get("Keywords") != digest()


def draw_method(axis) -> None:
    """Draw the parts of HMOE and what they hand on."""
    axis.set(xlim=(0, 7.4), ylim=(-1.0, 3.2))
    axis.axis("off")
    frame = dict(boxstyle="round,pad=0.42", ec="#444444", lw=0.8)
    drawn = {}
    for name, (place, text, colour) in BOXES.items():
        look = dict(ha="center", va="center", linespacing=1.3, bbox=frame | {"fc": colour})
        drawn[name] = axis.text(*place, text, color=INK, **look)
    for start, end, text, place in ARROWS:
        ends = {"patchA": drawn[start].get_bbox_patch(), "patchB": drawn[end].get_bbox_patch()}
        look = dict(arrowstyle="->", color="#444444", lw=1, shrinkA=1, shrinkB=1)
        axis.annotate("", BOXES[end][0], BOXES[start][0], arrowprops=look | ends)
        if text:
            axis.text(*place, text, size=6.8, color=GREY, ha="center")
    said = "The aim: images of one style share an expert.\nTraining needs no labels of style."
    axis.text(0.1, -0.95, said, color=INK, va="bottom", linespacing=1.4)


def draw_found(axis) -> None:
    """Draw the NMI of experts and domains of each run, their mean, and that of k-means."""
    experts, kmeans = found_by_experts(), found_by_kmeans()
    scatter, place, ticks = np.random.default_rng(0), 0.0, {}
    for benchmark, (title, rows) in BENCHMARKS.items():
        axis.text(-0.42, place, title, weight="bold", color=INK, ha="left", va="center")
        place += 1
        for row, label in rows.items():
            own = experts[(experts.benchmark == benchmark) & (experts.row == row)]
            ticks[place] = label
            heights = place + scatter.uniform(-0.24, 0.24, len(own))
            axis.scatter(own.nmi, heights, s=8, color=EXPERTS, alpha=0.4, lw=0)
            axis.plot([own.nmi.mean()] * 2, [place - 0.38, place + 0.38], color=EXPERTS, lw=2.4)
            other = kmeans[(kmeans.benchmark == benchmark) & (kmeans.row == row)]
            axis.scatter(other.nmi, [place] * len(other), s=24, marker="D", color=KMEANS, zorder=3)
            place += 1
        place += 0.25
    axis.axvspan(0.9, 1.03, color="#DDEFE5", zorder=0, lw=0)
    axis.text(1.025, 0, "0.9: found", size=7.5, color="#2b6b4a", ha="right", va="center")
    axis.set(xlim=(-0.03, 1.03), ylim=(place - 0.6, -0.6), yticks=list(ticks))
    axis.set_yticklabels(ticks.values(), color=INK)
    axis.set_xticks([0, 0.5, 1], ["NMI 0", "0.5", "1"])
    axis.tick_params(length=0, labelcolor=INK)
    axis.grid(axis="y", color="#e1e5e8", lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)


def draw_legend(canvas) -> None:
    """Draw both titles, and what the marks at the right mean."""
    canvas.set(xlim=(0, 1), ylim=(0, 1))
    canvas.axis("off")
    look = dict(size=10, weight="bold", color=INK, va="center")
    canvas.text(0.02, 0.945, "What HMOE does", **look)
    canvas.text(0.52, 0.945, "Do its experts find the domains?", **look)
    marks = [
        (0.53, "o", EXPERTS, "a run"),
        (0.625, "|", EXPERTS, "mean of runs"),
        (0.795, "D", KMEANS, "k-means on colours"),
    ]
    for x, marker, colour, words in marks:
        canvas.scatter(x, 0.868, marker=marker, color=colour, s=26, alpha=0.5 if x < 0.6 else 1)
        canvas.text(x + 0.014, 0.868, words, size=7.5, color=INK, va="center")


def draw(path: Path = PNG) -> None:
    """Write the picture."""
    with plt.rc_context(FONT):
        figure = plt.figure(figsize=(7, 3.3), facecolor="white")
        draw_legend(figure.add_axes((0, 0, 1, 1)))
        draw_method(figure.add_axes((0.01, 0.02, 0.47, 0.88)))
        draw_found(figure.add_axes((0.675, 0.08, 0.315, 0.75)))
        metadata = {"Software": None, "Keywords": digest()}
        figure.savefig(path, dpi=200, metadata=metadata)
        plt.close(figure)


if __name__ == "__main__":
    draw()
