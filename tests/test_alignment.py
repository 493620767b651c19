"""CORAL, MMD, DANN, CDANN and MTL against explicit loops; schedules, class weights and running
means."""

import pytest
import torch
import torch.nn.functional as F
from written_out import (
    CLASSES,
    SHAPE,
    SMALL,
    Adam,
    build,
    close,
    follow,
    random_domains,
    same_parameters,
)

from hmoe_repro.algorithms.alignment import (
    CDANN,
    CORAL,
    DANN,
    MMD,
    MTL,
    class_weights,
    gaussian_kernels,
)
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything

SIZES = pytest.mark.parametrize("sizes", [(5, 5, 5), (4, 7, 2)], ids=str)
ADVERSARIES = pytest.mark.parametrize("cls", [DANN, CDANN], ids=lambda c: c.name)


def coral_distance(a, b):
    n = a.shape[1]
    mean = lambda z: sum(z) / len(z)
    covariance = lambda z, m: sum(torch.outer(row - m, row - m) for row in z) / (len(z) - 1)
    m_a, m_b = mean(a), mean(b)
    return (m_a - m_b).square().sum() / n + (
        covariance(a, m_a) - covariance(b, m_b)
    ).square().sum() / n**2


def mmd_distance(a, b):
    kernel = lambda p, q: sum(
        torch.exp(-g * (p - q).square().sum()) for g in (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
    )
    mean = lambda p, q: sum(kernel(i, j) for i in p for j in q) / (len(p) * len(q))
    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


def aligned_loss(slow, minibatches, distance, gamma):
    features = [slow.featurizer(x) for x, _ in minibatches]
    nll = sum(
        F.cross_entropy(slow.classifier(z), y) for z, (_, y) in zip(features, minibatches)
    ) / len(features)
    pairs = [distance(features[i], features[j]) for j in range(len(features)) for i in range(j)]
    return nll + gamma * sum(pairs) / len(pairs)


@SIZES
@pytest.mark.parametrize(
    "cls, distance", [(CORAL, coral_distance), (MMD, mmd_distance)], ids=["CORAL", "MMD"]
)
def test_coral_and_mmd_pair_by_pair(cls, distance, sizes):
    fast, slow = build(cls, {"mmd_gamma": 3.0})
    follow(
        fast,
        slow,
        lambda model, minibatches, t: aligned_loss(model, minibatches, distance, 3.0),
        [random_domains(t, sizes) for t in range(3)],
    )


@pytest.mark.parametrize("cls", [CORAL, MMD], ids=["CORAL", "MMD"])
def test_one_domain_has_no_pair(cls):
    fast, slow = build(cls, domains=1)
    follow(
        fast,
        slow,
        lambda model, minibatches, t: ERM.loss(model, minibatches)["loss"],
        [random_domains(t, (6,)) for t in range(2)],
    )
    assert fast.update(random_domains(2, (6,)))["penalty"] == 0


def test_coral_needs_two_images_of_a_domain():
    with pytest.raises(HmoeError, match="2 of each"):
        build(CORAL)[0].loss(random_domains(0, (3, 1, 3)))


def test_kernels_in_float32_are_as_rounded_as_documented():
    torch.manual_seed(0)
    z = torch.randn(30, 16)
    exact = sum(
        torch.exp(
            -g
            * torch.cdist(
                z.double(), z.double(), compute_mode="donot_use_mm_for_euclid_dist"
            ).square()
        )
        for g in (0.001, 0.01, 0.1, 1, 10, 100, 1000)
    )
    assert (gaussian_kernels(z) - exact).abs().mean() < 1e-3
    assert (gaussian_kernels(z.double()) - exact).abs().max() < 1e-9


def adversarial_losses(slow, minibatches, settings, domainbed_compat):
    """Cross entropy of the classes and the discriminator's loss, image by image."""
    x, y = torch.cat([b[0] for b in minibatches]), torch.cat([b[1] for b in minibatches])
    domains = [i for i, (_, labels) in enumerate(minibatches) for _ in labels]
    z, slopes, total = slow.featurizer(x), [], 0
    conditional = isinstance(slow, CDANN)
    classes = max(y.tolist()) + 1 if domainbed_compat else CLASSES
    for b, d in enumerate(domains):
        seen = (
            z[b : b + 1] + slow.adversary["embedding"].weight[y[b]] if conditional else z[b : b + 1]
        )
        single = -slow.adversary["discriminator"](seen).log_softmax(1)[0, d]
        total = total + single / ((y == y[b]).sum() * classes if conditional else len(domains))
        slopes.append(torch.autograd.grad(single, seen, create_graph=True)[0].square().sum())
    return F.cross_entropy(slow.classifier(z), y), total + settings["grad_penalty"] * sum(
        slopes
    ) / len(slopes)


def two_adams(lr=(1e-3, 1e-3), weight_decay=(0.0, 0.0)):
    return [Adam(lr=a, betas=(0.5, 0.9), weight_decay=w) for a, w in zip(lr, weight_decay)]


def step(adam, loss, parameters):
    adam.step(parameters, torch.autograd.grad(loss, parameters, retain_graph=True))


@ADVERSARIES
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"grad_penalty": 0.0},
        {
            "grad_penalty": 0.7,
            "lambda": 0.3,
            "lr_g": 2e-3,
            "lr_d": 3e-3,
            "weight_decay_g": 0.1,
            "weight_decay_d": 0.2,
        },
    ],
    ids=["plain", "all-set"],
)
@pytest.mark.parametrize("domainbed_compat", [False, True], ids=["intended", "domainbed_compat"])
def test_adversaries_with_two_separate_adams(cls, k, settings, domainbed_compat):
    """The classes 0, 1 and 2 of 4 occur, so that the two class weights of CDANN differ."""
    fast, slow = build(
        cls,
        settings | {"d_steps_per_g_step": k, "domainbed_compat": domainbed_compat, "mlp_width": 8},
    )
    own, adversary = (
        [*slow.featurizer.parameters(), *slow.classifier.parameters()],
        list(slow.adversary.parameters()),
    )
    generator, discriminator = two_adams(
        (settings.get("lr_g", 1e-3), settings.get("lr_d", 1e-3)),
        (settings.get("weight_decay_g", 0), settings.get("weight_decay_d", 0)),
    )
    weight = settings.get("lambda", 1.0)
    for n in range(1, 5):
        minibatches = random_domains(n, labels=[0, 1, 2])
        for _ in range(0 if domainbed_compat else k - 1):
            step(
                discriminator,
                adversarial_losses(slow, minibatches, settings, domainbed_compat)[1],
                adversary,
            )
        nll, L_d = adversarial_losses(slow, minibatches, settings, domainbed_compat)
        reported = fast.update(minibatches)
        close(reported["nll"], nll.detach()), close(reported["L_d"], L_d.detach())
        discriminates = n % (1 + k) < k
        gradients = (
            torch.autograd.grad(L_d, adversary, retain_graph=True),
            torch.autograd.grad(nll - weight * L_d, own),
        )  # both before either step
        if discriminates or not domainbed_compat:
            discriminator.step(adversary, gradients[0])
        if not (discriminates and domainbed_compat):
            generator.step(own, gradients[1])
        same_parameters(fast, slow)


