"""Slides for a class, made from the cells of the notebooks that carry tags, as one notebook that
sphinx-revealjs shows.

The plan in docs/class_plan.md names the parts, their notebooks and the questions to the class. In a
notebook a cell is tagged

- `slide`: it begins a slide; `slide-more`: it stands on the slide that has begun;
- `slide-ask`: with it begins the slide of the part's next question. Where the cell is tagged
  `slide` as well, it is shown a second time, and the slide of the question holds back its text and
  what it displays;
- `slide-whole`: its text is not shortened; `slide-output`: its code is left out.

A section of a Markdown page is tagged by a comment above its heading, such as `<!-- slide -->`.

What the speaker says stands in docs/class_notes.md, under the titles of the slides in their order.
"""

import ast
import os
import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

from cells import ANCHOR, as_json, is_picture, markdown, note, said, saved_pictures
from names import DIRECTIVE, ROOT, cells_of

PLAN = "docs/class_plan.md"
NOTES = "docs/class_notes.md"
TITLE = "Domain generalization with experts"
CLOSING = "## To take home\n"  # the section of the plan that is the last slide
LINK = re.compile(r"\[((?:[^\[\]`]|`[^`]*`)*)\]\([^()\s]+\)")


Part = namedtuple("Part", "minutes pages happens questions")  # a row of the plan
Note = namedtuple("Note", "number title minutes text")  # of the speaker, for a slide


@dataclass
class Slide:
    """The content of a slide."""

    title: str
    cells: list[dict]
    page: str = ""  # the notebook that it is made from
    question: str = ""  # to the class
    opens: str = ""  # minutes of the part and what happens in it, on its first slide


def plan() -> list[Part]:
    """The parts of the class. The questions of one are divided by <br>."""
    parts = []
    for row in (ROOT / PLAN).read_text(encoding="utf-8").splitlines():
        fields = [field.strip() for field in row.strip("|").split("|")]
        pages = re.findall(r"\]\(([^)]+\.(?:ipynb|md))\)", row) if row[:1] == "|" else []
        if pages:
            questions = [question.strip() for question in fields[3].split("<br>")]
            pages = [os.path.normpath(f"docs/{page}") for page in dict.fromkeys(pages)]
            parts.append(Part(fields[0], pages, fields[2], questions))
    return parts


def speaker_notes() -> list[Note]:
    """The notes of the speaker, a slide each."""
    text = re.sub(r"^## .*\n", "", (ROOT / NOTES).read_text(encoding="utf-8"), flags=re.M)
    found = re.split(r"^### (\d+)\. (.+) \((\d+) min\)\n", text, flags=re.M)[1:]
    return [Note(int(n), title, int(m), s.strip()) for n, title, m, s in zip(*[iter(found)] * 4)]


def shortened(text: str, whole: bool) -> str:
    """Markdown for a slide: its first paragraph, what ends a sentence begun by that, and all
    formulas, lists, quotations, tables and code. Links are words; the heading is the slide's."""
    text = LINK.sub(r"\1", ANCHOR.sub("", text)).strip()
    text = re.sub(r"^#+ .*\n?", "", text, flags=re.M).strip()
    text = text.replace("Answers are below,", "Answers are in the notebook,")
    kept = re.compile(r">|\$\$|\d\.|```|- |\||[a-z]")
    blocks = enumerate(re.split(r"\n\s*\n", text))
    return "\n\n".join(b for i, b in blocks if whole or not i or kept.match(b))


