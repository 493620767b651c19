"""Reading notebooks, for the contract tests."""

import ast
import functools
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
PARTS = [p.name[3:] for p in sorted((ROOT / "nbs").glob("[0-9]*"))]
PACKAGES = ("hmoe_repro", *(f"hmoe_repro.{part}" for part in PARTS))
DIRECTIVE = re.compile(r"^#\|\s*(\S+)\s*(.*)$", re.M)

specification = importlib.util.spec_from_file_location(
    "ci_notebooks", ROOT / ".ci" / "notebooks.py"
)
ci = importlib.util.module_from_spec(specification)
specification.loader.exec_module(ci)

LIBRARY = ci.library_notebooks(ROOT)
PAPER = sorted(p for p in (ROOT / "nbs" / "paper").glob("*.ipynb") if not p.name.startswith("_"))


def name_of(path):
    "How pytest calls a notebook: its part and its name."
    return f"{path.parent.name}/{path.stem}"


@functools.cache
def read(path):
    "The notebook at `path` as nested dictionaries, sources joined."
    notebook = json.loads(Path(path).read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def for_each(paths, name=name_of):
    """Decorator: the test of a rule over all `paths`, that lists every offender by its name."""

    def one_test(rule):
        def test():
            offenders = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    offenders.append(f"{name(path)}: {error}")
            assert paths, "\n".join(offenders)
            assert not offenders, "\n".join(offenders)

        test.__name__ = test.__qualname__ = rule.__name__
        return test

    return one_test


def cells(path, kind):
    "The 'code' or 'markdown' cells of a notebook."
    return [c for c in read(path)["cells"] if c["cell_type"] == kind]


def page_code(name):
    "The sources of the code cells of a page, in their order."
    return [cell["source"] for cell in cells(ROOT / "nbs" / "paper" / f"{name}.ipynb", "code")]


def page_functions(name):
    """What a page defines for itself: the namespace of its imports and functions, made without
    running the page."""
    space = {"__name__": f"page_{name}"}
    for cell in cells(ROOT / "nbs" / "paper" / f"{name}.ipynb", "code"):
        kept = [
            node
            for node in python(cell).body
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))
            or isinstance(node, ast.Assign)
            and all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets)
        ]
        exec(compile(ast.Module(kept, type_ignores=[]), name, "exec"), space)
    return SimpleNamespace(**space)


def directives(cell):
    "Name and argument of each nbdev directive of a cell."
    return {
        name.rstrip(":"): argument.strip() for name, argument in DIRECTIVE.findall(cell["source"])
    }


def exported(cell):
    "Does nbdev write this cell into the module?"
    return bool({"export", "exports", "exporti"} & directives(cell).keys())


def python(cell):
    "The syntax tree of a code cell, magics left out."
    return _parsed(cell["source"])


@functools.cache
def _parsed(source):
    return ast.parse(re.sub(r"^(\s*)[%!](?![\s=]).*$", r"\1pass", source, flags=re.M))


def code_lines(cell):
    "Lines that are neither blank nor a comment."
    return [
        line
        for line in cell["source"].splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]


def module_of(path):
    "The dotted module a notebook exports, without the package's name; None if it exports none."
    names = [d["default_exp"] for d in map(directives, cells(path, "code")) if "default_exp" in d]
    return names[0] if names else None


def part_of(path):
    "The part a notebook stands in: number and name of its folder, (4, 'algorithms')."
    number, _, name = path.parent.name.partition("_")
    return int(number), name


def number_of(path):
    "Where a notebook stands in the order: (number of its part, its own number)."
    return part_of(path)[0], int(re.match(r"\d+", path.name)[0])


def library_imports(tree):
    """What a syntax tree imports of the library, anywhere in it:
    'core', 'algorithms.base', or 'algorithms.name' for a name of a package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            package = node.module in PACKAGES
            found |= {f"{node.module}.{a.name}" for a in node.names} if package else {node.module}
    return {m.partition(".")[2] for m in found if m.split(".")[0] == "hmoe_repro"}
