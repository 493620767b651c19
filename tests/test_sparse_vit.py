"""Transformers with experts: which blocks, copies of pretrained MLPs, what is predicted at the
start, networks by their name in timm, and refusals in one line."""

import pytest
import torch
from torch import nn

from hmoe_repro.core.devices import import_torchvision
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import as_input
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.method.sparse_moe import SparseMoE
from hmoe_repro.networks.backbones import TRANSFORMERS, PrefixDict, architecture_of, make_backbone
from hmoe_repro.networks.pretrained import keep_weights, resolve_weights, timm_name, weights_for
from hmoe_repro.networks.registry import NETWORKS, make_featurizer, usual_weights
from hmoe_repro.networks.sparse_vit import (
    SPARSE,
    SPARSE_NETWORKS,
    add_experts,
    dense_twin,
    expert_layers,
    make_sparse_vit,
    sparse_blocks,
)

SMALL = (3, 16, 16)


@pytest.fixture(scope="module")
def dense_file(tmp_path_factory):
    "A dense network whose weights are as large as training makes them, and a file of them."
    torch.manual_seed(3)
    net = make_backbone("small_vit", SMALL).eval()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1).add_(0.01 * torch.randn_like(weight))
    path = tmp_path_factory.mktemp("weights") / "dense.pth"
    torch.save({"model": net.body.state_dict() | {"head.weight": torch.zeros(7, 64)}}, path)
    return net, path


def sparse_at(net):
    return [i for i, block in enumerate(net.body.blocks) if isinstance(block.mlp, SparseMoE)]


# Which blocks


def test_blocks_of_the_two_placements():
    assert sparse_blocks(12) == (8, 10)
    assert sparse_blocks(24) == (20, 22)
    assert sparse_blocks(12, "every-two") == (0, 2, 4, 6, 8, 10)
    assert sparse_blocks(4) == (0, 2)


@pytest.mark.parametrize(
    "name, placement, blocks",
    [("gmoe_s16", "last-two", [8, 10]), ("gmoe_small", "every-two", [0, 2, 4])],
)
def test_experts_are_where_the_placement_says(name, placement, blocks):
    with torch.device("meta"):
        net = make_sparse_vit(name, (3, 224, 224), placement=placement, num_experts=4)
    assert sparse_at(net) == blocks
    assert len(expert_layers(net)) == len(blocks)
    assert all(len(layer.experts) == 4 for layer in expert_layers(net))


@pytest.mark.parametrize("name", SPARSE)
def test_parameters_are_those_of_the_twin_and_five_more_mlps_in_two_blocks(name):
    with torch.device("meta"):
        sparse = make_sparse_vit(name, (3, 32, 32))
        dense = make_backbone(dense_twin(name), (3, 32, 32))
    count = lambda net: sum(p.numel() for p in net.parameters())
    d = dense.num_features
    mlp, router = 2 * d * 4 * d + 5 * d, d * 256 + 256 + 256 * 6 + 1
    assert count(sparse) == count(dense) + 2 * (5 * mlp + router)
    assert sparse.num_features == d
    assert dense_twin(name) in TRANSFORMERS


# First weights


def test_pretrained_experts_are_copies_and_everything_else_is_loaded(dense_file):
    dense, path = dense_file
    net = make_sparse_vit("gmoe_small", SMALL, path)
    state, given = net.body.state_dict(), dense.body.state_dict()
    for i in (2, 4):
        experts = net.body.blocks[i].mlp.experts
        for e in range(6):
            assert torch.equal(experts.w1[e], given[f"blocks.{i}.mlp.fc1.weight"])
            assert torch.equal(experts.b1[e], given[f"blocks.{i}.mlp.fc1.bias"])
            assert torch.equal(experts.w2[e], given[f"blocks.{i}.mlp.fc2.weight"])
            assert torch.equal(experts.b2[e], given[f"blocks.{i}.mlp.fc2.bias"])
    shared = [name for name in given if name in state]
    assert len(shared) == len(given) - 8
    assert all(torch.equal(state[n], given[n]) for n in shared)
    assert net.loaded["ignored"] == ["head.weight"]


