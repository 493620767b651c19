"""Every public name of the library with its place, read from the source and never imported."""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

CELL = re.compile(r"^# %% \S*?nbs/(\S+)\.ipynb #(\S+)$")
CITED = re.compile(r"\(?(HMOE|GMoE|DMG),[^)]*?\beqs?\. ?([\d, andto]*\d)")


def numbers_in(text: str) -> list[int]:
    """The numbers that a text such as '3 to 5 and 8' names: 3, 4, 5, 8."""
    found = []
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


@dataclass
class Name:
    """A function, class, method or constant of the library."""

    full: str  # hmoe_repro.method.hmoe.HMOE.forward
    kind: str  # function, class, method, attribute or data: what Sphinx calls it
    signature: str
    docstring: str
    notes: list = field(default_factory=list)  # (name, annotation, comment) of each parameter
    returned: str = ""  # the comment after the return annotation
    page: str = ""  # nbs/01_method/04_hmoe, without the suffix
    cell: str = ""  # the id of the cell that defines it
    listed: list = field(default_factory=list)  # anchors of its equations in the index table

    @property
    def module(self) -> str:
        parts = self.full.split(".")
        return ".".join(parts[: -2 if self.kind == "method" else -1])

    @property
    def equations(self) -> list[str]:
        """Anchors of the equations that it computes, such as 'hmoe-eq-4': those that its docstring
        names, and those of its row in the index from equations to code."""
        found = []
        for paper, numbers in CITED.findall(" ".join(self.docstring.split())):
            found += [f"{paper.lower()}-eq-{n}" for n in numbers_in(numbers)]
        return list(dict.fromkeys([*found, *self.listed]))


@dataclass
class Module:
    """A module of the library: what stands in its file, in order."""

    name: str
    docstring: str
    page: str
    names: list[Name]


def comment(line: str) -> str:
    """What stands behind the last ` # ` of a line of code."""
    found = re.search(r"\s#\s(.*)$", line)
    return found[1].strip() if found else ""


def cell_of(lines: list[str], number: int) -> tuple[str, str]:
    """(page, cell id) of the line `number`, counted from 1, by the last mark of nbdev above it."""
    for line in reversed(lines[:number]):
        if found := CELL.match(line):
            return f"nbs/{found[1]}", found[2]
    return "", ""


def signature(node) -> str:
    """The signature of a function as it is called: without `self`."""
    text = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({re.sub(r'^self(, |$)', '', text)}){returns}"


def parameters(node, lines: list[str]) -> list[tuple[str, str, str]]:
    """(name, annotation, comment) of the parameters that have an annotation or a comment."""
    listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    several = len({a.lineno for a in listed}) == len(listed) and node.lineno not in {
        a.lineno for a in listed
    }
    rows = []
    for a in listed:
        said = comment(lines[a.lineno - 1]) if several else ""
        if a.arg not in ("self", "cls") and (a.annotation or said):
            rows.append((a.arg, ast.unparse(a.annotation) if a.annotation else "", said))
    return rows


def function(node, full: str, kind: str, lines: list[str]) -> Name:
    """The name of a function or a method."""
    end = node.returns.end_lineno if node.returns else node.lineno
    one_line = node.lineno == end and not any(a.lineno > end for a in node.args.args)
    said = "" if one_line and not node.returns else comment(lines[end - 1])
    return Name(
        full,
        kind,
        signature(node),
        ast.get_docstring(node) or "",
        parameters(node, lines),
        said,
        *cell_of(lines, node.lineno),
    )


def fields(node: ast.ClassDef, lines: list[str]) -> list[tuple[str, str, str]]:
    """(name, annotation, comment) of the annotated fields of a class."""
    annotated = [s for s in node.body if isinstance(s, ast.AnnAssign)]
    return [
        (s.target.id, ast.unparse(s.annotation), comment(lines[s.lineno - 1]))
        for s in annotated
        if isinstance(s.target, ast.Name)
    ]


