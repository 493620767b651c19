"""Optimisation written out slowly, to compare algorithms with:
Adam's formulas, and updates on a tiny network in float64."""

import copy

import torch

from hmoe_repro.core.seeds import seed_everything

SHAPE, CLASSES = (3, 8, 8), 4
SMALL = {"network": "small_cnn"}


class Adam:
    "Adam with coupled weight decay, one tensor at a time; what has no gradient is left alone."

    def __init__(self, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0):
        self.lr, self.betas, self.weight_decay, self.moments = lr, betas, weight_decay, {}

    @torch.no_grad()
    def step(self, parameters, gradients):
        for p, g in zip(parameters, gradients):
            if g is None:
                continue
            t, m, v = self.moments.get(p, (0, torch.zeros_like(p), torch.zeros_like(p)))
            g, (b1, b2) = g + self.weight_decay * p, self.betas
            t, m, v = t + 1, b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            self.moments[p] = t, m, v
            p -= self.lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-8)


def random_domains(seed, sizes=(5, 5, 5), labels=None):
    """One batch per domain in float64, domains of different brightness;
    `labels` fixes the classes that occur."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: (
        torch.tensor(labels)[torch.randint(len(labels), (n,), generator=generator)]
        if labels
        else torch.randint(CLASSES, (n,), generator=generator)
    )
    return [
        (torch.rand(n, *SHAPE, generator=generator, dtype=torch.float64) * (i + 1), draw(n))
        for i, n in enumerate(sizes)
    ]


def build(cls, hparams=None, domains=3):
    "An algorithm in float64, and an equal one to compute with by hand."
    seed_everything(0)
    fast = cls(SHAPE, CLASSES, domains, SMALL | (hparams or {})).double()
    return fast, copy.deepcopy(fast)


def close(a, b, rtol=1e-7, atol=1e-9):
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=torch.float64),
        torch.as_tensor(b, dtype=torch.float64),
        rtol=rtol,
        atol=atol,
    )


def same_parameters(fast, slow):
    for (name, a), b in zip(fast.named_parameters(), slow.parameters()):
        torch.testing.assert_close(
            a, b, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


def follow(fast, slow, slow_loss, batches, restart_at=None):
    """Update `fast` on each of `batches`, and `slow` by Adam on `slow_loss(slow, minibatches, t)`:
    reported losses and parameters agree throughout."""
    parameters = [p for p in slow.parameters() if p.requires_grad]
    adam = Adam()
    for t, minibatches in enumerate(batches):
        if t == restart_at:
            adam = Adam()
        loss = slow_loss(slow, minibatches, t)
        close(fast.update(minibatches)["loss"], loss.detach())
        adam.step(parameters, torch.autograd.grad(loss, parameters, allow_unused=True))
        same_parameters(fast, slow)
