"""MixStyle, EFDMix, CutMix, Mixup inside a domain, RIDG and LFME against updates written out in
loops over images and channels, and the hooks that mix styles for one pass only."""

import copy

import by_hand
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from written_out import build, random_domains

from hmoe_repro.algorithms import MEMBERS, get_algorithm
from hmoe_repro.algorithms.anchors import LFME
from hmoe_repro.algorithms.base import ALGORITHMS, ERM
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.algorithms.hparams import merge_hparams
from hmoe_repro.algorithms.invariance import RIDG
from hmoe_repro.algorithms.style import (
    CutMix,
    EFDMix,
    IntraDomainMixup,
    MixStyle,
    choose_stages,
    mix_distributions,
    mix_statistics,
    on_positions,
    random_box,
    stage_paths,
    style_partners,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.networks.precision import set_precision

INSIDE = (MixStyle, EFDMix)
ALL = (*INSIDE, CutMix, IntraDomainMixup, RIDG, LFME)
EACH = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
EACH_INSIDE = pytest.mark.parametrize("cls", INSIDE, ids=lambda cls: cls.name)
SHAPE, SMALL = ((3, 16, 16), 4, 3), {"network": "small_cnn"}


def follow(fast, slow, loss_of, sizes=(4, 3, 5), updates=3):
    "Updates of `fast`, and the same by `loss_of(slow, batches)` and Adam, with the same draws."
    parameters = list(slow.parameters())
    adam = by_hand.Adam(parameters, lr=fast.hparams["lr"])
    for t in range(updates):
        batches = random_domains(t, sizes)
        seed_everything(20 + t)
        reported = fast.update(batches)["loss"]
        seed_everything(20 + t)
        loss = loss_of(slow, batches)
        assert reported == pytest.approx(loss.item(), rel=1e-9)
        adam.step(by_hand.gradients(loss, parameters))
        by_hand.assert_same_parameters(fast, slow, tolerance=1e-9)


def together(batches):
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


# Styles by hand


def statistics_by_hand(values):
    "The mean and the deviation of a list of numbers."
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, (variance + 1e-6) ** 0.5


def mixstyle_by_hand(x, partner, lam):
    "Image by image and channel by channel."
    rows = []
    for b, maps in enumerate(x):
        for channel, values in enumerate(maps):
            mean, std = statistics_by_hand(values.flatten().tolist())
            mean_2, std_2 = statistics_by_hand(x[partner[b], channel].flatten().tolist())
            weight = lam[b]
            content = (values - mean) / std
            rows.append(
                content * (weight * std + (1 - weight) * std_2)
                + weight * mean
                + (1 - weight) * mean_2
            )
    return torch.stack(rows).view(x.shape)


def efdmix_by_hand(x, partner, lam):
    "Rank by rank: Python sorts stably."
    rows = []
    for b, maps in enumerate(x):
        for channel, values in enumerate(maps):
            own = values.flatten()
            other = x[partner[b], channel].flatten()
            of_own = sorted(range(len(own)), key=own.tolist().__getitem__)
            of_other = sorted(range(len(own)), key=other.tolist().__getitem__)
            mixed = [None] * len(own)
            for i, j in zip(of_own, of_other):
                mixed[i] = own[i] + (1 - lam[b]) * (other[j] - own[i].detach())
            rows.append(torch.stack(mixed))
    return torch.stack(rows).view(x.shape)


BY_HAND = {MixStyle: mixstyle_by_hand, EFDMix: efdmix_by_hand}


def partners_by_hand(sizes, mix):
    "As documented, with the same draws: the next domain of a random cycle, shuffled."
    if mix == "random":
        return torch.randperm(sum(sizes)).tolist()
    cycle, found = torch.randperm(len(sizes)).tolist(), {}
    for k, i in enumerate(cycle):
        j = cycle[(k + 1) % len(cycle)]
        order = torch.randperm(sizes[j]).tolist()
        found[i] = [sum(sizes[:j]) + order[n % sizes[j]] for n in range(sizes[i])]
    return [n for i in range(len(sizes)) for n in found[i]]


def styled_loss(cls, stages, p, alpha, mix):
    "The cross entropy of a ConvNet whose stages (numbers) mix by hand."

    def loss(model, batches):
        x, y = together(batches)
        network = model.featurizer
        for stage, (convolution, norm) in enumerate(zip(network.convolutions, network.norms)):
            x = norm(F.relu(convolution(x)))
            if stage in stages and torch.rand(()).item() < p:
                partner = partners_by_hand([len(y) for _, y in batches], mix)
                lam = np.random.beta(alpha, alpha, len(x)).tolist()
                x = BY_HAND[cls](x, partner, lam)
        return by_hand.cross_entropy(model.classifier(x.mean((2, 3))), y)

    return loss


@EACH_INSIDE
@pytest.mark.parametrize("mix", ["random", "crossdomain"])
@pytest.mark.parametrize(
    "stages, p", [((), 0.5), (("conv1",), 1.0), (("conv4", "conv2"), 0.7)], ids=str
)
def test_an_update_with_mixed_styles_by_hand(cls, mix, stages, p):
    settings = {"style_mix": mix, "style_stages": list(stages), "style_p": p, "style_alpha": 0.4}
    fast, slow = build(cls, settings)
    numbers = [int(stage[-1]) - 1 for stage in stages] or [0, 1]
    follow(fast, slow, styled_loss(cls, numbers, p, 0.4, mix))


@EACH_INSIDE
def test_mixing_by_hand_and_at_its_ends(cls):
    mix = mix_statistics if cls is MixStyle else mix_distributions
    z = torch.randn(5, 12, 3, dtype=torch.float64, requires_grad=True)
    partner = torch.tensor([2, 1, 0, 4, 3])
    lam = torch.rand(5, 1, 1, dtype=torch.float64)
    maps = z.mT.reshape(5, 3, 3, 4)
    expected = BY_HAND[cls](maps, partner.tolist(), lam.flatten().tolist()).flatten(2).mT
    found = mix(z, partner, lam)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), z) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mix(z, partner, torch.ones_like(lam)), z)
    torch.testing.assert_close(found[1], z[1])  # its own partner
    other = mix(z, partner, torch.zeros_like(lam))
    if cls is EFDMix:
        sorted_values = other.sort(1).values
        torch.testing.assert_close(sorted_values, z[partner].sort(1).values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other.mean(1), z[partner].mean(1))
    torch.testing.assert_close(other.std(1), z[partner].std(1), rtol=1e-4, atol=1e-5)


