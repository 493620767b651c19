"""What a lesson shows can be read: results are tables, and pictures are large enough."""

import ast
import base64
import dataclasses
import json
import re
import struct
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from notebooks import LIBRARY, ROOT, cells, for_each, python, read

from hmoe_repro.core.display import LONGEST_TEXT, as_table

sys.path.append(str(ROOT / "docs/book"))
import names  # noqa: E402

CLASS = ROOT / "docs/class.ipynb"
PATH = [ROOT / page for page in names.reading_path() if page.startswith("nbs/0")]
LONGEST_REPR = 120  # characters of a named tuple or a dataclass that are read at a glance
SMALLEST_TEXT = 8  # points
NARROWEST = 600  # pixels of a picture on the reading path
TEXT_SIZES = {"fontsize", "labelsize", "title_fontsize"}
TEXT_METHODS = {"set_title", "set_titles", "set_xlabel", "set_ylabel", "text", "annotate"}


def shown_as_typed(text):
    "Whether a text is the repr of a dictionary of two or more keys, or a long one of a record."
    text = text.strip()
    if re.match(r"[\[(]*\{", text) and text[-1] in "}])":
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return len(re.findall(r"[{,]\s*[^{},\[\]()]+: ", text)) >= 2
        parts = value if isinstance(value, (list, tuple)) else [value]
        return any(isinstance(part, dict) and len(part) >= 2 for part in parts)
    return bool(re.match(r"[\[(]*[A-Z]\w*\(\w+=", text)) and len(text) > LONGEST_REPR


def typed_cells(table):
    "Whether cells of a table in HTML show dictionaries as typed."
    return len(re.findall(r"<td>\[?\{(&#x27;|')", table))


def plain_outputs(cell):
    "The texts that a cell shows without another form: each printed line, and a value's repr."
    for output in cell["outputs"]:
        data = output.get("data", {})
        if set(data) == {"text/plain"}:
            yield "".join(data["text/plain"])
        elif output["output_type"] == "stream":
            yield from "".join(output["text"]).splitlines()


def test_a_dictionary_shown_as_typed_is_recognised():
    assert shown_as_typed("{'a': 1, 'b': 2}")
    assert shown_as_typed("[{'a': 1, 'b': 2}]")
    assert shown_as_typed("({'a': 1,\n  'b': 2}, 3)")
    assert shown_as_typed("{'a': tensor([1.]), 'b': nan}")
    assert shown_as_typed("Run(name='" + "x" * 130 + "')")
    assert not shown_as_typed("{'a': 1}")
    assert not shown_as_typed("Run(name='x')")
    assert not shown_as_typed("{'low': [0, 1]} is not a distribution. Fix: low = [low, high]")
    assert not shown_as_typed("[1, 2]")


REBUILT = ("12_page",)  # the notebook of pages, whose outputs come with the pages


@for_each([path for path in [*LIBRARY, CLASS] if path.stem not in REBUILT])
def test_results_are_tables(path):
    typed = []
    for cell in cells(path, "code"):
        if any(shown_as_typed(text) for text in plain_outputs(cell) if text.strip()):
            typed.append(cell["id"])
        for output in cell["outputs"]:
            if typed_cells("".join(output.get("data", {}).get("text/html", ""))):
                typed.append(cell["id"])
    assert not typed


@for_each([*LIBRARY, CLASS])
def test_no_random_name_is_in_a_table(path):
    "A Styler names its cells by a random number, which would change with every execution."
    for cell in cells(path, "code"):
        for output in cell["outputs"]:
            table = "".join(output.get("data", {}).get("text/html", ""))
            assert not re.search(r'id="T_[0-9a-f]{5}', table), cell["id"]


def small_text(cell):
    "The sizes of text below `SMALLEST_TEXT` that the code of a cell asks for."
    found = []
    for call in ast.walk(python(cell)):
        if not isinstance(call, ast.Call):
            continue
        method = getattr(call.func, "attr", "")
        sizes = TEXT_SIZES | ({"size"} if method in TEXT_METHODS else set())
        for keyword in call.keywords:
            if keyword.arg in sizes and isinstance(keyword.value, ast.Constant):
                size = keyword.value.value
                if isinstance(size, (int, float)) and size < SMALLEST_TEXT:
                    found.append(f"{cell['id']}: {keyword.arg}={size}")
    return [] if cell["id"].startswith("check-") else found


def test_small_text_is_found():
    source = 'axis.legend(fontsize=7)\ngrid.set_titles("{col_name}", size=6)\naxis.plot(x, size=3)'
    assert len(small_text({"id": "a", "source": source})) == 2
    assert small_text({"id": "a", "source": "axis.legend(fontsize=8)"}) == []


@for_each([*LIBRARY, CLASS])
def test_no_text_in_a_picture_is_small(path):
    assert not [found for cell in cells(path, "code") for found in small_text(cell)]


def widths(path):
    "(cell id, pixels) for each picture that a notebook shows."
    for cell in cells(path, "code"):
        for output in cell["outputs"]:
            picture = "".join(output.get("data", {}).get("image/png", ""))
            if picture:
                width, _ = struct.unpack(">II", base64.b64decode(picture)[16:24])
                yield cell["id"], width


@for_each([*PATH, CLASS])
def test_pictures_of_the_reading_path_are_wide(path):
    narrow = [f"{cell}: {width}" for cell, width in widths(path) if width < NARROWEST]
    assert not narrow


def test_the_pictures_of_the_path_are_looked_at():
    assert len(PATH) >= 15
    assert sum(len(list(widths(path))) for path in PATH) >= 30


# as_table


class Layer(NamedTuple):
    name: str
    width: int


@dataclasses.dataclass
class Size:
    width: int
    height: int


def test_a_dictionary_of_values_is_a_column():
    table = as_table({"loss": 0.5, "images": 12, "found": True, "best": None})
    assert table.index.tolist() == ["loss", "images", "found", "best"]
    assert table["value"].tolist() == [0.5, 12, True, "none"]
    assert isinstance(table.loc["images", "value"], int)


def test_parts_with_names_are_columns():
    assert as_table({"a": {"x": 1, "y": 2}, "b": {"x": 3}}).to_dict("index") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": ""},
    }
    assert as_table([Layer("fc", 10)]).loc[1].tolist() == ["fc", 10]
    assert as_table(Size(2, 3))["value"].tolist() == [2, 3]
    assert as_table({"row": [1, 2.5]}, columns=["first", "second"]).loc["row"].tolist() == [1, 2.5]


@pytest.mark.parametrize(
    "value, shown",
    [
        (torch.zeros(2, 3).shape, "2, 3"),
        (np.float64(0.5), 0.5),
        (torch.tensor([1.0, 0.25]), "1, 0.25"),
        ([(0, 1), (2, 3)], "(0, 1), (2, 3)"),
        ({"kept": [1, 2], "of": 3}, "kept (1, 2), of 3"),
        ([], "none"),
    ],
)
def test_a_cell_shows_its_value(value, shown):
    assert as_table({"a": value, "b": 1}).loc["a", "value"] == shown


def test_a_text_of_a_line_is_shown_to_its_end():
    text = "x" * (LONGEST_TEXT - 1)
    assert text in as_table({"a": text, "b": 1}).to_html()


def test_what_a_dataclass_hides_is_not_shown():
    @dataclasses.dataclass
    class Model:
        name: str
        weights: list = dataclasses.field(repr=False)

    assert as_table(Model("a", [0.5] * 1000)).index.tolist() == ["name"]


def test_notebooks_of_the_path_use_it():
    used = [path for path in PATH if "as_table(" in json.dumps(read(path))]
    assert len(used) >= 12
