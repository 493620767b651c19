"""The learning-rate range test: rates, smoothing and suggestion by hand, kinds of optimisers, the
command with its files, and the notes on runs that still learned at their end."""

import json
import math
import os
import subprocess
import sys
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from commands import hmoe

from hmoe_repro.algorithms.base import SHARED_HPARAMS
from hmoe_repro.analysis.curves import is_rising, rising_notes, rising_runs
from hmoe_repro.analysis.tables import small_test_notes
from hmoe_repro.apps import find_lr as module
from hmoe_repro.apps.find_lr import find_lr, growing_rates, smoothed_losses, suggest_rate
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.model import build_dataset
from hmoe_repro.training.planning import make_config, make_toy_config
from hmoe_repro.training.trainer import Trainer


def config_of(algorithm="ERM", **changed):
    options = {"network": "small_cnn"} | changed
    return make_config(algorithm, "DigitDomainsTiny", ["photo"], **options)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def test_rates_grow_by_one_factor_from_the_first_to_the_last():
    rates = growing_rates(1e-5, 0.1, 9)
    assert rates[0] == 1e-5
    assert rates[-1] == pytest.approx(0.1)
    assert np.allclose(np.diff(np.log(rates)), math.log(1e4) / 8)


def test_the_smoothed_loss_is_a_weighted_mean_of_all_losses_so_far():
    losses, beta = [3.0, 1.0, 4.0, 1.5], 0.7
    for t, smooth in enumerate(smoothed_losses(losses, beta)):
        weights = [beta ** (t - i) for i in range(t + 1)]
        assert smooth == pytest.approx(np.average(losses[: t + 1], weights=weights))
    assert smoothed_losses([2.5] * 5) == pytest.approx([2.5] * 5)


def test_the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss():
    assert suggest_rate([0.001, 0.01, 0.1, 1.0], [2.0, 1.5, 1.0, 3.0]) == pytest.approx(0.01)
    with pytest.raises(HmoeError, match="from"):
        suggest_rate([0.1, 1.0], [1.0, 2.0])
    with pytest.raises(HmoeError, match="to"):
        suggest_rate([0.1, 1.0], [2.0, 1.0])


@pytest.mark.parametrize(
    "algorithm", ["ERM", "DANN", "SAM", "SWAD", "ERM++", "Fish", "DMG", "HMOE-DN", "SAM+IRM"]
)
def test_every_optimiser_follows_and_keeps_its_ratio(algorithm, monkeypatch):
    config = config_of(algorithm)
    trainer = Trainer(config, build_dataset(config), "cpu")
    rates = growing_rates(1e-5, 1e-3, 10)
    used = []

    def update(trainer=trainer, real=trainer.update):
        real()
        groups = [g["lr"] for o in module._optimizers(trainer.algorithm) for g in o.param_groups]
        used.append((trainer.algorithm.hparams["lr"], groups))

    monkeypatch.setattr(trainer, "update", update)
    losses, stopped = module._test_rates(trainer, rates, None)
    assert len(losses) == len(used) == 10
    assert not stopped
    plain = Trainer(config, build_dataset(config), "cpu")
    plain.update()
    usual = [g["lr"] for o in module._optimizers(plain.algorithm) for g in o.param_groups]
    assert usual
    own = {"DMG": 1, "ERM++": 1}.get(algorithm, len(usual))  # the rest has a rate of its own
    for rate, (of_hparams, groups) in zip(rates, used):
        assert of_hparams == pytest.approx(rate)
        assert groups[0] > 0
        if algorithm != "ERM++":  # which warms up at another rate
            for group, base in list(zip(groups, usual))[:own]:
                assert group / rate == pytest.approx(base / config.hparams["lr"])


def test_the_first_loss_is_that_of_an_untrained_network_on_the_first_batch():
    config = config_of()
    trainer = Trainer(config, build_dataset(config), "cpu")
    x, y = (torch.cat(part) for part in zip(*((x, y) for x, y in trainer.batches.next())))
    expected = torch.nn.functional.cross_entropy(trainer.algorithm.predict(x), y).item()
    tested = find_lr(config, updates=10, device="cpu")
    assert tested.frame.loss[0] == pytest.approx(expected, rel=1e-5)
    again = find_lr(config, updates=10, device="cpu")
    pd.testing.assert_frame_equal(tested.frame, again.frame)


