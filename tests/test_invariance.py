"""IRM, VREx and Fishr against explicit loops; annealing and the new Adam at their step."""

import pytest
import torch
import torch.nn.functional as F
from written_out import CLASSES, SHAPE, SMALL, build, close, follow, random_domains

from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.algorithms.invariance import IRM, Fishr, VREx, gradient_variance
from hmoe_repro.core.errors import HmoeError

STEPS = {
    IRM: "irm_penalty_anneal_iters",
    VREx: "vrex_penalty_anneal_iters",
    Fishr: "penalty_anneal_iters",
}
every = pytest.mark.parametrize("cls", STEPS, ids=lambda c: c.name)


def cross_entropy(logits, y):
    return sum(-torch.log(torch.exp(o[k]) / torch.exp(o).sum()) for o, k in zip(logits, y)) / len(y)


def irm_loss(slow, minibatches, weight):
    risks, penalties = [], []
    for x, y in minibatches:
        logits, slopes = slow.predict(x), []
        for half in (0, 1):
            w = torch.ones((), dtype=torch.float64, requires_grad=True)
            slopes += torch.autograd.grad(
                cross_entropy(w * logits[half::2], y[half::2]), w, create_graph=True
            )
        risks.append(cross_entropy(logits, y))
        penalties.append(slopes[0] * slopes[1])
    return sum(risks) / len(risks) + weight * sum(penalties) / len(penalties)


def vrex_loss(slow, minibatches, weight):
    risks = [cross_entropy(slow.predict(x), y) for x, y in minibatches]
    mean = sum(risks) / len(risks)
    return mean + weight * sum((r - mean) ** 2 for r in risks) / len(risks)


def per_sample_variance(classifier, z, y):
    "Variance over samples of autograd's gradients, weight and bias as one vector."
    gradients = []
    for b in range(len(z)):
        single = torch.autograd.grad(
            F.cross_entropy(classifier(z[b : b + 1]), y[b : b + 1]),
            list(classifier.parameters()),
            create_graph=True,
        )
        gradients.append(torch.cat([g.reshape(-1) for g in single]))
    mean = sum(gradients) / len(gradients)
    return sum((g - mean) ** 2 for g in gradients) / len(gradients)


class FishrByHand:
    def __init__(self, ema):
        self.ema, self.averages = ema, {}

    def __call__(self, slow, minibatches, weight):
        used = []
        for i, (x, y) in enumerate(minibatches):
            average = self.ema * self.averages.get(i, 0) + (1 - self.ema) * per_sample_variance(
                slow.classifier, slow.featurizer(x), y
            )
            self.averages[i] = average.detach()
            used.append(average / (1 - self.ema))
        mean = sum(used) / len(used)
        penalty = sum(((u - mean) ** 2).mean() for u in used) / len(used)
        n = sum(len(y) for _, y in minibatches)
        return (
            sum(cross_entropy(slow.predict(x), y) * len(y) for x, y in minibatches) / n
            + weight * penalty
        )


@pytest.mark.parametrize("sizes", [(5, 5, 5), (4, 7, 2)], ids=str)
@pytest.mark.parametrize(
    "cls, weight, by_hand",
    [
        (IRM, "irm_lambda", irm_loss),
        (VREx, "vrex_lambda", vrex_loss),
        (Fishr, "lambda", FishrByHand(0.9)),
    ],
    ids=["IRM", "VREx", "Fishr"],
)
def test_updates_across_the_annealing_step(cls, weight, by_hand, sizes):
    """Two updates before the jump, two after it, with a new Adam exactly between them."""
    if cls is Fishr:
        by_hand.averages.clear()
    fast, slow = build(cls, {weight: 30.0, STEPS[cls]: 2} | ({"ema": 0.9} if cls is Fishr else {}))
    before = 0.0 if cls is Fishr else 1.0
    follow(
        fast,
        slow,
        lambda model, minibatches, t: by_hand(model, minibatches, before if t < 2 else 30.0),
        [random_domains(t, sizes) for t in range(4)],
        restart_at=2,
    )
    steps = {int(state["step"]) for state in fast.optimizer.state.values()}
    assert steps == {2}
    assert fast.update_count == 4


