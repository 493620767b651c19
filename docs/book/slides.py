"""Slides for a class, made from the cells of the notebooks that carry tags.

The plan in docs/class_plan.md names the parts, their notebooks and the questions to the class. In a
notebook a cell is tagged

- `slide`: it begins a slide; `slide-more`: it stands on the slide that has begun;
- `slide-ask`: with it begins the slide of the part's next question. Where the cell is tagged
  `slide` as well, it is shown a second time, and the slide of the question holds back its text and
  what it displays;
- `slide-whole`: its text is not shortened; `slide-output`: its code is left out;
- `slide-items-1-last`: of its list only these items are kept.
"""

import base64
import functools
import itertools
import re
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path

import book_cells
import nbformat
from book_text import ANCHOR, LINK, Book, plain, profiled
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from nbconvert import HTMLExporter

PLAN = "docs/class_plan.md"
HEADING = re.compile(r"^#+ (.*)$", re.M)
CLOSING = "## To take home"  # the section of the plan that is the last slide
NOT_HERE = "Answers are below, and they run."  # said of the notebook


@dataclass
class Part:
    """A row of the plan."""

    minutes: str
    pages: list[str]  # notebooks
    happens: str
    questions: list[str]


@dataclass
class Slide:
    """The content of a slide."""

    title: str
    cells: list[dict]
    page: str = ""  # the notebook that it is made from
    question: str = ""  # to the class
    opens: str = ""  # minutes of the part and what happens in it, on its first slide


def plan(root: Path) -> list[Part]:
    """The parts of the class. The questions of one are divided by <br>."""
    parts = []
    for row in (root / PLAN).read_text(encoding="utf-8").splitlines():
        fields = [f.strip() for f in row.strip("|").split("|")]
        pages = re.findall(r"\]\(\.\./([^)]+\.ipynb)\)", row) if row[:1] == "|" else []
        if pages and len(fields) == 4:
            questions = [q.strip() for q in fields[3].split("<br>")]
            parts.append(Part(fields[0], list(dict.fromkeys(pages)), fields[2], questions))
    return parts


def planned(root: Path) -> list[str]:
    """The notebooks of the plan's table, each once, in its order."""
    return list(dict.fromkeys(page for part in plan(root) for page in part.pages))


def tags_of(root: Path, page: str) -> dict[str, list[str]]:
    """Cell id -> tags. Those of an executed page are in the notebook that it was made from."""
    source = root / page
    if page.startswith("figures/"):
        source = root / "nbs/paper" / Path(page).name
    return {c["id"]: c["metadata"].get("tags", []) for c in book_cells.read(source)}


def beginning(blocks: list[str]) -> list[str]:
    """What a slide keeps of a text: its first paragraph and its first table, all formulas, with
    the paragraphs that end a sentence begun by one, all lists, quotations and blocks of code."""
    kept, first = [], {"paragraph": True, "table": True}
    for before, block in zip(["", *blocks], blocks):
        kind = "table" if block[0] == "|" else "paragraph"
        always = re.match(r"#|>|\$\$|\d\.|```|- ", block)
        goes_on = kept[-1:] == [before] and re.search(r"\$\$$", before) and block[0].islower()
        if always or goes_on or first[kind]:
            kept.append(block)
            first[kind] = first[kind] and bool(always or goes_on)
    return kept


def items(text: str, tags: list[str]) -> str:
    """Markdown with those items of its list that a tag such as `slide-items-1-last` names."""
    chosen = [tag.split("-")[2:] for tag in tags if tag.startswith("slide-items-")]
    item = re.compile(r"^(?:- |\d+\. ).*\n?(?: +.*\n?)*", re.M)
    number, total = itertools.count(1), len(item.findall(text))

    def kept(match):
        n = next(number)
        names = {str(n), "last"} if n == total else {str(n)}
        return match[0] if not chosen or names & set(chosen[0]) else ""

    return item.sub(kept, text).rstrip()


def shortened(text: str, tags: list[str]) -> str:
    """Markdown for a slide. Links are words; the heading is the slide's."""
    text = LINK.sub(lambda m: m[1], ANCHOR.sub("", text)).replace(NOT_HERE, "").strip()
    blocks = [re.sub(r"\A#+ .*\n?", "", b) for b in re.split(r"\n\s*\n", text)]
    blocks = [b for b in blocks if b.strip()]
    kept = blocks if "slide-whole" in tags else beginning(blocks)
    return items("\n\n".join(kept), tags)


def prepared(cell: dict, tags: list[str]) -> dict:
    """A cell as it stands on a slide: code only where it is the point."""
    cell = {k: v for k, v in cell.items() if k != "id"} | {"metadata": {}}
    if cell["cell_type"] == "markdown":
        return cell | {"source": shortened(cell["source"], tags)}
    source = book_cells.DIRECTIVE.sub("", cell["source"]).strip("\n")
    hidden = "slide-output" in tags or book_cells.is_picture(cell)
    for data in (o["data"] for o in cell["outputs"] if "data" in o):
        data |= {kind: "".join(value) for kind, value in data.items() if isinstance(value, list)}
        if "text/markdown" in data:
            data["text/markdown"] = items(data["text/markdown"], tags)
            hidden = True
    for output in (o for o in cell["outputs"] if "text" in o):
        output["text"] = "".join(output["text"])
    made = {"execution_count": None, "metadata": {"tags": ["quiet"] if hidden else []}}
    return cell | made | {"source": "" if hidden else source}


