"""The interface, the conformance test and its teeth, ERM and HMOE against slow computations."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.base import (
    ALGORITHMS,
    ERM,
    HParam,
    as_floats,
    concatenate,
    merge_hparams,
    register,
)
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.algorithms.hmoe import HMOE_DL, HMOE_DN, build_encoder
from hmoe_repro.algorithms.tools import AnnealedPenalty
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.data.registry import DATASETS
from hmoe_repro.networks.search_space import parse_setting
from hmoe_repro.training.planning import make_config

SHAPE = dict(input_shape=(3, 16, 16), num_classes=4, num_domains=3)
SMALL = {"network": "small_cnn"}


@pytest.mark.parametrize("name", algorithm_names())
def test_conformance(name):
    check_algorithm(get_algorithm(name))


def test_conformance_catches_what_it_should():
    class Wide(ERM):
        def predict_modes(self, x):
            return {"default": torch.cat([self.predict(x)] * 2, 1)}

    class Silent(ERM):
        def loss(self, minibatches):
            return {"nll": super().loss(minibatches)["loss"]}

    class Exploding(ERM):
        def loss(self, minibatches):
            return {"loss": super().loss(minibatches)["loss"] * float("inf")}

    class Untracked(ERM):  # keeps training state in a list, which no state dictionary holds
        def __init__(self, *args):
            super().__init__(*args)
            self.weights = [1.0]

        def loss(self, minibatches):
            self.weights[0] *= 1.5
            return {
                "loss": super().loss(minibatches)["loss"] * min(self.weights[0], 4)
                + sum(p.square().sum() for p in self.parameters()) * self.weights[0]
            }

    class Noisy(ERM):  # how often one predicts would change what is trained
        def predict(self, x):
            return super().predict(x) + torch.rand(1)

    class Random(ERM):
        def loss(self, minibatches):
            return {
                "loss": super().loss(minibatches)["loss"]
                * (1 + 0.1 * float(torch.empty(1).uniform_(generator=GENERATOR)))
            }

    class Paired(ERM):  # fails on one domain, and does not say so
        def loss(self, minibatches):
            return super().loss([minibatches[0], minibatches[1], *minibatches[2:]])

    for cls, message in [
        (Noisy, "global generator"),
        (Random, "same seed"),
        (Wide, "default: logits"),
        (Exploding, "finite"),
        (Untracked, "saved state"),
    ]:
        with pytest.raises(AssertionError, match=message):
            check_algorithm(cls)
    with pytest.raises(HmoeError, match="loss of Silent must return a dictionary"):
        check_algorithm(Silent)
    with pytest.raises(IndexError):
        check_algorithm(Paired)


GENERATOR = torch.Generator()


class Heads(ERM):
    """ERM with a second head that its loss uses; broken ones leave the head out somewhere."""

    def __init__(self, *args):
        super().__init__(*args)
        self.heads = self.made(nn.Linear(self.featurizer.num_features, 4))

    def made(self, head):
        return nn.ModuleList([head])

    def loss(self, minibatches):
        x, y = concatenate(minibatches)
        second = F.cross_entropy(self.heads[0](self.featurizer(x)), y)
        return {"loss": super().loss(minibatches)["loss"] + second}

    def taken(self):
        return [*self.featurizer.parameters(), *self.classifier.parameters()]

    def make_optimizer(self):
        return torch.optim.Adam(self.taken())


class Scaled(ERM):
    """Declares its classifier fixed, and scales it by hand."""

    fixed = ("classifier.",)

    def update(self, minibatches, unlabeled=None):
        with torch.no_grad():
            self.classifier.bias.mul_(0.9)
        return super().update(minibatches)


class Phased(AnnealedPenalty, ERM):
    """ERM whose loss is another one after 500 updates."""

    HPARAMS = ERM.HPARAMS | {
        "lambda": HParam(2.0, "weight of the loss"),
        "penalty_anneal_iters": HParam(500, "updates with weight 1", phase="updates"),
    }

    def loss(self, minibatches):
        return {"loss": self.weight() * super().loss(minibatches)["loss"]}

    def weight(self):
        return self.penalty_weight


def forgotten_switch(self):  # a bool is no counter, and no state holds it
    self.switched = (
        getattr(self, "switched", False)
        or self.update_count == self.hparams["penalty_anneal_iters"]
    )
    return torch.tensor(-1.0 if self.switched else 1.0)


SOUND = {Heads: {"taken": lambda self: list(self.parameters())}, Scaled: {"fixed": ()}, Phased: {}}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(
    "base, broken, said",
    [
        (Heads, {}, r"parameters that training does not move: \['heads.0.bias', 'heads.0.weight'"),
        (
            Heads,
            {"made": lambda self, head: nn.ModuleList([head.requires_grad_(False)])},
            "training does not move: .*heads.0.bias",
        ),
        (Heads, {"made": lambda self, head: [head]}, "not registered, in heads, of shapes"),
        (
            Heads,
            {"taken": lambda self: [*self.parameters(), nn.Parameter(torch.zeros(3, 2))]},
            r"optimizer takes parameters that are not the algorithm's: \[\(3, 2\)\]",
        ),
        (
            Heads,
            {"taken": lambda self: [*self.parameters(), *self.heads.parameters()]},
            "optimizer takes parameters twice: .*heads.0.bias",
        ),
        (
            Heads,
            {"taken": lambda self: list(self.parameters()), "fixed": ("heads.",)},
            "optimizer takes parameters declared fixed: .*heads.0.weight",
        ),
        (Scaled, {}, r"declared fixed that training moves: \['classifier.bias"),
        (
            Phased,
            {"weight": lambda self: 0.0 if self.update_count >= 2 else 1.0},
            "does not move after the change of phase: .*classifier.bias",
        ),
        (
            Phased,
            {"weight": lambda self: 1.0 if self.update_count >= 2 else 0.0},
            "does not move before the change of phase: .*classifier.bias",
        ),
        (Phased, {"weight": forgotten_switch}, "training resumed from a saved state is not"),
    ],
)
def test_conformance_names_parameters_and_phases(base, broken, said):
    check_algorithm(type("Sound", (base,), SOUND[base]))
    with pytest.raises(AssertionError, match=said):
        check_algorithm(type("Broken", (base,), broken))


PHASES = (
    "anneal|start|ramp|warmup|meta_frac|match_fraction|match_random|converge|burnin|^iters$|"
    "linear_steps"
)


def test_what_changes_a_phase_is_declared():
    """By its unit, and for every algorithm that has such a hyper-parameter."""
    declared = {
        name: h for each in algorithm_names() for name, h in get_algorithm(each).HPARAMS.items()
    }
    timed = {name for name in declared if re.search(PHASES, name)}
    assert timed == {name for name, h in declared.items() if h.phase}
    assert len(timed) == 16


class ByHand(ERM):
    """ERM on domains of equal size, whose gradients are put together by hand."""

    def gradients(self, parameters, losses):
        """The mean over domains, in plain memory order."""
        return [
            torch.stack(g).mean(0)
            for g in zip(*(torch.autograd.grad(loss, parameters) for loss in losses))
        ]

    def steps(self, minibatches):
        parameters = list(self.parameters())
        losses = [F.cross_entropy(self.predict(x), y) for x, y in minibatches]
        for p, g in zip(parameters, self.gradients(parameters, losses)):
            p.grad = g
        self.optimizer.step()
        return {"loss": torch.stack(losses).mean()}


class Hidden(ByHand):
    """Its optimiser is its own, and no attribute that is one."""

    def update(self, minibatches, unlabeled=None):
        if not hasattr(self, "tools"):
            self.tools = [torch.optim.Adam(self.parameters(), lr=self.hparams["lr"], fused=True)]
        parameters = list(self.parameters())
        losses = [F.cross_entropy(self.predict(x), y) for x, y in minibatches]
        for p, g in zip(parameters, self.gradients(parameters, losses)):
            p.grad = g
        self.tools[0].step()
        return {"loss": torch.stack(losses).mean().item()}


class Replaced(ByHand):
    """Puts copies in the place of its weights: plain memory order, beside moments that are not."""

    def steps(self, minibatches):
        reported = super().steps(minibatches)
        for p in self.parameters():
            p.data = p.data.clone(memory_format=torch.contiguous_format)
        return reported


@pytest.mark.parametrize("cls", [ByHand, Hidden, Replaced], ids=lambda cls: cls.__name__)
def test_gradients_assigned_by_hand_train_as_erm_does(cls):
    """Thirty updates on one batch: without the hook the loss ends at four times ERM's."""
    ends = {}
    for kind in (ERM, cls):
        seed_everything(0)
        algorithm, batches = (
            kind(**SHAPE, hparams=SMALL).train(),
            random_batches(3, SHAPE["input_shape"], 4, 0),
        )
        for _ in range(30):
            ends[kind] = algorithm.update(batches)["loss"]
    assert ends[cls] == pytest.approx(ends[ERM], rel=0.01)
    assert ends[ERM] < 0.5