def test_equal_values_are_ranked_by_position():
    z = torch.zeros(2, 6, 1)
    z[1, :, 0] = torch.tensor([5.0, 0, 3, 1, 2, 4])
    found = mix_distributions(z, torch.tensor([1, 0]), torch.zeros(2, 1, 1))
    assert found[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("sizes", [(4, 4), (3, 5, 2), (1, 7, 3), (6,)], ids=str)
def test_partners(sizes):
    domain = np.repeat(np.arange(len(sizes)), sizes)
    for seed in range(20):
        seed_everything(seed)
        shuffled = style_partners([*sizes])
        assert sorted(shuffled.tolist()) == [*range(sum(sizes))]
        seed_everything(seed)
        of_others = style_partners([*sizes], "crossdomain").numpy()
        seed_everything(seed)
        assert of_others.tolist() == partners_by_hand([*sizes], "crossdomain")
        if len(sizes) > 1:
            assert (domain[of_others] != domain).all()
        for i in range(len(sizes)):
            (other,) = {*domain[of_others[domain == i]]}  # one domain
            used = of_others[domain == i]
            assert len({*used}) == min(sizes[i], sizes[other])


# Images by hand


def cutmix_by_hand(alpha, p):
    def loss(model, batches):
        x, y = together(batches)
        if torch.rand(()).item() >= p:
            return by_hand.cross_entropy(model.predict(x), y)
        partner = torch.randperm(len(y)).tolist()
        side = (1 - np.random.beta(alpha, alpha)) ** 0.5
        limits = []
        for pixels in x.shape[2:]:
            half = int(pixels * side) // 2
            centre = np.random.randint(pixels)
            limits.append((centre - half, centre + half))
        cut, pasted = x.clone(), 0
        for i in range(x.shape[2]):
            for j in range(x.shape[3]):
                if limits[0][0] <= i < limits[0][1] and limits[1][0] <= j < limits[1][1]:
                    pasted += 1
                    for b in range(len(x)):
                        cut[b, :, i, j] = x[partner[b], :, i, j]
        kept = 1 - pasted / (x.shape[2] * x.shape[3])
        logits = model.predict(cut)
        other = torch.stack([y[b] for b in partner])
        return kept * by_hand.cross_entropy(logits, y) + (1 - kept) * by_hand.cross_entropy(
            logits, other
        )

    return loss


@pytest.mark.parametrize("alpha, p", [(1.0, 1.0), (0.3, 0.5)])
def test_an_update_of_cutmix_by_hand(alpha, p):
    fast, slow = build(CutMix, {"cutmix_alpha": alpha, "cutmix_p": p})
    follow(fast, slow, cutmix_by_hand(alpha, p), updates=5)


def test_an_update_of_mixup_inside_domains_by_hand():
    fast, slow = build(IntraDomainMixup, {"mixup_alpha": 0.7})

    def loss(model, batches):
        total = 0
        for x, y in batches:
            partner = torch.randperm(len(y)).tolist()
            lam = np.random.beta(0.7, 0.7)
            mixture = torch.stack([lam * x[b] + (1 - lam) * x[partner[b]] for b in range(len(x))])
            logits = model.predict(mixture)
            other = torch.stack([y[b] for b in partner])
            total = total + lam * by_hand.cross_entropy(logits, y)
            total = total + (1 - lam) * by_hand.cross_entropy(logits, other)
        return total / len(batches)

    follow(fast, slow, loss)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999, 1.0])
