"""Defaults and searches of the shared hyper-parameters against DomainBed's registry, written out
here a second time."""

import json

import numpy as np
import pytest

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.base import SHARED_HPARAMS
from hmoe_repro.algorithms.hparams import (
    draw_hparams,
    merge_hparams,
    search_distributions,
    with_network,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_hash
from hmoe_repro.networks.search_space import Choice, HParam, LogUniform, Uniform, as_text
from hmoe_repro.training.planning import make_config

LARGE_NETWORK = {"network": "resnet50", "weights": "random"}
SHARED = with_network(SHARED_HPARAMS, "resnet50")
DEFAULTS = {
    "small": {"lr": 1e-3, "batch_size": 64, "weight_decay": 0.0, "nonlinear_classifier": False},
    "large": {
        "lr": 5e-5,
        "batch_size": 32,
        "weight_decay": 0.0,
        "resnet_dropout": 0.0,
        "nonlinear_classifier": False,
    },
}
SMALL = {
    "lr": lambda r: 10 ** r.uniform(-4.5, -2.5),
    "batch_size": lambda r: int(2 ** r.uniform(3, 9)),
}
PHOTOGRAPHS = {
    "lr": lambda r: 10 ** r.uniform(-5, -3.5),
    "batch_size": lambda r: int(2 ** r.uniform(3, 5.5)),
    "weight_decay": lambda r: 10 ** r.uniform(-6, -2),
    "resnet_dropout": lambda r: r.choice([0.0, 0.1, 0.5]),
}
REGISTRY = {
    "ColoredMNIST": (28, SMALL),
    "RotatedMNIST": (28, SMALL),
    **{
        name: (224, PHOTOGRAPHS)
        for name in ("VLCS", "PACS", "OfficeHome", "TerraIncognita", "SVIRO")
    },
    "DomainNet": (224, PHOTOGRAPHS | {"batch_size": lambda r: int(2 ** r.uniform(3, 5))}),
}


def test_defaults_are_those_of_domainbed():
    for size, resolution, given in (("small", 28, {}), ("large", 224, LARGE_NETWORK)):
        merged = merge_hparams(SHARED_HPARAMS, given, resolution)
        assert {name: merged[name] for name in DEFAULTS[size]} == DEFAULTS[size]
        assert set(merged) - set(DEFAULTS[size]) <= {"network", "weights", "freeze_bn"}, (
            "a shared hyper-parameter that DomainBed does not have"
        )


@pytest.mark.parametrize("dataset", REGISTRY)
def test_draws_are_those_of_domainbed(dataset):
    resolution, registry = REGISTRY[dataset]
    for hparams_seed in range(1, 21):
        for trial_seed in range(3):
            seed = seed_hash(hparams_seed, trial_seed)
            expected = {
                name: draw(np.random.RandomState(seed_hash(seed, name)))
                for name, draw in registry.items()
            }
            assert draw_hparams(SHARED, hparams_seed, trial_seed, resolution, dataset) == expected


def test_bounds_are_reached_and_kept():
    drawn = [
        draw_hparams(SHARED_HPARAMS, h, 0, 224, "DomainNet")["batch_size"] for h in range(1, 400)
    ]
    assert min(drawn) == 8
    assert max(drawn) == 31
    assert (
        max(draw_hparams(SHARED_HPARAMS, h, 0, 224, "PACS")["batch_size"] for h in range(1, 400))
        > 40
    )


@pytest.mark.parametrize("name", [n for n in algorithm_names() if n.startswith("HMOE")])
def test_hmoe_searches_what_all_share_and_nothing_else(name):
    for dataset, (resolution, _) in REGISTRY.items():
        assert search_distributions(
            get_algorithm(name).HPARAMS, resolution, dataset
        ) == search_distributions(SHARED_HPARAMS, resolution, dataset)


PENALTY = {"lambda": "10^U(-1, 5)", "penalty_anneal_iters": "floor 10^U(0, 4)"}
ADVERSARY = {
    "lambda": "10^U(-2, 2)",
    "lr_g": "10^U(-4.5, -2.5)",
    "lr_d": "10^U(-4.5, -2.5)",
    "weight_decay_d": "10^U(-6, -2)",
    "beta1": "one of 0, 0.5",
    "d_steps_per_g_step": "floor 2^U(0, 3)",
    "grad_penalty": "10^U(-2, 1)",
    "mlp_width": "floor 2^U(6, 10)",
    "mlp_depth": "one of 3, 4, 5",
    "mlp_dropout": "one of 0, 0.1, 0.5",
}
BOTTLENECK = {
    "lmbda": "one of 0.0001, 0.001, 0.01, 0.1, 1, 10, 100",
    "temperature": "one of 0.05, 0.1",
}
OWN = {
    "IRM": {f"irm_{name}": search for name, search in PENALTY.items()},
    "VREx": {f"vrex_{name}": search for name, search in PENALTY.items()},
    "Fishr": {
        "lambda": "10^U(1, 4)",
        "ema": "U(0.9, 0.99)",
        "penalty_anneal_iters": "floor U(0, 5000)",
    },
    "CORAL": {"mmd_gamma": "10^U(-1, 1)"},
    "MMD": {"mmd_gamma": "10^U(-1, 1)"},
    "DANN": ADVERSARY,
    "CDANN": ADVERSARY,
    "MTL": {"mtl_ema": "one of 0.5, 0.9, 0.99, 1"},
    "Mixup": {"mixup_alpha": "10^U(-1, 1)"},
    "GroupDRO": {"groupdro_eta": "10^U(-3, -1)"},
    "RSC": {"rsc_f_drop_factor": "U(0, 0.5)", "rsc_b_drop_factor": "U(0, 0.5)"},
    "SagNet": {"sag_w_adv": "10^U(-2, 1)"},
    "MLDG": {"mldg_beta": "10^U(-1, 1)", "n_meta_test": "one of 1, 2"},
    "Fish": {"meta_lr": "one of 0.05, 0.1, 0.5"},
    "SD": {"sd_reg": "10^U(-5, -1)"},
    "ANDMask": {"tau": "U(0.5, 1)"},
    "SANDMask": {"tau": "U(0, 1)", "k": "10^U(-3, 5)"},
    "IGA": {"penalty": "10^U(1, 5)"},
    "IB-ERM": {f"ib_{name}": search for name, search in PENALTY.items()},
    "IB-IRM": {f"{kind}_{n}": search for kind in ("ib", "irm") for n, search in PENALTY.items()},
    "CAD": BOTTLENECK,
    "CondCAD": BOTTLENECK,
    "CausIRL-CORAL": {"mmd_gamma": "10^U(-1, 1)"},
    "CausIRL-MMD": {"mmd_gamma": "10^U(-1, 1)"},
    "EQRM": {
        "eqrm_quantile": "U(0.5, 0.99)",
        "eqrm_burnin_iters": "10^U(2.5, 3.5)",
        "eqrm_lr": "10^U(-7, -5)",
    },
    "RDM": {
        "rdm_lambda": "U(0.1, 10)",
        "rdm_penalty_anneal_iters": "floor U(800, 2700)",
        "variance_weight": "U(0.001, 0.007)",
        "rdm_lr": "U(8e-06, 2e-05)",
    },
    "TRM": {
        "cos_lambda": "10^U(-5, 0)",
        "iters": "floor 10^U(0, 4)",
        "groupdro_eta": "10^U(-3, -1)",
    },
    "Transfer": {
        "t_lambda": "10^U(-2, 1)",
        "delta": "U(0.1, 3)",
        "d_steps_per_g": "one of 1, 2, 5",
        "gda": "one of True",
        "lr_d": "10^U(-4.5, -2.5)",
    },
    "ADRMX": dict.fromkeys(("cnt_lambda", "dclf_lambda", "rmxd_lambda"), "one of 1")
    | {
        "lr": "one of 0.0005, 0.001, 0.002, 0.003",
        "disc_lambda": "one of 0.75",
        "d_steps_per_g_step": "one of 2",
        "beta1": "one of 0.5",
        "mlp_width": "one of 256",
        "mlp_depth": "one of 8, 9, 10",
        "mlp_dropout": "one of 0",
    },
    "ERM++": {"linear_lr": "10^U(-5, -3.5)"},
    **dict.fromkeys(("SAM", "GSAM", "DISAM"), {"rho": "one of 0.01, 0.02, 0.05, 0.1, 0.2, 0.5"}),
    "ASAM": {
        "rho": "one of 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, "
        "0.2, 0.5, 1, 2"
    },
    "SAGM": dict.fromkeys(("rho", "sagm_alpha"), "one of 0.01, 0.02, 0.05, 0.1"),
    "RIDG": {"ridg_reg": "10^U(-2, -1)", "ridg_momentum": "10^U(-4, -1)"},
    "LFME": {"lfe_reg": "10^U(-2, 1)"},
    **dict.fromkeys(("MixStyle", "EFDMix"), {"style_alpha": "one of 0.1, 0.2, 0.3"}),
    "CutMix": {"cutmix_alpha": "one of 0.1, 0.25, 0.5, 1, 2, 4"},
    "PCL": {"pcl_weight": "10^U(-1, 1)"},
    "DIAL": {
        "dial_gamma": "10^U(-2, 1)",
        "dial_steps": "one of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
        "dial_noise": "10^U(-5, -1)",
        "dial_epsilon": "10^U(-3, -2)",
    },
    "JiGen": dict.fromkeys(("jigsaw_weight", "jigsaw_whole"), "one of 0.7, 0.9"),
    "MatchDG": {"match_weight": "10^U(-2, 1)", "match_temperature": "10^U(-2, 0)"},
    "DIVA": {"class_weight": "10^U(2.5, 4.5)", "domain_weight": "10^U(2.3, 4.3)"},
    "HDUVA": {"class_weight": "10^U(2.5, 4.5)"},
    "GMDG": {"gmdg_shift": "one of 0.001, 0.01, 0.1", "gmdg_domain": "one of 0.01, 0.1, 0.2, 0.3"},
    "iDAG": dict.fromkeys(("dag_lambda1", "dag_lambda2"), "U(0.01, 1)")
    | dict.fromkeys(("dag_weight_nu", "dag_weight_mu"), "U(1, 2)")
    | {
        "dag_anneal_steps": "one of 200, 400, 600, 800",
        "dag_temperature": "U(0.01, 0.07)",
        "dag_ema": "U(0.99, 0.999)",
        "dag_rho_max": "10^U(1, 6)",
    },
    "IntraDomainMixup": {"mixup_alpha": "10^U(-1, 1)"},
    "URM": {
        "urm_adv_lambda": "U(0, 0.2)",
        "urm_discriminator_label_smoothing": "U(0, 0)",
        "urm_discriminator_hidden_layers": "one of 1, 2, 3",
        "urm_generator_output": "one of tanh, relu",
        "urm_discriminator_lr": "10^U(-5.5, -3.5)",
    },
}
FIXED = ("MetaReg", "Aggregate", "Multi-Headed", "DMG", "Aggregate-SGD")  # rates of their papers
LARGE = dict.fromkeys(
    ("DANN", "CDANN"),
    {"lr_g": "10^U(-5, -3.5)", "lr_d": "10^U(-5, -3.5)", "weight_decay_g": "10^U(-6, -2)"},
) | {
    "ARM": {"batch_size": "one of 8"},
    "RDM": {"batch_size": "floor U(70, 100)"},
    "ADRMX": {"lr": "one of 2e-05, 3e-05, 4e-05, 5e-05"},
    "URM": {"urm_discriminator_lr": "10^U(-6, -4.5)"},
}


@pytest.mark.parametrize("resolution, larger", [(28, {}), (224, LARGE)])
def test_an_algorithms_own_searches_are_those_of_domainbed(resolution, larger):
    text = lambda declared: {
        n: str(s) for n, s in search_distributions(declared, resolution).items()
    }
    names = [n for n in algorithm_names() if n not in FIXED]
    found = {name: text(with_network(get_algorithm(name).HPARAMS, "resnet50")) for name in names}
    own = {name: OWN.get(name, {}) | larger.get(name, {}) for name in names}
    assert found == {name: text(SHARED) | own[name] for name in names}


def test_rdm_has_settings_of_its_own_for_some_data_sets():
    declared = get_algorithm("RDM").HPARAMS
    names = ("rdm_lambda", "rdm_penalty_anneal_iters", "variance_weight", "rdm_lr", "batch_size")
    usual = {"PACS": (5.0, 1500, 0.004, 1.5e-5, 88), "VLCS": (5.0, 1500, 0.004, 1.5e-5, 88)}
    for dataset, expected in (
        usual
        | {
            "OfficeHome": (5.0, 1500, 0.0, 1.5e-5, 88),
            "TerraIncognita": (5.0, 1500, 0.0, 1.5e-5, 40),
            "DomainNet": (0.5, 2400, 0.0, 1.5e-5, 40),
        }
    ).items():
        merged = merge_hparams(declared, LARGE_NETWORK, 224, dataset)
        assert tuple(merged[name] for name in names) == expected, dataset
    drawn = {
        name: [str(search_distributions(declared, 224, dataset)[name]) for name in names]
        for name, dataset in (("net", "DomainNet"), ("terra", "TerraIncognita"), ("pacs", "PACS"))
    }
    assert drawn["net"] == [
        "U(0.1, 1)",
        "floor U(1500, 3000)",
        "one of 0",
        "U(8e-06, 2e-05)",
        "floor U(30, 60)",
    ]
    assert drawn["terra"][::2] == ["U(1, 10)", "one of 0", "floor U(30, 60)"]
    assert drawn["pacs"][0] == "U(1, 10)"
    assert drawn["pacs"][2] == "U(0.001, 0.007)"


def test_defaults_of_domainbed_that_ours_are_not():
    tau = lambda compat: merge_hparams(
        get_algorithm("SANDMask").HPARAMS, {}, domainbed_compat=compat
    )["tau"]
    assert (tau(False), tau(True)) == (0.5, 1.0)


def test_every_default_and_every_draw_has_the_declared_type_and_survives_json():
    for name in algorithm_names():
        declared = with_network(get_algorithm(name).HPARAMS)
        for resolution in (28, 224):
            drawn = draw_hparams(declared, 5, 1, resolution)
            given = LARGE_NETWORK if resolution == 224 else {}
            merged = merge_hparams(
                declared,
                {n: v for n, v in drawn.items() if n in merge_hparams(declared, given, resolution)}
                | given,
                resolution,
            )
            assert json.loads(json.dumps(merged)) == {
                n: list(v) if isinstance(v, tuple) else v for n, v in merged.items()
            }


def test_a_new_hyper_parameter_leaves_the_other_draws_alone():
    declared = {"lr": HParam(1e-3, "rate", search=LogUniform(-4.5, -2.5))}
    drawn = draw_hparams(declared, 3, 2)["lr"]
    generator = np.random.RandomState(seed_hash(seed_hash(3, 2), "lr"))
    assert drawn == 10 ** generator.uniform(-4.5, -2.5)
    with_more = draw_hparams(declared | {"new": HParam(0.0, "new", search=Uniform(0, 1))}, 3, 2)
    assert with_more["lr"] == drawn
    assert "new" in with_more
    assert draw_hparams(declared, 0, 2) == {}


def test_a_data_set_with_bounds_of_its_own_leaves_the_other_draws_alone():
    declared = {
        "a": HParam(0.0, "one", search=Uniform(0, 1)),
        "b": HParam(
            1, "two", search=LogUniform(0, 3, 2, integer=True), search_in=(("There", Choice((7,))),)
        ),
    }
    here, there = (
        draw_hparams(declared, 1, 0, 28, "Here"),
        draw_hparams(declared, 1, 0, 28, "There"),
    )
    assert here["a"] == there["a"]
    assert there["b"] == 7 != here["b"]
    assert draw_hparams(declared, 1, 0) == here


def test_the_order_in_which_test_domains_are_named_means_nothing():
    for domainbed_compat in (False, True):
        made = [
            make_config(
                "ERM",
                "ColoredDigits",
                domains,
                network="small_cnn",
                domainbed_compat=domainbed_compat,
            )
            for domains in (["-90%", "+90%"], ["+90%", "-90%"])
        ]
        assert made[0].run_id == made[1].run_id
        assert made[0].test_domains == ("+90%", "-90%")


@pytest.mark.parametrize(
    "setting, line",
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
    ],
)
def test_values_that_make_no_sense_are_refused_before_anything_trains(setting, line):
    with pytest.raises(HmoeError, match=line):
        merge_hparams(get_algorithm("IRM").HPARAMS, setting)


