"""All algorithms together: the searches of DomainBed, settings that fit a short run, and the runs
of Table 1 on the embedded digits."""

import re
import tomllib

import invented
import numpy as np
import pandas as pd
import pytest

from hmoe_repro.algorithms import FAMILIES, algorithm_names, describe_algorithm, get_algorithm
from hmoe_repro.algorithms.hparams import draw_hparams, merge_hparams, with_network
from hmoe_repro.analysis.results import frame_of, results
from hmoe_repro.analysis.tables import best_hparams, settings_toml
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_hash
from hmoe_repro.core.toml import package_toml
from hmoe_repro.studies.artefacts import ARTEFACTS
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.studies.study_file import STUDIES, read_study
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run_config import RunConfig

# GMoE, its twin and DMG are of other papers, on networks of their own. Four families and the
# algorithms in LATER came later, with studies of their own or none.
OTHERS = ("gmoe", "dmg", "sharpness", "style", "generative", "self_supervised")
LATER = ("RIDG", "LFME", "PCL", "DIAL", "GMDG", "iDAG")
TABLE_1 = tuple(n for n, family in FAMILIES.items() if family not in OTHERS and n not in LATER)
POWER = lambda low, high, base=10: lambda r: base ** r.uniform(low, high)
SHARED = {
    28: {"lr": POWER(-4.5, -2.5), "batch_size": lambda r: int(2 ** r.uniform(3, 9))},
    224: {
        "lr": POWER(-5, -3.5),
        "batch_size": lambda r: int(2 ** r.uniform(3, 5.5)),
        "weight_decay": POWER(-6, -2),
        "resnet_dropout": lambda r: r.choice([0.0, 0.1, 0.5]),
    },
}
IRM = {"irm_lambda": POWER(-1, 5), "irm_penalty_anneal_iters": lambda r: int(10 ** r.uniform(0, 4))}
ADVERSARY = {
    "lambda": POWER(-2, 2),
    "lr_g": POWER(-4.5, -2.5),
    "lr_d": POWER(-4.5, -2.5),
    "weight_decay_d": POWER(-6, -2),
    "beta1": lambda r: r.choice([0.0, 0.5]),
    "d_steps_per_g_step": lambda r: int(2 ** r.uniform(0, 3)),
    "grad_penalty": POWER(-2, 1),
    "mlp_width": lambda r: int(2 ** r.uniform(6, 10)),
    "mlp_depth": lambda r: int(r.choice([3, 4, 5])),
    "mlp_dropout": lambda r: r.choice([0.0, 0.1, 0.5]),
}
OWN = {
    "IRM": IRM,
    "VREx": {name.replace("irm", "vrex"): draw for name, draw in IRM.items()},
    "GroupDRO": {"groupdro_eta": POWER(-3, -1)},
    "Mixup": {"mixup_alpha": POWER(-1, 1)},
    "MLDG": {"mldg_beta": POWER(-1, 1), "n_meta_test": lambda r: int(r.choice([1, 2]))},
    "CORAL": {"mmd_gamma": POWER(-1, 1)},
    "MMD": {"mmd_gamma": POWER(-1, 1)},
    "DANN": ADVERSARY,
    "CDANN": ADVERSARY,
    "MTL": {"mtl_ema": lambda r: r.choice([0.5, 0.9, 0.99, 1.0])},
    "RSC": {
        "rsc_f_drop_factor": lambda r: r.uniform(0, 0.5),
        "rsc_b_drop_factor": lambda r: r.uniform(0, 0.5),
    },
    "SagNet": {"sag_w_adv": POWER(-2, 1)},
    "Fish": {"meta_lr": lambda r: r.choice([0.05, 0.1, 0.5])},
    "Fishr": {
        "lambda": POWER(1, 4),
        "penalty_anneal_iters": lambda r: int(r.uniform(0, 5000)),
        "ema": lambda r: r.uniform(0.90, 0.99),
    },
    "ERM": {},
    "ARM": {},
}
LARGE = {
    "DANN": {"lr_g": POWER(-5, -3.5), "lr_d": POWER(-5, -3.5), "weight_decay_g": POWER(-6, -2)},
    "ARM": {"batch_size": lambda r: 8},
}
LARGE["CDANN"] = LARGE["DANN"]


