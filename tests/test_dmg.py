"""DMG against slow computations: its loss one image at a time, its updates with two Adams written
out, its rates against their formulas, its ways to predict against passes by hand; what is refused;
and runs of it from a specification to a record."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import Adam, assert_resumes, soft_iou
from torch.utils.flop_counter import FlopCounterMode

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.anchors import Aggregate, MultiHeaded, decay
from hmoe_repro.algorithms.averaging import SMA, wrapped
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.algorithms.dmg import (
    DMG,
    PAIRS_EVERY,
    AggregateSGD,
    measure_masks,
    overlaps,
    pair_overlaps,
)
from hmoe_repro.algorithms.hparams import merge_hparams
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.method.masks import hard_iou
from hmoe_repro.training.measurements import measure_run, trained_run
from hmoe_repro.training.model import build_dataset, load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import mode_accuracies
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore
from hmoe_repro.training.trainer import Trainer

SHAPE, CLASSES = (3, 16, 16), 4
READINGS = ("released", "paper")


def made(cls=DMG, domains=3, network="small_cnn", **hparams):
    seed_everything(0)
    return cls(SHAPE, CLASSES, domains, {"network": network, **hparams}).train()


def batches(seed=0, domains=3, size=5):
    return random_batches(domains, SHAPE, CLASSES, seed, size)


def pass_by_hand(model, x, factor):
    "Logits of a small network with `factor` (B, N) multiplied onto what enters its places."
    parts = model.masks.by_place(factor)
    layers = zip(model.featurizer.convolutions, model.featurizer.norms)
    for k, (convolution, norm) in enumerate(layers, 1):
        if f"conv{k}" in parts:
            x = x * parts[f"conv{k}"][..., None, None]
        x = norm(convolution(x).relu())
    return model.classifier(x.mean((2, 3)) * parts["fc"])


# The loss


@pytest.mark.parametrize("sizes", [(7,), (3, 1, 6)])
def test_overlaps_of_all_places_are_those_of_each(sizes):
    m = torch.rand(4, sum(sizes), dtype=torch.float64, requires_grad=True)
    columns = torch.block_diag(*[torch.ones(1, n, dtype=torch.float64) for n in sizes])
    soft, hard = overlaps(m, columns)
    for place, part in enumerate(m.split(sizes, 1)):
        assert abs(soft[place] - soft_iou(part)) < 1e-12
        assert abs(hard[place] - sum(hard_iou(part).values()) / 6) < 1e-5
    assert torch.autograd.gradcheck(lambda m: overlaps(m, columns)[0], m)
    weights = torch.tensor([0.5, 2.0, -1.0])[: len(sizes)]
    (got,) = torch.autograd.grad((soft * weights).sum(), m)
    each = sum(w * soft_iou(part) for w, part in zip(weights, m.split(sizes, 1)))
    torch.testing.assert_close(got, torch.autograd.grad(each, m)[0])


def test_empty_masks_overlap_as_hard_iou_says_and_two_domains_are_one_pair():
    m = torch.tensor([[0.1, 0.2, 0.9], [0.3, 0.4, 0.2]])
    columns = torch.tensor([[1.0, 1, 0], [0, 0, 1]])
    hard = overlaps(m, columns)[1]
    assert hard[0] == hard_iou(m[:, :2])[0, 1] == 1
    assert abs(hard[1]) < 1e-5
    assert list(pair_overlaps(m)) == ["iou_0_1"]
    assert pair_overlaps(m)["iou_0_1"] < 1e-5


@pytest.mark.parametrize(
    "reading, lambda_s", [("released", 0.0), ("released", 0.01), ("paper", 0.02)]
)
def test_the_loss_is_that_of_its_images_one_by_one(reading, lambda_s):
    model = made(reading=reading, lambda_o=0.3, lambda_s=lambda_s)
    given = batches(size=4)
    given[1] = (given[1][0][:0], given[1][1][:0])  # mixed batches may have none of a domain
    seed_everything(5)
    reported = model.loss(given)
    seed_everything(5)
    m = model.masks.probabilities().detach()
    tossed = torch.rand(8, m.shape[1])  # the draws of the batch, row by row
    terms, row = [], 0
    for d, (x, y) in enumerate(given):
        for image, label in zip(x, y):
            kept = (tossed[row] < m[d]).float()
            logits = pass_by_hand(model, image[None], kept[None])
            terms.append(F.cross_entropy(logits, label[None]))
            row += 1
    nll = sum(terms) / 8
    assert reported["nll"].item() == pytest.approx(nll.item(), rel=1e-5)
    parts = model.masks.by_place(m)
    assert list(parts) == (["conv4", "fc"] if reading == "paper" else ["conv3", "conv4", "fc"])
    total = 0
    for place, part in parts.items():
        pairs = [soft_iou(part[[d, e]]) for d, e in itertools.combinations(range(3), 2)]
        assert reported[f"overlap_{place}"].item() == pytest.approx(sum(pairs).item() / 3)
        assert reported[f"iou_{place}"].item() == pytest.approx(1)  # all begin above a half
        total += sum(pairs) / (1 if reading == "paper" else 3)
    expected = nll + 0.3 * total + lambda_s * m.sum()
    assert reported["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_overlap_of_every_pair_is_reported_now_and_then():
    model = made()
    pairs = {"iou_0_1", "iou_0_2", "iou_1_2"}
    for step in range(PAIRS_EVERY + 1):
        assert (pairs <= set(model.update(batches()))) == (step % PAIRS_EVERY == 0)


def test_an_overlap_weight_pulls_masks_apart_and_sparsity_pulls_them_down():
    ends = {}
    for name, hparams in {
        "none": {"lambda_o": 0.0},
        "overlap": {"lambda_o": 1.0},
        "sparsity": {"lambda_o": 0.0, "lambda_s": 0.1},
    }.items():
        model = made(mask_lr=0.1, **hparams)
        for step in range(25):
            model.update(batches(step))
        m = model.masks.probabilities().detach()
        ends[name] = overlaps(m, model.masks.columns)[0].mean(), (m > 0.5).float().mean()
    assert ends["overlap"][0] < ends["none"][0] - 0.1
    assert ends["sparsity"][1] < 0.2 < ends["none"][1]


# Updates and rates


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("schedule", ["none", "exponential", "inverse"])
def test_updates_are_those_of_two_adams_with_rates_of_their_own(reading, schedule):
    hparams = dict(lr=0.01, mask_lr=0.05, weight_decay=0.1, lambda_o=0.5)
    model = made(reading=reading, schedule=schedule, **hparams).double()
    slow = copy.deepcopy(model)
    network = [p for name, p in slow.named_parameters() if name != "masks.real"]
    adams = Adam(network, 0.01, 0.1), Adam([slow.masks.real], 0.05, 0.1)
    for step in range(7):
        epochs = step // 2  # an epoch of two updates
        t = step if reading == "released" else epochs
        factor = {"none": 1, "exponential": 0.99**epochs, "inverse": (1 + 1e-4 * t) ** -0.75}
        adams[0].lr = 0.01 * factor[schedule]
        both = reading == "paper" or schedule != "exponential"
        adams[1].lr = 0.05 * (factor[schedule] if both else 1)
        given = [(x.double(), y) for x, y in batches(step)]
        seed_everything(step)
        model.update(given)
        seed_everything(step)
        slow.update_count = step
        loss = slow.loss(given)["loss"]
        gradients = torch.autograd.grad(loss, [*network, slow.masks.real])
        adams[0].step(gradients[:-1])
        adams[1].step(gradients[-1:])
        if step % 2:
            model.on_epoch(epochs + 1)
    for (name, a), b in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    "schedule, reading, epochs, updates, rates",
    [
        ("none", "released", 30, 3000, (1, 1)),
        ("none", "paper", 30, 3000, (1, 1)),
        ("exponential", "released", 30, 3000, (0.99**30, 1)),
        ("exponential", "paper", 30, 3000, (0.99**30, 0.99**30)),
        ("inverse", "released", 30, 3000, (1.3**-0.75, 1.3**-0.75)),
        ("inverse", "paper", 30, 3000, (1.003**-0.75, 1.003**-0.75)),
    ],
)
def test_rates_of_both_readings(schedule, reading, epochs, updates, rates):
    model = made(schedule=schedule, reading=reading, lr=0.2, mask_lr=0.3)
    model.on_epoch(epochs)
    model.update_count = updates
    assert model.rates() == pytest.approx([0.2 * rates[0], 0.3 * rates[1]])
    model.update(batches())
    used = [group["lr"] for group in model.optimizer.param_groups]
    assert used == pytest.approx([0.2 * rates[0], 0.3 * rates[1]])


def test_the_rates_default_to_the_papers_on_large_images():
    h = merge_hparams(DMG.HPARAMS, {"network": "resnet18"}, 224)
    assert (h["lr"], h["mask_lr"], h["weight_decay"], h["lambda_o"]) == (1e-4, 1e-4, 1e-5, 0.1)
    assert h["freeze_bn"] == "no"
    assert h["schedule"] == "none"
    assert h["lambda_s"] == 0
    assert merge_hparams(Aggregate.HPARAMS, {"network": "alexnet"}, 224)["freeze_bn"] == "no"


@pytest.mark.parametrize("cls", [Aggregate, MultiHeaded, AggregateSGD])
def test_the_baselines_rates_fall_too_where_networks_are_large(cls):
    small = merge_hparams(cls.HPARAMS, {"network": "small_cnn"}, 16)
    assert not {"schedule", "near_zero"} & set(small)  # their runs have the names they had
    given = {"network": "resnet18", "weights": "random", "schedule": "exponential", "lr": 0.01}
    model = cls((3, 32, 32), CLASSES, 3, given).train()
    draw = lambda: random_batches(3, (3, 32, 32), CLASSES, 0, 2)
    model.update(draw())
    model.on_epoch(3)
    model.update(draw())
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.99**3)
    with pytest.raises(HmoeError, match="unknown schedule 'cosine'.* Valid: none, exponential"):
        cls((3, 32, 32), CLASSES, 3, given | {"schedule": "cosine"})


def test_decay_is_one_at_the_start_and_of_an_unscheduled_rate():
    for schedule in ("none", "exponential", "inverse"):
        assert decay(schedule, 0) == 1
    assert decay("none", 10**6) == 1
    assert decay("inverse", 10_000) == pytest.approx(2**-0.75)


def test_aggregate_sgd_is_sgd_with_momentum_written_out():
    model = made(AggregateSGD, lr=0.1, momentum=0.8, weight_decay=0.01).double()
    slow = copy.deepcopy(model)
    parameters, velocity = list(slow.parameters()), None
    for step in range(3):
        given = [(x.double(), y) for x, y in batches(step)]
        model.update(given)
        gradients = torch.autograd.grad(slow.loss(given)["loss"], parameters)
        gradients = [g + 0.01 * p for g, p in zip(gradients, parameters)]
        if velocity is None:
            velocity = [g.clone() for g in gradients]
        else:
            velocity = [0.8 * v + g for v, g in zip(velocity, gradients)]
        with torch.no_grad():
            for p, v in zip(parameters, velocity):
                p -= 0.1 * v
    for a, b in zip(model.parameters(), parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert merge_hparams(AggregateSGD.HPARAMS, {}, 224)["lr"] == 1e-3


@pytest.mark.parametrize("near_zero", [False, True])
def test_the_last_layer_starts_near_zero_where_that_is_asked_for(near_zero):
    model = made(near_zero=near_zero)
    assert (float(model.classifier.weight.detach().std()) < 0.002) == near_zero
    assert bool(model.classifier.bias.any()) != near_zero


def test_batch_norm_trains_by_default_with_pretrained_weights_too():
    given = {"network": "resnet18", "weights": "random"}
    model = DMG((3, 32, 32), CLASSES, 3, given).train()
    assert not model.featurizer.freeze_bn
    assert model.featurizer.body.bn1.training
    frozen = DMG((3, 32, 32), CLASSES, 3, given | {"freeze_bn": "yes"}).train()
    assert not frozen.featurizer.body.bn1.training
    before = model.featurizer.body.bn1.running_mean.clone()
    model.update(random_batches(3, (3, 32, 32), CLASSES, 0, 2))
    assert not torch.equal(before, model.featurizer.body.bn1.running_mean)


# Inference modes


def spread(**hparams):
    "A model whose masks are far from each other."
    model = made(**hparams).eval()
    with torch.no_grad():
        model.masks.real.copy_(torch.randn_like(model.masks.real) * 2)
    return model


def test_modes_are_passes_by_hand():
    model, x = spread(), batches()[0][0]
    m = model.masks.probabilities().detach()
    with torch.no_grad():
        each = [pass_by_hand(model, x, m[d].expand(5, -1)) for d in range(3)]
        expected = {
            "pred-ens": sum(each) / 3,
            "mask-ens": pass_by_hand(model, x, m.mean(0).expand(5, -1)),
        }
        for mode, logits in expected.items():
            torch.testing.assert_close(model.predict(x, mode), logits, rtol=1e-4, atol=1e-5)
        for d in range(3):
            own = {
                "kd": each[d],
                "greedy": pass_by_hand(model, x, (m[d] > 0.5).float().expand(5, -1)),
            }
            found = model.predict_modes(x, domain=d)
            assert list(found) == ["pred-ens", "mask-ens", "kd", "greedy"]
            for mode, logits in own.items():
                torch.testing.assert_close(model.predict(x, mode, d), logits, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(found[mode], logits, rtol=1e-4, atol=1e-5)
        found = model.predict_modes(x)
        assert list(found) == list(model.modes)
        for mode, logits in found.items():
            torch.testing.assert_close(logits, expected[mode], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.each_mask(x), torch.stack(each), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected["pred-ens"], expected["mask-ens"], atol=1e-4)


def test_images_of_several_domains_have_their_own_masks():
    model, x = spread(), batches()[0][0]
    domain = torch.tensor([2, 0, 1, 1, 2])
    with torch.no_grad():
        mixed = {mode: model.predict(x, mode, domain) for mode in model.domain_modes}
        for i, d in enumerate(domain.tolist()):
            for mode, logits in mixed.items():
                alone = model.predict(x[i : i + 1], mode, d)
                torch.testing.assert_close(logits[i : i + 1], alone, rtol=1e-4, atol=1e-5)


def test_an_index_may_be_any_integer():
    model, x = made().eval(), batches()[0][0]
    expected = model.predict(x, "kd", torch.full((len(x),), 2))
    for domain in (2, np.int64(2), torch.full((len(x),), 2, dtype=torch.uint8)):
        assert torch.equal(model.predict(x, "kd", domain), expected)
    assert torch.equal(model.predict_modes(x, np.int64(2))["kd"], model.predict_modes(x, 2)["kd"])


@pytest.mark.parametrize("mode", ["kd", "greedy"])
@pytest.mark.parametrize(
    "domain, said",
    [
        (None, "no domain was given. Fix: pass the domain of each"),
        (3, "domains 0 to 2, not for 3. Fix: pass a training domain"),
        (-1, "not for -1"),
        (torch.tensor([0, 1, 2, 0, 7]), "not for 7"),
        ("photo", "by index, not by str for .* Fix: pass the index of a"),
        (1.0, "not by float"),
        ([0, 1, 2, 0, 1], "not by list for .* images. Fix: .* or a tensor"),
        (torch.zeros(5), "not by Tensor for .* images. Fix: .* or a tensor"),
        (torch.tensor([0, 1]), "not by Tensor for .* images. Fix: .* for each image"),
    ],
    ids=str,
)
def test_a_known_domain_must_be_known_and_trained_on(mode, domain, said):
    model, x = made().eval(), batches()[0][0]
    with pytest.raises(HmoeError, match=said) as refused:
        model.predict(x, mode, domain)
    assert "\n" not in str(refused.value)
    if not isinstance(domain, torch.Tensor) and domain is not None:
        with pytest.raises(HmoeError, match=said):
            model.predict_modes(x, domain)
    with pytest.raises(HmoeError, match="unknown mode of DMG 'mask-3'.* Valid: pred-ens, mask-ens"):
        model.predict(x, "mask-3")


@pytest.mark.parametrize(
    "domains, hparams, said",
    [
        (1, {}, "DMG compares the masks of pairs of training domains, and there is only one. Fix"),
        (3, {"lambda_o": -0.1}, "lambda_o must be at least 0, got -0.1"),
        (3, {"lambda_s": -1e-9}, "lambda_s must be at least 0"),
        (3, {"mask_lr": -1.0}, "mask_lr must be at least 0"),
        (3, {"places": ["layer3"]}, "network small_cnn 'layer3'.* Valid: conv2, conv3, conv4, fc"),
        (3, {"places": ["fc", "fc"]}, "places for masks must be different"),
        (3, {"reading": "mine"}, "unknown reading 'mine'.* Valid: released, paper"),
        (3, {"schedule": "cosine"}, "unknown schedule 'cosine'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(domains, hparams, said):
    with pytest.raises(HmoeError, match=said) as refused:
        DMG(SHAPE, CLASSES, domains, {"network": "small_cnn", **hparams})
    assert "\n" not in str(refused.value)


def test_it_is_refused_when_it_is_planned():
    for hparams, said in ({"places": ["layer3"]}, "layer3"), ({"lambda_o": -1.0}, "lambda_o"):
        with pytest.raises(HmoeError, match=said):
            make_config("DMG", "DigitDomainsTiny", ["sketch"], network="small_cnn", hparams=hparams)
    three = ["photo", "plain", "sketch"]
    with pytest.raises(HmoeError, match="there is only one"):
        make_config("DMG", "DigitDomainsTiny", three, network="small_cnn")


# Its cost, in operations


def operations(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("network, side", [("small_cnn", 16), ("image_cnn", 16), ("resnet18", 32)])
def test_an_update_costs_hardly_more_than_aggregates(network, side):
    shape, weights = (3, side, side), {"weights": "random"} if network == "resnet18" else {}
    given, counts = random_batches(3, shape, CLASSES, 0, 4), {}
    for cls in (Aggregate, DMG):
        model = cls(shape, CLASSES, 3, {"network": network, **weights}).train()
        model.update(given)
        counts[cls] = operations(functools.partial(model.update, given))
    assert counts[Aggregate] <= counts[DMG] <= 1.01 * counts[Aggregate]


@pytest.mark.slow
@pytest.mark.parametrize(
    "network, side", [("image_cnn", 16), ("resnet18", 224), ("resnet50", 224), ("alexnet", 224)]
)
def test_all_modes_cost_at_most_a_third_more_than_the_ensemble_alone(network, side):
    shape, weights = (3, side, side), {} if network == "image_cnn" else {"weights": "random"}
    model = DMG(shape, CLASSES, 3, {"network": network, **weights}).eval()
    x = torch.rand(1, *shape)
    with torch.no_grad():
        alone = operations(lambda: model.predict(x))
        asked = operations(lambda: model.predict_modes(x, domain=0, greedy=False))
        assert asked == operations(lambda: model.predict_modes(x)) <= 1.3 * alone
        above = asked - alone  # the averaged mask's pass above the first place
        assert operations(lambda: model.predict_modes(x, domain=0)) == asked + above


# Training as a whole


@pytest.mark.parametrize("name", ["DMG", "Aggregate-SGD"])
def test_conformance_on_other_networks_and_settings(name):
    cls = get_algorithm(name)
    check_algorithm(cls, hparams={"nonlinear_classifier": True})
    if name == "DMG":
        for hparams in (
            {"network": "image_cnn", "reading": "paper", "lambda_s": 1e-3},
            {"places": ["fc"], "schedule": "inverse", "mask_lr": 0.01},
        ):
            check_algorithm(cls, hparams=hparams)


@pytest.mark.parametrize("reading", READINGS)
def test_it_resumes_to_the_bit_in_the_middle_of_a_schedule(tmp_path, reading):
    assert_resumes(DMG, tmp_path, reading=reading, schedule="inverse", mask_lr=0.02)
    model = made(schedule="exponential")
    model.update(batches())
    model.on_epoch(4)
    again = made(schedule="exponential")
    again.load_training_state(model.training_state())
    assert again.epochs_done == 4
    assert again.rates() == model.rates()


def test_averages_of_its_weights_average_masks_and_pass_epochs_on():
    average = wrapped(SMA, DMG)(SHAPE, CLASSES, 3, {"network": "small_cnn", "sma_start": 0}).train()
    seen = [average.current.masks.real.detach().clone()]  # at 0 the start counts, too
    for step in range(3):
        average.update(batches(step))
        seen.append(average.current.masks.real.detach().clone())
    torch.testing.assert_close(average.result.masks.real, torch.stack(seen).mean(0))
    average.on_epoch(2)
    assert average.current.epochs_done == 2
    x = batches()[0][0]
    with torch.no_grad():
        torch.testing.assert_close(average.eval().predict(x), average.result.predict(x))
        assert set(average.predict_modes(x)) == set(DMG.modes)


# Runs


def spec_of(protocol="dmg", **hparams):
    length = {"epochs": 2} if protocol == "dmg" else {"steps": 6, "checkpoint_frequency": 5}
    given = {"batch_size": 16, "mask_lr": 0.1, **hparams}
    more = dict(network="image_cnn", hparams=given, protocol=protocol, **length)
    return make_config("DMG", "DigitDomainsTiny", ["sketch"], **more)


@pytest.mark.parametrize("protocol", ["dmg", "domainbed"])
def test_a_run_becomes_a_record_with_modes_masks_and_a_model(tmp_path, protocol):
    store, config = RunStore(tmp_path), spec_of(protocol)
    record = run(config, store)
    assert record["status"] == "complete"
    assert set(record["selected"]) == set(DMG.modes)
    accuracies = record["checkpoints"][-1]["accuracies"]
    for domain, of_domain in accuracies.items():
        modes = DMG.modes if domain == "sketch" else (*DMG.modes, *DMG.domain_modes)
        assert all(set(measured) == set(modes) for measured in of_domain.values())
    places = {"conv3", "conv4", "fc"}
    losses = record["checkpoints"][0]["losses"]
    assert {f"iou_{p}" for p in places} | {f"overlap_{p}" for p in places} < set(losses)
    assert set(record["masks"]["places"]) == places
    for mode in DMG.modes:
        model, _ = load_model(config.run_id, mode, store)
        found = mode_accuracies(model, build_dataset(config), "sketch", torch.arange(10))
        assert set(found) == set(DMG.modes)
    assert (tmp_path / config.run_id / "arrays.safetensors").exists()


def test_what_a_run_keeps_of_its_masks_is_what_they_are():
    config = spec_of()
    trainer = Trainer(config, build_dataset(config), torch.device("cpu"))
    while trainer.step < config.steps:
        trainer.update()
    scores, arrays = measure_masks(trained_run(trainer))
    real, sizes = arrays["masks"].float(), arrays["mask_sizes"].tolist()
    assert sizes == [64, 128, 256]
    assert real.shape == (3, 448)
    parts = dict(zip(("conv3", "conv4", "fc"), (real > 0).split(sizes, 1)), overall=real > 0)
    for place, kept in parts.items():
        said = scores["overall"] if place == "overall" else scores["places"][place]
        assert said["neurons"] == kept.shape[1]
        assert said["kept"] == pytest.approx(kept.float().mean(1).tolist(), abs=1e-4)
        for (a, b), value in zip(scores["pairs"], said["iou"]):
            first, second = (kept[scores["domains"].index(d)] for d in (a, b))
            assert value == pytest.approx(
                float((first & second).sum() / (first | second).sum()), abs=1e-4
            )
        assert said["mean_iou"] == pytest.approx(sum(said["iou"]) / 3, abs=2e-4)
        users = kept.sum(0)
        kinds = [int((users == 0).sum()), int((users == 1).sum()), int((users > 1).sum())]
        assert list(said["kinds"].values()) == kinds
        assert sum(kinds) == kept.shape[1]
        assert said["users"] == [int((users == n).sum()) for n in range(4)]
    assert {d: a["split"] for d, a in scores["accuracy"].items()} == {
        "negative": "test",
        "photo": "test",
        "plain": "test",
        "sketch": "in",
    }
    algorithm, data = trainer.algorithm.eval(), trainer.data
    for domain, found in scores["accuracy"].items():
        position = data.domain_index(domain)
        chosen = trainer.splits[domain][found["split"]]
        x, y = data.inputs(position, chosen), data.labels[position][chosen]
        assert found["images"] == len(y)
        with torch.no_grad():
            for d, logits in enumerate(algorithm.each_mask(x)):
                right = (logits.argmax(1) == y).float().mean()
                assert found["by_mask"][d] == pytest.approx(right.item(), abs=1e-4)
    assert measure_run(trainer)[0]["masks"] == scores


def test_a_run_without_masks_keeps_none():
    config = make_config("ERM", "DigitDomainsTiny", ["sketch"], network="small_cnn", steps=1)
    trainer = Trainer(config, build_dataset(config), torch.device("cpu"))
    assert "masks" not in measure_run(trainer)[0]
