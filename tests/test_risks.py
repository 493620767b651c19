"""EQRM and RDM against updates written out in loops over images and domains."""

import copy
import math
from statistics import NormalDist, stdev

import by_hand
import pytest
import torch

from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.algorithms.hparams import merge_hparams
from hmoe_repro.algorithms.risks import EQRM, RDM, kde_quantile
from hmoe_repro.core.errors import HmoeError

BOTH = pytest.mark.parametrize("cls", [EQRM, RDM], ids=lambda cls: cls.name)
SIZES = pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 2, 3)], ids=str)


def quantile_by_hand(risks, alpha):
    "The quantile of the estimated density, and its derivative by each risk, in Python's floats."
    m, h = len(risks), 1.06 * stdev(risks) * len(risks) ** -0.2
    low, high = min(risks) - 9 * h, max(risks) + 9 * h
    for _ in range(200):
        q = (low + high) / 2
        below = sum(NormalDist(r, h).cdf(q) for r in risks) / m
        low, high = (low, q) if below > alpha else (q, high)
    densities, mean = [NormalDist(r, h).pdf(q) / m for r in risks], sum(risks) / m
    by_h = -sum(f * (q - r) / h for f, r in zip(densities, risks))  # of the distribution function
    h_by_risk = [h * (r - mean) / ((m - 1) * stdev(risks) ** 2) for r in risks]
    return q, [(f - by_h * d) / sum(densities) for f, d in zip(densities, h_by_risk)]


def quantile_released(risks, alpha):
    "By halving the interval between two quantiles, of which the gradient is taken."
    mean, m = sum(risks) / len(risks), len(risks)
    h = 1.06 * (sum((r - mean) ** 2 for r in risks) / (m - 1)).sqrt() * m**-0.2
    ends = [end + h * NormalDist().inv_cdf(alpha) for end in (min(risks), max(risks))]
    for _ in range(32):
        q = 0.5 * (ends[0] + ends[1])
        below = sum(NormalDist(r.item(), h.item()).cdf(q.item()) for r in risks) / m
        ends[int(below > alpha)] = q
    return 0.5 * (ends[0] + ends[1])


def follow(fast, slow_loss, sizes, change):
    "Five updates, and the same by `slow_loss(risks, losses, begun)` and an Adam that is new once."
    slow = copy.deepcopy(fast)
    adam = by_hand.Adam(slow.parameters())
    for t in range(5):
        if t == change:
            adam = by_hand.Adam(slow.parameters(), lr=0.003)
        batches = by_hand.draw(sizes, seed=t)
        losses = [
            [by_hand.cross_entropy(o[None], k[None]) for o, k in zip(slow.predict(x), y)]
            for x, y in batches
        ]
        risks = [sum(of_domain) / len(of_domain) for of_domain in losses]
        loss = slow_loss(risks, losses, t >= change)
        assert fast.update(batches)["loss"] == pytest.approx(loss.item(), rel=1e-9)
        adam.step(by_hand.gradients(loss, slow.parameters()))
        by_hand.assert_same_parameters(fast, slow)


@SIZES
@pytest.mark.parametrize("alpha", [0.75, 0.97])
@pytest.mark.parametrize("compat", [False, True], ids=["ours", "released"])
def test_eqrm_across_the_burn_in(sizes, alpha, compat):
    phase = {"eqrm_burnin_iters": 1.4, "eqrm_lr": 0.003}  # the new Adam comes before update 2
    fast = by_hand.tiny(EQRM, eqrm_quantile=alpha, domainbed_compat=compat, **phase)

    def slow_loss(risks, losses, begun):
        if not begun:
            return sum(risks) / 3
        if compat:
            return quantile_released(risks, alpha)
        q, slopes = quantile_by_hand([r.item() for r in risks], alpha)
        return q + sum(slope * (r - r.detach()) for slope, r in zip(slopes, risks))

    follow(fast, slow_loss, sizes, change=2)
    assert {group["lr"] for group in fast.optimizer.param_groups} == {0.003}