@pytest.mark.parametrize("resolution", [28, 224])
@pytest.mark.parametrize("name", OWN)
def test_a_random_search_draws_what_domainbed_draws(name, resolution):
    declared = with_network(get_algorithm(name).HPARAMS, "resnet18")
    expected = SHARED[resolution] | OWN[name] | (LARGE.get(name, {}) if resolution == 224 else {})
    for seed in (1, 2, 19):
        drawn = draw_hparams(declared, seed, 3, resolution)
        assert drawn == {
            h: draw(np.random.RandomState(seed_hash(seed_hash(seed, 3), h)))
            for h, draw in expected.items()
        }


@pytest.mark.parametrize("name", [name for name in FAMILIES])
def test_what_is_drawn_can_be_set(name):
    declared = get_algorithm(name).HPARAMS
    for resolution in (28, 224):
        exist = merge_hparams(declared, {"network": "resnet18"}, resolution)
        drawn = {
            h: value for h, value in draw_hparams(declared, 5, 0, resolution).items() if h in exist
        }
        merged = merge_hparams(declared, {"network": "resnet18"} | drawn, resolution)
        assert {h: merged[h] for h in drawn} == drawn


# The list in DomainBed's algorithms.py
DOMAINBED = """
    ERM ERMPlusPlus Fish IRM GroupDRO Mixup MLDG CORAL MMD DANN CDANN MTL SagNet ARM VREx RSC SD
    ANDMask SANDMask IGA SelfReg Fishr TRM IB_ERM IB_IRM CAD CondCAD Transfer CausIRL_CORAL
    CausIRL_MMD EQRM RDM ADRMX URM
""".split()


def test_every_algorithm_of_domainbed_is_here_under_both_spellings():
    ours = [get_algorithm(name).name for name in DOMAINBED]
    assert len(set(ours)) == 34
    assert set(ours) <= set(algorithm_names())
    made = [
        make_config(name, "DigitDomainsTiny", ["sketch"], network="small_cnn")
        for name in ("IB_ERM", "IB-ERM")
    ]
    assert made[0] == made[1]
    assert made[0].algorithm == "IB-ERM"


def test_the_registry_says_everything_of_everyone():
    rows = [describe_algorithm(name) for name in algorithm_names()]
    assert all(
        row["paper"] and row["family"] and row["domain labels"] in ("needed", "not needed")
        for row in rows
    )
    own = {row["name"]: row["hyper-parameters"] for row in rows}
    assert (
        own["Fishr"] == "lambda=1000 [10^U(1, 4)]; ema=0.95 [U(0.9, 0.99)]; "
        "penalty_anneal_iters=1500 [floor U(0, 5000)]"
    )
    assert own["ERM"] == ""
    assert "search" not in own["ARM"]
    assert own["ARM"].startswith("batch_size=64 / 8 [floor 2^U(3, 9) / one of 8]")


def pieces(profile, which="table1"):
    "The runs of Table 1, or of its search, in all its pieces."
    names = (f"{profile}-{which}", f"{profile}-{which}-2")
    return [config for name in names if name in STUDIES for config in study_configs(name)]


def test_every_algorithm_has_settings_that_fit_a_short_run():
    configs = pieces("quick")
    assert {s.algorithm for s in configs} == set(TABLE_1)
    steps, checkpoints = (
        configs[0].steps,
        len(range(0, configs[0].steps, configs[0].checkpoint_frequency)),
    )
    for config in configs:
        h = config.hparams
        waiting = {
            value
            for name, value in h.items()
            if name.endswith("_iters") or name in ("iters", "sma_start")
        }
        assert waiting <= {250}, config.algorithm
        assert 250 < steps / 2, config.algorithm
        assert h.get("n_tolerance", 0) + h.get("n_converge", 0) < checkpoints
        assert h["batch_size"] == 16
        assert h["lr"] == 0.05 or config.algorithm != "MetaReg"


