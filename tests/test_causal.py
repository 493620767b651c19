"""CausIRL with both distances against loops over images, with the same cuts."""

import copy

import by_hand
import numpy as np
import pytest
import torch
from test_alignment import coral_distance, mmd_distance

from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.causal import CausIRLCORAL, CausIRLMMD
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.core.errors import HmoeError

DISTANCES = {CausIRLCORAL: coral_distance, CausIRLMMD: mmd_distance}
BOTH = pytest.mark.parametrize("cls", DISTANCES, ids=lambda cls: cls.name)


@BOTH
@pytest.mark.parametrize("sizes", [(5, 5, 5), (4, 7, 2), (9,)], ids=str)
def test_updates_with_the_same_cuts(cls, sizes):
    fast = by_hand.tiny(cls, domains=len(sizes), mmd_gamma=3.0, weight_decay=0.01)
    slow, penalties = copy.deepcopy(fast), []
    adam = by_hand.Adam(slow.parameters(), weight_decay=0.01)
    for t in range(6):
        batches = by_hand.draw(sizes, seed=t)
        np.random.seed(t)
        reported = fast.update(batches)
        after = np.random.get_state()[1:3]
        np.random.seed(t)
        nll, first, second = 0, [], []
        for x, y in batches:
            z = slow.featurizer(x)
            nll = nll + by_hand.cross_entropy(slow.classifier(z), y) / len(sizes)
            cut = np.random.randint(0, len(y))
            first += list(z)[:cut]
            second += list(z)[cut:]
        drawn = np.random.get_state()[1:3]
        assert (after[0] == drawn[0]).all()
        assert after[1] == drawn[1]
        penalty = torch.zeros(())
        if min(len(first), len(second)) > 1:
            penalty = DISTANCES[cls](torch.stack(first), torch.stack(second))
        loss = nll + 3.0 * penalty
        assert reported["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert reported["penalty"] == pytest.approx(penalty.item(), rel=1e-7, abs=1e-12)
        adam.step(by_hand.gradients(loss, slow.parameters()))
        by_hand.assert_same_parameters(fast, slow)
        penalties.append(penalty.item())
    assert sum(value > 0 for value in penalties) >= 4


def test_a_single_image_of_a_domain_is_in_the_second_group():
    assert CausIRLCORAL.cuts(None, [(None, torch.zeros(1))] * 3) == [0, 0, 0]


@BOTH
def test_a_group_of_one_has_no_distance(cls):
    """With two images and one, the first group has at most one: the update is ERM's."""
    fast, erm = by_hand.tiny(cls, domains=2), by_hand.tiny(ERM, domains=2)
    for t in range(4):
        batches = by_hand.draw((2, 1), seed=t)
        assert fast.update(batches)["penalty"] == 0
        loss = sum(by_hand.cross_entropy(erm.predict(x), y) for x, y in batches) / 2
        erm.optimizer = erm.optimizer or erm.make_optimizer()
        erm.optimizer.zero_grad()
        loss.backward()
        erm.optimizer.step()
        by_hand.assert_same_parameters(fast, erm)


@BOTH
def test_equal_mixtures_have_no_distance_and_others_have(cls):
    """Features that are constant in a domain: by hand for CORAL, 1/4 for the cuts 1 and 3 of 4."""
    z = torch.tensor([0.0] * 4 + [1.0] * 4, dtype=torch.float64)[:, None]
    batches = [(z[:4], torch.zeros(4)), (z[4:], torch.zeros(4))]
    causal = by_hand.tiny(cls, domains=2)
    for cuts, equal in (((2, 2), True), ((1, 3), False)):
        causal.cuts = lambda minibatches, cuts=cuts: cuts
        distance = causal.distance(z, batches).item()
        assert abs(distance) < 1e-12 if equal else distance > 0.1
    assert cls is CausIRLMMD or distance == pytest.approx(0.25)


@BOTH
def test_a_killed_training_resumes(cls, tmp_path):
    check_algorithm(cls)
    by_hand.assert_resumes(cls, tmp_path)


@BOTH
def test_default_family_and_an_absent_domain(cls):
    causal = cls(by_hand.SHAPE, by_hand.CLASSES, 3, {"network": "small_cnn"})
    assert causal.hparams["mmd_gamma"] == 1.0
    assert cls.family == "causal"
    assert cls.needs_domain_labels
    with pytest.raises(HmoeError, match="1 of each"):
        causal.double().update(by_hand.draw((3, 0, 3), seed=0))
