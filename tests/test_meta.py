"""MLDG, ARM, Fish and MetaReg against slow computations: clones and fresh optimisers, batch norm
written out, gradients by differences."""

import copy
from itertools import cycle

import by_hand
import pytest
import torch
from torch import nn

from hmoe_repro.algorithms.base import ALGORITHMS, ERM
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.algorithms.meta import ARM, MLDG, Fish, MetaReg, context_network, first_adam_step
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything

ALL = (MLDG, ARM, Fish, MetaReg)
EXTRA = {ARM: {"context_width": 4}}


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
def test_a_killed_training_goes_on_and_one_domain_works_or_says_why_not(cls, tmp_path):
    by_hand.assert_resumes(cls, tmp_path, **EXTRA.get(cls, {}))
    if cls in (ARM, Fish):
        check_algorithm(cls, num_domains=1, hparams=EXTRA.get(cls))
    else:
        with pytest.raises(HmoeError, match="only one. Fix"):
            check_algorithm(cls, num_domains=1)


@pytest.mark.parametrize(
    "cls, hparams",
    [
        (MLDG, {"domainbed_compat": True}),
        (ARM, {"domainbed_compat": True, "context_width": 4}),
        (MetaReg, {"nonlinear_classifier": True, "inner_steps": 2}),
    ],
)
def test_conformance_of_variants(cls, hparams):
    check_algorithm(cls, hparams=hparams)


def test_registered_with_the_published_defaults():
    assert all(
        ALGORITHMS[cls.name] is cls and cls.family == "meta" and cls.needs_domain_labels
        for cls in ALL
    )
    own = {
        cls.name: {name: h.default for name, h in cls.HPARAMS.items() if h != ERM.HPARAMS.get(name)}
        for cls in (MLDG, ARM, Fish)
    }
    assert own == {
        "MLDG": {"mldg_beta": 1.0, "n_meta_test": 2, "domainbed_compat": False},
        "ARM": {"batch_size": 64, "context_width": 64, "domainbed_compat": False},
        "Fish": {"meta_lr": 0.5},
    }
    assert ARM.HPARAMS["batch_size"].large_image_default == 8


@pytest.mark.parametrize(
    "domains, domainbed_compat, n_meta_test, weight_decay",
    [
        (3, False, 2, 0.0),
        (3, False, 2, 0.1),
        (2, False, 2, 0.0),
        (4, True, 2, 0.1),
        (3, True, 2, 0.0),
        (3, True, 1, 0.0),
        (2, True, 1, 0.0),
    ],
)
def test_mldg_against_clones_and_fresh_adams(domains, domainbed_compat, n_meta_test, weight_decay):
    mldg = by_hand.tiny(
        MLDG,
        domains=domains,
        mldg_beta=0.7,
        domainbed_compat=domainbed_compat,
        weight_decay=weight_decay,
        **({"n_meta_test": n_meta_test} if domainbed_compat else {}),
    )
    shadow, initial = copy.deepcopy(mldg), copy.deepcopy(mldg.state_dict())
    adam = by_hand.Adam(shadow.parameters(), 0.01, weight_decay)
    for t in range(2):
        batches = by_hand.draw((5,) * domains, seed=t)
        seed_everything(30 + t)
        reported = mldg.update(batches)["loss"]
        seed_everything(30 + t)
        order = torch.randperm(domains).tolist()
        pairs = (
            list(zip(order[:-n_meta_test], cycle(order[-n_meta_test:])))
            if domainbed_compat
            else [(order[k], order[(k + 1) % domains]) for k in range(domains)]
        )
        total, objective = [torch.zeros_like(p) for p in shadow.parameters()], 0.0
        for i, j in pairs:
            clone = copy.deepcopy(shadow)
            fresh = torch.optim.Adam(clone.parameters(), lr=0.01, weight_decay=weight_decay)
            for (x, y), weight in ((batches[i], 1.0), (batches[j], 0.7)):
                loss = by_hand.cross_entropy(clone.classifier(clone.featurizer(x)), y)
                G = by_hand.gradients(loss, clone.parameters())
                total = [a + weight * g / domains for a, g in zip(total, G)]
                objective += weight * loss.item() / domains
                for p, g in zip(clone.parameters(), G):
                    p.grad = g
                fresh.step()
        assert len(pairs) == (domains - n_meta_test if domainbed_compat else domains)
        assert reported == pytest.approx(objective, rel=1e-10)
        adam.step(total)
    by_hand.assert_same_parameters(mldg, shadow, 1e-8)
    assert all(
        not torch.equal(value, initial[name]) for name, value in mldg.state_dict().items()
    )  # with two domains too