@pytest.mark.parametrize("profile", ["smoke", "quick"])
def test_table_1_has_every_algorithm_at_one_length(profile):
    configs, (digits,) = pieces(profile), read_study(f"{profile}-digits").runs
    assert {s.steps for s in configs} == {digits.steps}
    cells = len(TABLE_1) * len(digits.seeds) * len(digits.test_domains)
    assert len({s.run_id for s in configs}) == len(configs) == cells
    assert {s.algorithm for s in configs} == set(TABLE_1)
    assert {s.algorithm for s in configs if s.sampler == "pooled"} == {"Aggregate"}
    assert profile in ARTEFACTS["digits_table1"].optional


def test_the_table_trains_on_fresh_seeds_what_its_search_settled_on():
    configs = pieces("quick")
    tried = pieces("quick", "table1-search")
    assert not {s.trial_seed for s in tried} & {s.trial_seed for s in configs}
    assert {s.steps for s in tried} == {s.steps for s in configs}
    budget = {(s.algorithm, s.test_domains, s.hparams_seed) for s in tried}
    assert len(budget) == len(tried) == 4 * 4 * (len(TABLE_1) - 3)
    settled = best_hparams(results("quick-table1-search"))
    start = {(s.algorithm, *s.test_domains): s.hparams for s in tried if not s.hparams_seed}
    due = {
        (row.algorithm, row.test_domain): start[row.algorithm, row.test_domain] | row.changed
        for row in settled.itertuples()
    }
    assert len(due) == 4 * (len(TABLE_1) - 3)
    for config in configs:
        if config.algorithm not in ("Aggregate", "Multi-Headed", "MetaReg"):
            assert config.hparams == due[config.algorithm, config.test_domains[0]], str(config)


@pytest.mark.parametrize("study", ["sharpness", "mixing", "newer"])
def test_later_rows_train_on_fresh_seeds_what_their_search_settled_on(study):
    configs = study_configs(f"quick-{study}")
    tried = study_configs(f"quick-{study}-search")
    assert not {s.trial_seed for s in tried} & {s.trial_seed for s in configs}
    start = {(s.algorithm, *s.test_domains): s.hparams for s in tried if not s.hparams_seed}
    settled = best_hparams(results(f"quick-{study}-search"))
    found = {(s.algorithm, *s.test_domains): s.hparams for s in configs}
    assert len(settled) == len(start) > 20
    for row in settled.itertuples():
        key = row.algorithm, row.test_domain
        assert found[key] == start[key] | row.changed, key


@pytest.mark.parametrize("study", ["sharpness", "mixing", "newer"])
def test_the_choice_of_a_search_is_written_as_the_study_that_trains_it(study):
    committed = package_toml(f"study_files/quick-{study}.toml")["runs"]
    of_erm = best_hparams(results("quick-table1-search")).query("algorithm == 'ERM'")
    joined = pd.concat([of_erm, best_hparams(results(f"quick-{study}-search"))])
    assert tomllib.loads(settings_toml(joined))["runs"] == committed


def test_written_settings_survive_names_texts_and_several_kinds_of_values():
    values = {"lr": 1e-05, "batch_size": 16, "weights": 'a "b"', "amp": True}
    many = values | {f"weight_of_the_loss_{number}": 0.1 for number in range(5)}
    rows = [
        ("SAM+CORAL", "photo", values),
        ("SAM+IRM", "photo", many),
        ("ERM++", "photo", {}),
        ("ERM", "a b", {"lr": 0.1}),
    ]
    written = settings_toml(pd.DataFrame(rows, columns=["algorithm", "test_domain", "changed"]))
    assert max(map(len, written.splitlines())) <= 100
    assert tomllib.loads(written)["runs"] == [
        {"test_domains": ["a b"], "hparams": {"ERM": {"lr": 0.1}}},
        {"test_domains": ["photo"], "hparams": {"SAM+CORAL": values, "SAM+IRM": many}},
    ]


RATES = (0.003, 0.0012345678, 0.007)
VALIDATED = {  # by hand: what draws 0, 1 and 2 reach on validation images
    ("ERM", "photo"): {"default": (0.80, 0.90, 0.85)},
    ("ERM", "sketch"): {"default": (0.90, 0.70, 0.80)},
    ("HMOE-DN", "photo"): {"mix": (0.60, 0.65, 0.70), "max": (0.60, 0.95, 0.10)},
    ("HMOE-DN", "sketch"): {"mix": (0.60, 0.65, 0.50), "max": (0.95, 0.10, 0.10)},
}


