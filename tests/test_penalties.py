"""Sums of penalties: updates by hand in float64, what is refused, and names."""

import copy
import subprocess
import sys

import by_hand
import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_resumes
from written_out import CLASSES, SHAPE, Adam, build, random_domains

from hmoe_repro.algorithms import FAMILIES, get_algorithm
from hmoe_repro.algorithms.alignment import DANN
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.algorithms.hparams import draw_hparams, with_network
from hmoe_repro.algorithms.penalties import BASES, LENDERS, SumOfPenalties, combined, why_not_lent
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything

SUMS = ("IRM+DANN", "VREx+CORAL", "SAM+IRM+CORAL", "MixStyle+CORAL", "IB-ERM+SD+CDANN")


def assert_same(fast, slow):
    pairs = zip(fast.named_parameters(), slow.named_parameters(), strict=True)
    for (name, a), (_, b) in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


def risks_of(slow, minibatches):
    return [F.cross_entropy(slow.classifier(slow.featurizer(x)), y) for x, y in minibatches]


def irm_by_definition(slow, minibatches):
    "Mean over domains of the product of two halves' slopes in a factor on the logits."
    products = []
    for x, y in minibatches:
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        logits = factor * slow.classifier(slow.featurizer(x))
        slopes = []
        for half in (slice(0, None, 2), slice(1, None, 2)):
            loss = F.cross_entropy(logits[half], y[half])
            slopes.append(torch.autograd.grad(loss, factor, create_graph=True)[0])
        products.append(slopes[0] * slopes[1])
    return sum(products) / len(products)


def coral_by_definition(slow, minibatches):
    total, pairs = 0, 0
    features = [slow.featurizer(x) for x, _ in minibatches]
    moments = [(z.mean(0), torch.cov(z.T)) for z in features]
    for i in range(len(moments)):
        for j in range(i):
            for a, b in zip(moments[i], moments[j]):
                total = total + (a - b).square().mean()
            pairs += 1
    return total / pairs


