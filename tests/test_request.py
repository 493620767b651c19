"""From a request to a specification: defaults, checks, and what belongs to the identity."""

import math

import pytest
import torch

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.base import SHARED_HPARAMS
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import random_state, seed_hash
from hmoe_repro.data.registry import DATASETS, load_dataset
from hmoe_repro.training import planning
from hmoe_repro.training.model import build_algorithm
from hmoe_repro.training.planning import data_seed, make_config, make_toy_config, resolve
from hmoe_repro.training.protocols import run_seed_of
from hmoe_repro.training.run_config import RunOptions
from hmoe_repro.training.trainer import Trainer


def test_portable_arithmetic_is_not_promised_of_compiled_code():
    given = dict(
        algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["photo"], network="small_cnn"
    )
    with pytest.raises(HmoeError, match="exclude each other.*Fix: precision bf16, or native"):
        make_config(**given, precision="bf16-compile", determinism="portable")
    assert make_config(**given, precision="bf16", determinism="portable").determinism == "portable"


def test_spec_fills_in_defaults_and_checks(monkeypatch):
    config = make_config(
        "HMOE-ND", "DigitDomainsTiny", ["photo"], hparams={"lr": 1}, network="small_cnn", steps=5
    )
    assert config.hparams["lr"] == 1.0
    assert config.hparams["num_experts"] == 5
    assert "network" not in config.hparams
    assert config.network == "small_cnn"
    assert (
        config.run_id
        == make_config(
            "HMOE-ND",
            "DigitDomainsTiny",
            ("photo",),
            hparams={"lr": 1.0, "eps": 1e-6},
            network="small_cnn",
            steps=5,
        ).run_id
    )
    for wrong in (
        dict(algorithm="GMoEE"),
        dict(dataset="PACS?"),
        dict(test_domains=["moon"]),
        dict(hparams={"lrr": 1}),
        dict(steps=0),
        dict(sampler="x"),
        dict(evaluate="some"),
    ):
        with pytest.raises(HmoeError):
            make_config(
                **(
                    dict(algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["photo"])
                    | wrong
                )
            )
    with pytest.raises(HmoeError, match="toy"):
        make_toy_config(lambda_x=1)


def test_an_algorithm_of_ones_own_is_part_of_the_identity():
    from hmoe_repro.algorithms.base import ALGORITHMS, ERM, register

    def short_config(make):
        register("Mine", paper="-", needs_domain_labels=False)(make())
        try:
            return make_config("Mine", "DigitDomainsTiny", ["photo"], network="small_cnn")
        finally:
            del ALGORITHMS["Mine"]

    def one():
        class Mine(ERM):
            def loss(self, minibatches):
                return {"loss": super().loss(minibatches)["loss"] * 2}

        return Mine

    def two():
        class Mine(ERM):
            def loss(self, minibatches):
                return {"loss": super().loss(minibatches)["loss"] * 3}

        return Mine

    assert short_config(one).run_id == short_config(one).run_id != short_config(two).run_id
    assert short_config(one).algorithm_source
    assert make_config("ERM", "DigitDomainsTiny", ["photo"]).algorithm_source is None


def test_options_resolve_to_what_one_call_makes():
    given = dict(network="small_cnn", steps=7, hparams_seed=2, evaluate="all:9")
    who = dict(algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["photo"], trial_seed=1)
    options = RunOptions(**who, hparams={"batch_size": 8}, **given)
    config = make_config("ERM", "DigitDomainsTiny", ["photo"], 1, {"batch_size": 8}, **given)
    assert resolve(options) == config
    assert config.hparams["batch_size"] == 8
    assert resolve(options.replace(steps=8)) == config.replace(steps=8)
    with pytest.raises(HmoeError, match="stepps"):
        make_config("ERM", "DigitDomainsTiny", ["photo"], stepps=1)


def test_test_domains_stand_in_the_order_of_the_data_set():
    names = DATASETS["DigitDomainsTiny"].domain_names
    config = make_config("ERM", "DigitDomainsTiny", [names[2], names[0]], network="small_cnn")
    assert config.test_domains == (names[0], names[2])


