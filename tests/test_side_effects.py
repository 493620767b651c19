"""The library touches nothing but its own objects: no optimiser, generator, environment variable or
setting of a process that uses it beside something else."""

import ast
import copy
import inspect
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
from commands import hmoe
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from torch.optim import optimizer as torch_optimizer

import hmoe_repro as hm
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.algorithms.tools import match_layouts
from hmoe_repro.cli import app as cli
from hmoe_repro.cli import options
from hmoe_repro.core import files
from hmoe_repro.core.config import CONFIG, Config
from hmoe_repro.core.seeds import drawing_from, random_state, seed_everything, undisturbed
from hmoe_repro.report.page import PageOutput
from hmoe_repro.report.render import render
from hmoe_repro.training.store import RunStore, outcome

PACKAGE = Path(hm.__file__).parent
SHAPE, SMALL = (3, 16, 16), {"network": "small_cnn"}


class Foreign:
    """Somebody else's model in the same process, with a convolution laid out channels last, whose
    gradient they put together in plain order."""

    def __init__(self, dropout=0.0):
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Dropout(dropout)
        ).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.x = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        for p in self.model.parameters():
            p.grad = p.grad.contiguous()
        addresses = [p.grad.data_ptr() for p in self.model.parameters()]
        self.optimizer.step()
        assert addresses == [p.grad.data_ptr() for p in self.model.parameters()]

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def ours(name="ERM"):
    seed_everything(0)
    return hm.get_algorithm(name)(SHAPE, 4, 3, SMALL).train()


@pytest.mark.parametrize("name", ["ERM", "DANN", "MLDG"])
def test_updates_of_ours_and_of_a_foreign_model_do_not_touch_each_other(name):
    alone, foreign_alone = ours(name), Foreign()
    for step in range(4):
        seed_everything(step)
        alone.update(random_batches(3, SHAPE, 4, step))
    for _ in range(4):
        foreign_alone.step()
    beside, foreign = ours(name), Foreign()
    for step in range(4):
        seed_everything(step)
        beside.update(random_batches(3, SHAPE, 4, step))
        foreign.step()
    assert same(alone.state_dict().values(), beside.state_dict().values())
    assert same(foreign_alone.weights(), foreign.weights())
    assert not foreign.optimizer._optimizer_step_pre_hooks
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


def test_a_run_leaves_the_generators_and_settings_of_a_foreign_training(tmp_path):
    """The foreign model draws its dropout from the global generator."""
    store = RunStore(tmp_path)
    small = {"network": "small_cnn", "steps": 3, "checkpoint_frequency": 3}
    config = hm.make_config("Mixup", "DigitDomainsTiny", ["photo"], **small)
    alone, record = Foreign(dropout=0.5), hm.run(config, RunStore(tmp_path / "alone"))
    torch.manual_seed(1)
    for _ in range(4):
        alone.step()
    beside, threads = Foreign(dropout=0.5), torch.get_num_threads()
    torch.manual_seed(1)
    beside.step()
    beside.step()
    found = hm.run(config, store)
    beside.step()
    beside.step()
    assert same(alone.weights(), beside.weights())
    assert record["status"] == "complete"
    assert outcome(found) == outcome(record)
    assert torch.get_num_threads() == threads


def environment():
    "The environment without what PyTorch and its companions set when they are imported."
    theirs = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


def states():
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize(
    "act",
    [
        lambda: hm.make_config("HMOE-DN", "DigitDomainsTiny", ["plain"], network="small_cnn"),
        lambda: hm.load_dataset("ColoredDigits", 7),
        lambda: hm.results("quick-toy"),
        lambda: check_algorithm(hm.get_algorithm("ERM")),
    ],
    ids=["make_config", "load_dataset", "results", "check_algorithm"],
)
def test_a_call_leaves_the_global_generators_alone(act):
    before = states()
    act()
    assert states() == before


def hooks(algorithm):
    return len(algorithm.optimizer._optimizer_step_pre_hooks)


def test_the_optimisers_of_an_algorithm_are_hooked_once_and_in_copies():
    erm = ours()
    erm.update(random_batches(3, SHAPE, 4, 0))
    assert hooks(erm) == 1
    erm.optimizer = erm.optimizer
    assert hooks(erm) == 1
    assert hooks(copy.deepcopy(erm)) == 1
    parameter = torch.nn.Parameter(torch.zeros(2))
    held = [torch.optim.SGD([parameter], lr=0.1) for _ in range(4)]
    erm.several, erm.pair, erm.named = [held[0], 3], (held[1], None), {"a": held[2]}
    assert [len(one._optimizer_step_pre_hooks) for one in held] == [1, 1, 1, 0]
    assert match_layouts(held[3]) is held[3]
    assert len(held[3]._optimizer_step_pre_hooks) == 1
    assert match_layouts("text") == "text"


