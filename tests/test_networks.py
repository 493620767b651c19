"""Parameter counts of the papers, shapes, independence of the images in a batch,
and what a precision may change: nothing in float32, little in bf16."""

import copy
import os
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hmoe_repro.networks.precision as precision
from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import random_batches, small_network
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.method.sparse_moe import SparseMoE
from hmoe_repro.networks.backbones import LARGE
from hmoe_repro.networks.encoders import ImageD2V, SmallD2V
from hmoe_repro.networks.precision import (
    PRECISIONS,
    Backbone,
    Bf16GroupNorm,
    GroupNorm,
    set_precision,
)
from hmoe_repro.networks.registry import (
    ENCODERS,
    NETWORKS,
    make_classifier,
    make_encoder,
    make_featurizer,
)
from hmoe_repro.networks.small import ConvNet, pool

SMALL = {"mnist_cnn", "small_cnn", "image_cnn"}


def count(module):
    return sum(p.numel() for p in module.parameters())


def channels_last(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)


def test_paper_counts():
    assert count(ImageD2V(3, 32)) == 3_095_904
    convolutions = 640 + 73_856 + 147_584 + 147_584  # 1-64-128-128-128, 3x3, with bias
    assert count(ConvNet(1, 64)) == convolutions + 2 * (64 + 3 * 128)
    assert count(SmallD2V(1, 32)) == 320 + 9_248 + 1_056
    assert count(make_classifier(2048, 7)) == 2049 * 7


def test_image_encoder_keeps_28_positions_at_224():
    assert ImageD2V(3, 8).layers(torch.rand(1, 3, 224, 224)).shape == (1, 8, 28, 28)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_featurizer("small_cnn", (3, 16, 16)),
        lambda: make_encoder("small", (3, 16, 16), stride=2),
        lambda: make_encoder("image", (3, 16, 16)),
    ],
)
def test_images_of_a_batch_do_not_mix(make):
    torch.manual_seed(0)
    net, x = make(), torch.rand(6, 3, 16, 16)
    torch.testing.assert_close(net(x)[2:3], net(x[2:3]), rtol=1e-4, atol=1e-5)


def test_order_is_convolution_relu_norm():
    """Group norm last:
    every group of an image's last feature map has mean 0 before the average over positions."""
    torch.manual_seed(0)
    net, caught = ConvNet(3, 16), []
    net.norms[-1].register_forward_hook(lambda module, given, out: caught.append((given[0], out)))
    net(torch.rand(2, 3, 16, 16))
    given, out = caught[0]
    assert given.min() == 0
    assert out.min() < 0
    assert out.reshape(2, 8, -1).mean(-1).abs().max() < 1e-5


def test_unknown_names_and_small_images_are_refused():
    with pytest.raises(HmoeError, match="mnist_cnn, small_cnn"):
        make_featurizer("cnn", (3, 16, 16))
    with pytest.raises(HmoeError, match="small, image"):
        make_encoder("big", (3, 16, 16))
    with pytest.raises(HmoeError, match="16 pixels"):
        make_encoder("image", (3, 8, 8))
    assert SMALL < set(NETWORKS)
    assert set(ENCODERS) == {"small", "image", "style", "mlp"}
    assert not any(NETWORKS[name].HPARAMS for name in SMALL)


def plain_image_d2v(net, x, norm, block):
    """The encoder's formula with PyTorch's own functions,
    the residual block in the order asked for."""
    w = net.state_dict()
    conv = lambda y, name, **options: F.conv2d(y, w[f"{name}.weight"], w[f"{name}.bias"], **options)
    normed = lambda y, name: (
        F.instance_norm(y, weight=w[f"{name}.weight"], bias=w[f"{name}.bias"])
        if norm == "instance"
        else y
    )
    for i in (0, 3, 6):
        x = torch.relu(normed(conv(x, f"layers.{i}", stride=2, padding=1), f"layers.{i + 1}"))
    for i in (9, 10):
        conv1, conv2 = (
            partial(conv, name=f"layers.{i}.convolutions.{j}", padding=1) for j in (0, 1)
        )
        norm1, norm2 = (partial(normed, name=f"layers.{i}.norms.{j}") for j in (0, 1))
        if block == "pre":
            x = x + conv2(torch.relu(norm2(conv1(torch.relu(norm1(x))))))
        else:
            x = x + norm2(conv2(torch.relu(norm1(conv1(x)))))
            if block == "post":
                x = torch.relu(x)
    return conv(x, "layers.11", padding=1).mean((2, 3))


