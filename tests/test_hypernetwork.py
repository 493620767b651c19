"""Generated classifiers: counts, layout, initialisation, and the three ways to apply them
(HMOE, section 3.3)."""

import math

import pytest
import torch
import torch.nn.functional as F

from hmoe_repro.method.hypernetwork import HyperNetwork, group_by_expert, layer_slices


def count(module):
    return sum(p.numel() for p in module.parameters())


def brute_force(theta, z, sizes):
    """f_c(z; theta) for one sample z (F,) and one weight vector theta (P,),
    number by number through the layout."""
    start, a = 0, z
    for i, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:])):
        W = theta[start : start + fan_in * fan_out].reshape(fan_out, fan_in)
        b = theta[start + fan_in * fan_out : start + (fan_in + 1) * fan_out]
        a = W @ (F.silu(a) if i else a) + b
        start += (fan_in + 1) * fan_out
    assert start == len(theta)
    return a


@pytest.mark.parametrize(
    "features, classes, total", [(2048, 7, 524_999), (2048, 65, 4_446_785), (128, 10, 94_250)]
)
def test_parameter_counts(features, classes, total):
    assert (
        count(HyperNetwork(32, (features, classes)))
        == total
        == 51_680 + 33 * (features + 1) * classes
    )


def test_parameter_count_of_the_toy():
    assert count(HyperNetwork(8, (32, 32, 1), (32, 32, 32))) == 38_337


@pytest.fixture(
    params=[(6, 4), (6, 5, 3), (6, 5, 4, 2)], ids=["linear", "two layers", "three layers"]
)
def case(request):
    torch.manual_seed(1)
    hyper = HyperNetwork(8, request.param, (16, 12)).double()
    torch.nn.init.normal_(hyper.head.bias, std=0.3)  # zero at initialisation, not after training
    z, e, v = (torch.randn(n, d, dtype=torch.double) for n, d in ((23, 6), (4, 8), (23, 8)))
    return request.param, hyper, z, e, v


def test_all_experts_at_once(case):
    sizes, hyper, z, e, _ = case
    expected = torch.stack(
        [torch.stack([brute_force(theta, row, sizes) for theta in hyper(e)]) for row in z]
    )
    assert torch.allclose(hyper.expert_outputs(z, e), expected)


@pytest.mark.parametrize("pattern", ["mixed", "one expert", "an expert is missing"])
def test_one_chosen_expert_per_sample(case, pattern):
    sizes, hyper, z, e, _ = case
    index = {
        "mixed": torch.arange(23) * 7 % 4,
        "one expert": torch.full((23,), 2),
        "an expert is missing": torch.arange(23) % 2 * 3,
    }[pattern]
    expected = torch.stack([brute_force(hyper(e)[k], row, sizes) for k, row in zip(index, z)])
    assert torch.allclose(hyper.selected_outputs(z, e, index), expected)


def test_own_classifier_per_sample(case):
    sizes, hyper, z, _, v = case
    expected = torch.stack([brute_force(hyper(code), row, sizes) for code, row in zip(v, z)])
    assert torch.allclose(hyper.outputs_from_codes(z, v), expected)


def largest_tensor(function):
    "Elements of the largest floating tensor that any operation inside `function` returns."
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point() and not func.is_view:
                Watch.size = max(Watch.size, out.numel())
            return out

    with torch.no_grad(), Watch():
        function()
    return Watch.size


def test_ood_builds_no_classifier_per_sample():
    hyper, z, v = HyperNetwork(8, (512, 20), (16, 8)), torch.randn(64, 512), torch.randn(64, 8)
    assert (
        largest_tensor(lambda: hyper.outputs_from_codes(z, v)) <= 64 * 512
    )  # (B, P) would be 64 * 10,260


def test_max_copies_no_weights_per_sample():
    hyper, z, e = HyperNetwork(8, (512, 20), (16, 8)), torch.randn(64, 512), torch.randn(3, 8)
    index = torch.arange(64) % 3
    assert (
        largest_tensor(lambda: hyper.selected_outputs(z, e, index)) <= 3 * 22 * 512
    )  # (B, C, F) would be 64 * 20 * 512


def test_groups_hold_every_sample_once_and_zeros():
    z, index = torch.rand(10, 2) + 1, torch.tensor([1, 1, 0, 3, 3, 3, 1, 0, 3, 3])
    groups, place = group_by_expert(z, index, 4)
    assert groups.shape == (4, 5, 2)
    assert torch.equal(groups[index, place], z)
    assert (groups != 0).all(-1).sum(1).tolist() == [2, 3, 0, 5]


@pytest.mark.parametrize("features", [64, 256])
def test_generated_weights_have_the_promised_variance(features):
    weights, biases = [], []
    for seed in range(120):
        torch.manual_seed(seed)
        e, hyper = torch.randn(3, 32), HyperNetwork(32, (features, 4), (64, 32))
        hyper.init_hyperfan(e)
        with torch.no_grad():
            theta = hyper(e)
        weights.append(theta[:, : 4 * features].square().mean())
        biases.append(theta[:, 4 * features :].square().mean())
    assert torch.stack(weights).mean().item() == pytest.approx(1 / (2 * features), rel=0.15)
    assert torch.stack(biases).mean().item() == pytest.approx(1 / 2, rel=0.15)


def test_first_layer_of_an_mlp_classifier_counts_as_activated():
    variances = []
    for seed in range(120):
        torch.manual_seed(seed)
        e, hyper = torch.randn(3, 8), HyperNetwork(8, (32, 32, 1), (32, 32, 32))
        hyper.init_hyperfan(e)
        variances.append(
            [
                hyper(e)[:, rows].detach().square().mean()
                for layer in hyper.slices
                for rows in (layer.weights, layer.biases)
            ]
        )
    W1, b1, W2, b2 = torch.tensor(variances).mean(0).tolist()
    assert (W1, W2) == pytest.approx((1 / 32, 1 / 64), rel=0.15)
    assert (b1, b2) == pytest.approx((1, 1 / 2), rel=0.25)


def test_hidden_layers_keep_the_second_moment():
    torch.manual_seed(0)
    moments = [
        HyperNetwork(32, (16, 2)).body(torch.randn(500, 32)).square().mean().item()
        for _ in range(20)
    ]
    assert math.isclose(sum(moments) / 20, 1.02, rel_tol=0.15)


def test_the_measured_moment_is_returned_and_used():
    torch.manual_seed(0)
    hyper, e = HyperNetwork(8, (32, 3), (16, 8)), torch.randn(5, 8)
    V = hyper.init_hyperfan(e)
    assert V == pytest.approx(hyper.body(e).square().mean().item())
    assert hyper.head.weight[: 32 * 3].abs().max().item() <= math.sqrt(3 / (2 * 32 * 8 * V)) + 1e-6
    assert not hyper.head.bias.any()


def test_layer_slices_cover_everything_in_order():
    flat = [
        i
        for layer in layer_slices((5, 4, 3))
        for rows in (layer.weights, layer.biases)
        for i in range(rows.start, rows.stop)
    ]
    assert flat == list(range(5 * 4 + 4 + 4 * 3 + 3))
