"""Draws class_handout.pdf, two pages for a class: `python docs/class_handout.py`.

The text is below. Its numbers, in <angle brackets>, come from the tables of the published pages. The same
text and numbers give the same file; the digest of both is kept in the file's keywords.
"""

import hashlib
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.backends.backend_pdf import PdfPages

from hmoe_repro.analysis.statistics import rate

ROOT = Path(__file__).resolve().parents[1]
PDF = ROOT / "docs/class_handout.pdf"
PAGES = [
    r"""# Domain generalization with experts
_ hmoe_repro · handout of the class of 90 minutes · page 1: the problem and the method

## The problem
A classifier is trained on pictures of several *domains*, such as photographs, paintings and sketches. On a domain that it has *never seen* it fails more often. **Domain generalization** asks how to train so that it fails less, without any sample of the new domain. One domain is held out as the *test domain*; the others are the *training domains*; each domain takes its turn. The row that every method is measured against is **ERM**: pool the training domains and minimise the mean loss.

## HMOE in one picture
HMOE is a *hypernetwork-based mixture of experts* (Qu et al., arXiv 2211.08253). One path extracts *what* is seen, the other a code of *where it comes from*. The gate compares the code with one embedding for each expert; a hypernetwork writes the weights of the experts from the same embeddings.
@diagram
$$ y = \sum_k\, p_k\, f_c(z;\theta_k), \quad \theta_k = f_h(e_k)   | (1)

## The gate and its two losses
$$ p_k = \dfrac{1/(d_k^2 + \epsilon)}{\sum_j\, 1/(d_j^2 + \epsilon)}, \quad d_k = \Vert v - e_k \Vert   | (2)
Only distances count. A code on an embedding gives that expert a gate value near 1; a code far from all gives nearly equal values.
$$ \mathcal{L}_{en} = \mathbb{E}_x\left[ H(p(x)) \right], \quad H(p) = -\sum_k\, p_k \log p_k   | (3)
The entropy loss asks *each image* to decide for one expert. Alone it sends everything to one.
$$ \mathcal{L}_{kl} = \log K - H(P), \quad P = \mathbb{E}_x\left[ p(x) \right]   | (4)
The load-balance loss asks for work for *all experts*. Alone it decides nothing. A gate that is decided for each image and balanced over all satisfies both.
""",
    r"""# What reproduces, and what does not
_ page 2: numbers of this project's records, with 95 % intervals

## Symbols
@symbols
## Three ways to predict
**MIX** weighs the experts by the gate; **MAX** takes the expert of the largest gate value; **OOD** lets the hypernetwork write a classifier from the image's own code. Training sees MIX only.

## What reproduces here
- *Three experts find three intervals of a sine, without labels* (the paper's toy, at its full scale): in **<found> seeds** (<found_low> to <found_high> %). The paper's figure shows one seed.
- *Without the entropy loss*: in <without> seeds, and the experts work only together: the median squared error is <mix> for MIX and <max> for MAX.
- *Domains of digits* (four looks of 1,797 digits, a small stand-in): HMOE finds them in **<digits> runs** with instance norm and 1,401 updates, a setting that was chosen with the true domain labels.
- *Accuracy on the unseen look*: HMOE without domain labels (MIX) minus ERM: **<difference> points** (<low> to <high>). A study of this size detects <detectable> points, so this is **inconclusive**.
@seeds
## How to read such results
- One run shows what can happen; a count over seeds shows how often.
- *Not significant* is not *equal*: look at the interval and at the detectable difference.
- A number needs the rule that chose its checkpoint, one that did not see the test domain.

## Three questions
**1.** A code lies at distances 1, 2 and 2 from three embeddings. What are its gate values, and what becomes of them if all distances are ten times as large?
**2.** Twelve images, three experts. Give a gate with no entropy loss that is as unbalanced as possible, and one with no load-balance loss that decides nothing. What are the two losses of each?
**3.** A colleague shows one run whose experts match the domains and, in a study of the size above, an accuracy two points above ERM. What follows from the run, and what from the two points?
""",
]
SYMBOLS = [
    ("$x,\\ y$", "image, prediction", "$h_z,\\ z$", "featurizer, features"),
    ("$h_v,\\ v$", "D2V encoder, code", "$e_k,\\ K$", "an embedding, their number"),
    ("$f_h,\\ \\theta_k$", "hypernetwork, an expert's weights", "$p_k$", "gate value of an expert"),
    ("$d_k$", "distance of code and embedding", "$P$", "mean gate values of all images"),
]
BLUE, SAND, GREEN, INK = "#CFE3F2", "#FBE3C8", "#D5ECDF", "#1f2933"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 8.27, 11.69, 0.9, 7.37, 10.95, 0.7  # A4, inches
FONT = {"font.family": "STIXGeneral", "mathtext.fontset": "stix", "pdf.fonttype": 42}
STYLES = {"**": {"weight": "bold"}, "*": {"style": "italic"}, "": {}}
LOOKS = {"# ": (22, 0.38), "## ": (15, 0.31), "_ ": (10.5, 0.3)}  # size and height of a line
BODY, LINE, GAP = 11.4, 0.2, 0.27  # of paragraphs: size, heights of a line and of the last line


