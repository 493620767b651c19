"""The adapter to Tutel, on Tutel itself where it can be imported and everywhere on a stand-in."""

import copy
import importlib.util
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import tutel_standin
from torch import nn

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.sparse_moe import SparseMoE
from hmoe_repro.method.tutel_layer import (
    BACKENDS,
    COUNT,
    INSTALL,
    TutelMoE,
    from_tutel_state,
    to_tutel_state,
    tutel_arguments,
    tutel_class,
    with_backend,
)
from hmoe_repro.networks.sparse_vit import expert_layers, make_sparse_vit

D, H, E, N = 6, 10, 4, 23
HERE = importlib.util.find_spec("tutel") is not None
ABSENT = "Tutel is not installed (it is on no registry); only its stand-in is tested here"


@pytest.fixture(
    params=["stand-in", pytest.param("tutel", marks=pytest.mark.skipif(not HERE, reason=ABSENT))]
)
def tutel(request, monkeypatch):
    if request.param == "stand-in":
        tutel_standin.install(monkeypatch)
    return request.param


def make_layer(backend, *sizes, **settings):
    return with_backend(SparseMoE(*sizes, **settings), backend)


def pair(**settings):
    "A layer by each backend, with the same weights, far enough apart to disagree if they could."
    torch.manual_seed(3)
    ours = SparseMoE(D, H, num_experts=E, dropout=0.0, **settings)
    with torch.no_grad():
        for parameter in ours.router.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return ours, with_backend(ours, "tutel")


def passed(layer, x, target):
    "Output, auxiliary loss, gradient of x, and gradients of the parameters by our names."
    x = x.clone().requires_grad_()
    y = layer(x)
    F.mse_loss(y, target).backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return y, layer.auxiliary_loss, x.grad, from_tutel_state(grads)


def compared(ours, theirs, n=N):
    x, target = torch.randn(2, n, D)
    one, other = passed(ours, x, target), passed(theirs, x, target)
    for a, b in zip(one[:3], other[:3]):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert one[3].keys() == other[3].keys()
    for name, gradient in one[3].items():
        torch.testing.assert_close(gradient, other[3][name], atol=1e-4, rtol=1e-4, msg=name)
    return one


@pytest.fixture(params=["no noise", "same noise"])
def fixed_noise(request, monkeypatch):
    "Both draw gate noise by `randn_like`: here it is zero, or the same for both."

    def drawn(like):
        generator = torch.Generator().manual_seed(7)
        return torch.randn(like.shape, generator=generator) * (request.param == "same noise")

    monkeypatch.setattr(torch, "randn_like", drawn)


ROUTERS, KS, ORDERS = ("linear", "cosine"), (1, 2), (True, False)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("by_score", ORDERS)
@pytest.mark.parametrize("loss, noise", [("balance", 1.0), ("product", 0.0), ("product", 1.0)])
def test_both_train_alike(tutel, fixed_noise, router, k, by_score, loss, noise):
    ours, theirs = pair(
        router=router,
        k=k,
        by_score=by_score,
        loss=loss,
        gate_noise=noise,
        capacity_factor=0.8,
        auxiliary_weight=0.5,
    )
    y, auxiliary, _, gradients = compared(ours, theirs)
    assert k == 2 or (y == 0).all(-1).any(), "the capacity drops somebody"
    assert auxiliary > 0
    assert all(g.abs().max() > 0 for g in gradients.values())


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("evaluation", ["dropless", "capacity"])
def test_both_evaluate_alike(tutel, router, k, evaluation):
    ours, theirs = pair(router=router, k=k, evaluation=evaluation, capacity_factor=0.5)
    y, _, _, _ = compared(ours.eval(), theirs.eval())
    assert (y == 0).all(-1).any() == (evaluation == "capacity")
    for one, other in zip(ours.choice, theirs.choice):
        torch.testing.assert_close(one, other)
    assert not theirs.choice.weights.requires_grad


@pytest.mark.parametrize("by_score", ORDERS)
@pytest.mark.parametrize("n", [1, 5, 40])
def test_both_drop_nothing_when_asked(tutel, fixed_noise, by_score, n):
    ours, theirs = pair(capacity_factor=0.0, by_score=by_score)
    y, _, _, _ = compared(ours, theirs, n)
    assert not (y == 0).all(-1).any()