def test_boxes_are_inside_and_no_larger_than_asked(kept):
    for seed in range(200):
        np.random.seed(seed)
        rows, columns = random_box(9, 16, kept)
        assert 0 <= rows.start <= rows.stop <= 9
        assert 0 <= columns.start <= columns.stop <= 16
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        assert area <= (1 - kept) * 9 * 16 + 1e-9
        if kept == 1.0:
            assert area == 0


def test_cutmix_leaves_the_batch_of_the_caller_alone():
    model = CutMix(*SHAPE, SMALL)
    batches = random_batches(3, SHAPE[0], 4, 0)
    before = [x.clone() for x, _ in batches]
    for seed in range(5):
        seed_everything(seed)
        model.update(batches)
    assert all(torch.equal(x, old) for (x, _), old in zip(batches, before))


# RIDG by hand


def ridg_by_hand(momentum, strength):
    means = {}

    def loss(model, batches):
        x, y = together(batches)
        z = model.featurizer(x)
        total = by_hand.cross_entropy(model.classifier(z), y)
        for k in sorted({*y.tolist()}):
            members = [n for n in range(len(y)) if y[n] == k]
            rationales = []
            for n in members:
                rows = [model.classifier.weight[c] * z[n] for c in range(4)]
                rationales.append(torch.stack(rows))
            newest = sum(each.detach() for each in rationales) / len(members)
            means[k] = (1 - momentum) * means.get(k, newest) + momentum * newest
            distance = sum(((each - means[k]) ** 2).sum() for each in rationales)
            total = total + strength * distance / (len(members) * 4)
        return total

    loss.means = means
    return loss


def test_an_update_of_ridg_by_hand():
    "A class that is absent at first gets its mean from its first batch, the others keep theirs."
    fast, slow = build(RIDG, {"ridg_momentum": 0.3, "ridg_reg": 0.7})
    loss_of = ridg_by_hand(0.3, 0.7)
    parameters = list(slow.parameters())
    adam = by_hand.Adam(parameters, lr=fast.hparams["lr"])
    for t, labels in enumerate(([0, 1], [1], [0, 2, 3], [1, 3])):
        batches = random_domains(t, (4, 3, 5), labels)
        loss = loss_of(slow, batches)
        assert fast.update(batches)["loss"] == pytest.approx(loss.item(), rel=1e-9)
        adam.step(by_hand.gradients(loss, parameters))
        by_hand.assert_same_parameters(fast, slow, tolerance=1e-9)
        for k, mean in loss_of.means.items():
            torch.testing.assert_close(fast.means[k], mean, rtol=1e-9, atol=1e-9)
        assert fast.seen.nonzero().flatten().tolist() == sorted(loss_of.means)


