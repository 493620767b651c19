"""ERM++ against Adam, averages and batch norm written out; its learning rate against torch's
ReduceLROnPlateau."""

import copy
import math

import pytest
import torch
from by_hand import CLASSES, SHAPE, Adam, assert_same_parameters, cross_entropy, draw, gradients
from torch import nn

from hmoe_repro.algorithms import averaging
from hmoe_repro.algorithms.averaging import ERMPlusPlus
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import random_batches
from hmoe_repro.algorithms.tools import frozen_copy
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.training.checkpoint_io import load_state, save_state


def build(**hparams):
    "ERM++ in float64 whose featurizer has a batch norm, in training mode."
    seed_everything(0)
    fast = ERMPlusPlus(SHAPE, CLASSES, 3, {"network": "small_cnn", "lr": 0.01, **hparams})
    fast.current.featurizer = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 32), nn.BatchNorm1d(32), nn.Tanh()
    )
    fast.result = frozen_copy(fast.current)
    return fast.double().train()


def normed(model, x):
    "Logits in training mode, and the batch norm's running mean and variance after it."
    _, linear, norm, _ = model.featurizer
    h = x.flatten(1) @ linear.weight.T + linear.bias
    mean = sum(h) / len(h)
    squares = sum((h - mean) ** 2)
    z = (h - mean) / (squares / len(h) + norm.eps).sqrt() * norm.weight + norm.bias
    moved = (
        0.9 * norm.running_mean + 0.1 * mean.detach(),
        0.9 * norm.running_var + 0.1 * squares.detach() / (len(h) - 1),
    )
    return torch.tanh(z) @ model.classifier.weight.T + model.classifier.bias, moved


def set_statistics(model, values):
    norm = model.featurizer[2]
    norm.running_mean.copy_(values[0]), norm.running_var.copy_(values[1])


def statistics(model):
    return model.featurizer[2].running_mean, model.featurizer[2].running_var


@pytest.mark.parametrize("compat", [False, True])
def test_updates_through_all_phases(compat):
    """The classifier alone, then all weights with a new Adam, then an average of weights and
    statistics that also sees the batch."""
    settings = {"linear_steps": 2, "linear_lr": 0.03, "sma_start": 3, "weight_decay": 0.01}
    fast = build(domainbed_compat=compat, **settings)
    slow = copy.deepcopy(fast.current)
    mean, warm = frozen_copy(slow), 2 + compat
    everything = slow.network_parameters()
    for t in range(7):
        if t in (0, warm):
            moved = list(slow.classifier.parameters()) if t < warm else everything
            adam = Adam(moved, 0.03 if t < warm else 0.01, 0.01)
        minibatches = draw((4, 2, 5), t)
        x, y = (torch.cat(part) for part in zip(*minibatches))
        logits, after = normed(slow, x)
        loss = cross_entropy(logits, y)
        adam.step(gradients(loss, moved))
        set_statistics(slow, after)
        n = max(0, t + 1 - 3)  # models in the average so far
        with torch.no_grad():
            for kept, now in zip(mean.parameters(), slow.parameters()):
                kept.copy_((n * kept + now) / (n + 1))
            pairs = zip(statistics(mean), statistics(slow))
            set_statistics(mean, [(n * kept + now) / (n + 1) for kept, now in pairs])
            set_statistics(mean, normed(mean, x)[1])

        assert math.isclose(fast.update(minibatches)["loss"], loss.item(), rel_tol=1e-9)
        assert_same_parameters(fast.current, slow)
        assert_same_parameters(fast.result, mean)
        for ours, model in ((fast.current, slow), (fast.result, mean)):
            for a, b in zip(statistics(ours), statistics(model)):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    fast.eval(), mean.eval()
    images = draw((6,), 9)[0][0]
    torch.testing.assert_close(fast.predict(images), mean.predict(images), rtol=1e-9, atol=1e-9)


def test_the_average_begins_at_update_600_with_two_models():
    fast, weights = build(), []
    for fast.update_count in (598, 599):
        fast.update(draw((3, 3, 3), fast.update_count))
        weights.append(fast.current.classifier.weight.detach().clone())
        assert torch.equal(fast.result.classifier.weight, weights[-1]) == (len(weights) == 1)
    torch.testing.assert_close(fast.result.classifier.weight, sum(weights) / 2)


