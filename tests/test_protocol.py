"""Splits, batches, checkpoints and accuracy against DomainBed's definitions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything, seed_hash
from hmoe_repro.data.base import MultiDomainDataset, as_input
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.training.protocols import (
    DomainBedProtocol,
    Sampler,
    make_batch,
    make_splits,
    mode_accuracies,
    run_seed,
    select_training_domains,
    split_indices,
    validation_seeds,
)


def test_split_vector_and_the_list_version_agree():
    inside, outside = split_indices(10, 0, 0)
    assert [*outside, *inside] == [2, 3, 8, 1, 4, 5, 0, 9, 6, 7]
    keys = list(range(1671))
    np.random.RandomState(seed_hash(2, 1)).shuffle(keys)
    inside, outside = split_indices(1671, 2, 1)
    assert outside.tolist() == keys[:334]
    assert inside.tolist() == keys[334:]


def test_splits_are_disjoint_and_follow_the_seed():
    data = load_dataset("DigitDomains")
    a, b = make_splits(data, 0), make_splits(data, 1)
    for i, domain in enumerate(data.domain_names):
        n = len(data.labels[i])
        assert sorted(torch.cat([a[domain]["in"], a[domain]["out"]]).tolist()) == list(range(n))
        assert len(a[domain]["out"]) == n // 5
        assert a[domain]["out"].tolist() != b[domain]["out"].tolist()


def test_run_seed_is_domainbeds():
    assert run_seed("PACS", "ERM", [0], 0, restart=0) == run_seed("PACS", "ERM", [0], 0)
    assert run_seed("PACS", "ERM", [0], 0, restart=1) != run_seed("PACS", "ERM", [0], 0, restart=2)
    assert run_seed("PACS", "ERM", [0], 0) == 94828300 != run_seed("PACS", "ERM", [1], 0)


def test_a_split_smaller_than_the_batch_works():
    sampler = Sampler([torch.tensor([7]), torch.tensor([1, 2])], 64, seed=0)
    assert [d.tolist() for d in sampler.draw()][0] == [7] * 64
    assert {len(d) for d in sampler.draw()} == {64}


def test_sampler_draws_uniformly_with_replacement_and_resumes():
    sampler = Sampler([torch.arange(10) + 100], 1000, seed=1)
    counts = np.bincount(sampler.draw()[0] - 100, minlength=10)
    assert abs(counts - 100).max() < 50
    state = sampler.generator.get_state()
    first = sampler.draw()[0]
    other = Sampler([torch.arange(10) + 100], 1000, seed=2)
    other.generator.set_state(state)
    assert torch.equal(first, other.draw()[0])


def test_pooled_sampler_draws_from_the_union():
    """Each image of the union is as likely as any other; indices stay in their own domain."""
    splits = [torch.arange(5), torch.arange(50, 90), torch.tensor([3])]
    sampler, counts = Sampler(splits, 100, seed=0, pooled=True), np.zeros(46)
    for _ in range(300):
        drawn = sampler.draw()
        assert sum(map(len, drawn)) == 300
        assert all(set(d.tolist()) <= set(s.tolist()) for d, s in zip(drawn, splits))
        counts += np.concatenate(
            [
                np.bincount(drawn[0], minlength=5),
                np.bincount(drawn[1] - 50, minlength=40),
                [len(drawn[2])],
            ]
        )
    expected = counts.sum() / 46
    assert (abs(counts - expected) < 6 * np.sqrt(expected)).all()


def test_a_domain_that_was_not_drawn_keeps_its_place():
    """Otherwise the labels of HMOE-DL would shift by one."""
    from hmoe_repro.algorithms import get_algorithm

    data = load_dataset("DigitDomainsTiny")
    batches = make_batch(
        data, ["photo", "plain"], [torch.tensor([], dtype=torch.int64), torch.tensor([4, 4])]
    )
    assert len(batches) == 2
    assert len(batches[0][0]) == 0
    assert torch.equal(batches[1][0][0], as_input(data.images[2][4:5])[0])
    assert batches[1][1].tolist() == [int(data.labels[2][4])] * 2
    seed_everything(0)
    hmoe = get_algorithm("HMOE-DL")(data.input_shape, 10, 2, {"network": "small_cnn"})
    expected = -torch.log_softmax(hmoe.model.route(batches[1][0])[2], 1)[:, 1].mean()
    torch.testing.assert_close(hmoe.loss(batches)["L_d"], expected)


def test_checkpoints_of_the_papers_schedule():
    def points(steps, frequency):
        run = SimpleNamespace(steps=steps, checkpoint_frequency=frequency)
        return [step for step in range(steps) if DomainBedProtocol(run).is_checkpoint(step)]

    steps = points(5001, 300)
    assert steps[:2] == [0, 300]
    assert steps[-2:] == [4800, 5000]
    assert len(steps) == 18
    assert len(points(5001, 100)) == 51
    assert points(1, 300) == [0]


def test_accuracy_against_counting():
    class Fixed(torch.nn.Module):
        modes = ("a", "b")

        def predict_modes(self, x):
            assert not self.training
            score = x.flatten(1)[:, :10]
            return {"a": score, "b": -score}

    data = load_dataset("DigitDomains")
    chosen = torch.arange(0, 440, 1)
    model = Fixed().train()
    got = mode_accuracies(model, data, "photo", chosen)
    rows = data.images[1][chosen].flatten(1)[:, :10].float()
    for mode, sign in (("a", 1), ("b", -1)):
        hits = sum(int((sign * rows[i]).argmax()) == int(data.labels[1][i]) for i in range(440))
        assert got[mode] == hits / 440
    assert model.training


def test_policies():
    run = SimpleNamespace(test_domains=["b"], evaluate="selection")
    splits = {"a": {"in": [], "out": []}, "b": {"in": [], "out": []}}
    assert DomainBedProtocol(run).parts(splits, False, True) == [("b", "in")]
    run.evaluate = "all"
    assert DomainBedProtocol(run).parts(splits, False, False) == [
        ("a", "in"),
        ("b", "in"),
        ("b", "out"),
    ]

    final = SimpleNamespace(test_domains=[], evaluate="selection")
    splits["a"]["test"] = []
    assert DomainBedProtocol(final).parts(splits, True, False) == [("a", "test")]
    assert DomainBedProtocol(final).parts(splits, False, False) == []


def test_bad_requests():
    data = load_dataset("DigitDomainsTiny")
    for wrong, message in [
        (["photo", "photo"], "different"),
        (["foto"], "negative, photo"),
        (list(data.domain_names), "leave a training domain"),
    ]:
        with pytest.raises(HmoeError, match=message):
            select_training_domains(data, wrong)
    assert select_training_domains(data, []) == list(data.domain_names)  # the final model
    tiny = MultiDomainDataset(
        "t",
        ["a"],
        ["n"],
        [torch.zeros(4, 1, 2, 2, dtype=torch.uint8)],
        [torch.zeros(4, dtype=torch.int64)],
    )
    with pytest.raises(HmoeError, match="too few"):
        make_splits(tiny, 0)


def test_seeds_of_validation_images_follow_the_checkpoint_alone():
    at_300, at_600 = validation_seeds(5, 0, 1, 300), validation_seeds(5, 0, 1, 600)
    assert torch.equal(at_300, validation_seeds(7, 0, 1, 300)[:5])
    assert not torch.equal(at_300, at_600)