def test_an_optimiser_that_is_loaded_in_plain_order_trains_as_before():
    "A state from a file is laid out in plain order; the fused step would mix up the weights."
    whole = ours()
    for step in range(4):
        whole.update(random_batches(3, SHAPE, 4, step))
    first, second = ours(), ours()
    for step in range(2):
        first.update(random_batches(3, SHAPE, 4, step))
    plain = torch.utils._pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.clone(memory_format=torch.contiguous_format),
        first.training_state(),
    )
    second.load_training_state(plain)
    for step in range(2, 4):
        second.update(random_batches(3, SHAPE, 4, step))
    assert same(whole.state_dict().values(), second.state_dict().values())


def test_the_generators_are_put_back_also_after_an_error():
    before = states()
    with pytest.raises(ZeroDivisionError), undisturbed():
        seed_everything(9)
        1 / 0
    with pytest.raises(ZeroDivisionError), drawing_from(np.random.RandomState(0)):
        np.random.rand()
        1 / 0
    assert states() == before
    assert random_state().keys() == {"python", "numpy", "torch"}


def test_a_page_scatters_dots_by_its_own_generator(tmp_path):
    before = np.random.get_state()[1].tolist()
    page, expected = PageOutput("curve", tmp_path, False), np.random.RandomState(0)
    drawn = []
    for _ in range(2):
        np.random.rand()  # somebody else draws in between
        with page.scattered():
            drawn += np.random.uniform(-1, 1, 3).tolist()
    assert drawn == expected.uniform(-1, 1, 6).tolist()
    np.random.set_state(("MT19937", np.array(before, np.uint32), 624, 0, 0.0))


IMPORTS = """
import importlib, json, locale, logging, os, pkgutil, random, signal, sys, warnings
import jinja2, joblib, markdown_it, matplotlib.pyplot, numpy, pandas, pydantic, rich.console, scipy
import seaborn, sklearn.cluster, sklearn.datasets, sklearn.manifold, torch, typer
import threadpoolctl, PIL.Image, setuptools  # PyTorch imports it, and it extends sys.path
from torch.optim import optimizer
from hmoe_repro.core.devices import import_torchvision
import_torchvision()
import timm

def state():
    backends = torch.backends
    return {
        "environment": dict(os.environ),
        "python": str(random.getstate()),
        "numpy": str(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "type": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "gradients": [torch.is_grad_enabled(), torch.is_anomaly_enabled()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": [torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32],
        "cudnn": [backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic],
        "optimisers": len(optimizer._global_optimizer_pre_hooks)
        + len(optimizer._global_optimizer_post_hooks),
        "modules": len(torch.nn.modules.module._global_forward_hooks)
        + len(torch.nn.modules.module._global_forward_pre_hooks),
        "figures": {key: str(value) for key, value in matplotlib.rcParams.items()},
        "errors": numpy.geterr(),
        "printed": [str(numpy.get_printoptions()), pandas.get_option("display.max_columns")],
        "warnings": [str(entry) for entry in warnings.filters] + [str(warnings.showwarning)],
        "logging": [logging.root.level, len(logging.root.handlers), logging.raiseExceptions],
        "path": list(sys.path),
        "folder": os.getcwd(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "hooks": [str(sys.excepthook), str(sys.displayhook), len(sys.meta_path)],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
        "locale": locale.setlocale(locale.LC_ALL),
    }

before = state()
import hmoe_repro
names = [m.name for m in pkgutil.walk_packages(hmoe_repro.__path__, "hmoe_repro.")]
for name in names:
    importlib.import_module(name)
after = state()
print(json.dumps([len(names), {name: [before[name], after[name]] for name in before
                               if before[name] != after[name]}]))
"""


def test_importing_every_module_changes_no_state_of_the_process():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    count, changed = json.loads(done.stdout.splitlines()[-1])
    assert count > 100
    assert changed == {}


