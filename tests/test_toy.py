"""The sine intervals and the stacked training of many seeds (HMOE, section 4.1)."""

import json
import math
import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hmoe_repro.core.devices import single_thread
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.method.hmoe import total_loss
from hmoe_repro.method.toy import MLP, sine_intervals
from hmoe_repro.method.toy_hmoe import TOY_HPARAMS, intervals_found, toy_hparams, toy_model
from hmoe_repro.method.toy_seeds import ToyTrainer, run_toy, stack_models, unstack_model


@pytest.mark.parametrize("points", ["even", "random"])
def test_points_lie_on_the_sine_in_their_intervals(points):
    x, y, interval = sine_intervals(points, seed=5)
    assert interval.tolist() == [0] * 10 + [1] * 20 + [2] * 30
    assert torch.allclose(y, torch.sin(4 * torch.pi * x), atol=1e-6)
    assert ((x[:, 0] >= interval) & (x[:, 0] <= interval + 0.5)).all()


def test_even_points_include_both_ends_and_random_ones_follow_the_seed():
    x, _, interval = sine_intervals()
    assert [x[interval == i].aminmax() for i in range(3)] == [(i, i + 0.5) for i in range(3)]
    assert torch.equal(sine_intervals("random", 1)[0], sine_intervals("random", 1)[0])
    assert not torch.equal(sine_intervals("random", 1)[0], sine_intervals("random", 2)[0])
    with pytest.raises(HmoeError, match="even, random"):
        sine_intervals("grid")


def test_mlp_ends_linearly():
    assert [type(layer).__name__ for layer in MLP((1, 4, 4, 2))] == [
        "Linear",
        "SiLU",
        "Linear",
        "SiLU",
        "Linear",
    ]


def reference(seed, hparams, steps, total):
    "Losses of one seed, trained with the ordinary HMOE and the ordinary Adam."
    model = toy_model(seed, hparams)
    x, y, _ = sine_intervals(hparams["points"], seed)
    optimizer, history = torch.optim.Adam(model.parameters(), lr=hparams["lr"]), []
    for step in range(steps):
        losses = model.losses(model(x), y, target_loss=F.mse_loss)
        loss = total_loss(losses, hparams, step / total)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(torch.stack([loss, losses["L_y"], losses["L_en"], losses["L_kl"]]).detach())
    return torch.stack(history)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"points": "random"},
        {"lambda_en": 0.0},
        {"lambda_en": 0.0, "lambda_kl": 0.0},
        {"load_balance": "cv2"},
    ],
    ids=str,
)
def test_the_stack_trains_as_the_ordinary_model_does(change):
    hparams = toy_hparams({"seeds": 3, "lr": 3e-3, **change})
    trainer = ToyTrainer(hparams, steps=40)
    stacked = torch.stack(
        [torch.stack(list(trainer.step().values())) for _ in range(25)]
    )  # (25, 4, 3)
    for seed in range(3):
        assert torch.allclose(
            stacked[..., seed], reference(seed, hparams, 25, 40), rtol=2e-3, atol=1e-4
        ), seed


def test_a_seed_does_not_depend_on_its_company():
    alone, among = ToyTrainer({"seeds": [4]}, 50), ToyTrainer({"seeds": [1, 4, 7]}, 50)
    for _ in range(12):
        a, b = alone.step(), among.step()
    assert all(torch.isclose(a[name][0], b[name][1], rtol=1e-3, atol=1e-5) for name in a)


def test_initial_weights_leave_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    toy_model(3, toy_hparams())
    assert torch.equal(torch.rand(1), expected)


def test_models_survive_stacking():
    models = [toy_model(seed, toy_hparams()) for seed in (2, 9)]
    stack = stack_models(models)
    assert stack.shape == (2, 41_921)
    for model, row in zip(models, stack):
        back = unstack_model(row, toy_hparams())
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), back.parameters()))


def test_the_best_of_the_last_tenth_is_kept():
    trainer, losses, rows = ToyTrainer({"seeds": 2, "lr": 5e-2}, 60), [], []
    for _ in range(60):
        rows.append(trainer.stack.clone())
        losses.append(trainer.step()["loss"])
    for seed in range(2):
        best = 54 + int(torch.stack(losses)[54:, seed].argmin())
        assert trainer.best_loss[seed] == losses[best][seed]
        assert torch.equal(trainer.best[seed], rows[best][seed])


@pytest.mark.parametrize("cut", [0, 7, 55])
def test_a_resumed_run_is_the_same_run(cut):
    with single_thread():
        states = []
        whole = run_toy(
            {"seeds": 2}, 60, on_checkpoint=lambda trainer: states.append(trainer.state())
        )
        state = next(s for s in states if s["step"] > cut)
        again = run_toy({"seeds": 2}, 60, state=state)
    assert again[:2] == whole[:2]
    assert all(torch.equal(whole[2][name], again[2][name]) for name in whole[2])