@SIZES
@pytest.mark.parametrize("weights", [(5.0, 0.3), (0.0, 0.3)], ids=str)
def test_rdm_across_the_change_of_phase(sizes, weights):
    rdm_lambda, nu = weights
    phase = {"rdm_penalty_anneal_iters": 2, "rdm_lr": 0.003}
    fast = by_hand.tiny(RDM, rdm_lambda=rdm_lambda, variance_weight=nu, **phase)

    def kernel(a, b):
        return sum(torch.exp(-(10.0**g) * (a - b) ** 2) for g in range(-4, 4))

    def mean_kernel(one, other):
        return sum(kernel(a, b) for a in one for b in other) / (len(one) * len(other))

    def spread(one):
        mean = sum(one) / len(one)
        return sum((a - mean) ** 2 for a in one) / (len(one) - 1)

    def slow_loss(risks, losses, begun):
        nll, every = sum(risks) / 3, [a for of_domain in losses for a in of_domain]
        if not begun:
            return nll
        worst = losses[max(range(3), key=lambda i: risks[i].item())]
        distance = (
            mean_kernel(worst, worst) + mean_kernel(every, every) - 2 * mean_kernel(worst, every)
        )
        return nll + rdm_lambda * distance + nu * (spread(every) + spread(worst))

    follow(fast, slow_loss, sizes, change=2)


def test_quantiles_by_hand():
    q = kde_quantile(torch.tensor([0.0, 1.0], dtype=torch.float64), 0.5)
    assert q.item() == pytest.approx(0.5, abs=1e-9)
    h = 1.06 * math.sqrt(0.5) * 2**-0.2  # far in the tail the better domain no longer counts
    q = kde_quantile(torch.tensor([0.0, 1.0], dtype=torch.float64), 0.999999)
    assert q.item() == pytest.approx(1 + h * NormalDist().inv_cdf(0.999998), abs=1e-4)
    for published in (False, True):
        risks = torch.tensor([0.2, 0.9, 0.3, 0.7], dtype=torch.float64, requires_grad=True)
        quantile = kde_quantile(risks, 0.9, published)
        (slopes,) = torch.autograd.grad(quantile, risks)
        expected, exact = quantile_by_hand(risks.tolist(), 0.9)
        assert quantile.item() == pytest.approx(expected, abs=1e-8)
        assert slopes.sum().item() == pytest.approx(1)
        assert (slopes.tolist() == pytest.approx(exact, abs=1e-6)) != published


@pytest.mark.parametrize("published", [False, True])
def test_equal_risks_have_themselves_as_quantile(published):
    risks = torch.full((3,), 0.7, requires_grad=True)
    quantile = kde_quantile(risks, 0.99, published)
    (slopes,) = torch.autograd.grad(quantile, risks)
    assert quantile.item() == pytest.approx(0.7)
    assert slopes.sum().item() == pytest.approx(1)


def test_defaults():
    defaults = {
        name: value
        for cls in (EQRM, RDM)
        for name, value in merge_hparams(cls.HPARAMS, {}, resolution=224).items()
        if name in cls.HPARAMS.keys() - ERM.HPARAMS.keys() | {"batch_size"}
    }
    assert defaults == {
        "batch_size": 88,
        "domainbed_compat": False,
        "eqrm_quantile": 0.75,
        "eqrm_burnin_iters": 2500,
        "eqrm_lr": 1e-6,
        "rdm_lambda": 5.0,
        "rdm_penalty_anneal_iters": 1500,
        "variance_weight": 0.004,
        "rdm_lr": 1.5e-5,
    }
    on_domainnet = merge_hparams(RDM.HPARAMS, {}, 224, "DomainNet")
    names = ("batch_size", "rdm_lambda", "rdm_penalty_anneal_iters", "variance_weight")
    assert [on_domainnet[name] for name in names] == [40, 0.5, 2400, 0]
    assert EQRM.family == RDM.family == "risks"


@BOTH
def test_a_killed_training_resumes_across_the_change(cls, tmp_path):
    check_algorithm(cls)
    by_hand.assert_resumes(cls, tmp_path, **{cls.penalty_hparams[1]: 5})


def test_what_they_refuse():
    with pytest.raises(HmoeError, match="only one"):
        EQRM(by_hand.SHAPE, by_hand.CLASSES, 1, {"network": "small_cnn"})
    with pytest.raises(HmoeError, match="below 1"):
        by_hand.tiny(EQRM, eqrm_quantile=1.0)
    with pytest.raises(HmoeError, match="2 of each"):
        by_hand.tiny(RDM).update(by_hand.draw((3, 1, 3), seed=0))
    reported = by_hand.tiny(RDM, domains=1).update(by_hand.draw((5,), seed=0))
    assert reported["distance"] == pytest.approx(0, abs=1e-9)
