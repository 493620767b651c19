"""ColoredMNIST and RotatedMNIST: the construction against a slow one written down separately, the
files, and what is said when they are missing or damaged."""

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import MultiDomainDataset
from hmoe_repro.data.mnist import (
    ANGLES,
    CUE_STRENGTHS,
    MNIST_MD5,
    SECOND_CUES,
    colored_domains,
    crossed_cues,
    embedded_digits,
    mnist_files,
    read_mnist,
    rotated_domains,
    verify_mnist,
)
from hmoe_repro.data.registry import DATASETS, load_dataset
from hmoe_repro.training.planning import data_seed, make_config
from hmoe_repro.training.protocols import run_seed

RAW = Path(os.environ.get("HMOE_DATA", "nowhere")).expanduser().absolute() / "MNIST" / "raw"
needs_mnist = pytest.mark.skipif(
    not (RAW / "train-images-idx3-ubyte").exists(), reason="MNIST is not here (HMOE_DATA)"
)


@pytest.fixture
def ink():
    digits = load_digits()
    return (digits.images * 15).astype(np.uint8), digits.target


def test_colored_domains_equal_a_loop_over_single_digits(ink):
    """Order of the draws: the permutation, then for each domain all label flips, then all colour
    flips, from one global stream."""
    images, labels = ink
    data = colored_domains("X", images, labels, 5)
    torch.manual_seed(5)
    order = torch.randperm(len(images))
    for d, flip in enumerate((0.1, 0.2, 0.9)):
        mine = order[d::3]
        label_draws, colour_draws = torch.rand(len(mine)), torch.rand(len(mine))
        for i in range(0, len(mine), 7):
            y = int(labels[mine[i]] < 5)
            if label_draws[i] < 0.25:
                y = 1 - y
            colour = 1 - y if colour_draws[i] < flip else y
            assert data.labels[d][i] == y
            assert data.factors["colour"][d][i] == colour
            assert data.factors["digit"][d][i] == labels[mine[i]]
            assert torch.equal(data.images[d][i, colour], torch.from_numpy(images[mine[i]]))
            assert data.images[d][i, 1 - colour].sum() == 0


def test_rotated_domains_turn_counter_clockwise_by_their_angle(ink):
    images, labels = ink
    data = rotated_domains("X", images, labels, 3)
    torch.manual_seed(3)
    order = torch.randperm(len(images))
    for d, angle in enumerate(ANGLES):
        i = int(order[d::6][4])
        assert np.array_equal(
            data.images[d][4, 0].numpy(),
            np.asarray(Image.fromarray(images[i]).rotate(angle, Image.BILINEAR)),
        )
        assert data.labels[d][4] == labels[i]
    bar = np.zeros((1, 28, 28), np.uint8)
    bar[0, 13:15, 16:26] = 255  # a stroke to the right of the centre
    from hmoe_repro.data.mnist import _turn

    turned = _turn(torch.from_numpy(bar), 75)[0, 0]
    assert turned[:12].sum() > 10 * turned[16:].sum(), "a stroke to the right must turn upwards"


def test_partition_follows_the_trial_seed_and_with_parity_the_run(ink):
    assert (
        load_dataset("ColoredDigits", 0).fingerprint != load_dataset("ColoredDigits", 1).fingerprint
    )
    same = {
        make_config(a, "ColoredDigits", ["-90%"], network="small_cnn").dataset_fingerprint
        for a in ("ERM", "HMOE-DN")
    }
    assert same == {load_dataset("ColoredDigits", 0).fingerprint}
    configs = [
        make_config(a, "ColoredDigits", ["-90%"], network="small_cnn", domainbed_compat=True)
        for a in ("ERM", "HMOE-DN")
    ]
    assert len({s.dataset_fingerprint for s in configs} | same) == 3
    run = configs[0].replace(trial_seed=1)
    assert data_seed(run) == run_seed("ColoredDigits", "ERM", [2], 1)


def test_factors_need_one_value_for_each_image():
    x, y = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0])
    with pytest.raises(HmoeError, match="'colour' does not have one value"):
        MultiDomainDataset("X", ["a"], ["0", "1"], [x], [y], factors={"colour": [y[:2]]})


@pytest.mark.parametrize("name", ["ColoredMNIST", "RotatedMNIST"])
def test_missing_files_are_one_clear_error(name, tmp_path):
    with pytest.raises(HmoeError) as caught:
        load_dataset(name, 0, str(tmp_path))
    text = str(caught.value)
    assert "train-images-idx3-ubyte" in text
    assert str(tmp_path / "MNIST" / "raw") in text
    assert "hmoe data download MNIST" in text
    assert "\n" not in text