# Where a module changes something of the process, and why it may.
CHANGES = {
    "core/determinism.py": {"os.environ.update"},  # set_determinism, asked for; begin_process: new
    "core/file_index.py": {"gc.disable", "gc.enable", "gc.freeze"},  # gc_paused puts it back
    "core/seeds.py": {"random.seed", "np.random.seed", "torch.manual_seed", "np.random.set_state",
                      "random.setstate", "torch.set_rng_state"},  # what a run does, and undoes
    "core/devices.py": {"torch.set_num_threads"},  # single_thread puts it back
    "core/style.py": {"matplotlib.rc_file", "matplotlib.rcParams"},  # use_style, asked for
    "core/errors.py": {"signal.signal"},  # time_limit puts it back
    "report/warm_kernels.py": {"os.environ.clear", "os.environ.update", "os.chdir", "signal.signal",
                               "np.random.seed", "matplotlib.rcParams", "sys.path",
                               "pandas.set_option"},  # in the forked kernel
    "networks/precision.py": {"os.environ.setdefault"},  # torch.compile sets it otherwise
    "bench/costs.py": {"patch.dict"},  # the profiler's own level, put back
    "studies/worker.py": {"signal.signal", "warnings.showwarning"},  # in a worker
    "data/loader.py": {"signal.signal", "torch.set_num_threads"},  # in a process that decodes
    "data/precomputed.py": {"torch.set_num_threads"},  # put back
    "algorithms/from_file.py": {"random.seed", "np.random.seed",  # put back by `_undisturbed`
                                "sys.path_importer_cache"},  # of the folders of kept code
    "algorithms/domainbed_adapter.py": {"sys.path.insert", "sys.path.remove"},  # put back
    # For code of a user's file, from when it is loaded: it and the readers and writers of PyTorch
    # and safetensors report what such code opens, and act on no other code.
    "algorithms/outside_code.py": {"sys.addaudithook"},
    "method/toy_hmoe.py": {"torch.manual_seed"},  # in fork_rng
    "analysis/spectra.py": {"torch.manual_seed"},  # in fork_rng
    "apps/compare.py": {"plt.rcParams.update"},  # in rc_context
    "apps/study_page.py": {"plt.rcParams.update"},  # in rc_context
    "apps/export.py": {"warnings.simplefilter"},  # in catch_warnings
    "cli/discover_predict.py": {"warnings.simplefilter"},  # in catch_warnings
    "training/planning.py": {"warnings.simplefilter"},  # in catch_warnings
    "apps/correct_groups.py": {"warnings.showwarning"},  # in a process of its own
    "cli/app.py": {"warnings.showwarning"},  # main puts it back
}  # fmt: skip
GLOBAL = (
    "os.environ", "os.putenv", "os.unsetenv", "os.chdir", "os.umask", "random.seed",
    "random.setstate", "np.random.seed", "numpy.random.seed", "np.random.set_state",
    "torch.manual_seed", "torch.set_", "matplotlib.rc", "plt.rcParams.update", "plt.rc",
    "warnings.simplefilter", "warnings.filterwarnings", "warnings.showwarning", "signal.signal",
    "sys.path", "logging.basicConfig", "logging.getLogger", "pd.set_option", "pandas.set_option",
    "register_optimizer_step_pre_hook", "register_optimizer_step_post_hook",
    "register_module_forward_hook", "patch.dict", "locale.setlocale", "sys.setrecursionlimit",
    "sys.addaudithook", "gc.disable", "gc.enable", "gc.freeze", "gc.set_",
)  # fmt: skip
READS = ("os.environ.get", "os.environ.items", "os.environ.copy", "plt.rc_context",
         "matplotlib.rc_context")  # fmt: skip


def changed_by(tree):
    "What the statements of a module change in the process: calls and assignments by their names."
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith(GLOBAL) and not name.startswith(READS):
                found.add(name.replace("numpy.random", "np.random"))
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            for target in targets:
                name = ast.unparse(target).partition("[")[0]
                if name.startswith(GLOBAL):
                    found.add(name)
    return found


def test_the_places_that_change_the_process_are_those_of_the_table():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        changed = changed_by(ast.parse(path.read_text(encoding="utf-8")))
        if changed:
            found[path.relative_to(PACKAGE).as_posix()] = changed
    assert found == CHANGES


def test_the_table_would_see_a_change():
    code = "os.environ['A'] = '1'\nnp.random.seed(0)\nregister_optimizer_step_pre_hook(f)\n"
    code += "os.environ.get('A')\ndel os.environ['A']\n"
    expected = {"os.environ", "np.random.seed", "register_optimizer_step_pre_hook"}
    assert changed_by(ast.parse(code)) == expected


def command_functions():
    "Every command of `hmoe`, by name, as its function and the parameters that it takes."
    found = {name: command for name, command in cli.COMMANDS.items()}
    found |= {f"data {info.name}": info.callback for info in cli.data_app.registered_commands}
    return found


