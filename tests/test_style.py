"""The look of pictures and tables: rounding for readers, three forms of a table, one legend."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from hmoe_repro.analysis.plotting import shared_legend
from hmoe_repro.analysis.writers import latex_table, markdown_table, number_as_text, text_table
from hmoe_repro.core.style import ALGORITHM_COLOURS, EMBEDDING_COLOUR, TEST_COLOUR, colours

FRAME = pd.DataFrame(
    {"mean_accuracy": [51.234, np.nan], "note": ["A|B", "100 %"]},
    index=pd.Index(["ERM", "IRM"], name="algorithm"),
)


def test_names_keep_their_colours_and_differ_from_the_marked_ones():
    names = ["ERM", "HMOE-DL", "HMOE-DN", "HMOE-ND", "art", "cartoon", "sketch"]
    palette = colours(names)
    assert colours(["sketch", "HMOE-DN"])["HMOE-DN"] == ALGORITHM_COLOURS["HMOE-DN"]
    assert len(set(palette.values())) == len(names)
    assert not {EMBEDDING_COLOUR, TEST_COLOUR} & set(palette.values())


@pytest.mark.parametrize(
    "value, text",
    [(1.005, "1.00"), (-0.004, "0.00"), (-0.006, "-0.01"), (np.nan, "–"), (np.inf, "inf")],
)
def test_a_number_is_rounded_for_reading(value, text):
    assert number_as_text(value) == text


def test_a_missing_cell_is_a_dash_and_an_index_a_column():
    text = text_table(FRAME, 1)
    assert list(text.columns) == ["algorithm", "mean accuracy", "note"]
    assert text["mean accuracy"].tolist() == ["51.2", "–"]


def test_markdown_keeps_its_columns_and_is_not_padded():
    assert markdown_table(FRAME, 1) == (
        "| algorithm | mean accuracy | note |\n|---|---:|---|\n"
        "| ERM | 51.2 | A\\|B |\n| IRM | – | 100 % |\n"
    )


def test_latex_escapes_title_names_and_cells():
    assert latex_table(FRAME, "All & nothing", "toy", 1) == (
        "\\begin{table}\n\\caption{All \\& nothing}\n\\label{tab:toy}\n"
        "\\begin{tabular}{lll}\n\\toprule\nalgorithm & mean accuracy & note \\\\\n\\midrule\n"
        "ERM & 51.2 & A\\textbar{}B \\\\\nIRM & -- & 100 \\% \\\\\n\\bottomrule\n"
        "\\end{tabular}\n\\end{table}\n"
    )


def test_a_shared_legend_has_each_label_once_and_in_order():
    figure, axes = plt.subplots(1, 3, layout="constrained")
    for axis, labels in zip(axes, (("b", "c"), ("a", "b"), ())):
        for label in labels:
            axis.plot([0, 1], label=label)
    shared_legend(figure, axes, ("a", "b", "missing", "c"))
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b", "c"]
    plt.close(figure)
