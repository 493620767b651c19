"""Every page shows its pictures right under its answer, however it is made. Pictures are wide, have
few colours, and no letter too small to read."""

import dataclasses
import json
import re

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebooks import page_functions
from PIL import Image
from test_claims import on_benchmarks

from hmoe_repro.analysis.claims import VERDICTS
from hmoe_repro.analysis.plotting import MIN_POINTS, MIN_WIDTH, save_figure, small_texts
from hmoe_repro.core.files import repo_root
from hmoe_repro.core.style import use_style
from hmoe_repro.report.gallery import facts_of
from hmoe_repro.report.page import Page, add_finding
from hmoe_repro.report.render import PICTURES, files_of, render, show_pictures

PROFILES = sorted(folder.name for folder in (repo_root() / "figures").iterdir())
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
PARAMETERS = 'profile: str = "quick"\nstore: str = ""\noutput: str = ""'
DRAW = """\
from hmoe_repro.report.provenance import output_folder
from IPython.display import Markdown, display
folder = output_folder(output, profile)
for name in ("page_more.png", "page.png"):
    (folder / name).write_bytes(b"a picture")
(folder / "page_verdict.md").write_text("- Yes: it works.\\n")"""
SHOW = """\
display(Markdown("**Answer.** Yes: it works."))
links = "![It works](page.png)\\n\\n![In detail](page_more.png)"
display(Markdown(links), metadata={"page-pictures": True})"""


def pages(profile):
    "(path, notebook, its files) of the committed pages of a profile."
    folder = repo_root() / "figures" / profile
    for name, files in files_of(folder).items():
        path = folder / f"{name}.ipynb"
        yield path, nbformat.read(path, 4), files


def linked(cell):
    "(alternative text, file) of each picture that a Markdown cell shows."
    return re.findall(r"!\[(.*?)\]\((.*?)\)", cell.source)


def markdown_of(cell):
    "Everything that the outputs of a cell show as Markdown."
    return "\n".join(o.get("data", {}).get("text/markdown", "") for o in cell.get("outputs", []))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_committed_page_shows_each_of_its_pictures_once_right_under_its_answer(profile):
    for path, page, files in pages(profile):
        pictures = [name for name in files if name.endswith(".png")]
        places = [i for i, cell in enumerate(page.cells) if cell.id == PICTURES]
        assert len(places) == bool(pictures), path
        shown = [
            pair for cell in page.cells if cell.cell_type == "markdown" for pair in linked(cell)
        ]
        assert sorted(file for _, file in shown) == pictures, path
        assert all(len(alt) >= 10 for alt, _ in shown), path
        if pictures:
            answer = f"**Answer.** {facts_of(path)['answer']}"
            above = [markdown_of(cell) for cell in page.cells[: places[0]]]
            assert answer in above[-1], path
            assert not any(answer in text for text in above[:-1]), path


@pytest.mark.parametrize("profile", PROFILES)
def test_committed_pages_are_what_rendering_makes_of_their_files(profile):
    for path, page, files in pages(profile):
        links = "".join(cell.source for cell in page.cells if cell.id == PICTURES)
        names = [name for name in files if name.endswith(".png")]
        show_pictures(page, path.stem, names, links)
        assert nbformat.writes(page) + "\n" == path.read_text(encoding="utf-8"), path


def test_no_file_of_a_page_has_a_name_that_a_link_must_encode():
    names = [path.name for path in (repo_root() / "figures").glob("*/*")]
    assert len(names) > 200
    assert not [n for n in names if not re.fullmatch(r"[\w.-]+", n)]


def executed_page(texts, *answers):
    "A page as papermill leaves it, with an output for each of the `answers`."
    cells = [new_markdown_cell("# A `page` of $x$\n\n> Claim.", id="title")]
    for number, answer in enumerate(answers):
        output = new_output("display_data", {"text/markdown": answer})
        cells.append(new_code_cell("show()", id=f"code-{number}", outputs=[output]))
    return new_notebook(cells=cells, metadata={"hmoe_texts": texts})