def test_a_state_is_made_of_tensors_and_numbers_and_is_a_copy():
    trainer = ToyTrainer({"seeds": 2}, 30)
    trainer.step()
    state = trainer.state()
    before = state["stack"].clone()
    trainer.step()
    assert torch.equal(state["stack"], before)

    def leaves(node):
        return (
            [leaf for child in node.values() for leaf in leaves(child)]
            if isinstance(node, dict)
            else [node]
        )

    assert all(isinstance(leaf, (torch.Tensor, int, float)) for leaf in leaves(state))


def test_the_result_is_plain_and_small():
    result, checkpoints, arrays = run_toy({"seeds": 3}, 50)
    json.dumps([result, checkpoints], allow_nan=False)
    assert [s["seed"] for s in result["per_seed"]] == [0, 1, 2]
    assert set(result["per_seed"][0]) == {
        "seed",
        "mse",
        "intervals_found",
        "majority_found",
        "experts_used",
        "entropy",
        "load_balance",
        "L_y",
        "final_loss",
    }
    assert result["snapshot_epochs"] == [0, 1, 5, 12, 25, 38, 50]
    shots = len(result["snapshot_epochs"])
    assert arrays["experts"].shape == arrays["gates"].shape == (3, shots, 121, 3)
    assert arrays["curves"].shape == (3, 3, 121)
    assert 4 * sum(a.numel() * a.element_size() for a in arrays.values()) <= 200_000  # twelve seeds
    assert [c["step"] for c in checkpoints] == list(range(50))
    assert all(len(c["losses"]["L_en"]) == 3 for c in checkpoints)
    kept = arrays["curves"][:, 0].float()
    mix = (arrays["gates"].float() * arrays["experts"].float()).sum(-1)[:, -1]
    assert torch.allclose(kept, mix, atol=1e-2)


def test_evaluation_of_kept_parameters_matches_the_training_loss():
    result, _, _ = run_toy({"seeds": 2}, 40)
    for seed in result["per_seed"]:
        assert math.isclose(
            seed["L_y"] + seed["entropy"] + seed["load_balance"], seed["final_loss"], rel_tol=1e-3
        )
        assert seed["mse"]["mix"] == seed["L_y"]


def test_what_counts_as_found():
    interval = sine_intervals()[2]
    perfect = F.one_hot(interval, 3).float()
    assert intervals_found(perfect, interval)
    assert intervals_found(perfect[:, [1, 2, 0]], interval)
    assert not intervals_found(perfect[:, [0, 0, 2]], interval)
    one_off = perfect.clone()
    one_off[[10, 35]] = one_off[[10, 35]].roll(1, 1)  # one of 20 and one of 30 points
    assert intervals_found(one_off, interval)
    one_off[0] = one_off[0].roll(1)  # one of 10 is too many
    assert not intervals_found(one_off, interval)


def test_divergence_is_reported_in_one_line():
    with pytest.raises(HmoeError, match="lower lr"):
        run_toy({"seeds": 1, "lr": 1e30}, 40)


@pytest.mark.parametrize(
    "given", [{"lamda_en": 1}, {"seeds": 0}, {"seeds": []}, {"points": "grid"}]
)
def test_bad_settings_get_one_line(given):
    with pytest.raises(HmoeError) as error:
        ToyTrainer(given, 10)
    assert "\n" not in str(error.value)


@pytest.mark.serial
def test_twelve_seeds_cost_less_than_four_times_one():
    def seconds(trainer, steps=40):
        start = time.process_time()
        for _ in range(steps):
            trainer.step()
        return time.process_time() - start

    with single_thread():
        one, twelve = ToyTrainer({"seeds": 1}), ToyTrainer({"seeds": 12})
        seconds(one), seconds(twelve)
        ratios = [seconds(twelve) / seconds(one) for _ in range(7)]
    assert statistics.median(ratios) < 4, ratios


def test_defaults_are_the_papers():
    assert {name: TOY_HPARAMS[name] for name in ("embedding_dim", "num_experts", "lr")} == {
        "embedding_dim": 8,
        "num_experts": 3,
        "lr": 1e-3,
    }
    assert all(TOY_HPARAMS[name] == 1.0 for name in ("lambda_y", "lambda_en", "lambda_kl"))


def test_an_mlp_has_dropout_before_each_activation_and_can_be_cut():
    torch.manual_seed(0)
    plain = MLP((3, 8, 8, 2), nn.ReLU)
    torch.manual_seed(0)
    dropped = MLP((3, 8, 8, 2), nn.ReLU, dropout=0.5)
    kinds = [type(layer).__name__ for layer in dropped]
    assert kinds == ["Linear", "Dropout", "ReLU"] * 2 + ["Linear"]
    assert [type(layer).__name__ for layer in plain] == [k for k in kinds if k != "Dropout"]
    for a, b in zip(plain.parameters(), dropped.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.rand(4, 3)
    assert torch.equal(plain(x), dropped.eval()(x))
    assert not torch.equal(plain(x), dropped.train()(x))
    assert type(plain[:2]) is nn.Sequential
    assert torch.equal(plain[2:](plain[:2](x)), plain(x))
