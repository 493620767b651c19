"""Slow computations in float64 that tests compare algorithms with: a tiny network, cross entropy
by loops, Adam and SGD written out."""

import copy

import pytest
import torch
from torch import nn

from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome

SHAPE, CLASSES, FEATURES = (3, 8, 8), 4, 6


def tiny(cls, domains=3, features=FEATURES, **hparams):
    "An algorithm whose featurizer is one linear layer and tanh, in float64."
    seed_everything(0)
    algorithm = cls(SHAPE, CLASSES, domains, {"network": "small_cnn", "lr": 0.01, **hparams})
    channels = next(p for p in algorithm.featurizer.parameters()).shape[1]
    algorithm.featurizer = nn.Sequential(
        nn.Flatten(), nn.Linear(channels * 64, features), nn.Tanh()
    )
    algorithm.classifier = nn.Linear(features, CLASSES)
    return algorithm.double()


def draw(sizes, seed):
    "Random minibatches of the given sizes, in float64."
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.rand(n, *SHAPE, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (n,), generator=generator),
        )
        for n in sizes
    ]


def cross_entropy(logits, y):
    "Mean cross entropy, one sample at a time."
    terms = []
    for row, label in zip(logits, y.tolist()):
        top = max(row.tolist())
        terms.append(-(row[label] - top - sum((value - top).exp() for value in row).log()))
    return sum(terms) / len(terms)


class Adam:
    "Adam as in its paper, with coupled weight decay; `step` skips what has gradient None."

    def __init__(self, parameters, lr=0.01, weight_decay=0.0):
        self.parameters, self.lr, self.weight_decay = list(parameters), lr, weight_decay
        self.m, self.v, self.t = (
            [torch.zeros_like(p) for p in self.parameters],
            [torch.zeros_like(p) for p in self.parameters],
            [0] * len(self.parameters),
        )

    @torch.no_grad()
    def step(self, gradients):
        for k, (p, g) in enumerate(zip(self.parameters, gradients, strict=True)):
            if g is None:
                continue
            g = g + self.weight_decay * p
            self.t[k] += 1
            self.m[k] = 0.9 * self.m[k] + 0.1 * g
            self.v[k] = 0.999 * self.v[k] + 0.001 * g * g
            p -= (
                self.lr
                * (self.m[k] / (1 - 0.9 ** self.t[k]))
                / ((self.v[k] / (1 - 0.999 ** self.t[k])).sqrt() + 1e-8)
            )


def gradients(loss, parameters):
    "Gradients of a scalar, None where it does not depend on a parameter."
    return torch.autograd.grad(loss, list(parameters), allow_unused=True, retain_graph=True)


def assert_same_parameters(algorithm, other, tolerance=1e-9):
    for (name, a), b in zip(algorithm.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_resumes(cls, tmp_path, shape=(3, 16, 16), domains=3, updates=4, more=3, **hparams):
    """Saved to disk in mid-training and restored into another object, an algorithm resumes
    bitwise, and that matters: it moves."""
    from hmoe_repro.algorithms.conformance import random_batches
    from hmoe_repro.training.checkpoint_io import load_state, save_state

    build = lambda: cls(shape, CLASSES, domains, {"network": "small_cnn", **hparams}).train()
    seed_everything(3)
    first = build()
    first.total_steps = updates + more
    for step in range(updates):
        first.update(random_batches(domains, shape, CLASSES, step))
    save_state(tmp_path / "state.safetensors", first.training_state())
    before = copy.deepcopy(first.state_dict())
    seed_everything(77)
    second = build()
    second.load_training_state(load_state(tmp_path / "state.safetensors"))
    reported = []
    for algorithm in (first, second):
        seed_everything(5)
        reported.append(
            [
                algorithm.update(random_batches(domains, shape, CLASSES, 10 + step))
                for step in range(more)
            ]
        )
    assert reported[0] == reported[1]
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert any(not torch.equal(before[name], value) for name, value in first.state_dict().items())


def soft_iou(m):
    "Soft intersection over union of masks (M, N), mean over the pairs of domains (DMG, eq. 1)."
    pairs = []
    for i in range(len(m)):
        for j in range(i):
            both = (m[i] * m[j]).sum()
            pairs.append((both + 1e-6) / (m[i].sum() + m[j].sum() - both + 1e-6))
    return torch.stack(pairs).mean()


def stopped_and_resumed(name, folder, **hparams):
    """The record of a short run, which a second run of it equals that was stopped at update 5.

    The first checkpoint after a resume, and the last one, are after the stop.
    """

    def stop(step, steps):
        if step == 5:
            raise KeyboardInterrupt

    options = {"network": "small_cnn", "steps": 9, "checkpoint_frequency": 2}
    hparams = {"batch_size": 4, **hparams}
    config = make_config(name, "DigitDomainsTiny", ["photo"], 0, hparams, **options)
    whole = run(config, RunStore(folder / "whole"))
    assert whole["status"] == "complete", whole["reason"]
    with pytest.raises(KeyboardInterrupt):
        run(config, RunStore(folder / "stopped"), on_step=stop)
    resumed = run(config, RunStore(folder / "stopped"))
    assert resumed["resumed"]
    assert outcome(whole) == outcome(resumed)
    return whole