def test_random_experts_are_apart_and_drawn_as_the_transformer_draws():
    torch.manual_seed(0)
    net = make_sparse_vit("gmoe_ti16", (3, 32, 32))
    for layer in expert_layers(net):
        weights = torch.cat([layer.experts.w1.flatten(), layer.experts.w2.flatten()])
        router = layer.router.projector
        for drawn in (weights, router.weight):
            assert 0.019 < float(drawn.detach().std()) < 0.021
            assert drawn.abs().max() <= 2
        assert not any(b.any() for b in (layer.experts.b1, layer.experts.b2, router.bias))
        first, second = layer.experts.w1[:2]
        assert (first - second).abs().mean() > 0.01


def test_random_experts_have_the_spread_of_the_mlp_they_replace():
    "The small networks are drawn by Glorot's bounds: 0.08 here, four times a DeiT's."
    torch.manual_seed(0)
    net = make_sparse_vit("gmoe_small8", (3, 16, 16))
    expected = (2 / (64 + 256)) ** 0.5
    for layer in expert_layers(net):
        for weight in (layer.experts.w1, layer.experts.w2):
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.03)
    assert float(net.body.blocks[0].mlp.fc1.weight.detach().std()) == pytest.approx(expected, 0.03)


@pytest.mark.parametrize("router", ["cosine", "linear"])
def test_a_pretrained_router_is_drawn_too(dense_file, router):
    torch.manual_seed(0)
    net = make_sparse_vit("gmoe_small", SMALL, dense_file[1], router=router)
    for layer in expert_layers(net):
        linear = layer.router if router == "linear" else layer.router.projector
        assert 0.015 < float(linear.weight.detach().std()) < 0.025


@pytest.mark.parametrize("k", [1, 2])
def test_at_the_start_it_predicts_the_mlps_times_the_gate_values(dense_file, k):
    """protocol 4.2 (3): with one choice the output is the winner's score times the MLP; with two,
    whose weights add up to 1, the MLP's own."""
    dense, path = dense_file
    torch.manual_seed(0)
    net = make_sparse_vit("gmoe_small", SMALL, path, k=k).eval()
    x = as_input(load_dataset("DigitDomains").images[0][:8])

    def scaled(mlp, score):
        return mlp.register_forward_hook(lambda module, given, output: output * score)

    with torch.no_grad():
        features, plain = net(x), dense(x)
        scores = [layer.choice.weights.sum(1).view(8, -1, 1) for layer in expert_layers(net)]
        hooks = [scaled(dense.body.blocks[i].mlp, s) for i, s in zip((2, 4), scores)]
        by_hand = dense(x)
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(features, by_hand, rtol=1e-4, atol=1e-5)
    if k == 2:
        torch.testing.assert_close(features, plain, rtol=1e-4, atol=1e-5)
    else:
        assert all(1 / 6 < score.mean() < 0.25 for score in scores)
        assert (features - plain).norm() > 0.1 * plain.norm()


def test_in_training_the_gate_value_is_about_a_fifth(dense_file):
    torch.manual_seed(0)
    net = make_sparse_vit("gmoe_small", SMALL, dense_file[1]).train()
    net(torch.rand(64, *SMALL))
    for layer in expert_layers(net):
        assert 0.18 < float(layer.choice.weights.mean()) < 0.24


def test_a_file_that_holds_experts_is_loaded_as_it_is(tmp_path, dense_file):
    torch.manual_seed(0)
    trained = make_sparse_vit("gmoe_small", SMALL, num_experts=3)
    torch.save(trained.body.state_dict(), tmp_path / "trained.pth")
    again = make_sparse_vit("gmoe_small", SMALL, tmp_path / "trained.pth", num_experts=3)
    for name, value in trained.body.state_dict().items():
        assert torch.equal(again.body.state_dict()[name], value)
    with pytest.raises(HmoeError, match="do not fit gmoe_small .*another shape: blocks.2.mlp"):
        make_sparse_vit("gmoe_small", SMALL, tmp_path / "trained.pth", num_experts=4)


def test_weights_are_those_of_the_twin(tmp_path, dense_file, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path))
    for name, twin in SPARSE.items():
        assert weights_for(name) == weights_for(twin)
    kept = keep_weights(dense_file[1])
    assert resolve_weights(kept, "gmoe_small") == kept
    net = make_sparse_vit("gmoe_small", SMALL, kept)
    assert net.loaded["ignored"] == ["head.weight"]
    with pytest.raises(HmoeError, match="weights of gmoe_s16 'IMAGENET1K_V1'. Valid: random, deit"):
        resolve_weights("IMAGENET1K_V1", "gmoe_s16")
    with pytest.raises(HmoeError, match="'gmoe_s16' can start from several weights and none"):
        make_featurizer("gmoe_s16", (3, 32, 32))
    assert usual_weights("gmoe_small") == "random"


