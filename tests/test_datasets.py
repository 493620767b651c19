"""The embedded benchmark and what a data set refuses."""

import colorsys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import MultiDomainDataset, as_input
from hmoe_repro.data.digits import (
    MORE_STYLES,
    digit_domains,
    digit_styles,
    dilate,
    enlarge,
    hue_colour,
    withheld_digits,
)
from hmoe_repro.data.registry import DATASETS, load_dataset, register_dataset
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore


def test_each_digit_is_in_exactly_one_domain_with_its_own_label():
    data, digits = load_dataset("DigitDomains"), load_digits()
    used = torch.cat(data.source_index).numpy()
    assert sorted(used) == list(range(1797))
    assert np.array_equal(np.concatenate([y.numpy() for y in data.labels]), digits.target[used])


def test_classes_are_dealt_evenly():
    counts = np.array([np.bincount(y, minlength=10) for y in load_dataset("DigitDomains").labels])
    assert np.ptp(counts, axis=0).max() <= 1
    assert counts.min() >= 40


def test_seed_and_pixels_decide_the_fingerprint():
    a, b = digit_domains(0), digit_domains(0)
    assert a.fingerprint == b.fingerprint != digit_domains(1).fingerprint
    c = digit_domains(0)
    c.images[2][5, 0, 3, 3] ^= 1
    assert c.fingerprint != a.fingerprint


def test_fingerprint_is_the_one_of_the_published_runs():
    """If this fails, the images changed and every published record belongs to other data."""
    assert load_dataset("DigitDomains").fingerprint == PUBLISHED


PUBLISHED = "ca99eee704eb"


def test_digit_styles_are_the_same_bytes_everywhere():
    "Studies of it are planned with this fingerprint."
    data = load_dataset("DigitStyles")
    assert data.fingerprint == "129f44160a45" != digit_styles(1).fingerprint
    assert data.input_shape == (3, 28, 28)
    assert data.domain_names == sorted(MORE_STYLES)
    used = torch.cat(data.source_index).numpy()
    assert sorted(used) == list(range(1797))
    digits = load_digits().target
    assert np.array_equal(np.concatenate([y.numpy() for y in data.labels]), digits[used])
    counts = np.array([np.bincount(y, minlength=10) for y in data.labels])
    assert np.ptp(counts, axis=0).max() <= 1
    assert all(images.is_contiguous() for images in data.images)


@pytest.mark.parametrize("name", MORE_STYLES)
def test_a_style_draws_by_its_generator_and_shows_the_ink(name):
    """The same generator gives the same bytes; ink and ground differ, so that a digit is seen."""
    ink = enlarge(load_digits().images[:40], 28)
    first, again = (MORE_STYLES[name](ink, np.random.default_rng(3)) for _ in range(2))
    assert first.dtype == np.uint8
    assert first.shape == (40, 3, 28, 28)
    assert np.array_equal(first, again)
    image = first.astype(float)
    on, off = np.sort(ink.reshape(40, -1))[:, [-60, 60]].T[:, :, None, None]
    stroke, ground = (ink > on)[:, None], (ink <= off)[:, None]
    contrast = [
        abs(image[i][:, stroke[i, 0]].mean(1) - image[i][:, ground[i, 0]].mean(1)).max()
        for i in range(40)
    ]
    assert min(contrast) > 40


def test_a_dilation_is_the_largest_neighbour():
    ink = np.random.default_rng(0).integers(256, size=(2, 5, 6)).astype(np.uint8)
    for n, i, j in np.ndindex(ink.shape):
        around = ink[n, max(0, i - 1) : i + 2, max(0, j - 1) : j + 2]
        assert dilate(ink)[n, i, j] == around.max()


def test_hues_are_those_of_the_colour_wheel():
    "Within one of 255, because they are whole numbers."
    for hue in range(0, 1536, 7):
        wheel = np.array(colorsys.hsv_to_rgb(hue / 1536, 1, 1)) * 255
        assert abs(hue_colour(hue) - wheel).max() <= 1
    assert np.array_equal(hue_colour([5, 1541]), hue_colour([5, 5]))


def test_the_withheld_domain_is_half_of_the_classes_of_one_look():
    whole, apart = digit_domains(), withheld_digits("photo", "apart", first=7)
    rest, held = apart.labels[1], apart.labels[4]
    assert rest.max() == 6
    assert held.unique().tolist() == [7, 8, 9]
    assert torch.equal(torch.cat([rest, held]).sort().values, whole.labels[1].sort().values)
    assert torch.equal(apart.images[4], whole.images[1][whole.labels[1] >= 7])
    assert all(torch.equal(apart.images[i], whole.images[i]) for i in (0, 2, 3))


def test_averaged_images_are_kept_and_do_not_go_with_a_copy_on_a_device():
    data = digit_domains(0)
    half, squares = data.with_options(8), data.images[0].float().unfold(2, 2, 2).unfold(3, 2, 2)
    assert torch.equal(half.images[0], squares.mean((4, 5)).round().to(torch.uint8))
    assert data.with_options(8) is half
    assert data.with_options(4).resolution == 4
    assert torch.equal(data.with_options(8).images[1], half.images[1])
    assert "_smaller" in data.__dict__
    assert "_smaller" not in data.to("meta").__dict__


def test_domains_look_different():
    """Mean brightness and colourfulness alone separate plain, sketch and the coloured pair."""
    data = load_dataset("DigitDomains")
    brightness = {d: as_input(x).mean().item() for d, x in zip(data.domain_names, data.images)}
    colour = {d: as_input(x).std(1).mean().item() for d, x in zip(data.domain_names, data.images)}
    assert brightness["plain"] < 0.35 < 0.5 < brightness["sketch"]
    assert colour["plain"] == colour["sketch"] == 0
    assert min(colour["photo"], colour["negative"]) > 0.03


