"""Model soups and DiWA: averages by hand, greedy against brute force, and what is refused."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from commands import hmoe
from safetensors.torch import load_file

from hmoe_repro.apps import soup as soup_module
from hmoe_repro.apps.export import export_model
from hmoe_repro.apps.predict import load
from hmoe_repro.apps.soup import (
    average_weights,
    check_alike,
    greedy_soup,
    initial_parameters,
    search_from_one_start,
    shared_start,
    soup,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import sha256
from hmoe_repro.studies.search import search_configs
from hmoe_repro.training.model import build_dataset, selected_path
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore
from hmoe_repro.training.trainer import Trainer

OPTIONS = dict(network="small_cnn", steps=12, checkpoint_frequency=6)


def config_with(lr=0.001, algorithm="ERM", domain="sketch", **changed):
    hparams = {"lr": lr, "batch_size": 8} | changed.pop("hparams", {})
    return make_config(
        algorithm, "DigitDomainsTiny", [domain], hparams=hparams, **(OPTIONS | changed)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store with three runs of one start, one of another, and their configurations."""
    store = RunStore(tmp_path_factory.mktemp("soup") / "runs")
    configs = [config_with(lr) for lr in (0.001, 0.003, 0.01)]
    configs.append(config_with(restart=1))
    for config in configs:
        assert run(config, store)["status"] == "complete"
    return store, configs


def weights_of(store, config):
    return load_file(selected_path(store.path(config.run_id), "default"))


def test_the_average_is_the_mean_in_float64():
    draws = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    networks = []
    for i in range(3):
        mean = torch.from_numpy(draws[i]).mean(0)
        networks.append(
            {"w": torch.from_numpy(draws[i]), "running_mean": mean, "n": torch.tensor(i)}
        )
    averaged = average_weights(networks)
    expected = draws.astype(np.float64).mean(0).astype(np.float32)
    assert np.array_equal(averaged["w"].numpy(), expected)
    means = np.stack([np.asarray(network["running_mean"]) for network in networks])
    np.testing.assert_allclose(averaged["running_mean"], means.mean(0), rtol=1e-6)
    assert averaged["n"].item() == 0


def test_the_average_of_one_network_is_itself_bitwise():
    odd = torch.tensor([-0.0, 1e-45, 3.4e38, 0.1])
    (averaged,) = average_weights([{"w": odd}]).values()
    assert torch.equal(averaged.view(torch.int32), odd.view(torch.int32))
    averaged += 1
    assert odd[0] == 0  # a copy


def test_greedy_is_the_sequence_of_best_choices_by_brute_force():
    """On networks of one number, with scores on a grid so that there are ties."""

    def score(average):
        return -round(abs(average["w"].item() - 1), 1)

    def by_hand(values):
        chosen = []
        for i in range(len(values)):
            options = [chosen + [i], chosen] if chosen else [[i]]
            scores = [-round(abs(np.mean([values[j] for j in o]) - 1), 1) for o in options]
            chosen = options[int(np.argmax(scores))]  # the first of equal ones: it is added
        return chosen

    seen = set()
    for values in itertools.product([0.0, 1.0, 2.0, 4.0], repeat=4):
        networks = [{"w": torch.tensor(v, dtype=torch.float64)} for v in values]
        chosen, reached = greedy_soup(networks, score)
        assert chosen == by_hand(values)
        assert reached == score(average_weights([networks[i] for i in chosen]))
        assert reached >= score(networks[0])
        seen.add(tuple(chosen))
    assert len(seen) == 8  # every set with the first one occurs


def test_other_networks_are_refused_by_name():
    a = {"w": torch.zeros(2, 3)}
    with pytest.raises(HmoeError, match="second, third and first"):
        check_alike({"first": a, "second": {"w": torch.zeros(3, 3)}, "third": {"v": a["w"]}})
    with pytest.raises(HmoeError, match="half and first"):
        check_alike({"first": a, "half": {"w": a["w"].half()}})
    check_alike({"first": a, "second": {"w": torch.ones(2, 3)}})


def test_initial_parameters_are_those_of_the_trainer(trained):
    _, configs = trained
    data = build_dataset(configs[0])
    for config in (configs[0], configs[3]):
        initial = initial_parameters(config, data)
        began = dict(Trainer(config, data, "cpu").algorithm.named_parameters())
        assert initial.keys() == began.keys()
        assert all(torch.equal(initial[name], began[name]) for name in began)


def test_who_shares_the_initial_weights(trained):
    _, configs = trained
    data = build_dataset(configs[0])
    assert shared_start(configs[:3], data) == 1
    assert shared_start([configs[0], configs[3]], data) < 0.1
    drawn = configs[0].replace(hparams_seed=1)  # a random search draws other weights
    assert shared_start([configs[0], drawn], data) < 0.1


