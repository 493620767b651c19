"""URM against both of its steps written out, image by image, with the same random numbers."""

import copy
import math

import pytest
import torch
from by_hand import (
    CLASSES,
    SHAPE,
    Adam,
    assert_resumes,
    assert_same_parameters,
    cross_entropy,
    draw,
    gradients,
    tiny,
)

from hmoe_repro.algorithms.anchors import URM
from hmoe_repro.algorithms.base import ERM
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.core.errors import HmoeError

WIDTH = 32  # of small_cnn, for which the discriminator is made


def discriminate(layers, z):
    "One logit per row: linear layers, with a leaky ReLU after each but the last."
    *hidden, last = [layer for layer in layers if hasattr(layer, "weight")]
    for layer in hidden:
        z = z @ layer.weight.T + layer.bias
        z = torch.where(z > 0, z, 0.01 * z)
    return (z @ last.weight.T + last.bias).flatten()


def binary(logits, targets):
    "Mean binary cross entropy of logits, one at a time."
    p = [1 / (1 + torch.exp(-logit)) for logit in logits]
    terms = [-t * torch.log(q) - (1 - t) * torch.log(1 - q) for q, t in zip(p, targets)]
    return sum(terms) / len(terms)


@pytest.mark.parametrize(
    "activation, hidden, smoothing", [("tanh", 1, 0.0), ("relu", 3, 0.2), ("sigmoid", 0, 0.1)]
)
def test_both_steps(activation, hidden, smoothing):
    fast = tiny(
        URM,
        features=WIDTH,
        weight_decay=0.01,
        urm_adv_lambda=0.3,
        urm_generator_output=activation,
        urm_discriminator_hidden_layers=hidden,
        urm_discriminator_label_smoothing=smoothing,
        urm_discriminator_lr=0.02,
    )
    sizes = [len(layer.bias) for layer in fast.discriminator if hasattr(layer, "bias")]
    assert sizes == [100] * (1 + hidden) + [1]
    slow = copy.deepcopy(fast)
    network = slow.network_parameters()
    adams = Adam(network, weight_decay=0.01), Adam(slow.discriminator.parameters(), 0.02, 0.01)
    f = {"tanh": torch.tanh, "relu": lambda z: z * (z > 0), "sigmoid": torch.sigmoid}[activation]
    lowest = -1 if activation == "tanh" else 0
    for t in range(5):
        minibatches = draw((4, 2, 5), t)
        x, y = (torch.cat(part) for part in zip(*minibatches))
        torch.manual_seed(t)
        z, n = f(slow.featurizer(x)), len(y)
        uniform, above, below = (
            torch.rand(*shape, dtype=torch.float64) for shape in ((n, WIDTH), (n,), (n,))
        )
        targets = 1 - smoothing + smoothing * above, smoothing * below
        nll = cross_entropy(slow.classifier(z), y)
        loss = nll + 0.3 * binary(discriminate(slow.discriminator, z), torch.ones(n))
        step = gradients(loss, network)
        noise = lowest + (1 - lowest) * uniform
        L_d = binary(discriminate(slow.discriminator, noise), targets[0])
        L_d = L_d + 0.3 * binary(discriminate(slow.discriminator, z.detach()), targets[1])
        adversary = gradients(L_d, slow.discriminator.parameters())
        adams[0].step(step), adams[1].step(adversary)

        torch.manual_seed(t)
        reported = fast.update(minibatches)
        for name, value in (("loss", loss), ("nll", nll), ("L_d", L_d)):
            assert math.isclose(reported[name], value.item(), rel_tol=1e-9), name
        assert_same_parameters(fast, slow)


def test_features_and_predictions_are_in_the_range_of_the_activation():
    (x, _), *_ = draw((6, 6), 0)
    for activation, lowest in (("tanh", -1), ("relu", 0), ("sigmoid", 0)):
        fast = tiny(URM, urm_generator_output=activation)
        fast.featurizer[1].weight.data *= 50
        z = fast.features(x)
        assert z.min() >= lowest
        assert torch.equal(fast.predict(x), fast.classifier(z))
        assert activation == "relu" or z.max() <= 1


def test_without_weight_the_adversary_only_watches():
    """At weight 0 the network is trained as ERM's would be behind the same activation."""
    fast = tiny(URM, features=WIDTH, urm_adv_lambda=0.0)
    alone = tiny(ERM, features=WIDTH)
    alone.load_state_dict(fast.state_dict(), strict=False)
    alone.featurizer.append(torch.nn.Tanh())
    before = copy.deepcopy(fast.discriminator)
    for t in range(3):
        assert fast.update(draw((4, 4), t))["loss"] == alone.update(draw((4, 4), t))["loss"]
    assert_same_parameters(fast.featurizer, alone.featurizer)
    assert not torch.equal(before[0].weight, fast.discriminator[0].weight)


def test_the_defaults_are_domainbeds():
    expected = {"urm_adv_lambda": 0.1, "urm_discriminator_label_smoothing": 0.0}
    expected |= {"urm_discriminator_hidden_layers": 1, "urm_generator_output": "tanh"}
    hparams = URM(SHAPE, CLASSES, 3, {"network": "small_cnn"}).hparams
    added = {name: hparams[name] for name in URM.HPARAMS if name not in ERM.HPARAMS}
    assert added == expected | {"urm_discriminator_lr": 1e-3}
    assert URM.HPARAMS["urm_discriminator_lr"].large_image_default == 5e-5
    assert not URM.needs_domain_labels
    assert URM.family == "anchors"


def test_resumed_from_a_file(tmp_path):
    assert_resumes(URM, tmp_path, urm_discriminator_label_smoothing=0.2)


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_conformance_of_other_activations(activation):
    check_algorithm(URM, hparams={"urm_generator_output": activation})


def test_refusals():
    for wrong in (
        {"urm_generator_output": "identity"},  # of no known range
        {"urm_discriminator_label_smoothing": 1.5},
        {"urm_discriminator_hidden_layers": -1},
    ):
        with pytest.raises(HmoeError, match=next(iter(wrong))):
            URM(SHAPE, CLASSES, 3, {"network": "small_cnn"} | wrong)
