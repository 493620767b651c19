"""Writers: what a cell says survives every format, and the same content is the same bytes."""

import hashlib

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from hmoe_repro.analysis.plotting import save_figure
from hmoe_repro.analysis.writers import (
    Line,
    escape_markdown,
    escape_tex,
    first_sentence,
    lines_of,
    markdown_table,
    save_table,
    text_table,
)
from hmoe_repro.core.style import colours, use_style


def test_cells_survive_markdown_and_tex(tmp_path):
    frame = pd.DataFrame(
        {"name": ["a|b_c*d<e>", "50% & $x^2$ {~} #1 \\"], "value": [1.23456, np.nan]}
    )
    save_table(frame, tmp_path, "t", "A_title | 100%")
    rows = [line for line in (tmp_path / "t.md").read_text().splitlines() if line.startswith("|")]
    assert all(
        len([c for i, c in enumerate(row) if c == "|" and row[i - 1] != "\\"]) == 3 for row in rows
    )
    assert r"| a\|b\_c\*d\<e\> | 1.23 |" in rows[2]
    assert "–" in rows[3]
    tex = (tmp_path / "t.tex").read_text()
    assert (
        r"50\% \& \$x\textasciicircum{}2\$ \{\textasciitilde{}\} \#1 \textbackslash{} & -- \\"
        in tex
    )
    assert r"\caption{A\_title \textbar{} 100\%}" in tex
    assert pd.read_csv(tmp_path / "t.csv").name.tolist() == frame.name.tolist()
    assert "1.23456" in (tmp_path / "t.csv").read_text()
    assert escape_tex("a\nb") == "a b"
    assert "\n" not in escape_markdown("a\nb")


def test_numbers_go_to_the_csv_and_text_to_the_table(tmp_path):
    assert save_table(
        pd.DataFrame({"x": ["51.2 ± 0.4"]}),
        tmp_path,
        "t",
        "T",
        numbers=pd.DataFrame({"mean": [51.2345]}),
    ) == ["t.csv", "t.md", "t.tex"]
    assert (tmp_path / "t.csv").read_text() == "mean\n51.2345\n"
    assert "51.2 ± 0.4" in (tmp_path / "t.md").read_text()
    assert r"51.2 $\pm$ 0.4" in (tmp_path / "t.tex").read_text()


def test_text_of_cells():
    frame = pd.DataFrame(
        {"a_b": [1.0, np.inf], "n": pd.array([3, None], dtype="Int64"), "t": ["x", None]}
    )
    assert text_table(frame, 1).to_numpy().tolist() == [["1.0", "3", "x"], ["inf", "–", "–"]]
    assert text_table(pd.DataFrame({"x": [-0.001, -0.02]}), 2).x.tolist() == ["0.00", "-0.02"]
    assert list(text_table(frame)) == ["a b", "n", "t"]
    assert markdown_table(frame).splitlines()[1] == "|---|---:|---|"


def test_figures_are_the_same_bytes_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_FORMATS", "png pdf")

    def draw():
        use_style()
        figure, axes = plt.subplots(1, 2, figsize=(3, 2))
        axes[0].plot([1, 2, 4], label="a long label")
        axes[0].set_ylabel("y")
        figure.legend(loc="outside lower center")
        return figure

    digests = []
    figure = draw()
    for page in (figure, figure, draw()):
        names = save_figure(page, tmp_path, "f")
        digests.append(
            [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names]
        )
    plt.close("all")
    assert digests[0] == digests[1] == digests[2]
    assert b"CreationDate" not in (tmp_path / "f.pdf").read_bytes()
    assert b"Software" not in (tmp_path / "f.png").read_bytes()


def test_colours_do_not_depend_on_company():
    alone, together = colours(["HMOE-DN"]), colours(["art", "HMOE-ND", "HMOE-DN", "art"])
    assert alone["HMOE-DN"] == together["HMOE-DN"]
    assert len(set(together.values())) == 3
    assert len(colours(range(30))) == 30


def test_a_line_knows_its_sentences():
    line = Line.of("Of 8 targets: 7 met.\n\nA processor, v. 2.1, one thread.")
    assert line == "Of 8 targets: 7 met. A processor, v. 2.1, one thread."
    assert first_sentence(line) == "Of 8 targets: 7 met."
    assert first_sentence(line.after("PACS: ")) == "PACS: Of 8 targets: 7 met."
    assert first_sentence("Mean. Of three.") == "Mean. Of three."  # no text is searched for its end
    two = lines_of("One.\nTwo.\n\nThree.\n")
    assert [line.sentences for line in two] == [("One.", "Two."), ("Three.",)]
