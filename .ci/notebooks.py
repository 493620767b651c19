"""Export the library, then execute the library notebooks and store their outputs in place.

    python .ci/notebooks.py [--jobs N] [NAME ...]

NAME is a notebook (01_toy), a part (01_method) or a path; without one all are executed. A notebook
is written only when every cell has run, cleaned as by `nbdev_clean`. The digests of its inputs are
stored in nbs/executed.json, so that the tests execute only notebooks whose inputs changed.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELSPEC = {"display_name": "python3", "language": "python", "name": "python3"}


def library_notebooks(root=ROOT):
    "The notebooks in the parts of `nbs/`, in reading order."
    return sorted(p for p in (Path(root) / "nbs").glob("[0-9][0-9]_*/[0-9]*.ipynb"))


def processors():
    "How many processors this process may use."
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernel_environment():
    "This environment with one computing thread, portable arithmetic and inline figures."
    from hmoe_repro.core.determinism import process_variables

    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    return environment | process_variables("portable")


WATCH = """import sys; sys.opened = set()
def heard(event, given, opened=sys.opened):
    if event == "open" and isinstance(given[0], str): opened.add(given[0])
sys.addaudithook(heard)"""
SEEN = """import json, sys
files = {getattr(m, "__file__", None) for n, m in sys.modules.items() if n.startswith("hmoe_repro")}
opened = {name for name in sys.opened if not name.endswith((".py", ".pyc"))}
print(json.dumps(sorted(opened | {f for f in files if f})))"""


def run_watched(path):
    "The executed notebook at `path`, and the files that it opened, modules of the library too."
    import nbformat

    notebook = nbformat.read(path, 4)
    ends = [nbformat.v4.new_code_cell(source) for source in (WATCH, SEEN)]
    notebook.cells = [ends[0], *notebook.cells, ends[1]]
    executed = run_notebook(path, notebook=notebook)
    opened = json.loads(executed.cells.pop()["outputs"][0]["text"])
    del executed.cells[0]
    return executed, {Path(path.parent, name).resolve() for name in opened}


def run_notebook(path, timeout=600, shutdown="graceful", notebook=None):
    """The notebook at `path`, executed in a fresh kernel that works in the notebook's folder.
    With `shutdown="immediate"` the kernel is killed after the last cell: nothing runs at its exit.
    """
    import nbformat
    from nbclient import NotebookClient

    path = Path(path)
    notebook = notebook or nbformat.read(path, 4)
    notebook.metadata["kernelspec"] = KERNELSPEC
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        shutdown_kernel=shutdown,
        extra_arguments=["--Application.log_level=40"],
        resources={"metadata": {"path": str(path.parent)}},
    ).execute(env=kernel_environment())
    return notebook


def joined_streams(outputs):
    "Outputs of a cell in which printed text is whole, however it came from the kernel."
    joined = []
    for output in outputs:
        before = joined[-1] if joined else {}
        if output.get("name") and output.get("name") == before.get("name"):
            before["text"] += output["text"]
        else:
            joined.append(output)
    return joined


def cleaned(notebook):
    "`notebook` without execution counts, timing metadata, object addresses and stderr."
    from nbdev.clean import clean_nb

    for cell in notebook.cells:
        if cell.cell_type == "code":
            printed = [o for o in cell.outputs if o.get("name") != "stderr"]
            cell.outputs = joined_streams(printed)
    clean_nb(notebook, allowed_cell_metadata_keys=["tags"])
    return notebook


# The inputs of the stored outputs: the source of the code, and all that it imported and read.
EXECUTED = ROOT / "nbs" / "executed.json"


def digest(*contents):
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


def source_digest(path):
    "Digest of the code cells of a notebook."
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    return digest(*("".join(c["source"]).encode() for c in cells if c["cell_type"] == "code"))


@functools.cache
def imported_directly(path):
    "The modules of the library that a module or a notebook names in an import."
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        text = "\n".join("".join(c["source"]) for c in cells)
        text = re.sub(r"^(\s*)[%!](?![\s=]).*$", r"\1pass", text, flags=re.M)
    package, names = path.relative_to(ROOT).parent.parts, set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{a.name}" for a in node.names)}
    places = [ROOT / name.replace(".", "/") for name in names if name.startswith("hmoe_repro")]
    files = [f for p in places for f in (p.with_suffix(".py"), p / "__init__.py")]
    return {f for f in files if f.is_file()}


def behind(*paths):
    "All modules of the library that some modules or notebooks import, and what those import."
    found, waiting = set(), list(paths)
    while waiting:
        new = imported_directly(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def inputs_digest(path, reads):
    "Digest of versions, modules behind a notebook, and files that match the patterns `reads`."
    read = {file for pattern in reads for file in ROOT.glob(pattern)}
    files = read | behind(path, *(f for f in read if f.suffix == ".py"))
    contents = {f.relative_to(ROOT).as_posix().encode(): f.read_bytes() for f in files}
    contents[b"versions"] = (ROOT / "constraints.txt").read_bytes()
    return digest(*(part for name in sorted(contents) for part in (name, contents[name])))


def executed(path, opened=(), many=8):
    """The entry of `EXECUTED` for a notebook and the files it opened when executed; more than
    `many` files of one kind in one folder become a pattern."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    tracked = {ROOT / name for name in listed.splitlines()} - {path, *behind(path)}
    files = [f for f in tracked & {*opened} if f.name not in ("__init__.py", "settings.ini")]
    alike = Counter((f.parent, f.suffix) for f in files)
    patterns = {f.parent / f"*{f.suffix}" if alike[f.parent, f.suffix] > many else f for f in files}
    reads = sorted(p.relative_to(ROOT).as_posix() for p in patterns)
    return {"source": source_digest(path), "inputs": inputs_digest(path, reads), "reads": reads}