def test_a_gradient_that_has_its_parameters_layout_is_left_alone():
    erm = ERM(**SHAPE, hparams=SMALL)
    erm.update(random_batches(3, SHAPE["input_shape"], 4, 0))
    before = [p.grad.data_ptr() for p in erm.parameters()]
    erm.optimizer.step()
    assert [p.grad.data_ptr() for p in erm.parameters()] == before
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    torch.optim.SGD(table.parameters(), lr=1.0).step()  # a sparse gradient has no strides


@pytest.mark.parametrize(
    "reported, said",
    [
        (torch.tensor(1.0), r"update of Mine returned tensor\(1.\), not a dictionary of n"),
        (None, "returned None, not a dictionary"),
        ({"loss": torch.zeros(2)}, "'loss': tensor.*, not a dictionary of numbers"),
        ({"loss": "low"}, "'loss': 'low'"),
    ],
)
def test_what_an_update_reports_is_refused_unless_it_is_numbers(reported, said):
    with pytest.raises(HmoeError, match=said):
        as_floats(reported, "Mine")


def test_what_an_update_reports_becomes_floats():
    said = as_floats(
        {"loss": torch.tensor([[2.0]], requires_grad=True), "n": 3, "q": np.float32(0.5)}
    )
    assert said == {"loss": 2.0, "n": 3.0, "q": 0.5}
    assert all(type(value) is float for value in said.values())