def held_back(cell: dict) -> list[dict]:
    """What the class sees of a cell before it answers: the code, if that is the point."""
    if cell["cell_type"] == "markdown" or "quiet" in cell["metadata"]["tags"]:
        return []
    return [cell | {"outputs": []}]


def slides_of(book: Book, page: str, pictures: dict, questions: list[str]) -> list[Slide]:
    """The slides of a notebook. The questions that it asks are taken out of `questions`."""
    tags, slides, heading = tags_of(book.root, page), [], ""
    for cell in book_cells.read(book.root / page):
        cell["source"] = profiled(page, cell["source"])
        own = HEADING.findall(cell["source"]) if cell["cell_type"] == "markdown" else []
        title, heading = (own or [heading])[0], (own or [heading])[-1]
        mine = tags.get(cell["id"], [])
        if not {"slide", "slide-more", "slide-ask"} & set(mine):
            continue
        for path in pictures.get(cell["id"], []):
            image = base64.b64encode((book.root / path).read_bytes()).decode()
            data = {"output_type": "display_data", "metadata": {}, "data": {"image/png": image}}
            cell["outputs"] = [data]
        made = prepared(cell, mine)
        if "slide-ask" in mine:
            if not questions:
                raise ValueError(f"{page}: the plan has no question for the cell {cell['id']}")
            shown = held_back(made) if "slide" in mine else [made]
            slides.append(Slide(title if shown else "Question", shown, page, questions.pop(0)))
        if "slide" in mine:
            slides.append(Slide(title, [made] if made["source"] or "outputs" in made else [], page))
        if "slide-more" in mine:
            if own and all(c["cell_type"] == "code" for c in slides[-1].cells):
                slides[-1].title = title  # it began below the heading of another topic
            slides[-1].cells.append(made)
    return slides


def closing(root: Path) -> Slide:
    """The last slide: a section of the plan."""
    text = (root / PLAN).read_text(encoding="utf-8").partition(CLOSING + "\n")[2]
    text = shortened(text.partition("\n## ")[0], ["slide-whole"])
    return Slide(CLOSING.strip("# "), [{"cell_type": "markdown", "metadata": {}, "source": text}])


def slides_of_class(book: Book, pictures: dict[str, dict]) -> list[Slide]:
    """All slides but the title. `pictures`: page -> cell id -> files."""
    made = []
    for part in plan(book.root):
        left, begins = list(part.questions), len(made)
        for page in part.pages:
            made += slides_of(book, page, pictures.get(page, {}), left)
        if left:
            raise ValueError(f"{part.pages[-1]} has no cell tagged slide-ask for: {left[0]}")
        made[begins].opens = f"Minute {part.minutes}: {part.happens}"
    return [*made, closing(book.root)]


@functools.cache
def exporter() -> HTMLExporter:
    """What makes HTML of cells: nothing but the cells, without a page around them."""
    made = HTMLExporter(template_name="basic")
    made.exclude_input_prompt = made.exclude_output_prompt = True
    return made


def fullness(body: str, code: bool) -> str:
    """What the style sheet makes larger: 'picture' ('alone') with little (no) text,
    'few' words and no code, or 'none', so that only a question is there."""
    words = len(re.sub(r"<[^>]*>|\s+", " ", body).strip())
    if "<img" in body:
        return "" if words > 520 or "<table" in body else "picture" if words else "alone"
    return "none" if not words else "" if code or words > 600 else "few"


def html(slide: Slide) -> dict[str, str]:
    """A slide as the template takes it: the HTML of its cells, and a word on how full it is."""
    made = {"cells": slide.cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    body, _ = exporter().from_notebook_node(nbformat.from_dict(made))
    body = re.sub(r"<a class=\"anchor-link\".*?</a>", "", body)
    alt = escape(plain(slide.title))
    body = re.sub(r'alt="No description has been provided for this image"', f'alt="{alt}"', body)
    code = any(c["cell_type"] == "code" and c["source"] for c in slide.cells)
    made = {"body": body, "full": fullness(body, code)}
    return {**vars(slide), **made, "source": slide.page.removesuffix(".ipynb")}


def deck(book: Book, pictures: dict[str, dict]) -> str:
    """The page of slides. `pictures`: page -> cell id -> files."""
    made = [html(slide) for slide in slides_of_class(book, pictures)]
    folder = Path(__file__).resolve().parent / "templates"
    settings = {"loader": FileSystemLoader(folder), "undefined": StrictUndefined}
    template = Environment(**settings).get_template("slides.html")
    return template.render(slides=made, parts=plan(book.root))


def reveal_folder() -> Path:
    """Where the package sphinx-revealjs keeps reveal.js."""
    return Path(find_spec("sphinx_revealjs").submodule_search_locations[0], "_static", "revealjs")