def test_mldg_refuses_what_trains_nothing():
    for domains, hparams in [
        (1, {}),
        (2, {"domainbed_compat": True}),
        (3, {"domainbed_compat": True, "n_meta_test": 3}),
        (3, {"domainbed_compat": True, "n_meta_test": 0}),
    ]:
        with pytest.raises(HmoeError, match="Fix"):
            by_hand.tiny(MLDG, domains=domains, **hparams)
    with pytest.raises(HmoeError):
        by_hand.tiny(MLDG).update(by_hand.draw((3, 0, 3), 0))


def slow_context(context, x, statistics):
    """ARM's context network in training mode, batch norm written out; running statistics are
    followed in `statistics`."""
    first, norm_1, _, second, norm_2, _, last = context
    for convolution, norm, key in ((first, norm_1, 1), (second, norm_2, 4)):
        x = torch.cat(
            [
                torch.nn.functional.conv2d(
                    image[None], convolution.weight, convolution.bias, padding=2
                )
                for image in x
            ]
        )
        mean, square = x.mean((0, 2, 3)), (x - x.mean((0, 2, 3), keepdim=True)).square()
        count = x.numel() // x.shape[1]
        statistics[key] = [
            0.9 * old + 0.1 * new
            for old, new in zip(statistics[key], (mean, square.sum((0, 2, 3)) / (count - 1)))
        ]
        x = (x - mean[:, None, None]) / (square.mean((0, 2, 3)) + 1e-5).sqrt()[:, None, None]
        x = (x * norm.weight[:, None, None] + norm.bias[:, None, None]).clamp(min=0)
    return torch.cat(
        [torch.nn.functional.conv2d(image[None], last.weight, last.bias, padding=2) for image in x]
    )


@pytest.mark.parametrize(
    "sizes, domainbed_compat", [((4, 4, 4), False), ((5, 3, 4), False), ((4, 4, 4), True)]
)
def test_arm(sizes, domainbed_compat):
    arm = by_hand.tiny(ARM, context_width=3, batch_size=4, domainbed_compat=domainbed_compat)
    shadow = copy.deepcopy(arm)
    trained = [
        p
        for name, p in shadow.named_parameters()
        if not (domainbed_compat and name.startswith("context"))
    ]
    shadow.requires_grad_(True)
    adam, statistics = (
        by_hand.Adam(trained),
        {key: [torch.zeros(3).double(), torch.ones(3).double()] for key in (1, 4)},
    )
    for t in range(2):
        batches = by_hand.draw(sizes, seed=t)
        reported = arm.update(batches)["loss"]
        context = slow_context(
            shadow.context, torch.cat([x for x, _ in batches]), statistics
        ).split(sizes)
        logits = [
            shadow.classifier(shadow.featurizer(torch.cat([image, maps.mean(0)])[None]))
            for (x, _), maps in zip(batches, context)
            for image in x
        ]
        loss = by_hand.cross_entropy(torch.cat(logits), torch.cat([y for _, y in batches]))
        assert reported == pytest.approx(loss.item(), rel=1e-9)
        adam.step(by_hand.gradients(loss, trained))
    by_hand.assert_same_parameters(arm, shadow, 1e-8)
    for key, (mean, variance) in statistics.items():
        (
            torch.testing.assert_close(arm.context[key].running_mean, mean),
            torch.testing.assert_close(arm.context[key].running_var, variance),
        )
    with pytest.raises(HmoeError):
        arm.update(by_hand.draw((3, 0, 3), 0))