@ADVERSARIES
def test_in_domainbeds_schedule_the_first_update_is_the_generators(cls):
    fast, _ = build(cls, {"domainbed_compat": True})
    moved = []
    for t in range(4):
        before = {name: p.clone() for name, p in fast.named_parameters()}
        fast.update(random_domains(t))
        moved.append(
            {
                name.split(".")[0]
                for name, p in fast.named_parameters()
                if not torch.equal(p, before[name])
            }
        )
    assert moved == [{"featurizer", "classifier"}, {"adversary"}] * 2


@ADVERSARIES
def test_by_default_every_part_moves_in_every_update(cls):
    fast, _ = build(cls)
    for t in range(2):
        before = {name: p.clone() for name, p in fast.named_parameters()}
        fast.update(random_domains(t, (40, 40, 40)))
        assert all(not torch.equal(p, before[name]) for name, p in fast.named_parameters())


@ADVERSARIES
@pytest.mark.parametrize(
    "hparams",
    [
        {"grad_penalty": 1.0, "d_steps_per_g_step": 3},
        {
            "domainbed_compat": True,
            "grad_penalty": 1.0,
            "d_steps_per_g_step": 2,
            "mlp_dropout": 0.5,
        },
    ],
    ids=str,
)
def test_conformance_of_the_schedules(cls, hparams):
    check_algorithm(cls, hparams=hparams)


@ADVERSARIES
def test_what_adversaries_refuse(cls):
    with pytest.raises(HmoeError, match="hide from which .* and there is only one"):
        cls(SHAPE, CLASSES, 1, SMALL)
    with pytest.raises(HmoeError, match="at least 1"):
        cls(SHAPE, CLASSES, 3, SMALL | {"d_steps_per_g_step": 0})
    with pytest.raises(HmoeError, match="mlp_depth"):
        cls(SHAPE, CLASSES, 3, SMALL | {"mlp_depth": 1})


def test_class_weights_count_every_class_the_same():
    y = torch.tensor([0, 0, 0, 2, 3, 3])
    weights = class_weights(y, 4)
    assert [weights[y == c].sum().item() for c in (0, 2, 3)] == pytest.approx([0.25] * 3)
    close(
        class_weights(torch.tensor([0, 1, 1]), 2), class_weights(torch.tensor([0, 1, 1]), 4) * 2
    )  # DomainBed's sizing by the batch
    close(class_weights(torch.tensor([0, 0, 0, 2]), 4), torch.tensor([1 / 12] * 3 + [1 / 4]))


