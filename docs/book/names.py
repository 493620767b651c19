"""Every exported name, with the cell that defines it and the equations that it computes."""

import ast
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from hmoe_repro.core.files import repo_root

ROOT = repo_root()
START = "nbs/00_core/00_start_here.ipynb"
INDEX = "docs/symbols.md"  # from equations to code
NOTEBOOKS = "docs/notebooks.md"  # the table of all notebooks
CITED = re.compile(r"\(?(HMOE|GMoE|DMG),[^)]*?\beqs?\. ?([\d, andto]*\d)")
DIRECTIVE = re.compile(r"^#\|[^\n]*\n?", re.M)


@dataclass
class Name:
    """A function, class, method or constant of the library."""

    module: str  # hmoe_repro.method.gating
    page: str  # nbs/01_method/03_gating
    cell: str  # the label of the cell that defines it
    equations: list[str]  # anchors of the equations that it computes, such as 'hmoe-eq-4'


def text_of(page: str) -> str:
    """Return the text of a page of the project."""
    return (ROOT / page).read_text(encoding="utf-8")


def cells_of(page: str) -> list[dict]:
    """Return the cells of a notebook, each source one string.

    In a Markdown page every section below a comment, such as `<!-- slide -->`, is a cell. The
    comment lists its tags.
    """
    if page.endswith(".md"):
        return sections_of(text_of(page))
    cells = json.loads(text_of(page))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def sections_of(text: str) -> list[dict]:
    """Return the sections of a Markdown text below comments as cells; the comments are tags."""
    cells = []
    parts = re.split(r"^<!-- ([a-z -]+) -->\n", text, flags=re.M)
    for tags, rest in zip(parts[1::2], parts[2::2]):
        source = re.split(r"\n(?=## )", rest)[0].strip()
        title = source.partition("\n")[0].strip("# ")
        cell = {"cell_type": "markdown", "id": re.sub(r"\W+", "-", title).lower()}
        cells.append(cell | {"metadata": {"tags": tags.split()}, "source": source})
    return cells


def cell_text(page: str, cell: str) -> str:
    """The text of the cell of a notebook with this id."""
    return next(c["source"] for c in cells_of(page) if c["id"] == cell)


def library_notebooks() -> list[str]:
    """The notebooks of the library in the order in which it builds on itself."""
    found = sorted((ROOT / "nbs").glob("[0-9][0-9]_*/[0-9]*.ipynb"))
    return [path.relative_to(ROOT).as_posix() for path in found]


def reading_path() -> dict[str, str]:
    """Page of the reading path -> its number in the table of the start page; a second page of a
    row has none."""
    path, folder = {START: "1"}, (ROOT / START).parent
    for row in cell_text(START, "md-path").splitlines():
        number = row.strip("| ").partition(" ")[0]
        for link in re.findall(r"\]\(([^)]+\.ipynb)\)", row) if number.isdigit() else ():
            page = (folder / link).resolve().relative_to(ROOT.resolve()).as_posix()
            path[page], number = number, ""
    return path


def module_of(cells: list[dict]) -> str:
    """The module that a notebook exports; '' without one."""
    found = re.search(r"^#\| default_exp (\S+)", "\n".join(c["source"] for c in cells), re.M)
    return f"hmoe_repro.{found[1]}".removesuffix(".__init__") if found else ""


def label(page: str, cell: str) -> str:
    """The book's name of a cell: unique, where ids are unique only in their notebook."""
    return f"{Path(page).with_suffix('').as_posix()}--{cell}".replace("/", "-").replace("_", "-")


def cited(docstring: str | None) -> list[str]:
    """Anchors of the equations that a docstring names, as in '(HMOE, eqs. 3 to 5 and 8)'."""
    anchors = []
    for paper, text in CITED.findall(" ".join((docstring or "").split())):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", text):
            anchors += [
                f"{paper.lower()}-eq-{n}" for n in range(int(first), int(last or first) + 1)
            ]
    return anchors


def defined(source: str) -> dict[str, list[str]]:
    """Name -> equations of its docstring, for what a cell defines, methods included."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = cited(ast.get_docstring(node))
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = cited(ast.get_docstring(inner))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: [] for target in targets if isinstance(target, ast.Name)}
    return {name: eqs for name, eqs in found.items() if name[0] != "_" and "._" not in name}


@functools.cache
def library() -> dict[str, Name]:
    """Full name -> where it is defined and what it computes: the equations of its docstring, and
    those of its row in the index from equations to code."""
    names = {}
    for page in library_notebooks():
        cells = cells_of(page)
        module = module_of(cells)
        for cell in (c for c in cells if c["source"].startswith("#| export")):
            for name, equations in defined(cell["source"]).items():
                names[f"{module}.{name}"] = Name(
                    module, page[:-6], label(page, cell["id"]), equations
                )
    for row in text_of(INDEX).splitlines():
        anchors = re.findall(r"#(\w+-eq-\d+)\)", row)
        words = re.findall(r"`([\w.]+)`", row.strip("| ").rpartition("|")[2]) if anchors else []
        for word in words:
            equations = names[f"hmoe_repro.{word}"].equations
            equations += [anchor for anchor in anchors if anchor not in equations]
    return names


def equation(anchor: str) -> str:
    """'hmoe-eq-4' as 'eq. 4 of HMOE'."""
    paper, _, number = anchor.partition("-eq-")
    return f"eq. {number} of {paper.upper().replace('GMOE', 'GMoE')}"
