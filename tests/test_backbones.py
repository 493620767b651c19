"""ResNet, AlexNet and transformers as featurizers: the published networks less their heads,
frozen batch norm, other channels and sizes, and weights that never fall back in silence."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hmoe_repro.core.devices import import_torchvision
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.networks.backbones import (
    BACKBONES,
    LARGE,
    ImageBackbone,
    adapt_channels,
    make_backbone,
)
from hmoe_repro.networks.precision import Backbone, set_precision
from hmoe_repro.networks.pretrained import keep_weights
from hmoe_repro.networks.registry import NETWORKS, make_featurizer

COUNTS = {
    "resnet18": 11_689_512 - 513_000,
    "resnet50": 25_557_032 - 2_049_000,
    "alexnet": 61_100_840 - 4_097_000,
    "deit_tiny": 5_717_416 - 193_000,
    "deit_small": 22_050_664 - 385_000,
    "deit_base": 86_567_656 - 769_000,
    "vit_tiny": 5_717_416 - 193_000,
    "vit_small": 22_050_664 - 385_000,
    "vit_base": 86_567_656 - 769_000,
}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def batch_norms(net):
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]


def whole_resnet18(classes=1000, seed=3):
    "torchvision's network with statistics that are not 0 and 1."
    torch.manual_seed(seed)
    net = import_torchvision().models.resnet18(num_classes=classes)
    for layer in batch_norms(net):
        layer.running_mean.normal_(0, 0.1)
        layer.running_var.uniform_(0.5, 1.5)
    return net.eval()


@pytest.fixture(scope="module")
def resnet_file(tmp_path_factory):
    net = whole_resnet18()
    torch.save(net.state_dict(), path := tmp_path_factory.mktemp("weights") / "resnet18.pth")
    return net, path


@pytest.fixture(scope="module")
def deit_file(tmp_path_factory):
    import_torchvision()
    import timm

    torch.manual_seed(4)
    net = timm.create_model("deit_tiny_patch16_224", num_classes=10).eval()
    torch.save({"model": net.state_dict()}, path := tmp_path_factory.mktemp("weights") / "deit.pth")
    return net, path


# The networks


@pytest.mark.parametrize("name", LARGE)
def test_counts_are_those_of_the_published_network_less_its_head(name):
    with torch.device("meta"):
        net = make_backbone(name, (3, 224, 224))
    assert sum(p.numel() for p in net.parameters()) == COUNTS[name]
    assert net.num_features == BACKBONES[name].num_features
    assert isinstance(net, Backbone)


def test_the_names_are_the_ones_that_networks_lists():
    assert list(BACKBONES) == [*LARGE, "small_vit", "small_vit8", "medium_vit8"]
    assert set(LARGE) < set(NETWORKS)
    assert set(COUNTS) == set(LARGE)


@pytest.mark.parametrize("side", [32, 65, 96])
def test_resnet18_is_torchvisions_up_to_the_last_layer(resnet_file, side):
    whole, path = resnet_file
    net, x = make_backbone("resnet18", (3, side, side), path).eval(), torch.randn(2, 3, side, side)
    with torch.no_grad():
        assert torch.equal(whole.fc(net(x)), whole(x))
        assert net(x).shape == (2, 512)
    assert net.loaded == {"prefix": "", "ignored": ["fc.bias", "fc.weight"], "repaired": []}


def test_alexnet_is_torchvisions_up_to_fc7():
    torch.manual_seed(0)
    net, x = make_backbone("alexnet", (3, 63, 63)).eval(), torch.randn(2, 3, 63, 63)
    body = net.body
    with torch.no_grad():
        y = torch.flatten(F.adaptive_avg_pool2d(body.features(x), 6), 1)
        wanted = F.relu(
            F.linear(
                F.relu(F.linear(y, body.classifier[1].weight, body.classifier[1].bias)),
                body.classifier[4].weight,
                body.classifier[4].bias,
            )
        )
        assert torch.equal(net(x), wanted)
        assert net(x).shape == (2, 4096)
        assert wanted.min() == 0
    assert sorted(k for k in body.state_dict() if k.startswith("classifier")) == [
        "classifier.1.bias",
        "classifier.1.weight",
        "classifier.4.bias",
        "classifier.4.weight",
    ]


def test_deit_gives_timms_class_token(deit_file):
    whole, path = deit_file
    net, x = make_backbone("deit_tiny", (3, 224, 224), path).eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(net(x), whole.forward_features(x)[:, 0])
        assert torch.equal(whole.head(net(x)), whole(x))
    assert net.loaded["ignored"] == ["head.bias", "head.weight"]
    assert net.loaded["repaired"] == []


@pytest.mark.parametrize("name, side", [("resnet18", 32), ("deit_tiny", 32)])
def test_a_network_learns_and_is_copied(name, side):
    torch.manual_seed(0)
    net = nn.Sequential(
        make_featurizer(name, (3, side, side), "random"), nn.Linear(BACKBONES[name].num_features, 2)
    ).train()
    x, y = torch.randn(8, 3, side, side), torch.arange(8) % 2
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    losses = []
    for _ in range(6):
        loss = F.cross_entropy(net(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None for p in net.parameters())
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net.eval())))
    assert torch.equal(twin(x), net(x))
    assert twin[0].num_features == net[0].num_features


@pytest.mark.parametrize("name, side", [("resnet18", 32), ("deit_tiny", 32)])
def test_bf16_is_close_and_hands_on_float32(name, side):
    torch.manual_seed(0)
    net, x = make_featurizer(name, (3, side, side), "random").eval(), torch.randn(4, 3, side, side)
    dtypes = []
    net.body.get_submodule(BACKBONES[name].stem).register_forward_hook(
        lambda module, given, out: dtypes.append(out.dtype)
    )
    with torch.no_grad():
        exact = net(x)
        set_precision(net, "bf16")
        rounded = net(x)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).norm() < 0.03 * exact.norm()
    assert dtypes == [torch.float32, torch.bfloat16]


def test_the_same_seed_gives_the_same_network():
    nets = []
    for _ in range(2):
        torch.manual_seed(7)
        nets.append(make_featurizer("deit_tiny", (3, 32, 32), "random").state_dict())
    assert same(*nets)


# Frozen batch norm


def statistics(net):
    return [(m.running_mean.clone(), m.running_var.clone()) for m in batch_norms(net)]


def trained(freeze_bn, path, steps=2):
    torch.manual_seed(0)
    net = nn.Sequential(
        make_featurizer("resnet18", (3, 32, 32), path, freeze_bn=freeze_bn), nn.Linear(512, 3)
    )
    before, affine = (
        statistics(net),
        [p.clone() for m in batch_norms(net) for p in (m.weight, m.bias)],
    )
    net.eval()
    net.train()  # an outer module's calls must not thaw it
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(steps):
        F.cross_entropy(net(torch.randn(6, 3, 32, 32)), torch.arange(6) % 3).backward()
        optimiser.step()
        optimiser.zero_grad()
    return net, before, affine


def test_frozen_batch_norm_keeps_its_statistics_and_trains_scale_and_shift(resnet_file):
    net, before, affine = trained(True, resnet_file[1])
    assert all(torch.equal(a, b) for x, y in zip(before, statistics(net)) for a, b in zip(x, y))
    assert all(
        not torch.equal(a, b)
        for a, b in zip(affine, [p for m in batch_norms(net) for p in (m.weight, m.bias)])
    )
    assert net.training
    assert net[0].training
    assert net[0].body.training
    assert not any(m.training for m in batch_norms(net))
    x = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        in_training = net[0](x)
        assert torch.equal(in_training, net[0].eval()(x))
        torch.testing.assert_close(
            net.train()[0](x[:1]), in_training[:1], rtol=1e-4, atol=1e-5
        )  # images of a batch do not mix


def test_free_batch_norm_is_pytorchs(resnet_file):
    net, before, _ = trained(False, resnet_file[1])
    assert all(not torch.equal(a, b) for x, y in zip(before, statistics(net)) for a, b in zip(x, y))
    assert all(m.training for m in batch_norms(net))
    assert not any(m.training for m in batch_norms(net.eval()))


def test_every_call_that_sets_the_mode_leaves_it_frozen(resnet_file):
    net = nn.ModuleDict(
        {"inner": nn.Sequential(make_backbone("resnet18", (3, 32, 32), resnet_file[1]))}
    )
    for call in (
        lambda n: n,
        lambda n: n.train(),
        lambda n: n.eval().train(True),
        lambda n: copy.deepcopy(n).train(),
        lambda n: pickle.loads(pickle.dumps(n)).train(),
        lambda n: n.requires_grad_(True).train().float(),
    ):
        turned = call(net)
        assert turned.training
        assert len(batch_norms(turned)) == 20
        assert not any(m.training for m in batch_norms(turned))


def test_by_default_it_is_frozen_where_the_weights_are_pretrained(resnet_file):
    assert make_backbone("resnet18", (3, 32, 32), resnet_file[1]).freeze_bn is True
    assert make_backbone("resnet18", (3, 32, 32)).freeze_bn is False
    assert make_backbone("resnet18", (3, 32, 32), freeze_bn=True).freeze_bn is True


# Channels and sizes


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_a_stem_for_other_channels_copies_channel_j_mod_3(resnet_file, channels):
    whole, path = resnet_file
    net = make_backbone("resnet18", (channels, 32, 32), path).eval()
    for j in range(channels):
        assert torch.equal(net.body.conv1.weight[:, j], whole.conv1.weight[:, j % 3])
    assert net.body.conv1.weight.shape[1] == channels
    assert net(torch.rand(1, channels, 32, 32)).shape == (1, 512)
    assert net.loaded["repaired"] == ([] if channels == 3 else ["conv1.weight"])


@pytest.mark.parametrize("name", ["resnet18", "deit_tiny"])
def test_a_random_stem_has_its_channels_and_no_copies(name):
    torch.manual_seed(0)
    stem = make_backbone(name, (4, 32, 32)).body.get_submodule(BACKBONES[name].stem)
    assert stem.weight.shape[1] == 4
    assert not torch.equal(stem.weight[:, 3], stem.weight[:, 0])
    if name == "resnet18":
        assert float(stem.weight.detach().std()) == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.05)


def test_alexnets_stem_and_a_transformers_are_adapted_too(deit_file):
    x = torch.rand(2, 3, 63, 63)
    torch.manual_seed(0)
    assert make_backbone("alexnet", (2, 63, 63)).eval()(x[:, :2]).shape == (2, 4096)
    whole, path = deit_file
    net = make_backbone("deit_tiny", (4, 224, 224), path)
    assert torch.equal(net.body.patch_embed.proj.weight[:, 3], whole.patch_embed.proj.weight[:, 0])
    assert net.loaded["repaired"] == ["patch_embed.proj.weight"]


def test_only_stems_of_three_channels_are_adapted():
    for shape in ((8, 1, 7, 7), (8, 4, 7, 7), (8, 3)):
        given = torch.rand(shape)
        assert adapt_channels(given, torch.empty(8, 5, 7, 7)) is given


@pytest.mark.parametrize("sides", [(32, 32), (48, 32), (256, 64)])
def test_a_transformer_takes_other_sizes_and_keeps_the_class_tokens_position(deit_file, sides):
    whole, path = deit_file
    net = make_backbone("deit_tiny", (3, *sides), path).eval()
    positions = net.body.pos_embed
    assert positions.shape == (1, 1 + sides[0] * sides[1] // 256, 192)
    assert torch.equal(positions[:, 0], whole.pos_embed[:, 0])
    assert net.loaded["repaired"] == ["pos_embed"]
    with torch.no_grad():
        assert net(torch.rand(2, 3, *sides)).shape == (2, 192)


def test_positions_keep_their_orientation(deit_file, tmp_path):
    whole, _ = deit_file
    rows = torch.arange(14.0).repeat_interleave(14).view(1, 196, 1).expand(1, 196, 192)
    torch.save(
        whole.state_dict() | {"pos_embed": torch.cat([torch.zeros(1, 1, 192), rows], 1)},
        tmp_path / "rows.pth",
    )
    found = (
        make_backbone("deit_tiny", (3, 64, 96), tmp_path / "rows.pth")
        .body.pos_embed[0, 1:, 0]
        .view(4, 6)
    )
    assert (found.max(1).values - found.min(1).values).max() < 1e-3
    assert (found[1:, 0] > found[:-1, 0]).all()


# Refusals


@pytest.mark.parametrize(
    "name, shape, options, says",
    [
        ("resnet18", (3, 16, 16), {}, "at least 32 pixels.*16 x 16.*Fix"),
        ("alexnet", (3, 62, 224), {}, "at least 63 pixels"),
        ("deit_small", (3, 225, 224), {}, "patches of 16.*225 x 224.*such as 224"),
        ("resnet18", (3, 64, 64), {"drop_path": 0.1}, "no stochastic depth"),
        ("resnet1", (3, 64, 64), {}, "Valid: resnet18, resnet50"),
        ("resnet18", (3, 64, 64), {"weights": "IMAGENET1K_V2"}, "Valid: random, IMAGENET1K_V1"),
        ("resnet18", (3, 64, 64), {"weights": "imagenet"}, "neither a known name nor a file"),
    ],
)
def test_what_cannot_work_is_refused(name, shape, options, says):
    with pytest.raises(HmoeError, match=says) as caught:
        make_backbone(name, shape, **options)
    assert "\n" not in str(caught.value)


def test_alexnet_works_from_63_pixels_and_not_below():
    with torch.device("meta"):
        net = make_backbone("alexnet", (3, 63, 63))
    assert net(torch.empty(2, 3, 63, 63, device="meta")).shape == (2, 4096)
    with pytest.raises(RuntimeError):
        net(torch.empty(2, 3, 62, 62, device="meta"))


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda s: {k: v for k, v in s.items() if not k.startswith("layer4")},
            "missing layer4.0.conv1.weight.* and 20 more",
        ),
        (
            lambda s: s | {"layer1.0.conv1.weight": torch.zeros(64, 64, 1, 1)},
            r"layer1.0.conv1.weight is \(64, 64, 1, 1\) and not \(64, 64, 3, 3\)",
        ),
        (
            lambda s: s | {"conv1.weight": torch.zeros(64, 4, 7, 7)},
            r"conv1.weight is \(64, 4, 7, 7\) and not \(64, 3, 7, 7\)",
        ),
        (
            lambda s: s | {"layer5.0.conv1.weight": torch.zeros(1)},
            "unexpected layer5.0.conv1.weight",
        ),
        (
            lambda s: s | {"bn1.running_var": torch.full((64,), float("nan"))},
            "not a number: bn1.running_var",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(resnet_file, tmp_path, change, says):
    torch.save(change(resnet_file[0].state_dict()), tmp_path / "w.pth")
    with pytest.raises(HmoeError, match=f"do not fit resnet18.*{says}"):
        make_backbone("resnet18", (3, 32, 32), tmp_path / "w.pth")


def test_weights_of_another_network_are_refused(resnet_file, deit_file, tmp_path):
    with pytest.raises(HmoeError, match="do not fit resnet50 .missing.*another shape"):
        make_backbone("resnet50", (3, 32, 32), resnet_file[1])
    with pytest.raises(
        HmoeError, match="do not fit deit_tiny .missing cls_token.*unexpected conv1.weight"
    ):
        make_backbone("deit_tiny", (3, 32, 32), resnet_file[1])
    with pytest.raises(HmoeError, match="another shape: cls_token"):
        make_backbone("deit_small", (3, 32, 32), deit_file[1])
    distilled = deit_file[0].state_dict() | {
        "dist_token": torch.zeros(1, 1, 192),
        "pos_embed": torch.zeros(1, 198, 192),
    }
    torch.save(distilled, tmp_path / "distilled.pth")
    with pytest.raises(HmoeError, match="unexpected dist_token; another shape: pos_embed"):
        make_backbone("deit_tiny", (3, 32, 32), tmp_path / "distilled.pth")


def test_a_large_network_must_be_told_its_weights():
    with pytest.raises(
        HmoeError, match="none are named. Fix: choose weights random, IMAGENET1K_V1, or a file"
    ):
        make_featurizer("resnet18", (3, 64, 64))


def test_weights_that_cannot_be_had_build_nothing(monkeypatch):
    import_torchvision()
    from torchvision import models
    from torchvision.models import _api

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(_api, "load_state_dict_from_url", offline)
    monkeypatch.setattr(models, "resnet18", lambda **options: pytest.fail("a network was built"))
    with pytest.raises(HmoeError, match="no network.*Fix: download .*random"):
        make_featurizer("resnet18", (3, 64, 64), "IMAGENET1K_V1")


def test_published_weights_are_the_ones_that_are_loaded(monkeypatch, resnet_file):
    import_torchvision()
    from torchvision.models import _api

    monkeypatch.setattr(
        _api, "load_state_dict_from_url", lambda url, **options: resnet_file[0].state_dict()
    )
    net = make_featurizer("resnet18", (3, 32, 32), "IMAGENET1K_V1")
    assert net.freeze_bn
    assert torch.equal(net.body.layer4[1].conv2.weight, resnet_file[0].layer4[1].conv2.weight)


def test_kept_weights_are_loaded_by_their_name(resnet_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path))
    net = make_backbone("resnet18", (3, 32, 32), keep_weights(resnet_file[1]))
    assert torch.equal(net.body.conv1.weight, resnet_file[0].conv1.weight)


# Dropout


def test_dropout_acts_in_training_only(resnet_file):
    net, x = (
        make_backbone("resnet18", (3, 32, 32), resnet_file[1], dropout=0.5),
        torch.randn(2, 3, 32, 32),
    )
    plain = make_backbone("resnet18", (3, 32, 32), resnet_file[1]).eval()
    with torch.no_grad():
        dropped = net(x)
        assert 0.3 < float((dropped == 0).float().mean()) < 0.7
        assert torch.equal(net.eval()(x), plain(x))


def test_alexnets_dropout_is_off_unless_asked_for_and_stands_before_its_own_layers():
    with torch.device("meta"):
        nets = [make_backbone("alexnet", (3, 64, 64), dropout=p) for p in (0.0, 0.5)]
    assert [
        (net.body.classifier[0].p, net.body.classifier[3].p, net.dropout.p) for net in nets
    ] == [(0.0, 0.0, 0.0), (0.5, 0.5, 0.0)]


def test_stochastic_depth_rises_to_what_was_asked():
    with torch.device("meta"):
        net = make_backbone("deit_tiny", (3, 32, 32), drop_path=0.1)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in net.body.blocks]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])


def test_a_backbone_of_ones_own():
    "Any network works as a body; batch norm of every kind is frozen."
    net = ImageBackbone(
        nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.SyncBatchNorm(4)),
        4,
        freeze_bn=True,
    )
    assert [m.training for m in net.train().body] == [True, True, False, False]