@pytest.mark.parametrize(
    "returned",
    [torch.tensor(1.0), {"nll": torch.tensor(1.0)}, {"loss": torch.zeros(2)}, {"loss": 1.0}],
    ids=str,
)
def test_a_loss_that_is_no_scalar_is_refused_in_a_line(returned):
    cls = type("Mine", (ERM,), {"loss": lambda self, minibatches: returned})
    with pytest.raises(
        HmoeError, match="loss of Mine must return a dictionary.*Fix: return {'loss'"
    ):
        cls(**SHAPE, hparams=SMALL).update([])


def test_versions():
    """What published runs of the library's own mean has changed for these."""
    changed = {name for name in algorithm_names() if get_algorithm(name).version > 1}
    assert changed >= {"CORAL", "MMD", "DANN", "CDANN", "MTL", "Mixup", "GroupDRO"}
    assert not changed & {"ERM", "HMOE-DN", "SagNet", "MLDG", "Fish", "SWAD"}
    assert get_algorithm("SWAD-CORAL").version == 2
    assert get_algorithm("SMA-ERM").version == 1
    assert ERM.version == 1


def test_planning_refuses_what_the_number_of_domains_does_not_allow():
    plan = lambda algorithm, tests, **hparams: make_config(
        algorithm, "DigitDomainsTiny", tests, network="small_cnn", hparams=hparams
    )
    domains = list(DATASETS["DigitDomainsTiny"].domain_names)
    for algorithm in ("MLDG", "SWAD-MLDG"):
        with pytest.raises(
            HmoeError,
            match="n_meta_test=2 is impossible with 2 training domains. "
            "Fix: n_meta_test from 1 to 1",
        ):
            plan(algorithm, domains[:2], domainbed_compat=True)
        assert (
            plan(algorithm, domains[:2], domainbed_compat=True, n_meta_test=1).hparams[
                "n_meta_test"
            ]
            == 1
        )
    for algorithm in ("MLDG", "DANN", "CDANN", "MetaReg", "SMA-DANN"):
        with pytest.raises(HmoeError, match="training domain"):
            plan(algorithm, domains[:3])
    with pytest.raises(HmoeError, match="2 experts cannot each own"):
        plan("HMOE-DL", domains[:1], num_experts=2)
    drawn = {
        make_config(
            "MLDG",
            "DigitDomainsTiny",
            domains[:k],
            network="small_cnn",
            hparams={"domainbed_compat": True},
            hparams_seed=seed,
        ).hparams["n_meta_test"]
        for k in (2,)
        for seed in range(1, 7)
    }
    assert drawn == {1}


