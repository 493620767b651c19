"""SD, SelfReg, TRM, Transfer and ADRMX against updates written out image by image, with Adam by
hand and the same random draws."""

import math

import by_hand
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import cross_entropy, gradients
from torch import nn
from written_out import CLASSES, SHAPE, SMALL, Adam, build, close, random_domains

from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.algorithms.contrast import (
    ADRMX,
    SD,
    TRM,
    SelfReg,
    Transfer,
    inverse_hessian,
    partners,
    remix_pairs,
    supervised_contrast,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything

ALL = (SD, SelfReg, TRM, Transfer, ADRMX)
SIZES = pytest.mark.parametrize("sizes", [(5, 5, 5), (4, 7, 2)], ids=str)


def compare(cls, step, sizes=(5, 5, 5), updates=5, adam=(), labels=None, tolerance=1e-9, **hparams):
    """Updates of `cls`, and those of `step(slow, adam, minibatches, t)`, which returns what should
    be reported: both have the same draws, numbers, parameters and buffers throughout."""
    fast, slow = build(cls, hparams)
    adam = Adam(**dict(adam))
    for t in range(updates):
        minibatches = random_domains(t, sizes, labels)
        seed_everything(t)
        reported = fast.update(minibatches)
        seed_everything(t)
        expected = step(slow, adam, minibatches, t)
        assert reported.keys() >= expected.keys() > set()
        for name, value in expected.items():
            close(reported[name], value, 1e-9, 1e-9)
        by_hand.assert_same_parameters(fast, slow, tolerance)
        for a, b in zip(fast.buffers(), slow.buffers(), strict=True):
            close(a, b, 1e-9)
    return fast


def whole(minibatches):
    return torch.cat([x for x, _ in minibatches]), torch.cat([y for _, y in minibatches])


def move(adam, loss, parameters):
    adam.step(parameters, gradients(loss, parameters))


def square_distance(a, b):
    "Mean squared difference, one entry at a time."
    return sum((p - q) ** 2 for p, q in zip(a.flatten(), b.flatten(), strict=True)) / a.numel()


def sd_step(slow, adam, minibatches, t):
    x, y = whole(minibatches)
    logits = slow.predict(x)
    penalty = sum(o * o for row in logits for o in row) / (len(y) * CLASSES)
    nll = cross_entropy(logits, y)
    move(adam, nll + 0.3 * penalty, list(slow.parameters()))
    return {"loss": nll + 0.3 * penalty, "nll": nll, "penalty": penalty}


def selfreg_step(slow, adam, minibatches, t):
    lam = np.random.beta(0.5, 0.5)
    x, y = whole(minibatches)
    y, order = torch.sort(y)
    x = x[order]
    first, second = {}, {}
    for c in sorted(set(y.tolist())):
        members = [b for b in range(len(y)) if y[b] == c]
        for drawn in (first, second):
            for place, k in zip(members, torch.randperm(len(members)).tolist()):
                drawn[place] = members[k]
    z = torch.stack([slow.featurizer(x[b : b + 1])[0] for b in range(len(y))])
    o, h = slow.classifier(z), slow.projection(z)
    one = lambda values: torch.stack([values[first[b]] for b in range(len(y))])
    two = lambda values: torch.stack(
        [lam * values[first[b]] + (1 - lam) * values[second[b]] for b in range(len(y))]
    )
    alone = square_distance(o, one(o)) + 0.3 * square_distance(z, one(h))
    mixture = square_distance(o, two(o)) + 0.3 * square_distance(z, two(h))
    nll = cross_entropy(o, y)
    loss = nll + min(nll.item(), 1) * (lam * alone + (1 - lam) * mixture)
    fixed = set(slow.projection.parameters()) if slow.hparams["domainbed_compat"] else set()
    move(adam, loss, [p for p in slow.parameters() if p not in fixed])
    return {"loss": loss, "nll": nll}


@SIZES
@pytest.mark.parametrize("cls, step", [(SD, sd_step), (SelfReg, selfreg_step)], ids=["SD", "SR"])
def test_sd_and_selfreg_image_by_image(cls, step, sizes):
    compare(cls, step, sizes, **({"sd_reg": 0.3} if cls is SD else {}))


def test_selfregs_penalty_counts_less_where_the_cross_entropy_is_below_one():
    "The factor is a constant, and so has no gradient of its own."
    options = {"labels": [1], "tolerance": 1e-8}  # Adam's large steps enlarge rounding errors
    fast = compare(SelfReg, selfreg_step, adam={"lr": 0.02}, lr=0.02, **options)
    losses = fast.loss(random_domains(9, labels=[1]))
    assert losses["nll"] < 0.5
    close(losses["loss"], losses["nll"] * (1 + losses["penalty"]), 1e-12)


@pytest.mark.parametrize("compat", [False, True])
def test_the_projection_is_trained_unless_it_is_domainbeds(compat):
    "Its batch norm sees the images all the same."
    fast = compare(SelfReg, selfreg_step, lr=1e-3, domainbed_compat=compat)
    _, slow = build(SelfReg, {"domainbed_compat": compat})
    for name, p in slow.named_parameters():
        still = torch.equal(p, fast.get_parameter(name))
        assert still == (compat and name.startswith("projection")), name
    for name, kept in slow.named_buffers():
        assert not torch.equal(kept, fast.get_buffer(name)), name


def test_the_projection_is_domainbeds():
    class Wide(nn.Flatten):
        num_features = 2048

    layers = build(SelfReg)[0].projection
    assert [type(layer) for layer in layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2 + [
        nn.Linear,
        nn.BatchNorm1d,
    ]
    wide = type("OnWide", (SelfReg,), {"make_featurizer": lambda self: Wide()})
    for selfreg, width, hidden in (
        (build(SelfReg)[0], 32, 64),
        (wide((1, 1, 2048), CLASSES, 3, SMALL), 2048, 2048),
    ):
        shapes = [tuple(p.shape) for p in selfreg.projection.parameters() if p.ndim == 2]
        assert shapes == [(hidden, width), (hidden, hidden), (width, hidden)]


def test_partners_are_two_random_orders_of_each_class():
    y = torch.tensor([0, 0, 0, 0, 2, 3, 3, 3])
    seed_everything(0)
    drawn = [partners(y) for _ in range(60)]
    for i, j in drawn:
        assert sorted(i.tolist()) == sorted(j.tolist()) == list(range(8))
        assert torch.equal(y[i], y)
        assert torch.equal(y[j], y)
    for place, others in ((0, {0, 1, 2, 3}), (4, {4}), (7, {5, 6, 7})):
        assert {i[place].item() for i, _ in drawn} == {j[place].item() for _, j in drawn} == others
    assert any(not torch.equal(i, j) for i, j in drawn)


def slopes(head, z, y):
    "Gradients of a linear head's mean cross entropy by its weight and bias, image by image."
    errors = [head(row).softmax(0) - F.one_hot(k, CLASSES) for row, k in zip(z, y)]
    weight = sum(torch.outer(e, row) for e, row in zip(errors, z)) / len(y)
    return weight, sum(errors) / len(y)


def hessian(head, z):
    "Of the mean cross entropy by the weight, written row by row as one vector: (C F, C F)."
    total = 0
    for row in z:
        p = head(row).softmax(0)
        total = total + torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(row, row))
    return total / len(z)


def neumann(H, v, published):
    total = 0 * v if published else v
    for k in range(10):
        v = v - H @ v
        total = total + (2 * v if published and k == 0 else v)
        if total.abs().max() > 10:
            break
    return total


def trm_step(published, cos_lambda, eta, begin):
    def step(slow, adam, minibatches, t):
        parameters = [*slow.featurizer.parameters(), *slow.classifier.parameters()]
        z, y = [slow.featurizer(x) for x, _ in minibatches], [y for _, y in minibatches]
        nll = cross_entropy(slow.classifier(torch.cat(z)), torch.cat(y))
        if t < begin:
            move(adam, nll, parameters)
            return {"loss": nll, "nll": nll}
        risk, minimised, M = 0, 0, len(minibatches)
        for q in range(M):
            head, row = slow.heads[q], slow.alpha[q] / slow.alpha[q].sum()
            for _ in range(30):
                with torch.no_grad():
                    weight, bias = slopes(head, z[q], y[q])
                    head.weight -= 0.1 * weight
                    head.bias -= 0.1 * bias
            H, v = hessian(head, z[q].detach()).detach(), 0
            for p in range(M):
                if p == q:
                    continue
                other = cross_entropy(head(z[p]), y[p])
                v = v + row[p] * slopes(head, z[p], y[p])[0].detach()
                after = row[p].item() * math.exp(eta * row[p].item() * other.item())
                risk = risk + row[p].item() * other / M
                minimised = minimised + (after if published else row[p].item()) * other / M
                slow.alpha[q, p] = after
            u = neumann(H, v.flatten(), published).detach()
            agreement = cos_lambda * (u * slopes(head, z[q], y[q])[0].flatten()).sum() / M
            risk, minimised = risk - agreement, minimised - agreement
        move(adam, nll + minimised, parameters)
        return {"loss": nll + risk, "nll": nll, "transfer": risk}

    return step


@pytest.mark.parametrize(
    "published, sizes", [(False, (5, 5, 5)), (False, (4, 7, 2)), (True, (4, 7, 2))], ids=str
)
def test_trm_with_gradients_and_hessians_written_out(published, sizes):
    hparams = {"cos_lambda": 3.0, "groupdro_eta": 0.5, "iters": 2, "domainbed_compat": published}
    fast = compare(TRM, trm_step(published, 3.0, 0.5, 2), sizes, weight_decay=0.0, **hparams)
    assert fast.alpha.diagonal().abs().max() == 0
    assert fast.alpha.std() > 0.01
    updates = {int(state["step"]) for state in fast.optimizer.state.values()}
    assert updates == {5}  # one Adam, which is not begun anew at the change


def test_inverse_hessian_of_a_quadratic():
    """With one curvature h the series is geometric, and it ends after the term that makes an entry
    larger than 10."""
    for h, v, published, expected in (
        (0.25, 1.0, False, (1 - 0.75**11) / 0.25),
        (0.25, 1.0, True, (1 - 0.75**11) / 0.25 - 1 + 0.75),
        (1.0, 7.0, False, 7.0),  # exact: 1 - h is 0
        (0.0, 3.0, False, 12.0),  # 3, 6, 9, and the first above 10
        (0.0, 3.0, True, 12.0),  # 6, 9, 12
        (2.0, 9.0, False, 9.0),  # 9, 0, 9, ..., never above 10
    ):
        w = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
        v = torch.tensor([v, 0.0], dtype=torch.float64)
        found = inverse_hessian(v, (h * w * w).sum() / 2, w, published)
        close(found, [expected, 0.0])
        assert not found.requires_grad


def vector(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def transfer_step(move, t_lambda, delta, rate, attacks):
    def gap(slow, minibatches):
        losses = [cross_entropy(slow.adversary(slow.featurizer(x)), y) for x, y in minibatches]
        return t_lambda * (max(losses) - min(losses))

    def step(slow, adam, minibatches, t):
        x, y = whole(minibatches)
        network = [*slow.featurizer.parameters(), *slow.classifier.parameters()]
        loss = cross_entropy(slow.predict(x), y)
        move(adam, loss, network)
        first_gap = gap(slow, minibatches)
        move(adam, first_gap, list(slow.featurizer.parameters()))
        centre = vector(slow.classifier)
        nn.utils.vector_to_parameters(centre.clone(), slow.adversary.parameters())
        for _ in range(attacks):
            ascent = gradients(gap(slow, minibatches), slow.adversary.parameters())
            away = vector(slow.adversary) + rate * torch.cat([g.flatten() for g in ascent]) - centre
            length = math.sqrt((away * away).sum())
            away = away if length <= delta else away * (delta / length)
            nn.utils.vector_to_parameters(centre + away, slow.adversary.parameters())
        return {"loss": loss, "gap": first_gap}

    return step


@torch.no_grad()
def descend(_, loss, parameters):
    "Gradient descent in place of Adam."
    with torch.enable_grad():
        slopes = gradients(loss, parameters)
    for p, g in zip(parameters, slopes):
        if g is not None:
            p -= 1e-3 * g


@pytest.mark.parametrize(
    "sizes, gda, delta",
    [((5, 5, 5), False, 2.0), ((4, 7, 2), False, 0.05), ((4, 7, 2), True, 0.05)],
    ids=str,
)
def test_transfer_domain_by_domain(sizes, gda, delta):
    step = transfer_step(descend if gda else move, 2.0, delta, 0.1, 4)
    hparams = {"t_lambda": 2.0, "delta": delta, "lr_d": 0.1, "d_steps_per_g": 4, "gda": gda}
    fast = compare(Transfer, step, sizes, **hparams)
    distance = (vector(fast.adversary) - vector(fast.classifier)).norm()
    if delta < 1:
        close(distance, delta)
    else:
        assert 0.05 < distance < delta  # else the small ball above would bound nothing


def test_transfer_with_gda_learns_nothing_under_domainbed_compat():
    fast, slow = build(Transfer, {"gda": True, "domainbed_compat": True, "lr": 0.1, "lr_d": 0.1})
    for t in range(3):
        fast.update(random_domains(t))
    for name, p in slow.named_parameters():
        unchanged = torch.equal(p, fast.get_parameter(name))
        assert unchanged != name.startswith("adversary")


def test_an_adversary_in_a_ball_of_radius_zero_is_the_classifier():
    for domains in (3, 1):  # with one domain there is no gap, and no direction
        fast, _ = build(Transfer, {"delta": 0.0}, domains)
        fast.update(random_domains(0, (5,) * domains))
        assert torch.equal(vector(fast.adversary), vector(fast.classifier))


def contrast_by_hand(z, y):
    z = [row / row.norm() for row in z]
    s = lambda i, j: 0.5 * torch.exp(z[i] @ z[j] / 0.07)
    total, counted, n = 0, 0, len(y)
    for i in range(n):
        positive = [j for j in range(n) if j != i and y[j] == y[i]]
        if not positive:
            continue
        everything = sum(s(i, j) for j in range(n) if j != i) + 1e-5
        counted += 1
        total = total - sum(torch.log(s(i, p) / everything + 1e-5) for p in positive) / len(
            positive
        )
    return total / (counted + 1)


def pairs_by_hand(y, d, published):
    for c in range(CLASSES):
        members = [b for b in range(len(y)) if y[b] == c]
        order = torch.randperm(len(members)).tolist()
        if published:
            if len(order) > 1:
                yield order[0], order[1]
            continue
        places = [members[k] for k in order]
        elsewhere = [b for b in places if d[b] != d[places[0]]]
        if elsewhere:
            yield places[0], elsewhere[0]


def adrmx_step(published, weight_decay):
    rival = Adam(betas=(0.5, 0.9), weight_decay=weight_decay)  # the discriminator's

    def step(slow, adam, minibatches, t):
        x, y = whole(minibatches)
        d = torch.tensor([i for i, (_, labels) in enumerate(minibatches) for _ in labels])
        z, z_d = slow.featurizer(x), slow.domain_featurizer(x)
        inv = z - z_d
        L_d = cross_entropy(slow.discriminator(inv), d)
        if t % 3 != 1:  # two updates of three, and the second is the first of the others
            move(rival, L_d, list(slow.discriminator.parameters()))
            return {"loss": L_d}
        loss = cross_entropy(slow.classifier(z), y)
        loss = loss + cross_entropy(slow.invariant_classifier(inv), y)
        loss = loss + 0.7 * cross_entropy(slow.domain_classifier(z_d), d)
        remixed = 0
        for a, b in pairs_by_hand(y, d, published):
            logits = slow.classifier((inv[a] + z_d[b])[None])
            remixed = remixed + cross_entropy(logits, y[a : a + 1]) / CLASSES
        contrast = contrast_by_hand(z, y) + contrast_by_hand(inv, y)
        loss = loss + 0.6 * remixed + 0.3 * contrast - 0.9 * L_d
        named = slow.named_parameters()
        move(adam, loss, [p for name, p in named if not name.startswith("discriminator")])
        return {"loss": loss, "L_d": L_d, "remixed": remixed, "contrast": contrast}

    return step


@pytest.mark.parametrize(
    "published, sizes, weight_decay",
    [(False, (5, 5, 5), 0.0), (False, (4, 7, 2), 0.05), (True, (4, 7, 2), 0.0)],
    ids=str,
)
def test_adrmx_pair_by_pair(published, sizes, weight_decay):
    hparams = {"dclf_lambda": 0.7, "rmxd_lambda": 0.6, "cnt_lambda": 0.3, "disc_lambda": 0.9}
    hparams |= {"lr": 1e-3, "mlp_width": 16, "mlp_depth": 3, "weight_decay": weight_decay}
    adam = {"betas": (0.5, 0.9), "weight_decay": weight_decay}
    step = adrmx_step(published, weight_decay)
    compare(ADRMX, step, sizes, 6, adam, domainbed_compat=published, **hparams)


def test_supervised_contrast_of_three_images():
    "Two equal directions, and a third at a right angle that is alone in its class."
    z = torch.tensor([[2.0, 0.0], [0.5, 0.0], [0.0, 3.0]], dtype=torch.float64)
    near, far = 0.5 * math.exp(1 / 0.07), 0.5
    each = -math.log(near / (near + far + 1e-5) + 1e-5)
    close(supervised_contrast(z, torch.tensor([1, 1, 0])), 2 * each / 3, atol=0)
    each = -math.log(far / (near + far + 1e-5) + 1e-5), -math.log(far / (far + far + 1e-5) + 1e-5)
    close(supervised_contrast(z, torch.tensor([1, 0, 1])), sum(each) / 3, atol=0)
    assert supervised_contrast(z, torch.arange(3)) == 0


def test_remixed_pairs_share_the_class_and_not_the_domain():
    y, d = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3]), torch.tensor([0, 0, 1, 0, 1, 1, 1, 1])
    seed_everything(0)
    seen = {pair for _ in range(60) for pair in zip(*remix_pairs(y, d, 5).tolist())}
    assert seen == {(0, 2), (1, 2), (2, 0), (2, 1), (3, 4), (4, 3)}  # none of classes 2, 3 and 4
    assert remix_pairs(y[5:], d[5:], 5).shape == (2, 0)
    seen = {pair for _ in range(60) for pair in zip(*remix_pairs(y, d, 5, True).tolist())}
    assert seen == {(i, j) for i in range(3) for j in range(3) if i != j}  # places in the class