def test_generated_data_follow_the_trial_unless_parity_is_asked_for():
    run = RunOptions(algorithm="ERM", dataset="DigitDomains", test_domains=["sketch"], trial_seed=4)
    other = run.replace(algorithm="IRM")
    assert data_seed(run) == data_seed(other) == 4
    assert data_seed(run.replace(domainbed_compat=True)) != data_seed(
        other.replace(domainbed_compat=True)
    )
    with pytest.raises(HmoeError, match="Valid: negative, photo, plain, sketch"):
        data_seed(run.replace(test_domains=["foto"]))


# As DomainBed

# The names that DomainBed spells otherwise.
SPELLED = {"ERM++": "ERMPlusPlus", "IB-ERM": "IB_ERM", "IB-IRM": "IB_IRM"}
SPELLED |= {"CausIRL-CORAL": "CausIRL_CORAL", "CausIRL-MMD": "CausIRL_MMD"}


def tiny(algorithm, **options):
    given = {"network": "small_cnn"} | options
    return make_config(algorithm, "DigitDomainsTiny", ["photo"], **given)


def test_the_run_option_sets_the_hyper_parameter_of_its_name():
    "Of every algorithm that DomainBed has, and of SWAD, whose code is a fork of it."
    declare = [n for n in algorithm_names() if "domainbed_compat" in get_algorithm(n).HPARAMS]
    assert {*declare} >= {"TRM", "EQRM", "ADRMX", "Transfer", "ERM++", "MLDG", "MTL", "ARM"}
    assert {*declare} >= {"DANN", "CDANN", "SelfReg", "SWAD"}
    set_by_option = {
        n for n in declare if tiny(n, domainbed_compat=True).hparams.get("domainbed_compat")
    }
    # DomainBed has neither: theirs is the released code of DMG and of PCL
    assert {*declare} - set_by_option == {"Multi-Headed", "PCL"}
    for name in declare:
        assert not tiny(name).hparams.get("domainbed_compat", False)
        asked = {"hparams": {"domainbed_compat": False}, "domainbed_compat": True}
        assert not tiny(name, **asked).hparams.get("domainbed_compat", False)
    assert "n_meta_test" in tiny("MLDG", domainbed_compat=True).hparams


def test_selfregs_new_hyper_parameter_renames_no_published_run():
    config = tiny("SelfReg")
    assert "domainbed_compat" not in config.hparams
    assert (
        build_algorithm(config, load_dataset("DigitDomainsTiny")).hparams["domainbed_compat"]
        is False
    )
    compat = tiny("SelfReg", domainbed_compat=True)
    built = build_algorithm(compat, load_dataset("DigitDomainsTiny"))
    assert built.fixed == ("projection.",)
    assert compat.run_id != config.run_id


@pytest.mark.parametrize("ours", [*SPELLED, "ERM", "HMOE-DN"])
def test_seeds_hash_domainbeds_spelling_with_compat_alone(ours):
    theirs = SPELLED.get(ours, ours)
    run = RunOptions(
        algorithm=ours,
        dataset="DigitDomains",
        test_domains=["sketch"],
        trial_seed=4,
        hparams_seed=7,
    )
    compat = run.replace(domainbed_compat=True)
    assert run_seed_of(run, [3]) == seed_hash("DigitDomains", ours, [3], 7, 4)
    for name in {ours, theirs, f"domainbed:{theirs}"}:
        expected = seed_hash("DigitDomains", theirs, [3], 7, 4)
        assert run_seed_of(compat.replace(algorithm=name), [3]) == expected
        assert data_seed(compat.replace(algorithm=name, restart=2)) == expected


def test_two_algorithms_can_share_weights_and_batches():
    "The name of an algorithm is part of its seed, unless `seed_as` gives another one."
    data = load_dataset("DigitDomainsTiny")

    def begun(**options):
        trainer = Trainer(tiny(hparams={"batch_size": 4}, **options), data, "cpu")
        return next(trainer.algorithm.parameters()).detach(), trainer.batches.next()

    erm = begun(algorithm="ERM")
    for options, shared in (({}, False), ({"seed_as": "ERM"}, True)):
        weights, batches = begun(algorithm="CORAL", **options)
        assert torch.equal(weights, erm[0]) == shared
        same = [torch.equal(x, other) for (x, _), (other, _) in zip(batches, erm[1])]
        assert all(same) == shared
    assert tiny("CORAL", seed_as="ERM").run_id != tiny("CORAL").run_id
    assert tiny("CORAL", seed_as="ERMPlusPlus") == tiny("CORAL", seed_as="ERM++")
    with pytest.raises(HmoeError, match="unknown algorithm 'EMR'.* Valid: ERM, ") as caught:
        tiny("CORAL", seed_as="EMR")
    assert caught.value.setting == "seed_as"