def test_ridg_needs_a_linear_classifier():
    with pytest.raises(HmoeError, match="RIDG multiplies.*nonlinear_classifier=false"):
        RIDG(*SHAPE, SMALL | {"nonlinear_classifier": True})


def test_ridg_without_weight_is_erm():
    fast, slow = build(RIDG, {"ridg_reg": 0.0}), build(ERM)
    for t in range(3):
        losses = [model.update(random_domains(t))["loss"] for model in (fast[0], slow[0])]
        assert losses[0] == losses[1]
    by_hand.assert_same_parameters(fast[0], slow[0])


# LFME by hand


def test_an_update_of_lfme_by_hand():
    "With an Adam for each network, as in the released code."
    fast, slow = build(LFME, {"lfe_reg": 0.7, "weight_decay": 0.1})
    groups = [list(expert.parameters()) for expert in slow.experts]
    groups.append([*slow.featurizer.parameters(), *slow.classifier.parameters()])
    adams = [by_hand.Adam(group, lr=1e-3, weight_decay=0.1) for group in groups]
    for t in range(4):
        batches = random_domains(t, (4, 3, 5))
        rows, total = [], 0
        for expert, adam, (x, y) in zip(slow.experts, adams, batches):
            logits = expert(x)
            loss = by_hand.cross_entropy(logits, y)
            total += loss.item()
            adam.step(by_hand.gradients(loss, adam.parameters))
            rows += [row.detach().exp() / row.detach().exp().sum() for row in logits]
        x, y = together(batches)
        logits = slow.predict(x)
        differences = [(a - b) ** 2 for a, b in zip(logits, rows, strict=True)]
        guidance = sum(each.sum() for each in differences) / (len(y) * 4)
        nll = by_hand.cross_entropy(logits, y)
        adams[-1].step(by_hand.gradients(nll + 0.7 * guidance, adams[-1].parameters))
        reported = fast.update(batches)
        assert reported["nll"] == pytest.approx(nll.item(), rel=1e-9)
        assert reported["guidance"] == pytest.approx(guidance.item(), rel=1e-9)
        assert reported["experts"] == pytest.approx(total, rel=1e-9)
        assert reported["loss"] == pytest.approx(nll.item() + 0.7 * guidance.item() + total)
        by_hand.assert_same_parameters(fast, slow, tolerance=1e-9)


def test_lfme_predicts_without_its_experts():
    model = LFME(*SHAPE, SMALL)
    x = torch.rand(2, 3, 16, 16)
    before = model.predict(x)
    with torch.no_grad():
        for p in model.experts.parameters():
            p.zero_()
    assert torch.equal(model.predict(x), before)


# Hooks for one pass


def hooks_of(model):
    return [module for module in model.modules() if module._forward_hooks]


@EACH_INSIDE
def test_hooks_do_not_outlive_a_loss_not_even_a_failing_one(cls):
    model = cls(*SHAPE, SMALL | {"style_p": 1.0})
    batches = random_batches(3, SHAPE[0], 4, 0)
    inside = []
    model.featurizer.register_forward_pre_hook(lambda *_: inside.append(len(hooks_of(model))))
    model.update(batches)
    assert inside == [2]
    assert not hooks_of(model)

    def fail(*given):
        raise RuntimeError("out of memory")

    model.mixed = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        model.update(batches)
    assert not hooks_of(model)


@EACH_INSIDE
def test_evaluation_is_that_of_erm_and_draws_nothing(cls):
    model, plain = cls(*SHAPE, SMALL | {"style_p": 1.0}), ERM(*SHAPE, SMALL)
    for step in range(2):
        model.update(random_batches(3, SHAPE[0], 4, step))
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict())
    batches = random_batches(3, SHAPE[0], 4, 9)
    x, _ = together(batches)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for mode in (True, False):
        assert torch.equal(model.train(mode).predict(x), plain.predict(x))
    assert model.loss(batches)["loss"] == plain.loss(batches)["loss"]
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert model.train().loss(batches)["loss"] != plain.loss(batches)["loss"]


