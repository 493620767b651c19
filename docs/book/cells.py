"""A notebook as a page of the book, with its stored outputs: links, folds, alternative texts."""

import json
import os
import re
from collections import Counter
from pathlib import Path

from names import DIRECTIVE, ROOT, cells_of, equation, label, library, module_of

from hmoe_repro.report.gallery import data_title
from hmoe_repro.report.render import PICTURES, files_of

ANCHOR = re.compile(r'<a id="([\w-]+)"></a>\n?')
LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^():\s]+)\)")
BADGE = re.compile(r"\[!\[([^\]]*)\]\([^)]*\)\]")
FENCE = re.compile(r"(^```.*?^```[ \t]*$)", re.M | re.S)
KERNEL = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}


def as_json(cells: list[dict]) -> str:
    """A notebook of these cells."""
    cells = [cell | {"id": f"c{number}"} for number, cell in enumerate(cells)]
    return json.dumps({"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5})


def link(page: str, words: str, target: str) -> str:
    """A link of a page as the book has it. The notebook that a page of evidence is made from stands
    for the executed page; where there is no such file, the words are left."""
    path, _, anchor = target.partition("#")
    if not path:  # a heading of this page: Jupyter keeps its capitals, the book does not
        return f"[{words}](#{anchor.lower()})"
    found = Path(os.path.normpath((ROOT / page).parent / path))
    if found.parent == ROOT / "nbs/paper":
        found = max(ROOT.glob(f"figures/*/{found.name}"), default=found)
    source = f"/{found.relative_to(ROOT).as_posix()}" if found.is_file() else ""
    return f"[{words}]({source}{anchor and '#' + anchor})" if source else words


def markdown(page: str, text: str) -> str:
    """Markdown of a page of the project for the book: its links, and anchors as targets."""
    if page.startswith("figures/"):
        text = text.replace("<profile>", page.split("/")[1])
    parts = FENCE.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = ANCHOR.sub(r"(\1)=\n\n", LINK.sub(lambda m: link(page, *m.groups()), parts[i]))
    return "".join(parts)


def note(kind: str, text: str) -> str:
    """A quiet line."""
    return f"\n\n:::{{div}} {kind}\n{text}\n:::\n\n"


def said(text: str) -> dict:
    """A cell of Markdown."""
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def titled(page: str, text: str, module: str) -> str:
    """The first cell, with a line behind its title and claim: the notebook, its module, how to run
    it. The title of a page of evidence names its data."""
    run, source = f"jupyter lab {page}", f"source of {{py:mod}}`{module}` · " if module else ""
    if page.startswith("figures/"):
        title, _, rest = text.partition("\n")
        text = f"# {data_title(title[2:], ROOT / page)}\n{rest}"
        run = f"hmoe figures {Path(page).stem} --profile {page.split('/')[1]}"
    line = note("runline", f"{source}run it here: `.venv/bin/{run}` ([install](/docs/install.md))")
    head = re.match(r"# [^\n]*\n(?:\n*>[^\n]*(?:\n|$))*", text)
    rest = BADGE.sub(r"[\1]", text[head.end() :])  # a link in words: the book loads no picture
    return text[: head.end()] + line + rest


def computed_by(text: str) -> str:
    """The lines under an equation that lead to the cells that compute it."""
    lines = []
    for anchor in ANCHOR.findall(text):
        found = {full: n for full, n in library().items() if anchor in n.equations}
        links = [f"[`{f.removeprefix(n.module + '.')}`](#{n.cell})" for f, n in found.items()]
        if links:
            lines.append(f"{equation(anchor)} is computed by {', '.join(links)}")
    return note("exported", "; ".join(lines)) if lines else ""


def exported(page: str, cell: dict) -> list[dict]:
    """The line above a cell of the library: its module, its names and their equations."""
    place = label(page, cell["id"])
    names = {full: n for full, n in library().items() if n.cell == place}
    if not names:
        return []
    (module,) = {n.module for n in names.values()}
    tops = [full.removeprefix(f"{module}.") for full in names]
    words = ", ".join(f"`{name}`" for name in tops if "." not in name)
    equations = dict.fromkeys(e for n in names.values() for e in n.equations)
    links = ", ".join(f"[{equation(anchor)}](#{anchor})" for anchor in equations)
    text = f"exported to {{py:mod}}`{module}`: {words}" + (f" · computes {links}" if links else "")
    return [said(f"({place})={note('exported', text)}")]


def is_picture(cell: dict) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def is_silent_check(cell: dict) -> bool:
    """Does a cell assert something and show nothing? The book folds it, so that the eye goes from
    the text to the next value or picture."""
    return not cell.get("outputs") and bool(re.search(r"^(    )?assert ", cell["source"], re.M))


def folded(cell: dict, evidence: bool) -> tuple[str, str]:
    """(tag of myst-nb, what it hides) of code that readers of this page do not come for."""
    code = re.sub(r"\([^)]*\)", "", cell["source"])
    lines = [line for line in code.splitlines() if line.strip() and line[0] != "#"]
    if all(re.match(r"(from|import) ", line) for line in lines):
        return "hide-input", "imports"
    if cell["id"].startswith("answer"):
        return "hide-cell", "answer's code and what it prints"
    if is_silent_check(cell):
        return "hide-input", "check"
    drawn = is_picture(cell) or cell["id"].startswith("figure-")
    return ("hide-input", "code") if drawn or evidence else ("", "")


def saved_pictures(page: str, cells: list[dict]) -> dict[str, list[str]]:
    """Cell id -> names of pictures: those of an executed page are files next to it. Each is shown
    below the cell that names it, else below the last that draws; the first one below the first."""
    folder, stem = (ROOT / page).parent, Path(page).stem
    code = [c for c in cells if c["cell_type"] == "code"]
    drawing = [c for c in code if re.search(r"save_figure|page\.(figure|contrasts)", c["source"])]
    placed = {}
    for name in (f for f in files_of(folder)[stem] if f.endswith(".png")):
        part = name.removesuffix(".png").removeprefix(stem).strip("_")
        exact = [c for c in drawing if part and f'"{part}"' in c["source"]]
        cell = (exact or drawing or code)[-1 if part else 0]
        placed.setdefault(cell["id"], []).append(name)
    return placed


def code_cells(page: str, cell: dict, alt: str, evidence: bool) -> list[dict]:
    """A cell of code as the cells of the book; none for what is hidden in the notebook."""
    source = DIRECTIVE.sub("", cell["source"]).strip("\n")
    hidden = re.search(r"^#\| hide", cell["source"], re.M) or cell["id"] == "injected-parameters"
    if not source or hidden:
        return []
    tag, what = folded(cell | {"source": source}, evidence)
    if page.startswith("docs/"):  # the notebook of the class: its code is to be changed
        tag = ""
    prompts = {"code_prompt_show": f"Show the {what}", "code_prompt_hide": f"Hide the {what}"}
    meta = {"tags": [tag] if tag else [], "mystnb": {"image": {"alt": alt}} | prompts}
    for output in cell["outputs"]:
        if text := output.get("data", {}).get("text/markdown"):
            output["data"]["text/markdown"] = markdown(page, "".join(text))
    made = cell | {"source": source, "metadata": meta, "execution_count": None}
    return [*([] if what == "imports" else exported(page, cell)), made]


def figure_first(cells: list[dict]) -> list[dict]:
    """The cells of a page with the section that is named like a figure of the paper, '## Figure 3',
    directly below the first cell."""
    section, place = "", []
    for cell in cells:
        if cell["cell_type"] == "markdown":
            section = (re.findall(r"^## .*$", cell["source"], re.M) or [section])[0]
        place.append(cell is not cells[0] and not re.fullmatch(r"## Figure \d+", section))
    return [
        cell for late in (False, True) for cell, is_late in zip(cells, place) if is_late == late
    ]


def notebook(page: str) -> str:
    """The page of the book that is made from a notebook, as its JSON. A picture's alternative text
    is the title of the page and the heading above the picture."""
    # The book shows each picture where it is drawn, not a second time under the answer.
    cells = [cell for cell in cells_of(page) if cell["id"] != PICTURES]
    made, heading, seen = [], "", Counter()
    module, evidence = module_of(cells), page.startswith("figures/")
    saved = saved_pictures(page, cells) if evidence else {}
    for cell in figure_first(cells):
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.*)$", cell["source"], re.M) or [heading])[-1]
            text = markdown(page, cell["source"]) + computed_by(cell["source"])
            made.append(said(text if made else titled(page, text, module)))
            continue
        pictures = saved.get(cell["id"], [])
        alt = re.sub(r"[*`$\\{}\[\]]", "", heading)
        seen[alt] += len(pictures) or is_picture(cell)
        alt += f" ({seen[alt]})" if seen[alt] > 1 else ""
        new = code_cells(page, cell, alt, evidence or not module)
        folds = all("hide-input" in c["metadata"].get("tags", ()) for c in [made[-1], *new])
        if len(new) == 1 and folds and not made[-1]["outputs"]:  # two folds in a row are one
            new[0]["source"] = f"{made.pop()['source']}\n\n{new[0]['source']}"
        made += new
        made += [said(f"![{alt} {p.removesuffix('.png')}]({p})") for p in pictures]
    return as_json(made)
