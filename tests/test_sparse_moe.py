"""The sparse mixture of experts against loops over tokens, and against its arithmetic by hand."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.sparse_moe import (
    AddAuxLoss,
    CosineRouter,
    ExpertChoice,
    Experts,
    SparseMoE,
    apply_capacity,
    balance_loss,
    capacity_of,
    choose,
    dispatch,
    importance_loss,
    load_loss,
    plan_traffic,
    product_loss,
)

D, H, E = 6, 10, 4


def by_loop(x, experts, choice, kept=None):
    "Token by token, in the words of the paper."
    rows = []
    for i in range(len(x)):
        y = torch.zeros(D, dtype=x.dtype)
        for j, e in enumerate(choice.experts[i].tolist()):
            if kept is None or kept[i, j]:
                y = y + choice.weights[i, j] * experts.expert(e, x[i : i + 1])[0]
        rows.append(y)
    return torch.stack(rows)


def kept_by_loop(choice, scores, capacity, by_score=True):
    "Tokens queue one at a time, the surest first; first choices before second ones."
    n, k = choice.experts.shape
    order = list(range(n))
    if by_score:
        order.sort(key=lambda i: -max(scores[i].tolist()))
    taken, kept = [0] * E, torch.zeros(n, k, dtype=torch.bool)
    for j in range(k):
        for i in order:
            e = int(choice.experts[i, j])
            kept[i, j] = taken[e] < capacity
            taken[e] += 1
    return kept


@pytest.mark.parametrize("by_score", [True, False])
@pytest.mark.parametrize("k, capacity", itertools.product((1, 2), (0, 1, 3, 100)))
def test_queues_are_those_of_a_loop(k, capacity, by_score):
    logits = torch.randn(23, E)
    choice, scores = choose(logits, k), logits.softmax(-1)
    assert torch.equal(
        apply_capacity(choice, E, capacity, by_score),
        kept_by_loop(choice, scores, capacity, by_score),
    )


@pytest.mark.parametrize("case", ["plain", "drops", "empty expert", "ties", "nobody kept"])
@pytest.mark.parametrize("n, k", [(1, 1), (17, 1), (17, 2), (17, 4)])
def test_dispatch_agrees_with_the_loop_in_values_and_gradients(case, n, k):
    experts = Experts(D, H, E).eval()
    x, logits = torch.randn(n, D), torch.randn(n, E)
    if case == "empty expert":
        logits[:, 2] -= 100
    if case == "ties":
        logits = torch.zeros(n, E)
    sides = []
    for fast in (True, False):
        given = [t.clone().requires_grad_() for t in (x, logits)]
        choice, kept = choose(given[1], k), None
        if case == "drops":
            kept = apply_capacity(choice, E, k * int(0.7 * math.ceil(n / E)))
        if case == "nobody kept":
            kept = torch.zeros(n, k, dtype=torch.bool)
        y = (dispatch if fast else by_loop)(given[0], experts, choice, kept)
        parameters = list(experts.parameters())
        grads = [None] * (2 + len(parameters))
        if y.requires_grad:
            grads = torch.autograd.grad(y.cos().sum(), [*given, *parameters], allow_unused=True)
        zeros = [torch.zeros_like(t) for t in (*given, *parameters)]
        sides.append([y, *(z if g is None else g for g, z in zip(grads, zeros))])
    for one, other in zip(*sides):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_gradients_pass_gradcheck_where_some_are_dropped():
    experts = Experts(3, 4, E, dropout=0.0).double()
    x = torch.randn(7, 3, dtype=torch.double, requires_grad=True)
    logits = torch.randn(7, E, dtype=torch.double)
    choice = choose(logits, 2)
    kept = apply_capacity(choice, E, 2)
    assert not kept.all()
    assert torch.autograd.gradcheck(lambda z: dispatch(z, experts, choice, kept), x)


def test_traffic_sends_each_kept_choice_once():
    choice = choose(torch.randn(50, E), 2)
    kept = torch.rand(50, 2) < 0.6
    traffic = plan_traffic(choice, E, kept)
    assert sum(traffic.rows_per_expert) == len(traffic.token_of_row) == int(kept.sum())
    owners = choice.experts.flatten()[traffic.choice_of_row]
    assert owners.tolist() == sorted(owners.tolist())
    assert (traffic.row_of_choice < len(traffic.token_of_row)).equal(kept)


@pytest.mark.parametrize("n, expected", [(197 * 32, 1576), (6, 1), (7, 3), (1, 1)])
def test_capacity_is_the_released_one(n, expected):
    assert capacity_of(n, 6, 1, 1.5) == expected == math.floor(1.5 * math.ceil(n / 6))
    assert capacity_of(n, 6, 2, 1.5) == 2 * expected


def test_losses_are_their_definitions():
    logits, sigma = torch.randn(40, E), 1.0
    noisy = logits + torch.randn(40, E) * sigma / E
    choice = choose(noisy, 2)
    q = logits.softmax(-1)
    importance = [sum(q[i, e].item() for i in range(40)) for e in range(E)]
    load = [0.0] * E
    for i, e in itertools.product(range(40), range(E)):
        threshold = noisy[i].sort(descending=True).values[1].item()
        z = (q[i, e].item() - threshold) / (sigma / E)
        load[e] += 0.5 * (1 + math.erf(z / math.sqrt(2)))

    def ratio(amounts):
        mean = sum(amounts) / E
        return sum((a - mean) ** 2 for a in amounts) / (E - 1) / (mean**2 + 1e-10)

    assert math.isclose(importance_loss(logits), ratio(importance), rel_tol=1e-4)
    assert math.isclose(load_loss(logits, choice, sigma), ratio(load), rel_tol=1e-3)
    both = balance_loss(logits, choice, sigma)
    assert math.isclose(both, (ratio(importance) + ratio(load)) / 2, rel_tol=1e-3)
    first = F.one_hot(choice.experts[:, 0], E).float().mean(0)
    assert math.isclose(product_loss(logits, choice), E * (q.mean(0) * first).sum(), rel_tol=1e-5)


def test_one_training_pass_is_the_released_arithmetic_step_by_step():
    "Protocol 4.2 in plain Python, token by token: noise, gate, capacity with priority, loss."
    torch.manual_seed(2)
    layer = SparseMoE(D, H, num_experts=E, dropout=0.0, capacity_factor=0.5)
    noise, x = torch.randn(30, E) / E, torch.randn(30, D)
    layer._noisy = lambda logits: logits + noise
    y = layer(x)
    projected = layer.router.projector(x)
    scale = math.exp(min(layer.router.log_scale.item(), math.log(100)))
    columns = layer.router.directions
    rows, importance, load = [], [0.0] * E, [0.0] * E
    for i in range(30):
        a = projected[i]
        logits = [
            scale * (a @ columns[:, e] / a.norm() / columns[:, e].norm()).item() for e in range(E)
        ]
        noisy = [value + noise[i, e].item() for e, value in enumerate(logits)]
        exponents = [math.exp(value) for value in noisy]
        winner = max(range(E), key=noisy.__getitem__)
        rows.append((exponents[winner] / sum(exponents), winner, i))
        q = [math.exp(value) / sum(map(math.exp, logits)) for value in logits]
        for e in range(E):
            importance[e] += q[e]
            z = (q[e] - noisy[winner]) * E
            load[e] += 0.5 * (1 + math.erf(z / math.sqrt(2)))
    room, taken = math.floor(0.5 * math.ceil(30 / E)), [0] * E
    for gate, e, i in sorted(rows, reverse=True):
        served = taken[e] < room
        taken[e] += 1
        expected = gate * layer.experts.expert(e, x[i : i + 1])[0] if served else torch.zeros(D)
        torch.testing.assert_close(y[i], expected, atol=1e-5, rtol=1e-5)
    assert max(taken) > room

    def ratio(amounts):
        mean = sum(amounts) / E
        return sum((a - mean) ** 2 for a in amounts) / (E - 1) / (mean**2 + 1e-10)

    loss = (ratio(importance) + ratio(load)) / 2
    assert math.isclose(layer.auxiliary_loss, loss, rel_tol=1e-4)


def test_the_cosine_router_is_bounded_and_its_temperature_too():
    router = CosineRouter(D, E)
    assert router(torch.randn(100, D)).abs().max() <= 2 + 1e-5
    with torch.no_grad():
        router.log_scale.fill_(50.0)
    assert router(torch.randn(100, D)).abs().max() <= 100 + 1e-3


def test_the_layer_in_bf16_stays_near_float32_and_routes_alike():
    layer = SparseMoE(D, H, dropout=0.0).eval()
    x = torch.randn(5, 9, D)
    exact, routes = layer(x), layer.choice.experts
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(x)
    assert rough.dtype is torch.float32
    assert torch.equal(routes, layer.choice.experts)
    torch.testing.assert_close(rough, exact, atol=0.02, rtol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        layer.train()(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("router", ["linear", "cosine"])
def test_a_layer_of_another_type_computes_in_it_and_routes_in_float32_at_least(router):
    """In float64 the loop's values and a gradient of the full weight; in bf16 those of float32 with
    the same rounded weights, the same experts among them."""
    layer = SparseMoE(D, H, E, k=2, router=router, dropout=0.0).double().eval()
    x = torch.randn(5, 9, D, dtype=torch.double)
    y = layer(x)
    logits = layer.router(x.view(-1, D))
    assert y.dtype is layer.choice.weights.dtype is torch.double
    expected = by_loop(x.view(-1, D), layer.experts, choose(logits, 2)).view(y.shape)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    loss = torch.zeros((), dtype=torch.double, requires_grad=True)
    AddAuxLoss.apply(y, loss, 0.1).sum().backward()
    assert loss.grad == 0.1

    rough = layer.bfloat16()
    exact, x = copy.deepcopy(rough).float(), x.bfloat16()
    assert rough(x).dtype is torch.bfloat16
    assert rough.choice.weights.dtype is torch.float32
    torch.testing.assert_close(rough(x).float(), exact(x.float()), rtol=0.05, atol=0.01)
    assert all(map(torch.equal, rough.choice, exact.choice))
    rough.train()(x).float().sum().backward()
    assert all(p.grad.isfinite().all() for p in rough.parameters())


def exact_case(n, k, case):
    "Experts, tokens, choice, kept: numbers whose products and sums bf16 holds without rounding."
    experts = Experts(D, H, E).eval()
    with torch.no_grad():
        experts.w1.copy_(torch.randint(-1, 2, (E, H, D)) * 8.0)  # GELU is 0 or x at multiples of 8
        experts.w2.copy_(torch.randint(-1, 2, (E, D, H)) / 8.0)
        experts.b1.zero_()
        experts.b2.zero_()
    chosen = torch.randn(n, E).argsort(-1)[:, :k]
    if case == "empty expert":
        chosen = (torch.randn(n, E - 1).argsort(-1) + 1)[:, :k]
    weights = torch.tensor([0.5, 1.0])[torch.randint(2, (n, k))]
    choice = ExpertChoice(chosen, weights, torch.zeros(n, k))
    kept = torch.rand(n, k) < 0.6 if case == "drops" else None
    return experts, torch.randint(-1, 2, (n, D)).float(), choice, kept


@pytest.mark.parametrize("case", ["plain", "drops", "empty expert"])
@pytest.mark.parametrize("n, k", [(1, 1), (13, 1), (13, 2)])
def test_in_bf16_dispatch_agrees_with_the_loop_where_bf16_is_exact(case, n, k):
    torch.manual_seed(n + k)
    experts, x, choice, kept = exact_case(n, k, case)
    slopes, sides = torch.randint(-1, 2, (n, D)).float(), []
    for function in (dispatch, by_loop):
        given = [x.clone().requires_grad_(), choice.weights.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16):
            y = function(given[0], experts, choice._replace(weights=given[1]), kept)
        wanted = [*given, experts.w1, experts.w2]
        total = (y.float() * slopes).sum() + 0 * sum(t.sum() for t in wanted)
        sides.append([y.float(), *torch.autograd.grad(total, wanted)])
    assert n == 1 or min(sides[0][0].abs().max(), sides[0][3].abs().max()) > 0.1
    for one, other in zip(*sides):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [1, 2])
def test_in_bf16_dispatch_and_loop_differ_by_rounding_alone(k):
    torch.manual_seed(k)
    experts = Experts(D, H, E).eval()
    x, choice, sides = torch.randn(17, D), choose(torch.randn(17, E), k), []
    for function in (dispatch, by_loop):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = function(given, experts, choice).float()
        sides.append([y, *torch.autograd.grad(y.cos().sum(), [given, *experts.parameters()])])
    for one, other in zip(*sides):  # bf16 has 8 bits: steps of 2^-8 of a number, a few of them
        assert (one - other).abs().max() <= 4 * 2**-8 * other.abs().max()


def test_evaluation_does_not_hang_on_the_company_unless_asked():
    images = torch.randn(12, 8, D)
    for evaluation, alike in (("dropless", True), ("capacity", False)):
        torch.manual_seed(1)
        layer = SparseMoE(D, H, capacity_factor=0.5, evaluation=evaluation).eval()
        alone, among = layer(images[:1]), layer(images)[:1]
        assert torch.allclose(alone, among, atol=1e-6) == alike
        repeated = layer(images)
        assert torch.equal(repeated, layer(images))


def test_training_draws_noise_and_drops():
    torch.manual_seed(0)
    layer = SparseMoE(D, H, capacity_factor=0.5, dropout=0.0)
    x = torch.randn(60, D)
    y = layer(x)
    assert (y.abs().sum(-1) == 0).float().mean() > 0.3
    assert not torch.equal(y, layer(x))


def test_the_auxiliary_loss_is_carried_once_for_each_pass_backwards():
    def router_gradient(weight, scale):
        torch.manual_seed(0)
        layer = SparseMoE(D, H, dropout=0.0, auxiliary_weight=weight)
        (scale * layer(torch.arange(60.0).view(10, D) / 60).sum()).backward()
        return layer.router.projector.weight.grad

    alone = router_gradient(0.5, 0.0)
    assert alone.abs().max() > 0
    torch.testing.assert_close(router_gradient(1.0, 0.0), 2 * alone)
    torch.testing.assert_close(router_gradient(0.5, 1.0) - router_gradient(0.0, 1.0), alone)


def test_a_layer_is_copied_and_restored_after_a_pass():
    layer = SparseMoE(D, H)
    layer(torch.randn(4, D)).sum().backward()
    twin, fresh = copy.deepcopy(layer), SparseMoE(D, H)
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(9, D)
    assert torch.equal(twin.eval()(x), layer.eval()(x))
    assert torch.equal(fresh.eval()(x), layer(x))
    assert not layer.choice.weights.requires_grad
    assert not layer.auxiliary_loss.requires_grad


def test_experts_begin_as_copies_and_refuse_another_width():
    experts = Experts(D, H, E)
    first, second = torch.nn.Linear(D, H), torch.nn.Linear(H, D)
    experts.copy_mlp(first, second)
    x = torch.randn(3, D)
    for e in range(E):
        torch.testing.assert_close(experts.eval().expert(e, x), second(F.gelu(first(x))))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(num_experts=4, k=5), "5 of 4 experts"),
        (dict(k=0), "k between 1 and 6"),
        (dict(num_experts=0), "0 experts computes nothing. Fix: use at least one expert, or two"),
        (
            dict(num_experts=1),
            "compares experts.*only one. Fix: use at least two experts, or loss=",
        ),
        (dict(capacity_factor=-1.0), "capacity_factor above 0"),
        (dict(capacity_factor=float("nan")), "must be finite and not negative, got nan"),
        (dict(capacity_factor=float("inf")), "must be finite and not negative, got inf"),
        (dict(gate_noise=0.0), "loss='product'"),
        (dict(gate_noise=float("nan")), "gate_noise must be finite .*, got nan"),
        (dict(router="dot"), "cosine, linear"),
        (dict(evaluation="greedy"), "dropless, capacity"),
        (dict(loss="none"), "balance, product"),
    ],
)
def test_contradictions_are_refused_in_one_line(wrong, said):
    with pytest.raises(HmoeError, match=said) as refused:
        SparseMoE(D, H, **wrong)
    assert "\n" not in str(refused.value)


def test_one_expert_has_nothing_to_balance_and_works_with_the_product_loss():
    layer = SparseMoE(D, H, num_experts=1, loss="product", dropout=0.0)
    y = layer(torch.randn(30, D))
    y.sum().backward()
    assert y.isfinite().all()
    assert layer.auxiliary_loss == 1
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_a_capacity_without_a_place_for_any_token_is_refused():
    "Of 30 tokens an equal share is 5: a factor of 0.2 leaves one place, 0.19 none."
    for factor in (0.2, 0.0):  # 0 drops nothing
        assert SparseMoE(D, H, capacity_factor=factor, dropout=0.0)(torch.randn(30, D)).any()
    layer = SparseMoE(D, H, capacity_factor=0.19)
    said = "capacity_factor of 0.19 leaves no capacity for 30 tokens and 6 experts"
    with pytest.raises(HmoeError, match=said):
        layer(torch.randn(30, D))
    assert layer(torch.randn(0, D)).shape == (0, D)
    layer.eval()(torch.randn(30, D))  # dropless
    layer.evaluation = "capacity"
    with pytest.raises(HmoeError, match=said):
        layer(torch.randn(30, D))


def test_ties_are_resolved_alike_every_time():
    logits = torch.zeros(30, E)
    assert torch.equal(choose(logits, 2).experts, choose(logits, 2).experts)
    assert isinstance(choose(logits), ExpertChoice)
    assert choose(logits).weights.eq(1 / E).all()