def test_the_stand_in_has_the_trap_that_the_adapter_avoids(monkeypatch):
    "Batch priority with c = 0 drops; a call with capacity_factor=0 overrides nothing."
    tutel_standin.install(monkeypatch)
    ours, theirs = pair(capacity_factor=0.0)
    x, dropped = torch.randn(200, D), {}
    bare = tutel_class()(**tutel_arguments(ours)).eval()
    bare.load_state_dict(to_tutel_state(ours.state_dict()))
    for way, factor, by_score in (("priority", 0.0, True), ("arrival", 0.0, False)):
        bare.gates[0].capacity_factor, bare.batch_prioritized_routing = factor, by_score
        dropped[way] = int((bare(x) == 0).all(-1).sum())
    bare.gates[0].capacity_factor = 0.5
    dropped["call"] = int((bare(x, capacity_factor=0) == 0).all(-1).sum())
    dropped["adapter"] = int((theirs.eval()(x) == 0).all(-1).sum())
    assert dropped["priority"] > 0, dropped
    assert dropped["call"] > 0, dropped
    assert dropped["arrival"] == dropped["adapter"] == 0


# Four tokens. By score they queue 3, 0, 1, 2; their choices are (2, 1), (0, 1), (0, 1), (0, 2).
SCORES = [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.5, 0.1, 0.4), (0.02, 0.08, 0.9)]


@pytest.mark.parametrize(
    "k, factor, by_score, served",
    [
        (1, 0.0, False, [[1], [1], [1], [1]]),  # loads 3, 0, 1: room for 3
        (1, 0.0, True, [[1], [0], [0], [1]]),  # token 3 is first at its expert: room for 1
        (1, -0.5, True, [[1], [0], [0], [1]]),
        (2, 0.0, True, [[1, 1], [1, 1], [1, 1], [1, 1]]),  # its row: 3 first choices of expert 0
        (2, -0.5, True, [[1, 1], [1, 0], [0, 1], [1, 1]]),  # the least of 4 and 2 floor(0.5 * 2)
        (2, -1.0, True, [[1, 1], [1, 1], [1, 1], [1, 1]]),
    ],
)
def test_who_is_served_without_a_capacity_is_as_by_hand(tutel, k, factor, by_score, served):
    """Expert e returns e + 1 in the first place, so that the output says whose it is."""
    layer = SparseMoE(4, 4, num_experts=3, k=k, router="linear", by_score=by_score, dropout=0.0)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(3, 4))
        layer.experts.w2.zero_()
        layer.experts.b2.copy_(torch.tensor([1.0, 2.0, 3.0])[:, None])
    bare = tutel_class()(**tutel_arguments(layer)).eval()
    bare.load_state_dict(to_tutel_state(layer.state_dict()))
    bare.gates[0].capacity_factor = factor
    scores = torch.tensor(SCORES)
    values, chosen = scores.topk(k)
    weights = values / values.sum(1, keepdim=True) if k > 1 else values
    y = bare(nn.functional.pad(scores.log(), (0, 1)).contiguous())
    expected = (weights * (chosen + 1) * torch.tensor(served)).sum(1)
    torch.testing.assert_close(y[:, 0], expected)


def test_evaluation_does_not_hang_on_the_company_unless_asked(tutel):
    images = torch.randn(12, 8, D)
    for evaluation, alike in (("dropless", True), ("capacity", False)):
        _, layer = pair(capacity_factor=0.5, evaluation=evaluation)
        alone, among = layer.eval()(images[:1]), layer(images)[:1]
        assert torch.allclose(alone, among, atol=1e-5) == alike
    layer.train()(images)
    assert layer.choice is None


def test_dictionaries_are_fresh_each_time(monkeypatch):
    tutel_standin.install(monkeypatch)
    layer = SparseMoE(D, H, num_experts=E)
    arguments = tutel_arguments(layer)
    tutel_class()(**arguments)
    assert arguments["gate_type"] == arguments["experts"] == {}
    with pytest.raises(KeyError):
        tutel_class()(**arguments)
    for _ in range(2):
        TutelMoE(layer)


def test_a_layer_is_copied_after_a_pass_and_its_dropout_with_it(tutel):
    torch.manual_seed(0)
    layer = make_layer("tutel", D, H, num_experts=E, dropout=0.5, capacity_factor=0.0)
    layer(torch.randn(7, D)).sum().backward()
    twin, x = copy.deepcopy(layer), torch.randn(7, D)
    assert torch.equal(layer.eval()(x), layer(x))
    assert twin.training
    assert not torch.equal(twin(x), twin(x))
    assert torch.equal(layer(x), twin.eval()(x))
    assert twin.choice is not layer.choice