@pytest.mark.parametrize("norm", ["instance", "none"])
@pytest.mark.parametrize("block", ["post", "pre", "stargan"])
def test_the_image_encoder_in_every_order(norm, block):
    torch.manual_seed(0)
    net, x = (
        make_encoder("image", (3, 32, 24), 8, norm=norm, block=block),
        torch.randn(2, 3, 32, 24),
    )
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))  # norms that scale and shift
        torch.testing.assert_close(
            net(x), plain_image_d2v(net, x, norm, block), rtol=1e-4, atol=1e-4
        )


def test_options_of_the_image_encoder_keep_its_weights():
    names = list(ImageD2V().state_dict())
    assert len(names) == 2 * (3 + 3 + 4 + 4 + 1)
    assert "layers.9.norms.1.bias" in names
    assert "layers.11.weight" in names
    for block in ("post", "pre", "stargan"):
        assert count(ImageD2V(block=block)) == 3_095_904
        assert list(ImageD2V(block=block).state_dict()) == names
        assert count(ImageD2V(norm="none", block=block)) == 3_095_904 - 2 * (
            64 + 128 + 256 + 4 * 256
        )


def test_instance_norm_in_the_small_encoder():
    torch.manual_seed(0)
    net, x = make_encoder("small", (3, 16, 16), norm="instance"), torch.rand(4, 3, 16, 16)
    found = net(x)
    for convolution, norm in zip(net.convolutions, net.norms):
        x = torch.relu(F.instance_norm(convolution(x), weight=norm.weight, bias=norm.bias))
    torch.testing.assert_close(found, net.output(x.mean((2, 3))), rtol=1e-4, atol=1e-5)
    assert count(net) == count(SmallD2V(3)) + 4 * 32
    assert list(make_encoder("small", (3, 16, 16), norm="none").state_dict()) == list(
        SmallD2V(3).state_dict()
    )


def test_options_that_an_encoder_does_not_have_are_refused():
    with pytest.raises(HmoeError, match="norm of a D2V encoder 'batch'. Valid: instance, none"):
        make_encoder("image", (3, 16, 16), norm="batch")
    with pytest.raises(HmoeError, match="residual block 'last'. Valid: post, pre, stargan"):
        make_encoder("image", (3, 16, 16), block="last")


def test_the_network_for_small_photographs_is_cheap():
    net, work = make_featurizer("image_cnn", (3, 64, 64)), []
    for convolution in net.convolutions:
        convolution.register_forward_hook(
            lambda m, given, out: work.append(out[0].numel() * m.weight[0].numel())
        )
    for side in (32, 64, 50):
        assert net(torch.rand(2, 3, side, side)).shape == (2, 256) == (2, net.num_features)
    x = torch.randn(3, 3, 48, 48)
    torch.testing.assert_close(net(x), plain_convnet(net, x), rtol=1e-4, atol=1e-5)
    assert 2 * sum(work[4:8]) < 1e8
    assert [m.stride for m in net.convolutions] == [(2, 2)] * 4


def test_small_networks_refuse_what_only_large_ones_have():
    for name in SMALL:
        nets = [make_featurizer(name, (3, 16, 16), weights) for weights in ("random", None)]
        assert nets[0].num_features == nets[1].num_features
        with pytest.raises(
            HmoeError,
            match=f"no weights 'IMAGENET1K_V1' for the network '{name}'.*Fix: use weights random",
        ):
            make_featurizer(name, (3, 16, 16), "IMAGENET1K_V1")
        with pytest.raises(HmoeError, match=f"resnet_dropout exists only .* here it is {name}"):
            ERM((3, 16, 16), 2, 2, {"network": name, "resnet_dropout": 0.1})


# Precision


def plain_convnet(net, x):
    """The network's formula with PyTorch's own functions, nothing in place."""
    for convolution, norm in zip(net.convolutions, net.norms):
        x = F.group_norm(
            torch.relu(F.conv2d(x, convolution.weight, convolution.bias, convolution.stride, 1)),
            8,
            norm.weight,
            norm.bias,
            norm.eps,
        )
    return x.mean((2, 3))


