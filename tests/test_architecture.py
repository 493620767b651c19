"""The rules of the house, held by reading the code: who reads records, who sets the environment,
who touches what all of Python shares, who takes a sentence or a name apart, and who imports whom.

A rule finds its offences in the syntax tree of a module. `ALLOWED` names the modules that need what
it forbids, each with its reason; an entry that nothing needs any more fails, too.
"""

import ast

import pytest
from notebooks import PAPER, PARTS, ROOT, cells, for_each, python

LIBRARY = ROOT / "hmoe_repro"
MODULES = {
    path.relative_to(LIBRARY).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(LIBRARY.rglob("*.py"))
    if path.name != "_modidx.py"
}


def name_of(node) -> str:
    "The last name of an expression: 'verdict' of `row.verdict` and of `frame.verdict.str`."
    if isinstance(node, ast.Attribute):
        return name_of(node.value) if node.attr == "str" else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def constant_key(node):
    'The text K of `x["K"]` and of `x.get("K")`, with x; (None, None) for anything else.'
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value, node.value
    if isinstance(node, ast.Call) and name_of(node.func) == "get" and node.args:
        if isinstance(node.args[0], ast.Constant) and isinstance(node.func, ast.Attribute):
            return node.args[0].value, node.func.value
    return None, None


def called(node) -> str:
    "The dotted name of what a call calls: 'np.random.seed'."
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


# The rules: each takes a node and says whether it is an offence


OF_A_RECORD = {"config", "checkpoints", "selected", "in_domain", "record_version"}
MEASURED = {"discovery", "clusters", "masks", "spectra", "expert_choices", "toy", "environment"}


def reads_a_record(node) -> bool:
    "A key that only records have, any key of a thing called `record`, or the column `record`."
    if isinstance(node, ast.Attribute) and node.attr == "record":
        return name_of(node.value) not in ("page", "self")  # the record of a benchmark
    key, owner = constant_key(node)
    called_so = isinstance(owner, ast.Name) and owner.id in ("record", "r")
    return key in OF_A_RECORD or called_so and key in MEASURED


def sets_the_environment(node) -> bool:
    "Writing to `os.environ`."
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        subscripts = [t.value for t in targets if isinstance(t, ast.Subscript)]
        return any(ast.unparse(value).endswith("environ") for value in subscripts)
    of_environ = ("environ.update", "environ.setdefault", "environ.pop", "environ.clear")
    return called(node).endswith((*of_environ, "os.putenv", "os.unsetenv"))


def seeds_everybody(node) -> bool:
    "Seeding or replacing the state of a generator that the whole process draws from."
    shared = ("random.seed", "np.random.set_state", "torch.manual_seed", "torch.set_rng_state")
    return called(node) in (*shared, "np.random.seed", "numpy.random.seed", "torch.seed") or called(
        node
    ).endswith(("default_generator.manual_seed", "cuda.manual_seed_all"))


def hooks_everybody(node) -> bool:
    "A hook on all modules, all optimisers, or all of Python."
    name = called(node).rpartition(".")[2]
    everybody = name.startswith(("register_module_", "register_optimizer_step_"))
    return everybody or name == "addaudithook"


TAKING_APART = {"split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"}
TAKING_APART |= {"startswith", "endswith"}
SENTENCES = {"verdict", "answer", "reason", "sentence", "cause", "explanation", "message", "plan"}
SENTENCES |= {"said", "note", "finding"}


def parses_a_sentence(node) -> bool:
    "A regular expression on, or a method that takes apart, what is called a sentence."
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if ast.unparse(node.func.value) == "re":
        return any(name_of(argument) in SENTENCES for argument in node.args)
    takes_apart = node.func.attr in TAKING_APART and node.args  # `split()` counts words
    return bool(takes_apart) and name_of(node.func.value) in SENTENCES


NAMES = {"study", "profile", "dataset", "metric", "artefact", "benchmark", "algorithm"}


