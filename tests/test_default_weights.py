"""The weights that predict are those that validation selected for the inference mode."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from hmoe_repro.apps.feature_groups import save_groups
from hmoe_repro.apps.predict import load
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.model import build_dataset, load_model, selected_path
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import make_splits, mode_accuracies
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore


@pytest.fixture(scope="module")
def final(tmp_path_factory):
    """A store with a final model of HMOE-DN, whose validation accuracy was best before the end."""
    store = RunStore(tmp_path_factory.mktemp("runs"))
    given = dict(network="small_cnn", steps=12, checkpoint_frequency=3)
    config = make_config("HMOE-DN", "DigitDomainsTiny", ["none"], 0, {"lr": 0.02}, **given)
    record = run(config, store)
    assert record["status"] == "complete"
    return store, config, record


def same(algorithm, path):
    weights = load_file(path)
    return all(torch.equal(value, weights[name]) for name, value in algorithm.state_dict().items())


def test_a_mode_predicts_with_the_weights_that_it_selected(final):
    store, config, record = final
    folder = store.path(config.run_id)
    assert list(record["selected"]) == ["mix", "max", "ood"]
    for mode in (None, "mix", "max", "ood"):
        model = load(config.run_id, store=store, mode=mode)
        assert model.weights == (mode or "mix")
        assert same(model.algorithm, selected_path(folder, mode or "mix"))
    assert load(config.run_id, store=store).weights == "mix"
    assert load(config.run_id, "last", store, mode="max").weights == "last"
    assert load(config.run_id, store=store, mode="default").weights == "mix"
    algorithm, _ = load_model(config.run_id, store=store)
    assert same(algorithm, selected_path(folder, "mix"))


def test_a_run_of_discover_keeps_the_weights_of_its_groups(final, tmp_path):
    import shutil

    store, config, _ = final
    other = RunStore(tmp_path)
    shutil.copytree(store.path(config.run_id), other.path(config.run_id))
    save_groups(other.path(config.run_id), ["a", "b", "c", "d"], None)
    assert load(config.run_id, store=other).weights == "last"
    assert load(config.run_id, store=other, mode="max").weights == "last"
    assert load(config.run_id, "mix", other).weights == "mix"


def test_the_command_predicts_with_the_weights_of_its_mode(final, tmp_path, monkeypatch):
    store, config, _ = final
    monkeypatch.setenv("HMOE_RUNS", str(store.folder))
    (tmp_path / "new").mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "new" / f"{i}.png")
    command = ["predict", str(tmp_path / "new"), "--model", config.run_id, "--device", "cpu"]

    def probabilities(*options):
        file = tmp_path / f"{'-'.join(options)}.csv"
        result = CliRunner().invoke(app, [*command, *options, "--output", str(file)])
        assert result.exit_code == 0, result.output
        return file.read_text(encoding="utf-8")

    chosen = probabilities("--mode", "max")
    assert chosen == probabilities("--mode", "max", "--weights", "max")
    assert probabilities() == probabilities("--weights", "mix")


def test_the_accuracy_of_the_record_is_that_of_the_loaded_model(tmp_path):
    store = RunStore(tmp_path)
    given = dict(network="small_cnn", steps=12, checkpoint_frequency=3)
    config = make_config("HMOE-DN", "DigitDomainsTiny", ["photo"], 0, {"lr": 0.02}, **given)
    record = run(config, store)
    data = build_dataset(config)
    indices = make_splits(data, 0)["photo"]["in"]
    for mode in ("mix", "max", "ood"):
        model = load(config.run_id, store=store, mode=mode)
        accuracy = mode_accuracies(model.algorithm, data, "photo", indices)[mode]
        assert accuracy == record["selected"][mode]["test_accuracy"]


def test_unknown_weights_are_named_with_those_that_are_kept(final):
    store, config, _ = final
    with pytest.raises(HmoeError, match="weights.*'best'") as caught:
        load(config.run_id, "best", store)
    assert list(caught.value.choices) == ["mix", "max", "ood", "last"]


def test_a_list_of_images_is_predicted_and_damaged_files_are_left_out_on_request(final, tmp_path):
    store, config, _ = final
    rng = np.random.default_rng(1)
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{i}.png")
    model = load(config.run_id, store=store)
    whole = model.predict(str(tmp_path / "pictures"))
    path = tmp_path / "list.csv"
    path.write_text("file,note\npictures/2.png,x\npictures/0.png,y\n", encoding="utf-8")
    listed = model.predict(str(path))
    assert listed.file.tolist() == ["pictures/2.png", "pictures/0.png"]
    assert listed.probability.tolist() == pytest.approx(whole.probability[[2, 0]].tolist())
    (tmp_path / "pictures" / "1.png").write_bytes(b"no picture")
    with pytest.raises(HmoeError, match="1 of 3") as caught:
        model.predict(str(tmp_path / "pictures"))
    assert "skip_unreadable=True" in caught.value.fix
    left = model.predict(str(tmp_path / "pictures"), skip_unreadable=True)
    assert left.file.tolist() == ["0.png", "2.png"]
    path.write_text("picture\npictures/2.png\n", encoding="utf-8")
    with pytest.raises(HmoeError, match="no column file"):
        model.predict(str(path))