def plain_small_d2v(net, x):
    for convolution in net.convolutions:
        x = torch.relu(F.conv2d(x, convolution.weight, convolution.bias, convolution.stride, 1))
    return F.linear(x.mean((2, 3)), net.output.weight, net.output.bias)


@pytest.mark.parametrize(
    "make, plain",
    [
        (lambda: make_featurizer("mnist_cnn", (1, 28, 28)), plain_convnet),
        (lambda: make_featurizer("small_cnn", (3, 16, 16)), plain_convnet),
        (lambda: make_encoder("small", (3, 16, 16)), plain_small_d2v),
        (lambda: make_encoder("small", (1, 28, 28), stride=2), plain_small_d2v),
    ],
)
@pytest.mark.parametrize("asked", [None, "float32"])
def test_float32_is_the_plain_network_to_the_bit(make, plain, asked):
    torch.manual_seed(0)
    net = make()
    channels = net.convolutions[0].in_channels
    if asked:
        set_precision(net, asked)
    side = 28 if channels == 1 else 16
    x = channels_last(9, channels, side, side, dtype=torch.float32)
    found = []
    for f in (net, lambda x: plain(net, x)):
        given = x.clone().requires_grad_()
        out = f(given)
        (out**3).sum().backward()
        found.append([out.detach(), given.grad, *(p.grad for p in net.parameters())])
        net.zero_grad(set_to_none=True)
    assert len(found[0]) > 5
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_pool_is_the_mean_to_the_bit_in_every_layout(dtype, layout):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(4, 24, 14, 14).to(dtype).contiguous(memory_format=layout),
        torch.randn(4, 24).to(dtype),
    )
    (given, twin) = (x.clone().requires_grad_() for _ in range(2))
    ours, plain = pool(given), twin.mean((2, 3))
    (ours * weight).sum().backward()
    (plain * weight).sum().backward()
    assert torch.equal(ours, plain)
    assert torch.equal(given.grad, twin.grad)


def test_names_of_the_weights_are_those_of_the_first_version():
    layers = [
        f"{part}.{i}.{name}"
        for part in ("convolutions", "norms")
        for i in range(4)
        for name in ("weight", "bias")
    ]
    assert list(ConvNet(1).state_dict()) == layers
    assert list(SmallD2V(1).state_dict()) == [*layers[:4], "output.weight", "output.bias"]
    assert [n for n in ImageD2V().state_dict() if n.startswith("layers.0")] == [
        "layers.0.weight",
        "layers.0.bias",
    ]


@pytest.mark.parametrize("name", ["ERM", "HMOE-DN"])
def test_a_precision_reaches_every_backbone_and_nothing_else(name):
    torch.manual_seed(0)
    algorithm = get_algorithm(name)((1, 16, 16), 4, 2, {"network": "small_cnn"})
    seen = []
    for module in algorithm.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(
                lambda module, given, out: seen.append((type(module).__name__, out.dtype))
            )
    set_precision(algorithm, "bf16")
    batches = [(torch.rand(4, 1, 16, 16), torch.randint(4, (4,))) for _ in range(2)]
    before = [p.detach().clone() for p in algorithm.parameters()]
    losses = algorithm.update(batches)
    convolutions = [dtype for kind, dtype in seen if kind == "Conv2d"]
    assert set(convolutions) == {torch.bfloat16}
    assert len(convolutions) == (4 if name == "ERM" else 6)
    backbones = 0 if name == "ERM" else 1  # the encoder's last layer is part of the backbone
    assert [dtype for kind, dtype in seen if kind == "Linear"].count(torch.bfloat16) == backbones
    assert all(
        p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in algorithm.parameters()
    )
    assert all(v == v for v in losses.values())
    assert any(not torch.equal(a, b) for a, b in zip(before, algorithm.parameters()))
    algorithm.eval()
    assert all(
        logits.dtype == torch.float32 for logits in algorithm.predict_modes(batches[0][0]).values()
    )