def test_adrmx_predicts_from_label_features_with_nonlinear_classifiers():
    fast, _ = build(ADRMX)
    x = random_domains(0)[0][0]
    close(fast.predict(x), fast.classifier(fast.featurizer(x)))
    for head, outputs in (
        (fast.classifier, CLASSES),
        (fast.invariant_classifier, CLASSES),
        (fast.domain_classifier, 3),
    ):
        shapes = [tuple(p.shape) for p in head.parameters() if p.ndim == 2]
        assert shapes == [(16, 32), (8, 16), (outputs, 8)]
    assert sum(p.ndim == 2 for p in fast.discriminator.parameters()) == 9


def test_registered_with_domainbeds_defaults():
    labelled = {cls.name for cls in ALL if cls.needs_domain_labels}
    assert labelled == {"TRM", "Transfer", "ADRMX"}
    assert {cls.family for cls in ALL} == {"contrast"}
    expected = {
        SD: {"sd_reg": 0.1},
        SelfReg: {},
        TRM: {"cos_lambda": 1e-4, "iters": 200, "groupdro_eta": 0.01},
        Transfer: {"t_lambda": 1.0, "delta": 2.0, "d_steps_per_g": 10, "gda": False, "lr_d": 1e-3},
        ADRMX: {"lr": 3e-3, "cnt_lambda": 1.0, "dclf_lambda": 1.0, "disc_lambda": 0.75}
        | {"rmxd_lambda": 1.0, "d_steps_per_g_step": 2, "beta1": 0.5}
        | {"mlp_width": 256, "mlp_depth": 9, "mlp_dropout": 0.0},
    }
    for cls in ALL:
        declared = {n: h.default for n, h in cls.HPARAMS.items() if h != ERM.HPARAMS.get(n)}
        assert not declared.pop("domainbed_compat", False)
        assert declared == expected[cls]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
