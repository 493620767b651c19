"""The shape of the notebooks: what a reader may rely on in every one of them."""

import ast
import base64
import re

from notebooks import (
    LIBRARY,
    PAPER,
    ROOT,
    cells,
    code_lines,
    directives,
    exported,
    for_each,
    module_of,
    number_of,
    part_of,
    python,
    read,
)

RANDOM_ID = re.compile(r"(^|-)[0-9a-f]{8}(-\d+)?$")
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:home|Users|root|work|tmp|private|var|opt|mnt|data)/\w|[A-Z]:\\\\Users"
)
PROGRESS = re.compile(r"\d+%\|.*\||it/s\]|Wall time:|CPU times:|Warning:")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
EXPORTING = [p for p in LIBRARY if module_of(p)]


def outputs(path):
    "(cell id, output) for everything a notebook stores."
    return [(c["id"], o) for c in cells(path, "code") for o in c["outputs"]]


def texts(output):
    "Everything of an output that is read as text."
    stored = [output.get("text", "")] + [
        v for k, v in output.get("data", {}).items() if k.startswith("text/")
    ]
    return "\n".join("".join(t) for t in stored)


def test_there_are_notebooks_to_look_at():
    assert len(EXPORTING) >= 5
    assert LIBRARY[1].name <= "01_errors.ipynb"
    assert sum(map(exported, (c for p in EXPORTING for c in cells(p, "code")))) >= 30


@for_each(LIBRARY + PAPER)
def test_it_opens_with_a_title_and_one_sentence(path):
    first = read(path)["cells"][0]
    assert first["cell_type"] == "markdown"
    assert re.match(r"# \S.*\n\n?> \S.*", first["source"]), first["source"][:200]
    titles = [
        line
        for c in cells(path, "markdown")
        for line in re.sub(r"```.*?```", "", c["source"], flags=re.S).splitlines()
        if line.startswith("# ")
    ]
    assert len(titles) == 1, titles


@for_each(LIBRARY + PAPER)
def test_the_kernel_has_a_name_and_a_language(path):
    kernel = read(path)["metadata"].get("kernelspec", {})
    assert kernel.get("name") == "python3"
    assert kernel.get("language") == "python"


@for_each(EXPORTING)
def test_it_exports_one_module_of_its_name_at_its_place(path):
    named = [d["default_exp"] for d in map(directives, cells(path, "code")) if "default_exp" in d]
    assert len(named) == 1
    (_, part), stem = part_of(path), re.fullmatch(r"\d\d_(\w+)", path.stem)[1]
    stem = "__init__" if (part, stem) == ("algorithms", "registry") else stem
    assert named[0] == f"{part}.{stem}"


def test_numbers_run_without_holes():
    for part in {p.parent for p in LIBRARY}:
        numbers = sorted(number_of(p)[1] for p in LIBRARY if p.parent == part)
        first = 0 if part.name == "00_core" else 1
        assert numbers == list(range(first, first + len(numbers))), part.name
    parts = sorted({number_of(p)[0] for p in LIBRARY})
    assert parts == list(range(len(parts)))


@for_each([p for p in LIBRARY if p not in EXPORTING] + PAPER)
def test_what_names_no_module_exports_nothing(path):
    assert not [c["id"] for c in cells(path, "code") if exported(c)]


@for_each(LIBRARY + PAPER)
def test_imports_stand_alone_in_their_cells(path):
    for cell in cells(path, "code"):
        body = python(cell).body
        imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]
        assert all(imports) or not any(imports), f"cell {cell['id']}"


@for_each(LIBRARY + PAPER)
def test_ids_are_unique(path):
    ids = [c["id"] for c in read(path)["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[\w-]{1,64}", i) for i in ids)


@for_each(EXPORTING)
def test_ids_of_exported_cells_say_what_they_hold(path):
    assert not [c["id"] for c in cells(path, "code") if exported(c) and RANDOM_ID.search(c["id"])]