def searched(seed=3):
    "The invented records of a search with one checkpoint a run."
    found = []
    for (algorithm, held_out), reached in VALIDATED.items():
        for draw, rate in enumerate(RATES):
            made = invented.record(algorithm, held_out, seed, np.random.default_rng(0), lr=rate)
            made["config"]["hparams_seed"] = draw
            made["run_id"] = RunConfig.from_dict(made["config"]).run_id
            values = {mode: reached[mode][draw] for mode in reached}
            seen = {d: {"out": values} for d in invented.DOMAINS if d != held_out}
            seen[held_out] = {"in": dict.fromkeys(values, 0.5)}
            made["checkpoints"] = [{"step": 0, "losses": {}, "accuracies": seen}]
            chosen = {"step": 0, "test_accuracy": 0.5}
            made["selected"] = {m: chosen | {"validation_accuracy": v} for m, v in values.items()}
            found.append(made)
    return found


def test_a_search_settles_by_hand_computed_validation_for_each_test_domain():
    settled = best_hparams(frame_of(searched())).set_index(["algorithm", "test_domain"])
    assert settled.draw.to_dict() == {
        ("ERM", "photo"): 1,
        ("ERM", "sketch"): 0,
        ("HMOE-DN", "photo"): 2,
        ("HMOE-DN", "sketch"): 1,
    }
    assert settled.validation.tolist() == pytest.approx([90, 90, 70, 65])
    assert settled.default.tolist() == pytest.approx([80, 90, 60, 60])
    assert settled.changed.tolist() == [{"lr": 0.001235}, {}, {"lr": 0.007}, {"lr": 0.001235}]


def test_a_search_that_cannot_be_settled_is_refused():
    with pytest.raises(HmoeError, match="not finished, missing: ERM on photo.*draw 0"):
        best_hparams(frame_of(searched()[1:]))
    with pytest.raises(HmoeError, match="several trial seeds"):
        best_hparams(frame_of(searched() + searched(seed=4)))


def test_an_algorithm_of_every_family_trains_to_a_record(tmp_path):
    from hmoe_repro.training.run import run
    from hmoe_repro.training.store import RunStore

    configs = {s.algorithm: s for s in study_configs("smoke-table1")}
    benchmark = read_study("smoke-digits").runs[0].algorithms
    for name in {FAMILIES[name]: name for name in TABLE_1 if name not in benchmark}.values():
        record = run(configs[name], RunStore(tmp_path))
        assert record["status"] == "complete", record["reason"]
        assert record["selected"]["default"]["test_accuracy"] >= 0, record["reason"]


def test_the_file_shown_in_the_notebook_is_short_and_becomes_a_row(
    root, tmp_path, monkeypatch, own_names
):
    import nbformat

    from hmoe_repro.studies.search import only_algorithms, select_by_rule
    from hmoe_repro.training.run import run
    from hmoe_repro.training.store import RunStore

    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    shown = "\n".join(
        cell.source
        for cell in nbformat.read(root / "nbs/04_algorithms/03_base.ipynb", 4).cells
        if cell.cell_type == "markdown"
    )
    (file,) = re.findall(r"```python\n(.*?)```", shown, re.S)
    assert len(file.strip().splitlines()) <= 15
    (tmp_path / "mine.py").write_text(file)
    configs = only_algorithms(
        study_configs("smoke-table1"), [f"{tmp_path / 'mine.py'}:Mine", "ERM"]
    )
    mine, erm = ([s for s in configs if s.algorithm == name] for name in ("Mine (mine.py)", "ERM"))
    assert [(s.test_domains, s.trial_seed, s.steps, s.network) for s in mine] == [
        (s.test_domains, s.trial_seed, s.steps, s.network) for s in erm
    ]
    assert mine[0].hparams == erm[0].hparams | {"hardness": 0.5}
    assert mine[0].algorithm_source
    table, missing = select_by_rule([run(configs, RunStore()) for configs in (mine[0], erm[0])])
    assert list(table.algorithm) == ["ERM", "Mine (mine.py)"]
    assert not missing