def class_names(node: ast.ClassDef, full: str, lines: list[str]) -> list[Name]:
    """A class and its public methods."""
    methods = [s for s in node.body if isinstance(s, ast.FunctionDef)]
    start = next((m for m in methods if m.name == "__init__"), None)
    found = Name(
        full,
        "class",
        signature(start) if start else "",
        ast.get_docstring(node) or "",
        fields(node, lines) + (parameters(start, lines) if start else []),
        "",
        *cell_of(lines, node.lineno),
    )
    public = [m for m in methods if not m.name.startswith("_")]
    return [found, *(function(m, f"{full}.{m.name}", "method", lines) for m in public)]


def constant(node, module: str, lines: list[str]) -> list[Name]:
    """The public names that an assignment at the top of a module makes."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    named = [t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_")]
    said = comment(lines[node.lineno - 1])
    place = cell_of(lines, node.lineno)
    return [Name(f"{module}.{n}", "data", "", said, [], "", *place) for n in named]


def module_of(path: Path, root: Path) -> Module:
    """What a file of the library holds."""
    text = path.read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    dotted = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    names = []
    for node in tree.body:
        public = not getattr(node, "name", "_").startswith("_")
        if isinstance(node, ast.FunctionDef) and public:
            names.append(function(node, f"{dotted}.{node.name}", "function", lines))
        elif isinstance(node, ast.ClassDef) and public:
            names += class_names(node, f"{dotted}.{node.name}", lines)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names += constant(node, dotted, lines)
    names = list({n.full: n for n in names}.values())
    page = next((n.page for n in names if n.page), "")
    return Module(dotted, ast.get_docstring(tree) or "", page, names)


def library(root: Path) -> list[Module]:
    """All modules of the library that a notebook exports, in the order of the notebooks."""
    files = sorted((root / "hmoe_repro").rglob("*.py"))
    modules = [module_of(f, root) for f in files if not f.name.startswith("_modidx")]
    return sorted((m for m in modules if m.page), key=lambda m: m.page)


class Index:
    """Finds the name of the library that a word of the prose means."""

    def __init__(self, modules: list[Module]):
        self.modules = {m.name: m for m in modules}
        self.names = {n.full: n for m in modules for n in m.names}
        self.short, self.cells = {}, {}
        for n in self.names.values():
            self.cells.setdefault((n.page, n.cell), []).append(n)
            parts = n.full.split(".")
            for tail in (parts[-1:], parts[-2:]) if n.kind != "method" else (parts[-2:],):
                self.short.setdefault(".".join(tail), []).append(n)

    def find(self, word: str, module: str = "") -> str:
        """The full name that `word` means on the page of `module`; '' where that is not certain.

        A plain lower-case word, such as `loss`, is a name only on the page that defines it, or if
        it is called, as in `loss()`: elsewhere it may be a column or a field.
        """
        called, word = word.endswith("()"), word.removesuffix("()")
        full = word if word.startswith("hmoe_repro.") else f"hmoe_repro.{word}"
        if "." in word and (full in self.names or full in self.modules):
            return full
        if f"{module}.{word}" in self.names:
            return f"{module}.{word}"
        found = self.short.get(word, [])
        plain = word.islower() and "_" not in word and "." not in word
        return found[0].full if len(found) == 1 and (called or not plain) else ""

    def list_equations(self, table: str) -> None:
        """Note for each name the equations of its row in a table of Markdown, whose last column
        is the code. Raises `KeyError` for a name that the library lacks."""
        for row in (r for r in table.splitlines() if r.startswith("|")):
            anchors = re.findall(r"#(\w+-eq-\d+)\)", row)
            for word in re.findall(r"`([\w.]+)`", row.strip("| ").rpartition("|")[2]):
                if anchors:
                    self.names[f"hmoe_repro.{word}"].listed += anchors
