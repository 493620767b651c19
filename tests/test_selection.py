"""Three rules against a brute-force reading of DomainBed's definitions, ties, what they lack."""

import pytest
from test_domainbed import record

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.selection import RULES, select_model


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
