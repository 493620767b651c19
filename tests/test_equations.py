"""The index leads from each numbered equation of the papers to the cell that computes it."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
NUMBERED = {  # anchor -> what the cell below it must define
    "hmoe-eq-1": "mix_outputs",
    "hmoe-eq-2": "log_gate_values",
    "hmoe-eq-3": "entropy_loss",
    "hmoe-eq-4": "load_balance_loss",
    "hmoe-eq-5": "hmoe_losses",
    "hmoe-eq-6": "reversal_weight",
    "hmoe-eq-7": "domain_loss",
    "hmoe-eq-8": "hmoe_losses",
    "hmoe-eq-9": "total_loss",
    "dmg-eq-1": "soft_iou",
    "dmg-eq-2": "DMG",
    "gmoe-layer": "SparseMoE",
    "gmoe-auxiliary-loss": "balance_loss",
}


def cells_of(path):
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    return [(c["cell_type"], "".join(c["source"])) for c in cells]


def index_rows():
    "The rows of the index that have a link with an anchor: anchor -> row."
    text = (DOCS / "symbols.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return {m[2]: (m[1], row) for row in rows if (m := re.search(r"\]\(([^)#]+)#([\w-]+)\)", row))}


IN_THE_LESSON = {"dmg-eq-1"}  # computed by a function that the library does not have


def below(cells, anchor):
    "The code between an anchor and the next one, or the next heading after it."
    (start,) = [i for i, (_, s) in enumerate(cells) if f'<a id="{anchor}"></a>' in s]
    code = []
    for kind, source in cells[start + 1 :]:
        if kind == "markdown" and re.match(r"(<a id|#)", source):
            break
        code += [source] if kind == "code" else []
    return "\n".join(code)


def test_every_numbered_equation_has_a_link():
    assert set(index_rows()) == set(NUMBERED)


@pytest.mark.parametrize("anchor", NUMBERED)
def test_a_link_leads_to_the_cell_that_computes_the_equation(anchor):
    file, row = index_rows()[anchor]
    code = below(cells_of(DOCS / file), anchor)
    name = NUMBERED[anchor]
    assert re.search(rf"^(def|class) {name}\b", code, re.M), f"{file}: {name} is not below"
    if anchor not in IN_THE_LESSON:
        assert re.search(rf"`([\w.]*\.)?{name}`", row), f"the row of {anchor} does not name {name}"
    if "-eq-" in anchor:
        assert f"eq. {anchor[-1]}](" in row


def test_an_anchor_of_a_wrong_cell_is_seen():
    cells = [("markdown", '<a id="x"></a>\n\n## A'), ("markdown", "## B"), ("code", "def f(): ...")]
    assert "def f" not in below(cells, "x")
    assert "def f" in below([cells[0], cells[2]], "x")