def test_a_cut_file_is_named_and_not_used(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in MNIST_MD5:
        (raw / name).write_bytes(b"\0" * 100)
    with pytest.raises(
        HmoeError,
        match="train-images-idx3-ubyte is damaged: MD5 .* 6bbc9ace898e44ae57da46a324031adb",
    ):
        read_mnist(str(tmp_path))
    (raw / "train-images-idx3-ubyte").rename(raw / "kept")
    (raw / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0" * 100)[:20])
    with pytest.raises(HmoeError, match="cannot be read"):
        verify_mnist(str(tmp_path))


@needs_mnist
def test_real_mnist_plain_and_compressed(tmp_path):
    images, labels = read_mnist(str(RAW.parents[1]))
    assert images.shape == (70_000, 28, 28)
    assert np.bincount(labels).tolist() == [
        6903,
        7877,
        6990,
        7141,
        6824,
        6313,
        6876,
        7293,
        6825,
        6958,
    ]
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in MNIST_MD5:
        if "images" in name:
            shutil.copyfile(RAW / name, raw / name)
        else:
            (raw / f"{name}.gz").write_bytes(gzip.compress((RAW / name).read_bytes()))
    assert len(verify_mnist(str(tmp_path))) == 4
    assert {p.suffix for p in mnist_files(str(tmp_path)).values()} == {"", ".gz"}


@needs_mnist
def test_sizes_and_content_of_the_real_domains():
    """The fingerprints are those of the published runs; the sizes are DomainBed's."""
    folder = str(RAW.parents[1])
    colored, rotated = (
        load_dataset("ColoredMNIST", 0, folder),
        load_dataset("RotatedMNIST", 0, folder),
    )
    assert [len(y) for y in colored.labels] == [23_334, 23_333, 23_333]
    assert colored.input_shape == (2, 28, 28)
    assert [len(y) for y in rotated.labels] == [11_667] * 4 + [11_666] * 2
    assert rotated.input_shape == (1, 28, 28)
    assert (colored.fingerprint, rotated.fingerprint) == ("1bba2c3dd2e7", "0840380c4052")
    shares = [
        float((c == y).float().mean()) for c, y in zip(colored.factors["colour"], colored.labels)
    ]
    assert np.allclose(shares, [0.9, 0.8, 0.1], atol=0.01)


def test_twins_have_the_domains_of_the_originals():
    for twin, original in (("ColoredDigits", "ColoredMNIST"), ("RotatedDigits", "RotatedMNIST")):
        assert (
            DATASETS[twin].domain_names
            == DATASETS[original].domain_names
            == tuple(load_dataset(twin).domain_names)
        )
        assert not DATASETS[twin].files
        assert DATASETS[original].files == "MNIST"


# Crossed cues


@pytest.mark.parametrize("second", SECOND_CUES)
def test_crossed_bits_are_fair_and_independent_of_each_other_and_of_the_class(second):
    data = crossed_cues("X", *embedded_digits(), second=second)
    a, b = (torch.cat(data.factors[name][:4]) for name in ("hue", second))
    y = torch.cat(data.labels[:4])
    joint = np.array([[((a == i) & (b == j)).sum() for j in (0, 1)] for i in (0, 1)])
    assert np.ptp(joint) <= 5
    assert joint.sum() == len(y)
    for bit in (a, b):
        share = [float(bit[y == c].float().mean()) for c in range(10)]
        assert np.allclose(share, 0.5, atol=0.01)
    assert (
        data.factors["hue"][4].unique().tolist() == [2] == data.factors[second][4].unique().tolist()
    )
    used = torch.cat(data.source_index)
    assert len(used.unique()) == len(used) == 1797


def test_crossed_cues_are_what_their_strengths_say():
    """Colours by hand, and rotations by Pillow; digits of `between` are upright and green."""
    images, labels = embedded_digits()
    data = crossed_cues("X", images, labels, hue=2.0, strength=0.5)
    colours = {"0": (64, 255, 0), "1": (0, 255, 64)}
    for i, domain in enumerate(("00", "01", "10", "11")):
        index = int(data.source_index[i][3])
        angle = {"0": -11.25, "1": 11.25}[domain[1]]
        ink = np.asarray(Image.fromarray(images[index]).rotate(angle, resample=Image.BILINEAR))
        for channel, level in enumerate(colours[domain[0]]):
            expected = ink.astype(int) * level // 255
            assert np.array_equal(data.images[i][3, channel].numpy(), expected)
    ink = images[data.source_index[4].numpy()]
    assert np.array_equal(data.images[4][:, 1].numpy(), ink)
    assert data.images[4][:, [0, 2]].max() == 0


def test_strokes_grow_with_the_width():
    "By the mean ink, from thin over the middle to thick; at strength 2 thin is unchanged."
    images, labels = embedded_digits()
    for strength in CUE_STRENGTHS:
        data = crossed_cues("X", images, labels, second="width", strength=strength)
        green = [x[:, 1].float() for x in data.images]  # full in every hue at strength 1
        grown = []
        for x, hand in zip(green, data.source_index):
            grown.append(float(x.mean()) / float(images[hand.numpy()].mean()))
        assert 1 <= grown[0] < grown[4] < grown[1]
        assert np.allclose(grown[:2], grown[2:4], rtol=0.02)
    thin = data.source_index[0].numpy()
    assert np.array_equal(green[0].numpy(), images[thin])


def test_domains_by_the_second_cue_have_the_same_images():
    apart = crossed_cues("X", *embedded_digits())
    joined = crossed_cues("X", *embedded_digits(), by_second=True)
    assert joined.domain_names == ["0", "1", "between"]
    for domain, parts in enumerate(((0, 2), (1, 3), (4,))):
        expected = torch.cat([apart.images[i] for i in parts])
        assert torch.equal(joined.images[domain], expected)
        assert joined.factors["turn"][domain].unique().tolist() == [domain]


def test_crossed_cues_are_registered_for_each_pair_of_strengths():
    names = [name for name in DATASETS if name.startswith("CrossedHue")]
    assert len(names) == 2 * 2 * len(CUE_STRENGTHS) ** 2
    assert DATASETS["CrossedHue0.5Turn2"].files == "MNIST"
    assert DATASETS["CrossedHue0.5Width2ByWidth"].domain_names == ("0", "1", "between")
    assert DATASETS["CrossedDigits"].domain_names == ("00", "01", "10", "11", "between")


@needs_mnist
def test_crossed_cues_of_mnist_are_the_planned_ones():
    data = load_dataset("CrossedHue0.5Turn2", 0, str(RAW.parents[1]))
    assert data.fingerprint == "813e9bd11229"
    assert [len(y) for y in data.labels] == [3999, 4000, 4000, 4001, 4000]