def test_a_test_that_diverges_stops_and_still_suggests():
    tested = find_lr(config_of(), updates=60, start=1e-5, end=1e6, device="cpu")
    assert tested.stopped
    assert len(tested.frame) < 60
    assert np.isfinite(tested.frame.to_numpy()).all()
    lowest = tested.frame.rate[tested.frame.smoothed.idxmin()]
    assert tested.suggested == pytest.approx(lowest / 10, rel=0.06)


def test_it_leaves_configuration_and_generators_alone():
    config = config_of()
    before = config.to_dict(), torch.get_rng_state().clone(), torch.get_num_threads()
    find_lr(config, updates=10, device="cpu")
    assert config.to_dict() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_num_threads() == before[2]


@pytest.mark.parametrize(
    "given", [{"updates": 9}, {"start": 0.0}, {"start": 1.0}, {"end": math.inf}, {"end": -1.0}]
)
def test_bad_ranges_are_refused(given):
    with pytest.raises(HmoeError):
        find_lr(config_of(), device="cpu", **given)


def test_the_toy_is_refused():
    with pytest.raises(HmoeError, match="lr"):
        find_lr(make_toy_config(steps=10, seeds=1))


GIVEN = ["find-lr", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--test-domain", "photo"]
GIVEN += ["--network", "small_cnn", "--updates", "12", "--device", "cpu"]


def test_the_command_writes_picture_and_record_and_replaces_neither(tmp_path):
    first = hmoe(*GIVEN, "--output", "lr.png", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    record = json.loads((tmp_path / "lr.json").read_text())
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert record["config"]["algorithm"] == "ERM"
    assert len(record["rate"]) == len(record["loss"]) == len(record["smoothed"])
    assert record["smoothed"] == pytest.approx(smoothed_losses(record["loss"]))
    assert not list(tmp_path.glob("runs/*/record.json"))
    (tmp_path / "lr.png").unlink()
    kept = (tmp_path / "lr.json").read_bytes()
    refused = hmoe(*GIVEN, "--output", "lr.png", folder=tmp_path)
    assert refused.returncode != 0
    assert "lr.json" in refused.stderr
    assert (tmp_path / "lr.json").read_bytes() == kept
    again = hmoe(*GIVEN, "--output", "lr.png", "--overwrite", folder=tmp_path)
    assert again.returncode == 0
    assert json.loads((tmp_path / "lr.json").read_text())["loss"] == record["loss"]


@pytest.mark.parametrize("length", [["--steps", "20"], ["--protocol", "dmg", "--epochs", "3"], []])
def test_a_note_says_that_steps_are_not_the_updates_of_the_test(length, tmp_path):
    done = hmoe(*GIVEN, *length, "--output", "lr.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "lr.json").read_text())
    assert len(record["rate"]) == 12
    note = f"The test makes 12 updates, set by --updates. {' '.join(length[-2:])} sets only"
    assert (note in done.stdout) == bool(length)
    assert ("set by --updates" in done.stdout) == bool(length)
    if "--steps" in length:
        assert record["config"]["steps"] == 20


def test_another_suffix_is_refused_before_training(tmp_path):
    refused = hmoe(*GIVEN, "--output", "lr.jpg", folder=tmp_path)
    assert refused.returncode != 0
    assert "png" in refused.stderr
    assert not list(tmp_path.glob("lr.*"))


def test_a_killed_test_leaves_nothing_and_can_be_repeated(tmp_path):
    program = f"""
        import os
        from hmoe_repro.apps import find_lr
        from hmoe_repro.training.planning import make_config

        config = make_config("ERM", "DigitDomainsTiny", ["photo"], network="small_cnn")
        stop = lambda done, total: os._exit(9) if done == 5 else None
        find_lr.find_lr(config, 12, device="cpu", on_step=stop).save({str(tmp_path / "a.png")!r})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ})
    assert killed.returncode == 9
    assert not list(tmp_path.iterdir())
    paths = find_lr(config_of(), updates=12, device="cpu").save(tmp_path / "a.png")
    assert [path.name for path in paths] == ["a.png", "a.json"]


@pytest.mark.parametrize(
    "accuracies, rising",
    [
        ([0.1], False),
        ([0.1, 0.5], True),
        ([0.5, 0.5], False),
        ([0.1, 0.6, 0.5], False),
        ([0.1, 0.2, 0.3, 0.4, 0.9, 0.8], True),  # 85 against 35: a trend
        ([0.1, 0.2, 0.85, 0.9, 0.86, 0.88], False),  # 87 against 87.5
        ([0.1, 0.2, 0.80, 0.81, 0.820, 0.801], False),  # 81.05 against 80.5
        ([0.1, 0.2, 0.80, 0.81, 0.835, 0.806], True),  # 82.05 against 80.5
        ([math.nan, 0.1, 0.2], True),
    ],
)
def test_rising_by_hand(accuracies, rising):
    accuracies = [*accuracies[:-1], accuracies[-1]]
    assert is_rising(accuracies) is rising


def curves_of(algorithm, accuracies, seed=0, mode="default", domain="photo"):
    rows = []
    for step, value in enumerate(accuracies):
        rows.append((algorithm, domain, seed, step, "validation_accuracy", mode, value))
        rows.append((algorithm, domain, seed, step, "test_accuracy", mode, 1 - value))
    names = ["algorithm", "test_domain", "trial_seed", "step", "quantity", "mode", "value"]
    return pd.DataFrame(rows, columns=names)


def test_an_algorithm_is_named_if_half_of_its_runs_still_learned():
    up, flat = [0, 0, 0.1, 0.2, 0.3], [0.3, 0.3, 0.3, 0.3, 0.2]
    parts = [curves_of("ERM", up, 0), curves_of("ERM", flat, 1)]
    parts += [curves_of("SAM", up, 0), curves_of("SAM", flat, 1), curves_of("SAM", flat, 2)]
    parts += [curves_of("HMOE-DN", flat, mode="mix"), curves_of("HMOE-DN", up, mode="max")]
    curves = pd.concat(parts)
    found = rising_runs(curves.sample(frac=1, random_state=0))
    assert found.groupby("algorithm").rising.sum().to_dict() == {"ERM": 1, "HMOE-DN": 1, "SAM": 1}
    (note,) = rising_notes(curves)
    assert "ERM (1 of 2 runs)" in note
    assert "SAM" not in note
    assert "HMOE-DN" not in note
    assert rising_notes(curves_of("ERM", flat)) == []
    assert rising_notes(curves_of("ERM", up).head(0)) == []


def test_a_pretrained_network_at_the_default_rate_is_told_so():
    curves = curves_of("ERM", [0.1, 0.1, 0.2, 0.3, 0.4])
    default = SHARED_HPARAMS["lr"].large_image_default
    rates = pd.DataFrame({"weights": ["some"], "hparams.lr": [default]})
    assert len(rising_notes(curves, rates)) == 2
    assert len(rising_notes(curves, rates.assign(weights=None))) == 1
    assert len(rising_notes(curves, rates.assign(**{"hparams.lr": 0.001}))) == 1
    assert rising_notes(curves_of("ERM", [0.4, 0.1]), rates) == []


def test_few_test_images_are_pointed_out_with_their_number():
    frame = pd.DataFrame(
        {
            "algorithm": ["ERM"] * 3,
            "test_domain": ["a", "b", "c"],
            "accuracy": [0.5, 0.5, math.nan],
            "test_size": [25.0, 100.0, 10.0],
        }
    )
    (note,) = small_test_notes(frame)
    assert "a (25)" in note
    assert "10 points" in note
    assert "b (" not in note
    assert "c (" not in note
    assert small_test_notes(frame[1:]) == []


def test_a_curve_at_its_ceiling_needs_no_longer_training():
    assert not is_rising([0.2, 0.5, 0.9, 0.95, 1.0])
    assert not is_rising([0.2, 0.5, 0.9, 0.95, 0.99])
    assert is_rising([0.2, 0.5, 0.9, 0.95, 0.98])
    assert rising_notes(curves_of("ERM", [0.2, 0.5, 0.9, 0.95, 1.0])) == []


def test_few_checkpoints_decide_nothing():
    (note,) = rising_notes(curves_of("ERM", [0.1, 0.2, 0.3]))
    assert "3 checkpoints" in note
    assert "lr" not in note
    (note,) = rising_notes(curves_of("ERM", [0.1, 0.12, 0.11, 0.13, 0.142]))
    assert "too low or too high" in note
    assert "hmoe find-lr`" in note


def test_the_command_has_the_network_and_the_batch_size_of_the_runs():
    curves = curves_of("ERM", [0.1, 0.2, 0.3, 0.4, 0.5])
    rates = pd.DataFrame({"network": ["small_cnn"] * 2, "hparams.batch_size": [32.0, 32.0]})
    (note,) = rising_notes(curves, rates)
    assert "`hmoe find-lr --network small_cnn --set batch_size=32`" in note
    rates = pd.DataFrame({"network": ["small_cnn", "mlp"], "hparams.batch_size": [32, 32]})
    (note,) = rising_notes(curves, rates)
    assert "`hmoe find-lr --set batch_size=32`" in note