def test_arm_trains_its_context_network_unless_parity():
    for domainbed_compat in (False, True):
        arm = by_hand.tiny(
            ARM, context_width=3, domainbed_compat=domainbed_compat, weight_decay=0.1
        )
        before = copy.deepcopy(arm.context)
        arm.update(by_hand.draw((4, 4, 4), 0))
        same = [torch.equal(a, b) for a, b in zip(arm.context.parameters(), before.parameters())]
        assert all(same) if domainbed_compat else not any(same)
        assert not torch.equal(arm.context[1].running_mean, before[1].running_mean)


def test_arm_groups_at_test_time():
    """Groups of batch_size where they fit, else one; an image's logits depend on its group and
    on nothing else."""
    arm = by_hand.tiny(ARM, context_width=3, batch_size=4).eval()
    x = torch.cat([x * 4.0**i for i, (x, _) in enumerate(by_hand.draw((4, 4, 4), 0))])
    with torch.no_grad():
        together, apart = arm.predict(x), torch.cat([arm.predict(part) for part in x.split(4)])
        torch.testing.assert_close(together, apart)
        one_group = arm.predict(x[:11])
        context = arm.context(x[:11]).mean(0)
        slow = torch.cat(
            [arm.classifier(arm.featurizer(torch.cat([image, context])[None])) for image in x[:11]]
        )
        torch.testing.assert_close(one_group, slow)
        assert not torch.allclose(one_group, together[:11], atol=1e-6)
        assert arm.input_shape == by_hand.SHAPE


def test_context_network_is_domainbeds():
    kinds = [type(layer).__name__ for layer in context_network(3)]
    assert kinds == ["Conv2d", "BatchNorm2d", "ReLU", "Conv2d", "BatchNorm2d", "ReLU", "Conv2d"]
    assert (
        sum(p.numel() for p in context_network(2).parameters())
        == (2 * 64 + 64 * 64 + 64) * 25 + 64 + 64 + 1 + 4 * 64
    )
    assert context_network(2, 5)(torch.rand(3, 2, 7, 9)).shape == (3, 1, 7, 9)


