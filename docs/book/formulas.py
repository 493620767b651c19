"""LaTeX formulas as plain text, for the excerpts of the search."""

import re
import unicodedata

GREEK = dict(zip(
    "alpha beta gamma delta epsilon varepsilon eta theta kappa lambda mu nu pi rho sigma tau phi "
    "varphi psi omega Delta Theta Phi".split(),
    "α β γ δ ε ε η θ κ λ μ ν π ρ σ τ φ φ ψ ω Δ Θ Φ".split(),
))  # fmt: skip
SIGNS = {
    "sum": "∑", "prod": "∏", "partial": "∂", "nabla": "∇", "infty": "∞", "ell": "ℓ", "cdot": "·",
    "times": "×", "pm": "±", "circ": "∘", "odot": "⊙", "oplus": "⊕", "in": "∈", "le": "≤",
    "ge": "≥", "ne": "≠", "neq": "≠", "approx": "≈", "sim": "~", "propto": "∝", "to": "→",
    "mapsto": "↦", "leftarrow": "←", "bigcup": "⋃", "top": "⊤", "dots": "…", "Vert": "‖",
    "lVert": "‖", "rVert": "‖", "|": "‖", "lvert": "|", "rvert": "|", "mid": "|", "lfloor": "⌊",
    "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "langle": "⟨", "rangle": "⟩", "bmod": " mod ",
    "quad": " ", "qquad": " ", ",": " ", ";": " ", ":": " ", " ": " ", "!": "", "\\": " ",
    "{": "{", "}": "}", "%": "%", "&": "&", "_": "_", "#": "#", "textstyle": "",
}  # fmt: skip
SPACE = re.compile(r"\\(?:begin|end)\{\w+\*?\}|(?<!\\)&")
SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?")
FONT = re.compile(
    r"\\(?:mathcal|mathrm|mathbf|mathbb|text|underbrace)\*?"
    r"\s*(?:\{([^{}]*)\}|(\w))"
)
ACCENT = re.compile(r"\\(tilde|hat|bar|overline)\s*(?:\{([^{}]*)\}|(\w))")
ACCENTS = {"tilde": "\u0303", "hat": "\u0302", "bar": "\u0304", "overline": "\u0304"}
FRACTION = re.compile(r"\\[td]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
ROOT = re.compile(r"\\sqrt\s*(?:\{([^{}]*)\}|(\w))")
INDEX = re.compile(r"([_^])\s*\{([^{}]*)\}")
OPEN, CLOSE = "\ue000", "\ue001"  # braces that are part of the formula


def bracketed(text: str) -> str:
    "Return a part of a formula, in parentheses if it has several factors or terms."
    return text if re.fullmatch(r"[\w.∑∂]*", text.strip()) else f"({text.strip()})"


def accented(text: str, mark: str) -> str:
    "Return a letter with a mark above it; a longer text stays unmarked, in parentheses."
    return text + mark if len(text) == 1 else f"({text})"


def plain(formula: str) -> str:
    r"""Return a LaTeX formula as one line of text.

    >>> plain(r"\mathcal{L}_{en} = \frac{1}{N} \sum_i \log p_{ik}^2")
    'L_en = 1/N ∑_i log p_ik^2'
    """
    text = SIZE.sub("", SPACE.sub(" ", formula)).replace(r"\{", OPEN).replace(r"\}", CLOSE)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: GREEK.get(m[1]) or SIGNS.get(m[1], m[0]), text)
    text = re.sub(r"\\operatorname\*?\{(\w+)\}", r"\\\1", text)
    before = ""
    while before != text:
        before = text
        text = FONT.sub(lambda m: m[1] or m[2] or "", text)
        text = INDEX.sub(lambda m: m[1] + bracketed(m[2].strip()), text)
        text = ROOT.sub(lambda m: f"√{bracketed(m[1] or m[2])}", text)
        text = ACCENT.sub(lambda m: accented(m[2] or m[3], ACCENTS[m[1]]), text)
        text = FRACTION.sub(lambda m: f"{bracketed(m[1] or m[2])}/{bracketed(m[3] or m[4])}", text)
    text = re.sub(r"\\([^A-Za-z])", lambda m: SIGNS.get(m[1], m[1]), text)
    text = re.sub(r"\\([A-Za-z]+)", r" \1", text).replace("{", "").replace("}", "")
    text = text.replace(OPEN, "{").replace(CLOSE, "}")
    text = re.sub(r" ([,.;)])", r"\1", " ".join(text.split())).replace("( ", "(")
    return unicodedata.normalize("NFC", text)
