"""Ensembles: logits averaged by hand, as a model, from the command and in `evaluate`; refusals."""

import numpy as np
import pandas as pd
import pytest
import torch
from commands import hmoe
from PIL import Image

from hmoe_repro.apps.evaluate import evaluate, predictions
from hmoe_repro.apps.export import export_model
from hmoe_repro.apps.predict import LogitAverage, load
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import as_input
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

RUNS = {
    "first": ("ERM", "photo", {}),
    "restart": ("ERM", "photo", {"restart": 1}),
    "SAM": ("SAM", "photo", {}),
    "HMOE": ("HMOE-DN", "photo", {}),
    "HMOE restart": ("HMOE-DN", "photo", {"restart": 1}),
    "seed": ("ERM", "photo", {"trial_seed": 1}),
    "sketch": ("ERM", "sketch", {}),
    "large": ("ERM", "photo", {"resolution": 8}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a store of eight short runs, and their ids by name."""
    folder = tmp_path_factory.mktemp("ensemble")
    store = RunStore(folder / "runs")
    ids = {}
    for name, (algorithm, domain, options) in RUNS.items():
        given = {"network": "small_cnn", "steps": 8, "checkpoint_frequency": 4} | options
        config = make_config(algorithm, "DigitDomainsTiny", [domain], **given)
        assert run(config, store)["status"] == "complete"
        ids[name] = config.run_id
    return folder, store, ids


def pictures(count=5):
    return np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)


def logits_of(model, images, mode=None):
    x = as_input(torch.from_numpy(images).permute(0, 3, 1, 2))
    with torch.no_grad():
        return model.algorithm.predict_modes(x)[mode or model.algorithm.modes[0]]


def test_its_logits_are_the_mean_of_its_members(trained):
    _, store, ids = trained
    names = ["first", "restart", "SAM"]
    members = [load(ids[name], store=store) for name in names]
    ensemble = load([ids[name] for name in names], store=store)
    expected = torch.stack([logits_of(member, pictures()) for member in members]).mean(0)
    assert torch.allclose(logits_of(ensemble, pictures()), expected, atol=1e-6)
    table = ensemble.predict(list(pictures()))
    probability = expected.softmax(1)
    assert table["class"].tolist() == [str(k) for k in probability.argmax(1).tolist()]
    assert np.allclose(table.probability, probability.max(1).values, atol=1e-6)
    product = torch.stack([logits_of(m, pictures()).softmax(1) for m in members]).log().mean(0)
    assert torch.allclose(product.softmax(1), probability, atol=1e-6)  # a geometric mean


def test_modes_are_averaged_one_by_one_if_the_members_share_them(trained):
    _, store, ids = trained
    both = [load(ids[name], store=store) for name in ("HMOE", "HMOE restart")]
    ensemble = load([ids["HMOE"], ids["HMOE restart"]], store=store)
    assert tuple(ensemble.algorithm.modes) == tuple(both[0].algorithm.modes)
    for mode in ensemble.algorithm.modes:
        expected = (logits_of(both[0], pictures(), mode) + logits_of(both[1], pictures(), mode)) / 2
        assert torch.allclose(logits_of(ensemble, pictures(), mode), expected, atol=1e-6)
    mixed = load([ids["first"], ids["HMOE"]], store=store)
    assert mixed.algorithm.modes == ("default",)
    expected = (
        logits_of(load(ids["first"], store=store), pictures()) + logits_of(both[0], pictures())
    ) / 2
    assert torch.allclose(logits_of(mixed, pictures()), expected, atol=1e-6)


def test_one_run_is_no_ensemble_and_exported_folders_may_be_members(trained, tmp_path):
    _, store, ids = trained
    alone = load([ids["first"]], store=store)
    assert not alone.members
    assert alone.record["run_id"] == ids["first"]
    path, _ = export_model(load(ids["restart"], store=store), tmp_path / "out")
    ensemble = load([ids["first"], path.parent], store=store)
    same = load([ids["first"], ids["restart"]], store=store)
    assert torch.equal(logits_of(ensemble, pictures()), logits_of(same, pictures()))


def test_evaluate_measures_the_average_on_the_images_of_its_members(trained, tmp_path):
    _, store, ids = trained
    names = ["first", "restart"]
    ensemble = load([ids[name] for name in names], store=store)
    evaluated = evaluate(ensemble, store=store, device="cpu")
    rows = predictions([ids[name] for name in names], store=store, device="cpu", logits=True)
    columns = [name for name in rows if name.startswith("logit ")]
    mean = rows.groupby(["role", "domain", "id"], observed=True)[columns].mean()
    labels = rows.groupby(["role", "domain", "id"], observed=True).label.first()
    predicted = mean.idxmax(axis=1).str.removeprefix("logit ")
    expected = (
        (predicted == labels.astype(str)).groupby(level=["role", "domain"], observed=True).mean()
    )
    found = evaluated.images.groupby(["role", "domain"], observed=True).correct.mean()
    pd.testing.assert_series_equal(found, expected, check_names=False)
    assert evaluated.frame.accuracy.item() == pytest.approx(expected["test"].mean())
    assert evaluated.images.run_id.nunique() == 1
    assert "ensemble of 2" in evaluated.verdict
    assert evaluated.save(tmp_path / "page.html").exists()


def test_members_with_other_splits_are_measured_on_test_images_only(trained):
    _, store, ids = trained
    ensemble = load([ids["first"], ids["seed"]], store=store)
    evaluated = evaluate(ensemble, store=store, device="cpu")
    assert set(evaluated.images.role) == {"test"}
    with pytest.raises(HmoeError, match="splits"):
        evaluate(ensemble, roles=["validation"], store=store, device="cpu")


def test_what_cannot_be_averaged_is_refused(trained):
    _, store, ids = trained
    with pytest.raises(HmoeError, match="resolution"):
        load([ids["first"], ids["large"]], store=store)
    with pytest.raises(HmoeError, match=ids["first"]):
        load([ids["first"], ids["first"]], store=store)
    with pytest.raises(HmoeError):
        load([], store=store)
    with pytest.raises(HmoeError):
        load([ids["first"], "abcdef"], store=store)
    other_domains = load([ids["first"], ids["sketch"]], store=store)  # predicts
    with pytest.raises(HmoeError, match="test_domains"):
        evaluate(other_domains, store=store, device="cpu")
    with pytest.raises(HmoeError, match="soup"):
        export_model(load([ids["first"], ids["restart"]], store=store))


@pytest.mark.parametrize("change", ["classes", "preprocessing"])
def test_other_classes_and_preprocessing_are_refused(trained, change, monkeypatch):
    _, store, ids = trained
    from hmoe_repro.apps import predict

    real = predict._model

    def changed(record, *given):
        model = real(record, *given)
        if record["run_id"] == ids["restart"]:
            if change == "classes":
                model.class_names = model.class_names[::-1]
            else:
                images = {"interpolation": "bicubic"}
                model.record = record | {"config": record["config"] | {"images": images}}
        return model

    monkeypatch.setattr(predict, "_model", changed)
    with pytest.raises(HmoeError, match=change):
        load([ids["first"], ids["restart"]], store=store)


def test_the_command_predicts_with_several_runs(trained, tmp_path):
    folder, store, ids = trained
    Image.fromarray(pictures()[0]).save(tmp_path / "one.png")
    given = ["predict", str(tmp_path), "--device", "cpu"]
    for name in ("first", "restart"):
        given += ["--model", ids[name]]
    done = hmoe(*given, "--output", str(tmp_path / "a.csv"), folder=folder)
    assert done.returncode == 0, done.stderr
    row = pd.read_csv(tmp_path / "a.csv").iloc[0]
    ensemble = load([ids["first"], ids["restart"]], store=store)
    expected = ensemble.predict(tmp_path / "one.png")
    assert str(row["class"]) == expected["class"]
    assert row.probability == pytest.approx(expected["probability"], abs=1e-4)


def test_an_average_of_one_network_is_that_network(trained):
    _, store, ids = trained
    model = load(ids["first"], store=store)
    x = as_input(torch.from_numpy(pictures()).permute(0, 3, 1, 2))
    assert torch.equal(LogitAverage([model.algorithm]).predict(x), model.algorithm.predict(x))