def test_only_live_batch_norm_sees_the_batch_with_the_average():
    """Until the average begins, its statistics are the current ones, which this pass moves on."""
    fast = build()
    fast.update(draw((3, 3, 3), 0))
    assert not torch.equal(*(statistics(model)[0] for model in (fast.result, fast.current)))
    for model in (fast.current, fast.result):
        model.featurizer[2].eval()
    fast.result.predict = None  # nobody calls it
    fast.update(draw((3, 3, 3), 1))
    assert torch.equal(*(statistics(model)[0] for model in (fast.result, fast.current)))


COURSES = {
    "noise": [1 + 0.3 * math.sin(7.0 * k * k) for k in range(40)],
    "slow": [1 - 6e-5 * k for k in range(40)],  # every other one is 0.01 % better than the best
    "falling": [0.9**k for k in range(12)],
}


@pytest.mark.parametrize("course", COURSES)
def test_the_learning_rate_is_that_of_torchs_class(course, monkeypatch):
    fast = build(linear_steps=0)
    fast.update(draw((3, 3, 3), 0))
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(other, "min", patience=1, eps=0.0)
    for loss in COURSES[course]:
        monkeypatch.setattr(averaging, "validation_loss", lambda *_, loss=loss: loss)
        fast.on_checkpoint(None)
        schedule.step(loss)
        rates = [group["lr"] for group in fast.current.optimizer.param_groups]
        assert math.isclose(rates[0], other.param_groups[0]["lr"], rel_tol=1e-12)
        assert len(rates) == 1
    assert (rates[0] < 0.01) == (course == "noise")


def test_a_checkpoint_measures_the_average_and_not_in_the_warm_start():
    fast, before = build(linear_steps=2, sma_start=0, domainbed_compat=True), 1e9
    validation = [[batch] for batch in draw((5, 3, 4), 8)]
    for t in range(4):
        fast.update(draw((3, 3, 3), t))
        fast.on_checkpoint(iter(part) for part in validation)
        assert fast.best == before or t >= 2
    result = copy.deepcopy(fast.result).eval()
    losses = [cross_entropy(result.predict(x), y).item() for ((x, y),) in validation]
    fast.best = 1e9
    fast.on_checkpoint(validation)
    assert math.isclose(fast.best, sum(losses) / 3, rel_tol=1e-9)
    assert fast.result.training


def test_the_defaults_are_domainbeds():
    hparams = ERMPlusPlus(SHAPE, CLASSES, 3, {"network": "small_cnn"}).hparams
    added = {name: hparams[name] for name in ERMPlusPlus.HPARAMS if name not in ERM.HPARAMS}
    expected = {"linear_lr": 5e-5, "linear_steps": 500, "domainbed_compat": False}
    assert added == expected | {"sma_start": 599}  # an average from update 600 on
    assert not ERMPlusPlus.needs_domain_labels
    assert ERMPlusPlus.family == "averaging"
    with pytest.raises(HmoeError, match="linear_steps"):
        build(linear_steps=-1)


@pytest.mark.parametrize("saved", [1, 3, 6])
def test_resumed_from_a_file(saved, tmp_path, monkeypatch):
    """In the warm start, at its end, and after the learning rate has fallen once."""
    monkeypatch.setattr(averaging, "validation_loss", lambda *_: 1.0)  # a plateau

    def start():
        settings = {"network": "small_cnn", "linear_steps": 3, "sma_start": 2}
        return ERMPlusPlus((3, 16, 16), CLASSES, 3, settings).train()

    def train(algorithm, updates):
        for t in updates:
            algorithm.update(random_batches(3, (3, 16, 16), CLASSES, t))
            algorithm.on_checkpoint(None)

    seed_everything(3)
    first = start()
    train(first, range(saved))
    save_state(tmp_path / "state.safetensors", first.training_state())
    second = start()
    second.load_training_state(load_state(tmp_path / "state.safetensors"))
    for algorithm in (first, second):
        train(algorithm, range(saved, 9))
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    rates = [a.current.optimizer.param_groups[0]["lr"] for a in (first, second)]
    assert rates[0] == rates[1] < first.hparams["lr"] / 5