def test_erm_against_adam_written_out():
    """Two updates in float64 against Adam's formulas."""
    seed_everything(0)
    erm = ERM(**SHAPE, hparams=SMALL).double()
    shadow = copy.deepcopy(erm)
    parameters = list(shadow.parameters())
    first, second = (
        [torch.zeros_like(p) for p in parameters],
        [torch.zeros_like(p) for p in parameters],
    )
    for t in (1, 2):
        batches = [(x.double(), y) for x, y in random_batches(3, SHAPE["input_shape"], 4, seed=t)]
        reported = erm.update(batches)["loss"]
        logits = [shadow.classifier(shadow.featurizer(x)) for x, _ in batches]
        loss = sum(
            -torch.log_softmax(o, 1)[i, y[i]]
            for o, (_, y) in zip(logits, batches)
            for i in range(len(y))
        ) / sum(len(y) for _, y in batches)
        assert abs(reported - loss.item()) < 1e-10
        for p, g, m, v in zip(parameters, torch.autograd.grad(loss, parameters), first, second):
            m.mul_(0.9).add_(g, alpha=0.1), v.mul_(0.999).add_(g * g, alpha=0.001)
            with torch.no_grad():
                p -= 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    for a, b in zip(erm.parameters(), parameters):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_hmoe_loss_against_eq_9_written_out():
    seed_everything(1)
    hmoe = HMOE_DN(**SHAPE, hparams=SMALL)
    hmoe.total_steps, hmoe.update_count = 100, 20
    batches = random_batches(3, SHAPE["input_shape"], 4, seed=0)
    losses = hmoe.loss(batches)
    x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    model = hmoe.model
    v, e = model.encoder(x), model.embeddings
    p = torch.stack(
        [
            torch.stack([1 / ((v[b] - e[k]).square().sum() + 1e-6) for k in range(3)])
            for b in range(len(x))
        ]
    )
    p = p / p.sum(1, keepdim=True)
    mixed = torch.stack(
        [
            sum(
                p[b, k] * model.hypernetwork.expert_outputs(model.featurizer(x[b : b + 1]), e)[0, k]
                for k in range(3)
            )
            for b in range(len(x))
        ]
    )
    L_y, L_en, P = F.cross_entropy(mixed, y), -(p * p.log()).sum(1).mean(), p.mean(0)
    L_kl, L_ad = (P * (P * 3).log()).sum(), F.cross_entropy(model.adversary(v), y)
    expected = L_y + 0.4 * L_en + L_kl + 0.01 * L_ad
    for name, value in dict(L_y=L_y, L_en=L_en, L_kl=L_kl, L_ad=L_ad, loss=expected).items():
        torch.testing.assert_close(losses[name], value, rtol=1e-4, atol=1e-5)


def test_domain_labels_reach_only_the_labelled_variant():
    """Permuting which domain a batch is called changes HMOE-DL's loss and no other variant's."""
    batches = [
        (x * 3**i, y) for i, (x, y) in enumerate(random_batches(3, SHAPE["input_shape"], 4, seed=0))
    ]
    for name, differs in [("HMOE-DL", True), ("HMOE-DN", False), ("HMOE-ND", False)]:
        seed_everything(0)
        hmoe = get_algorithm(name)(**SHAPE, hparams=SMALL)
        a, b = (
            hmoe.loss(batches)["loss"].item(),
            hmoe.loss([batches[i] for i in (2, 0, 1)])["loss"].item(),
        )
        assert abs(a - b) > 1e-3 if differs else abs(a - b) < 1e-5, name
        assert get_algorithm(name).needs_domain_labels == differs


def test_variants_have_the_papers_settings():
    weights = lambda name: {
        k: v
        for k, v in get_algorithm(name)(**SHAPE, hparams=SMALL).hparams.items()
        if k.startswith("lambda")
    }
    assert weights("HMOE-DL") == dict(lambda_y=1, lambda_en=0, lambda_kl=0, lambda_ad=0, lambda_d=1)
    assert (
        weights("HMOE-DN")
        == weights("HMOE-ND")
        == dict(lambda_y=1, lambda_en=1, lambda_kl=1, lambda_ad=0.01, lambda_d=0)
    )
    assert [
        get_algorithm(n)(**SHAPE, hparams=SMALL).num_experts
        for n in ("HMOE-DL", "HMOE-DN", "HMOE-ND")
    ] == [3, 3, 5]
    assert HMOE_DL(**SHAPE, hparams=SMALL).model.adversary is None


