"""The interface, the conformance test and its teeth, ERM and HMOE against slow computations."""
import copy

import pytest
import torch
import torch.nn.functional as F

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.base import ALGORITHMS, ERM, HParam, _random_batches, check_algorithm, merge_hparams, register
from hmoe_repro.hparams import parse_setting
from hmoe_repro.algorithms.domain_experts import HMOE_DL, HMOE_DN
from hmoe_repro.core import HmoeError, seed_everything

SHAPE = dict(input_shape=(3, 16, 16), num_classes=4, num_domains=3)
SMALL = {"network": "small_cnn"}


@pytest.mark.parametrize("name", algorithm_names())
def test_conformance(name):
    check_algorithm(get_algorithm(name))


def test_conformance_catches_what_it_should():
    class Random(ERM):
        def predict(self, x): return super().predict(x) + torch.rand(1)
        def loss(self, minibatches): return {"loss": super().loss(minibatches)["loss"] * (1 + 0.1 * float(torch.empty(1).uniform_(generator=GENERATOR)))}
    class Wide(ERM):
        def predict_modes(self, x): return {"default": torch.cat([self.predict(x)] * 2, 1)}
    class Silent(ERM):
        def loss(self, minibatches): return {"nll": super().loss(minibatches)["loss"]}
    class Exploding(ERM):
        def loss(self, minibatches): return {"loss": super().loss(minibatches)["loss"] * float("inf")}
    class Untracked(ERM):  # keeps training state in a list, which no state dictionary holds
        def __init__(self, *args):
            super().__init__(*args)
            self.weights = [1.0]
        def loss(self, minibatches):
            self.weights[0] *= 1.5
            return {"loss": super().loss(minibatches)["loss"] * min(self.weights[0], 4) + sum(p.square().sum() for p in self.parameters()) * self.weights[0]}
    for cls, message in [(Random, "same seed"), (Wide, "default: logits"), (Exploding, "finite"), (Untracked, "restored state")]:
        with pytest.raises(AssertionError, match=message): check_algorithm(cls)
    with pytest.raises((AssertionError, KeyError)): check_algorithm(Silent)


GENERATOR = torch.Generator()


def test_erm_against_adam_written_out():
    """Two updates in float64 against Adam's formulas."""
    seed_everything(0)
    erm = ERM(**SHAPE, hparams=SMALL).double()
    shadow = copy.deepcopy(erm)
    parameters = list(shadow.parameters())
    first, second = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    for t in (1, 2):
        batches = [(x.double(), y) for x, y in _random_batches(3, SHAPE["input_shape"], 4, seed=t)]
        reported = erm.update(batches)["loss"]
        logits = [shadow.classifier(shadow.featurizer(x)) for x, _ in batches]
        loss = sum(-torch.log_softmax(o, 1)[i, y[i]] for o, (_, y) in zip(logits, batches) for i in range(len(y))) / sum(len(y) for _, y in batches)
        assert abs(reported - loss.item()) < 1e-10
        for p, g, m, v in zip(parameters, torch.autograd.grad(loss, parameters), first, second):
            m.mul_(0.9).add_(g, alpha=0.1), v.mul_(0.999).add_(g * g, alpha=0.001)
            with torch.no_grad(): p -= 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    for a, b in zip(erm.parameters(), parameters): torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_hmoe_loss_against_eq_9_written_out():
    seed_everything(1)
    hmoe = HMOE_DN(**SHAPE, hparams=SMALL)
    hmoe.total_steps, hmoe.update_count = 100, 20
    batches = _random_batches(3, SHAPE["input_shape"], 4, seed=0)
    losses = hmoe.loss(batches)
    x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    model = hmoe.model
    v, e = model.encoder(x), model.embeddings
    p = torch.stack([torch.stack([1 / ((v[b] - e[k]).square().sum() + 1e-6) for k in range(3)]) for b in range(len(x))])
    p = p / p.sum(1, keepdim=True)
    mixed = torch.stack([sum(p[b, k] * model.hypernetwork.expert_outputs(model.featurizer(x[b:b + 1]), e)[0, k] for k in range(3)) for b in range(len(x))])
    L_y, L_en, P = F.cross_entropy(mixed, y), -(p * p.log()).sum(1).mean(), p.mean(0)
    L_kl, L_ad = (P * (P * 3).log()).sum(), F.cross_entropy(model.adversary(v), y)
    expected = L_y + 0.4 * L_en + L_kl + 0.01 * L_ad
    for name, value in dict(L_y=L_y, L_en=L_en, L_kl=L_kl, L_ad=L_ad, loss=expected).items(): torch.testing.assert_close(losses[name], value, rtol=1e-4, atol=1e-5)


