"""The assembled model: modes of inference, losses and who learns from them
(HMOE, eqs. 1, 8 and 9)."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.hmoe import HMOE, HMOE_MODES, total_loss
from hmoe_repro.method.toy import MLP


def count(module):
    return sum(p.numel() for p in module.parameters())


def toy():
    return HMOE(
        MLP((1, 32, 32, 32)),
        MLP((1, 32, 32, 8)),
        32,
        1,
        3,
        embedding_dim=8,
        hidden=(32, 32, 32),
        classifier_hidden=(32,),
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return HMOE(
        MLP((6, 16, 12)),
        MLP((6, 16, 32)),
        feature_dim=12,
        num_outputs=4,
        num_experts=5,
        adversarial_classes=4,
    )


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(40, 6, generator=generator), torch.randint(4, (40,), generator=generator)


def test_parameter_counts(model):
    t = toy()
    assert [count(m) for m in (t.featurizer, t.encoder, t.hypernetwork)] + [
        t.embeddings.numel()
    ] == [2176, 1384, 38_337, 24]
    assert count(t) == 41_921
    assert count(model.adversary) == 74_240 + 257 * 4


def test_forward_is_equation_1(model, batch):
    out = model(batch[0])
    theta = model.hypernetwork(model.embeddings)
    for i in (0, 17):
        d2 = ((out.v[i] - model.embeddings) ** 2).sum(1)
        p = (1 / (d2 + 1e-6)) / (1 / (d2 + 1e-6)).sum()
        y = sum(p[k] * (theta[k, :48].view(4, 12) @ out.z[i] + theta[k, 48:]) for k in range(5))
        assert torch.allclose(out.p[i], p, atol=1e-6)
        assert torch.allclose(out.y[i], y, atol=1e-5)


def test_mixing_probabilities(batch):
    torch.manual_seed(0)
    model = HMOE(nn.Identity(), nn.Linear(6, 32), 6, 4, 3, mix="prob")
    out = model(batch[0])
    assert torch.allclose(
        out.y.exp(), (out.p[..., None] * out.experts.softmax(-1)).sum(1), atol=1e-6
    )
    assert torch.isclose(model.losses(out, batch[1])["L_y"], F.nll_loss(out.y, batch[1]))


@pytest.mark.parametrize(
    "build",
    [
        lambda: HMOE(nn.Linear(6, 64), nn.Linear(6, 32), 64, 10, 5),
        lambda: HMOE(nn.Linear(6, 32), nn.Linear(6, 8), 32, 2, 3, 8, (32, 32, 32), (32,)),
    ],
)
def test_the_gate_starts_nearly_uniform(build):
    entropies = []
    for seed in range(20):
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            out = model(0.5 * torch.randn(64, 6))
        entropies.append(
            model.losses(out, torch.zeros(64, dtype=torch.long))["L_en"].item()
            / math.log(out.p.shape[1])
        )
    assert 0.9 < sum(entropies) / 20 <= 1


def test_predict_agrees_with_predict_modes_and_brute_force(model, batch):
    x = batch[0]
    with torch.no_grad():
        modes, out = model.predict_modes(x), model(x)
        theta_own = model.hypernetwork(out.v)
        own = torch.stack(
            [theta[:48].view(4, 12) @ z + theta[48:] for theta, z in zip(theta_own, out.z)]
        )
        for mode in HMOE_MODES:
            assert torch.allclose(model.predict(x, mode), modes[mode], atol=1e-5)
    assert torch.allclose(modes["ood"], own, atol=1e-5)
    assert torch.allclose(modes["max"], out.experts[torch.arange(40), out.p.argmax(1)], atol=1e-6)
    assert torch.equal(modes["mix"], out.y)


def test_modes_coincide_where_codes_are_embeddings(model, batch):
    class Quantised(nn.Module):
        def forward(self, x):
            return model.embeddings[torch.arange(len(x)) % 5]

    model.encoder = Quantised()
    with torch.no_grad():
        modes = model.predict_modes(batch[0])
    assert torch.allclose(modes["max"], modes["mix"], atol=1e-4)
    assert torch.allclose(modes["ood"], modes["mix"], atol=1e-4)


def test_max_and_ood_do_not_compute_every_expert(model, batch, monkeypatch):
    def forbidden(*_):
        raise AssertionError("all experts were computed")

    monkeypatch.setattr(model.hypernetwork, "expert_outputs", forbidden)
    assert model.predict(batch[0], "max").shape == model.predict(batch[0], "ood").shape == (40, 4)
    with pytest.raises(AssertionError):
        model.predict(batch[0], "mix")


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    parts = {
        "featurizer": model.featurizer,
        "encoder": model.encoder,
        "hypernetwork": model.hypernetwork,
        "adversary": model.adversary,
    }
    reached = {
        name
        for name, part in parts.items()
        if any(p.grad is not None and p.grad.any() for p in part.parameters())
    }
    return reached | (
        {"embeddings"}
        if model.embeddings.grad is not None and model.embeddings.grad.any()
        else set()
    )


@pytest.mark.parametrize(
    "name, parts",
    [
        ("L_y", {"featurizer", "encoder", "hypernetwork", "embeddings"}),
        ("L_en", {"encoder", "embeddings"}),
        ("L_kl", {"encoder", "embeddings"}),
        ("L_d", {"encoder", "embeddings"}),
        ("L_ad", {"encoder", "adversary"}),
    ],
)
def test_who_learns_from_which_loss(model, batch, name, parts):
    x, labels = batch
    losses = model.losses(model(x), labels, domain_labels=labels, progress=0.5)
    assert gradients(model, losses[name]) == parts


def test_the_encoder_is_trained_against_the_adversary(model, batch):
    x, labels = batch

    def encoder_gradient(progress):
        model.zero_grad()
        model.losses(model(x), labels, progress=progress)["L_ad"].backward()
        return model.encoder[0].weight.grad.clone()

    model.zero_grad()
    F.cross_entropy(model.adversary(model.encoder(x)), labels).backward()
    straight = model.encoder[0].weight.grad.clone()
    assert torch.allclose(encoder_gradient(0.3), -math.tanh(1.5) * straight, atol=1e-7)
    assert not encoder_gradient(0.0).any()


def test_domain_labels_for_none_some_and_all(model, batch):
    x, labels = batch
    out = model(x)
    some = torch.where(torch.arange(40) < 10, labels % 2, -1)  # two labelled domains, five experts
    assert "L_d" not in model.losses(out, labels)
    assert model.losses(out, labels, torch.full((40,), -1))["L_d"] == 0
    assert torch.isclose(
        model.losses(out, labels, some)["L_d"], -out.log_p[torch.arange(10), labels[:10] % 2].mean()
    )
    assert torch.isclose(model.losses(out, labels, labels)["L_d"], F.nll_loss(out.log_p, labels))


def test_total_loss_is_equation_9(model, batch):
    losses = model.losses(model(batch[0]), batch[1], domain_labels=batch[1])
    weights = {
        "lambda_y": 1.0,
        "lambda_en": 2.0,
        "lambda_kl": 3.0,
        "lambda_ad": 0.01,
        "lambda_d": 0.5,
        "lr": 7.0,
    }
    for progress, gamma in ((0.0, 0.0), (0.2, 0.4), (0.5, 1.0), (1.0, 1.0)):
        expected = (
            losses["L_y"]
            + 2 * gamma * losses["L_en"]
            + 3 * losses["L_kl"]
            + 0.01 * losses["L_ad"]
            + 0.5 * losses["L_d"]
        )
        assert torch.isclose(total_loss(losses, weights, progress), expected)


def test_total_loss_refuses_a_weight_without_a_loss(model, batch):
    losses = model.losses(model(batch[0]), batch[1])
    with pytest.raises(HmoeError, match="L_d"):
        total_loss(losses, {"lambda_y": 1, "lambda_d": 1})
    with pytest.raises(HmoeError, match="lambda_y"):
        total_loss(losses, {"lambda_y": 0.0})
    assert torch.equal(total_loss(losses, {"lambda_y": 1, "lambda_d": 0}), losses["L_y"])


def test_regression(batch):
    model = toy()
    x = torch.linspace(0, 1, 9)[:, None]
    assert torch.isclose(
        model.losses(model(x), x, target_loss=F.mse_loss)["L_y"], F.mse_loss(model(x).y, x)
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x, y: m.predict(x, "best"),
        lambda m, x, y: m.losses(m(x), y, domain_labels=y + 2),
        lambda m, x, y: HMOE(m.featurizer, m.encoder, 12, 4, 2, mix="mean"),
    ],
)
def test_bad_input_gets_one_line(model, batch, call):
    with pytest.raises(HmoeError) as error:
        call(model, *batch)
    assert "\n" not in str(error.value)


def test_unknown_mode_names_the_modes(model, batch):
    with pytest.raises(HmoeError, match="mix, max, ood"):
        model.predict(batch[0], "MIX")


def test_all_parts_learn(model, batch):
    x, labels = batch
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for step in range(60):
        losses = model.losses(model(x), labels, labels % 3, step / 60)
        optimizer.zero_grad()
        total_loss(
            losses,
            {"lambda_y": 1, "lambda_d": 1, "lambda_en": 0.1, "lambda_kl": 0.1, "lambda_ad": 0.01},
            step / 60,
        ).backward()
        optimizer.step()
    assert losses["L_y"] < 0.3
    assert losses["L_d"] < 1.0
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_independent_experts_begin_as_generated_ones_and_share_nothing(batch):
    built = {}
    for experts in ("hypernetwork", "independent"):
        torch.manual_seed(0)
        built[experts] = HMOE(
            MLP((6, 16, 12)), MLP((6, 16, 32)), 12, 4, num_experts=5, experts=experts
        )
    shared, alone = built.values()
    x, y = batch
    assert torch.allclose(shared(x).experts, alone(x).experts)
    assert count(alone.hypernetwork) == 5 * (12 + 1) * 4
    modes = alone.predict_modes(x)
    assert [*modes] == ["mix", "max"]
    assert all(torch.allclose(modes[mode], alone.predict(x, mode), atol=1e-5) for mode in modes)
    with pytest.raises(HmoeError, match="unknown inference mode 'ood'. Valid: mix, max"):
        alone.predict(x, "ood")
    before = [model(x).experts.detach() for model in built.values()]
    for model in built.values():  # an update of the second expert alone
        F.cross_entropy(model(x).experts[:, 1], y).backward()
        with torch.no_grad():
            for parameter in model.hypernetwork.parameters():
                parameter -= 0.1 * parameter.grad
    changed = [(m(x).experts - b).abs().amax((0, 2)) > 0 for m, b in zip(built.values(), before)]
    assert changed[0].all()
    assert changed[1].tolist() == [False, True, False, False, False]


def test_the_entropy_alone_is_a_tensor_before_its_weight_rises():
    losses = {"L_en": torch.tensor(0.7, requires_grad=True)}
    total = total_loss(losses, {"lambda_en": 1.0}, progress=0.0)
    total.backward()
    assert total.item() == 0
    assert losses["L_en"].grad.item() == 0
