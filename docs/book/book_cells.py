"""A notebook of the project as a page of the book, with the outputs stored in it.

Nothing is executed. Directives become a line, imports and plotting are folded, pictures get an
alternative text.
"""

import base64
import copy
import json
import re
from pathlib import Path

from book_names import Name
from book_text import ANCHOR, Book, about_picture, distinct, download, markdown, plain, profiled

from hmoe_repro.report.gallery import data_title

DIRECTIVE = re.compile(r"^#\|[^\n]*\n?", re.M)


def read(path: Path) -> list[dict]:
    """The cells of a notebook, each source one string."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def imported_names(path: Path) -> set[str]:
    """The names that the cells of a notebook import from the library."""
    code = "\n".join(c["source"] for c in read(path) if c["cell_type"] == "code")
    blocks = re.findall(r"^from hmoe_repro\S* import (\([^)]*\)|.*)$", code, re.M)
    return set(re.findall(r"\w+", " ".join(blocks)))


def label(page: str, cell: str) -> str:
    """The book's name of a cell: unique, where ids are unique only in their notebook."""
    return f"{Path(page).with_suffix('').as_posix()}--{cell}".replace("/", "-").replace("_", "-")


def said(book: Book, page: str, text: str) -> dict:
    """A cell of Markdown that the book adds."""
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def equation_words(anchor: str) -> str:
    """'hmoe-eq-4' as 'eq. 4 of HMOE'."""
    paper, _, number = anchor.partition("-eq-")
    return f"eq. {number} of {dict(hmoe='HMOE', gmoe='GMoE', dmg='DMG')[paper]}"


def equation_links(anchors: list[str]) -> str:
    """Links to equations; the paper is named once: 'eq. 3 of HMOE, 4, 5'."""
    papers = [a.partition("-")[0] for a in anchors]
    words = [
        a.rpartition("-")[2] if paper == before else equation_words(a)
        for a, paper, before in zip(anchors, papers, ["", *papers])
    ]
    return ", ".join(f"[{said}](#{a})" for said, a in zip(words, anchors))


def exported_line(book: Book, page: str, cell: dict, names: list[Name]) -> str:
    """Where a cell of code is exported to, and the equations that it computes."""
    tops = [n for n in names if n.kind != "method"]
    shown = [f"{{py:obj}}`{n.full.split('.')[-1]} <{n.full}>`" for n in tops[:3]]
    line = f"exported to {{py:mod}}`{names[0].module}`: {', '.join(shown)}"
    line += " and more" if len(tops) > 3 else ""
    equations = dict.fromkeys(e for n in names for e in n.equations if e in book.anchors)
    if equations:
        line += f" · computes {equation_links(list(equations))}"
    return f"({label(page, cell['id'])})=\n:::{{div}} exported\n{line}\n:::"


def computed_by(book: Book, text: str) -> str:
    """The line under an equation that leads to the cells that compute it; '' for no equation."""
    lines = []
    for anchor in ANCHOR.findall(text):
        found = [n for n in book.index.names.values() if anchor in n.equations and n.page]
        links = [f"[`{n.full.split('.', 3)[-1]}`](#{label(n.page, n.cell)})" for n in found]
        if links:
            lines.append(f"{equation_words(anchor)} is computed by {', '.join(links)}")
    return "\n\n:::{div} exported\n" + "; ".join(lines) + "\n:::" if lines else ""


def fold(cell: dict, tag: str, words: str = "code") -> None:
    """Hide the code of a cell, or all of it, behind a line that says what is there."""
    meta = cell.setdefault("metadata", {})
    meta["tags"] = [*meta.get("tags", []), tag]
    prompts = {"code_prompt_show": f"Show the {words}", "code_prompt_hide": f"Hide the {words}"}
    meta.setdefault("mystnb", {}).update(prompts)


def is_picture(cell: dict) -> bool:
    return any("image/png" in o.get("data", {}) for o in cell.get("outputs", []))


def only_imports(source: str) -> bool:
    """Is there nothing but imports?"""
    code = re.sub(r"\([^)]*\)", "", source)
    lines = [s for s in code.splitlines() if s.strip() and not s.startswith("#")]
    return bool(lines) and all(re.match(r"(from|import) ", s) for s in lines)


def fold_code(cell: dict, evidence: bool) -> None:
    """Fold what a reader of this page does not come for."""
    if only_imports(cell["source"]):
        fold(cell, "hide-input", "imports")
    elif cell["id"].startswith("answer"):
        fold(cell, "hide-cell", "answer's code and what it prints")
    elif is_picture(cell) or cell["id"].startswith("figure-"):
        fold(cell, "hide-input", "code of the picture")
    elif evidence:
        fold(cell, "hide-input")


def merge(made: list[dict], cell: dict) -> bool:
    """Add a folded cell to the folded one before it, if that shows nothing. Returns whether it did.

    Two folds in a row, with nothing between them, are one line too many.
    """
    if not made or "outputs" not in made[-1] or made[-1]["outputs"] or cell["id"][:6] == "answer":
        return False
    both = [made[-1], cell]
    if not all("hide-input" in c["metadata"]["tags"] for c in both):
        return False
    cell["source"] = "\n\n".join(c["source"] for c in both)
    made[-1] = cell
    return True