# The small twin


@pytest.mark.parametrize("side, tokens", [(8, 5), (16, 17), (28, 50)])
def test_small_vit_takes_small_images(side, tokens):
    net = make_featurizer("small_vit", (2, side, side))
    assert net.body.pos_embed.shape == (1, tokens, 64)
    assert len(net.body.blocks) == 6
    assert net(torch.rand(3, 2, side, side)).shape == (3, 64)


def test_larger_patches_make_fewer_tokens():
    net = make_featurizer("gmoe_small8", (3, 16, 16))
    assert net.body.pos_embed.shape == (1, 5, 64)
    assert net(torch.rand(3, 3, 16, 16)).shape == (3, 64)
    with pytest.raises(HmoeError, match="patches of 8 pixels, and 28 x 28 is no multiple"):
        make_featurizer("small_vit8", (3, 28, 28))


def test_drop_path_rises_linearly():
    with torch.device("meta"):
        net = make_featurizer("gmoe_s16", (3, 32, 32), "random", drop_path=0.1)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in net.body.blocks]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])


# By their name in timm


def test_names_with_a_prefix_are_names():
    names = PrefixDict({"a": 1, "b:<name in timm>": 2})
    assert "a" in names
    assert "b:x" in names
    assert names["b:x"] == 2
    assert len(names) == 2
    assert "b:" not in names
    assert "x" not in names
    assert None not in names
    assert ["a"] not in names
    assert "gmoe:vit_small_patch8_224" in NETWORKS
    assert "gmoe_s16" in NETWORKS
    assert "timm:deit_small_patch16_224" not in SPARSE_NETWORKS


def test_a_network_of_timm_is_timms(tmp_path):
    import_torchvision()
    import timm

    torch.manual_seed(0)
    whole = timm.create_model("vit_tiny_patch16_384", num_classes=5, img_size=32).eval()
    torch.save(whole.state_dict(), tmp_path / "vit.pth")
    net = make_backbone("timm:vit_tiny_patch16_384", (3, 32, 32), tmp_path / "vit.pth").eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(whole.head(net(x)), whole(x))
    other = make_backbone("timm:vit_tiny_patch16_384", (3, 48, 32), tmp_path / "vit.pth")
    assert other.loaded["repaired"] == ["pos_embed"]
    assert other.body.pos_embed.shape == (1, 7, 192)
    assert "vit_tiny_patch16_384.augreg_in21k_ft_in1k" in weights_for("timm:vit_tiny_patch16_384")


def test_register_tokens_keep_their_positions(tmp_path):
    "Four registers and no class token, none of which has a position."
    name = "timm:vit_betwixt_patch16_reg4_gap_256"
    torch.manual_seed(0)
    small = make_backbone(name, (3, 32, 32))
    torch.save(small.body.state_dict(), tmp_path / "reg.pth")
    large = make_backbone(name, (3, 64, 64), tmp_path / "reg.pth")
    assert small.body.pos_embed.shape == (1, 4, 640)
    assert large.body.pos_embed.shape == (1, 16, 640)
    assert large(torch.rand(1, 3, 64, 64)).shape == (1, 640)


def test_any_plain_transformer_takes_experts():
    with torch.device("meta"):
        net = make_featurizer("gmoe:deit3_small_patch16_224", (3, 64, 64), "random")
    assert sparse_at(net) == [8, 10]
    assert dense_twin("gmoe:x") == "timm:x"
    assert timm_name("gmoe:deit3_small_patch16_224") == "deit3_small_patch16_224"
    assert timm_name("gmoe_s16") is None


