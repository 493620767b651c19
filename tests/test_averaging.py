"""SWAD, SMA, EoA, MIRO, Aggregate and Multi-Headed against slow computations written out here:
loops, autograd, Adam by its formulas, float64."""

import copy
import math
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hmoe_repro.algorithms import FAMILIES, get_algorithm
from hmoe_repro.algorithms.anchors import MIRO, Aggregate, MultiHeaded, tap_points, tapped
from hmoe_repro.algorithms.averaging import (
    SMA,
    SWAD,
    EoA,
    WeightMean,
    loss_valley,
    published_valley,
    wrapped,
)
from hmoe_repro.algorithms.base import ALGORITHMS, ERM
from hmoe_repro.algorithms.conformance import check_algorithm, random_batches
from hmoe_repro.core.devices import import_torchvision
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.seeds import seed_everything
from hmoe_repro.training.checkpoint_io import load_state, save_state

SHAPE = dict(input_shape=(3, 16, 16), num_classes=4, num_domains=3)
SMALL = {"network": "small_cnn"}
FAMILY = ("SWAD", "SMA", "EoA", "MIRO", "Aggregate", "Multi-Headed")


def build(cls, double=True, seed=0, num_domains=3, **hparams):
    "An algorithm in float64."
    seed_everything(seed)
    algorithm = cls(**(SHAPE | {"num_domains": num_domains}), hparams=SMALL | hparams)
    return algorithm.double() if double else algorithm


def draw(seed, domains=3, size=8):
    "Random batches in float64."
    return [
        (x.double(), y) for x, y in random_batches(domains, SHAPE["input_shape"], 4, seed, size)
    ]


class Adam:
    "Adam by its formulas, coupled weight decay, one learning rate per tensor."

    def __init__(self, parameters, rates, decay=0.0):
        self.parameters, self.rates, self.decay, self.t = list(parameters), list(rates), decay, 0
        self.first, self.second = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))

    def step(self, loss):
        self.t += 1
        for p, g, m, v, lr in zip(
            self.parameters,
            torch.autograd.grad(loss, self.parameters),
            self.first,
            self.second,
            self.rates,
        ):
            g = g + self.decay * p.detach()
            m.mul_(0.9).add_(g, alpha=0.1), v.mul_(0.999).add_(g * g, alpha=0.001)
            with torch.no_grad():
                p -= lr * (m / (1 - 0.9**self.t)) / ((v / (1 - 0.999**self.t)).sqrt() + 1e-8)


def equal(a, b):
    "Parameters agree to rounding in float64."
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


def mean_nll(pairs):
    "Mean cross entropy, one image at a time, of (logits, labels) pairs."
    terms = [
        -torch.log_softmax(row, 0)[label]
        for logits, labels in pairs
        for row, label in zip(logits, labels)
    ]
    return sum(terms) / len(terms)


# The rule of SWAD