@pytest.mark.parametrize(
    "answer, place",
    [
        ("**Answer.** Yes, it does.", 3),
        ("Yes, it does.", 2),  # no answer: below the first cell that shows something
    ],
)
def test_the_pictures_stand_below_the_cell_that_displays_the_answer(answer, place):
    page = executed_page({}, "First.", answer, "- Yes, it does.")
    show_pictures(page, "page", ["page_by_seed.png", "page.png"])
    assert page.cells[place].id == PICTURES
    assert linked(page.cells[place]) == [
        ("A page of x", "page.png"),
        ("A page of x: by seed", "page_by_seed.png"),
    ]


def test_a_page_without_pictures_gets_no_cell_and_loses_an_old_one():
    page = executed_page({}, "First.")
    show_pictures(page, "page", ["page.png"])
    show_pictures(page, "page", [])
    assert [cell.id for cell in page.cells] == ["title", "code-0"]


def test_rendering_makes_a_cell_of_the_links(tmp_path):
    body = [new_markdown_cell("# A page\n\n> Claim.", id="title")]
    body += [new_code_cell(PARAMETERS, id="parameters", metadata={"tags": ["parameters"]})]
    body += [new_code_cell(DRAW, id="draw"), new_code_cell(SHOW, id="show")]
    sources = tmp_path / "nbs"
    sources.mkdir()
    notebook = new_notebook(cells=body, metadata={"kernelspec": KERNEL})
    nbformat.write(notebook, sources / "page.ipynb")
    place = {"output": tmp_path / "figures", "notebooks": sources}
    page = nbformat.read(render("page", "quick", **place), 4)
    assert [cell.id for cell in page.cells[-2:]] == ["show", PICTURES]
    assert linked(page.cells[-1]) == [("It works", "page.png"), ("In detail", "page_more.png")]
    assert markdown_of(page.cells[-2]) == "**Answer.** Yes: it works."  # the mark is gone
    page = nbformat.read(render("page", "quick", formats=["csv"], **place), 4)
    assert PICTURES not in [cell.id for cell in page.cells]


class Handle:
    "A place in the output of a kernel, whose content can be replaced."

    def __init__(self, text, metadata=None):
        self.update(text, metadata)

    def update(self, text, metadata=None):
        self.text, self.metadata = text.data, metadata or {}


class Shown:
    "What a kernel displays."

    def __init__(self):
        self.handles = []

    def display(self, text, metadata=None, display_id=False):
        self.handles.append(Handle(text, metadata))
        return self.handles[-1]

    def links(self):
        return [handle.text for handle in self.handles if PICTURES in handle.metadata]


def test_a_page_made_by_hand_links_its_pictures_in_the_folder_that_it_is_given(
    tmp_path, monkeypatch
):
    shown = Shown()
    monkeypatch.setattr("IPython.display.display", shown.display)
    page = Page("digits_table", "quick", output=str(tmp_path))
    assert [PICTURES in handle.metadata for handle in shown.handles[:2]] == [False, True]
    (tmp_path / "quick" / "digits_table1.png").write_bytes(b"of another page")
    page.figure(plt.figure(), "by seed", "Seeds differ")
    page.figure(plt.figure())
    (links,) = shown.links()
    assert page.finding
    assert links.split("\n\n") == [
        f"![{page.finding}](digits_table.png)",
        "![Seeds differ](digits_table_by_seed.png)",
    ]
    assert (tmp_path / "quick" / "digits_table_by_seed.png").exists()
    plt.close("all")


def test_a_page_in_a_temporary_folder_links_nothing(monkeypatch):
    shown = Shown()
    monkeypatch.setattr("IPython.display.display", shown.display)
    page = Page("digits_table", "quick")
    page.figure(plt.figure())
    assert not shown.links()
    plt.close("all")


# Files