@every
def test_the_defaults_are_domainbeds(cls):
    hparams = cls(SHAPE, CLASSES, 3, SMALL).hparams
    expected = {
        IRM: {"irm_lambda": 100.0, "irm_penalty_anneal_iters": 500},
        VREx: {"vrex_lambda": 10.0, "vrex_penalty_anneal_iters": 500},
        Fishr: {"lambda": 1000.0, "penalty_anneal_iters": 1500, "ema": 0.95},
    }[cls]
    assert {name: hparams[name] for name in expected} == expected
    assert cls.needs_domain_labels
    assert cls.family == "invariance"


@every
def test_the_weight_jumps_at_its_update_and_not_before(cls):
    algorithm = cls(SHAPE, CLASSES, 3, SMALL)
    last = algorithm.hparams[STEPS[cls]]
    weights = {}
    for algorithm.update_count in (0, last - 1, last, last + 1):
        weights[algorithm.update_count] = algorithm.penalty_weight
    before, after = {IRM: (1, 100), VREx: (1, 10), Fishr: (0, 1000)}[cls]
    assert weights == {0: before, last - 1: before, last: after, last + 1: after}


@every
def test_conformance_where_the_penalty_is_there_from_the_start(cls):
    check_algorithm(cls, hparams={STEPS[cls]: 0})


@every
def test_no_new_adam_without_a_jump(cls):
    fast, _ = build(cls, {STEPS[cls]: 0})
    for t in range(3):
        fast.update(random_domains(t))
    assert {int(state["step"]) for state in fast.optimizer.state.values()} == {3}


def test_irms_penalty_can_be_negative():
    """The product of two independent halves is unbiased, and hence not a square."""
    fast, _ = build(IRM)
    signs = {
        fast.loss(random_domains(seed, (2, 2, 2)))["penalty"].sign().item() for seed in range(12)
    }
    assert signs == {-1.0, 1.0}
    with pytest.raises(HmoeError, match="2 of each"):
        fast.loss(random_domains(0, (2, 1, 2)))


def test_fishrs_penalty_trains_the_featurizer():
    fast, _ = build(Fishr)
    gradients = torch.autograd.grad(
        fast.loss(random_domains(0))["penalty"], list(fast.featurizer.parameters())
    )
    assert all(g.abs().max() > 0 for g in gradients)


def test_fishrs_average_starts_at_the_first_update_and_holds_no_gradient():
    fast, _ = build(Fishr, {"ema": 0.75})
    first, second = (random_domains(t) for t in range(2))
    v = [
        torch.stack(
            [per_sample_variance(fast.classifier, fast.featurizer(x), y) for x, y in batch]
        ).detach()
        for batch in (first, second)
    ]
    fast.loss(first), fast.loss(second)
    stored = torch.cat([fast.variances[..., :-1].flatten(1), fast.variances[..., -1]], 1)
    close(stored, 0.75 * 0.25 * v[0] + 0.25 * v[1])
    assert not fast.variances.requires_grad
    assert "variances" in fast.state_dict()


def test_fishr_refuses_what_it_cannot_do():
    with pytest.raises(HmoeError, match="nonlinear_classifier=false"):
        Fishr(SHAPE, CLASSES, 3, SMALL | {"nonlinear_classifier": True})
    with pytest.raises(HmoeError, match="below 1"):
        Fishr(SHAPE, CLASSES, 3, SMALL | {"ema": 1.0})


def test_closed_form_in_float32_has_its_precision():
    """The difference of two means loses digits where samples hardly differ; what is lost stays
    small against the gradients."""
    torch.manual_seed(0)
    z, error = (
        3 + 0.01 * torch.randn(64, 20),
        torch.tensor([[0.3, -0.3]]) + 0.001 * torch.randn(64, 2),
    )
    exact = gradient_variance(z.double(), error.double())
    assert (gradient_variance(z, error) - exact).abs().max() < 1e-6 * (
        error[:, :, None] * F.pad(z, (0, 1), value=1.0)[:, None]
    ).square().mean()


def test_with_equal_domains_nothing_is_penalised():
    """Copies of one domain: VREx and Fishr are ERM."""
    batch = random_domains(0)[0]
    for cls in (VREx, Fishr):
        fast, slow = build(cls)
        close(fast.loss([batch] * 3)["loss"].detach(), ERM.loss(slow, [batch] * 3)["loss"].detach())
