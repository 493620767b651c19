"""Parameter counts of the papers, shapes, and independence of the images in a batch."""
import pytest
import torch

from hmoe_repro.core import HmoeError
from hmoe_repro.networks import ENCODERS, FEATURIZERS, ConvNet, ImageD2V, SmallD2V, make_classifier, make_encoder, make_featurizer


def count(module): return sum(p.numel() for p in module.parameters())


def test_paper_counts():
    assert count(ImageD2V(3, 32)) == 3_095_904
    convolutions = 640 + 73_856 + 147_584 + 147_584  # 1-64-128-128-128, 3x3, with bias
    assert count(ConvNet(1, 64)) == convolutions + 2 * (64 + 3 * 128)
    assert count(SmallD2V(1, 32)) == 320 + 9_248 + 1_056
    assert count(make_classifier(2048, 7)) == 2049 * 7


def test_image_encoder_keeps_28_positions_at_224():
    assert ImageD2V(3, 8).layers(torch.rand(1, 3, 224, 224)).shape == (1, 8, 28, 28)


@pytest.mark.parametrize("make", [lambda: make_featurizer("small_cnn", (3, 16, 16)), lambda: make_encoder("small", (3, 16, 16), stride=2), lambda: make_encoder("image", (3, 16, 16))])
def test_images_of_a_batch_do_not_mix(make):
    torch.manual_seed(0)
    net, x = make(), torch.rand(6, 3, 16, 16)
    torch.testing.assert_close(net(x)[2:3], net(x[2:3]), rtol=1e-4, atol=1e-5)


def test_order_is_convolution_relu_norm():
    """Group norm last: every group of an image's last feature map has mean 0 before the average over positions."""
    torch.manual_seed(0)
    net, caught = ConvNet(3, 16), []
    net.norms[-1].register_forward_hook(lambda module, given, out: caught.append((given[0], out)))
    net(torch.rand(2, 3, 16, 16))
    given, out = caught[0]
    assert given.min() == 0 and out.min() < 0
    assert out.reshape(2, 8, -1).mean(-1).abs().max() < 1e-5


def test_unknown_names_and_small_images_are_refused():
    with pytest.raises(HmoeError, match="mnist_cnn, small_cnn"): make_featurizer("cnn", (3, 16, 16))
    with pytest.raises(HmoeError, match="small, image"): make_encoder("big", (3, 16, 16))
    with pytest.raises(HmoeError, match="16 pixels"): make_encoder("image", (3, 8, 8))
    assert set(FEATURIZERS) == {"mnist_cnn", "small_cnn"} and set(ENCODERS) == {"small", "image"}
