"""PCL, DIAL, JiGen, MatchDG, DIVA, HDUVA, GMDG and iDAG against updates written out image by image,
and what they refuse."""

import itertools
import math

import by_hand
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from written_out import SHAPE as HAND_SHAPE
from written_out import build, random_domains

from hmoe_repro.algorithms import MEMBERS, causal, get_algorithm
from hmoe_repro.algorithms.anchors import GMDG, explained_shift
from hmoe_repro.algorithms.base import ALGORITHMS, ERM
from hmoe_repro.algorithms.causal import IDAG, FeatureGraph, follow_prototypes
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.algorithms.contrast import PCL, proxy_contrast
from hmoe_repro.algorithms.generative import DIVA, HDUVA, Decoder, divergence, gaussian
from hmoe_repro.algorithms.hparams import merge_hparams
from hmoe_repro.algorithms.robustness import DIAL, in_evaluation
from hmoe_repro.algorithms.self_supervised import (
    JiGen,
    MatchDG,
    distant_orders,
    find_matches,
    shuffle_tiles,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything

ALL = (PCL, DIAL, JiGen, MatchDG, DIVA, HDUVA, GMDG, IDAG)
EACH = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
SHAPE, SMALL = ((3, 16, 16), 4, 3), {"network": "small_cnn"}
SIZES = (4, 3, 5)


def follow(fast, slow, loss_of, updates=3, sizes=SIZES, total=5001):
    "Updates of `fast`, and the same by `loss_of(slow, batches, t)` and Adam, with the same draws."
    fast.total_steps = slow.total_steps = total
    parameters = list(slow.parameters())
    adam = by_hand.Adam(parameters, lr=fast.hparams["lr"])
    for t in range(updates):
        batches = random_domains(t, sizes)
        seed_everything(20 + t)
        reported = fast.update(batches)
        seed_everything(20 + t)
        losses = loss_of(slow, batches, t)
        for name, value in losses.items():
            assert reported[name] == pytest.approx(value.item(), rel=1e-9), name
        adam.step(by_hand.gradients(losses["loss"], parameters))
        by_hand.assert_same_parameters(fast, slow, tolerance=1e-9)


def together(batches):
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def domains_of(batches):
    return [i for i, (_, y) in enumerate(batches) for _ in y]


def unit(v):
    return v / (v**2).sum() ** 0.5


# PCL


def pcl_by_hand(v, y, proxies, published=False):
    "Image by image: its proxy, and every image of another class at an acute angle."
    total = 0
    by_class = sorted(range(len(y)), key=lambda b: y[b])
    for b in range(len(y)):
        a = by_class[b] if published else b
        own = torch.exp(12 * (unit(v[a]) @ unit(proxies[y[a]])))
        others = 0
        for k in range(len(y)):
            similarity = unit(v[b]) @ unit(v[k])
            if y[k] != y[b] and similarity > 1e-6:
                others = others + torch.exp(12 * similarity)
        total = total - torch.log(own / (own + others))
    return total / len(y)


def batch_norm_by_hand(norm, z):
    mean = z.mean(0)
    variance = ((z - mean) ** 2).mean(0)
    return norm.weight * (z - mean) / (variance + norm.eps) ** 0.5 + norm.bias


@pytest.mark.parametrize("published", [False, True])
def test_an_update_of_pcl_by_hand(published):
    settings = {"pcl_weight": 0.7, "pcl_hidden": 7, "pcl_dim": 5, "pcl_dropout": 0.0}
    fast, slow = build(PCL, settings | {"domainbed_compat": published})

    def loss(model, batches, t):
        x, y = together(batches)
        first, norm, _, _, last = model.encoder
        hidden = batch_norm_by_hand(norm, first(model.featurizer(x)))
        z = last(hidden.clamp_min(0))
        nll = by_hand.cross_entropy(z @ model.classifier.weight.T, y)
        proxies = model.classifier.weight @ model.proxy_projection.weight.T
        v = z @ model.projection.weight.T + model.projection.bias
        contrast = pcl_by_hand(v, y.tolist(), proxies, published)
        return {"loss": nll + 0.7 * contrast, "nll": nll, "contrast": contrast}

    follow(fast, slow, loss)


def test_proxy_contrast_counts_acute_negatives_only_and_ignores_lengths():
    seed_everything(0)
    v = torch.randn(9, 3, dtype=torch.float64)
    y = torch.arange(9) % 3
    proxies = torch.randn(3, 3, dtype=torch.float64)
    found = proxy_contrast(v, y, proxies)
    torch.testing.assert_close(found, pcl_by_hand(v, y.tolist(), proxies), rtol=1e-12, atol=0)
    lengths = torch.rand(9, 1, dtype=torch.float64) + 0.5
    torch.testing.assert_close(proxy_contrast(lengths * v, y, 3 * proxies), found)
    assert proxy_contrast(v, torch.zeros(9, dtype=torch.long), proxies) == 0  # nobody else


def test_published_pcl_gives_an_image_the_proxy_term_of_another():
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], dtype=torch.float64)
    y = torch.tensor([1, 0, 1])
    proxies = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    # similarities with the own proxy are 1, 1 and 0.6, and image 1 has the negative image 2 at 0.8
    intended = [0, math.log(1 + math.exp(12 * (0.8 - 1))), math.log(1 + math.exp(12 * (0.8 - 0.6)))]
    assert proxy_contrast(v, y, proxies).item() == pytest.approx(sum(intended) / 3, rel=1e-12)
    y = torch.tensor([1, 1, 0])  # sorted by class: image 2, then 0, then 1
    terms = [0.8, 1.0, 0.0]  # those of images 2, 0 and 1
    negatives = [[0.6], [0.8], [0.6, 0.8]]
    published = 0
    for own, others in zip(terms, negatives):
        published += math.log(1 + sum(math.exp(12 * (other - own)) for other in others)) / 3
    found = proxy_contrast(v, y, proxies, published=True)
    assert found.item() == pytest.approx(published, rel=1e-12)