# Settings


@pytest.mark.parametrize(
    "algorithm, hparams, settings, said",
    [
        (
            "GMoE",
            {"drop_path": 2},
            {},
            "hyper-parameter drop_path must be below 1, got 2. Fix: set drop_path",
        ),
        ("DANN", {"mlp_depth": 1}, {}, "mlp_depth must be at least 2, got 1"),
        ("DANN", {"beta1": 1}, {}, "beta1 must be below 1"),
        ("SWAD", {"n_converge": 9}, {}, "n_converge = 9 must be .* less than n_tolerance = 6"),
        ("Mixup", {"mixup_alpha": 0}, {}, "mixup_alpha must be above 0"),
        ("MTL", {"mtl_ema": 2}, {}, "mtl_ema must be at most 1"),
        ("HMOE-DN", {"mix": "x"}, {}, "unknown mix 'x'. Valid: logits, prob"),
        ("HMOE-DN", {"d2v_encoder": "image"}, {"resolution": 8}, "needs 16 pixels a side"),
        ("DMG", {"places": ["fc9"]}, {}, "place for masks in the network mnist_cnn 'fc9'"),
        ("ERM", {"freeze_bn": "x", "weights": "random"}, {"network": "resnet18"}, "freeze_bn 'x'"),
        ("ERM", {"weights": "random"}, {"network": "timm:vit_none"}, "timm has no network 'vit_n"),
        ("ERM", {"weights": "random"}, {"network": "resnet18", "resolution": 16}, "at least 32"),
        ("ERM", {}, {"checkpoint_frequency": 0}, "checkpoint_frequency must be greater"),
        ("ERM", {}, {"steps": 1.5}, "steps must be a valid integer, got 1.5"),
        ("ERM", {}, {"resolution": 0}, "resolution must be greater than"),
    ],
)
def test_what_training_would_refuse_is_refused_in_planning(algorithm, hparams, settings, said):
    with pytest.raises(HmoeError, match=said) as caught:
        make_config(algorithm, "DigitDomainsTiny", ["photo"], 0, hparams, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", algorithm_names())
def test_any_value_is_refused_in_planning_or_can_be_built(name):
    data, network = load_dataset("DigitDomainsTiny"), {"network": "small_cnn"}
    before = random_state()
    for setting, declared in get_algorithm(name).HPARAMS.items():
        if setting in ("network", "weights") or SHARED_HPARAMS.get(setting) is declared:
            if name not in ("ERM", "GMoE"):
                continue
        needs, values = declared.requires or ("", ())
        for value in (-1, 0, 2, 1e9, 10**9, math.nan, math.inf, "x"):
            given = {setting: value} | (
                {} if needs in ("", "network", setting) else {needs: [*values][0]}
            )
            where = {} if name in ("GMoE", "ERM-ViT") or needs == "network" else network
            try:
                config = make_config(name, "DigitDomainsTiny", ["photo"], 0, given, **where)
            except HmoeError as error:
                assert any(said in str(error) for said in ("Fix: ", "Valid", "It means: "))
                continue
            assert value == value, f"{setting}={value}"
            assert value not in (math.inf, "x"), f"{setting}={value}"
            with torch.device("meta"):  # no memory for what is large
                build_algorithm(config, data)
    after = random_state()
    assert torch.equal(before.pop("torch"), after.pop("torch"))
    assert str(before) == str(after)


def test_what_was_built_in_planning_is_not_built_again(monkeypatch):
    built = []
    erm = get_algorithm("ERM")
    monkeypatch.setattr(planning, "_CONSTRUCTIBLE", set())
    monkeypatch.setattr(erm, "__init__", lambda self, *given: built.append(given))
    for lr in (0.1, 0.2):
        for seed in (0, 1):
            make_config("ERM", "DigitDomainsTiny", ["photo"], seed, {"lr": lr}, network="small_cnn")
    assert len(built) == 1
    assert built[0][:3] == ((3, 16, 16), 10, 3)
