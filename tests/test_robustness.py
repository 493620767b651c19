"""Mixup, GroupDRO, RSC and SagNet against slow computations; every loop here is over single
samples."""

import copy

import by_hand
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hmoe_repro.algorithms.base import ALGORITHMS, ERM
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.algorithms.robustness import (
    RSC,
    GroupDRO,
    Mixup,
    SagNet,
    below_top,
    randomize_content,
    randomize_style,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything

ALL = (Mixup, GroupDRO, RSC, SagNet)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
def test_a_killed_training_goes_on_and_one_domain_works(cls, tmp_path):
    check_algorithm(cls, num_domains=1)
    by_hand.assert_resumes(cls, tmp_path)


def test_registered_as_in_the_papers_table():
    assert {cls.name: cls.needs_domain_labels for cls in ALL} == {
        "Mixup": True,
        "GroupDRO": True,
        "RSC": False,
        "SagNet": False,
    }
    assert all(ALGORITHMS[cls.name] is cls and cls.family == "robustness" for cls in ALL)
    defaults = {
        name: h.default for cls in ALL for name, h in cls.HPARAMS.items() if name not in ERM.HPARAMS
    }
    assert defaults == {
        "mixup_alpha": 0.2,
        "groupdro_eta": 0.01,
        "rsc_f_drop_factor": 1 / 3,
        "rsc_b_drop_factor": 1 / 3,
        "sag_w_adv": 0.1,
    }


def two_updates(algorithm, slow_loss, sizes=(5, 5, 5)):
    """Two updates, and the same ones by `slow_loss(shadow, minibatches)` and Adam written out,
    from the same random draws."""
    shadow = copy.deepcopy(algorithm)
    adam = by_hand.Adam(shadow.parameters())
    for t in range(2):
        batches = by_hand.draw(sizes, seed=t)
        seed_everything(20 + t)
        reported = algorithm.update(batches)["loss"]
        seed_everything(20 + t)
        loss = slow_loss(shadow, batches)
        assert reported == pytest.approx(loss.item(), rel=1e-10)
        adam.step(by_hand.gradients(loss, shadow.parameters()))
    by_hand.assert_same_parameters(algorithm, shadow)
    return shadow


@pytest.mark.parametrize("sizes", [(5, 5, 5), (6, 3, 5), (4,)])
def test_mixup(sizes):
    def slow(f, batches):
        order = torch.randperm(len(batches)).tolist()
        total = 0
        for k in range(len(batches)):
            (x_i, y_i), (x_j, y_j) = batches[order[k]], batches[order[(k + 1) % len(batches)]]
            lam, n = np.random.beta(0.2, 0.2), min(len(y_i), len(y_j))
            p = torch.cat(
                [
                    f.classifier(f.featurizer((lam * x_i[b] + (1 - lam) * x_j[b])[None]))
                    for b in range(n)
                ]
            )
            total = (
                total
                + lam * by_hand.cross_entropy(p, y_i[:n])
                + (1 - lam) * by_hand.cross_entropy(p, y_j[:n])
            )
        return total / len(batches)

    two_updates(by_hand.tiny(Mixup, domains=len(sizes)), slow, sizes)


def test_mixup_pairs_are_of_different_domains_and_weights_vary():
    """Domain i has the constant image 10**i: what reaches the network says which pair and which
    weight made it."""
    mixup, seen = by_hand.tiny(Mixup, mixup_alpha=1.0), []
    mixup.featurizer.register_forward_pre_hook(lambda _, x: seen.append(x[0][:, 0, 0, 0]))
    for _ in range(20):
        mixup.loss(
            [
                (
                    torch.full((2, *by_hand.SHAPE), 10.0**i, dtype=torch.float64),
                    torch.zeros(2, dtype=torch.long),
                )
                for i in range(3)
            ]
        )
    values = torch.stack(seen)[:, ::2]
    assert len(seen) == 20
    assert not torch.isin(values, torch.tensor([1.0, 10.0, 100.0]).double()).any()
    assert values.unique().numel() == 60
    with pytest.raises(HmoeError, match="mixup_alpha must be above 0"):
        by_hand.tiny(Mixup, mixup_alpha=-1.0).loss(by_hand.draw((2, 2, 2), 0))


@pytest.mark.parametrize("sizes", [(5, 5, 5), (6, 3, 5), (4,)])
def test_groupdro(sizes):
    q = [1.0] * len(sizes)

    def slow(f, batches):
        losses = [by_hand.cross_entropy(f.classifier(f.featurizer(x)), y) for x, y in batches]
        for i, loss in enumerate(losses):
            q[i] *= float(np.exp(0.3 * loss.item()))
        total = sum(q)
        for i in range(len(q)):
            q[i] /= total
        return sum(weight * loss for weight, loss in zip(q, losses))

    dro = by_hand.tiny(GroupDRO, domains=len(sizes), groupdro_eta=0.3)
    two_updates(dro, slow, sizes)
    np.testing.assert_allclose(dro.q.numpy(), q, rtol=1e-12)


def test_groupdro_survives_huge_losses_and_refuses_an_absent_domain():
    dro = by_hand.tiny(GroupDRO, groupdro_eta=1.0)
    with torch.no_grad():
        dro.classifier.weight.mul_(1e6)
    for t in range(3):
        dro.loss(by_hand.draw((4, 4, 4), t))
    assert dro.q.isfinite().all()
    assert dro.q.sum().item() == pytest.approx(1)
    with pytest.raises(HmoeError):
        dro.loss(by_hand.draw((4, 0, 4), 0))


def test_quantiles_are_numpys():
    """As the published code computes them: strictly below `np.percentile(values, 100 (1 -
    drop))`, whole positions (as in 63 * 2 / 3) included."""
    generator = np.random.default_rng(0)
    for n in list(range(1, 70)) + [96, 127, 128, 129, 192, 512]:
        for drop in (0.0, 0.1, 1 / 3, 0.5, 1.0):
            values = generator.standard_normal((3, n))
            expected = values < np.percentile(values, 100 * (1 - drop), axis=1)[:, None]
            whole = abs((1 - drop) * (n - 1) - round((1 - drop) * (n - 1))) < 1e-9
            ours = below_top(torch.from_numpy(values), drop).numpy()
            if whole:
                assert np.abs(ours.sum(1) - round((1 - drop) * (n - 1))).max() <= 1
                assert np.abs(ours.sum(1) - expected.sum(1)).max() <= 1
            else:
                np.testing.assert_array_equal(ours, expected, err_msg=f"{n} {drop}")


@pytest.mark.parametrize("f_drop, b_drop", [(1 / 3, 1 / 3), (0.5, 0.2)])
def test_rsc(f_drop, b_drop):
    kept = []

    def slow(f, batches):
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        masks, change = [], []
        for image, label in zip(x, y.tolist()):
            z = f.featurizer(image[None])[0].detach().requires_grad_()
            p = f.classifier(z)
            (g,) = torch.autograd.grad(p[label], z)
            mask = torch.tensor(
                [float(value < np.percentile(g.numpy(), 100 * (1 - f_drop))) for value in g],
                dtype=torch.float64,
            )
            masks.append(mask)
            change.append((p.softmax(0)[label] - f.classifier(z * mask).softmax(0)[label]).item())
        limit, logits = np.percentile(change, 100 * (1 - b_drop)), []
        for image, mask, c in zip(x, masks, change):
            mask = torch.ones_like(mask) if c < limit else mask
            kept.append(mask.mean().item())
            logits.append(f.classifier(f.featurizer(image[None])[0] * mask))
        return by_hand.cross_entropy(torch.stack(logits), y)

    two_updates(by_hand.tiny(RSC, rsc_f_drop_factor=f_drop, rsc_b_drop_factor=b_drop), slow)
    assert 0 < np.mean(np.array(kept) < 1) < 0.5
    with pytest.raises(HmoeError, match="rsc_f_drop_factor must be at most 1"):
        by_hand.tiny(RSC, rsc_f_drop_factor=1.5).loss(by_hand.draw((2, 2, 2), 0))


def test_rsc_mutes_nothing_when_told_so():
    """With b_drop 0 only images at the batch's maximum are challenged; with one kept feature too
    many it would show here."""
    rsc = by_hand.tiny(RSC, rsc_f_drop_factor=1.0, rsc_b_drop_factor=1.0)
    x, y = by_hand.draw((7,), 0)[0]
    z = rsc.featurizer(x)
    kept = rsc.kept_features(z, y)
    assert not kept.any()
    assert not kept.requires_grad
    torch.testing.assert_close(
        rsc.loss([(x, y)])["loss"], F.cross_entropy(rsc.classifier.bias.expand(7, -1), y)
    )


def slow_randomize(z, pi, alpha=None):
    "Style (with alpha) or content randomisation of feature vectors, one by one."
    rows = []
    stats = lambda v: (v.sum() / len(v), ((v - v.sum() / len(v)) ** 2).sum() / (len(v) - 1))
    for b in range(len(z)):
        (m, v), (m2, v2) = stats(z[b]), stats(z[pi[b]])
        own, theirs = (z[b] - m) / (v + 1e-5) ** 0.5, (z[pi[b]] - m2) / (v2 + 1e-5) ** 0.5
        if alpha is None:
            rows.append(theirs.detach() * (v + 1e-5) ** 0.5 + m)
        else:
            rows.append(
                own * (alpha[b] * v + (1 - alpha[b]) * v2 + 1e-5) ** 0.5
                + alpha[b] * m
                + (1 - alpha[b]) * m2
            )
    return torch.stack(rows)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sagnet_against_three_optimisers_and_three_passes(weight_decay):
    sagnet = by_hand.tiny(SagNet, weight_decay=weight_decay, sag_w_adv=0.7)
    sagnet.style_head = torch.nn.Linear(by_hand.FEATURES, by_hand.CLASSES).double()
    shadow = copy.deepcopy(sagnet)
    f, c, s = shadow.featurizer, shadow.classifier, shadow.style_head
    adam_f, adam_c, adam_s = (by_hand.Adam(m.parameters(), 0.01, weight_decay) for m in (f, c, s))
    for t in range(2):
        batches = by_hand.draw((4, 4, 4), seed=t)
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        seed_everything(40 + t)
        reported = sagnet.update(batches)
        seed_everything(40 + t)
        pi, alpha = torch.randperm(12), torch.rand(12, 1, dtype=torch.float64)
        content = by_hand.cross_entropy(c(slow_randomize(f(x), pi, alpha)), y)
        for_f, for_c = (
            by_hand.gradients(content, f.parameters()),
            by_hand.gradients(content, c.parameters()),
        )
        adam_f.step(for_f), adam_c.step(for_c)
        style = by_hand.cross_entropy(s(slow_randomize(f(x), torch.randperm(12))), y)
        adam_s.step(by_hand.gradients(style, s.parameters()))
        log_p = torch.log_softmax(s(slow_randomize(f(x), torch.randperm(12))), 1)
        adversarial = 0.7 * sum(-log_p[b, k] for b in range(12) for k in range(4)) / 48
        adam_f.step(by_hand.gradients(adversarial, f.parameters()))
        assert reported == pytest.approx(
            {"loss": content.item(), "style": style.item(), "adversarial": adversarial.item()},
            rel=1e-9,
        )
    by_hand.assert_same_parameters(sagnet, shadow)
    moments = {
        name: int(sagnet.optimizer.state[p]["step"]) for name, p in sagnet.named_parameters()
    }
    assert set(moments.values()) == {2, 4}
    assert all((steps == 4) == name.startswith("featurizer") for name, steps in moments.items())


def test_randomisation_passes_gradients_where_the_paper_says():
    z = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    seed_everything(0)
    other = torch.randperm(6)
    for randomize, to_the_other in ((randomize_style, True), (randomize_content, False)):
        seed_everything(0)
        (g,) = torch.autograd.grad((randomize(z)[0] * torch.arange(5.0)).sum(), z)
        assert g[0].abs().sum() > 0
        assert bool(g[other[0]].abs().sum() > 0) == to_the_other
        assert other[0] != 0