def test_hparams_are_checked_by_name_and_type():
    declared = {
        "lr": HParam(1e-3, "rate", large_image_default=5e-5),
        "flag": HParam(False, "switch"),
        "n": HParam(3, "number"),
    }
    assert merge_hparams(declared, {"lr": 1}, 28) == {"lr": 1.0, "flag": False, "n": 3}
    assert merge_hparams(declared, {}, 224)["lr"] == 5e-5
    for wrong in (
        {"lrr": 1.0},
        {"flag": "False"},
        {"flag": 0},
        {"n": 2.5},
        {"n": True},
        {"lr": "fast"},
        {"lr": float("nan")},
        {"lr": float("inf")},
    ):
        with pytest.raises(HmoeError):
            merge_hparams(declared, wrong)
    assert [parse_setting(t)[1] for t in ("a=1", "a=1e-3", "a=True", "a=false", "a=prob")] == [
        1,
        1e-3,
        True,
        False,
        "prob",
    ]
    for wrong in ("lr", "=3"):
        with pytest.raises(HmoeError, match="name=value"):
            parse_setting(wrong)


def test_names():
    with pytest.raises(HmoeError, match="Valid: ERM, HMOE-DL"):
        get_algorithm("erm")
    with pytest.raises(HmoeError, match="taken"):
        register("ERM", paper="", needs_domain_labels=False)(HMOE_DN)
    assert ALGORITHMS["ERM"] is ERM
    assert HMOE_DN.name == "HMOE-DN"


def test_a_domainbed_style_class_runs():
    """Its own constructor, optimiser and update; only the base class is ours."""

    class Theirs(get_algorithm("ERM")):
        def __init__(self, input_shape, num_classes, num_domains, hparams):
            super().__init__(input_shape, num_classes, num_domains, hparams)
            self.register_buffer("seen", torch.tensor([0]))
            self.optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)

        def update(self, minibatches, unlabeled=None):
            loss = F.cross_entropy(
                self.predict(torch.cat([x for x, _ in minibatches])),
                torch.cat([y for _, y in minibatches]),
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.seen += 1
            return {"loss": loss.item()}

        def make_optimizer(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)

    check_algorithm(Theirs)


@pytest.mark.parametrize("block", ["post", "pre", "stargan"])
@pytest.mark.parametrize("norm", ["instance", "none"])
def test_d2v_scale_reaches_the_last_layer_and_no_other(block, norm):
    made = {}
    for scale in (1.0, 0.25):
        seed_everything(0)
        made[scale] = build_encoder(
            (3, 16, 16),
            dict(d2v_encoder="image", embedding_dim=8, d2v_block=block, d2v_norm=norm)
            | {"d2v_scale": scale},
        )
    plain, scaled = (dict(made[scale].named_parameters()) for scale in (1.0, 0.25))
    changed = {name for name in plain if not torch.equal(plain[name], scaled[name])}
    last = len(made[1.0].layers) - 1
    assert changed == {f"layers.{last}.weight", f"layers.{last}.bias"}
    for name in changed:
        assert torch.equal(scaled[name], 0.25 * plain[name])


class Taught(ERM):
    "A student of a teacher with ten classes."

    def __init__(self, input_shape, num_classes, num_domains, hparams=None):
        super().__init__(input_shape, num_classes, num_domains, hparams)
        self.teacher = ERM(input_shape, 10, num_domains, hparams)
        self.teacher.requires_grad_(False)

    def loss(self, minibatches):
        x, y = concatenate(minibatches)
        logits = self.predict(x)
        taught = F.cross_entropy(logits, self.teacher.predict(x).argmax(1))
        return {"loss": F.cross_entropy(logits, y) + taught}


def test_a_teacher_has_its_number_of_classes_and_is_named_as_fixed():
    with pytest.raises(AssertionError, match=r'fixed = \("teacher.",\)'):
        check_algorithm(Taught, num_classes=10)
    check_algorithm(type("Fixed", (Taught,), {"fixed": ("teacher.",)}), num_classes=10)
