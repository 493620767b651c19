"""Where batch norm is live, CORAL, MMD, MTL, GroupDRO and Mixup make one pass for each domain or
pair, as in DomainBed; elsewhere one joint pass. Compared with batch norm written out, domain by
domain."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_alignment import coral_distance, mmd_distance
from torch import nn
from written_out import CLASSES, SHAPE, SMALL, follow, random_domains

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.tools import forward_parts, live_batch_norm
from hmoe_repro.core.seeds import seed_everything

SEPARATE = ("CORAL", "MMD", "MTL", "GroupDRO", "Mixup")
FEATURES = 32  # of small_cnn, for which the classifiers are made


def normed(name):
    "An algorithm in float64 whose featurizer has a batch norm, and an equal one to compute with."
    seed_everything(0)
    fast = get_algorithm(name)(SHAPE, CLASSES, 3, SMALL)
    fast.featurizer = nn.Sequential(
        nn.Flatten(), nn.Linear(192, FEATURES), nn.BatchNorm1d(FEATURES), nn.Tanh()
    )
    return fast.double().train(), copy.deepcopy(fast.double())


def alone(slow, x):
    "Features of x (B, C, H, W), centred and scaled by its own mean and variance."
    _, linear, norm, _ = slow.featurizer
    h = x.flatten(1) @ linear.weight.T + linear.bias
    centred = h - sum(h) / len(h)
    return torch.tanh(
        norm.weight * centred / (sum(centred**2) / len(h) + norm.eps).sqrt() + norm.bias
    )


def aligned(distance):
    def loss(slow, minibatches, t):
        z = [alone(slow, x) for x, _ in minibatches]
        nll = sum(F.cross_entropy(slow.classifier(f), y) for f, (_, y) in zip(z, minibatches)) / 3
        return nll + (distance(z[0], z[1]) + distance(z[0], z[2]) + distance(z[1], z[2])) / 3

    return loss


def mtl():
    stored = [0, 0, 0]

    def loss(slow, minibatches, t):
        total = 0
        for i, (x, y) in enumerate(minibatches):
            z = alone(slow, x)
            e = 0.99 * z.mean(0) + 0.01 * stored[i]
            stored[i] = e.detach()
            total = total + F.cross_entropy(slow.classifier(torch.cat([z, e.expand_as(z)], 1)), y)
        return total

    return loss


def groupdro():
    q = torch.ones(3, dtype=torch.float64) / 3

    def loss(slow, minibatches, t):
        losses = [F.cross_entropy(slow.classifier(alone(slow, x)), y) for x, y in minibatches]
        for i in range(3):
            q[i] *= torch.exp(0.01 * losses[i].detach())
        q.div_(q.sum())
        return sum(q[i].item() * losses[i] for i in range(3))

    return loss


def mixup(slow, minibatches, t):
    seed_everything(t)
    order, total = torch.randperm(3).tolist(), 0
    lams = np.random.beta(0.2, 0.2, 3)
    for k in range(3):
        (x, y), (x_2, y_2), lam = minibatches[order[k]], minibatches[order[(k + 1) % 3]], lams[k]
        logits = slow.classifier(alone(slow, lam * x + (1 - lam) * x_2))
        total = total + lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y_2)
    seed_everything(t)  # the update that follows makes the same draws
    return total / 3


@pytest.mark.parametrize("name", SEPARATE)
def test_live_each_domain_or_pair_is_normalised_by_itself(name):
    slow_loss = {
        "CORAL": aligned(coral_distance),
        "MMD": aligned(mmd_distance),
        "MTL": mtl(),
        "GroupDRO": groupdro(),
        "Mixup": mixup,
    }[name]
    follow(*normed(name), slow_loss, [random_domains(t) for t in range(3)])


def passes(algorithm, batches):
    "How many times an update calls the featurizer, and with how many images."
    seen = []
    hook = algorithm.featurizer.register_forward_pre_hook(
        lambda module, given: seen.append(len(given[0]))
    )
    algorithm.update(batches)
    hook.remove()
    return seen


JOINT = """
    ERM IRM VREx Fishr RSC DANN CDANN SD IB-ERM IB-IRM CAD CondCAD RDM SelfReg TRM URM
""".split()


@pytest.mark.parametrize("name", [*SEPARATE, "CausIRL-CORAL", "CausIRL-MMD", "EQRM", *JOINT])
def test_passes_are_those_of_domainbed_where_it_matters_and_joint_elsewhere(name):
    algorithm, frozen = normed(name)
    assert passes(algorithm, random_domains(0)) == ([15] if name in JOINT else [5, 5, 5])
    frozen.featurizer.eval()
    assert passes(frozen, random_domains(0)) == [15]


@pytest.mark.parametrize("name", ["ANDMask", "SANDMask", "IGA"])
def test_gradients_of_domains_are_of_passes_of_their_own(name):
    for algorithm in normed(name):
        assert passes(algorithm, random_domains(0)) == [5, 5, 5]


def test_transfer_passes_all_images_and_then_each_domain_before_and_after_its_step():
    assert passes(normed("Transfer")[0], random_domains(0)) == [15, *[5] * 6]


@pytest.mark.parametrize("name", SEPARATE)
def test_frozen_the_joint_pass_is_the_pass_per_domain(name):
    "And the statistics of a frozen norm stay where they are."
    algorithm, slow = normed(name)
    for model in (algorithm, slow):
        model.featurizer.eval()
    before = copy.deepcopy(algorithm.featurizer[2].running_mean)
    parts = [x for x, _ in random_domains(0)]
    joint = forward_parts(algorithm.featurizer, parts)
    assert torch.equal(joint, algorithm.featurizer(torch.cat(parts)))
    torch.testing.assert_close(joint, torch.cat([slow.featurizer(x) for x in parts]))
    algorithm.update(random_domains(0))
    assert torch.equal(algorithm.featurizer[2].running_mean, before)


def test_which_batch_norm_is_live():
    norm = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert live_batch_norm(norm)
    assert not live_batch_norm(norm.eval())
    assert live_batch_norm(nn.BatchNorm2d(4, track_running_stats=False).eval()), (
        "it has nothing but the batch"
    )
    for other in (
        nn.GroupNorm(1, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.LayerNorm(4),
        nn.Dropout(),
    ):
        assert not live_batch_norm(other)


def test_a_resnet_with_random_weights_is_live_and_one_with_frozen_norms_is_not():
    make = lambda freeze: get_algorithm("CORAL")(
        (3, 32, 32), CLASSES, 3, {"network": "resnet18", "weights": "random", "freeze_bn": freeze}
    ).train()
    assert live_batch_norm(make("auto"))
    assert not live_batch_norm(make("yes"))