def statement_lines(cell):
    "The number of lines of a code cell without blank lines, comments and docstrings."
    lines = len(code_lines(cell))
    for node in ast.walk(python(cell)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                lines -= sum(bool(line.strip()) for line in text.splitlines())
                lines -= not text.splitlines()[-1].strip()  # closing quotes in a line of their own
    return lines


def test_docstrings_are_no_statements():
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    # three\n    return 1\n'
    assert statement_lines({"source": source}) == 2


@for_each(LIBRARY + PAPER)
def test_no_cell_is_long(path):
    assert not {c["id"]: n for c in cells(path, "code") if (n := statement_lines(c)) > 80}


@for_each(LIBRARY + PAPER + sorted(ROOT.glob("figures/*/*.ipynb")))
def test_links_to_other_files_resolve(path):
    for cell in cells(path, "markdown"):
        for target in LINK.findall(cell["source"]):
            assert re.match(r"\w+:", target) or (path.parent / target).exists(), target


@for_each(LIBRARY)
def test_outputs_are_stored(path):
    examples = [c for c in cells(path, "code") if not exported(c) and len(python(c).body) > 0]
    assert not examples or any(c["outputs"] for c in examples), "make notebooks"


@for_each(LIBRARY + PAPER)
def test_outputs_hold_no_error_path_warning_or_progress_bar(path):
    for cell, output in outputs(path):
        assert output["output_type"] != "error", cell
        assert output.get("name") != "stderr", cell
        for pattern in (MACHINE_PATH, PROGRESS):
            assert not pattern.search(texts(output)), (
                f"cell {cell}: {pattern.search(texts(output))[0]}"
            )


@for_each(LIBRARY + PAPER)
def test_sources_hold_no_path_of_one_machine(path):
    for cell in read(path)["cells"]:
        assert not MACHINE_PATH.search(cell["source"]), cell["id"]


@for_each(LIBRARY + PAPER)
def test_outputs_are_short_and_the_file_is_small(path):
    assert path.stat().st_size <= 600_000
    for cell, output in outputs(path):
        plain = "".join(output.get("text", "")) or "".join(
            output.get("data", {}).get("text/plain", "")
        )
        assert len(plain.splitlines()) <= 60, cell
        assert len(plain) <= 6000, cell
        picture = "".join(output.get("data", {}).get("image/png", ""))
        assert len(base64.b64decode(picture)) <= 120_000, cell


@for_each(LIBRARY + PAPER)
def test_nothing_is_left_of_an_execution(path):
    for cell in cells(path, "code"):
        assert cell["execution_count"] is None, cell["id"]
        assert set(cell["metadata"]) <= {"tags"}, cell["id"]


@for_each(PAPER)
def test_parameters_are_typed_explained_literals(path):
    tagged = [c for c in cells(path, "code") if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    names = []
    for node in python(tagged[0]).body:
        line = tagged[0]["source"].splitlines()[node.end_lineno - 1]
        assert isinstance(node, ast.AnnAssign), line
        assert isinstance(node.target, ast.Name), line
        assert isinstance(node.annotation, ast.Name), line
        assert node.annotation.id in {"int", "float", "str", "bool", "list"}, line
        ast.literal_eval(node.value)
        assert re.search(r"\S\s+# \S", line), f"no comment to serve as help: {line}"
        assert line.count("=") == 1, (
            f"papermill cannot read a parameter with a second '=' in its line: {line}"
        )
        names.append(node.target.id)
    assert "profile" in names
    assert len(set(names)) == len(names)


@for_each(PAPER)
def test_a_page_says_whether_its_claim_was_checked(path):
    opening = cells(path, "markdown")[0]["source"]
    executed = list(path.parents[2].glob(f"figures/*/{path.name}"))
    if not executed:
        assert "Claim checked" not in opening
    else:
        assert "not checked here" not in opening


@for_each(PAPER)
def test_a_paper_notebook_is_a_source_and_not_a_result(path):
    tags = [t for c in read(path)["cells"] for t in c["metadata"].get("tags", [])]
    assert "injected-parameters" not in tags
    assert "papermill" not in read(path)["metadata"]
