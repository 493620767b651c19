"""Export the library, then execute the library notebooks and store their outputs in place.

    python .ci/notebooks.py [--jobs N] [NAME ...]

NAME is a notebook (01_toy), a part (1_method) or a path; without one all are executed. A notebook
is written only when every cell has run; what is written is what `nbdev_clean` would leave.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELSPEC = {"display_name": "python3", "language": "python", "name": "python3"}


def library_notebooks(root=ROOT):
    "The notebooks in the parts of `nbs/`, in reading order."
    return sorted(p for p in (Path(root) / "nbs").glob("[0-9]_*/[0-9]*.ipynb"))


def processors():
    "How many processors this process may use."
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernel_environment():
    "This environment with one computing thread, portable arithmetic and inline figures."
    from hmoe_repro.arithmetic import THREADS, with_arithmetic

    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    return with_arithmetic("portable", environment) | dict.fromkeys(THREADS, "1")


def run_notebook(path, timeout=600, shutdown="graceful"):
    """The notebook at `path`, executed in a fresh kernel that works in the notebook's folder.
    With `shutdown="immediate"` the kernel is killed after the last cell: nothing runs at its exit.
    """
    import nbformat
    from nbclient import NotebookClient

    path = Path(path)
    notebook = nbformat.read(path, 4)
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


def cleaned(notebook):
    "`notebook` without execution counts, timing metadata, object addresses and stderr."
    from nbdev.clean import clean_nb

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    clean_nb(notebook, allowed_cell_metadata_keys=["tags"])
    return notebook


def store(path):
    """Execute the notebook at `path` and replace it by its executed form.
    Returns (path, seconds, error or None)."""
    import nbformat

    path, start = Path(path), time.perf_counter()
    try:
        text = nbformat.writes(cleaned(run_notebook(path)))
    except Exception as error:
        return path, time.perf_counter() - start, str(error).strip()
    text = text if text.endswith("\n") else text + "\n"
    if text != path.read_text(encoding="utf-8"):
        part = path.with_name(f"_{path.name}.part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    return path, time.perf_counter() - start, None


def names_of(path):
    "The names by which a command line may mean a notebook: its own, its part's, and both."
    part, stem = path.parent.name, path.stem
    return {(stem,), (part,), (part, stem), ("nbs", part)}


def chosen(names):
    """Paths of the notebooks that the command line names, a part standing for all of its own;
    all without a name."""
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
    options = parser.parse_args()
    paths = chosen(options.names)
    subprocess.run(
        [sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export()"],
        cwd=ROOT,
        check=True,
    )
    failed = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for path, seconds, error in pool.map(store, paths):
            print(
                f"{'FAILED' if error else 'stored'}  {path.relative_to(ROOT)}  {seconds:.0f} s",
                flush=True,
            )
            if error:
                failed += 1
                print(error, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