@EACH_INSIDE
def test_probability_zero_is_erm(cls):
    models = cls(*SHAPE, SMALL | {"style_p": 0.0}), ERM(*SHAPE, SMALL)
    models[1].load_state_dict(models[0].state_dict())
    for step in range(3):
        losses = [model.update(random_batches(3, SHAPE[0], 4, step)) for model in models]
        assert losses[0] == losses[1]


@EACH_INSIDE
def test_copies_train_alike(cls):
    model = cls(*SHAPE, SMALL)
    model.update(random_batches(3, SHAPE[0], 4, 0))
    twin = copy.deepcopy(model)
    losses = []
    for each in (model, twin):
        seed_everything(3)
        losses.append([each.update(random_batches(3, SHAPE[0], 4, t)) for t in range(3)])
    assert losses[0] == losses[1]


# Networks


NETWORKS = {
    "mnist_cnn": 16,
    "image_cnn": 32,
    "resnet18": 64,
    "alexnet": 96,
    "small_vit": 16,
    "gmoe_small": 16,
    "efficientnet_lite0": 64,
    "timm:resnet10t": 64,
    "timm:test_vit": 160,
}


@EACH_INSIDE
@pytest.mark.parametrize("network", NETWORKS)
def test_every_kind_of_network_mixes_at_its_stages(network, cls):
    settings = {"network": network, "style_p": 1.0, "style_alpha": 1.0}
    small = network.endswith(("_cnn", "_vit", "_small")) and ":" not in network
    settings |= {} if small else {"weights": "random"}
    side = NETWORKS[network]
    seed_everything(0)
    model = cls((3, side, side), 4, 3, settings)
    names = [*stage_paths(network)]
    assert len(names) >= 4
    for path in stage_paths(network).values():
        model.featurizer.get_submodule(path)
    calls = []
    inner = model.mixed
    model.mixed = lambda z, *given: calls.append(z.shape) or inner(z, *given)
    model.update(random_batches(3, (3, side, side), 4, 0, size=2))
    assert len(calls) == 2
    assert all(shape[0] == 6 for shape in calls)
    prefix = getattr(getattr(model.featurizer, "body", None), "num_prefix_tokens", 0)
    if prefix:
        sides = model.featurizer.body.patch_embed.grid_size
        assert calls[0][1] == sides[0] * sides[1]  # without the class token
    assert not hooks_of(model)


def test_tokens_without_a_position_stay_and_layouts_agree():
    mix = lambda z: z + 1  # noqa: E731
    tokens = torch.zeros(2, 5, 3)
    assert on_positions(mix, tokens, prefix=2).sum((0, 2)).tolist() == [0, 0, 6, 6, 6]
    maps = torch.randn(2, 3, 4, 5)
    ranked = lambda z: z.cumsum(1)  # noqa: E731 - depends on the order of positions
    found = on_positions(ranked, maps)
    expected = maps.flatten(2).cumsum(2).view_as(maps)
    torch.testing.assert_close(found, expected)
    last = on_positions(ranked, maps.permute(0, 2, 3, 1), channels_last=True)
    torch.testing.assert_close(last.permute(0, 3, 1, 2), expected)
    half = on_positions(lambda z: z.double().float(), maps.bfloat16())
    assert half.dtype is torch.bfloat16
    with pytest.raises(HmoeError, match="single position"):
        on_positions(mix, torch.zeros(2, 3, 1, 1))


@EACH_INSIDE
def test_bf16_trains(cls):
    model = cls(*SHAPE, SMALL | {"style_p": 1.0})
    set_precision(model, "bf16")
    assert np.isfinite(model.update(random_batches(3, SHAPE[0], 4, 0))["loss"])


def test_what_a_hook_cannot_reach_is_refused():
    model = MixStyle(*SHAPE, SMALL)
    set_precision(model, "float32-compile")
    with pytest.raises(HmoeError, match="compiled network does not see.*precision float32"):
        model.update(random_batches(3, SHAPE[0], 4, 0))
    settings = {"network": "efficientnet_lite0", "grad_checkpointing": True, "weights": "random"}
    with pytest.raises(HmoeError, match="grad_checkpointing=false"):
        EFDMix((3, 64, 64), 4, 3, settings)


