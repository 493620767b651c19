"""Masks inside networks: places and what is refused, passes against passes written out by hand,
gradients against one image at a time, what is computed once, batch norm, copies, precisions."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.masks import mask_factors
from hmoe_repro.networks.masked import (
    NetworkMasks,
    choose_places,
    passes,
    place_names,
    sampled,
    width_of,
)
from hmoe_repro.networks.precision import set_precision
from hmoe_repro.networks.registry import NETWORKS, make_classifier, make_featurizer

SIDES = {"alexnet": 63, "resnet18": 32, "resnet50": 32, "image_cnn": 16, "small_cnn": 16}
WIDTHS = {  # protocol 5.1
    "alexnet": {"fc6": 9216, "fc7": 4096, "fc8": 4096},
    "resnet18": {"layer3": 128, "layer4": 256, "fc": 512},
    "resnet50": {"layer3": 512, "layer4": 1024, "fc": 2048},
    "image_cnn": {"conv3": 64, "conv4": 128, "fc": 256},
    "small_cnn": {"conv3": 32, "conv4": 32, "fc": 32},
}


class Masked(nn.Module):
    "A network with a classifier and masks of three domains."

    def __init__(self, name, places=(), nonlinear=False):
        super().__init__()
        torch.manual_seed(0)
        weights = "random" if name.startswith(("alex", "res")) else None
        self.featurizer = make_featurizer(name, (3, SIDES[name], SIDES[name]), weights)
        self.classifier = make_classifier(self.featurizer.num_features, 5, nonlinear)
        self.masks = NetworkMasks(name, self.featurizer, self.classifier, 3, places)
        self.x = torch.rand(4, 3, SIDES[name], SIDES[name])

    def forward(self, x):
        return self.classifier(self.featurizer(x))

    def stages(self):
        "What stands between the places, one function after another, written out."
        f = self.featurizer
        if hasattr(f, "convolutions"):
            first = [lambda x, c=c, n=n: n(c(x).relu()) for c, n in zip(f.convolutions, f.norms)]
            last = lambda x: first[3](x).mean((2, 3))
            return [lambda x: first[1](first[0](x)), first[2], last, self.classifier]
        b = f.body
        if hasattr(b, "layer4"):
            stem = lambda x: b.layer2(b.layer1(b.maxpool(b.bn1(b.conv1(x)).relu())))
            return [stem, b.layer3, lambda x: b.layer4(x).mean((2, 3)), self.classifier]
        below = lambda x: b.avgpool(b.features(x)).flatten(1)
        sixth, seventh = (lambda x, i=i: b.classifier[i](x).relu() for i in (1, 4))
        return [below, sixth, seventh, self.classifier]

    def by_hand(self, x, factor):
        "Logits with `factor` (B, N) multiplied onto what enters each place."
        below, *above = self.stages()
        x, parts = below(x), self.masks.by_place(factor).values()
        for stage, part in zip(above, parts, strict=True):
            x = stage(x * part.view(*part.shape, *[1] * (x.dim() - 2)))
        return x


# Places


@pytest.mark.parametrize("name", WIDTHS)
def test_places_and_widths_of_the_protocol(name):
    model = Masked(name)
    assert dict(zip(model.masks.places, model.masks.sizes)) == WIDTHS[name]
    total = sum(WIDTHS[name].values())
    assert model.masks.real.shape == (3, total)
    assert model.masks.columns.shape == (3, total)
    assert 0 <= float(model.masks.real.detach().min())
    assert float(model.masks.real.detach().max()) < 1
    assert [int(n) for n in model.masks.columns.sum(1)] == list(WIDTHS[name].values())
    assert torch.equal(model.masks.columns.sum(0), torch.ones(total))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "small_cnn", "mnist_cnn", "image_cnn"])
def test_the_papers_reading_is_one_place_less(name):
    assert choose_places(name, reading="paper") == choose_places(name)[1:]
    assert choose_places(name)[-1] == "fc"


def test_alexnet_has_three_in_both_readings_and_a_transformer_its_last_one():
    assert choose_places("alexnet") == choose_places("alexnet", reading="paper")
    assert choose_places("alexnet") == ("fc6", "fc7", "fc8")
    for name in NETWORKS:
        assert place_names(name)[-1] == ("fc8" if name == "alexnet" else "fc")
        if "vit" in name or "deit" in name:
            assert choose_places(name) == ("fc",)


def test_places_stand_in_the_order_of_the_network_whatever_the_order_of_their_names():
    assert choose_places("resnet18", ["fc", "layer1"]) == ("layer1", "fc")
    assert list(Masked("resnet18", ["fc", "layer1"]).masks.places) == ["layer1", "fc"]


@pytest.mark.parametrize(
    "network, places, reading, said",
    [
        ("small_cnn", ("layer3",), "released", "network small_cnn 'layer3'.* Valid: conv2, conv3"),
        ("alexnet", ("fc",), "released", "network alexnet 'fc'.* Valid: fc6, fc7, fc8"),
        ("resnet18", ("fc", "fc"), "released", "must be different, got fc, fc. Fix: name each"),
        ("resnet19", (), "paper", "unknown network 'resnet19'"),
        ("small_cnn", (3,), "released", "network small_cnn 3. Valid"),
    ],
)
def test_what_is_refused_is_refused_in_a_line(network, places, reading, said):
    with pytest.raises(HmoeError, match=said) as refused:
        choose_places(network, places, reading)
    assert "\n" not in str(refused.value)


# Passes


@pytest.mark.parametrize("name", WIDTHS)
def test_masks_multiply_what_enters_their_places_and_nothing_without_a_factor(name):
    model = Masked(name).eval()
    factor = torch.rand(4, sum(model.masks.sizes))
    with torch.no_grad():
        plain = model(model.x)
        with model.masks.applied(factor):
            masked = model(model.x)
        torch.testing.assert_close(masked, model.by_hand(model.x, factor), rtol=1e-4, atol=1e-5)
        ones = model.by_hand(model.x, torch.ones_like(factor))
        torch.testing.assert_close(plain, ones, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(model.x), plain)
        assert not torch.allclose(masked, plain)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "alexnet"])
def test_many_masks_in_one_pass_are_passes_of_their_own(name):
    model = Masked(name).eval()
    m = model.masks.probabilities().detach()
    rows = torch.cat([m, mask_factors(model.masks.real.detach(), "average")])
    with torch.no_grad():
        together = passes(model.masks, model, model.x, rows)
        for logits, row in zip(together, rows, strict=True):
            slow = model.by_hand(model.x, row.expand(4, -1))
            torch.testing.assert_close(logits, slow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nonlinear", [False, True])
def test_the_last_mask_is_on_the_classifiers_input(nonlinear):
    model = Masked("small_cnn", ["fc"], nonlinear).eval()
    assert width_of(model.classifier) == 32
    factor = torch.rand(4, 32)
    with model.masks.applied(factor):
        expected = model.classifier[0] if nonlinear else model.classifier
        seen = []
        hook = expected.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        model(model.x)
        hook.remove()
    torch.testing.assert_close(seen[0], model.featurizer(model.x) * factor)


def operations(model, run):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["small_cnn", "image_cnn", "resnet18", "alexnet"])
def test_what_lies_below_the_first_place_is_computed_once(name):
    model = Masked(name).eval()
    m = model.masks.probabilities().detach()
    below = operations(model, lambda: model.stages()[0](model.x))
    one = operations(model, lambda: model(model.x))
    four = torch.cat([m, m[:1]])
    counted = operations(model, lambda: passes(model.masks, model, model.x, four))
    assert below > 0
    assert counted == below + 4 * (one - below)


def test_an_error_in_a_pass_leaves_no_mask_behind():
    model = Masked("small_cnn").eval()
    plain = model(model.x)
    with pytest.raises(RuntimeError), model.masks.applied(torch.zeros(4, 96), repeats=1):
        model(torch.rand(3, 3, 16, 16))  # three images, four rows
    assert torch.equal(model(model.x), plain)


# Sampling


def test_samples_are_the_own_domains_tosses_with_the_straight_through_gradient():
    real = torch.rand(3, 50, requires_grad=True)
    domain = torch.tensor([0, 2, 1, 2, 2])
    m = real.sigmoid()
    kept = sampled(m, domain)
    assert set(kept.detach().round().unique().tolist()) == {0, 1}
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-6)
    upstream = torch.randn(5, 50)
    (got,) = torch.autograd.grad((kept * upstream).sum(), real)
    expected = torch.zeros(3, 50)
    with torch.no_grad():
        for row, d in zip(upstream, domain.tolist()):  # image by image, through the sigmoid
            expected[d] += row * m[d] * (1 - m[d])
    torch.testing.assert_close(got, expected)


def test_each_image_has_tosses_of_its_own_with_the_right_frequency():
    m = torch.tensor([[0.1, 0.5, 0.9, 0.0, 1.0], [0.3, 0.2, 0.6, 1.0, 0.0]])
    torch.manual_seed(0)
    kept = sampled(m, torch.arange(2).repeat_interleave(20_000))
    frequency = kept.view(2, 20_000, 5).mean(1)
    torch.testing.assert_close(frequency, m, rtol=0, atol=0.015)
    assert frequency[0, 3] == 0
    assert frequency[0, 4] == 1
    assert len({tuple(row.tolist()) for row in kept[:200].round().int()}) > 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small_cnn", "image_cnn", "alexnet"])
def test_gradients_of_a_batch_are_those_of_its_images_one_by_one(name):
    model = Masked(name).eval()
    domain, y = torch.tensor([2, 0, 1, 2]), torch.tensor([0, 4, 1, 2])
    torch.manual_seed(7)
    factor = sampled(model.masks.probabilities(), domain)
    hard = factor.detach().round()
    with model.masks.applied(factor):
        loss = nn.functional.cross_entropy(model(model.x), y)
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total, of_masks = 0, torch.zeros_like(model.masks.real)
    for i, d in enumerate(domain.tolist()):
        own = hard[i : i + 1].clone().requires_grad_()
        one = nn.functional.cross_entropy(model.by_hand(model.x[i : i + 1], own), y[i : i + 1]) / 4
        one.backward()
        m = model.masks.real[d].sigmoid().detach()
        of_masks[d] += own.grad[0] * m * (1 - m)
        total += one.item()
    assert loss.item() == pytest.approx(total, rel=1e-4)
    torch.testing.assert_close(got.pop("masks.real"), of_masks, rtol=1e-3, atol=1e-6)
    for parameter, gradient in got.items():
        slow = model.get_parameter(parameter).grad
        torch.testing.assert_close(gradient, slow, rtol=1e-3, atol=1e-5, msg=parameter)


def test_the_mean_of_sampled_passes_of_a_linear_layer_is_the_scaled_pass():
    model = Masked("small_cnn", ["fc"]).eval()
    m = model.masks.probabilities().detach()
    domain = torch.ones(8000, dtype=torch.long)
    with torch.no_grad():
        z = model.featurizer(model.x[:1])
        with model.masks.applied(sampled(m, domain)):
            mean = model.classifier(z.expand(8000, -1)).mean(0)
        (scaled,) = passes(model.masks, model, model.x[:1], m[1:2])[0]
    spread = ((z * model.classifier.weight).square() * m[1] * (1 - m[1])).sum(1).sqrt()
    assert ((mean - scaled).abs() < 5 * spread / 8000**0.5 + 1e-6).all()


# Batch norm, copies, precisions


def test_batch_norm_sees_the_masked_maps_of_the_whole_batch():
    """In training the statistics of the stage behind a mask are those of all images together, after
    the mask."""
    model = Masked("resnet18").train()
    factor = sampled(model.masks.probabilities(), torch.tensor([0, 1, 2, 2])).detach()
    norm = model.featurizer.body.layer4[0].bn1
    seen = []
    hook = norm.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    before = norm.running_mean.clone()
    with model.masks.applied(factor):
        model(model.x)
    hook.remove()
    moved = 0.9 * before + 0.1 * seen[0].mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, moved)


def test_a_copy_has_masks_of_its_own():
    model = Masked("small_cnn").eval()
    other = copy.deepcopy(model)
    zeros = torch.zeros(4, 96)
    with torch.no_grad():
        plain = model(model.x)
        with other.masks.applied(zeros):
            assert torch.equal(model(model.x), plain)
            empty = other(model.x)
        assert torch.allclose(empty, other.classifier.bias.expand(4, -1))
        with model.masks.applied(zeros):
            assert torch.equal(other(model.x), plain)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18"])
def test_masks_work_in_bf16(name):
    model = Masked(name).eval()
    m = model.masks.probabilities().detach()
    with torch.no_grad():
        exact = passes(model.masks, model, model.x, m)
        set_precision(model, "bf16")
        rough = passes(model.masks, model, model.x, m)
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    assert (exact - rough).abs().max() < 0.1 * exact.abs().max()


def test_memory_stays_in_the_networks_layout():
    model = Masked("image_cnn").eval()
    seen = []
    hook = model.featurizer.convolutions[2].register_forward_hook(
        lambda module, given, output: seen.append(given[0])
    )
    passes(model.masks, model, model.x, model.masks.probabilities())
    hook.remove()
    assert seen[0].shape[0] == 12
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
