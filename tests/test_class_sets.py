"""Domains with different classes: all of them, those that all domains have, or those that a model
could know; today's runs keep their ids."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from hmoe_repro.apps.evaluate import predictions
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.base import MultiDomainDataset
from hmoe_repro.data.loader import ImageDataset, common_classes
from hmoe_repro.data.registry import find_dataset, load_dataset, register_dataset
from hmoe_repro.training.model import build_dataset, load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import make_splits, unknown_classes, without_unknown
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

pytestmark = pytest.mark.usefixtures("own_names")
CLASSES = {"day": "cat cow dog", "dusk": "cat dog", "night": "cat dog emu"}
SIX = 6  # images of a class in a domain
SMALL = dict(network="small_cnn", steps=6, checkpoint_frequency=3, resolution=16)


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    root = tmp_path / "zoo"
    for domain, names in CLASSES.items():
        for name in names.split():
            (root / domain / name).mkdir(parents=True)
            for i in range(SIX):
                pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / domain / name / f"{i}.png")
    return root


def config_of(folder, **options):
    hparams = {"batch_size": 4} | options.pop("hparams", {})
    return make_config("ERM", str(folder), ["night"], 0, hparams, **SMALL | options)


def test_the_default_has_all_classes_and_no_other_id(folder):
    config = config_of(folder)
    data = build_dataset(config)
    assert data.class_names == ["cat", "cow", "dog", "emu"]
    assert config_of(folder, classes="all").run_id == config.run_id
    ids = {config_of(folder, classes="intersection").run_id, config.run_id}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids.add(config_of(folder, classes="union").run_id)
    assert len(ids) == 3


@pytest.mark.parametrize("source", ["files", "cache"])
def test_the_intersection_has_the_images_of_the_common_classes(folder, source):
    config = config_of(folder, classes="intersection", hparams={"source": source})
    data = build_dataset(config)
    assert data.class_names == ["cat", "dog"]
    whole = ImageDataset(load_dataset(find_dataset(str(folder))).tree, 16)
    for position, domain in enumerate(data.domain_names):
        ids = data.sample_ids(position, torch.arange(2 * SIX))
        assert len(data.labels[position]) == 2 * SIX
        for i, file in enumerate(ids):
            assert file.startswith(f"{domain}/{data.class_names[data.labels[position][i]]}/")
            j = whole.tree.files[position].index(file)
            first = data.pictures(position, torch.tensor([i]))
            assert torch.equal(first, whole.pictures(position, torch.tensor([j])))
    assert whole.class_names == ["cat", "cow", "dog", "emu"]


def test_the_intersection_is_the_folder_without_the_other_classes(folder, tmp_path):
    config = config_of(folder, classes="intersection")
    record = run(config, RunStore(tmp_path / "first"))
    for place in ("day/cow", "night/emu"):
        for path in (folder / place).iterdir():
            path.unlink()
        (folder / place).rmdir()
    load_dataset.cache_clear()
    by_hand = config_of(folder)
    assert by_hand.dataset_fingerprint == config.dataset_fingerprint
    other = run(by_hand, RunStore(tmp_path / "second"))
    assert other["checkpoints"] == record["checkpoints"]


def test_the_union_scores_what_a_model_could_know(folder, tmp_path):
    store = RunStore(tmp_path / "runs")
    with pytest.warns(UserWarning, match=r"left out of the score of night.*emu \(6\)"):
        config = config_of(folder, classes="union")
    record = run(config, store)
    assert record["left_out"] == {"night": {"emu": SIX}}
    data = build_dataset(config)
    assert data.class_names == ["cat", "cow", "dog", "emu"]
    model, _ = load_model(config.run_id, store=store)
    position = data.domain_index("night")
    labels = data.labels[position]
    inside = make_splits(data, 0)["night"]["in"]
    known = torch.tensor([i for i in inside.tolist() if labels[i] != 3])
    splits = without_unknown(data, {"night": {"in": inside}}, ["night"])
    assert splits["night"]["in"].tolist() == known.tolist()
    assert len(known) < len(inside)
    assert record["test_size"] == len(known)
    with torch.no_grad():
        right = model.predict(data.inputs(position, known)).argmax(1) == labels[known]
    score = record["selected"]["default"]["test_accuracy"]
    assert score == pytest.approx(right.double().mean().item())


def test_a_killed_run_of_the_union_resumes_with_the_same_scores(folder, tmp_path):
    def kill(step, steps):
        if step == 4:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="left out"):
        config = config_of(folder, classes="union")
    whole = run(config, RunStore(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run(config, RunStore(tmp_path / "killed"), on_step=kill)
    resumed = run(config, RunStore(tmp_path / "killed"))
    assert resumed["resumed"]
    assert resumed["checkpoints"] == whole["checkpoints"]
    assert resumed["left_out"] == whole["left_out"]


def test_predictions_leave_out_the_same_images(folder, tmp_path):
    store = RunStore(tmp_path / "runs")
    with pytest.warns(UserWarning, match="left out"):
        config = config_of(folder, classes="union")
    run(config, store, save_predictions=True)
    table = predictions(config.run_id, roles=["test", "unused"], store=store)
    of_night = table[table.domain == "night"]
    assert len(of_night) == 2 * SIX
    assert "emu" not in set(of_night.label)


def images_of(labels):
    return torch.rand(len(labels), 3, 8, 8), torch.tensor(labels)


def tensors(**labels):
    pairs = [images_of(values) for values in labels.values()]
    names = ["cat", "cow", "dog"]
    return MultiDomainDataset("zoo8", list(labels), names, *map(list, zip(*pairs)))


def test_tensors_are_renumbered():
    data = tensors(day=[0, 2, 1], night=[2, 0, 2])
    data.factors = {"hour": [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])]}
    kept = common_classes(data)
    assert kept.class_names == ["cat", "dog"]
    assert [y.tolist() for y in kept.labels] == [[0, 1], [1, 0, 1]]
    assert torch.equal(kept.images[0], data.images[0][:2])
    assert [v.tolist() for v in kept.factors["hour"]] == [[1, 2], [4, 5, 6]]
    same = tensors(day=[0, 2, 1], night=[2, 0, 1])
    assert common_classes(same) is same


def test_fewer_than_two_common_classes_are_refused_with_what_lacks():
    with pytest.raises(HmoeError, match="one class in all domains: day lacks dog, night lacks cow"):
        common_classes(tensors(day=[0, 1], night=[0, 2]))
    with pytest.raises(HmoeError, match="no class in all domains"):
        common_classes(tensors(day=[1, 1], night=[0, 2]))


def test_a_test_domain_of_unknown_classes_alone_is_refused():
    data = tensors(day=[0, 1], dusk=[1, 0], night=[2, 2])
    with pytest.raises(HmoeError, match="no image of the test domain 'night'"):
        unknown_classes(data, ["night"])
    assert unknown_classes(data, ["day"]) == {}
    register_dataset("zoo8", domain_names=("day", "dusk", "night"), summary="-", kept=False)(
        lambda trial_seed, data_dir: data
    )
    with pytest.raises(HmoeError, match="nothing can be scored"):
        make_config("ERM", "zoo8", ["night"], steps=2, classes="union", network="small_cnn")
    with pytest.raises(HmoeError, match="all, intersection, union"):
        make_config("ERM", "zoo8", ["night"], steps=2, classes="both", network="small_cnn")


def test_a_given_split_and_the_intersection_are_refused(folder):
    with pytest.raises(HmoeError, match="given split"):
        config_of(folder, classes="intersection", splits=str(folder))