def test_arm_and_the_rest_refuse_batches_of_nothing():
    for name in algorithm_names():
        with pytest.raises(HmoeError, match="batch_size must be at least 1, got 0"):
            merge_hparams(get_algorithm(name).HPARAMS, {"batch_size": 0})
        with pytest.raises(HmoeError, match="lr must be at least 0"):
            merge_hparams(get_algorithm(name).HPARAMS, {"lr": -1.0})


def test_a_hyper_parameter_that_follows_another_is_written_down_as_what_it_is():
    declared = {
        "a": HParam(1.0, "one", large_image_default=2.0),
        "b": HParam(0.0, "two", follows="a"),
    }
    assert [
        merge_hparams(declared, given, size)["b"]
        for given, size in (({}, 28), ({}, 224), ({"a": 3}, 28), ({"b": 0}, 28))
    ] == [1.0, 2.0, 3.0, 0.0]
    assert merge_hparams(declared, merge_hparams(declared, {"a": 3.0})) == {"a": 3.0, "b": 3.0}


def test_two_options_leave_the_runs_without_them_as_they_were():
    plain = merge_hparams(get_algorithm("HMOE-DN").HPARAMS, {})
    assert not {"experts", "load_balance"} & plain.keys()
    given = {"experts": "hypernetwork", "load_balance": "cv2"}
    assert merge_hparams(get_algorithm("HMOE-DN").HPARAMS, given) == plain | {"load_balance": "cv2"}
    with pytest.raises(HmoeError, match="unknown experts 'heads'"):
        merge_hparams(get_algorithm("HMOE-DN").HPARAMS, {"experts": "heads"})


def test_a_draw_stays_below_the_number_of_training_domains():
    declared = {
        "n": HParam(2, "two", search=Choice((1, 2)), below_domains=True),
        "m": HParam(2, "free", search=Choice((1, 2))),
    }
    free = [draw_hparams(declared, seed, 0) for seed in range(1, 9)]
    assert {d["n"] for d in free} == {1, 2}
    assert [draw_hparams(declared, s, 0, num_domains=3) for s in range(1, 9)] == free
    assert [draw_hparams(declared, s, 0, num_domains=2) for s in range(1, 9)] == [
        d | {"n": 1} for d in free
    ]


def test_values_as_tables_print_them():
    assert [as_text(v) for v in (1e-3, 0.0, 64, True, "", "logits")] == [
        "0.001",
        "0",
        "64",
        "True",
        "''",
        "logits",
    ]
    assert str(Choice((0.0, 0.1, "pre"))) == "one of 0, 0.1, pre"