@pytest.mark.parametrize("inches", [2.0, 4.2, 9.0])
def test_a_picture_is_wide_enough_and_has_few_colours(tmp_path, inches):
    "Also one with thousands of colours, of which white, black and a rare colour stay."
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(inches, 1.5))
    ramp = np.linspace(0, 1, 64)
    photo = np.stack([*np.meshgrid(ramp, ramp), np.full((64, 64), 0.5)], axis=-1)
    left.imshow(photo)
    right.plot([0, 1], [0, 1], color="#D55E00", lw=0.8)
    save_figure(figure, tmp_path, "picture")
    plt.close(figure)
    with Image.open(tmp_path / "picture.png") as picture:
        assert MIN_WIDTH <= picture.width < 1.4 * max(MIN_WIDTH, 150 * inches)
        colours = np.array([colour for _, colour in picture.convert("RGB").getcolors(256)])
        corner = picture.convert("RGB").getpixel((1, 1))
    assert corner == (255, 255, 255)
    for wanted in ((255, 255, 255), (0, 0, 0), (213, 94, 0)):
        assert np.abs(colours - wanted).max(axis=1).min() <= 12, wanted


def test_the_palette_of_a_picture_costs_less_than_its_pixels(tmp_path):
    "At 1,200 pixels it weighs less than the same drawing had before, at 150 dpi in all colours."
    use_style()
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot(np.sin(np.arange(200) / 9), label="a curve")
    axis.legend()
    save_figure(figure, tmp_path, "few")
    figure.savefig(tmp_path / "all.png", dpi=150)
    plt.close(figure)
    sizes = [(tmp_path / name).stat().st_size for name in ("few.png", "all.png")]
    assert sizes[0] < sizes[1]


# Letters


SIZES = re.compile(
    r"(?:font|label|title|title_font)_?size\"?[=:]\s*([\d.]+)|set_fontsize\(([\d.]+)\)"
)
TEXT_SIZES = re.compile(r"(?:annotate|text|titles|title|label)\(.*\bsize=([\d.]+)")


def written_sizes(source):
    "The sizes of letters, in points, that a cell names."
    found = [a or b for a, b in SIZES.findall(source)]
    return [float(size) for size in found + TEXT_SIZES.findall(source)]


def test_written_sizes_are_found():
    assert written_sizes("axis.legend(fontsize=5); text.set_fontsize(7)") == [5, 7]
    assert written_sizes('annot_kws={"fontsize": 7.5}, **x') == [7.5]
    assert written_sizes('axis.annotate(word, (x, y), size=7, va="center")') == [7]
    assert written_sizes("ax.tick_params(labelsize=6), sns.swarmplot(x, size=3)") == [6]


def test_no_picture_of_a_page_asks_for_letters_below_8_points():
    small = []
    for folder in ("paper", "07_analysis", "08_report"):
        for path in sorted((repo_root() / "nbs" / folder).glob("*.ipynb")):
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                source = "".join(cell["source"])
                sizes = written_sizes(source) if cell["cell_type"] == "code" else []
                small += [(path.stem, cell["id"], size) for size in sizes if size < MIN_POINTS]
    assert not small


def test_the_style_has_no_letters_below_8_points():
    use_style()
    figure, axis = plt.subplots()
    axis.plot([0, 1], label="a curve")
    axis.set(xlabel="x", ylabel="y", title="title")
    axis.legend(title="legend")
    figure.suptitle("a finding")
    assert not small_texts(figure)
    axis.text(0.5, 0.5, "tiny", fontsize=7.9)
    axis.text(0.5, 0.5, "hidden", fontsize=5, visible=False)
    assert small_texts(figure) == ["tiny"]
    plt.close(figure)


# Pictures of pages


