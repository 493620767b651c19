"""The pages of the reference: one for each module of the library, from its docstrings."""

import re

from book_cells import equation_links, label
from book_names import Module, Name
from book_text import Book, plain


def safe(text: str) -> str:
    """A docstring or comment as Markdown: what only looks like a mark is shown as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*<>$\[\]|{}_~\\])", r"\\\1", p) for p in parts[::2]]
    return "".join(parts)


def prose(docstring: str) -> str:
    """A docstring's paragraphs; what it indents, or draws as a list, keeps its lines."""
    parts = []
    for part in re.split(r"\n\s*\n", docstring.strip()):
        lines = part.splitlines()
        if any(re.match(r"\s{2,}\S", s) for s in lines) and not lines[0].startswith(" "):
            lines = [s.strip() for s in lines]
        parts.append("\n".join(safe(s.strip()) for s in lines))
    return "\n\n".join(parts)


def rows(name: Name) -> list[str]:
    """The list of parameters or fields with their types and comments, shapes first of all."""
    lines = []
    for parameter, annotation, said in name.notes:
        kind = f" (`{annotation}`)" if annotation else ""
        lines.append(f"- **{safe(parameter)}**{kind}" + (f": {safe(said)}" if said else ""))
    if name.returned:
        lines.append(f"- *returns*: {safe(name.returned)}")
    return lines


def places(book: Book, name: Name) -> str:
    """Where a name is defined, and the equations that its docstring names."""
    if not name.page:
        return ""
    words = name.page.split("/")[-1]
    parts = [f"Defined in [{safe(words)}](#{label(name.page, name.cell)})"]
    equations = [anchor for anchor in name.equations if anchor in book.anchors]
    if equations:
        parts.append(f"computes {equation_links(equations)}")
    return ":::{div} exported\n" + " · ".join(parts) + "\n:::"


def entry(book: Book, name: Name) -> str:
    """One name as a directive of Sphinx's domain for Python."""
    short = name.full.removeprefix(name.module + ".")
    body = [prose(name.docstring), "\n".join(rows(name)), places(book, name)]
    text = "\n\n".join(filter(None, body))
    one_line = " ".join(name.signature.split())
    return f"::::::{{py:{name.kind}}} {short}{one_line}\n\n{text}\n::::::"


def module_page(book: Book, module: Module) -> str:
    """The page of a module."""
    source = f"{module.page}.ipynb"
    public = [n for n in module.names if n.docstring or n.notes or n.kind != "data" or n.cell]
    made = f"Made from the notebook [{safe(source)}](/{source}). [All modules](/api/index.md)."
    intro = f"{prose(module.docstring)}\n\n{made}"
    parts = ["---\norphan: true\n---", f"# {safe(module.name.removeprefix('hmoe_repro.'))}", intro]
    parts.append(f"```{{py:module}} {module.name}\n```")
    return "\n\n".join(filter(None, [*parts, *(entry(book, n) for n in public)])) + "\n"


def by_part(modules: list[Module], parts: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Title of a part -> page and short name of each of its modules, for the bar at the left."""
    found = {}
    for folder, title in parts.items():
        inside = [m.name for m in modules if m.page.split("/")[1] == folder]
        if inside:
            found[title] = [(f"api/{name}", name.removeprefix("hmoe_repro.")) for name in inside]
    return found


def overview(modules: list[Module], parts: dict[str, str]) -> str:
    """The first page of the reference: every module in one line, part by part."""
    text = ["# Reference of the library\n"]
    text.append(
        "Each module is made from one notebook, so each name here leads to the cell that defines "
        "it. Shapes are given with the parameters, in the letters of [](/symbols.md).\n"
    )
    for folder, title in parts.items():
        inside = [m for m in modules if m.page.split("/")[1] == folder]
        if not inside:
            continue
        text.append(f"## {title}\n\n| module | content |\n|---|---|")
        for m in inside:
            short = m.name.removeprefix("hmoe_repro.")
            words = safe(plain(m.docstring)).replace("\n", " ")
            text.append(f"| [{safe(short)}](/api/{m.name}.md) | {words} |")
        text.append("")
    return "\n".join(text) + "\n"