def test_domain_labels_reach_only_the_labelled_variant():
    """Permuting which domain a batch is called changes HMOE-DL's loss and no other variant's."""
    batches = [(x * 3**i, y) for i, (x, y) in enumerate(_random_batches(3, SHAPE["input_shape"], 4, seed=0))]
    for name, differs in [("HMOE-DL", True), ("HMOE-DN", False), ("HMOE-ND", False)]:
        seed_everything(0)
        hmoe = get_algorithm(name)(**SHAPE, hparams=SMALL)
        a, b = hmoe.loss(batches)["loss"].item(), hmoe.loss([batches[i] for i in (2, 0, 1)])["loss"].item()
        assert abs(a - b) > 1e-3 if differs else abs(a - b) < 1e-5, name
        assert get_algorithm(name).needs_domain_labels == differs


def test_variants_have_the_papers_settings():
    weights = lambda name: {k: v for k, v in get_algorithm(name)(**SHAPE, hparams=SMALL).hparams.items() if k.startswith("lambda")}
    assert weights("HMOE-DL") == dict(lambda_y=1, lambda_en=0, lambda_kl=0, lambda_ad=0, lambda_d=1)
    assert weights("HMOE-DN") == weights("HMOE-ND") == dict(lambda_y=1, lambda_en=1, lambda_kl=1, lambda_ad=0.01, lambda_d=0)
    assert [get_algorithm(n)(**SHAPE, hparams=SMALL).num_experts for n in ("HMOE-DL", "HMOE-DN", "HMOE-ND")] == [3, 3, 5]
    assert HMOE_DL(**SHAPE, hparams=SMALL).model.adversary is None


def test_hparams_are_checked_by_name_and_type():
    declared = {"lr": HParam(1e-3, "rate", large=5e-5), "flag": HParam(False, "switch"), "n": HParam(3, "number")}
    assert merge_hparams(declared, {"lr": 1}, 28) == {"lr": 1.0, "flag": False, "n": 3} and merge_hparams(declared, {}, 224)["lr"] == 5e-5
    for wrong in ({"lrr": 1.0}, {"flag": "False"}, {"flag": 0}, {"n": 2.5}, {"n": True}, {"lr": "fast"}, {"lr": float("nan")}, {"lr": float("inf")}):
        with pytest.raises(HmoeError): merge_hparams(declared, wrong)
    assert [parse_setting(t)[1] for t in ("a=1", "a=1e-3", "a=True", "a=false", "a=prob")] == [1, 1e-3, True, False, "prob"]
    for wrong in ("lr", "=3"):
        with pytest.raises(HmoeError, match="name=value"): parse_setting(wrong)


def test_names():
    with pytest.raises(HmoeError, match="Valid: ERM, HMOE-DL"): get_algorithm("erm")
    with pytest.raises(HmoeError, match="taken"): register("ERM", paper="", needs_domain_labels=False)(HMOE_DN)
    assert ALGORITHMS["ERM"] is ERM and HMOE_DN.name == "HMOE-DN"


def test_a_domainbed_style_class_runs():
    """Its own constructor, optimiser and update; only the base class is ours."""
    class Theirs(get_algorithm("ERM")):
        def __init__(self, input_shape, num_classes, num_domains, hparams):
            super().__init__(input_shape, num_classes, num_domains, hparams)
            self.register_buffer("seen", torch.tensor([0]))
            self.optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        def update(self, minibatches, unlabeled=None):
            loss = F.cross_entropy(self.predict(torch.cat([x for x, _ in minibatches])), torch.cat([y for _, y in minibatches]))
            self.optimizer.zero_grad(); loss.backward(); self.optimizer.step()
            self.seen += 1
            return {"loss": loss.item()}
        def make_optimizer(self): return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
    check_algorithm(Theirs)