@functools.cache
def all_executed():
    return json.loads(EXECUTED.read_text(encoding="utf-8")) if EXECUTED.exists() else {}


def is_edited(path):
    "Was the code of a notebook changed since its outputs were stored?"
    return all_executed().get(name_of(path), {}).get("source") != source_digest(path)


def is_stale(path):
    "Have the inputs of the stored outputs of a notebook changed?"
    known = all_executed().get(name_of(path))
    return not known or is_edited(path) or known["inputs"] != inputs_digest(path, known["reads"])


def write_executed(entries):
    "Write entries to `EXECUTED`, a line each, and drop notebooks that no longer exist."
    names = {name_of(path) for path in library_notebooks()}
    known = {n: e for n, e in (all_executed() | entries).items() if n in names}
    lines = [f" {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
    EXECUTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def store(path):
    """Execute the notebook at `path` and replace it by its executed form.
    Returns (path, seconds, error or None, files that it opened)."""
    import nbformat

    path, start = Path(path), time.perf_counter()
    try:
        made, opened = run_watched(path)
        text = nbformat.writes(cleaned(made))
    except Exception as error:
        return path, time.perf_counter() - start, str(error).strip(), ()
    text = text if text.endswith("\n") else text + "\n"
    if text != path.read_text(encoding="utf-8"):
        part = path.with_name(f"_{path.name}.part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    return path, time.perf_counter() - start, None, opened


def names_of(path):
    "The names by which a command line may mean a notebook: its own, its part's, and both."
    part, stem = path.parent.name, path.stem
    return {(stem,), (part,), (part, stem), ("nbs", part)}


def chosen(names):
    """Paths of the notebooks named on the command line, a part meaning all its notebooks; all
    notebooks if none is named."""
    existing, paths = library_notebooks(), []
    for name in names:
        wanted = Path(name).with_suffix("").parts[-2:]
        matching = [path for path in existing if wanted in names_of(path)]
        if not matching:
            valid = ", ".join("/".join(path.with_suffix("").parts[-2:]) for path in existing)
            sys.exit(f"no library notebook {name}. There are: {valid}")
        paths += matching
    return paths or existing


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=min(4, processors()))
    parser.add_argument(
        "--changed", action="store_true", help="only notebooks whose inputs changed"
    )
    options = parser.parse_args()
    paths = chosen(options.names)
    subprocess.run(
        [sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export()"],
        cwd=ROOT,
        check=True,
    )
    if options.changed:
        paths = [path for path in paths if is_stale(path)]
    os.environ["PYTHONPATH"] = str(ROOT)  # of this checkout, whatever is installed
    sys.path.insert(0, str(ROOT))
    from hmoe_repro.report.warm_kernels import warm_kernels

    failed, entries = 0, {}
    with (
        warm_kernels(environment=kernel_environment()) as kernels,
        ProcessPoolExecutor(options.jobs) as pool,
    ):
        if kernels:
            os.environ["JUPYTER_PATH"] = kernels  # the processes of the pool start later
        for path, seconds, error, opened in pool.map(store, paths):
            print(
                f"{'FAILED' if error else 'stored'}  {path.relative_to(ROOT)}  {seconds:.0f} s",
                flush=True,
            )
            if error:
                failed += 1
                print(error, file=sys.stderr)
            else:
                entries[name_of(path)] = executed(path, opened)
    write_executed(entries)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