def test_noise_is_drawn_in_training_alone(tutel):
    _, layer = pair()
    x = torch.randn(30, D)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_shapes_strides_and_precisions(tutel):
    ours, theirs = pair(capacity_factor=0.0, gate_noise=0.0, loss="product")
    x = torch.randn(D, 3, 5).permute(2, 1, 0)
    assert not x.is_contiguous()
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-4)
    flat = torch.randn(D, 9).T
    torch.testing.assert_close(ours(flat), theirs(flat), atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        rough = theirs(x.bfloat16())
        rough.float().square().mean().backward()
    assert rough.dtype is torch.bfloat16
    assert rough.shape == x.shape
    assert all(p.grad.isfinite().all() for p in theirs.parameters())
    torch.testing.assert_close(rough.float(), ours(x), atol=0.05, rtol=0.05)


def test_both_backends_begin_alike_and_leave_the_generator_alike(tutel):
    found = []
    for backend in ("torch", "tutel"):
        torch.manual_seed(5)
        layer = make_layer(backend, D, H, num_experts=E)
        state = layer.state_dict() if backend == "torch" else layer.sparse_state()
        found.append((state, torch.rand(3)))
    (ours, after_ours), (theirs, after_theirs) = found
    assert torch.equal(after_ours, after_theirs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_compiled_layer_keeps_its_auxiliary_loss(tutel):
    _, layer = pair(gate_noise=0.0, loss="product", capacity_factor=0.0, auxiliary_weight=1.0)
    x, target = torch.randn(2, N, D)
    eager = passed(layer, x, target)
    layer.zero_grad()
    torch.compiler.reset()
    layer.compile(backend="aot_eager")
    torch.testing.assert_close(passed(layer, x, target), eager)


# States


SHAPES = {
    "linear": {"gates.0.wg.weight": (E, D)},
    "cosine": {
        "gates.0.temperature": (1,),
        "gates.0.cosine_projector.weight": (256, D),
        "gates.0.cosine_projector.bias": (256,),
        "gates.0.sim_matrix": (256, E),
    },
}
EXPERTS = {
    "_num_global_experts": (),
    "experts.batched_fc1_w": (E, H, D),
    "experts.batched_fc1_bias": (E, H),
    "experts.batched_fc2_w": (E, H, D),
    "experts.batched_fc2_bias": (E, D),
}


@pytest.mark.parametrize("router", ROUTERS)
def test_a_state_has_tutels_names_and_shapes_and_comes_back(router):
    ours = SparseMoE(D, H, num_experts=E, router=router).state_dict()
    theirs = to_tutel_state(ours)
    assert {name: tuple(value.shape) for name, value in theirs.items()} == SHAPES[router] | EXPERTS
    assert theirs[COUNT] == E
    assert theirs[COUNT].dtype == torch.int64
    assert torch.equal(theirs["experts.batched_fc2_w"][2], ours["experts.w2"][2].T)
    assert all(value.is_contiguous() for value in theirs.values())
    back = from_tutel_state(theirs)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[k], ours[k]) for k in ours)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_state_loads_into_the_layer_and_back(tutel, router):
    theirs = make_layer("tutel", D, H, num_experts=E, router=router)
    given = SparseMoE(D, H, num_experts=E, router=router)
    theirs.layer.load_state_dict(to_tutel_state(given.state_dict()))
    fresh = SparseMoE(D, H, num_experts=E, router=router)
    fresh.load_state_dict(theirs.sparse_state())
    x = torch.randn(9, D)
    assert torch.equal(fresh.eval()(x), given.eval()(x))
    with pytest.raises((AssertionError, RuntimeError)):
        more = SparseMoE(D, H, num_experts=E + 1, router=router)
        theirs.layer.load_state_dict(to_tutel_state(more.state_dict()))


