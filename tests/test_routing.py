"""Gate values, entropy, load balance, gradient reversal, domain loss (HMOE, eqs. 2 to 7)."""

import math

import pytest
import torch

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.gating import (
    domain_loss,
    entropy_loss,
    entropy_weight,
    gate_values,
    load_balance_loss,
    log_gate_values,
    reversal_weight,
    reverse_gradient,
)


@pytest.fixture
def codes():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 8, generator=generator), torch.randn(4, 8, generator=generator)


def closed_form(v, e, eps):
    "p_k proportional to 1 / (d_k^2 + eps), in double precision, one sample and expert at a time."
    p = torch.tensor(
        [
            [
                1 / (sum((a - b) ** 2 for a, b in zip(row, column)) + eps)
                for column in e.double().tolist()
            ]
            for row in v.double().tolist()
        ]
    )
    return p / p.sum(1, keepdim=True)


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1.0])
def test_gate_values_have_the_closed_form(codes, eps):
    v, e = codes
    assert torch.allclose(gate_values(v, e, eps), closed_form(v, e, eps), atol=1e-6)
    assert torch.allclose(log_gate_values(v, e, eps).exp(), gate_values(v, e, eps))


def test_gate_is_one_hot_at_an_embedding(codes):
    _, e = codes
    p = gate_values(e, e)
    assert torch.allclose(p, torch.eye(4), atol=1e-5)
    assert torch.isfinite(log_gate_values(e, e)).all()


def test_gate_takes_leading_dimensions(codes):
    v, e = codes
    stacked = gate_values(torch.stack([v, 2 * v]), torch.stack([e, e.flip(0)]))
    assert torch.allclose(stacked[0], gate_values(v, e))
    assert torch.allclose(stacked[1], gate_values(2 * v, e.flip(0)))


def test_gradients_are_finite_at_distance_zero(codes):
    _, e = codes
    v, e = e.clone().requires_grad_(), e.clone().requires_grad_()
    log_p = log_gate_values(v, e)
    (
        entropy_loss(log_p.exp())
        + load_balance_loss(log_p.exp())
        + domain_loss(log_p, torch.arange(4).flip(0))
    ).backward()
    assert torch.isfinite(v.grad).all()
    assert torch.isfinite(e.grad).all()


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_the_gates_gradient_is_largest_at_the_square_root_of_eps(codes, eps):
    _, e = codes
    root, slopes = math.sqrt(eps), {}
    for d in (0.0, 0.1 * root, root, 10 * root):
        v = (e[:1] + d / math.sqrt(8)).requires_grad_()
        log_p = log_gate_values(v, e, eps)[0]
        (log_p[0] - log_p[1]).backward()  # s_1 - s_2; e_2 is far away and adds at most 2 / d_2
        slopes[d] = v.grad.norm().item()
    far = 2 / (e[0] - e[1]).norm().item()
    assert max(slopes, key=slopes.get) == root
    assert slopes[root] == pytest.approx(1 / root, abs=2 * far)
    assert slopes[0.0] <= 1.5 * far


def test_gate_is_computed_in_single_precision_for_half_inputs(codes):
    v, e = codes
    p = gate_values(e.bfloat16(), e.bfloat16())
    assert p.dtype == torch.float32
    assert torch.allclose(p, torch.eye(4), atol=1e-5)


def test_entropy_of_known_distributions():
    assert entropy_loss(torch.eye(5)) == 0
    assert math.isclose(entropy_loss(torch.full((3, 5), 0.2)), math.log(5), rel_tol=1e-6)
    assert math.isclose(
        entropy_loss(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])),
        math.log(2) / 2,
        rel_tol=1e-6,
    )


def test_entropy_gradient_is_exact_inside_and_finite_at_the_corner():
    p = torch.tensor([[0.2, 0.3, 0.5]], requires_grad=True)
    entropy_loss(p).backward()
    assert torch.allclose(p.grad, -(p.detach().log() + 1), atol=1e-6)
    corner = torch.tensor([[1.0, 0.0]], requires_grad=True)
    entropy_loss(corner).backward()
    assert torch.isfinite(corner.grad).all()


def test_load_balance_of_known_loads():
    loads = torch.eye(3)[torch.repeat_interleave(torch.arange(3), torch.tensor([10, 20, 30]))]
    assert math.isclose(
        load_balance_loss(loads),
        sum(q * math.log(3 * q) for q in (1 / 6, 1 / 3, 1 / 2)),
        rel_tol=1e-5,
    )
    assert math.isclose(load_balance_loss(loads), 0.0872, abs_tol=5e-5)
    assert math.isclose(load_balance_loss(torch.eye(3)[[0, 0]]), math.log(3), rel_tol=1e-6)
    assert abs(load_balance_loss(torch.eye(3)[[0, 1, 2]])) < 1e-6


def test_the_other_load_balance_is_the_squared_coefficient_of_variation():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]])  # loads 0.3, 0.5, 0.2
    by_hand = ((0.3 - 1 / 3) ** 2 + (0.5 - 1 / 3) ** 2 + (0.2 - 1 / 3) ** 2) / 3 / (1 / 3) ** 2
    assert math.isclose(load_balance_loss(p, "cv2"), by_hand, rel_tol=1e-5)
    with pytest.raises(HmoeError, match="unknown load balance 'cv'.* Valid: kl, cv2"):
        load_balance_loss(p, "cv")


def test_load_balance_sees_the_batch_mean_and_not_the_rows():
    uniform, decided = torch.full((6, 3), 1 / 3), torch.eye(3)[[0, 1, 2, 0, 1, 2]]
    assert torch.isclose(load_balance_loss(uniform), load_balance_loss(decided), atol=1e-6)


def test_ramps():
    assert [entropy_weight(t) for t in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0)] == [
        0.0,
        0.2,
        0.5,
        1.0,
        1.0,
        1.0,
    ]
    for t in (0.0, 0.2, 0.7, 1.0):
        assert math.isclose(reversal_weight(t), 2 / (1 + math.exp(-10 * t)) - 1)
    assert reversal_weight(0.0) == 0.0


def test_reversal_is_the_identity_forward_and_scales_the_gradient():
    x = torch.randn(5, requires_grad=True)
    out = reverse_gradient(x, 0.25)
    assert torch.equal(out, x)
    (out * torch.arange(5.0)).sum().backward()
    assert torch.allclose(x.grad, -0.25 * torch.arange(5.0))


def test_domain_loss_averages_over_labelled_samples_only(codes):
    log_p = log_gate_values(*codes)
    labels = torch.full((64,), -1)
    labels[3], labels[9] = 0, 1
    assert torch.isclose(domain_loss(log_p, labels), -(log_p[3, 0] + log_p[9, 1]) / 2)


def test_domain_loss_without_labels_is_zero_and_has_a_gradient(codes):
    v = codes[0].clone().requires_grad_()
    loss = domain_loss(log_gate_values(v, codes[1]), torch.full((64,), -1))
    loss.backward()
    assert loss == 0
    assert not v.grad.any()


@pytest.mark.parametrize("bad", [4, -2])
def test_domain_loss_refuses_foreign_labels(codes, bad):
    labels = torch.zeros(64, dtype=torch.long)
    labels[5] = bad
    with pytest.raises(HmoeError, match="-1 ... 3"):
        domain_loss(log_gate_values(*codes), labels)