# Refusals


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda: make_sparse_vit("gmoe_small", SMALL, k=7), "cannot go to 7 of 6 experts"),
        (
            lambda: make_sparse_vit("gmoe_small", SMALL, capacity_factor=-1.0),
            "capacity_factor must be finite and not negative, got -1.0",
        ),
        (
            lambda: make_sparse_vit("gmoe_small", SMALL, capacity_factor=0.0, gate_noise=0.0),
            "for the balance loss, above 0, got 0.0",
        ),
        (
            lambda: make_sparse_vit("gmoe_small", SMALL, capacity_factor=-1.0, gate_noise=0.0),
            "capacity_factor must be finite and not negative, got -1.0",
        ),
        (lambda: make_sparse_vit("gmoe_small", SMALL, router="dot"), "unknown router 'dot'"),
        (
            lambda: make_sparse_vit("gmoe_small", SMALL, placement="first"),
            "unknown placement of experts 'first'. Valid: last-two, every-two",
        ),
        (
            lambda: make_sparse_vit("gmoe_small", (3, 18, 18)),
            "patches of 4 pixels, and 18 x 18 is no multiple. Fix: use a resolution such as 16",
        ),
        (
            lambda: make_sparse_vit("gmoe_s16", (3, 65, 65)),
            "patches of 16 pixels, and 65 x 65 is no multiple. Fix: use a resolution such as 64",
        ),
        (lambda: make_sparse_vit("gmoe_s32", SMALL), "unknown network with experts 'gmoe_s32'"),
        (lambda: sparse_blocks(3), "a transformer of 3 blocks is too shallow"),
        (
            lambda: make_sparse_vit("gmoe:eva02_tiny_patch14_224", (3, 112, 112)),
            "block 8 of this Eva has no MLP of two linear layers",
        ),
        (lambda: architecture_of("timm:resnet18"), "timm's resnet18 is no vision transformer"),
        (lambda: architecture_of("timm:vit_tiny_r_s16_p8_224"), "is no vision transformer"),
        (
            lambda: weights_for("timm:vit_tiny"),
            "timm has no network 'vit_tiny'. Fix: for example timm:vit_tiny_patch16_224",
        ),
        (
            lambda: weights_for("gmoe:vit_tiny_patch16_224.augreg_in21k"),
            "Fix: network gmoe:vit_tiny_patch16_224 with weights vit_tiny_patch16_224.augreg_in21k",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(build, said):
    with pytest.raises(HmoeError) as refused:
        build()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["gmoe_small", "small_vit", "timm:deit3_small_patch16_224"])
def test_images_of_another_size_are_refused_in_a_line(name):
    net = make_featurizer(name, (3, 32, 48), "random").eval()
    assert net(torch.rand(1, 3, 32, 48)).isfinite().all()
    for sides in ((48, 32), (32, 32)):
        said = f"built for images of 32 x 48 pixels, and got {sides[0]} x {sides[1]}. Fix: resize"
        with pytest.raises(HmoeError, match=said):
            net(torch.rand(1, 3, *sides))


def test_images_of_any_size_pass_where_a_network_takes_them():
    for name in ("resnet18", "alexnet"):
        net = make_featurizer(name, (3, 64, 64), "random").eval()
        assert net.sides is None
        assert net(torch.rand(1, 3, 96, 80)).isfinite().all()


def test_a_gated_mlp_is_refused():
    body = nn.Module()
    body.blocks = nn.ModuleList(nn.Module() for _ in range(4))
    with pytest.raises(HmoeError, match="block 0 of this Module has no MLP"):
        add_experts(body)


def test_weights_of_another_width_are_refused(tmp_path, dense_file):
    torch.manual_seed(0)
    torch.save(make_backbone("deit_tiny", (3, 32, 32)).body.state_dict(), tmp_path / "tiny.pth")
    with pytest.raises(HmoeError, match="do not fit gmoe_s16 .*another shape: cls_token is") as e:
        make_sparse_vit("gmoe_s16", (3, 32, 32), tmp_path / "tiny.pth")
    assert "\n" not in str(e.value)


# Evaluation


def test_a_prediction_depends_on_the_batch_only_where_that_is_asked_for(dense_file):
    torch.manual_seed(1)
    net = make_sparse_vit("gmoe_small", SMALL, dense_file[1]).eval()
    with torch.no_grad():
        for layer in expert_layers(net):  # a router with preferences
            layer.router.directions.add_(0.02 * torch.randn(6))
    x = as_input(load_dataset("DigitDomains").images[1][:40])
    moved = {}
    for evaluation in ("dropless", "capacity"):
        for layer in expert_layers(net):
            layer.evaluation = evaluation
        with torch.no_grad():
            moved[evaluation] = (net(x)[:1] - net(x[:1])).abs().max().item()
    assert moved["dropless"] < 1e-5
    assert moved["capacity"] > 1e-3