def table(name: str) -> pd.DataFrame:
    "A table of the published pages."
    return pd.read_csv(ROOT / f"figures/quick/{name}.csv")


def percent(count: int, of: int) -> dict:
    "The exact 95 % interval of a share, as whole percents."
    return dict(zip(("low", "high"), (f"{100 * end:.0f}" for end in rate(count, of)[1:])))


def numbers() -> dict:
    "The numbers of the text."
    toy = table("hmoe_fig3_summary").set_index("losses")
    all_losses, without = toy.loc["all losses"], toy.loc["without L_en"]
    found, seeds = map(int, all_losses["intervals found"].split(" of "))
    digits = table("claims").set_index("claim").loc["domains, 1401 updates"]
    pairs = table("digits_table_contrasts").set_index(["algorithm", "mode", "test_domain"])
    erm = pairs.loc[("HMOE-DN", "mix", "Average")]
    seen = table("digits_table_resolvable").set_index("test_domain").detectable["Average"]
    return {
        "found": f"{found} of {seeds}",
        **{f"found_{end}": value for end, value in percent(found, seeds).items()},
        "without": without["intervals found"],
        "mix": f"{without['mse MIX']:.5f}",
        "max": f"{without['mse MAX']:.2f}",
        "digits": f"{digits.value * digits.runs / 100:.0f} of {digits.runs}",
        "difference": f"{erm.difference:+.1f}",
        "low": f"{erm.low:+.1f}",
        "high": f"{erm.high:+.1f}",
        "detectable": f"{seen:.1f}",
    }


def filled() -> list[str]:
    "The text of both pages with its numbers."
    values = numbers()
    return [re.sub(r"<(\w+)>", lambda m: values[m[1]].replace("-", "−"), page) for page in PAGES]


def digest() -> str:
    "Of the text with its numbers, and of what draws it."
    source = Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256("\n".join([source, *filled()]).encode()).hexdigest()