def with_short_docstrings(source: str) -> str:
    """Code for a slide: of a docstring its first paragraph, without arguments and errors. Code with
    a magic stays as it is."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    lines = source.splitlines()
    documented = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    for node in sorted(documented, key=lambda node: -node.lineno):  # from below: lines keep numbers
        text = ast.get_docstring(node, clean=False) or ""
        first, blank, _ = text.partition("\n\n")
        if blank:
            docstring = node.body[0]
            shown = " " * docstring.col_offset + f'"""{first}"""'
            lines[docstring.lineno - 1 : docstring.end_lineno] = shown.splitlines()
    return "\n".join(lines)


def prepared(page: str, cell: dict, tags: list[str], pictures: list[str]) -> dict:
    """A cell as it stands on a slide: code only where it is the point."""
    if cell["cell_type"] == "markdown":
        return said(markdown(page, shortened(cell["source"], "slide-whole" in tags)))
    if pictures:
        folder = Path(page).parent.as_posix()
        return said("\n\n".join(f"![Picture of {name}](/{folder}/{name})" for name in pictures))
    tables = any("text/markdown" in output.get("data", {}) for output in cell["outputs"])
    hidden = tables or "slide-output" in tags or is_picture(cell)
    source = with_short_docstrings(DIRECTIVE.sub("", cell["source"]).strip("\n"))
    meta = {"tags": ["remove-input"] if hidden else []}
    meta |= {"mystnb": {"image": {"alt": f"Picture of {page}"}}}
    return cell | {"source": source, "metadata": meta, "execution_count": None}


def slides_of(page: str, questions: list[str]) -> list[Slide]:
    """The slides of a notebook. The questions that it asks are taken out of `questions`. The tags
    of an executed page are in the notebook that it was made from."""
    cells, executed = cells_of(page), page.startswith("figures/")
    tagged = cells_of(f"nbs/paper/{Path(page).name}") if executed else cells
    tags = {cell["id"]: cell["metadata"].get("tags", []) for cell in tagged}
    pictures = saved_pictures(page, cells) if executed else {}
    slides, heading = [], ""
    for cell in cells:
        own = re.findall(r"^#+ (.*)$", cell["source"], re.M) if cell["cell_type"] != "code" else []
        title, heading = (own or [heading])[0], (own or [heading])[-1]
        mine = tags.get(cell["id"], [])
        if not {"slide", "slide-more", "slide-ask"} & {*mine}:
            continue
        made = prepared(page, cell, mine, pictures.get(cell["id"], []))
        if "slide-ask" in mine:
            shown = [made]
            if "slide" in mine:  # held back but for code
                shown = [made | {"outputs": []}] if made["metadata"].get("tags") == [] else []
            slides.append(Slide(title if shown else "Question", shown, page, questions.pop(0)))
        if "slide" in mine:
            slides.append(Slide(title, [made], page))
        if "slide-more" in mine:
            if own and slides[-1].cells[0]["cell_type"] == "code":  # below another topic's heading
                slides[-1].title = title
            slides[-1].cells.append(made)
    return slides


def slides_of_class() -> list[Slide]:
    """All slides but the title. `ValueError` for a question that no cell asks."""
    made = []
    for part in plan():
        left, begins = list(part.questions), len(made)
        for page in part.pages:
            made += slides_of(page, left)
        if left:
            raise ValueError(f"{part.pages[-1]} has no cell tagged slide-ask for: {left[0]}")
        made[begins].opens = f"Minute {part.minutes}: {part.happens}"
    last = (ROOT / PLAN).read_text(encoding="utf-8").partition(CLOSING)[2].partition("\n## ")[0]
    return [*made, Slide(CLOSING.strip("# \n"), [said(last.strip())])]


def deck() -> str:
    """The slides as one notebook, as its JSON. `ValueError` where a slide's notes are missing."""
    hint = "A class of 90 minutes. Arrow keys move; Esc shows all slides; s opens the speaker view."
    made, notes = slides_of_class(), speaker_notes()
    if [entry.title for entry in notes] != [TITLE, *(slide.title for slide in made)]:
        raise ValueError(f"The headings of {NOTES} are not the titles of the slides in their order")
    words = [LINK.sub(r"\1", entry.text) for entry in notes]
    asides = [f"\n\n```{{revealjs-notes}}\n{text}\n```\n" for text in words]
    rows = [f"| {part.minutes} | {part.happens} |" for part in plan()]
    table = "\n".join(["| minute | what happens |", "|---|---|", *rows])
    cells = [said(f"# {TITLE}\n\n{hint}\n\n{table}{asides[0]}")]
    for slide, aside in zip(made, asides[1:], strict=True):
        name = slide.page.rpartition(".")[0]
        opens = note("opens", slide.opens) if slide.opens else ""
        asked = note("question", f"To the class: {slide.question}") if slide.question else ""
        source = note("source", f'<a href="../{name}.html">{name}</a>') if name else ""
        cells += [said(f"## {slide.title}{opens}"), *slide.cells, said(asked + source + aside)]
    return as_json(cells)
