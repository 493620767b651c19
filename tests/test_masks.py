"""Masks of domains against loops, definitions and bounds."""

import itertools

import pytest
import torch

from hmoe_repro.algorithms.dmg import overlaps
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.masks import (
    MASK_MODES,
    hard_iou,
    initial_masks,
    mask_factors,
    mask_sum,
    neuron_users,
    straight_through_bernoulli,
)


def test_a_toss_is_zero_or_one_and_its_gradient_that_of_the_probability():
    m = torch.rand(2000, requires_grad=True)
    sample = straight_through_bernoulli(m)
    assert set(sample.round().tolist()) == {0.0, 1.0}
    assert torch.allclose(sample, sample.round(), atol=1e-6)
    weight = torch.randn(2000)
    (sample * weight).sum().backward()
    assert torch.equal(m.grad, weight)
    many = torch.stack([straight_through_bernoulli(torch.full((100,), 0.3)) for _ in range(400)])
    assert abs(many.mean() - 0.3) < 0.02


def test_hard_overlap_and_users_count_neurons():
    m = torch.tensor([[0.9, 0.9, 0.1, 0.5], [0.9, 0.1, 0.1, 0.6], [0.1, 0.1, 0.2, 0.4]])
    assert hard_iou(m) == {(0, 1): 1 / 3, (0, 2): 0.0, (1, 2): 0.0}
    assert neuron_users(m) == [1, 2, 1, 0]
    m[2, 0] = 0.6
    assert neuron_users(m) == [1, 2, 0, 1]
    assert hard_iou(torch.zeros(2, 3)) == {(0, 1): 1.0}
    assert mask_sum(m).item() == pytest.approx(m.sum().item())


def test_masks_begin_between_a_half_and_three_quarters():
    m = initial_masks(5, 400).sigmoid()
    assert m.shape == (5, 400)
    assert 0.5 <= m.min()
    assert m.max() < 0.7311


def test_every_mode_is_what_the_table_says():
    real, which = torch.randn(3, 7), torch.tensor([2, 0, 2, 1])
    m = real.sigmoid()
    assert torch.equal(mask_factors(real, "softscale", which), m[which])
    assert torch.equal(mask_factors(real, "greedy", which), (m[which] > 0.5).float())
    assert torch.equal(mask_factors(real, "average"), m.mean(0, keepdim=True))
    sample = mask_factors(real, "sample", which)
    assert sample.shape == (4, 7)
    assert torch.allclose(sample, sample.round(), atol=1e-6)


@pytest.mark.parametrize("mode", [mode for mode in MASK_MODES if mode != "average"])
def test_a_mask_needs_a_domain_that_was_trained_on(mode):
    real = torch.randn(3, 7)
    with pytest.raises(HmoeError, match="no domain was given"):
        mask_factors(real, mode)
    for domain in (3, -1):
        with pytest.raises(HmoeError, match="domains 0 to 2"):
            mask_factors(real, mode, torch.tensor([0, domain]))
    with pytest.raises(HmoeError, match="sample, greedy, softscale, average"):
        mask_factors(real, "soft", torch.tensor([0]))


def test_the_straight_through_gradient_is_its_definition_image_by_image():
    real, z = initial_masks(3, 4).requires_grad_(), torch.randn(6, 4, requires_grad=True)
    which, slopes = torch.tensor([0, 2, 2, 1, 0, 2]), torch.randn(6, 4)
    torch.manual_seed(3)
    y = mask_factors(real, "sample", which) * z
    (y.square() * slopes).sum().backward()
    b, m = (y / z).detach().round(), real.detach().sigmoid()
    assert set(b.flatten().tolist()) == {0.0, 1.0}
    expected = torch.zeros(3, 4)
    for i, k in itertools.product(range(6), range(4)):
        upstream = 2 * b[i, k] * z[i, k].detach() * slopes[i, k]  # dL / d(b z)
        d = which[i]
        expected[d, k] += upstream * z[i, k].detach() * m[d, k] * (1 - m[d, k])
        torch.testing.assert_close(z.grad[i, k], upstream * b[i, k])
    torch.testing.assert_close(real.grad, expected)


def test_a_dropped_neuron_still_teaches_its_mask():
    m = torch.zeros(5, requires_grad=True)  # never kept
    (straight_through_bernoulli(m) * torch.arange(5.0)).sum().backward()
    assert m.grad.tolist() == [0, 1, 2, 3, 4]


def test_the_mean_of_sampled_passes_is_the_scaled_pass_of_a_linear_layer():
    torch.manual_seed(0)
    real, after = initial_masks(2, 30), torch.nn.Linear(30, 5)
    x, which, passes = torch.randn(3, 30), torch.tensor([0, 1, 1]), 5000
    with torch.no_grad():
        tosses = [mask_factors(real, "sample", which) for _ in range(passes)]
        sampled = torch.stack([after(toss * x) for toss in tosses])
        scaled = after(mask_factors(real, "softscale", which) * x)
    error = sampled.std(0) / passes**0.5
    assert ((sampled.mean(0) - scaled).abs() < 4.5 * error).all()
    assert error.max() < 0.02


@pytest.mark.parametrize("power", [0.01, 0.3, 1.0, 5.0, 60.0])
def test_soft_overlap_lies_between_nothing_and_everything(power):
    one_place = torch.ones(1, 17)
    for pair in torch.rand(200, 2, 17) ** power:
        assert 0 < overlaps(pair, one_place)[0] <= 1
        sure = (pair > 0.5).float()
        hard = hard_iou(sure)[0, 1]
        if sure.sum():
            assert overlaps(sure, one_place)[0].item() == pytest.approx(hard, abs=1e-5)


def test_masks_that_keep_nothing_are_alike():
    assert overlaps(torch.zeros(3, 5), torch.ones(1, 5))[0].item() == pytest.approx(1)