def test_learning_rates_follow_lr_unless_they_are_set():
    groups = lambda **h: [
        (g["lr"], g["weight_decay"])
        for g in DANN(SHAPE, CLASSES, 3, SMALL | h).make_optimizer().param_groups
    ]
    assert groups() == [(1e-3, 0.0)] * 2
    assert groups(lr=0.01, weight_decay=0.1) == [(0.01, 0.1)] * 2
    assert groups(lr=0.01, lr_d=0.02, weight_decay_g=0.3) == [(0.01, 0.3), (0.02, 0.0)]
    assert groups(weight_decay=0.1, weight_decay_d=0.0) == [(1e-3, 0.1), (1e-3, 0.0)]
    assert groups(weight_decay=0.1, weight_decay_g=0.0)[0] == (1e-3, 0.0)
    assert (
        DANN(SHAPE, CLASSES, 3, SMALL | {"weight_decay": 0.1}).hparams["weight_decay_d"] == 0.1
    )  # what is written down is what is used
    fast = DANN(SHAPE, CLASSES, 3, SMALL)
    assert sum(len(g["params"]) for g in fast.make_optimizer().param_groups) == len(
        list(fast.parameters())
    )
    assert (
        DANN((3, 64, 64), CLASSES, 3, SMALL).hparams["lr"] == 5e-5
    )  # DomainBed's lr_g and lr_d on photographs


@SIZES
def test_mtl_domain_by_domain(sizes):
    stored = {}

    def loss(slow, minibatches, t):
        total = 0
        for i, (x, y) in enumerate(minibatches):
            z = slow.featurizer(x)
            e = 0.9 * sum(z) / len(z) + (1 - 0.9) * stored.get(i, 0)
            stored[i] = e.detach()
            total = total + sum(
                F.cross_entropy(slow.classifier(torch.cat([row, e])[None]), k[None])
                for row, k in zip(z, y)
            ) / len(y)
        return total

    fast, slow = build(MTL, {"mtl_ema": 0.9})
    follow(fast, slow, loss, [random_domains(t, sizes) for t in range(3)])
    close(fast.summaries, torch.stack([stored[i] for i in range(3)]))


def test_mtl_predicts_with_the_mean_of_the_batch():
    fast, slow = build(MTL)
    x = random_domains(0)[0][0]
    z = slow.featurizer(x)
    with torch.no_grad():
        close(
            fast.predict(x),
            torch.stack([slow.classifier(torch.cat([row, z.mean(0)])) for row in z]).detach(),
        )


def test_mtl_parity_is_noise():
    """The summary does not reach the classifier: a prediction is that of the feature beside
    Gaussian noise."""
    fast, _ = build(MTL, {"domainbed_compat": True})
    x = random_domains(0)[0][0]
    with torch.no_grad():
        noise = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        close(fast.predict(x), fast.classifier(torch.cat([fast.featurizer(x), noise], 1)))
        seed_everything(1)
        trained = fast.loss(random_domains(0))["loss"]
        seed_everything(1)
        assert (
            trained == fast.loss(random_domains(0))["loss"] != fast.loss(random_domains(0))["loss"]
        ), "training draws afresh"
    check_algorithm(MTL, hparams={"domainbed_compat": True})


def test_mtl_parity_trains_the_same_however_often_it_is_evaluated():
    ends = []
    for evaluations in (0, 3):
        fast, _ = build(MTL, {"domainbed_compat": True})
        seed_everything(3)
        for t in range(3):
            fast.update(random_domains(t))
            with torch.no_grad():
                [fast.predict(random_domains(9)[0][0]) for _ in range(evaluations)]
        ends.append(fast)
    assert all(torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters()))


def test_the_defaults_are_domainbeds():
    of = lambda cls, *names: tuple(cls(SHAPE, CLASSES, 3, SMALL).hparams[name] for name in names)
    assert of(CORAL, "mmd_gamma") == of(MMD, "mmd_gamma") == (1.0,)
    assert of(MTL, "mtl_ema") == (0.99,)
    for cls in (DANN, CDANN):
        assert of(
            cls,
            "lambda",
            "d_steps_per_g_step",
            "grad_penalty",
            "beta1",
            "mlp_width",
            "mlp_depth",
            "mlp_dropout",
        ) == (1.0, 1, 0.0, 0.5, 256, 3, 0.0)
        assert [
            layer
            for layer in cls(SHAPE, CLASSES, 3, SMALL).adversary["discriminator"]
            if isinstance(layer, torch.nn.Linear)
        ][-1].out_features == 3
