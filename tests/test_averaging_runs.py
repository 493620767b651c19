"""SWAD in real runs: the trainer tells it the validation loss, a killed run resumes bitwise,
and the kept model gives the record's numbers."""

import pytest

from hmoe_repro.training.model import build_dataset, load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import make_splits, mode_accuracies
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome
from hmoe_repro.training.trainer import Trainer


def short_config(algorithm, **hparams):
    "A short run on tiny data: eight checkpoints."
    return make_config(
        algorithm,
        "DigitDomainsTiny",
        ["photo"],
        0,
        {"batch_size": 4, "lr": 3e-3} | hparams,
        network="small_cnn",
        steps=15,
        checkpoint_frequency=2,
    )


@pytest.mark.parametrize("algorithm", ["SMA", "SWAD-HMOE-DN"])
def test_a_killed_run_goes_on_to_the_bit_and_the_kept_model_is_the_average(algorithm, tmp_path):
    def kill(step, steps):
        if step == 8:
            raise KeyboardInterrupt

    hparams = {"sma_start": 3} if algorithm == "SMA" else {"n_converge": 2, "n_tolerance": 3}
    whole = run(short_config(algorithm, **hparams), RunStore(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run(short_config(algorithm, **hparams), RunStore(tmp_path / "killed"), on_step=kill)
    resumed = run(short_config(algorithm, **hparams), RunStore(tmp_path / "killed"))
    assert whole["status"] == "complete", whole["reason"]
    assert resumed["resumed"]
    assert outcome(whole) == outcome(resumed)
    for mode, chosen in whole["selected"].items():
        model, _ = load_model(whole["run_id"], mode, RunStore(tmp_path / "whole"))
        data = build_dataset(short_config(algorithm, **hparams))
        assert (
            mode_accuracies(model, data, "photo", make_splits(data, 0)["photo"]["in"])[mode]
            == chosen["test_accuracy"]
        )


def test_the_trainer_tells_the_validation_loss_before_it_evaluates():
    given = short_config("SWAD")
    trainer = Trainer(given, build_dataset(given), "cpu")
    for checkpoint in range(3):
        trainer.update()
        trainer.evaluate()
        assert len(trainer.algorithm.losses) == checkpoint + 1
        assert trainer.algorithm.training
        assert trainer.algorithm.current.training
    sizes = [
        sum(len(y) for _, y in trainer.evaluation.validation_batches(d)) for d in trainer.domains
    ]
    assert sizes == [len(trainer.splits[d]["out"]) for d in trainer.domains]
    assert len(set(trainer.algorithm.losses)) == 3
