"""IB-ERM, IB-IRM, CAD and CondCAD against loops over images and domains; a new Adam at a jump."""

import copy
import math

import pytest
import torch
from by_hand import (
    CLASSES,
    SHAPE,
    Adam,
    assert_resumes,
    assert_same_parameters,
    cross_entropy,
    draw,
    gradients,
    tiny,
)

from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.bottleneck import CAD, IBERM, IBIRM, CondCAD, domain_bottleneck
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.core.errors import HmoeError

IB, IRM = 30.0, 7.0  # the full weights of both penalties
JUMPS = {"ib_lambda": IB, "ib_penalty_anneal_iters": 2}
BOTH = JUMPS | {"irm_lambda": IRM, "irm_penalty_anneal_iters": 4}


def follow(fast, loss_at, sizes, restarts=(), updates=6):
    "`fast` and Adam on `loss_at(slow, minibatches, t)`, by hand, agree in loss and parameters."
    slow = copy.deepcopy(fast)
    for t in range(updates):
        if t in (0, *restarts):
            adam = Adam(slow.parameters())
        minibatches = draw(sizes, t)
        loss = loss_at(slow, minibatches, t)
        assert math.isclose(fast.update(minibatches)["loss"], loss.item(), rel_tol=1e-9)
        adam.step(gradients(loss, slow.parameters()))
        assert_same_parameters(fast, slow)


def feature_variance(z):
    "Mean over features of the unbiased variance over images."
    total = 0
    for column in z.T:
        mean = sum(column) / len(column)
        total = total + sum((value - mean) ** 2 for value in column) / (len(column) - 1)
    return total / z.shape[1]


def slope(logits, y):
    "Derivative of the cross entropy in a factor on the logits."
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(cross_entropy(w * logits, y), w, create_graph=True)[0]


def ib_loss(irm):
    def loss_at(slow, minibatches, t):
        total, (w_ib, w_irm) = 0, (IB * (t >= 2), IRM if t >= 4 else 1.0)
        for x, y in minibatches:
            z = slow.featurizer(x)
            o = slow.classifier(z)
            total = total + cross_entropy(o, y) + w_ib * feature_variance(z)
            if irm:
                total = total + w_irm * slope(o[::2], y[::2]) * slope(o[1::2], y[1::2])
        return total / len(minibatches)

    return loss_at


@pytest.mark.parametrize("sizes", [(5, 5, 5), (4, 7, 2)], ids=str)
@pytest.mark.parametrize("cls", [IBERM, IBIRM], ids=lambda cls: cls.name)
def test_variance_of_features_across_both_jumps(cls, sizes):
    fast = tiny(cls, **(BOTH if cls is IBIRM else JUMPS))
    follow(fast, ib_loss(cls is IBIRM), sizes, (2, 4) if cls is IBIRM else (2,))
    steps = {int(state["step"]) for state in fast.optimizer.state.values()}
    assert steps == {2 if cls is IBIRM else 4}


def test_no_new_adam_without_a_jump():
    fast = tiny(IBIRM, ib_penalty_anneal_iters=0, irm_penalty_anneal_iters=0)
    for t in range(3):
        fast.update(draw((3, 3), t))
    assert {int(state["step"]) for state in fast.optimizer.state.values()} == {3}


def bottleneck_by_hand(z, y, d, temperature, conditional, flipped):
    "One image after the other, from the probabilities themselves."
    terms, everyone = [], range(len(z))
    for i in everyone:
        classmates = [j for j in everyone if j != i and y[j] == y[i]]
        drawn = classmates if conditional else [j for j in everyone if j != i]
        wanted = [j for j in drawn if (d[j] != d[i]) == flipped]
        if classmates and wanted:
            weight = {j: torch.exp(sum(z[i] * z[j]) / temperature) for j in drawn}
            p = sum(weight[j] for j in wanted) / sum(weight.values())
            terms.append(-torch.log(p) if flipped else torch.log(p))
    return temperature / 0.07 * sum(terms) / len(terms)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 7, 1)], ids=str)
@pytest.mark.parametrize(
    "flags", [(), ("is_normalized",), ("is_project",), ("not flipped",)], ids=str
)
@pytest.mark.parametrize("cls", [CAD, CondCAD], ids=lambda cls: cls.name)
def test_the_domain_bottleneck(cls, flags, sizes):
    given = {name: True for name in flags if name.startswith("is")}
    flipped = "not flipped" not in flags
    fast = tiny(cls, features=32, lmbda=2.0, temperature=0.5, is_flipped=flipped, **given)

    def loss_at(slow, minibatches, t):
        x, y = (torch.cat(part) for part in zip(*minibatches))
        d = [i for i, (_, labels) in enumerate(minibatches) for _ in labels]
        z = used = slow.featurizer(x)
        if "is_project" in flags:
            first, _, last = slow.projection
            used = last(first(z).clamp_min(0))
        if "is_normalized" in flags:
            used = torch.stack([row / sum(row**2).sqrt() for row in used])
        penalty = bottleneck_by_hand(used, y, d, 0.5, cls is CondCAD, flipped)
        return cross_entropy(slow.classifier(z), y) + 2.0 * penalty

    follow(fast, loss_at, sizes, updates=5)


