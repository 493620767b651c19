"""A run in progress: losses between checkpoints, batches that wait, what a checkpoint looks at."""

import math

import pytest
import torch

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.model import build_dataset
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import Sampler
from hmoe_repro.training.trainer import Batches, LossSums, Trainer


def trainer(**more):
    given = dict(network="small_cnn", steps=5, checkpoint_frequency=2) | more
    config = make_config("ERM", "DigitDomainsTiny", ["photo"], hparams={"batch_size": 4}, **given)
    return Trainer(config, build_dataset(config), torch.device("cpu"))


def test_losses_are_means_since_they_were_last_taken():
    losses = LossSums()
    losses.add({"loss": 1.0, "penalty": 8.0}, 0)
    losses.add({"loss": 2.0}, 1)
    assert losses.take() == {"loss": 1.5, "penalty": 8.0}
    assert losses.take() == {}
    for bad in (math.nan, math.inf):
        with pytest.raises(HmoeError, match="penalty became .* at update 7. Fix: a smaller lr"):
            losses.add({"loss": 1.0, "penalty": bad}, 7)


def test_a_batch_that_waits_is_drawn_again_after_a_resumption(monkeypatch):
    "With helpers one batch is asked for ahead; the state is that before it was drawn."
    data = build_dataset(trainer().config)
    monkeypatch.setattr(data, "workers", 1, raising=False)  # these data are other tests', too
    domains = ["plain", "sketch"]

    def batches():
        splits = [torch.arange(20), torch.arange(30)]
        return Batches(data, domains, Sampler(splits, 4, seed=0), "cpu")

    first, second = batches(), batches()
    for _ in range(3):
        first.next()
    second.load(first.state())
    for _ in range(3):
        for (x, y), (other_x, other_y) in zip(first.next(), second.next()):
            assert torch.equal(x, other_x)
            assert torch.equal(y, other_y)


def test_a_cap_keeps_that_many_validation_images_and_all_test_images():
    whole, capped = trainer(), trainer(evaluate="selection:3")
    for domain in whole.domains:
        kept = capped.splits[domain]["out"]
        assert kept.tolist() == whole.splits[domain]["out"].tolist()[:3]
    assert torch.equal(capped.splits["photo"]["in"], whole.splits["photo"]["in"])


def test_only_a_better_checkpoint_and_the_last_are_tested():
    run = trainer()
    run.update()
    assert run.evaluate() == ["default"]
    assert "photo" in run.checkpoints[0]["accuracies"]
    run.best = {"default": 2.0}  # nothing can be better
    run.update()
    assert run.evaluate() == []
    assert "photo" not in run.checkpoints[1]["accuracies"]
    while run.step < run.config.steps:
        run.update()
    assert run.evaluate() == []
    assert "photo" in run.checkpoints[2]["accuracies"]
    assert [point["step"] for point in run.checkpoints] == [0, 1, 4]