@pytest.mark.parametrize("domains, weight_decay", [(3, 0.0), (3, 0.1), (1, 0.0)])
def test_fish_against_clones_and_a_carried_inner_adam(domains, weight_decay):
    fish = by_hand.tiny(Fish, domains=domains, meta_lr=0.3, weight_decay=weight_decay)
    fish.featurizer = nn.Sequential(*fish.featurizer, nn.BatchNorm1d(by_hand.FEATURES)).double()
    theta, adam = copy.deepcopy(fish), None
    for t in range(2):
        batches = by_hand.draw((5,) * domains, seed=t)
        reported = fish.update(batches)["loss"]
        inner, losses = copy.deepcopy(theta), []
        if adam is None:
            adam = by_hand.Adam(inner.parameters(), 0.01, weight_decay)
        adam.parameters = list(inner.parameters())
        for x, y in batches:
            losses.append(by_hand.cross_entropy(inner.classifier(inner.featurizer(x)), y))
            adam.step(by_hand.gradients(losses[-1], inner.parameters()))
        ends = inner.state_dict()
        theta.load_state_dict(
            {
                name: old + 0.3 * (ends[name] - old) if old.is_floating_point() else ends[name]
                for name, old in theta.state_dict().items()
            }
        )
        assert reported == pytest.approx(sum(loss.item() for loss in losses) / domains, rel=1e-10)
    by_hand.assert_same_parameters(fish, theta)
    for a, b in zip(fish.buffers(), theta.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert {int(s["step"]) for s in fish.optimizer.state.values()} == {2 * domains}


def test_fish_with_no_and_with_full_outer_step():
    fish, still = by_hand.tiny(Fish, meta_lr=1.0), by_hand.tiny(Fish, meta_lr=0.0)
    adam_only, before = copy.deepcopy(fish), copy.deepcopy(still.state_dict())
    adam = by_hand.Adam(adam_only.parameters(), fish.hparams["lr"], 0.0)
    batches = by_hand.draw((5, 5, 5), 0)
    fish.update(batches)
    still.update(batches)
    for x, y in batches:
        loss = by_hand.cross_entropy(adam_only.classifier(adam_only.featurizer(x)), y)
        adam.step(by_hand.gradients(loss, adam_only.parameters()))
    by_hand.assert_same_parameters(fish, adam_only)
    assert all(torch.equal(value, before[name]) for name, value in still.state_dict().items())


def test_first_adam_step_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    ours, gradient = torch.randn(2, 50, dtype=torch.float64, generator=generator)
    theirs = ours.clone().requires_grad_()
    theirs.grad = gradient**5
    torch.optim.Adam([theirs], lr=0.01, weight_decay=0.1).step()
    first_adam_step([ours], [gradient**5], lr=0.01, weight_decay=0.1)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_fish_builds_no_network():
    fish, made = by_hand.tiny(Fish), []
    original = nn.Module.__init__
    try:
        nn.Module.__init__ = lambda self, *a, **k: (
            made.append(type(self)),
            original(self, *a, **k),
        )[1]
        ids = [id(p) for p in fish.parameters()]
        fish.update(by_hand.draw((3, 3, 3), 0))
    finally:
        nn.Module.__init__ = original
    assert made == []
    assert ids == [id(p) for p in fish.parameters()]


def slow_inner(head, phi, z, y, steps, lr):
    "Weights and biases of a linear head after the inner steps, gradients by formula."
    W, b = (p.detach().clone() for p in head.parameters())
    onehot = torch.eye(by_hand.CLASSES, dtype=torch.float64)[y]
    for _ in range(steps):
        error = torch.softmax(z @ W.T + b, 1) - onehot
        W, b = (
            W - lr * (error.T @ z / len(y) + phi[0] * W.sign()),
            b - lr * (error.mean(0) + phi[1] * b.sign()),
        )
    return W, b


class SGD:
    "SGD with momentum and weight decay; `step` skips what has gradient None."

    def __init__(self, parameters, lr, momentum, weight_decay=0.0):
        self.parameters, self.lr, self.momentum, self.weight_decay, self.velocity = (
            list(parameters),
            lr,
            momentum,
            weight_decay,
            {},
        )

    @torch.no_grad()
    def step(self, gradients):
        for k, (p, g) in enumerate(zip(self.parameters, gradients, strict=True)):
            if g is None:
                continue
            g = g + self.weight_decay * p
            self.velocity[k] = self.momentum * self.velocity[k] + g if k in self.velocity else g
            p -= self.lr * self.velocity[k]


def tiny_metareg(**hparams):
    reg = by_hand.tiny(MetaReg, lr=0.1, **hparams)
    seed_everything(9)
    reg.psi = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, by_hand.FEATURES), nn.Tanh()).double()
    reg.theta = nn.ModuleList(
        nn.Linear(by_hand.FEATURES, by_hand.CLASSES) for _ in range(3)
    ).double()
    reg.phi = nn.ParameterList(
        [
            0.05 * torch.randn(by_hand.CLASSES, by_hand.FEATURES).double(),
            0.05 * torch.randn(by_hand.CLASSES).double(),
        ]
    )
    reg.total_steps = 5
    return reg


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_metareg_base_and_meta_steps(weight_decay):
    """The base steps by SGD written out; the meta gradient, through five inner steps, by central
    differences."""
    reg = tiny_metareg(inner_steps=5, meta_lr=0.5, weight_decay=weight_decay)
    shadow = copy.deepcopy(reg)
    networks = nn.ModuleList([shadow.psi, shadow.theta])
    sgd = SGD(networks.parameters(), 0.1, 0.9, weight_decay)
    for t in range(2):
        batches = by_hand.draw((6, 6, 6), seed=t)
        seed_everything(50 + t)
        reported, losses = reg.update(batches)["loss"], []
        seed_everything(50 + t)
        for i, (x, y) in enumerate(batches):
            losses.append(by_hand.cross_entropy(shadow.theta[i](shadow.psi(x)), y))
            sgd.step(by_hand.gradients(losses[-1], networks.parameters()))
        assert reported == pytest.approx(sum(loss.item() for loss in losses) / 3, rel=1e-10)
        a, b = torch.randperm(3)[:2].tolist()
        with torch.no_grad():
            z_a, z_b = shadow.psi(batches[a][0]), shadow.psi(batches[b][0])
        phi = [p.detach().clone() for p in shadow.phi]

        slopes = [torch.zeros_like(p) for p in phi]
        for p, slope in zip(phi, slopes):
            for k in range(p.numel()):
                value = p.view(-1)[k].item()
                beside = []
                for sign in (1, -1):
                    p.view(-1)[k] = value + sign * 1e-5
                    W, bias = slow_inner(shadow.theta[a], phi, z_a, batches[a][1], 5, 0.1)
                    loss = by_hand.cross_entropy(z_b @ W.T + bias, batches[b][1])
                    beside.append(loss.item())
                p.view(-1)[k] = value
                slope.view(-1)[k] = (beside[0] - beside[1]) / 2e-5
        with torch.no_grad():
            for p, slope in zip(shadow.phi, slopes):
                p -= 0.5 * slope
    by_hand.assert_same_parameters(reg, shadow, 1e-7)
    assert max(p.abs().max() for p in slopes) > 1e-3