def test_irm_with_dann_by_hand():
    """IRM's weight jumps before the third update, and both players get new moments then."""
    hparams = {
        "irm_lambda": 30.0, "irm_penalty_anneal_iters": 2, "lambda": 0.7, "grad_penalty": 0.3,
        "lr_g": 1e-3, "lr_d": 3e-3, "weight_decay_g": 0.01, "weight_decay_d": 0.02,
        "beta1": 0.5, "d_steps_per_g_step": 2, "mlp_width": 8,
    }  # fmt: skip
    fast, slow = build(get_algorithm("IRM+DANN"), hparams)
    assert isinstance(fast, DANN)
    network = [*slow.featurizer.parameters(), *slow.classifier.parameters()]
    adversary = list(slow.adversary.parameters())
    discriminator = slow.adversary["discriminator"]

    def losses(minibatches):
        x = torch.cat([x for x, _ in minibatches])
        z = slow.featurizer(x)
        domains = torch.repeat_interleave(torch.arange(3), torch.tensor([6, 6, 6]))
        of_image = F.cross_entropy(discriminator(z), domains, reduction="none")
        (slopes,) = torch.autograd.grad(of_image.sum(), z, create_graph=True)
        L_d = of_image.mean() + 0.3 * slopes.square().sum(1).mean()
        return sum(risks_of(slow, minibatches)) / 3, L_d

    for t in range(4):
        if t in (0, 2):
            generator = Adam(1e-3, (0.5, 0.9), 0.01)
            opponent = Adam(3e-3, (0.5, 0.9), 0.02)
        minibatches = random_domains(t, sizes=(6, 6, 6))
        _, L_d = losses(minibatches)  # one step of the discriminator alone, then one of both
        opponent.step(adversary, torch.autograd.grad(L_d, adversary))
        nll, L_d = losses(minibatches)
        irm = (30.0 if t >= 2 else 1.0) * irm_by_definition(slow, minibatches)
        own = torch.autograd.grad(nll + irm, network, retain_graph=True)
        hidden = torch.autograd.grad(L_d, network, retain_graph=True, allow_unused=True)
        of_network = [g if h is None else g - 0.7 * h for g, h in zip(own, hidden, strict=True)]
        of_adversary = torch.autograd.grad(L_d, adversary)
        expected = (nll + irm + L_d).item()
        generator.step(network, of_network)
        opponent.step(adversary, of_adversary)
        reported = fast.update(minibatches)
        assert reported["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert reported["IRM"] == pytest.approx(irm.item(), rel=1e-7, abs=1e-12)
        assert_same(fast, slow)


def test_vrex_with_coral_by_hand():
    hparams = {"vrex_lambda": 20.0, "vrex_penalty_anneal_iters": 2, "mmd_gamma": 0.6}
    fast, slow = build(get_algorithm("VREx+CORAL"), hparams)
    parameters = list(slow.parameters())
    for t in range(4):
        if t in (0, 2):
            adam = Adam()
        minibatches = random_domains(t, sizes=(5, 5, 5))
        risks = torch.stack(risks_of(slow, minibatches))
        vrex = (20.0 if t >= 2 else 1.0) * (risks - risks.mean()).square().mean()
        coral = 0.6 * coral_by_definition(slow, minibatches)
        loss = risks.mean() + vrex + coral
        adam.step(parameters, torch.autograd.grad(loss, parameters))
        reported = fast.update(minibatches)
        assert reported["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert reported["CORAL"] == pytest.approx(coral.item(), rel=1e-7, abs=1e-12)
        assert_same(fast, slow)


def single_sum(cls):
    attributes = {"terms": (cls,), "HPARAMS": cls.HPARAMS | ERM.HPARAMS, "name": "sum"}
    return type("Sum", (SumOfPenalties, ERM), attributes)


@pytest.mark.parametrize("name", LENDERS)
def test_a_lent_penalty_is_that_of_the_algorithm(name):
    """Loss and gradients of ERM plus the lent penalty are those of the algorithm."""
    cls = get_algorithm(name)
    alone, _ = build(cls)
    both, _ = build(single_sum(cls))
    both.featurizer.load_state_dict(alone.featurizer.state_dict())
    both.classifier.load_state_dict(alone.classifier.state_dict())
    both.lent[0].load_state_dict(alone.state_dict(), strict=False)
    gradients = []
    for t in (0, 2000):
        for model in (alone, both):
            model.update_count = t
            seed_everything(t)
            loss = model.loss(random_domains(t, sizes=(5, 5, 5)))["loss"]
            network = [*model.featurizer.parameters(), *model.classifier.parameters()]
            gradients.append([loss, *torch.autograd.grad(loss, network)])
        for a, b in zip(gradients[-2], gradients[-1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not torch.equal(gradients[0][0], gradients[2][0])


def test_the_features_are_computed_once():
    model, _ = build(get_algorithm("IRM+VREx+CORAL"))
    calls = []
    model.featurizer.register_forward_hook(lambda *given: calls.append(1))
    model.update(random_domains(0))
    assert len(calls) == 1


def test_the_classifier_is_stored_once_and_copied_with_the_model():
    model, _ = build(get_algorithm("VREx+CORAL"))
    assert model.state_dict().keys() == build(ERM)[0].state_dict().keys()
    model.update(random_domains(0))
    copied = copy.deepcopy(model)
    for t in (1, 2):
        assert copied.update(random_domains(t)) == model.update(random_domains(t))
    assert all(
        not torch.equal(p, q) for p, q in zip(copied.parameters(), build(ERM)[0].parameters())
    )
    frozen = copy.deepcopy(model)
    model.update(random_domains(3))
    assert not torch.equal(frozen.classifier.weight, model.classifier.weight)
    assert vars(copied.lent[0])["classifier"] is copied.classifier


def test_all_parts_are_trained():
    """The projection of CAD, also with the optimiser of an adversary."""
    for name in ("CAD+VREx", "CAD+DANN"):
        model, before = build(get_algorithm(name), {"is_project": True, "lmbda": 1.0})
        model.update(random_domains(0))
        moved = zip(model.lent.named_parameters(), before.lent.parameters(), strict=True)
        changed = [not torch.equal(p, q) for (_, p), q in moved]
        assert changed
        assert all(changed)


@pytest.mark.parametrize("name", [*SUMS, "SWAD-IRM+CORAL", "DISAM+VREx+SD", "SelfReg+CORAL"])
def test_sums_pass_the_conformance_test(name):
    check_algorithm(get_algorithm(name))


@pytest.mark.parametrize("name", [*SUMS, "SMA-IRM+CORAL"])
def test_killed_sums_resume_bitwise(name, tmp_path):
    assert_resumes(get_algorithm(name), tmp_path)


def test_a_stopped_run_resumes_bitwise(tmp_path):
    by_hand.stopped_and_resumed("IRM+DANN", tmp_path, irm_penalty_anneal_iters=3)


@pytest.mark.parametrize(
    "name, why",
    [
        ("CORAL+MMD", "CORAL and MMD both have a hyper-parameter mmd_gamma"),
        ("IRM+IRM", "named twice"),
        ("SelfReg+CORAL+SelfReg", "named twice"),
        ("Fishr+DANN", "both have a hyper-parameter lambda"),
        ("IRM+IB-IRM", "both have a hyper-parameter irm_lambda"),
        ("DANN+CDANN", "DANN and CDANN both make the forward pass"),
        ("IRM+DANN+MixStyle", "DANN and MixStyle both make the forward pass"),
        ("IRM+SAM", "trainer, which is named once and first"),
        ("ERM+CORAL", "without a penalty"),
        ("IRM+ERM", "without a penalty"),
        ("IRM+SWAD-ERM", "averages of weights go outside"),
        ("IRM+Fish", "its update is not one step on one loss"),
        ("IRM+ERM++", "ERM cannot be a part"),
        ("IRM+HMOE-DN", "one featurizer and one classifier"),
        ("CORAL+Mixup", "not a cross entropy plus a penalty"),
        ("IRM+VREx+SD+RIDG+CORAL", "5 parts"),
        ("IRM+" * 5000 + "VREx", "5,001 parts"),
        ("SAM+IRM+DANN", "is not one step on one loss"),
        ("SAM+SAM+CORAL", "is not one step on one loss"),
    ],
)
def test_what_the_rule_excludes(name, why):
    with pytest.raises(HmoeError, match=why) as refused:
        get_algorithm(name)
    assert len(str(refused.value)) < 700
    assert "CORAL" in str(refused.value)


@pytest.mark.parametrize("name", ["IRM+", "+IRM", "IRM+Nothing", "irm+CORAL", "IRM++CORAL"])
def test_half_names_are_unknown(name):
    with pytest.raises(HmoeError, match="unknown algorithm"):
        get_algorithm(name)


def test_every_algorithm_is_a_part_or_has_a_reason():
    parts = {name for name in FAMILIES if not why_not_lent(name)}
    assert parts == {*LENDERS, *BASES}
    for name in LENDERS:
        combined(f"{name}+MixStyle")
    combined("SelfReg+DANN")  # `domainbed_compat` of both has one meaning


def test_a_sum_has_what_its_parts_declare():
    both = get_algorithm("VREx+CORAL")
    assert both.name == "VREx+CORAL"
    assert both.paper == "Krueger et al., 2021; Sun and Saenko, 2016"
    declared = get_algorithm("VREx").HPARAMS | get_algorithm("CORAL").HPARAMS
    assert both.HPARAMS == declared
    assert both.version == get_algorithm("CORAL").version
    assert get_algorithm("IRM+DANN").needs_two_domains
    assert not get_algorithm("SD+RIDG").needs_domain_labels
    drawn = draw_hparams(with_network(both.HPARAMS, "small_cnn"), 3, 1)
    for name in ("VREx", "CORAL"):
        alone = draw_hparams(with_network(get_algorithm(name).HPARAMS, "small_cnn"), 3, 1)
        assert alone.items() <= drawn.items()
    with pytest.raises(HmoeError, match="only one"):
        get_algorithm("IRM+DANN")((3, 16, 16), 4, 1, {"network": "small_cnn"})
    with pytest.raises(HmoeError, match="linear"):
        get_algorithm("RIDG+CORAL")(
            (3, 16, 16), 4, 3, {"network": "small_cnn", "nonlinear_classifier": True}
        )


def test_a_plus_sign_in_a_name_is_no_sum():
    """In a new process, in which no module of an algorithm is imported."""
    script = 'from hmoe_repro.algorithms import *; print(get_algorithm("ERM++").name)'
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.strip() == "ERM++", said.stderr


def test_unequal_batches_weigh_images_alike():
    model, slow = build(get_algorithm("VREx+CORAL"))
    minibatches = random_domains(0, sizes=(4, 7, 2))
    x, y = (torch.cat(parts) for parts in zip(*minibatches))
    nll = F.cross_entropy(slow.predict(x), y).item()
    reported = model.update(minibatches)
    assert reported["loss"] - reported["VREx"] - reported["CORAL"] == pytest.approx(nll)
    assert len(y) == 13
    assert CLASSES > int(y.max())
    assert x.shape[1:] == SHAPE


MINE = """
from hmoe_repro.algorithms.base import ERM

class Mine(ERM):
    "An algorithm in a file."
    def loss(self, minibatches):
        losses = super().loss(minibatches)
        return {"loss": FACTOR * losses["loss"]}

class Other(ERM):
    "Its update is its own."
    def update(self, minibatches, unlabeled=None):
        return super().update(minibatches)
"""


def test_a_trainer_in_front_of_a_file(tmp_path, monkeypatch, own_names):
    from hmoe_repro.algorithms.from_file import algorithm_from_file, algorithm_name
    from hmoe_repro.training.planning import make_config

    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    file = tmp_path / "mine.py"
    file.write_text(MINE.replace("FACTOR", "2"))
    name = algorithm_name(f"SAM+{file}:Mine")
    assert name == "SAM+Mine (mine.py)"
    make = lambda algorithm: make_config(
        algorithm, "DigitDomainsTiny", ["photo"], network="small_cnn", steps=2
    )
    first = make(f"SAM+{file}:Mine")
    alone = make(f"{file}:Mine")
    assert first.algorithm == name
    assert first.algorithm_source == alone.algorithm_source
    assert first.run_id != alone.run_id
    model = get_algorithm(name)((3, 16, 16), 4, 3, {"network": "small_cnn"})
    assert "perturbed_loss" in model.update(random_batches(3, (3, 16, 16), 4, 0))
    file.write_text(MINE.replace("FACTOR", "3"))
    second = make(f"SAM+{file}:Mine")
    assert second.algorithm == name
    assert second.algorithm_source != first.algorithm_source
    assert second.run_id != first.run_id
    with pytest.raises(HmoeError, match="is not one step on one loss"):
        algorithm_from_file(f"SAM+{file}:Other")
    for text in (f"IRM+{file}:Mine", f"{file}:Mine+IRM", f"SAM+IRM+{file}:Mine"):
        with pytest.raises(HmoeError, match="penalty of IRM cannot be added .* SAM\\+/.*:Mine"):
            algorithm_from_file(text)


@pytest.mark.parametrize("outer", ["SWAD-", "SMA-", "SWAD-SAM+"])
def test_an_average_in_front_of_a_file(outer, tmp_path, monkeypatch, own_names):
    from hmoe_repro.algorithms.from_file import algorithm_name
    from hmoe_repro.training.planning import make_config
    from hmoe_repro.training.run import run
    from hmoe_repro.training.store import RunStore

    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE.replace("FACTOR", "2"))
    for folder, file in (("SWAD-own", "a.py"), ("SMA-own", "b.py"), ("c++", "d.py")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(MINE.replace("FACTOR", "3"))
        assert algorithm_name(f"./{folder}/{file}:Mine") == f"Mine ({file})"
    name = algorithm_name(f"{outer}mine.py:Mine")
    assert name == f"{outer}Mine (mine.py)"
    config = make_config(
        f"{outer}mine.py:Mine", "DigitDomainsTiny", ["photo"], network="small_cnn", steps=4
    )
    assert config.algorithm == name
    assert config.algorithm_source == get_algorithm("Mine (mine.py)").source_hash
    record = run(config, RunStore(tmp_path / "runs"))
    assert record["status"] == "complete"
    assert record["config"]["algorithm"] == name


def test_a_trainer_in_front_of_a_file_in_a_study(tmp_path, monkeypatch, own_names):
    from hmoe_repro.studies.studies import study_configs
    from hmoe_repro.studies.study_file import read_study

    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "mine.py").write_text(MINE.replace("FACTOR", "2"))
    (tmp_path / "study.toml").write_text(
        'title = "T"\nalgorithms = ["SAM+mine.py:Mine", "IRM+CORAL"]\n'
        'datasets = ["DigitDomainsTiny"]\ntest_domains = ["photo"]\nseeds = 1\nsteps = 2\n'
    )
    configs = study_configs(read_study(str(tmp_path / "study.toml")))
    assert [config.algorithm for config in configs] == ["SAM+Mine (mine.py)", "IRM+CORAL"]
    assert configs[0].algorithm_source
    assert configs[1].algorithm_source is None