def test_pcl_starts_as_released_and_needs_a_linear_classifier():
    model = PCL((3, 16, 16), 10, 3, SMALL)
    assert (model.classifier.weight.shape, model.classifier.bias) == ((10, 256), None)
    assert model.classifier.weight.abs().max() <= 10**-0.5
    assert model.encoder[0].weight.std().item() == pytest.approx(0.01, rel=0.05)
    with pytest.raises(HmoeError, match="PCL's proxies.*nonlinear_classifier=false"):
        PCL(*SHAPE, SMALL | {"nonlinear_classifier": True})


# DIAL


def dial_by_hand(settings):
    def attack(model, x, y, noise):
        low = torch.stack([x[:, c].min() for c in range(x.shape[1])]).view(1, -1, 1, 1)
        high = torch.stack([x[:, c].max() for c in range(x.shape[1])]).view(1, -1, 1, 1)
        unit_of = high - low
        with torch.no_grad():
            natural = model.predict(x).softmax(1)
        moved = x + settings["dial_noise"] * unit_of * noise
        for _ in range(settings["dial_steps"]):
            moved = moved.detach().requires_grad_()
            logits = model.predict(moved)
            total = 0
            for b in range(len(y)):
                p = logits[b].exp() / logits[b].exp().sum()
                total = total - p[y[b]].log()
                total = total + sum(q * (q.log() - r.log()) for q, r in zip(natural[b], p))
            (g,) = torch.autograd.grad(total, moved)
            moved = moved + settings["dial_lr"] * unit_of * torch.sign(g)
            width = settings["dial_epsilon"] * unit_of
            moved = torch.minimum(torch.maximum(moved, x - width), x + width)
            moved = torch.minimum(torch.maximum(moved, low), high)
        return moved.detach()

    def loss(model, batches, t):
        x, y = together(batches)
        adversarial = attack(model, x, y, torch.randn_like(x))
        nll = by_hand.cross_entropy(model.predict(x), y)
        other = by_hand.cross_entropy(model.predict(adversarial), y)
        total = nll + settings["dial_gamma"] * other
        return {"loss": total, "nll": nll, "adversarial": other}

    return loss


@pytest.mark.parametrize("steps, epsilon", [(3, 0.031), (2, 0.004)])
def test_an_update_of_dial_by_hand(steps, epsilon):
    settings = {
        "dial_gamma": 0.6,
        "dial_steps": steps,
        "dial_noise": 0.002,
        "dial_lr": 0.003,
        "dial_epsilon": epsilon,
    }
    fast, slow = build(DIAL, settings)
    follow(fast, slow, dial_by_hand(settings))


def test_an_attack_raises_the_loss_within_its_bounds_and_leaves_no_trace():
    seed_everything(0)
    model = DIAL((3, 32, 32), 4, 3, {"network": "resnet18", "weights": "random"}).train()
    x, y = together(random_batches(3, (3, 32, 32), 4, 0, size=3))
    x = 10 * x - 3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    found = model.adversarial(x, y)
    assert not found.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    low, high = x.amin((0, 2, 3), keepdim=True), x.amax((0, 2, 3), keepdim=True)
    assert ((found - x).abs() <= 0.031 * (high - low) + 1e-5).all()
    assert ((found >= low) & (found <= high)).all()
    model.eval()
    losses = [F.cross_entropy(model.predict(images), y).item() for images in (x, found)]
    assert losses[1] > losses[0]


def test_modes_are_restored_even_after_an_error():
    model = ERM(*SHAPE, SMALL).train()
    model.classifier.eval()
    with pytest.raises(RuntimeError), in_evaluation(model):
        assert not model.training
        raise RuntimeError
    assert model.training
    assert model.featurizer.training
    assert not model.classifier.training


# JiGen