def test_as_input_is_exact_and_channels_last():
    x = as_input(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16))
    assert torch.equal(x[0, 0].flatten(), torch.arange(256) / 255)
    assert x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(labels=[torch.tensor([0, 1])]), "2 labels"),
        (dict(labels=[torch.tensor([0, 1, 7])]), "outside 0..1"),
        (
            dict(
                images=[torch.zeros(0, 1, 2, 2, dtype=torch.uint8)],
                labels=[torch.zeros(0, dtype=torch.int64)],
            ),
            "no images",
        ),
        (dict(domain_names=["a", "b"]), "differ in number"),
        (
            dict(
                domain_names=["a", "a"],
                images=[torch.zeros(3, 1, 2, 2, dtype=torch.uint8)] * 2,
                labels=[torch.tensor([0, 1, 0])] * 2,
            ),
            "same name",
        ),
        (
            dict(
                domain_names=["a", "b"],
                images=[
                    torch.zeros(3, 1, 2, 2, dtype=torch.uint8),
                    torch.zeros(3, 1, 4, 4, dtype=torch.uint8),
                ],
                labels=[torch.tensor([0, 1, 0])] * 2,
            ),
            "have shape \\(1, 4, 4\\)",
        ),
        *(
            (dict(images=[x]), f"images of domain 'a' are {said}. Fix: .*uint8 from 0 to 255, or")
            for x, said in (
                (torch.full((3, 1, 2, 2), 255_000), "torch.int64 .*from 255000 to 255000"),
                (torch.full((3, 1, 2, 2), 1.5), "torch.float32 .* to 1.5"),
                (torch.full((3, 1, 2, 2), -0.5), "torch.float32 .*to -0.5"),
                (torch.full((3, 1, 2, 2), torch.nan), "torch.float32 .*nan"),
                (torch.zeros(3, 1, 2, 2, dtype=torch.float64), "torch.float64 .*"),
                (torch.zeros(3, 2, 2, dtype=torch.uint8), r"torch.uint8 of shape \(3, 2, 2\) .*"),
            )
        ),
        (
            dict(labels=[torch.tensor([0.0, 1.0, 0.0])]),
            "labels of type torch.float32 .*Fix: give torch",
        ),
        (
            dict(labels=[torch.tensor([[0], [1], [0]])]),
            r"shape \(3, 1\). Fix: give torch.int64 labels, one for",
        ),
    ],
)
def test_ill_formed_data_is_refused(change, message):
    good = dict(
        name="d",
        domain_names=["a"],
        class_names=["n", "y"],
        images=[torch.zeros(3, 1, 2, 2, dtype=torch.uint8)],
        labels=[torch.tensor([0, 1, 0])],
    )
    MultiDomainDataset(**good)
    with pytest.raises(HmoeError, match=message):
        MultiDomainDataset(**(good | change))


def test_floats_from_0_to_1_are_taken_as_they_are():
    torch.manual_seed(0)
    x, y = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 0])
    data = MultiDomainDataset("d", ["a"], ["n", "y"], [x], [y])
    assert torch.equal(data.inputs(0, torch.arange(3)), x)
    assert torch.equal(data.pictures(0, torch.arange(3)), (255 * x).round().to(torch.uint8))
    halved = data.with_options(2).inputs(0, torch.arange(3))
    assert torch.allclose(halved.mean(), x.mean())
    assert halved.shape == (3, 1, 2, 2)


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(HmoeError, match="DigitDomains, DigitDomainsTiny"):
        load_dataset("PACSS")
    with pytest.raises(HmoeError, match="negative, photo, plain, sketch"):
        load_dataset("DigitDomainsTiny").domain_index("Sketch")


@pytest.mark.parametrize("name", [name for name, info in DATASETS.items() if not info.files])
def test_registry_agrees_with_the_data(name):
    data = load_dataset(name)
    assert tuple(data.domain_names) == DATASETS[name].domain_names
    assert data.name == name


def test_only_seeded_data_are_built_for_each_seed():
    """A study of three seeds loads the digits once; a partition that is drawn from the seed stays
    its own, whoever registered it."""
    built = []

    def entered(name, **info):
        @register_dataset(name, domain_names=("plain",), summary="a test", **info)
        def build(trial_seed, data_dir):
            built.append((name, trial_seed))
            return digit_domains(trial_seed, per_domain=5, name=name)

    try:
        entered("Given"), entered("Drawn", seeded=True)
        for name in ("Given", "Drawn"):
            for seed in (0, 1, 1):
                load_dataset(name, seed)
    finally:
        for name in ("Given", "Drawn"):
            DATASETS.pop(name, None)
        load_dataset.cache_clear()
    assert built == [("Given", 0), ("Drawn", 0), ("Drawn", 1)]


def test_images_of_any_memory_layout_train_and_leave_arrays(own_names, tmp_path):
    """A data set may keep its images channels last, as decoders give them."""

    @register_dataset("Last", domain_names=("negative", "plain", "sketch"), summary="a test")
    def build(trial_seed, data_dir):
        data = digit_domains(per_domain=20)
        kept = [0, 2, 3]
        images = [data.images[i].to(memory_format=torch.channels_last) for i in kept]
        labels = [data.labels[i] for i in kept]
        names = [data.domain_names[i] for i in kept]
        return MultiDomainDataset("Last", names, data.class_names, images, labels)

    made = make_config("HMOE-DN", "Last", ["plain"], network="small_cnn", steps=1)
    record = run(made, RunStore(tmp_path))
    assert record["status"] == "complete", record["reason"]
    assert (tmp_path / made.run_id / "arrays.safetensors").is_file()
