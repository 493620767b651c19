"""ANDMask, SANDMask and IGA against updates written out entry by entry."""

import copy
import math
from statistics import variance

import by_hand
import pytest
import torch

from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.algorithms.gradients import IGA, ANDMask, SANDMask, agreement, domain_gradients
from hmoe_repro.algorithms.hparams import merge_hparams
from hmoe_repro.core.errors import HmoeError

ALL = (ANDMask, SANDMask, IGA)
every = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
SIZES = pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 2, 3)], ids=str)


def gradients_of_domains(slow, batches):
    "Per domain, the gradients of its mean cross entropy."
    losses = [by_hand.cross_entropy(slow.predict(x), y) for x, y in batches]
    return losses, [by_hand.gradients(loss, slow.parameters()) for loss in losses]


def masked(column, tau, k):
    "The mask of one coordinate from its gradients in all domains: ANDMask's if `k` is None."
    signs = [(g > 0) - (g < 0) for g in column]
    agreed = abs(sum(signs)) / len(signs)
    if k is None:
        return float(agreed >= tau)
    spread = variance(column)
    if spread == 0:
        return 1e-17 if agreed == tau else float(agreed > tau)
    return max(0.0, math.tanh(k / spread * (agreed - tau)))


@SIZES
@pytest.mark.parametrize(
    "cls, tau, k",
    [
        (ANDMask, 1.0, None),
        (ANDMask, 0.3, None),
        (SANDMask, 0.5, 10.0),
        (SANDMask, 0.2, 1e-4),
        (SANDMask, 0.0, 1e-3),
    ],
)
def test_masked_updates_entry_by_entry(cls, tau, k, sizes):
    fast = by_hand.tiny(cls, tau=tau, weight_decay=0.01, **({} if k is None else {"k": k}))
    slow = copy.deepcopy(fast)
    adam, masks = by_hand.Adam(slow.parameters(), weight_decay=0.01), []
    for t in range(5):
        batches = by_hand.draw(sizes, seed=t)
        losses, single = gradients_of_domains(slow, batches)
        updates = []
        for p, of_domains in zip(slow.parameters(), zip(*single)):
            columns = list(zip(*(g.flatten().tolist() for g in of_domains)))
            mask = [masked(column, tau, k) for column in columns]
            share = sum(mask) / len(mask)
            entries = [
                m * sum(column) / len(column) / (1e-10 + share) for m, column in zip(mask, columns)
            ]
            updates.append(torch.tensor(entries, dtype=torch.float64).view_as(p))
            masks += mask
        assert fast.update(batches)["loss"] == pytest.approx(sum(losses).item() / 3, rel=1e-10)
        adam.step(updates)
        by_hand.assert_same_parameters(fast, slow)
    assert 0 in masks or tau < 1 / 3  # the masks do something
    assert k is None or k > 1e-3 or any(1e-6 < m < 0.9 for m in masks)  # and are smooth


@SIZES
def test_igas_update_and_that_the_mean_may_be_a_constant(sizes):
    fast = by_hand.tiny(IGA, penalty=20.0)
    slow = copy.deepcopy(fast)
    parameters = list(slow.parameters())
    adam = by_hand.Adam(parameters)
    for t in range(5):
        batches = by_hand.draw(sizes, seed=t)
        losses = [by_hand.cross_entropy(slow.predict(x), y) for x, y in batches]
        single = [torch.autograd.grad(loss, parameters, create_graph=True) for loss in losses]
        penalty = 0
        for of_domains in zip(*single):
            mean = (sum(of_domains) / 3).detach()  # as in DomainBed
            penalty = penalty + sum(((g - mean) ** 2).sum() for g in of_domains)
        loss = sum(losses) / 3 + 20.0 * penalty
        reported = fast.update(batches)
        assert reported["loss"] == pytest.approx(loss.item(), rel=1e-10)
        assert reported["penalty"] == pytest.approx(penalty.item(), rel=1e-10)
        assert penalty > 0
        adam.step(by_hand.gradients(loss, parameters))
        by_hand.assert_same_parameters(fast, slow)


def test_values_by_hand():
    g = torch.tensor([[1.0, 2.0, -1.0, 0.0, 3.0], [3.0, -2.0, 1.0, 0.0, 3.0]])
    assert agreement(g).tolist() == [1, 0, 0, 0, 1]
    mask = by_hand.tiny(SANDMask, k=4.0).mask(g).tolist()
    assert mask == pytest.approx([math.tanh(1), 0, 0, 0, 1])
    at_tau = by_hand.tiny(SANDMask, tau=0.0).mask(g).tolist()
    assert at_tau == pytest.approx([math.tanh(5), 0, 0, 1e-17, 1])
    assert by_hand.tiny(ANDMask, tau=0.0).mask(g).tolist() == [1] * 5


def test_gradients_are_of_the_network_and_of_each_domain():
    erm, batches = by_hand.tiny(ERM), by_hand.draw((3, 2, 4), seed=0)
    risks, parameters, gradients = domain_gradients(erm, batches)
    losses, single = gradients_of_domains(erm, batches)
    assert risks.tolist() == pytest.approx([loss.item() for loss in losses], rel=1e-10)
    for p, q, ours, theirs in zip(parameters, erm.parameters(), gradients, zip(*single)):
        assert p is q
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-10, atol=1e-12)
    with pytest.raises(HmoeError, match="1 of each"):
        domain_gradients(erm, by_hand.draw((3, 0, 4), seed=0))


def test_defaults_and_those_of_domainbed():
    defaults = {
        (cls.name, name): merge_hparams(cls.HPARAMS, {})[name]
        for cls in ALL
        for name in cls.HPARAMS.keys() - ERM.HPARAMS.keys()
    }
    assert defaults == {
        ("ANDMask", "tau"): 1.0,
        ("SANDMask", "tau"): 0.5,
        ("SANDMask", "k"): 10.0,
        ("IGA", "penalty"): 1000.0,
    }
    compat = merge_hparams(SANDMask.HPARAMS, {}, domainbed_compat=True)
    assert compat["tau"] == 1.0
    assert compat["k"] == 10.0
    assert all(cls.family == "gradients" and cls.needs_domain_labels for cls in ALL)


def test_domainbeds_sandmask_learns_nothing():
    sandmask = by_hand.tiny(SANDMask, tau=1.0)
    before = copy.deepcopy(sandmask)
    sandmask.update(by_hand.draw((4, 4, 4), seed=0))
    by_hand.assert_same_parameters(sandmask, before, tolerance=0)


@every
def test_a_killed_training_resumes(cls, tmp_path):
    check_algorithm(cls)
    by_hand.assert_resumes(cls, tmp_path)


def test_one_domain():
    batches = by_hand.draw((6,), seed=0)
    expected = by_hand.tiny(ERM, domains=1)
    for cls in (ANDMask, IGA):
        alone = by_hand.tiny(cls, domains=1)
        alone.update(batches)
        erm = copy.deepcopy(expected)
        erm.update(batches)
        by_hand.assert_same_parameters(alone, erm, tolerance=1e-7)
    with pytest.raises(HmoeError, match="only one"):
        SANDMask(by_hand.SHAPE, by_hand.CLASSES, 1, {"network": "small_cnn"})
