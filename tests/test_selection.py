"""Three rules against a brute-force reading of DomainBed's definitions, ties, what they lack."""

import pytest
from test_domainbed import record

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training import selection
from hmoe_repro.training.selection import (
    RULES,
    select_model,
    training_domain_validation,
    validation_accuracy,
)


def constant(value, **config):
    made = record(["sketch"], **config)
    for point in made["checkpoints"]:
        for splits in point["accuracies"].values():
            for modes in splits.values():
                modes["default"] = value
    return made


def test_the_largest_seed_of_hyper_parameters_wins_a_tie_and_the_first_checkpoint():
    runs = [constant(0.5, hseed=h) for h in (2, 0, 1)]
    for rule in ("training-domain", "oracle"):
        chosen = select_model(runs, "sketch", rule)
        assert chosen["hparams_seed"] == 2
        assert chosen["step"] == (0 if rule == "training-domain" else 500)


def test_the_oracle_sees_only_the_last_checkpoint():
    run = constant(0.5)
    run["checkpoints"][2]["accuracies"]["sketch"]["out"]["default"] = 1.0
    assert select_model([run], "sketch", "oracle")["step"] == 500


def test_the_test_domain_does_not_move_training_domain_validation():
    run = record(["sketch"])
    before = select_model([run], "sketch")["step"]
    for point in run["checkpoints"]:
        point["accuracies"]["sketch"]["out"]["default"] = 1.0
    assert select_model([run], "sketch")["step"] == before


def test_missing_pairs_and_accuracies_are_named():
    with pytest.raises(HmoeError, match=r"missing: sketch\+negative, sketch\+photo, sketch\+plain"):
        select_model([record(["sketch"])], "sketch", "leave-one-domain-out")
    run = record(["sketch"])
    for point in run["checkpoints"]:
        del point["accuracies"]["sketch"]
    for rule in ("training-domain", "oracle"):
        with pytest.raises(HmoeError, match="evaluate=all"):
            select_model([run], "sketch", rule)
    with pytest.raises(HmoeError, match="no run held out photo"):
        select_model([run], "photo")
    with pytest.raises(HmoeError, match=f"Valid: {', '.join(RULES)}"):
        select_model([run], "sketch", "best")


def checkpoint(step, validation, test):
    "A checkpoint of a run with one training domain, `a`, and one test domain, `b`."
    return {
        "step": step,
        "accuracies": {"a": {"out": {"default": validation}}, "b": {"in": {"default": test}}},
    }


def test_scores_are_means_over_the_domains_of_a_kind():
    accuracies = {
        "art": {"out": {"default": 0.9}},
        "photo": {"out": {"default": 0.7}},
        "sketch": {"in": {"default": 0.4}, "out": {"default": 0.5}},
    }
    assert validation_accuracy(accuracies, ["sketch"], "default") == pytest.approx(0.8)
    assert selection.test_accuracy(accuracies, ["sketch"], "default") == 0.4
    assert selection.test_accuracy({}, ["sketch"], "default") is None


def test_a_tie_goes_to_the_first_checkpoint():
    tied = [checkpoint(step, 0.5, step / 10) for step in (0, 1, 2)]
    assert training_domain_validation(tied, ["b"], ["default"])["default"]["step"] == 0


def invented(held_out, curves):
    "A record with three checkpoints; `curves`: domain -> split -> an accuracy for each."
    points = []
    for t in range(3):
        accuracies = {}
        for domain, splits in curves.items():
            accuracies[domain] = {s: {"default": values[t]} for s, values in splits.items()}
        points.append({"step": 100 * t, "accuracies": accuracies})
    config = {"test_domains": held_out, "hparams_seed": 0}
    return {"run_id": "-".join(held_out), "config": config, "checkpoints": points}


def test_three_rules_choose_three_checkpoints_of_the_run_in_the_notebook():
    flat = {"out": [0.5, 0.5, 0.5], "in": [0.5, 0.5, 0.5]}
    a = {"out": [0.7, 0.9, 0.8]}
    b = {"out": [0.7, 0.7, 0.7]}
    d = {"in": [0.1, 0.2, 0.3], "out": [0.3, 0.2, 0.4]}
    runs = [
        invented(["d"], {"a": a, "b": b, "d": d}),
        invented(["d", "a"], {"a": {"in": [0.6, 0.2, 0.1]}, "b": flat, "d": flat}),
        invented(["d", "b"], {"b": {"in": [0.4, 0.3, 0.2]}, "a": flat, "d": flat}),
    ]
    chosen = {rule: select_model(runs, "d", rule) for rule in RULES}
    assert [chosen[rule]["step"] for rule in RULES] == [100, 0, 200]
    assert [chosen[rule]["test_accuracy"] for rule in RULES] == [0.2, 0.1, 0.3]