@pytest.mark.parametrize(
    "stages, frozen, said",
    [
        (["conv9"], 0, "unknown stage of small_cnn 'conv9'.*conv1, conv2, conv3, conv4"),
        (["conv1", "conv1"], 0, "must be different, got conv1, conv1"),
        (["conv1"], "all", "all stages of small_cnn are frozen.*IntraDomainMixup"),
        (["conv1", "conv3"], 3, "conv1 of small_cnn lie inside its 3 frozen.*Valid: conv3, conv4"),
    ],
)
def test_stages_that_cannot_mix_are_refused(stages, frozen, said):
    with pytest.raises(HmoeError, match=said):
        choose_stages("small_cnn", stages, frozen)


def test_what_is_no_map_is_refused():
    model = MixStyle(*SHAPE, SMALL | {"style_p": 1.0})
    for output in (torch.rand(4, 3), (torch.rand(4, 3, 2, 2), None)):
        with pytest.raises(HmoeError, match="neither maps nor tokens"):
            model.mix_batch(torch.zeros(2, 4), output)
    with pytest.raises(HmoeError, match="timm has no network 'no_such_network'"):
        stage_paths("timm:no_such_network")


LITE = {"network": "efficientnet_lite0", "weights": "random", "frozen_stages": 3}


@EACH_INSIDE
def test_the_output_of_the_last_frozen_stage_is_mixed_on_images_and_on_rows(cls):
    settings = LITE | {"style_stages": ["blocks.2", "blocks.4"], "style_p": 1.0}
    seed_everything(0)
    model = cls((3, 64, 64), 4, 3, settings).train()
    assert model.style_modules()[0] is model.featurizer.frozen
    images = random_batches(3, (3, 64, 64), 4, 0, size=3)
    frozen = model.featurizer.frozen
    rows = []
    for x, y in images:
        maps = frozen(x)
        rows.append((maps.permute(0, 2, 3, 1).flatten(1), y))
    frozen.columns = slice(0, rows[0][0].shape[1])
    losses = []
    for batches in (images, rows):
        seed_everything(1)
        losses.append(model.loss(batches)["loss"].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    plain = ERM.loss(model, images)["loss"].item()
    assert losses[0] != pytest.approx(plain, rel=1e-4)


def test_frozen_stages_are_refused_in_planning():
    from hmoe_repro.algorithms.style import StyleMixing

    defaults = merge_hparams(StyleMixing.HPARAMS, {}) | LITE
    with pytest.raises(HmoeError, match="blocks.0, blocks.1 of efficientnet_lite0 lie inside"):
        MixStyle.check_domains(3, defaults)
    with pytest.raises(HmoeError, match="CutMix cuts images anew.*IntraDomainMixup"):
        CutMix.check_domains(3, merge_hparams(CutMix.HPARAMS, {}) | LITE)


# All together


@EACH
def test_conformance_resuming_and_one_domain(cls, tmp_path):
    check_algorithm(cls, num_domains=1)
    by_hand.assert_resumes(cls, tmp_path)


@pytest.mark.parametrize(
    "name", ["SAM+MixStyle", "ASAM+EFDMix", "DISAM+CutMix", "SAM+RIDG", "GSAM+LFME"]
)
def test_combinations_with_a_second_gradient(name, tmp_path):
    check_algorithm(get_algorithm(name))
    by_hand.assert_resumes(get_algorithm(name), tmp_path)


def test_sam_on_mixed_styles_by_hand():
    "Both passes mix, with draws of their own."
    fast, slow = build(get_algorithm("SAM+MixStyle"), {"rho": 0.3, "style_alpha": 0.4})
    loss_of = styled_loss(MixStyle, [0, 1], 0.5, 0.4, "random")
    parameters = list(slow.parameters())
    adam = by_hand.Adam(parameters, lr=fast.hparams["lr"])
    for t in range(3):
        batches = random_domains(t, (4, 3, 5))
        seed_everything(30 + t)
        reported = fast.update(batches)
        seed_everything(30 + t)
        loss = loss_of(slow, batches)
        g = by_hand.gradients(loss, parameters)
        length = sum((each**2).sum() for each in g) ** 0.5
        weights = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, each in zip(parameters, g):
                p += 0.3 * each / length
        perturbed = loss_of(slow, batches)
        g_p = by_hand.gradients(perturbed, parameters)
        with torch.no_grad():
            for p, w in zip(parameters, weights):
                p.copy_(w)
        adam.step(g_p)
        assert reported["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert reported["perturbed_loss"] == pytest.approx(perturbed.item(), rel=1e-9)
        by_hand.assert_same_parameters(fast, slow, tolerance=1e-9)


@pytest.mark.parametrize("name", ["MixStyle", "EFDMix", "CutMix", "RIDG", "LFME", "SAM+MixStyle"])
def test_a_stopped_run_resumes_bitwise(name, tmp_path):
    by_hand.stopped_and_resumed(name, tmp_path)


def test_registered_with_their_defaults():
    assert set(MEMBERS["style"]) == {cls.name for cls in ALL} - {"RIDG", "LFME"}
    assert all(ALGORITHMS[cls.name] is cls for cls in ALL)
    labelled = {cls.name for cls in ALL if cls.needs_domain_labels}
    assert labelled == {"IntraDomainMixup", "LFME"}
    added = lambda cls: {  # noqa: E731
        name: merge_hparams(cls.HPARAMS, {})[name] for name in cls.HPARAMS.keys() - ERM.HPARAMS
    }
    styles = {"style_alpha": 0.1, "style_p": 0.5, "style_mix": "random", "style_stages": ()}
    assert added(MixStyle) == added(EFDMix) == styles
    assert added(CutMix) == {"cutmix_alpha": 1.0, "cutmix_p": 1.0}
    assert added(IntraDomainMixup) == {"mixup_alpha": 0.2}
    assert added(RIDG) == {"ridg_reg": 0.01, "ridg_momentum": 0.001}
    assert added(LFME) == {"lfe_reg": 1.0}
    for bad in ({"style_p": 1.5}, {"style_alpha": 0.0}, {"style_mix": "none"}):
        with pytest.raises(HmoeError):
            MixStyle(*SHAPE, SMALL | bad)


def test_a_network_with_own_hooks_keeps_them():
    class Counted(nn.Identity):
        pass

    model = MixStyle(*SHAPE, SMALL | {"style_p": 1.0})
    seen = []
    model.featurizer.norms[0].register_forward_hook(lambda *_: seen.append(1))
    model.update(random_batches(3, SHAPE[0], 4, 0))
    model.predict(torch.rand(2, 3, 16, 16))
    assert len(seen) == 2


def test_the_studies_have_the_length_of_table_1_and_its_rows():
    from hmoe_repro.studies.studies import study_configs

    search, table, first = (
        study_configs(f"quick-{name}") for name in ("mixing-search", "mixing", "table1")
    )
    algorithms = {config.algorithm for config in search}
    assert algorithms == {cls.name for cls in ALL}
    assert {config.algorithm for config in table} == algorithms | {"ERM", "Mixup"}
    assert len({config.run_id for config in search}) == len(search) == 6 * 4 * 4
    assert len({config.run_id for config in table}) == len(table) == 8 * 4 * 6
    assert {c.trial_seed for c in search}.isdisjoint(c.trial_seed for c in table)
    assert {c.steps for c in (*search, *table)} == {c.steps for c in first} == {701}
    for name in ("ERM", "Mixup"):
        of_table_1 = {c.run_id for c in first if c.algorithm == name}
        assert of_table_1 == {
            c.run_id for c in table if c.algorithm == name and c.trial_seed < 3
        }, name


def test_the_linear_probe_shares_its_runs_of_erm():
    from hmoe_repro.studies.study_file import read_study

    (probe,), (first,) = (read_study(f"pacs-{name}").runs for name in ("linear-mixing", "linear"))
    assert set(probe.algorithms) - {"ERM"} == {"IntraDomainMixup", "RIDG", "LFME"}
    assert set(probe.algorithms) & set(first.algorithms) == {"ERM"}
    for setting in ("datasets", "test_domains", "seeds", "steps", "network", "resolution"):
        assert getattr(probe, setting) == getattr(first, setting), setting
    for_all = [block.hparams[0]["all"] for block in (probe, first)]
    assert for_all[0] == for_all[1]