def test_bf16_is_close_to_float32_and_not_the_same():
    torch.manual_seed(0)
    net, x = make_featurizer("mnist_cnn", (1, 28, 28)), torch.rand(8, 1, 28, 28)
    exact = net(x)
    set_precision(net, "bf16")
    rounded = net(x)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    set_precision(net, "float32")
    assert torch.equal(net(x), exact)


def test_an_unknown_precision_lists_the_valid_ones_and_changes_nothing():
    net = SmallD2V(1)
    with pytest.raises(
        HmoeError,
        match="unknown precision 'fp16'.* Valid: float32, bf16, float32-compile, bf16-compile",
    ):
        set_precision(net, "fp16")
    assert net.precision == "float32" == PRECISIONS[0]


def run_or_skip(net, x):
    try:
        return net(x)
    except HmoeError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@torch.no_grad()
def test_compiled_networks_agree_are_copied_and_pickled():
    torch.manual_seed(0)
    net, x = SmallD2V(1, 4, 4), torch.rand(3, 1, 8, 8)
    exact, names = net(x), list(net.state_dict())
    set_precision(net, "float32-compile")
    torch.testing.assert_close(run_or_skip(net, x), exact, rtol=1e-4, atol=1e-5)
    assert "_compiled" in net.__dict__
    assert list(net.state_dict()) == names
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert twin.precision == "float32-compile"
    assert "_compiled" not in twin.__dict__
    for p in net.parameters():
        p.zero_()
    set_precision(twin, "float32")
    assert torch.equal(twin(x), exact)
    assert run_or_skip(net, x).abs().max() == 0


