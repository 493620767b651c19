"""Slides for a class, made from the cells of the notebooks that are tagged `slide`.

The plan in docs/class_plan.md names the notebooks and their order. In a notebook a cell tagged
`slide` begins a slide, and those tagged `slide-more` after it stand on the same one.
"""

import base64
import functools
import re
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import book_cells
import nbformat
from book_text import ANCHOR, LINK, Book
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from nbconvert import HTMLExporter

PLAN = "docs/class_plan.md"


def planned(root: Path) -> list[str]:
    """The notebooks of the plan's table, each once, in its order."""
    rows = [s for s in (root / PLAN).read_text(encoding="utf-8").splitlines() if s[:1] == "|"]
    links = re.findall(r"\]\(\.\./([^)]+\.ipynb)\)", "\n".join(rows))
    return list(dict.fromkeys(links))


def tags_of(root: Path, page: str) -> dict[str, list[str]]:
    """Cell id -> tags. Those of an executed page stand in the notebook that it was made from."""
    source = root / page
    if page.startswith("figures/"):
        source = root / "nbs/paper" / Path(page).name
    return {c["id"]: c["metadata"].get("tags", []) for c in book_cells.read(source)}


def shortened(text: str) -> str:
    """Markdown for a slide: headings, the first paragraph, formulas, the first table, numbered
    lists. Links are words."""
    text = LINK.sub(lambda m: m[1], ANCHOR.sub("", text)).strip()
    kept, first = [], {"paragraph": True, "table": True}
    for block in re.split(r"\n\s*\n", text):
        kind = "table" if block[0] == "|" else "paragraph"
        always = re.match(r"#|>|\$\$|\d\.|```|- ", block)
        if always or first[kind]:
            kept.append(re.sub(r"^#+ ", "## ", block))
            first[kind] = first[kind] and bool(always)
    return "\n\n".join(kept)


def slide_cells(book: Book, page: str, pictures: dict) -> list[list[dict]]:
    """The slides of a notebook, each a list of cells."""
    tags, slides, heading = tags_of(book.root, page), [], ""
    for cell in book_cells.read(book.root / page):
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.*)$", cell["source"], re.M) or [heading])[-1]
        mine = tags.get(cell["id"], [])
        if "slide" not in mine and "slide-more" not in mine:
            continue
        if "slide" in mine or not slides:
            titled = re.search(r"^#+ ", cell["source"], re.M) and cell["cell_type"] == "markdown"
            title = {"cell_type": "markdown", "metadata": {}, "source": f"## {heading}"}
            slides.append([] if titled else [title])
        for path in pictures.get(cell["id"], []):
            image = base64.b64encode((book.root / path).read_bytes()).decode()
            data = {"output_type": "display_data", "metadata": {}, "data": {"image/png": image}}
            cell["outputs"] = [data]
        slides[-1].append(prepared(cell))
    return slides


def prepared(cell: dict) -> dict:
    """A cell as it stands on a slide: code only where it is the point."""
    cell = {k: v for k, v in cell.items() if k != "id"} | {"metadata": {}}
    if cell["cell_type"] == "markdown":
        return cell | {"source": shortened(cell["source"])}
    source = book_cells.DIRECTIVE.sub("", cell["source"]).strip("\n")
    hidden = book_cells.is_picture(cell) or any(
        "text/markdown" in o.get("data", {}) for o in cell["outputs"]
    )
    for data in (o["data"] for o in cell["outputs"] if "data" in o):
        data |= {kind: "".join(value) for kind, value in data.items() if isinstance(value, list)}
    tags = ["quiet"] if hidden else []  # the style sheet of the slides hides the code of those
    return cell | {"source": source, "execution_count": None, "metadata": {"tags": tags}}


@functools.cache
def exporter() -> HTMLExporter:
    """What makes HTML of cells: nothing but the cells, without a page around them."""
    made = HTMLExporter(template_name="basic")
    made.exclude_input_prompt = made.exclude_output_prompt = True
    return made


def html(cells: list[dict], alt: str) -> str:
    """The cells of a slide as HTML."""
    made = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    body, _ = exporter().from_notebook_node(nbformat.from_dict(made))
    body = re.sub(r"<a class=\"anchor-link\".*?</a>", "", body)
    body = re.sub(r'alt="No description has been provided for this image"', f'alt="{alt}"', body)
    return body


def questions(root: Path) -> dict[str, tuple[str, str]]:
    """Notebook -> (minutes, question) of the plan's table."""
    found = {}
    for row in (root / PLAN).read_text(encoding="utf-8").splitlines():
        fields = [f.strip() for f in row.strip("|").split("|")]
        if len(fields) == 4 and (links := re.findall(r"\]\(\.\./([^)]+\.ipynb)\)", fields[1])):
            found |= {link: (fields[0], fields[3]) for link in links[-1:]}
    return found


def deck(book: Book, pictures: dict[str, dict]) -> str:
    """The page of slides. `pictures`: page -> cell id -> files."""
    parts = []
    for page in planned(book.root):
        minutes, question = questions(book.root).get(page, ("", ""))
        slides = slide_cells(book, page, pictures.get(page, {}))
        made = []
        for cells in slides:
            titles = re.findall(r"^#+ (.*)$", cells[0]["source"], re.M)
            made.append(html(cells, unescape(titles[0] if titles else "picture")))
        if question:
            text = f"<h2>Question</h2><p class='question'>{question}</p>"
            made.append(f"{text}<p class='minutes'>{minutes} minutes</p>")
        parts.append({"page": page.removesuffix(".ipynb") + ".html", "slides": made})
    folder = Path(__file__).resolve().parent / "templates"
    settings = {"loader": FileSystemLoader(folder), "undefined": StrictUndefined}
    return Environment(**settings).get_template("slides.html").render(parts=parts)


def reveal_folder() -> Path:
    """Where the package sphinx-revealjs keeps reveal.js."""
    return Path(find_spec("sphinx_revealjs").submodule_search_locations[0], "_static", "revealjs")
