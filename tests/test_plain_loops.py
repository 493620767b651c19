"""The plain loops of `hmoe bench --what registry` compute what the algorithms compute."""

import copy

import pandas as pd
import pytest
import torch
from written_out import CLASSES, SHAPE, SMALL, random_domains

from hmoe_repro.algorithms import FAMILIES, get_algorithm
from hmoe_repro.algorithms.conformance import phase_hparams
from hmoe_repro.bench.registry_costs import (
    PLAIN_UPDATES,
    REGISTRY,
    PlainTraining,
    ThreeUpdates,
    plain_erm,
    plain_ratios,
    plain_seconds,
    plain_targets,
    registry_table,
)
from hmoe_repro.bench.timing import judge_target
from hmoe_repro.core.seeds import seed_everything

BATCHES = [random_domains(seed) for seed in range(3)]


def begun(name):
    "An algorithm in float64 whose penalties have begun."
    seed_everything(0)
    cls = get_algorithm(name)
    phases = phase_hparams(cls(SHAPE, CLASSES, 3, SMALL))
    return cls(SHAPE, CLASSES, 3, SMALL | dict.fromkeys(phases, 0)).double()


def updated(update):
    for seed, minibatches in enumerate(BATCHES):
        seed_everything(seed)
        update(minibatches)


def largest_difference(algorithm, other):
    pairs = zip(algorithm.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("name", PLAIN_UPDATES)
def test_a_plain_loop_has_the_parameters_of_the_algorithm_after_three_updates(name):
    algorithm = begun(name)
    start = copy.deepcopy(algorithm)
    loop = PlainTraining(algorithm)
    updated(algorithm.update)
    updated(lambda minibatches: PLAIN_UPDATES[name](loop, minibatches))
    assert largest_difference(algorithm, start) > 1e-3
    assert largest_difference(algorithm, loop.algorithm) < 1e-6
    buffers = zip(algorithm.buffers(), loop.algorithm.buffers(), strict=True)
    for buffer, of_loop in buffers:
        torch.testing.assert_close(buffer, of_loop, rtol=1e-6, atol=1e-9)
    if name != "ERM":  # another loop would be noticed
        erm = PlainTraining(start)
        updated(lambda minibatches: plain_erm(erm, minibatches))
        assert largest_difference(algorithm, erm.algorithm) > 1e-6


def test_a_loop_continues_with_the_moments_of_the_optimiser():
    algorithm = begun("ERM")
    algorithm.update(BATCHES[0])
    loop = PlainTraining(algorithm)
    afresh = PlainTraining(algorithm)
    afresh.optimizer.state.clear()
    updated(algorithm.update)
    updated(lambda minibatches: plain_erm(loop, minibatches))
    updated(lambda minibatches: plain_erm(afresh, minibatches))
    assert largest_difference(algorithm, loop.algorithm) < 1e-6
    assert largest_difference(algorithm, afresh.algorithm) > 1e-5


def test_loops_and_algorithms_are_timed_in_turn():
    jobs = {name: ThreeUpdates(begun(name), BATCHES[0]) for name in PLAIN_UPDATES}
    seconds = plain_seconds(jobs, 2)
    assert list(seconds) == ["library", "plain loop"]
    for times in seconds.values():
        assert list(times) == list(PLAIN_UPDATES)
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in times.values())


def invented_record():
    names = list(FAMILIES)
    seconds = {"library": {"IRM": [1.0, 2.0, 1.0]}, "plain loop": {"IRM": [2.0, 3.0, 0.9]}}
    return {
        "scale": "full",
        "seconds": {"update": {name: [1.0, 1.0, 1.0] for name in names}},
        "networks": dict.fromkeys(names, "mnist_cnn"),
        "processor_seconds": seconds,
    }


def test_the_table_has_the_ratio_and_the_target():
    record = invented_record()
    assert plain_ratios(record).IRM.tolist() == pytest.approx([2.0, 1.5, 0.9])
    table = registry_table(record).set_index("algorithm")
    assert table.loc["IRM", "plain loop"] == "1.50"
    assert table.loc["VREx", "plain loop"] == "–"
    (target,) = plain_targets(record)
    assert judge_target(record, target).outcome == "met"
    record["processor_seconds"]["plain loop"]["IRM"] = [0.5, 0.5, 0.5]
    assert judge_target(record, target).outcome == "not met"
    assert REGISTRY.targets_of(record)[0].text == target.text


def test_an_older_record_has_no_column():
    record = invented_record()
    del record["processor_seconds"]
    assert "plain loop" not in registry_table(record)
    assert plain_targets(record) == []
    assert isinstance(plain_ratios(record), pd.DataFrame)