COURSE = [
    2.0,
    1.0,
    0.6,
    0.4,
    0.3,
    0.25,
    0.2,
    0.22,
    0.21,
    0.23,
    0.24,
    0.25,
    0.26,
    0.3,
    0.31,
    0.32,
    0.33,
    0.34,
    0.35,
]
NINE = [0.5, 0.6, 0.7, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_the_protocols_vectors_as_published():
    assert published_valley(COURSE) == ([6, 6, 7, 8, 9, 10, 11, 12], [], True)
    for count in range(9, len(COURSE)):
        assert not published_valley(COURSE[:count])[2]
    assert published_valley(COURSE[:8])[0] == []
    assert published_valley(COURSE[:9])[0] == [6]
    settled, still_open, ended = published_valley(NINE)
    assert settled + still_open == [1, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert not ended
    assert published_valley(NINE[:3])[0] == [1, 2]
    assert published_valley([3, 2, 1]) == ([], [2], False)


def test_the_same_vectors_as_intended():
    assert loss_valley(COURSE) == (list(range(6, 13)), [], True)
    assert not loss_valley(COURSE[:-1])[2]
    settled, still_open, ended = loss_valley(NINE)
    assert settled + still_open == list(range(9))
    assert not ended
    assert loss_valley([3, 2, 1]) == ([], [2], False)
    assert loss_valley(COURSE + [0.1] * 9)[0] == list(range(6, 13))  # an end is an end


def algorithm_1(losses, N_s, N_e, r):
    "The paper's Algorithm 1, one checkpoint after the other: first and last segment, or None."
    start, threshold = None, None
    for i in range(len(losses)):
        if threshold is None:
            if i - N_s + 1 >= 0 and losses[i - N_s + 1] == min(losses[i - k] for k in range(N_s)):
                start, threshold = (
                    i - N_s + 1,
                    (1 + r) / N_s * sum(losses[i - k] for k in range(N_s)),
                )
        elif i - N_e >= start and threshold < min(losses[i - k] for k in range(N_e)):
            return start, i - N_e
    return None if start is None else (start, len(losses) - 1)


def released_code(losses, N_s, N_e, r):
    "The two queues as the protocol describes them."
    converge, smooth, added, c, threshold, over = (
        deque(maxlen=N_s),
        deque(maxlen=N_e),
        [],
        None,
        None,
        False,
    )
    for j in range(len(losses)):
        if over:
            break
        converge.append(j), smooth.append(j)
        if c is None:
            if len(converge) == N_s and min(range(N_s), key=lambda k: losses[converge[k]]) == 0:
                c, threshold, begin = (
                    converge[0],
                    (1 + r) * sum(losses[k] for k in converge) / N_s,
                    0,
                )
                oldest = list(smooth)[: N_e - N_s + 1]
                for k in reversed(range(len(oldest))):
                    if losses[oldest[k]] > threshold:
                        begin = k + 1
                        break
                added += oldest[begin + 1 :]
        elif smooth[0] >= c:
            if min(losses[k] for k in smooth) > threshold:
                over = True
            else:
                added.append(smooth[0])
    if c is None:
        return [len(losses) - 1]
    if not over:
        smooth.popleft()
        while smooth and min(losses[k] for k in smooth) <= threshold:
            added.append(smooth.popleft())
    return added or [c]


@pytest.mark.parametrize(
    "N_s, N_e, r", [(3, 6, 0.3), (3, 6, 0.2), (2, 3, 0.1), (2, 5, 0.05), (3, 4, 0.3)]
)
def test_both_rules_against_slow_ones_on_random_courses(N_s, N_e, r):
    generator = torch.Generator().manual_seed(N_s * 10 + N_e)
    ended = 0
    for _ in range(50):
        noise = torch.rand(30, generator=generator)
        losses = [
            float(0.3 + 1.5 * math.exp(-t / 4) + 0.04 * max(0, t - 12) * noise[0] + 0.3 * noise[t])
            for t in range(30)
        ]
        before = {loss_valley: [], published_valley: []}
        for count in range(1, 31):
            for rule, known in before.items():
                settled, still_open, end = rule(losses[:count], N_s, N_e, r)
                assert settled[: len(known)] == known
                assert all(count - N_e <= i < count for i in settled[len(known) :] + still_open)
                before[rule] = settled
            span = algorithm_1(losses[:count], N_s, N_e, r)
            settled, still_open, end = loss_valley(losses[:count], N_s, N_e, r)
            assert settled + still_open == (
                [count - 1] if span is None else list(range(span[0], span[1] + 1))
            )
            settled, still_open, _ = published_valley(losses[:count], N_s, N_e, r)
            assert settled + still_open == released_code(losses[:count], N_s, N_e, r)
            ended += end
    assert ended > 15


# SWAD


def trained_swad(losses, updates, domainbed_compat=False):
    """SWAD driven by given validation losses; `updates[j]` updates before checkpoint j. Returns
    it and the weights after every update, by segment."""
    swad, seen = build(SWAD, domainbed_compat=domainbed_compat, lr=1e-2), []
    for j, (loss, count) in enumerate(zip(losses, updates)):
        seen.append([])
        for k in range(count):
            swad.update(draw(100 * j + k, size=2))
            seen[-1].append([p.detach().clone() for p in swad.current.parameters()])
        swad.end_segment(loss)
    return swad, seen


@pytest.mark.parametrize("domainbed_compat", [False, True])
@pytest.mark.parametrize("losses", [COURSE, NINE, [3.0, 2.0, 1.0]])
def test_swad_is_the_mean_of_the_weights_of_its_segments(losses, domainbed_compat):
    updates = [
        1,
        *[2 + j % 2 for j in range(len(losses) - 1)],
    ]  # the first segment has one update, as in a run
    swad, seen = trained_swad(losses, updates, domainbed_compat)
    settled, still_open, _ = (published_valley if domainbed_compat else loss_valley)(losses)
    if domainbed_compat:
        parts = [
            [sum(weights) / len(segment) for weights in zip(*segment)]
            for segment in (seen[i] for i in settled + still_open)
        ]
    else:
        parts = [weights for i in settled + still_open for weights in seen[i]]
    equal(swad.result.parameters(), [sum(tensors) / len(parts) for tensors in zip(*parts)])
    x = draw(7)[0][0]
    assert torch.equal(swad.predict(x), swad.result.predict(x))
    assert not torch.allclose(swad.predict(x), swad.current.predict(x))


def test_the_model_inside_swad_trains_as_if_alone():
    swad, erm = build(SWAD), build(ERM)
    for step in range(4):
        assert swad.update(draw(step)) == erm.update(draw(step))
        if step % 2:
            swad.end_segment(1.0 / (step + 1))
    for p, q in zip(swad.current.parameters(), erm.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(
        build(SWAD).predict(draw(0)[0][0]), build(ERM).predict(draw(0)[0][0])
    )  # before the first checkpoint


def test_the_validation_loss_is_the_mean_over_domains_of_the_current_model():
    swad = build(SWAD, num_domains=2)
    swad.update(draw(0, 2))
    validation = [
        [batch for batch in draw(1, 2, 5)],
        [draw(2, 1, 3)[0]],
    ]  # ten images in two batches, and three
    swad.train()
    swad.on_checkpoint(iter(part) for part in validation)
    expected = (
        sum(mean_nll([(swad.current.predict(x), y) for x, y in part]) for part in validation) / 2
    )
    assert abs(swad.losses[0] - expected.item()) < 1e-12
    assert swad.current.training
    assert len(swad.queue) == 1
    assert swad.segment.count == 0


def test_nothing_enters_after_the_end():
    swad, _ = trained_swad(COURSE, [1] * len(COURSE))
    before = [p.clone() for p in swad.result.parameters()]
    for j in range(7):
        swad.update(draw(j, size=2))
        swad.end_segment(0.01)
    for p, q in zip(before, swad.result.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["ERM", "MIRO", "HMOE-DN"])
def test_swad_goes_on_to_the_bit_from_a_file(name, tmp_path):
    cls, x = wrapped(SWAD, get_algorithm(name)), torch.rand(4, *SHAPE["input_shape"])

    def go(swad, steps):
        for step in steps:
            swad.update(random_batches(3, SHAPE["input_shape"], 4, step, 4))
            if step % 2 == 0:
                swad.end_segment((5.0, 3.0, 1.0, 1.1, 1.2, 1.3, 1.2, 1.1)[step // 2])

    whole = build(cls, double=False)
    go(whole, range(9))
    save_state(tmp_path / "state.safetensors", whole.training_state())
    other = build(cls, double=False, seed=9)
    other.load_training_state(load_state(tmp_path / "state.safetensors"))
    assert other.losses == [5.0, 3.0, 1.0, 1.1, 1.2]
    assert other.settled == whole.settled
    assert other.segment.count == whole.segment.count
    for swad in (whole, other):
        go(swad, range(9, 15))
    for (key, a), b in zip(whole.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(whole.eval().predict(x), other.eval().predict(x))
    assert whole.current.update_count == other.current.update_count == 15


def test_the_kept_model_holds_two_models_and_no_queue():
    swad, _ = trained_swad([1.0, 2.0, 3.0], [1, 1, 1])
    assert len(swad.state_dict()) == 2 * len(build(ERM).state_dict())
    assert len(swad.queue) == 3
    assert not any(p.requires_grad for p in swad.result.parameters())


def test_settings_that_cannot_work():
    for wrong in ({"n_converge": 6}, {"n_converge": 0}):
        with pytest.raises(HmoeError, match="n_converge = .* less than n_tolerance = 6"):
            build(SWAD, **wrong)
    with pytest.raises(HmoeError, match="num_models must be at least 1"):
        build(EoA, num_models=0)


def test_weights_of_means():
    values, mean = torch.randn(9, 3, dtype=torch.float64), WeightMean()
    for weight, part in ((2, values[:2]), (3, values[2:5]), (4, values[5:])):
        mean.add([part.mean(0)], weight)
    torch.testing.assert_close(mean.tensors[0], values.mean(0))
    kept = values[0].clone()
    first = WeightMean()
    first.add([kept])
    first.add([values[1]])
    assert torch.equal(kept, values[0])  # the first tensor is copied


# SMA and EoA


@pytest.mark.parametrize("start", [0, 2, 100])
def test_sma_by_its_formula(start):
    sma, average = build(SMA, sma_start=start, lr=1e-2), None
    for t in range(1, 7):
        sma.update(draw(t, size=2))
        now = [p.detach().clone() for p in sma.current.parameters()]
        if t <= start:
            average = now
        else:
            average = [
                ((t - start) * a + p) / (t - start + 1)
                for a, p in zip(
                    average or [q.detach() for q in build(SMA).current.parameters()], now
                )
            ]
        equal(sma.result.parameters(), average)
    assert torch.equal(sma.predict(draw(0)[0][0]), sma.result.predict(draw(0)[0][0]))


def test_eoa_is_the_mean_of_independent_moving_averages():
    eoa = build(EoA, num_models=3, sma_start=1)
    alone = [copy.deepcopy(member) for member in eoa.members]
    for step in range(3):
        losses = [member.update(draw(step, size=2))["loss"] for member in alone]
        assert eoa.update(draw(step, size=2)) == {"loss": sum(losses) / 3}
    for member, single in zip(eoa.members, alone):
        for p, q in zip(member.parameters(), single.parameters(), strict=True):
            assert torch.equal(p, q)
    x = draw(5)[0][0]
    torch.testing.assert_close(
        eoa.predict(x),
        sum(single.result.classifier(single.result.featurizer(x)) for single in alone) / 3,
    )
    assert not torch.allclose(*(member.result.classifier.weight for member in eoa.members[:2]))


# MIRO


def layers(network, x):
    "ConvNet by hand: its output and what each of its norms returns."
    taps = []
    for convolution, norm in zip(network.convolutions, network.norms):
        x = F.relu(
            F.conv2d(
                x, convolution.weight, convolution.bias, convolution.stride, convolution.padding
            )
        )
        x = F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
        taps.append(x)
    return x.mean((2, 3)), taps


def test_miro_against_loops_and_two_learning_rates():
    miro = build(MIRO, ld=0.5, lr=1e-3, weight_decay=0.01)
    shadow, original = copy.deepcopy(miro), copy.deepcopy(miro.featurizer)
    network = [*shadow.featurizer.parameters(), *shadow.classifier.parameters()]
    adam = Adam([*network, *shadow.b], [1e-3] * len(network) + [1e-2] * 4, decay=0.01)
    for b in miro.b:
        torch.testing.assert_close(F.softplus(b) + 1e-5, torch.full_like(b, 0.1), rtol=0, atol=1e-7)
    for step in range(2):
        batches = draw(step, size=3)
        z, features = layers(shadow.featurizer, torch.cat([x for x, _ in batches]))
        _, anchors = layers(original, torch.cat([x for x, _ in batches]))
        reg = 0
        for f, f0, b in zip(features, anchors, shadow.b):
            channels = [
                (
                    (f[:, c] - f0[:, c].detach()) ** 2 / (torch.log1p(b[c].exp()) + 1e-5)
                    + (torch.log1p(b[c].exp()) + 1e-5).log()
                ).mean()
                for c in range(f.shape[1])
            ]
            reg = reg + 0.5 * sum(channels) / len(channels)
        nll = mean_nll([(shadow.classifier(z), torch.cat([y for _, y in batches]))])
        reported = miro.update(batches)
        for name, value in {"loss": nll + 0.5 * reg, "reg": reg, "nll": nll}.items():
            assert abs(reported[name] - value.item()) < (1e-10, 1e-8)[step]
        adam.step(nll + 0.5 * reg)
    for p, q in zip(
        [*miro.featurizer.parameters(), *miro.classifier.parameters(), *miro.b],
        adam.parameters,
        strict=True,
    ):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    for p, q in zip(miro.pretrained.parameters(), original.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not p.requires_grad
    assert not miro.train().pretrained.training
    assert miro.featurizer.training


def test_taps_leave_no_hook_behind_and_survive_an_error():
    network = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])})
    points = tap_points(network)
    network.forward = lambda x: points[1](points[0](x))
    output, taps = tapped(network, points, torch.ones(1, 2))
    assert torch.equal(output, taps[1])
    assert [t.shape[1] for t in taps] == [2, 3]
    with pytest.raises(RuntimeError):
        tapped(network, points, torch.ones(1, 5))
    assert not any(module._forward_hooks for module in network.modules())


def test_taps_of_a_residual_network_are_the_stages_in_order():
    network = nn.Sequential(import_torchvision().models.resnet18())
    points = tap_points(network)
    assert points == [
        network[0].maxpool,
        network[0].layer1,
        network[0].layer2,
        network[0].layer3,
        network[0].layer4,
    ]
    with torch.no_grad():
        assert [
            f.shape[1] for f in tapped(network.eval(), points, torch.rand(1, 3, 32, 32))[1]
        ] == [64, 64, 128, 256, 512]
    with pytest.raises(HmoeError, match="MIRO cannot compare features of a Linear"):
        tap_points(nn.Linear(2, 2))


# Aggregate and Multi-Headed


def test_aggregate_is_erm_on_the_union_with_dmgs_settings():
    aggregate, erm = build(Aggregate), build(ERM)
    for step in range(2):
        uneven = [
            (x[:n], y[:n]) for n, (x, y) in zip((5, 0, 8), draw(step))
        ]  # as the pooled sampler may draw
        assert aggregate.update(uneven) == erm.update(uneven)
    for p, q in zip(aggregate.parameters(), erm.parameters(), strict=True):
        assert torch.equal(p, q)
    large = Aggregate((3, 224, 224), 7, 3, SMALL).hparams
    assert (large["lr"], large["weight_decay"]) == (1e-4, 1e-5)


def test_multi_headed_against_loops():
    heads = build(MultiHeaded, weight_decay=0.1)
    shadow = copy.deepcopy(heads)
    adam = Adam(shadow.parameters(), [1e-3] * len(list(shadow.parameters())), decay=0.1)
    for step in range(2):
        batches = [(x[:n], y[:n]) for n, (x, y) in zip((5, 3, 8), draw(step))]
        loss = mean_nll(
            [
                (shadow.heads[i](layers(shadow.featurizer, x)[0]), y)
                for i, (x, y) in enumerate(batches)
            ]
        )
        assert abs(heads.update(batches)["loss"] - loss.item()) < 1e-10
        adam.step(loss)
    equal(heads.parameters(), adam.parameters)
    x = draw(9)[0][0]
    z = layers(heads.featurizer, x)[0]
    torch.testing.assert_close(
        heads.predict(x), sum(z @ h.weight.T + h.bias for h in heads.heads) / 3
    )
    for i in range(3):
        torch.testing.assert_close(
            heads.predict(x, domain=i), z @ heads.heads[i].weight.T + heads.heads[i].bias
        )


def test_a_domain_reaches_its_own_head_only():
    heads, batches = build(MultiHeaded), draw(0)
    empty = [(x[:0], y[:0]) if i == 1 else (x, y) for i, (x, y) in enumerate(batches)]
    heads.loss(empty)["loss"].backward()
    assert float(heads.heads[1].weight.grad.abs().sum()) == 0
    assert all(float(heads.heads[i].weight.grad.abs().sum()) > 0 for i in (0, 2))
    assert heads.loss([batches[i] for i in (2, 0, 1)])["loss"] != heads.loss(batches)["loss"]


def test_heads_begin_near_zero_and_the_published_ones_are_one():
    heads = build(MultiHeaded, double=False)
    assert all(
        0.0005 < float(head.weight.detach().std()) < 0.0015 and not head.bias.any()
        for head in heads.heads
    )
    deep = build(MultiHeaded, double=False, nonlinear_classifier=True)
    assert 0.0003 < float(deep.heads[0][-1].weight.detach().std()) < 0.003
    assert float(deep.heads[0][0].weight.detach().std()) > 0.01
    tied = build(MultiHeaded, domainbed_compat=True)
    x = draw(0)[0][0]
    assert len(tied.heads) == 1
    assert torch.equal(tied.predict(x, domain=0), tied.predict(x, domain=2))
    assert torch.equal(tied.predict(x), tied.predict(x, domain=1))


# The family


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_works_with_one_domain(name):
    cls = ALGORITHMS[name]
    check_algorithm(cls, num_domains=1, hparams={"num_models": 2} if name == "EoA" else None)
    assert cls.family == FAMILIES[cls.name]
    assert cls.needs_domain_labels == (name == "Multi-Headed")
    assert cls.paper


@pytest.mark.parametrize("outer", [SWAD, SMA])
def test_averages_go_around_any_algorithm(outer):
    for inner in (get_algorithm("HMOE-DL"), EoA):
        cls = wrapped(outer, inner)
        check_algorithm(cls, hparams={"num_models": 2} if inner is EoA else None)
        assert cls.name == f"{outer.name}-{inner.name}"
        assert cls.modes == inner.modes
        assert cls.needs_domain_labels == inner.needs_domain_labels
        assert set(inner.HPARAMS) | set(outer.EXTRA_HPARAMS) == set(cls.HPARAMS)
    hmoe = wrapped(outer, get_algorithm("HMOE-DL"))(**SHAPE, hparams=SMALL)
    hmoe.total_steps = 4
    hmoe.update(random_batches(3, SHAPE["input_shape"], 4, 0))
    assert hmoe.current.progress == 0.25
    assert set(hmoe.predict_modes(torch.rand(2, 3, 16, 16))) == {"mix", "max", "ood"}
    assert hmoe.predict(torch.rand(2, 3, 16, 16), "max").shape == (2, 4)


def test_the_source_of_a_combination_is_that_of_the_inner_algorithm():
    import inspect

    class Own(ERM):
        def loss(self, minibatches):
            return {"loss": super().loss(minibatches)["loss"] * 2}

    assert wrapped(SWAD, Own).__module__ == __name__
    assert "* 2}" in inspect.getsource(wrapped(SWAD, Own))
    assert wrapped(SWAD, MIRO).__module__ == "hmoe_repro.algorithms.anchors"