# IGA differentiates twice, which torch.compile refuses. The others change outputs by hooks
UNCOMPILED = ("IGA", "MixStyle", "EFDMix")
COMPILED = [(name, {}, 16) for name in algorithm_names() if name not in UNCOMPILED] + [
    ("ERM", {"network": "mnist_cnn"}, 16),
    ("ERM", {"network": "image_cnn"}, 16),
    ("ERM", {"network": "resnet18", "weights": "random"}, 32),
    ("ERM", {"network": "timm:vit_tiny_patch16_224", "weights": "random"}, 16),
    ("DMG", {"network": "resnet18", "weights": "random"}, 32),
    ("HMOE-DN", {"d2v_encoder": "image"}, 16),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, hparams, side", COMPILED)
def test_compiled_training_is_eager_training(name, hparams, side, monkeypatch):
    """Losses, gradients and parameters of an update, traced without the C++ compiler, which would
    draw other noise."""
    backend = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    cls, shape = get_algorithm(name), (3, side, side)
    seed_everything(0)
    eager = cls(shape, 4, 3, {"network": small_network(cls)} | hparams).train()
    twin, losses = copy.deepcopy(eager), []
    set_precision(twin, "float32-compile")
    for algorithm in (eager, twin):
        seed_everything(1)
        losses.append(algorithm.update(random_batches(3, shape, 4, seed=0, size=4)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert backend.frame_count
    for (name, p), q in zip(eager.named_parameters(), twin.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-6, msg=name)
        torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.slow
def test_a_compiled_sparse_layer_keeps_its_auxiliary_loss():
    options = dict(num_experts=2, capacity_factor=0.0, gate_noise=0.0, dropout=0.0)
    net, x = Backbone(), torch.randn(9, 4)
    net.features = SparseMoE(4, 4, router="linear", loss="product", auxiliary_weight=1.0, **options)
    gradients = []
    for kind in ("float32", "float32-compile"):
        set_precision(net, kind)
        y = run_or_skip(net, x)
        gradients.append(torch.autograd.grad(y.square().sum(), list(net.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_compiled_code_is_cached_apart_for_each_instruction_set(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folders = []
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        precision._cache_of_its_own()
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert len(set(folders)) == 2
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    precision._cache_of_its_own()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen"


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch):
    def broken(function, **options):
        class Missing(Exception):
            pass

        Missing.__module__ = "torch._inductor.exc"

        def call(x):
            raise Missing("InvalidCxxCompiler: No working C++ compiler found\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    net = SmallD2V(1)
    set_precision(net, "bf16-compile")
    with pytest.raises(
        HmoeError,
        match=r"No working C\+\+ compiler found.*Fix: install a C\+\+ compiler.*precision bf16\.",
    ) as caught:
        net(torch.rand(1, 1, 8, 8))
    assert "\n" not in str(caught.value)


def test_an_error_of_the_network_itself_is_not_blamed_on_the_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    net = SmallD2V(1)
    set_precision(net, "float32-compile")
    with pytest.raises(RuntimeError, match="channels"):
        net(torch.rand(1, 3, 8, 8))


# Group norm


@pytest.mark.parametrize(
    "groups, shape",
    [
        (8, (5, 64, 14, 14)),
        (8, (3, 16, 7, 5)),
        (2, (4, 6, 5, 5)),
        (4, (1, 4, 3, 3)),
        (1, (2, 12, 1, 1)),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 17])
def test_bf16_group_norm_agrees_with_float32(groups, shape, block, monkeypatch):
    """Values, and gradients of image, scale and shift;
    in one block and in one block for each image; the images have a mean far from 0."""
    monkeypatch.setattr(precision, "BLOCK", block)
    torch.manual_seed(0)
    x, dy, weight, bias = (
        channels_last(*shape) + 2,
        channels_last(*shape),
        torch.rand(shape[1]) + 0.5,
        torch.randn(shape[1]),
    )
    found = []
    for dtype, norm in ((torch.bfloat16, Bf16GroupNorm.apply), (torch.float64, F.group_norm)):
        given = [
            t.clone().requires_grad_()
            for t in (
                x.to(dtype),
                *((weight, bias) if dtype == torch.bfloat16 else (weight.double(), bias.double())),
            )
        ]
        y = (
            norm(given[0], given[1], given[2], groups, 1e-5)
            if dtype == torch.bfloat16
            else norm(given[0], groups, given[1], given[2], 1e-5)
        )
        y.backward(dy.to(dtype))
        found.append([y.detach(), *(t.grad for t in given)])
    (y, dx, dweight, dbias), exact = found
    assert y.dtype == dx.dtype == torch.bfloat16
    assert dweight.dtype == torch.float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    for value, wanted, tolerance in zip((y, dx, dweight, dbias), exact, (2**-8, 2**-8, 1e-4, 1e-5)):
        assert (value.double() - wanted).abs().max() <= tolerance * max(1, wanted.abs().max()), (
            (value.double() - wanted).abs().max()
        )


def test_bf16_group_norm_of_a_constant_image_is_its_shift():
    """A variance of 0 leaves nothing to divide by but eps:
    no square root of a negative number, no infinite gradient."""
    x = torch.full((2, 8, 4, 4), 3.0).bfloat16().requires_grad_()
    bias = torch.randn(8)
    y = Bf16GroupNorm.apply(x, torch.ones(8), bias, 2, 1e-5)
    y.sum().backward()
    assert (y.float() - bias.view(1, 8, 1, 1)).abs().max() < 0.05
    assert x.grad.isfinite().all()


def test_bf16_group_norm_is_used_only_where_it_is_the_faster_one(monkeypatch):
    called = []
    monkeypatch.setattr(
        precision.Bf16GroupNorm, "apply", lambda x, *rest: called.append(x.shape[1]) or x
    )
    narrow, wide = GroupNorm(8, 64), GroupNorm(8, 128)
    for x in (channels_last(2, 64, 4, 4), channels_last(2, 64, 4, 4, dtype=torch.float32)):
        narrow(x)
    wide(channels_last(2, 128, 4, 4).float())
    assert called == [64]
    set_precision(net := ConvNet(1, 64), "bf16")
    net(torch.rand(1, 1, 8, 8))
    assert called == [64, 64]


FROM_WEIGHTS = {*LARGE, "gmoe_ti16", "gmoe_s16", "gmoe_b16"}  # tested in test_backbones


@pytest.mark.parametrize("name", [n for n in NETWORKS if "<" not in n and n not in FROM_WEIGHTS])
def test_every_network_makes_as_many_features_as_it_says(name):
    shape = {"mlp": (3, 1, 1), "conv1d": (3, 7, 1)}.get(name, (3, 32, 32))
    network = make_featurizer(name, shape)
    features = network(torch.rand(4, *shape))
    assert features.shape == (4, network.num_features)
    assert features.requires_grad