def test_a_random_search_from_one_start():
    config = config_with()
    configs = search_from_one_start(config, 4)
    assert configs[0] == config
    assert len({each.run_id for each in configs}) == 4
    assert len({each.hparams["lr"] for each in configs}) == 4
    assert [each.hparams for each in configs] == [
        each.hparams for each in search_configs([config], 4)
    ]
    data = build_dataset(config)
    assert shared_start(configs, data) == 1
    assert shared_start(search_configs([config], 4), data) < 0.1


def test_soups_of_runs(trained):
    store, configs = trained
    ids = [config.run_id for config in configs[:3]]
    soups = soup(ids, store=store, device="cpu")
    (group,) = soups.groups
    accuracies = {i: store.read(i)["selected"]["default"]["validation_accuracy"] for i in ids}
    assert [record["run_id"] for record in group.records] == sorted(
        ids, key=lambda i: (-accuracies[i], i)
    )
    table = soups.table.set_index("recipe")
    best = store.read(group.records[0]["run_id"])["selected"]["default"]
    assert table.validation_accuracy["best single"] == best["validation_accuracy"]
    assert table.accuracy["best single"] == best["test_accuracy"]
    assert table.validation_accuracy["greedy"] >= best["validation_accuracy"]
    assert list(table.runs)[:2] == [1, 3]
    assert (table.shared_start == 1).all()
    uniform = group.results["uniform"].weights
    expected = average_weights([weights_of(store, config) for config in configs[:3]])
    for name, values in uniform.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-6, atol=1e-9)


def test_the_soup_of_one_run_is_that_run(trained, tmp_path):
    store, configs = trained
    soups = soup(configs[1].run_id, store=store, device="cpu")
    (folder,) = soups.save(tmp_path)
    written = load_file(folder / "model.safetensors")
    original = weights_of(store, configs[1])
    assert written.keys() == original.keys()
    for name, values in original.items():
        assert torch.equal(written[name].view(torch.uint8), values.view(torch.uint8))
    assert "nothing to average" in soups.notes[0]


def test_unrelated_starts_and_worse_soups_are_noted(trained):
    store, configs = trained
    soups = soup([configs[1].run_id, configs[3].run_id], store=store, device="cpu")
    assert "near chance" in soups.notes[0]
    (group,) = soups.groups
    for result in group.results.values():
        result.test = {"best single": 0.5, "uniform": 0.4, "greedy": 0.5}[result.recipe]
    worse = [note for note in soups.notes if "10.0 points" in note]
    assert ["uniform" in note for note in worse] == [True]


def test_runs_of_other_settings_are_other_groups(trained):
    store, configs = trained
    other = [config_with(trial_seed=1), config_with(domain="photo"), config_with(algorithm="SAM")]
    for config in other:
        run(config, store)
    ids = [config.run_id for config in [*configs, *other]]
    table = soup(ids, store=store, device="cpu").table
    assert len(table) == 3 * 4
    assert sorted(table.available)[-1] == 4