def test_metareg_final_steps():
    reg = tiny_metareg(meta_fraction=0.0, weight_decay=0.1)
    shadow = copy.deepcopy(reg)
    final = nn.ModuleList([shadow.featurizer, shadow.classifier])
    sgd = SGD(final.parameters(), 0.1, 0.9, 0.1)
    for t in range(3):
        batches = by_hand.draw((5, 4, 6), seed=t)
        reported = reg.update(batches)
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        penalty = sum(
            phi.item() * abs(w)
            for P, W in zip(shadow.phi, shadow.classifier.parameters())
            for phi, w in zip(P.view(-1), W.view(-1))
        )
        loss = by_hand.cross_entropy(shadow.classifier(shadow.featurizer(x)), y) + penalty
        assert reported == pytest.approx({"loss": loss.item(), "penalty": penalty.item()}, rel=1e-9)
        sgd.step(by_hand.gradients(loss, final.parameters()))
    by_hand.assert_same_parameters(reg, shadow)


def test_metareg_switches_at_its_step_and_meta_steps_come_every_nth():
    reg = tiny_metareg(meta_fraction=0.4, base_steps=2, inner_steps=1)
    reg.total_steps, moved = 10, []
    for t in range(10):
        before = copy.deepcopy(reg.state_dict())
        seed_everything(t)
        reg.update(by_hand.draw((4, 4, 4), t))
        changed = {
            name.split(".")[0]
            for name, value in reg.state_dict().items()
            if not torch.equal(value, before[name])
        }
        moved.append(changed)
    learning, final = {"psi", "theta"}, {"featurizer", "classifier"}
    assert moved == [learning, learning | {"phi"}] * 2 + [final] * 6


def test_metareg_passes_over_a_domain_that_a_batch_lacks():
    """As if there were only the given domains: the same numbers from two heads, and no others
    move. With one domain there is no pair, so no meta step."""
    reg, two = (tiny_metareg(inner_steps=3, meta_fraction=0.9) for _ in range(2))
    two.theta = nn.ModuleList([two.theta[0], two.theta[2]])
    absent = copy.deepcopy(reg.theta[1])
    for t in range(2):
        batches, reported = by_hand.draw((6, 0, 5), seed=t), []
        for algorithm, given in ((reg, batches), (two, [batches[0], batches[2]])):
            seed_everything(t)
            reported.append(algorithm.update(given))
        assert reported[0] == reported[1]
    for name in ("psi", "phi"):
        by_hand.assert_same_parameters(getattr(reg, name), getattr(two, name), 0)
    for k, head in enumerate((two.theta[0], absent, two.theta[1])):
        by_hand.assert_same_parameters(reg.theta[k], head, 0)

    before = copy.deepcopy(reg)
    reg.update(by_hand.draw((0, 4, 0), 2))
    by_hand.assert_same_parameters(reg.phi, before.phi, 0)
    moved = [not torch.equal(a.weight, b.weight) for a, b in zip(reg.theta, before.theta)]
    assert moved == [False, True, False]
    assert not torch.equal(reg.psi[1].weight, before.psi[1].weight)


def test_metareg_needs_two_domains_and_resumes_while_learning(tmp_path):
    with pytest.raises(HmoeError, match="only one"):
        by_hand.tiny(MetaReg, domains=1)
    by_hand.assert_resumes(MetaReg, tmp_path, updates=1, more=2, meta_fraction=0.9)