def describe(cell: dict, heading: str, before: str, said: str = "") -> None:
    """Give the pictures of a cell an alternative text: `said`, or the heading above them with the
    sentence on what they show."""
    words = said or ". ".join(filter(None, [heading, about_picture(before)]))
    cell["metadata"].setdefault("mystnb", {})["image"] = {"alt": words or "picture"}


def number_alike(cells: list[dict]) -> None:
    """Pictures of a page with the same alternative text get a number."""
    drawn = [c["metadata"]["mystnb"]["image"] for c in cells if is_picture(c)]
    for image, words in zip(drawn, distinct([i["alt"] for i in drawn])):
        image["alt"] = words


def picture_cell(book: Book, path: str) -> dict:
    """A cell that shows a saved picture and nothing else."""
    image = base64.b64encode((book.root / path).read_bytes()).decode()
    data = {"output_type": "display_data", "metadata": {}, "data": {"image/png": image}}
    cell = {"cell_type": "code", "source": "", "outputs": [data], "execution_count": None}
    cell["metadata"] = {"tags": ["remove-input"]}
    return cell


def code_cells(book: Book, page: str, cell: dict, evidence: bool) -> list[dict]:
    """A cell of code as the cells of the book."""
    source = DIRECTIVE.sub("", cell["source"]).strip("\n")
    directives = " ".join(re.findall(r"^#\|(.*)$", cell["source"], re.M))
    tags = cell.get("metadata", {}).get("tags", [])
    if not source or "hide" in directives.split() or "injected-parameters" in tags:
        return []
    cell = copy.deepcopy(cell) | {"source": source, "metadata": {"tags": list(tags)}}
    fold_code(cell, evidence)
    stem = page.removesuffix(".ipynb")
    names = book.index.cells.get((stem, cell["id"]), [])
    if names and not only_imports(source):
        return [said(book, page, exported_line(book, page, cell, names)), cell]
    return [cell]


def folded_settings(text: str) -> str:
    """The lines about the runs of a page, of which the first stays open: they come before any
    result, and most readers want results."""
    first, _, rest = text.partition("\n\n")
    if not (rest.startswith("- data: ") and "\n- trained at " in rest):
        return text
    summary = "<details><summary>The settings of these runs</summary>"
    return f"{first}\n\n{summary}\n\n{rest}\n\n</details>"


def outputs(book: Book, page: str, cell: dict, module: str) -> None:
    """Links in what a cell has displayed lead where those of the page do."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "text/markdown" in data:
            text = folded_settings(profiled(page, "".join(data["text/markdown"])))
            text = re.sub(r"\[([^\]]*)\]\(#[^)]*\)", r"\1", text)
            data["text/markdown"] = markdown(book, page, text, module)
        if data.get("image/png") or data.get("text/markdown"):
            data.pop("text/plain", None)
    cell["execution_count"] = None


def run_line(book: Book, page: str, module: str) -> str:
    """The line under a title: the notebook to download, its module, and how to run it here."""
    parts = [download(book, page, "Download this notebook")]
    if module:
        parts.append(f"source of {{py:mod}}`{module}`")
    folder, name = page.split("/")[-2:]
    run = f".venv/bin/jupyter lab {page}"
    if page.startswith("figures/"):
        run = f".venv/bin/hmoe figures {name.removesuffix('.ipynb')} --profile {folder}"
    parts.append(f"run it here: `{run}` ([install](/install.md))")
    line = "\n\n:::{div} runline\n" + " · ".join(parts) + "\n:::\n"
    return line + book.under_title.get(page, "")


def titled(book: Book, page: str, text: str, module: str) -> str:
    """The first cell, with the line about the notebook behind its title and subtitle; the title of
    a page of evidence names its data."""
    if page.startswith("figures/") and text.startswith("# "):
        title, _, rest = text.partition("\n")
        text = f"# {data_title(title[2:], book.root / page)}\n{rest}"
    found = re.match(r"(# [^\n]*\n(?:\n*>[^\n]*(?:\n|$))*)", text)
    end = found.end() if found else 0
    return text[:end] + run_line(book, page, module) + text[end:]


def notebook(book: Book, page: str, module: str = "", pictures: dict | None = None) -> dict:
    """The page of the book that is made from the notebook `page`.

    `pictures`: cell id -> files of the project, for the pictures that a page of evidence saved.
    """
    evidence, made, heading, before = not module, [], "", ""
    for cell in read(book.root / page):
        text = profiled(page, cell["source"])
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^#+ (.*)$", text, re.M)
            heading, before = plain(headings[-1]) if headings else heading, ""
            before = re.sub(r"^(#|>|<a|\||\$\$).*$", "", text, flags=re.M)
            new = markdown(book, page, text, module) + computed_by(book, text)
            made.append(said(book, page, titled(book, page, new, module) if not made else new))
            continue
        saved = [(picture_cell(book, p), p) for p in (pictures or {}).get(cell["id"], [])]
        outputs(book, page, cell, module)
        if saved and not is_picture(cell):  # the first one stands below the code
            cell.setdefault("outputs", []).extend(saved[0][0]["outputs"])
        new = code_cells(book, page, cell, evidence)
        for c in new[-1:]:
            describe(c, heading, before, book.alts.get(saved[0][1], "") if saved else "")
        if not (len(new) == 1 and merge(made, new[0])):
            made += new
        for more, path in saved[1:]:
            describe(more, heading, before, book.alts.get(path, ""))
            made.append(more)
    number_alike(made)
    for number, cell in enumerate(made):
        cell["id"] = f"c{number}"
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