class Sheet:
    "A page that is filled from its top; places are in inches."

    def __init__(self):
        self.fig = plt.figure(figsize=(WIDTH, HEIGHT), dpi=600)  # exact widths
        self.draw = self.fig.canvas.get_renderer()
        self.y = TOP

    def put(self, x, y, text, **look):
        "A text at a place, and its width."
        look = {"size": BODY, "color": INK} | look
        drawn = self.fig.text(x / WIDTH, y / HEIGHT, text, **look)
        return drawn.get_window_extent(self.draw).width / self.fig.dpi

    def paragraph(self, text, indent=0.0):
        "Words with *italic*, **bold** and $math$, broken into lines."
        x, space = LEFT + indent, 0.046
        for word in re.findall(r"\*\*.+?\*\*\S*|\*.+?\*\S*|\(?\$.+?\$\S*|\S+", text):
            mark, inner, tail = re.fullmatch(r"(\*{0,2})(.+?)\1([^*\s]*)", word).groups()
            inner, tail = (inner, tail) if mark else (word, "")
            parts = [(part, STYLES[mark]) for part in (inner.split() if mark else [inner])]
            for i, (part, style) in enumerate(parts):
                last = tail if i == len(parts) - 1 else ""
                wide = sum(self.width(s, look) for s, look in ((part, style), (last, {})) if s)
                if x + wide > RIGHT:
                    x, self.y = LEFT + indent, self.y - LINE
                x += self.put(x, self.y, part, **style)
                x += (self.put(x, self.y, last) if last else 0) + space
        self.y -= GAP

    def width(self, text, style):
        "Of a text, without drawing it."
        drawn = self.fig.text(0, 0, text, size=BODY, **style)
        wide = drawn.get_window_extent(self.draw).width / self.fig.dpi
        drawn.remove()
        return wide

    def axes(self, high, left=LEFT, right=RIGHT):
        "Axes of this height at the cursor, which is moved below them by `move`."
        place = (left / WIDTH, (self.y + 0.12 - high) / HEIGHT)
        return self.fig.add_axes((*place, (right - left) / WIDTH, high / HEIGHT))

    def line(self, text):
        "A line of the source: heading, formula, list item, picture or paragraph."
        kind = next((mark for mark in LOOKS if text.startswith(mark)), "")
        if kind:
            size, high = LOOKS[kind]
            self.y -= 0.13 if kind == "## " else 0
            colour = {"_ ": "#5b6770", "## ": "#0b5cad"}.get(kind, INK)
            weight = "normal" if kind == "_ " else "bold"
            text = text.removeprefix(kind)
            self.put(LEFT, self.y, text, size=size, color=colour, weight=weight)
            self.y -= high
        elif text.startswith("$$"):
            formula, _, number = text[2:].partition("|")
            extra = 0.16 if "frac" in formula else 0
            self.y -= 0.12 + extra
            self.put(WIDTH / 2, self.y, f"${formula.strip()}$", size=16, ha="center")
            self.put(RIGHT, self.y, number.strip(), ha="right")
            self.y -= 0.44 + extra
        elif text.startswith("@"):
            getattr(self, text[1:])()
        elif text.startswith("- "):
            self.put(LEFT + 0.02, self.y, "•")
            self.paragraph(text[2:], indent=0.18)
        elif text:
            self.paragraph(text)

    def diagram(self):
        "HMOE's parts and what they hand on."
        ax = self.axes(1.85)
        boxes = {  # name: place, text, colour
            "x": ((0.55, 1), "image $x$", "#ffffff"),
            "z": ((2.1, 2), "featurizer $h_z$", BLUE),
            "v": ((2.1, 0), "D2V encoder $h_v$", SAND),
            "e": ((4.0, 1), "embeddings $e_k$", SAND),
            "gate": ((4.0, 0), "gate (2)", SAND),
            "experts": ((6.2, 2), "experts $f_c(z;\\theta_k)$", BLUE),
            "f_h": ((6.2, 1), "hypernetwork $f_h$", GREEN),
            "y": ((8.3, 1), "prediction $y$ (1)", "#ffffff"),
        }
        arrows = {
            ("x", "z"): "",
            ("x", "v"): "",
            ("z", "experts"): "$z$",
            ("v", "gate"): "$v$",
            ("e", "gate"): "$e_k$",
            ("e", "f_h"): "$e_k$",
            ("f_h", "experts"): "$\\theta_k$",
            ("experts", "y"): "$y_k$",
            ("gate", "y"): "$p_k$",
        }
        ax.set(xlim=(0, 9), ylim=(-0.45, 2.45))
        ax.axis("off")
        frame = dict(boxstyle="round,pad=0.45", ec="#444444", lw=0.8)
        drawn = {
            name: ax.text(*at, text, ha="center", va="center", size=10, bbox=frame | {"fc": fc})
            for name, (at, text, fc) in boxes.items()
        }
        for (start, end), text in arrows.items():
            a, b = drawn[start], drawn[end]
            ends = dict(patchA=a.get_bbox_patch(), patchB=b.get_bbox_patch(), shrinkA=1, shrinkB=1)
            look = dict(arrowstyle="->", color="#444444", lw=1) | ends
            (x0, y0), (x1, y1) = boxes[start][0], boxes[end][0]
            ax.annotate("", (x1, y1), (x0, y0), arrowprops=look)
            aside = (0.2, -0.05) if x0 == x1 else (0, 0.12)
            middle = (x0 + x1) / 2 + aside[0], (y0 + y1) / 2 + aside[1]
            ax.text(*middle, text, ha="center", size=10)
        self.y -= 1.98

    def symbols(self):
        "The symbols, two in a row."
        for row in SYMBOLS:
            for x, text in zip((0, 0.7, 3.35, 4.05), row):
                self.put(LEFT + x, self.y, text)
            self.y -= 0.21
        self.y -= 0.05

    def seeds(self):
        "A square for each seed of the toy, and the difference of HMOE and ERM."
        self.y -= 0.22
        counts = table("hmoe_fig3_outcomes").set_index("intervals found").seeds
        kinds = {"yes": "#009E73", "majority": "#F0C05A", "no": "#B9C0C7"}
        colours = [kinds[name] for name in kinds for _ in range(int(counts[name]))]
        squares = self.axes(0.95, right=LEFT + 3.0)
        places = [(i % 20, -(i // 20)) for i in range(len(colours))]
        squares.scatter(*zip(*places), marker="s", s=52, c=colours, lw=0)
        squares.set(xlim=(-0.7, 19.7), ylim=(-3.6, 1.3))
        squares.axis("off")
        squares.text(-0.4, 0.75, "one square for each seed of the toy", size=9)
        for x, (name, colour) in zip((0, 5.0, 12.2), kinds.items()):
            squares.scatter(x, -3.1, marker="s", s=30, c=colour, lw=0)
            words = {"yes": "found", "majority": "by majority", "no": "not found"}[name]
            squares.text(x + 0.7, -3.1, f"{words} ({counts[name]})", size=9, va="center")
        bar = self.axes(0.62, left=LEFT + 3.7)
        values = {name: float(text) for name, text in numbers().items() if name in ENDS}
        bar.plot([values["low"], values["high"]], [0, 0], color="#0072B2", lw=2)
        bar.plot(values["difference"], 0, "o", color="#0072B2")
        bar.axvline(0, color="#444444", lw=0.8)
        reach = values["detectable"]
        bar.axvspan(-reach, reach, color="#eef1f4", zorder=0)
        bar.set(xlim=(-12, 12), ylim=(-1, 1), yticks=[])
        bar.set_title("HMOE minus ERM, points (grey: not detectable)", size=9, color=INK)
        bar.tick_params(labelsize=8, length=2)
        bar.spines[["top", "left", "right"]].set_visible(False)
        self.y -= 1.08


ENDS = ("low", "high", "difference", "detectable")


def draw(path: Path = PDF) -> None:
    "Write the PDF. `ValueError` for a page with too much text."
    facts = {"Title": "Domain generalization with experts", "Keywords": digest()}
    facts |= {"CreationDate": None, "Creator": None, "Producer": None}
    with plt.rc_context(FONT), PdfPages(path, metadata=facts) as pdf:
        for text in filled():
            sheet = Sheet()
            for line in text.splitlines():
                sheet.line(line)
            if sheet.y < BOTTOM:
                raise ValueError(f"A page is {BOTTOM - sheet.y:.2f} inches too long: shorten its text")
            pdf.savefig(sheet.fig)
            plt.close(sheet.fig)


if __name__ == "__main__":
    draw()