def test_who_counts_where_all_images_are_alike():
    """Every draw is equally likely: probabilities are shares of images."""
    y, d = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 0, 1, 1, 1, 1])
    z = torch.zeros(6, 3, dtype=torch.float64)
    log, per = math.log, 0.1 / 0.07
    for conditional, flipped, expected in (
        # unconditional: four of five others are elsewhere for the first two, two of five for the
        # rest; the fourth image is alone in its class and does not count
        (False, True, -(2 * log(4 / 5) + 3 * log(2 / 5)) / 5),
        (False, False, (2 * log(1 / 5) + 3 * log(3 / 5)) / 5),
        # conditional: only class 0 has images of both domains
        (True, True, -(2 * log(1 / 2) + log(2 / 2)) / 3),
        (True, False, (2 * log(1 / 2) + 2 * log(1 / 1)) / 4),
    ):
        value = domain_bottleneck(z, y, d, conditional=conditional, flipped=flipped)
        assert math.isclose(value, per * expected, rel_tol=1e-12), (conditional, flipped)


@pytest.mark.parametrize("y, d", [([0, 1, 2], [0, 1, 1]), ([0, 0, 0], [0, 0, 0])], ids=str)
def test_where_it_is_defined_for_no_image_nothing_is_penalised(y, d):
    z = torch.randn(3, 4, requires_grad=True)
    value = domain_bottleneck(z, torch.tensor(y), torch.tensor(d), conditional=True)
    (gradient,) = torch.autograd.grad(value, z)
    assert value == 0
    assert gradient.abs().max() == 0


def test_large_similarities_do_not_overflow():
    z = torch.tensor([[60.0], [-60.0], [60.0], [-60.0]], requires_grad=True)
    y, d = torch.zeros(4, dtype=torch.long), torch.tensor([0, 0, 1, 1])
    value = domain_bottleneck(z, y, d)  # its double lives in the other domain
    (gradient,) = torch.autograd.grad(value, z)
    assert value.abs() < 1e-6
    assert gradient.isfinite().all()


def test_with_one_domain_cad_is_erm():
    for cls in (CAD, CondCAD):
        fast, alone = tiny(cls, domains=1, lmbda=10.0), tiny(ERM, domains=1)
        (batch,) = draw((8,), 0)
        assert fast.update([batch])["loss"] == alone.update([batch])["loss"]
        assert_same_parameters(fast, alone)


def test_the_defaults_are_domainbeds():
    expected = {"ib_lambda": 100.0, "ib_penalty_anneal_iters": 500}
    irm = {"irm_lambda": 100.0, "irm_penalty_anneal_iters": 500}
    cad = {"lmbda": 0.1, "temperature": 0.1, "is_flipped": True}
    cad |= {"is_normalized": False, "is_project": False}
    for cls, own in ((IBERM, expected), (IBIRM, expected | irm), (CAD, cad), (CondCAD, cad)):
        hparams = tiny(cls).hparams
        added = {name: hparams[name] for name in cls.HPARAMS if name not in ERM.HPARAMS}
        assert added == own
        assert cls.needs_domain_labels
        assert cls.family == "bottleneck"


@pytest.mark.parametrize(
    "cls, hparams",
    [
        (IBERM, JUMPS | {"ib_penalty_anneal_iters": 5}),
        (IBIRM, BOTH | {"ib_penalty_anneal_iters": 6}),
        (CondCAD, {"is_project": True}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_resumed_from_a_file(cls, hparams, tmp_path):
    """After four updates, with a jump at the very next one or further on."""
    assert_resumes(cls, tmp_path, **hparams)


def test_the_projection_is_trained():
    check_algorithm(CAD, hparams={"is_project": True, "is_normalized": True})
    fast = tiny(CAD, features=32, is_project=True, lmbda=0.0)
    before = copy.deepcopy(fast.projection)
    fast.update(draw((4, 4), 0))
    assert_same_parameters(before, fast.projection)  # it serves the bottleneck alone


def test_refusals():
    for cls in (IBERM, IBIRM):
        with pytest.raises(HmoeError, match="2 of each"):
            tiny(cls).update(draw((3, 1, 3), 0))
    with pytest.raises(HmoeError, match="temperature"):
        CAD(SHAPE, CLASSES, 3, {"network": "small_cnn", "temperature": 0.0})