def decides_by_a_name(node) -> bool:
    "What a study, data set, metric, ... is called decides what is done; an ending of a file may."
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        inside = node.comparators[0]
        texts = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        return texts and isinstance(inside, (ast.Name, ast.Attribute)) and name_of(inside) in NAMES
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    ending = ast.unparse(node.args[0]).strip("'\"") if node.args else ""
    takes_apart = node.func.attr in TAKING_APART and not ending.startswith(".")
    owner = node.func.value
    if isinstance(owner, ast.Call) and name_of(owner.func) == "str" and owner.args:
        owner = owner.args[0]
    return takes_apart and name_of(owner) in NAMES


RULES = {
    f.__name__: f
    for f in (
        reads_a_record,
        sets_the_environment,
        seeds_everybody,
        hooks_everybody,
        parses_a_sentence,
        decides_by_a_name,
    )
}

# Rule -> module, or a whole part, that needs what it forbids -> why
ALLOWED = {
    "reads_a_record": {
        "analysis.results": "the one reader: it makes the frame and hands out parts of a record",
        "training": "it makes, keeps and checks records",
        "studies.search": "it chooses among records before there is a frame",
        "studies.estimates": "it takes times of records, without importing pandas",
        "studies.filters": "`--where` picks records, without importing pandas",
        "studies.study_file": "a plan is older than the records of its runs",
        "studies.export_import": "it carries records between stores",
        "studies.domainbed_export": "it writes records as DomainBed's logs",
        "apps.predict": "a model is loaded with the record that says how it was trained",
        "apps.export": "an exported model carries its record",
        "apps.embed": "features come from a model and the record that says how it was trained",
        "apps.soup": "an average of weights carries the records of its runs",
        "apps.discover": "the report of a folder shows the record of its run",
        "bench.store_commands": "it generates records, to time commands on many of them",
        "bench.timing": "its records are those of benchmarks",
        "bench.benchmark": "its records are those of benchmarks",
    },
    "sets_the_environment": {
        "core.determinism": "instruction sets are chosen before torch is imported",
        "networks.precision": "torch reads the folder of compiled code from a variable alone",
        "report.warm_kernels": "a forked kernel takes the variables of the one that asked for it",
    },
    "seeds_everybody": {
        "core.seeds": "the one place that does it, for a run, and restores the state",
        "method.toy_hmoe": "inside `fork_rng`, which restores the state",
        "analysis.spectra": "inside `fork_rng`, which restores the state",
        "data.transforms": "in a worker process, and restored there",
        "algorithms.from_file": "inside `undisturbed`, which restores the state",
        "report.warm_kernels": "a forked kernel must not repeat the draws of its siblings",
    },
    "hooks_everybody": {
        "algorithms.outside_code": "what foreign code reads can be seen by an audit hook alone"
    },
    "decides_by_a_name": {"studies.search": "rows are sorted by names that pages have extended"},
}


def offences(rule, tree) -> list[int]:
    "The lines of a tree in which a rule is broken."
    return sorted({node.lineno for node in ast.walk(tree) if RULES[rule](node)})


def allowing(rule, module) -> str:
    "The entry of `ALLOWED` that lets a module break a rule; '' without one."
    entries = ALLOWED.get(rule, {})
    return next((entry for entry in (module, module.partition(".")[0]) if entry in entries), "")