def test_the_picture_of_claims_has_a_square_for_each_and_rows_for_those_in_points():
    page = page_functions("claims")
    use_style()
    larger = on_benchmarks((3, 1), (2, 1))
    results = [dataclasses.replace(larger, verdict=verdict) for verdict in VERDICTS]
    ours = dataclasses.replace(larger, claim=dataclasses.replace(larger.claim, ours=True))
    score = dataclasses.replace(larger, evidence=dataclasses.replace(larger.evidence, unit="NMI"))
    figure = page.claims_picture([*results, ours, score])
    squares, forest = figure.axes
    letters = [text.get_text() for text in squares.texts if len(text.get_text()) == 1]
    assert letters == ["S", "S", "C", "M", "?", "P", "N", "S"]
    titles = [text.get_text() for text in squares.texts if len(text.get_text()) > 1]
    assert titles == ["HMOE: 7 claims", "this project: 1 claim"]
    colours = {patch.get_facecolor() for patch in squares.patches}
    assert len(squares.patches) == 8
    assert len(colours) == len(VERDICTS)
    assert len(forest.get_yticks()) == 7  # all but the score
    legend = [text.get_text() for text in figure.legends[0].texts]
    assert legend[0] == "S  supported: 3"
    assert len(legend) == len(VERDICTS)
    assert not small_texts(figure)
    width, height = figure.get_size_inches() * 150
    assert width <= 1400
    assert height <= 1000
    plt.close(figure)
    assert page.claims_picture([score]) is None


def test_a_legend_stays_above_the_caption_when_a_picture_is_saved(tmp_path):
    figure, axis = plt.subplots(figsize=(4, 2), layout="constrained")
    axis.plot([0, 1], label="a line")
    legend = figure.legend(loc="outside lower center")
    boxes = []
    draw = legend.draw

    def recording(renderer):
        boxes.append((legend.get_window_extent(renderer), axis.get_tightbbox(renderer)))
        if len(figure.texts):
            boxes[-1] += (figure.texts[-1].get_window_extent(renderer),)
        draw(renderer)

    legend.draw = recording
    add_finding(figure, "A finding", "a caption")
    save_figure(figure, tmp_path, "page")
    of_legend, of_axis, of_caption = boxes[-1]
    assert of_caption.y1 < of_legend.y0
    assert of_legend.y1 < of_axis.y0
    plt.close(figure)


def noise_tables():
    "Accuracy lost with noise of two rings by three networks, and that minus the first one's."
    rows = []
    for model, lost in (("ERM, cnn", 4.0), ("GMoE, vit", 2.0), ("ERM-ViT, vit", 3.0)):
        for ring in (0.0, 0.5):
            place = {"part": "validation", "ring": ring, "ring_end": ring + 0.5}
            rows.append(place | {"model": model, "mean": lost, "difference": lost - 4, "low": -3})
    drops = pd.DataFrame(rows).assign(high=1.0, significant=False)
    return drops, drops[drops.model != "ERM, cnn"]


def test_noise_has_a_panel_for_all_networks_and_one_for_each_minus_the_baseline():
    page = page_functions("gmoe_fourier")
    use_style()
    palette = {"ERM, cnn": "#0072B2", "GMoE, vit": "#E69F00", "ERM-ViT, vit": "#009E73"}
    figure, finding = page.draw_noise(*noise_tables(), "validation", "ERM, cnn", palette)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["all networks", "GMoE\nminus ERM", "ERM-ViT\nminus ERM"]
    assert [line.get_ydata()[0] for line in figure.axes[0].lines[:3]] == [4, 2, 3]
    assert figure.axes[1].lines[0].get_ydata()[0] == -2
    assert figure.axes[1].get_ylim() == figure.axes[2].get_ylim()
    assert [text.get_text() for text in figure.legends[0].texts] == list(palette)
    assert finding == "Noise costs GMoE 2.0 points of accuracy on average, and ERM 4.0"
    assert not small_texts(figure)
    plt.close(figure)


def test_a_curve_of_the_toy_ends_where_it_would_leave_the_axes():
    page = page_functions("hmoe_fig3")
    inside = page.within(np.array([-3.0, -2.0, 0.0, 2.0, 50.0]), (-2, 2))
    np.testing.assert_array_equal(inside, [np.nan, -2, 0, 2, np.nan])