@pytest.mark.parametrize("name", sorted(command_functions()))
def test_a_command_reads_each_of_its_parameters(name):
    "A parameter that only its callback reads acts before the command begins, and in no other call."
    command = command_functions()[name]
    module = ast.parse(Path(inspect.getsourcefile(command)).read_text(encoding="utf-8"))
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    function = functions[command.__name__]
    arguments = [*function.args.args, *function.args.kwonlyargs]
    given = {argument.arg for argument in arguments}
    if function.args.kwarg:
        given.add(function.args.kwarg.arg)
    body = [node for statement in function.body for node in ast.walk(statement)]
    read = {n.id for n in body if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert given - read == set()


def test_reading_a_command_line_changes_nothing(tmp_path):
    before = dict(os.environ), copy.deepcopy(vars(CONFIG)), dict(files.FOLDERS)
    command = typer.main.get_command(cli.app).commands["train"]
    words = "--algorithm ERM --dataset DigitDomains --test-domain photo --log csv".split()
    words += ["--data-dir", str(tmp_path), "--domainbed", str(tmp_path), "--resume-anyway"]
    context = command.make_context("train", words)
    assert context.params["data_dir"] == str(tmp_path)
    assert context.params["log"] == ["csv"]
    assert (dict(os.environ), vars(CONFIG), dict(files.FOLDERS)) == before


def test_what_the_options_say_reaches_whoever_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FOLDERS", {})
    for name, value in vars(CONFIG).items():
        monkeypatch.setattr(CONFIG, name, value)
    monkeypatch.setenv("HMOE_DATA", str(tmp_path / "of the environment"))
    environment = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    assert options.configure() == str(tmp_path / "of the environment")
    told = options.configure("sets", "DomainBed", ["csv"], resume_anyway=True)
    assert told == str(tmp_path / "sets") == str(files.data_dir())
    assert files.folder_variables() == {"HMOE_DATA": told}
    worker = Config()
    worker.restore(CONFIG.to_json())
    assert worker.domainbed == str(tmp_path / "DomainBed")
    assert worker.log == ("csv",)
    assert worker.resume_anyway
    options.configure()
    assert not CONFIG.resume_anyway
    assert dict(os.environ) == environment


def test_a_command_leaves_the_environment_and_writes_its_log(tmp_path):
    "The option acts in the command itself, also where nothing but its value says so."
    before = environment()
    words = "train --algorithm ERM --dataset DigitDomainsTiny --test-domain photo --steps 2"
    words = [*words.split(), "--network", "small_cnn", "--set", "batch_size=4", "--device", "cpu"]
    done = hmoe(*words, "--log", "csv", "--data-dir", tmp_path / "sets", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs").rglob("*.csv"))
    assert environment() == before


KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
PAGE = """
import os
from hmoe_repro.core.files import write_atomic
from hmoe_repro.report.provenance import output_folder
said = " ".join(os.environ.get(n, "-") for n in ("HMOE_FORMATS", "MPLBACKEND", "MINE"))
write_atomic(output_folder(output, profile) / "page.csv", said)
"""


def test_two_pages_rendered_at_once_have_their_own_variables(warm_kernels, tmp_path):
    parameters = 'profile: str = "quick"\nstore: str = ""\noutput: str = ""'
    cells = [
        new_markdown_cell("# A page\n\n> Claim: variables arrive.", id="title"),
        new_code_cell(parameters, id="parameters", metadata={"tags": ["parameters"]}),
        new_code_cell(PAGE, id="write"),
    ]
    nbformat.write(
        new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), tmp_path / "page.ipynb"
    )
    before = environment()

    def one(kind):
        environment = {**os.environ, "MINE": kind}
        place = {"output": tmp_path / kind, "notebooks": tmp_path, "environment": environment}
        page = render("page", "quick", formats=("csv", kind), **place)
        return page.with_name("page.csv").read_text()

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(one, ("pdf", "md")))
    assert said == ["csv pdf Agg pdf", "csv md Agg md"]
    assert environment() == before


def test_erm_is_hooked_by_whoever_makes_its_optimiser():
    "A subclass that makes its optimiser in its constructor needs no call of ours."

    class Early(ERM):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

        def update(self, minibatches, unlabeled=None):
            x, y = minibatches[0]
            self.optimizer.zero_grad()
            F.cross_entropy(self.predict(x), y).backward()
            self.optimizer.step()
            return {"loss": 0.0}

    early = Early(SHAPE, 4, 3, SMALL)
    early.update(random_batches(3, SHAPE, 4, 0))
    assert hooks(early) == 1