def test_a_whole_network_goes_there_and_back(tutel):
    def network(backend):
        layer = make_layer(backend, D, H, num_experts=E)
        return nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(D, D), layer])})

    ours, theirs = network("torch"), network("tutel")
    released = to_tutel_state(ours.state_dict())
    assert "blocks.1.experts.batched_fc2_w" in released
    assert "blocks.0.weight" in released
    theirs["blocks"][1].layer.load_state_dict(to_tutel_state(ours["blocks"][1].state_dict()))
    theirs["blocks"][0].load_state_dict(ours["blocks"][0].state_dict())
    for state in (released, theirs.state_dict()):
        back = from_tutel_state(state)
        assert back.keys() == ours.state_dict().keys()
        assert all(torch.equal(back[k], v) for k, v in ours.state_dict().items())


# What is refused


def test_asked_for_and_absent_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tutel", None)
    monkeypatch.setattr("builtins.__import__", refusing("tutel", __import__))
    with pytest.raises(HmoeError, match="which is not installed. Fix: pip install") as refused:
        make_layer("tutel", D, H)
    assert INSTALL in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "git+https://" in INSTALL
    assert isinstance(make_layer("torch", D, H), SparseMoE)


def refusing(name, usual):
    "An `__import__` for which a package is not there."

    def find(wanted, *args, **kwargs):
        if wanted.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return usual(wanted, *args, **kwargs)

    return find


def test_a_broken_tutel_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "tutel", types.ModuleType("tutel"))
    with pytest.raises(HmoeError, match="cannot be imported.*moe.*Fix: pip install"):
        tutel_class()


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(k=5), "5 of 4 experts"),
        (dict(gate_noise=0.0), "loss='product'"),
        (dict(num_experts=1), "compares experts with each other, and there is only one"),
        (dict(capacity_factor=-1.0), "capacity_factor above 0"),
        (dict(router="dot"), "cosine, linear"),
    ],
)
def test_settings_are_refused_as_in_the_other_layer(monkeypatch, wrong, said):
    tutel_standin.install(monkeypatch)
    with pytest.raises(HmoeError, match=said):
        make_layer("tutel", D, H, **{"num_experts": E} | wrong)


def test_a_capacity_without_a_place_is_refused_as_in_the_other_layer(monkeypatch):
    tutel_standin.install(monkeypatch)
    layer = make_layer("tutel", D, H, num_experts=E, capacity_factor=0.01)
    with pytest.raises(HmoeError, match="leaves no capacity for 30 tokens and 4 experts"):
        layer(torch.randn(30, D))
    assert layer.eval()(torch.randn(30, D)).any()


def test_unknown_backends_are_refused(monkeypatch):
    tutel_standin.install(monkeypatch)
    with pytest.raises(HmoeError, match="torch, tutel"):
        make_layer("triton", D, H)
    with pytest.raises(HmoeError, match="torch, tutel"):
        with_backend(SparseMoE(D, H), "triton")


# Networks


@pytest.mark.parametrize("copy_from_file", [False, True])
def test_a_network_computes_alike_by_both_backends(tutel, tmp_path, copy_from_file):
    "From one seed, or from a file in the names of the released code."
    path, nets = "random", []
    if copy_from_file:
        given = make_sparse_vit("gmoe_small", (1, 16, 16)).body.state_dict()
        path = tmp_path / "released.pth"
        torch.save(to_tutel_state(given), path)
    for backend in BACKENDS:
        torch.manual_seed(1)
        nets.append(make_sparse_vit("gmoe_small", (1, 16, 16), path, backend=backend).eval())
    ours, theirs = nets
    kinds = [[type(layer).__name__ for layer in expert_layers(net)] for net in nets]
    assert kinds == [["SparseMoE"] * 2, ["TutelMoE"] * 2]
    if copy_from_file:
        assert all(torch.equal(ours.body.state_dict()[k], v) for k, v in given.items())
    x = torch.rand(3, 1, 16, 16)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)


def test_an_algorithm_trains_by_tutel_as_by_hyper_parameter(tutel):
    torch.manual_seed(0)
    hparams = {"network": "gmoe_small", "moe_backend": "tutel"}
    algorithm = get_algorithm("GMoE")((1, 16, 16), 3, 2, hparams)
    batch = [(torch.rand(3, 1, 16, 16), torch.tensor([0, 1, 2])) for _ in range(2)]
    said = [algorithm.update(batch) for _ in range(2)]
    assert said[0]["auxiliary"] > 0
    assert said[0] != said[1]
    assert all(torch.isfinite(p).all() for p in algorithm.parameters())
    copy.deepcopy(algorithm)