def test_other_heads_are_refused(trained):
    store, configs = trained
    other = config_with(hparams={"nonlinear_classifier": True})
    run(other, store)
    with pytest.raises(HmoeError, match="different networks") as caught:
        soup([configs[0].run_id, other.run_id], store=store, device="cpu")
    assert other.run_id in str(caught.value)
    assert configs[0].run_id in str(caught.value)


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the store whose files a test may damage, and the ids of two runs."""
    store, configs = trained
    copy = RunStore(tmp_path / "runs")
    for config in configs[:2]:
        shutil.copytree(store.path(config.run_id), copy.path(config.run_id))
    return copy, [config.run_id for config in configs[:2]]


def test_missing_weights_name_the_flag(copied):
    store, ids = copied
    selected_path(store.path(ids[1]), "default").unlink()
    with pytest.raises(HmoeError, match="pack --weights") as caught:
        soup(ids, store=store, device="cpu")
    assert ids[1] in str(caught.value)
    assert ids[0] not in str(caught.value)


def test_damaged_and_exchanged_weights_are_refused(copied):
    store, ids = copied
    first, second = [selected_path(store.path(run_id), "default") for run_id in ids]
    intact = first.read_bytes()
    content = bytearray(intact)
    content[-1] ^= 1
    first.write_bytes(content)
    with pytest.raises(HmoeError, match="SHA-256"):
        soup(ids, store=store, device="cpu")
    first.write_bytes(second.read_bytes())
    with pytest.raises(HmoeError, match="that of run"):
        soup(ids, store=store, device="cpu")
    first.write_bytes(intact)
    assert soup(ids, store=store, device="cpu").groups


def test_no_complete_run(trained):
    store, _ = trained
    with pytest.raises(HmoeError, match="no run|none of|0 runs"):
        soup(RunStore(store.folder / "nothing").folder, store=store, device="cpu")
    with pytest.raises(HmoeError, match="mode"):
        soup(trained[1][0].run_id, mode="greedy", store=store, device="cpu")


def test_a_saved_soup_is_bound_to_its_runs(trained, tmp_path):
    store, configs = trained
    ids = [config.run_id for config in configs[:3]]
    soups = soup(ids, store=store, device="cpu")
    (folder,) = soups.save(tmp_path, recipe="uniform")
    model = load(folder)
    runs = model.record["soup"]["runs"]
    assert {entry["run_id"] for entry in runs} == set(ids)
    for entry in runs:
        path = selected_path(store.path(entry["run_id"]), "default")
        assert entry["weights_sha256"] == sha256(path)
        assert entry["chosen"]
    result = soups.groups[0].results["uniform"]
    state = model.algorithm.state_dict()
    assert all(torch.equal(state[name], values) for name, values in result.weights.items())
    assert model.record["selected"]["default"]["test_accuracy"] == result.test
    before = (folder / "config.json").stat().st_mtime_ns
    assert soups.save(tmp_path, recipe="uniform") == [folder]  # left as it is
    assert (folder / "config.json").stat().st_mtime_ns == before
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"chosen": true', '"chosen": false', 1))
    with pytest.raises(HmoeError):
        load(folder)
    with pytest.raises(HmoeError, match="recipe"):
        soups.save(tmp_path, recipe="best single")


def test_an_exported_soup_says_that_it_is_an_average(trained, tmp_path):
    store, configs = trained
    soups = soup([config.run_id for config in configs[:3]], store=store, device="cpu")
    (folder,) = soups.save(tmp_path, recipe="uniform")
    path, difference = export_model(load(folder), tmp_path / "exported")
    assert difference == 0
    card = (path.parent / "README.md").read_text()
    assert "| weights | uniform average over 3 of 3 runs |" in card
    assert f"{soups.groups[0].results['uniform'].test:.4f}" in card
    again = load(path.parent).algorithm.state_dict()
    for name, values in soups.groups[0].results["uniform"].weights.items():
        assert torch.equal(again[name], values)


@pytest.mark.parametrize("name", ["HMOE-DN", "SWAD-ERM", "DANN"])
def test_soups_of_other_algorithms(name, tmp_path):
    store = RunStore(tmp_path / "runs")
    configs = [config_with(lr, algorithm=name) for lr in (0.001, 0.003)]
    for config in configs:
        assert run(config, store)["status"] == "complete"
    soups = soup([config.run_id for config in configs], store=store, device="cpu")
    (group,) = soups.groups
    assert group.mode == next(iter(store.read(configs[0].run_id)["selected"]))
    assert group.shared == 1
    (folder,) = soups.save(tmp_path / "soups", recipe="uniform")
    state = load(folder).algorithm.state_dict()
    for key, values in group.results["uniform"].weights.items():
        assert torch.equal(state[key], values)


@pytest.mark.parametrize("at", ["write_sums", "write_atomic", "replace"])
def test_a_failed_write_leaves_nothing(trained, tmp_path, monkeypatch, at):
    store, configs = trained
    soups = soup([config.run_id for config in configs[:2]], store=store, device="cpu")

    def fail(*arguments, **options):
        raise OSError("disk")

    monkeypatch.setattr(soup_module.os if at == "replace" else soup_module, at, fail)
    with pytest.raises(HmoeError, match="disk"):
        soups.save(tmp_path / "soups")
    monkeypatch.undo()
    assert list((tmp_path / "soups").iterdir()) == []
    (folder,) = soups.save(tmp_path / "soups")
    load(folder)


@pytest.mark.slow
def test_a_killed_write_leaves_no_soup(trained, tmp_path):
    """The process dies between the files of a soup, without any clean-up."""
    store, configs = trained
    script = f"""
        import os
        from hmoe_repro.apps import soup as module
        from hmoe_repro.training.store import RunStore
        soups = module.soup({configs[0].run_id!r}, store=RunStore({str(store.folder)!r}))
        module.write_sums = lambda *arguments: os._exit(9)
        soups.save({str(tmp_path)!r})
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert ended.returncode == 9
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    (folder,) = soup(configs[0].run_id, store=store, device="cpu").save(tmp_path)
    assert load(folder).weights == "soup-greedy"


STUDY = """
title = "Soups"
algorithms = ["ERM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["sketch"]
seeds = 1
network = "small_cnn"
steps = 8
checkpoint_frequency = 4
grid = { lr = [0.001, 0.002] }
"""


@pytest.mark.slow
def test_the_command(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    hmoe("sweep", "study.toml", "--jobs", "1", folder=tmp_path)
    said = hmoe("soup", "study.toml", "--output", "soups", "--device", "cpu", folder=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "all 2 runs start from the same weights" in said.stdout
    (folder,) = (tmp_path / "soups").iterdir()
    record = json.loads((folder / "config.json").read_text())["record"]
    assert len(record["soup"]["runs"]) == 2
    assert os.path.basename(folder) in said.stdout