def shuffled_by_hand(image, order, grid):
    "Pixel by pixel."
    height, width = (side // grid for side in image.shape[1:])
    top, left = ((side - grid * (side // grid)) // 2 for side in image.shape[1:])
    moved = image.clone()
    for place, tile in enumerate(order):
        for i, j in itertools.product(range(height), range(width)):
            to = top + place // grid * height + i, left + place % grid * width + j
            source = top + tile // grid * height + i, left + tile % grid * width + j
            moved[:, to[0], to[1]] = image[:, source[0], source[1]]
    return moved


@pytest.mark.parametrize("shape, grid", [((3, 8, 8), 3), ((1, 9, 6), 3), ((2, 7, 5), 2)])
def test_tiles_by_hand(shape, grid):
    seed_everything(0)
    x = torch.rand(6, *shape)
    orders = torch.stack([torch.randperm(grid**2) for _ in range(6)])
    found = shuffle_tiles(x, orders)
    for image, order, moved in zip(x, orders.tolist(), found):
        assert torch.equal(moved, shuffled_by_hand(image, order, grid))
    assert torch.equal(shuffle_tiles(found, orders.argsort(1)), x)


@pytest.mark.parametrize("number, tiles", [(30, 9), (23, 4), (5, 4), (1, 9)])
def test_orders_are_far_apart(number, tiles):
    orders = distant_orders(number, tiles).tolist()
    assert orders[0] == list(range(tiles))
    assert len({tuple(order) for order in orders}) == number + 1
    assert all(sorted(order) == orders[0] for order in orders)
    distance = lambda a, b: sum(i != j for i, j in zip(a, b))  # noqa: E731
    if tiles == 4:
        left = [*itertools.permutations(range(4))]
        for k in range(1, len(orders)):
            nearest = {o: min(distance(o, known) for known in orders[:k]) for o in left}
            assert orders[k] == list(max(left, key=nearest.get)), k  # the first of the farthest
    else:
        assert min(distance(a, b) for a, b in itertools.combinations(orders, 2)) >= 7


def jigen_by_hand(grid, whole_share, weight):
    def loss(model, batches, t):
        x, y = together(batches)
        drawn = torch.randint(len(model.orders), (len(y),)).tolist()
        whole = (torch.rand(len(y)) < whole_share).tolist()
        numbers = [0 if keep else k for keep, k in zip(whole, drawn)]
        orders = model.orders.tolist()
        pictures = [shuffled_by_hand(image, orders[k], grid) for image, k in zip(x, numbers)]
        z = model.featurizer(torch.stack(pictures))
        jigsaw = by_hand.cross_entropy(model.jigsaw(z), torch.tensor(numbers))
        kept = [b for b, k in enumerate(numbers) if k == 0]
        nll = torch.zeros((), dtype=torch.float64)
        if kept:
            nll = by_hand.cross_entropy(model.classifier(z[kept]), y[kept])
        return {"loss": nll + weight * jigsaw, "nll": nll, "jigsaw": jigsaw}

    return loss


@pytest.mark.parametrize("grid, share, orders", [(3, 0.5, 30), (2, 0.0, 5), (2, 1.0, 23)])
def test_an_update_of_jigen_by_hand(grid, share, orders):
    settings = {
        "jigsaw_grid": grid,
        "jigsaw_whole": share,
        "jigsaw_orders": orders,
        "jigsaw_weight": 0.8,
    }
    fast, slow = build(JiGen, settings)
    follow(fast, slow, jigen_by_hand(grid, share, 0.8))


def test_jigen_evaluates_whole_images_and_keeps_the_callers():
    model = JiGen(*SHAPE, SMALL | {"jigsaw_whole": 0.0})
    batches = random_batches(3, SHAPE[0], 4, 0)
    before = [x.clone() for x, _ in batches]
    model.update(batches)
    assert all(torch.equal(x, old) for (x, _), old in zip(batches, before))
    model.eval()
    state = torch.get_rng_state()
    assert model.loss(batches)["loss"] == ERM.loss(model, batches)["loss"]
    assert torch.equal(state, torch.get_rng_state())


# MatchDG


def matches_by_hand(distance, y, d):
    "For each image, domain -> the nearest image of its class there."
    found = []
    for i in range(len(y)):
        of_image = {}
        for j in range(len(y)):
            if y[j] == y[i] and d[j] != d[i]:
                best = of_image.get(d[j])
                if best is None or distance[i][j] < distance[i][best]:
                    of_image[d[j]] = j
        found.append(of_image)
    return found


def test_matches_by_hand():
    for seed in range(10):
        batches = random_domains(seed, (4, 1, 6))
        _, y = together(batches)
        distance = torch.rand(11, 11, dtype=torch.float64)
        indices, found = find_matches(distance, batches)
        expected = matches_by_hand(distance.tolist(), y.tolist(), domains_of(batches))
        for i, of_image in enumerate(expected):
            assert found[i].nonzero().flatten().tolist() == sorted(of_image)
            for domain, j in of_image.items():
                assert indices[i, domain] == j


def matchdg_by_hand(first, random, weight, tau, total):
    def contrast(z, y, matches):
        terms = []
        for i, of_image in enumerate(matches):
            for j in of_image.values():
                positive = torch.exp(unit(z[i]) @ unit(z[j]) / tau)
                negatives = [
                    torch.exp(unit(z[i]) @ unit(z[k]) / tau) for k in range(len(y)) if y[k] != y[i]
                ]
                terms.append(-torch.log(positive / (positive + sum(negatives))))
        return sum(terms) / len(terms)

    def loss(model, batches, t):
        x, y = together(batches)
        d = domains_of(batches)
        z = model.matcher(x)
        if t / total < first:
            distance = [[((a - b) ** 2).sum().item() for b in z] for a in z]
            if t / total < random:
                distance = torch.rand(len(y), len(y), dtype=torch.float64).tolist()
            matches = matches_by_hand(distance, y.tolist(), d)
            return {"loss": contrast(z, y.tolist(), matches)}
        distance = [[((a - b) ** 2).sum().item() for b in z] for a in z]
        matches = matches_by_hand(distance, y.tolist(), d)
        logits = model.predict(x)
        nll = by_hand.cross_entropy(logits, y)
        terms = [
            ((logits[i] - logits[j]) ** 2).sum()
            for i, of_image in enumerate(matches)
            for j in of_image.values()
        ]
        penalty = sum(terms) / len(terms)
        ramp = weight * (t / total - first) / (1 - first)
        return {"loss": nll + ramp * penalty, "nll": nll, "penalty": penalty}

    return loss


def test_updates_of_both_phases_of_matchdg_by_hand():
    settings = {
        "match_fraction": 0.5,
        "match_random": 0.2,
        "match_weight": 0.9,
        "match_temperature": 0.3,
    }
    fast, slow = build(MatchDG, settings)
    follow(fast, slow, matchdg_by_hand(0.5, 0.2, 0.9, 0.3, 8), updates=8, total=8)


def test_matchdg_matches_the_nearest_features_whatever_their_direction():
    model = MatchDG((3, 2, 2), 1, 2, SMALL | {"match_fraction": 0.0, "match_weight": 1.0})
    model.double()
    x = torch.zeros(3, 3, 2, 2, dtype=torch.float64)
    x[0, :2, 0, 0] = torch.tensor([1.0, 0.0])
    x[1, :2, 0, 0] = torch.tensor([9.0, 0.0])  # the same direction, and far away
    x[2, :2, 0, 0] = torch.tensor([1.0, 1.0])
    model.matcher = torch.nn.Flatten()
    model.predict = lambda images: images[:, :2, 0, 0]
    model.total_steps, model.update_count = 2, 1
    y = torch.zeros(3, dtype=torch.long)
    # images 0 and 2 match each other at a squared distance of 1; image 1 matches 0, 64 away
    found = model.loss([(x[:1], y[:1]), (x[1:], y[1:])])["penalty"]
    assert found.item() == pytest.approx((1 + 64 + 1) / 3)


def test_the_phases_of_matchdg_move_different_networks():
    model = MatchDG(*SHAPE, SMALL | {"match_fraction": 0.5, "match_random": 0.0})
    model.total_steps = 4
    for step in range(4):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.update(random_batches(3, SHAPE[0], 4, step))
        moved = {n.split(".")[0] for n, p in model.named_parameters() if (p != before[n]).any()}
        assert moved == ({"matcher"} if step < 2 else {"featurizer", "classifier"})
    with pytest.raises(HmoeError, match="MatchDG matches images of different training domains"):
        MatchDG((3, 16, 16), 4, 1, SMALL)


# DIVA and HDUVA


def softplus(v):
    return torch.log(1 + torch.exp(v))


def kl_by_hand(q, p):
    "The divergence of normal distributions given by (means, raw widths) in one row."
    n = q.shape[1] // 2
    q_width, p_width = softplus(q[:, n:]) + 1e-7, softplus(p[:, n:]) + 1e-7
    terms = torch.log(p_width / q_width) - 0.5
    terms = terms + (q_width**2 + (q[:, :n] - p[:, :n]) ** 2) / (2 * p_width**2)
    return terms.sum() / len(q)


def drawn_by_hand(parameters):
    n = parameters.shape[1] // 2
    noise = torch.empty_like(parameters[:, :n]).normal_()
    return parameters[:, :n] + (softplus(parameters[:, n:]) + 1e-7) * noise


def generative_by_hand(name, beta, alpha_y, alpha_d, warmup, total):
    def loss(model, batches, t):
        x, y = together(batches)
        d = torch.tensor(domains_of(batches))
        q_y = model.class_posterior(model.featurizer(x))
        q_x = model.rest_posterior(model.rest_featurizer(x))
        features = model.domain_featurizer(x)
        extra, added = [], 0
        if name == "DIVA":
            q_d = model.domain_posterior(features)
            z_d = drawn_by_hand(q_d)
            p_d = model.domain_prior.weight[d]
            domain = by_hand.cross_entropy(model.domain_classifier(z_d.clamp_min(0)), d)
            added = alpha_d * domain
            kl_topic = 0
        else:
            a = softplus(model.topic_posterior(features)) + 1e-6
            gammas = torch.distributions.Gamma(a, torch.ones_like(a)).rsample()
            topic = gammas / gammas.sum(1, keepdim=True)
            q_d = model.domain_posterior(torch.cat([features, topic], 1))
            z_d = drawn_by_hand(q_d)
            first, _, last = model.domain_prior
            p_d = last(first(topic).clamp_min(0))
            extra = [topic]
            total_a = a.sum(1)
            terms = torch.lgamma(total_a) - torch.lgamma(a).sum(1)
            terms = terms - math.lgamma(a.shape[1])
            terms = terms + ((a - 1) * (a.digamma() - total_a.digamma()[:, None])).sum(1)
            kl_topic = terms.mean()
        z_y = drawn_by_hand(q_y)
        z_x = drawn_by_hand(q_x)
        drawing = model.decoder(torch.cat([z_y, *extra, z_d, z_x], 1))
        width = torch.exp(model.decoder.log_width)
        misfit = ((drawing - x) ** 2 / (2 * width**2) + torch.log(width)).sum() / len(y)
        size = z_x.shape[1]
        raw = math.log(math.exp(1 - 1e-7) - 1)  # its width is 1
        standard = torch.tensor([[0.0] * size + [raw] * size], dtype=torch.float64)
        kl = kl_by_hand(q_y, model.class_prior.weight[y]) + kl_by_hand(q_d, p_d) + kl_topic
        kl = kl + kl_by_hand(q_x, standard)
        nll = by_hand.cross_entropy(model.classifier(z_y.clamp_min(0)), y)
        rise = beta * min(1, t / total / warmup) if warmup else beta
        whole = misfit + rise * kl + alpha_y * nll + added
        return {"loss": whole, "nll": nll, "misfit": misfit}

    return loss


@pytest.mark.parametrize("cls", [DIVA, HDUVA], ids=lambda cls: cls.name)
@pytest.mark.parametrize("warmup", [0.0, 0.5])
def test_an_update_of_a_generative_model_by_hand(cls, warmup):
    settings = {
        "lr": 1e-4,  # Adam magnifies rounding where a gradient is near 1e-8
        "latent_dim": 5,
        "class_weight": 7.0,
        "latent_beta": 0.8,
        "latent_warmup": warmup,
        **({"domain_weight": 3.0} if cls is DIVA else {"topics": 4}),
    }
    fast, slow = build(cls, settings)
    loss = generative_by_hand(cls.name, 0.8, 7.0, 3.0, warmup, 4)
    for model in (fast, slow):
        model.update_count, model.total_steps = 1, 4
    batches = random_domains(9, SIZES)
    seed_everything(9)
    ours = by_hand.gradients(fast.loss(batches)["loss"], fast.parameters())
    seed_everything(9)
    theirs = by_hand.gradients(loss(slow, batches, 1)["loss"], slow.parameters())
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    fast.update_count = 0
    follow(fast, slow, loss, updates=4, total=4)


def test_divergences_and_a_drawing_of_a_thumbnail():
    q, p = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(divergence(gaussian(q), gaussian(p)), kl_by_hand(q, p))
    assert divergence(gaussian(q), gaussian(q)) == pytest.approx(0, abs=1e-12)
    decoder = Decoder(3, (2, 64, 40))
    assert decoder.sides == (32, 32)
    x = torch.rand(2, 2, 64, 40)
    z = torch.zeros(2, 3)
    means = torch.nn.functional.interpolate(x, (32, 40), mode="area")  # rows halve exactly
    target = torch.stack(
        [means[..., c * 40 // 32 : -(-(c + 1) * 40 // 32)].mean(-1) for c in range(32)], -1
    )
    expected = (0.5 * (decoder(z) - target) ** 2).sum() / 2
    torch.testing.assert_close(decoder.misfit(z, x), expected)
    with pytest.raises(HmoeError, match="at least 4 pixels a side"):
        DIVA((3, 2, 2), 4, 3, SMALL)


def test_predictions_use_the_class_alone():
    for cls in (DIVA, HDUVA):
        model = cls(*SHAPE, SMALL).eval()
        x = torch.rand(4, 3, 16, 16)
        before = model.predict(x)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if not name.startswith(("featurizer.", "class_posterior.", "classifier.")):
                    p.zero_()
        assert torch.equal(model.predict(x), before)


# GMDG


def stages_by_hand(network, x):
    "The outputs of the norms of a small ConvNet, and its features."
    outputs = []
    for convolution, norm in zip(network.convolutions, network.norms):
        x = norm(F.relu(convolution(x)))
        outputs.append(x)
    return outputs, x.mean((2, 3))


def label_vectors_by_hand(layers, y, width):
    dropped = lambda t: t * F.dropout(torch.ones_like(t), 0.2)  # noqa: E731 - the same draws
    first, second, last = layers
    number = torch.stack([torch.full((width,), float(k), dtype=torch.float64) for k in y.tolist()])
    hidden = dropped(first(number)).clamp_min(0)
    return dropped(last(dropped(second(hidden)).clamp_min(0)))


def shift_by_hand(z, mapped):
    "With the covariances of the features, as in the released code."
    x = z / (z**2).sum() ** 0.5
    y = mapped / (mapped**2).sum() ** 0.5
    x, y = x - x.mean(0), y - y.mean(0)
    n = len(x)
    explained = (x.T @ y / n) @ torch.linalg.pinv(y.T @ y / n) @ (y.T @ x / n)
    return (explained**2).mean()


def test_updates_of_gmdg_by_hand():
    settings = {"ld": 0.3, "lr_mult": 4.0, "gmdg_shift": 0.2, "gmdg_domain": 0.4}
    fast, slow = build(GMDG, settings)
    with torch.no_grad():
        for p in slow.pretrained.parameters():
            p += 0.05  # else the features and their anchors are equal at first
    fast.pretrained.load_state_dict(slow.pretrained.state_dict())
    lr = fast.hparams["lr"]
    network = [*slow.featurizer.parameters(), *slow.classifier.parameters()]
    widths = [*slow.b.parameters(), slow.domain_b]
    adams = [
        by_hand.Adam(slow.label_map.parameters(), lr=4 * lr),
        by_hand.Adam(network, lr=lr),
        by_hand.Adam(widths, lr=4 * lr),
    ]
    variance = lambda b: softplus(b) + 1e-5  # noqa: E731
    for t in range(3):
        batches = random_domains(t, (4, 3, 5))
        x, y = together(batches)
        seed_everything(t)
        reported = fast.update(batches)
        seed_everything(t)
        width = slow.domain_b.shape[1] // 2
        mapped = label_vectors_by_hand(slow.label_map.layers, y, width)
        of_labels = by_hand.cross_entropy(slow.classifier(mapped), y)
        first_step = by_hand.gradients(of_labels, adams[0].parameters)
        outputs, z = stages_by_hand(slow.featurizer, x)
        with torch.no_grad():
            anchors, _ = stages_by_hand(slow.pretrained, x)
        nll = by_hand.cross_entropy(slow.classifier(z), y)
        reg = 0
        for f, anchor, b in zip(outputs, anchors, slow.b):
            v = variance(b).view(1, -1, 1, 1)
            reg = reg + 0.5 * ((f - anchor) ** 2 / v + torch.log(v)).mean()
        mapped = mapped.detach()
        shift = shift_by_hand(z, mapped)
        scale = by_hand.gradients(nll, [z])[0].max() / by_hand.gradients(shift, [z])[0].max()
        joined = torch.cat([z, mapped], 1)
        parts = [joined[start : start + 3] for start in (0, 4, 7)]  # the first three of each
        centre = sum(parts) / 3
        v = sum(variance(b) for b in slow.domain_b) / 3
        terms = [(centre - part.detach()) ** 2 / v + torch.log(v) for part in parts]
        domain = 0.5 * sum(term.mean() for term in terms) / 3
        loss = nll + 0.3 * reg + 0.2 * scale.detach() * shift + 0.4 * domain
        steps = [by_hand.gradients(loss, adam.parameters) for adam in adams[1:]]
        for adam, gradients in zip(adams, [first_step, *steps]):
            adam.step(gradients)
        found = {"loss": loss, "nll": nll, "reg": reg, "shift": shift, "domain": domain}
        for name, value in found.items():
            assert reported[name] == pytest.approx(value.item(), rel=1e-9), name
        by_hand.assert_same_parameters(fast, slow, tolerance=1e-9)


def test_explained_shift_at_its_ends():
    seed_everything(0)
    z = torch.randn(8, 5, dtype=torch.float64)
    whole = z / z.norm()
    whole = whole - whole.mean(0)
    everything = ((whole.T @ whole / 8) ** 2).mean()
    own = torch.randn(8, 20, dtype=torch.float64)  # explains any eight rows
    torch.testing.assert_close(explained_shift(z, own), everything)
    assert explained_shift(z, torch.ones(8, 3, dtype=torch.float64)) == 0
    model = GMDG(*SHAPE, SMALL)
    batch = [(x, torch.zeros_like(y)) for x, y in random_batches(3, SHAPE[0], 4, 0)]
    assert all(np.isfinite(value) for value in model.update(batch).values())


# iDAG


def exponential_by_hand(a):
    "The power series."
    total = term = torch.eye(len(a), dtype=a.dtype)
    for k in range(1, 40):
        term = term @ a / k
        total = total + term
    return total


def moved_by_hand(prototypes, z, group, keep):
    "Image by image, in the order of the batch; then length 1."
    prototypes = prototypes.clone()
    for feature, k in zip(z.detach(), group):
        prototypes[k] = keep * prototypes[k] + (1 - keep) * unit(feature)
    for k in set(range(len(prototypes))):
        if (prototypes[k] != 0).any():
            prototypes[k] = unit(prototypes[k])
    return prototypes


def test_prototypes_by_hand():
    seed_everything(0)
    stored = F.normalize(torch.randn(4, 3, dtype=torch.float64))
    stored[3] = 0
    for _ in range(5):
        z = torch.randn(9, 3, dtype=torch.float64)
        group = torch.randint(3, (9,))
        expected = moved_by_hand(stored, z, group.tolist(), 0.8)
        follow_prototypes(stored, z, group, 0.8)
        torch.testing.assert_close(stored, expected, rtol=1e-9, atol=1e-9)
    assert (stored[3] == 0).all()


def test_updates_of_both_phases_of_idag_by_hand(monkeypatch):
    monkeypatch.setattr(causal, "GROWTH_INTERVAL", 3)
    settings = {
        "dag_dim": 6,
        "dag_dropout": 0.0,
        "dag_anneal_steps": 2,
        "dag_temperature": 0.5,
        "dag_ema": 0.7,
        "dag_lambda1": 0.2,
        "dag_lambda2": 0.3,
        "dag_weight_nu": 1.1,
        "dag_weight_mu": 1.2,
        "lr": 1e-4,  # the bias before batch norm has rounding for a gradient
    }
    fast, slow = build(IDAG, settings)
    parameters = list(slow.parameters())
    adam = by_hand.Adam(parameters, lr=fast.hparams["lr"])
    rho, alpha, last_h = 1.0, 1.0, math.inf
    of_domains = torch.zeros(12, 6, dtype=torch.float64)
    of_classes = torch.zeros(4, 6, dtype=torch.float64)
    for t in range(8):
        batches = random_domains(t, SIZES)
        x, y = together(batches)
        group = [4 * d + k for d, k in zip(domains_of(batches), y.tolist())]
        first, norm, _, _, last = slow.encoder
        hidden = batch_norm_by_hand(norm, first(slow.featurizer(x)))
        z = last(hidden.clamp_min(0))
        graph = slow.graph.positive - slow.graph.negative
        paths = exponential_by_hand(graph**2)
        mask = paths[:6, 6]
        masked = z * mask.detach()
        of_domains = moved_by_hand(of_domains, z, group, 0.7)
        of_classes = moved_by_hand(of_classes, masked, y.tolist(), 0.7)
        nll = by_hand.cross_entropy(slow.classifier(masked), y)
        near = torch.stack([of_domains @ unit(row) / 0.5 for row in z])
        loss = nll + 1.1 * by_hand.cross_entropy(near, torch.tensor(group))
        h = sum(paths[i, i] for i in range(7)) - 7
        if t >= 2:
            labels = torch.arange(12) % 4
            again = torch.stack(
                [
                    sum(p[i] * graph[i, :6] for i in range(6)) + k * graph[6, :6]
                    for p, k in zip(of_domains, labels.tolist())
                ]
            )
            cosines = [
                (a @ p) / ((a @ a + 1e-12) * (p @ p + 1e-12)) ** 0.5
                for a, p in zip(again, of_domains)
            ]
            rebuilt = 1 - sum(cosines) / 12
            rebuilt = rebuilt + by_hand.cross_entropy(
                slow.prototype_classifier(of_domains * mask), labels
            )
            near = torch.stack([of_classes @ unit(row) / 0.5 for row in masked])
            loss = loss + 1.2 * by_hand.cross_entropy(near, y) + 0.3 * rebuilt
            loss = loss + 0.5 * rho * h**2 + alpha * h
            loss = loss + 0.2 * (slow.graph.positive + slow.graph.negative).mean()
        if t == 2:
            adam = by_hand.Adam(parameters, lr=fast.hparams["lr"])
        adam.step(by_hand.gradients(loss, parameters))
        if t % 3 == 0:
            if rho < 100 and h.item() > 0.25 * last_h:
                rho = 10 * rho
                alpha = alpha + rho * h.item()
            last_h = h.item()
        with torch.no_grad():
            for part in (slow.graph.positive, slow.graph.negative):
                part.copy_(part.clamp_min(0) * (1 - torch.eye(7)))
        assert fast.update(batches)["loss"] == pytest.approx(loss.item(), rel=1e-9)
        by_hand.assert_same_parameters(fast, slow, tolerance=1e-9)
        assert (fast.rho, fast.alpha) == (rho, pytest.approx(alpha, rel=1e-9))
    assert rho > 1
    assert (slow.graph.negative > 0).any()


def test_the_graph_of_idag_has_no_loops_and_cycles_cost():
    graph = FeatureGraph(3)
    torch.testing.assert_close(graph.paths()[:3, 3], torch.ones(3))
    assert graph.paths().trace() == 4
    with torch.no_grad():
        graph.negative[3, 0] = 0.5
        graph.positive[1, 1] = 3.0
        graph.positive[0, 1] = -1.0
    graph.project()
    assert graph.positive.diagonal().tolist() == [0] * 4
    assert graph.positive.min() == 0
    assert graph.paths().trace() > 4.1


# All together


@EACH
def test_conformance_and_resuming(cls, tmp_path):
    check_algorithm(cls)
    by_hand.assert_resumes(cls, tmp_path)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
def test_a_stopped_run_resumes_bitwise(cls, tmp_path):
    by_hand.stopped_and_resumed(cls.name, tmp_path)


@pytest.mark.parametrize("network, side", [("resnet18", 48), ("small_vit", 16), ("mnist_cnn", 28)])
@EACH
def test_other_networks_train(cls, network, side):
    options = {"network": network} | ({"weights": "random"} if network == "resnet18" else {})
    seed_everything(0)
    model = cls((3, side, side), 4, 3, options).train()
    model.total_steps = 3
    for step in range(2):
        losses = model.update(random_batches(3, (3, side, side), 4, step, size=3))
        assert all(np.isfinite(value) for value in losses.values())
    assert not any(module._forward_hooks for module in model.modules())


FROZEN = {"network": "efficientnet_lite0", "weights": "random", "frozen_stages": 2}


@pytest.mark.parametrize("cls", [DIAL, JiGen, DIVA, HDUVA], ids=lambda cls: cls.name)
def test_frozen_stages_are_refused_in_planning(cls):
    defaults = merge_hparams(cls.HPARAMS, FROZEN, 64)
    with pytest.raises(HmoeError, match=f"{cls.name} .*images.*frozen_stages=0"):
        cls.check_domains(3, defaults)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(HmoeError, match="4 tiles have 23 orders.*finer jigsaw_grid"):
        JiGen(*SHAPE, SMALL | {"jigsaw_grid": 2, "jigsaw_orders": 24})
    with pytest.raises(HmoeError, match="3 x 3 tiles, and the input shape is"):
        JiGen((3, 2, 2), 4, 3, SMALL)
    with pytest.raises(HmoeError):
        JiGen(*SHAPE, SMALL | {"jigsaw_grid": 4})


def test_registered_with_their_defaults():
    assert MEMBERS["generative"] == ["DIVA", "HDUVA"]
    assert MEMBERS["self_supervised"] == ["JiGen", "MatchDG"]
    assert all(ALGORITHMS[cls.name] is cls for cls in ALL)
    assert {cls.name for cls in ALL if cls.needs_domain_labels} == {
        "MatchDG",
        "DIVA",
        "GMDG",
        "iDAG",
    }
    added = lambda cls: {  # noqa: E731
        name: merge_hparams(cls.HPARAMS, {})[name] for name in cls.HPARAMS.keys() - ERM.HPARAMS
    }
    assert added(DIAL) == {
        "dial_gamma": 0.1,
        "dial_steps": 3,
        "dial_noise": 0.001,
        "dial_lr": 0.003,
        "dial_epsilon": 0.031,
    }
    latents = {"latent_dim": 64, "class_weight": 3500.0, "latent_beta": 1.0, "latent_warmup": 0.2}
    assert added(DIVA) == latents | {"domain_weight": 2000.0}
    assert added(HDUVA) == latents | {"topics": 3}
    assert added(JiGen)["jigsaw_orders"] == 30
    assert HAND_SHAPE == by_hand.SHAPE


@pytest.mark.parametrize("name", ["SAM+PCL", "SAM+JiGen", "DISAM+DIVA"])
def test_combinations_with_a_second_gradient(name):
    model = get_algorithm(name)(*SHAPE, SMALL)
    assert np.isfinite(model.update(random_batches(3, SHAPE[0], 4, 0))["perturbed_loss"])


def test_the_studies_have_the_length_of_table_1_and_its_rows():
    from hmoe_repro.studies.studies import study_configs

    search, table, first = (
        study_configs(f"quick-{name}") for name in ("newer-search", "newer", "table1")
    )
    assert {config.algorithm for config in search} == {cls.name for cls in ALL}
    assert {config.algorithm for config in table} == {cls.name for cls in ALL} | {"ERM"}
    assert len({config.run_id for config in search}) == len(search) == 8 * 4 * 4
    assert len({config.run_id for config in table}) == len(table) == 9 * 4 * 6
    assert {c.trial_seed for c in search}.isdisjoint(c.trial_seed for c in table)
    assert {c.steps for c in (*search, *table)} == {c.steps for c in first} == {701}
    of_table_1 = {c.run_id for c in first if c.algorithm == "ERM"}
    assert of_table_1 == {c.run_id for c in table if c.algorithm == "ERM" and c.trial_seed < 3}


@pytest.mark.parametrize(
    "name, other, added",
    [
        ("linear-sharpness", "linear", {"SAM", "ASAM", "GSAM", "SAGM", "DISAM"}),
        ("linear-newer", "linear", {"PCL", "iDAG"}),
        ("linear-phases", "linear", {"RIDG", "iDAG"}),
        ("newer", "power", {"MatchDG", "GMDG"}),
        ("styles", "power", {"MixStyle", "EFDMix"}),
    ],
)
def test_the_studies_of_pacs_share_their_runs_of_erm(name, other, added):
    from hmoe_repro.studies.study_file import read_study

    study, first = read_study(f"pacs-{name}"), read_study(f"pacs-{other}")
    assert {algorithm for block in study.runs for algorithm in block.algorithms} == {"ERM", *added}
    (of_erm,) = [block for block in study.runs if "ERM" in block.algorithms]
    [first_of_erm] = [block for block in first.runs if "ERM" in block.algorithms]
    same = ("datasets", "test_domains", "seeds", "steps", "network", "resolution", "measure")
    for block in study.runs:
        for setting in same[:-1]:
            assert getattr(block, setting) == getattr(first_of_erm, setting), setting
    assert of_erm.measure == first_of_erm.measure
    shared = first_of_erm.hparams[0]["all"]
    assert all(block.hparams[0]["all"] == shared for block in study.runs)
