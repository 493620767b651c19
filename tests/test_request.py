"""From a request to a specification: defaults, checks, and what belongs to the identity."""

import dataclasses

import pytest

from hmoe_repro.core import HmoeError
from hmoe_repro.data.known import DATASETS
from hmoe_repro.runs.request import RunRequest, data_seed, make_spec, make_toy_spec


def test_portable_arithmetic_is_not_promised_of_compiled_code():
    given = dict(
        algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["photo"], network="small_cnn"
    )
    with pytest.raises(HmoeError, match="exclude each other.*Fix: precision bf16, or native"):
        make_spec(**given, precision="bf16-compile", arithmetic="portable")
    assert make_spec(**given, precision="bf16", arithmetic="portable").arithmetic == "portable"


def test_spec_fills_in_defaults_and_checks(monkeypatch):
    spec = make_spec(
        "HMOE-ND", "DigitDomainsTiny", ["photo"], hparams={"lr": 1}, network="small_cnn", steps=5
    )
    assert (
        spec.hparams["lr"] == 1.0
        and spec.hparams["num_experts"] == 5
        and "network" not in spec.hparams
        and spec.network == "small_cnn"
    )
    assert (
        spec.run_id
        == make_spec(
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
            make_spec(
                **(
                    dict(algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["photo"])
                    | wrong
                )
            )
    with pytest.raises(HmoeError, match="toy"):
        make_toy_spec(lambda_x=1)


def test_an_algorithm_of_ones_own_is_part_of_the_identity():
    from hmoe_repro.algorithms.base import ALGORITHMS, ERM, register

    def spec(make):
        register("Mine", paper="-", needs_domain_labels=False)(make())
        try:
            return make_spec("Mine", "DigitDomainsTiny", ["photo"], network="small_cnn")
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

    assert spec(one).run_id == spec(one).run_id != spec(two).run_id and spec(one).algorithm_source
    assert make_spec("ERM", "DigitDomainsTiny", ["photo"]).algorithm_source is None


def test_a_request_resolves_to_what_one_call_makes():
    given = dict(network="small_cnn", steps=7, hparams_seed=2, evaluate="all:9")
    request = RunRequest("ERM", "DigitDomainsTiny", ["photo"], 1, {"batch_size": 8}, **given)
    spec = make_spec("ERM", "DigitDomainsTiny", ["photo"], 1, {"batch_size": 8}, **given)
    assert request.resolve() == spec and spec.hparams["batch_size"] == 8
    assert dataclasses.replace(request, steps=8).resolve() == dataclasses.replace(spec, steps=8)
    with pytest.raises(TypeError, match="stepps"):
        make_spec("ERM", "DigitDomainsTiny", ["photo"], stepps=1)


def test_test_domains_stand_in_the_order_of_the_data_set():
    names = DATASETS["DigitDomainsTiny"].domain_names
    spec = make_spec("ERM", "DigitDomainsTiny", [names[2], names[0]], network="small_cnn")
    assert spec.test_domains == (names[0], names[2])


def test_generated_data_follow_the_trial_unless_parity_is_asked_for():
    seeds = [data_seed(name, "DigitDomains", ["sketch"], 4) for name in ("ERM", "IRM")]
    parity = [data_seed(name, "DigitDomains", ["sketch"], 4, True) for name in ("ERM", "IRM")]
    assert seeds == [4, 4] and parity[0] != parity[1]
    with pytest.raises(HmoeError, match="Valid: negative, photo, plain, sketch"):
        data_seed("ERM", "DigitDomains", ["foto"], 4, True)
