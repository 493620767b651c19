"""A recorded update is the plain one: on the CPU with a tape in place of CUDA's graph (see
tape.py), which finds what Python decides during an update; test_cuda.py has it with real graphs."""

import copy

import pytest
import torch
from tape import taped
from torch.nn import functional as F

from hmoe_repro.algorithms import FAMILIES, get_algorithm
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import small_network
from hmoe_repro.algorithms.recorded_updates import (
    PLAIN_FIRST,
    RECORDABLE,
    RecordedUpdate,
    why_not_recordable,
)

SHAPE, UPDATES = ((3, 16, 16), 4, 3), 14


def batches(size=6):
    "Other images, labels and so losses at every update."
    draw = torch.Generator().manual_seed(1)
    one = lambda i: (
        torch.rand(size, 3, 16, 16, generator=draw) + i,
        torch.randint(4, (size,), generator=draw),
    )
    return [[one(i) for i in range(3)] for _ in range(UPDATES)]


def made(name, **hparams):
    torch.manual_seed(0)
    cls = get_algorithm(name)
    algorithm = cls(*SHAPE, {"network": small_network(cls), **hparams}).train()
    algorithm.total_steps = 20
    return algorithm


def both(name, given, **hparams):
    "Losses and weights after plain updates and after recorded ones, the tapes, and the object."
    plain, recorded = made(name, **hparams), made(name, **hparams)
    with taped(recorded) as tapes:
        update = RecordedUpdate(recorded, "cpu")
        losses = [(plain.update(batch), update(batch)) for batch in given]
    return losses, plain, recorded, tapes, update


def assert_equal(losses, plain, recorded):
    for ours, theirs in losses:
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-5), name
    assert recorded.update_count == plain.update_count == len(losses)
    for (name, a), b in zip(plain.state_dict().items(), recorded.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", RECORDABLE)
def test_recorded_updates_are_plain_updates(name):
    losses, plain, recorded, tapes, update = both(name, batches())
    assert_equal(losses, plain, recorded)
    assert update.reason is None and [t.played for t in tapes] == [UPDATES - PLAIN_FIRST]
    assert len({ours["loss"] for ours, _ in losses}) == UPDATES


@pytest.mark.parametrize(
    "name, hparam",
    [
        ("IRM", "irm_penalty_anneal_iters"),
        ("VREx", "vrex_penalty_anneal_iters"),
        ("Fishr", "penalty_anneal_iters"),
    ],
)
def test_a_penalty_that_jumps_is_recorded_anew(name, hparam):
    losses, plain, recorded, tapes, update = both(name, batches(), **{hparam: 6})
    assert_equal(losses, plain, recorded)
    assert [t.played for t in tapes] == [6 - PLAIN_FIRST, UPDATES - 6 - PLAIN_FIRST]


def test_a_batch_of_another_shape_is_not_played():
    given = batches()
    given[8] = [(x[:4], y[:4]) for x, y in given[8]]
    losses, plain, recorded, tapes, _ = both("HMOE-DN", given)
    assert_equal(losses, plain, recorded)
    assert [t.played for t in tapes] == [8 - PLAIN_FIRST, UPDATES - 9 - PLAIN_FIRST]


def test_a_state_saved_in_between_goes_on_plainly_and_recorded():
    given = batches()
    _, _, recorded, _, _ = both("HMOE-DN", given[:8])
    state = copy.deepcopy(recorded.training_state())
    assert not any(g["capturable"] for g in state["optimizers"]["optimizer"]["param_groups"])
    plain, again = made("HMOE-DN"), made("HMOE-DN")
    for algorithm in (plain, again):
        algorithm.load_training_state(copy.deepcopy(state))
    with taped(again) as tapes:
        update = RecordedUpdate(again, "cpu")
        losses = [(plain.update(batch), update(batch)) for batch in given[8:]]
    assert [t.played for t in tapes] == [UPDATES - 8 - PLAIN_FIRST]
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_the_tape_keeps_what_python_worked_out_so_an_algorithm_off_the_list_is_refused():
    """A loss with a weight that Python counts up: recorded all the same, it goes wrong, which is
    what the comparison above is there to see; and `why_not_recordable` refuses it."""

    class Counting(ERM):
        def loss(self, minibatches):
            return {"loss": super().loss(minibatches)["loss"] * (1 + self.update_count)}

    plain, recorded = made("ERM"), made("ERM")
    plain.__class__ = recorded.__class__ = Counting
    with taped(recorded):
        assert "not on the list" in why_not_recordable(recorded, "cuda")
        update = RecordedUpdate(recorded, "cpu")
        assert "not on the list" in update.reason
        update.reason = None
        losses = [(plain.update(batch), update(batch)) for batch in batches()]
    with pytest.raises(AssertionError):
        assert_equal(losses, plain, recorded)


def test_what_draws_random_numbers_is_found_and_updates_plainly():
    class Dropping(ERM):
        def predict(self, x):
            return F.dropout(super().predict(x), 0.5)

    algorithm = made("ERM")
    algorithm.__class__ = Dropping
    with taped(algorithm) as tapes:
        update = RecordedUpdate(algorithm, "cpu")
        update.reason = None
        for batch in batches():
            update(batch)
    assert update.reason == "its updates draw random numbers" and not tapes
    assert algorithm.update_count == UPDATES


def test_a_recording_that_fails_costs_no_update():
    plain, algorithm = made("ERM"), made("ERM")

    def broken(batch):
        raise RuntimeError("operation not permitted\nwhile recording")

    with taped(algorithm) as tapes:
        update = RecordedUpdate(algorithm, "cpu")
        losses = []
        for i, batch in enumerate(batches()):
            if i == PLAIN_FIRST:
                update.algorithm.loss = broken
            if i == PLAIN_FIRST:
                with pytest.raises(RuntimeError):
                    update(batch)  # `loss` is broken for all
                del update.algorithm.loss
                assert update.reason == "recording failed (operation not permitted)"
            losses.append((plain.update(batch), update(batch)))
    assert not tapes and algorithm.clock is None
    assert_equal(losses, plain, algorithm)


def test_the_list_names_algorithms_and_all_others_say_why_not():
    assert set(RECORDABLE) < set(FAMILIES)
    for name in FAMILIES:
        assert (why_not_recordable(made(name), "cuda") is None) == (name in RECORDABLE)
    assert why_not_recordable(made("ERM"), "cpu") == "only CUDA devices record"
    assert "parity" in why_not_recordable(made("MTL", parity=True), "cuda")
    sparse = made("ERM", network="gmoe_small")
    assert why_not_recordable(sparse, "cuda") == "Python counts the tokens of its experts"