def tree_of(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", RULES)
def test_the_library_keeps_the_rule(rule):
    broken = {m: offences(rule, tree_of(m)) for m in MODULES if not allowing(rule, m)}
    assert not {module: lines for module, lines in broken.items() if lines}


@pytest.mark.parametrize("rule", RULES)
def test_who_may_break_a_rule_needs_to(rule):
    needing = {
        allowing(rule, m) for m in MODULES if allowing(rule, m) and offences(rule, tree_of(m))
    }
    assert needing == set(ALLOWED.get(rule, {}))
    assert all(reason for reason in ALLOWED.get(rule, {}).values())


@for_each(PAPER)
def test_pages_keep_all_rules(path):
    for cell in cells(path, "code"):
        broken = {rule: offences(rule, python(cell)) for rule in RULES}
        assert not {rule: lines for rule, lines in broken.items() if lines}, cell["id"]


# Each rule finds an offender that is made up, and leaves a well-behaved neighbour alone


MADE_UP = {
    "reads_a_record": {
        "share = run.record['discovery']['gate_entropy']": True,
        "losses = point['losses'] if r['checkpoints'] else {}": True,
        "kept = record.get('masks')": True,
        "share = measurement(run, 'discovery')['gate_entropy']": False,
        "table = page.record['seconds']": False,
    },
    "sets_the_environment": {
        "os.environ['HMOE_DATA'] = folder": True,
        "os.environ.setdefault('OMP_NUM_THREADS', '1')": True,
        "del os.environ['HMOE_DATA']": True,
        "folder = os.environ['HMOE_DATA']": False,
    },
    "seeds_everybody": {
        "np.random.seed(0)": True,
        "torch.manual_seed(seed)": True,
        "generator = torch.Generator().manual_seed(seed)": False,
        "random = np.random.default_rng(0)": False,
    },
    "hooks_everybody": {
        "torch.optim.optimizer.register_optimizer_step_pre_hook(match)": True,
        "register_module_forward_hook(look)": True,
        "optimizer.register_step_pre_hook(match)": False,
        "module.register_forward_hook(look)": False,
    },
    "parses_a_sentence": {
        "first = re.split('[.] ', verdict)[0]": True,
        "late = not part.plan.startswith('plan')": True,
        "counts = table.verdict.str.partition(' (')[0]": True,
        "first = first_sentence(verdict)": False,
        "lines = text.split('\\n')": False,
    },
    "decides_by_a_name": {
        "shown = study.endswith('-pacs')": True,
        "scale = 100 if 'accuracy' in metric else 1": True,
        "ours = rows[rows.dataset.str.startswith('Digit')]": True,
        "is_file = study.endswith('.toml')": False,
        "known = study in STUDIES": False,
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_what_it_forbids_and_nothing_else(rule):
    found = {code: bool(offences(rule, ast.parse(code))) for code in MADE_UP[rule]}
    assert found == MADE_UP[rule]
    assert set(found.values()) == {True, False}


# Parts import downwards, also inside functions


def parts_imported(module, tree) -> set[str]:
    "The parts of the library that a module imports, at its top or in a function."
    here, found = module.partition(".")[0], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            inside = (node.module or "").removeprefix("hmoe_repro").lstrip(".")
            if node.level == 1:
                found.add(here)
            elif node.level == 2 or (node.module or "").startswith("hmoe_repro"):
                found |= {inside.partition(".")[0]} if inside else {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            ours = [a.name.split(".") for a in node.names if a.name.startswith("hmoe_repro.")]
            found |= {names[1] for names in ours}
    return found & set(PARTS)


def test_no_part_imports_a_later_one_not_even_in_a_function():
    place = {part: i for i, part in enumerate(PARTS)}
    upwards = {}
    for module in MODULES:
        part = module.partition(".")[0]
        if part in place:
            later = {p for p in parts_imported(module, tree_of(module)) if place[p] > place[part]}
            upwards |= {module: later} if later else {}
    assert not upwards


def test_an_import_is_found_wherever_it_is():
    code = "from ..data import registry\ndef f():\n    from hmoe_repro.report.page import Page\n"
    code += "import hmoe_repro.cli.app\nfrom .base import ERM\nfrom hmoe_repro import apps"
    found = parts_imported("algorithms.gmoe", ast.parse(code))
    assert found == {"data", "report", "cli", "algorithms", "apps"}


def public_definitions(path):
    "Names that a module defines for others: functions, classes and constants without '_'."
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def test_no_public_name_stands_in_two_modules():
    modules = {}
    for path in sorted((ROOT / "hmoe_repro").rglob("*.py")):
        if path.name not in ("__init__.py", "_modidx.py"):
            for name in set(public_definitions(path)):
                modules.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    assert modules["RunConfig"] == ["hmoe_repro/training/run_config.py"]
    assert not {name: places for name, places in modules.items() if len(places) > 1}