def test_training_resumes_and_one_domain_works_or_says_why_not(cls, tmp_path):
    by_hand.assert_resumes(cls, tmp_path, **({"iters": 2} if cls is TRM else {}))
    if cls.needs_two_domains:
        with pytest.raises(HmoeError, match=f"{cls.name} .* and there is only one"):
            cls(SHAPE, CLASSES, 1, SMALL)
    else:
        check_algorithm(cls, num_domains=1)


def test_variants_conform():
    check_algorithm(SelfReg, hparams={"domainbed_compat": True})
    check_algorithm(TRM, hparams={"iters": 0, "domainbed_compat": True})
    check_algorithm(Transfer, hparams={"gda": True, "lr": 0.1})
    check_algorithm(ADRMX, hparams={"domainbed_compat": True})


def test_refused_is_what_they_cannot_do():
    class Frozen(nn.Flatten):
        num_features = 192

    with pytest.raises(HmoeError, match="nonlinear_classifier=false"):
        TRM(SHAPE, CLASSES, 3, SMALL | {"nonlinear_classifier": True})
    for cls in (Transfer, ADRMX):
        frozen = type("OnFrozen", (cls,), {"make_featurizer": lambda self: Frozen()})
        with pytest.raises(HmoeError, match="fewer frozen_stages"):
            frozen(SHAPE, CLASSES, 3, SMALL)
