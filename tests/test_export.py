"""Exported models: the library's numbers in every format and for any batch, what adapts is refused,
folders that are complete and overwrite nothing, and prediction in three lines."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import hmoe_repro
from hmoe_repro.algorithms import algorithm_names
from hmoe_repro.algorithms.from_file import algorithm_from_file
from hmoe_repro.apps.export import FORMATS, TOLERANCE, every_expert, export_model, run_graph
from hmoe_repro.apps.own_images import discover_config
from hmoe_repro.apps.predict import load
from hmoe_repro.cli.app import app
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import sha256
from hmoe_repro.data.base import as_dataset
from hmoe_repro.data.image_folder import sample_tree
from hmoe_repro.data.registry import register_dataset
from hmoe_repro.data.transforms import read_image, square
from hmoe_repro.method.sparse_moe import SparseMoE
from hmoe_repro.networks.registry import make_featurizer
from hmoe_repro.networks.sparse_vit import expert_layers
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

pytestmark = pytest.mark.usefixtures("own_names")
NETWORKS = {"GMoE": "gmoe_small", "ERM-ViT": "small_vit"}
ADAPTIVE = {"ARM", "MTL"}
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def trained(store, algorithm, **hparams):
    "A model of pictures of digits, after three updates."
    network = NETWORKS.get(algorithm, "small_cnn")
    hparams |= {"batch_size": 8} | ({"weights": "random"} if algorithm in NETWORKS else {})
    how = {"network": network, "steps": 3, "checkpoint_frequency": 1}
    config = make_config(algorithm, "DigitDomainsTiny", ["photo"], 0, hparams, **how)
    record = run(config, store)
    assert record["status"] == "complete", record["reason"]
    return load(config.run_id, store=store)


def hmoe(*arguments):
    "What a command prints; an error is raised."
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception:
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def place(tmp_path_factory, own_names_of_file):
    "A folder of photographs with a model of it, and a store with that and others."
    place = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_RUNS", str(place / "runs"))
        patch.setenv("HMOE_CACHE", str(place / "cache"))
        store, photos = RunStore(), place / "photos"
        sample_tree(photos, per_class=10, size=30)
        config = discover_config(
            photos,
            network="image_cnn",
            experts=3,
            steps=4,
            resolution=24,
            hparams={"batch_size": 8},
        )
        assert run(config, store)["status"] == "complete"
        digits = {name: trained(store, name) for name in ("ERM", "HMOE-DN", "ARM")}
        yield {
            "at": place,
            "photos": photos,
            "store": store,
            "model": load(config.run_id, store=store),
            "digits": digits,
        }


def pictures(count, resolution):
    "Bytes (count, R, R, 3) that no export has seen."
    return torch.randint(0, 256, (count, resolution, resolution, 3), dtype=torch.uint8)


def check(model, path, mode=None, as_bytes=False):
    "A graph gives what `TrainedModel.forward_images` gives, for one image and for several."
    for count in (1, 6):
        given = pictures(count, model.record["config"]["resolution"])
        images, expected = given.permute(0, 3, 1, 2), model.forward_images(given, mode)
        found = run_graph(path, images.contiguous() if as_bytes else images.float() / 255)
        assert found.keys() == {"probability", "gate"} & expected.keys()
        for name, values in found.items():
            assert np.abs(values - expected[name]).max() < TOLERANCE, name


# Numbers


@pytest.mark.slow
def test_a_graph_has_the_normalisation_inside(place, tmp_path):
    model = place["model"]
    path, difference = export_model(model, tmp_path / "a", "torch-export")
    check(model, path)
    assert difference < TOLERANCE
    assert path.name == "model.pt2"
    bright = np.full((1, 24, 24, 3), 200, np.uint8)
    x = torch.tensor((bright / 255 - MEAN) / STD, dtype=torch.float32).permute(0, 3, 1, 2)
    with torch.no_grad():
        by_hand = model.algorithm.predict(x).softmax(1).numpy()
    images = torch.from_numpy(bright).permute(0, 3, 1, 2)
    found = run_graph(path, images.float() / 255)["probability"]
    assert np.allclose(found, by_hand, atol=TOLERANCE)
    path, _ = export_model(model, tmp_path / "b", "torch-export", as_bytes=True)
    found = run_graph(path, images.contiguous())["probability"]
    assert np.allclose(found, by_hand, atol=TOLERANCE)


def test_a_graph_is_of_the_mode_that_was_asked_for(place, tmp_path):
    model, given = place["digits"]["HMOE-DN"], pictures(6, 16)
    path, _ = export_model(model, tmp_path / "a", "torch-export", mode="ood")
    check(model, path, "ood")
    found = run_graph(path, given.permute(0, 3, 1, 2).float() / 255)["probability"]
    assert np.abs(found - model.forward_images(given, "mix")["probability"]).max() > TOLERANCE
    assert load_config(tmp_path / "a")["mode"] == "ood"
    with pytest.raises(HmoeError, match="mode.*'best'") as caught:
        export_model(model, tmp_path / "b", "torch-export", mode="best")
    assert list(caught.value.choices) == ["mix", "max", "ood"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in algorithm_names() if " (" not in n])
def test_every_algorithm_has_a_graph_or_adapts(name, tmp_path):
    model = trained(RunStore(tmp_path / "runs"), name)
    for mode in model.algorithm.modes:
        if name in ADAPTIVE:
            with pytest.raises(HmoeError, match="adapts"):
                export_model(model, tmp_path / mode, "torch-export", mode)
            assert not (tmp_path / mode).exists()
        else:
            check(model, export_model(model, tmp_path / mode, "torch-export", mode)[0], mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ERM", "HMOE-DN", "GMoE", "DMG"])
def test_onnx_runtime_computes_the_same(name, tmp_path):
    import onnx  # `make test-slow` installs it: not skipped

    model = trained(RunStore(tmp_path / "runs"), name)
    path, difference = export_model(model, tmp_path / "a", "onnx")
    check(model, path)
    proto = onnx.load(path)
    (said,) = (p.value for p in proto.metadata_props if p.key == "config.json")
    assert difference < TOLERANCE
    assert json.loads(said) == load_config(tmp_path / "a")
    assert str(Path.cwd()) not in path.read_bytes().decode("latin1")
    path, _ = export_model(model, tmp_path / "b", "onnx", as_bytes=True)
    check(model, path, as_bytes=True)


def test_a_layer_of_all_experts_computes_the_sparse_layer():
    torch.manual_seed(0)
    layer = SparseMoE(8, 16, num_experts=4, k=2).eval()
    tokens = torch.randn(3, 5, 8)
    with torch.no_grad():
        assert torch.allclose(every_expert(layer, tokens), layer(tokens), atol=1e-6)


def test_a_capacity_has_no_graph(tmp_path):
    model = trained(RunStore(tmp_path / "runs"), "GMoE")
    for layer in expert_layers(model.algorithm):
        layer.evaluation, layer.capacity_factor = "capacity", 1.0
    with pytest.raises(HmoeError, match="adapts|as a graph"):
        export_model(model, tmp_path / "a", "torch-export")
    assert not any(p.name != "runs" for p in tmp_path.iterdir())


# Adaptation


def test_what_adapts_is_refused_as_a_graph_and_kept_as_weights(place, tmp_path):
    model = place["digits"]["ARM"]
    with pytest.raises(HmoeError, match="ARM adapts.*--format safetensors"):
        export_model(model, tmp_path / "a", "torch-export")
    path, difference = export_model(model, tmp_path / "a")
    assert difference == 0
    assert path.name == "model.safetensors"


def test_an_algorithm_with_a_memory_is_found_out(place, tmp_path):
    model = place["digits"]["ERM"]

    class Remembers(torch.nn.Module):
        modes, calls = ("default",), 0

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def predict_modes(self, x):
            self.calls += 1
            return {"default": self.inner.predict(x) * self.calls}

    adapting = replace(model, algorithm=Remembers(model.algorithm))
    adapting.algorithm.hparams = {}
    with pytest.raises(HmoeError, match="adapts"):
        export_model(adapting, tmp_path / "a", "torch-export")


OWN = """
from hmoe_repro.algorithms.base import ERM

class Sharper(ERM):
    def predict(self, x):
        return 3 * super().predict(x)
"""


def test_an_algorithm_of_ones_own_becomes_a_graph_that_needs_no_code(place, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    model = trained(place["store"], algorithm_from_file(f"{tmp_path / 'mine.py'}:Sharper"))
    check(model, export_model(model, tmp_path / "a", "torch-export")[0])
    with pytest.raises(HmoeError, match=r"Sharper \(mine.py\).*--format torch-export"):
        export_model(model, tmp_path / "b")


# The folder


def load_config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def exported(place, tmp_path_factory):
    "The model of the photographs, in the two formats that need no further package."
    folder = tmp_path_factory.mktemp("out") / "my model"
    for format in ("safetensors", "torch-export"):
        export_model(place["model"], folder, format)
    return folder


def test_the_folder_predicts_without_its_run(place, exported, tmp_path, monkeypatch):
    model = place["model"]
    run_id = model.record["run_id"]
    command = ("predict", place["photos"], "--device", "cpu", "--output")
    monkeypatch.setenv("HMOE_RUNS", str(place["at"] / "runs"))
    hmoe(*command, tmp_path / "run.csv", "--model", run_id)
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path / "empty"))
    with pytest.raises(HmoeError):
        hmoe(*command, tmp_path / "none.csv", "--model", run_id)
    hmoe(*command, tmp_path / "folder.csv", "--model", exported)
    assert (tmp_path / "run.csv").read_bytes() == (tmp_path / "folder.csv").read_bytes()
    again = load(exported)
    assert again.expert_names == model.expert_names
    assert again.domain_names == model.domain_names
    with pytest.raises(HmoeError, match="unknown weights.*'last'") as caught:
        load(exported, "last")
    assert list(caught.value.choices) == ["mix"]


def test_what_is_inside_is_the_same_everywhere(place, exported):
    from safetensors import safe_open

    config, model = load_config(exported), place["model"]
    assert config["files"] == {"model.safetensors": "float32", "model.pt2": "float32"}
    assert config["classes"] == model.class_names
    assert config["groups"] == model.expert_names
    assert config["hyper_parameters"] == json.loads(json.dumps(model.algorithm.hparams))
    assert config["input"]["shape"] == ["batch", 3, 24, 24]
    assert config["input"]["mean"] == list(MEAN)
    assert config["input"]["std"] == list(STD)
    inside = {"config.json": ""}
    torch.export.load(exported / "model.pt2", extra_files=inside)
    assert json.loads(inside["config.json"]) == config
    with safe_open(exported / "model.safetensors", "pt") as file:
        header = json.loads(file.metadata()["config"])
    assert header | {"files": 0} == config | {"files": 0}


def test_the_folder_names_no_folder_of_this_machine(place, exported, root):
    assert {f.name for f in exported.iterdir()} == {
        "README.md",
        "SHA256SUMS",
        "config.json",
        *load_config(exported)["files"],
    }
    for file in exported.iterdir():
        text = file.read_bytes().decode("latin1")
        assert not [p for p in (root, place["at"], sys.prefix) if str(p) in text], file.name


def test_the_card_has_what_a_hub_reads_and_the_numbers_of_the_record(place, tmp_path):
    model = place["digits"]["HMOE-DN"]
    mixed = load(model.record["run_id"], "mix", place["store"])
    folder = export_model(mixed, tmp_path / "hmoe")[0].parent
    card = ModelCard((folder / "README.md").read_text(encoding="utf-8"))
    selected = model.record["selected"]["mix"]
    (result,) = card.data.eval_results
    assert card.data.library_name == "hmoe_repro"
    assert card.data.model_name == "hmoe"
    assert card.data.pipeline_tag == "image-classification"
    assert result.metric_type == "accuracy"
    assert result.dataset_type == "digitdomainstiny"
    assert result.metric_value == pytest.approx(selected["test_accuracy"], abs=1e-4)
    validation = f"{100 * selected['validation_accuracy']:.1f} %"
    for said in (validation, "photo", "trial seed 0", f"step {selected['step']} of 3"):
        assert said in card.text, said
    assert str(model.record["environment"]["commit"]) in card.text
    assert "](" not in card.text
    assert "None" not in card.text


def test_the_card_of_a_pooled_folder_names_its_held_out_fifth(exported):
    text = (exported / "README.md").read_text(encoding="utf-8")
    assert "the held-out fifth" in text
    assert "domain held out" not in text
    assert "training domains" not in text
    assert "same folder" in text
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    size = config["record"]["test_size"]
    assert f" of {size} images (95 % CI " in text


def test_an_accuracy_is_counted_with_its_interval():
    from hmoe_repro.apps.export import _counted

    # Clopper and Pearson: with all 10 right the low end is 0.025 ** (1 / 10) = 0.69
    assert _counted(1.0, 10, domains=1, items="images") == "10 of 10 images (95 % CI 69 to 100 %)"
    assert _counted(44 / 54, 54, domains=1, items="images").startswith("44 of 54 images")
    assert "CI" not in _counted(0.5, 10, domains=2, items="images")
    assert _counted(None, 10, domains=1, items="images") == ""
    assert _counted(0.5, None, domains=1, items="images") == ""


def test_nothing_else_is_overwritten(place, exported, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    model = place["digits"]["ERM"]
    with pytest.raises(HmoeError, match="not empty"):
        export_model(model, tmp_path / "mine")
    before = {f.name: f.read_bytes() for f in exported.iterdir()}
    with pytest.raises(HmoeError, match="model of run"):
        export_model(model, exported)
    assert before == {f.name: f.read_bytes() for f in exported.iterdir()}
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_damaged_graph_is_refused_with_one_line(place, tmp_path):
    path, _ = export_model(place["digits"]["ERM"], tmp_path / "erm", "torch-export")
    images, whole = torch.rand(2, 3, 16, 16), path.read_bytes()
    expected, draw = run_graph(path, images)["probability"], random.Random(0)
    damaged = [whole[: draw.randrange(len(whole))] for _ in range(5)]
    for _ in range(25):
        content = bytearray(whole)
        content[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        damaged.append(bytes(content))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(HmoeError, match="model.pt2.*SHA-256.*Fix: copy"):
            run_graph(path, images)
    path.write_bytes(whole)
    assert (run_graph(path, images)["probability"] == expected).all()
    with pytest.raises(HmoeError, match=r"not run here.*2,\s1,\s16,\s16"):
        run_graph(path, images[:, :1])
    (path.parent / "SHA256SUMS").unlink()
    with pytest.raises(HmoeError, match="not listed.*SHA256SUMS"):
        run_graph(path, images)
    with pytest.raises(HmoeError, match="none.pt2.*not exist"):
        run_graph(path.with_name("none.pt2"), images)


def test_the_sums_of_an_export_list_every_file_of_every_format(place, tmp_path):
    model = place["digits"]["ERM"]
    for format in ("torch-export", "safetensors"):  # the second writes config.json again
        path, _ = export_model(model, tmp_path / "erm", format)
    lines = (path.parent / "SHA256SUMS").read_text().splitlines()
    names = ["config.json", "model.pt2", "model.safetensors"]
    assert lines == [f"{sha256(path.parent / name)}  {name}" for name in names]
    assert load(path.parent).record["run_id"] == model.record["run_id"]
    config = path.parent / "config.json"
    config.write_text(config.read_text().replace('"wall_time_s": ', '"wall_time_s": 1'))
    with pytest.raises(HmoeError, match="config.json is damaged"):
        load(path.parent)


def test_a_run_is_found_by_its_id_also_in_the_folder_of_runs(place, monkeypatch):
    """There, the id is the name of a folder too, and that is no exported one."""
    run_id = place["digits"]["ERM"].record["run_id"]
    monkeypatch.chdir(place["store"].folder)
    assert load(run_id, store=place["store"]).record["run_id"] == run_id


@pytest.mark.parametrize("mode", [None, "default"])
def test_the_two_ways_to_a_model_give_the_same_one(place, monkeypatch, tmp_path, mode):
    """With names and without; neither needs the data, nor builds them."""
    run_id = place["digits"]["ERM"].record["run_id"]
    monkeypatch.setenv("HMOE_DATA", str(tmp_path))
    for name in ("load_dataset", "kept_data"):
        monkeypatch.setattr(f"hmoe_repro.training.model.{name}", lambda *_: pytest.fail("data"))
    model = load(run_id[:8], mode, place["store"])
    algorithm, record = load_model(run_id[:8], mode, place["store"])
    assert record == model.record
    assert not algorithm.training
    pairs = zip(algorithm.state_dict().values(), model.algorithm.state_dict().values())
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(HmoeError, match=f"mode.*{run_id}.*'best'") as caught:
        load(run_id, "best", place["store"])
    assert list(caught.value.choices) == ["default"]


def test_a_damaged_or_exchanged_file_is_refused(place, exported, tmp_path):
    with pytest.raises(HmoeError, match="has no config.json"):
        load(tmp_path)
    other, _ = export_model(place["digits"]["ERM"], tmp_path / "erm")
    whole = other.read_bytes()
    other.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(HmoeError, match="cut, damaged"):
        load(tmp_path / "erm")
    other.write_bytes((exported / "model.safetensors").read_bytes())
    with pytest.raises(HmoeError, match="cut, damaged"):
        load(tmp_path / "erm")
    other.unlink()
    with pytest.raises(HmoeError, match="no model.safetensors.*--format safetensors"):
        load(tmp_path / "erm")


def test_the_command_names_its_folder_after_the_run(place, tmp_path, monkeypatch):
    run_id = place["digits"]["ERM"].record["run_id"]
    monkeypatch.setenv("HMOE_RUNS", str(place["at"] / "runs"))
    monkeypatch.chdir(tmp_path)
    said = hmoe("export", run_id[:8])
    assert f"erm-{run_id}/model.safetensors" in said
    assert "README.md" in said
    assert load(f"erm-{run_id}").record["run_id"] == run_id
    with pytest.raises(HmoeError, match=f"Valid: {', '.join(FORMATS)}"):
        hmoe("export", run_id, "--format", "tflite")
    with pytest.raises(HmoeError, match="leave --bytes out"):
        hmoe("export", run_id, "--bytes")
    for package in ("onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HmoeError, match=r"hmoe_repro\[export\]"):
        hmoe("export", run_id, "--format", "onnx")


def test_a_model_card_that_the_user_has_edited_is_kept(place, tmp_path):
    folder = tmp_path / "mine"
    export_model(place["model"], folder)
    export_model(place["model"], folder)  # nobody has changed a file
    export_model(place["model"], folder, "torch-export")
    card = folder / "README.md"
    card.write_text(card.read_text() + "My words.\n")
    with pytest.raises(HmoeError, match="README.md exists.*--overwrite"):
        export_model(place["model"], folder)
    assert card.read_text().endswith("My words.\n")
    run_id = place["model"].record["run_id"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMOE_RUNS", str(place["at"] / "runs"))
        with pytest.raises(HmoeError, match="README.md exists"):
            hmoe("export", run_id, "--output", folder)
        hmoe("export", run_id, "--output", folder, "--overwrite")
    assert "My words." not in card.read_text()
    assert load(folder).record["run_id"] == run_id
    weights = folder / "model.safetensors"
    weights.write_bytes(b"mine")
    with pytest.raises(HmoeError, match="model.safetensors exists"):
        export_model(place["model"], folder)
    assert weights.read_bytes() == b"mine"


# Prediction from Python


def test_one_image_in_every_form(place):
    model, file = place["model"], sorted(place["photos"].rglob("*.png"))[0]
    table = model.predict(place["photos"])
    row = table[table.file == file.relative_to(place["photos"]).as_posix()].iloc[0]
    image = read_image(file)
    pixels = np.asarray(image)
    for given in (str(file), file, image, pixels, pixels / 255, torch.from_numpy(pixels.copy())):
        found = model.predict(given)
        assert list(found) == ["class", "probability", "nearest_domain", "gate_value"]
        assert (found["class"], found["nearest_domain"]) == (row["class"], row.nearest_domain)
        assert found["probability"] == pytest.approx(row.probability, abs=1e-5)
        assert found["gate_value"] == pytest.approx(row.gate_value, abs=1e-5)
    several = model.predict([file, image])
    assert several.file.tolist() == [str(file), "image 1"]
    assert len(several) == 2
    assert json.loads(json.dumps(found)) == found
    without = place["digits"]["ERM"].predict(image.convert("L"))
    assert without["nearest_domain"] is None
    assert without["gate_value"] is None


@pytest.mark.parametrize(
    "given, said",
    [
        (np.zeros((3, 8, 8), np.uint8), "as an image"),
        (np.full((8, 8, 3), 7.0), "as an image"),
        ([], "the list of images is empty"),
        ("nowhere.jpg", "cannot be read"),
    ],
)
def test_what_is_no_image_is_refused(place, given, said):
    with pytest.raises(HmoeError, match=said):
        place["model"].predict(given)


def test_images_are_resized_as_in_training(place):
    model = place["model"]
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 50, 3), dtype=np.uint8))
    config = model.record["config"]
    bicubic = config | {"images": config["images"] | {"interpolation": "bicubic"}}
    for record, how in ((config, "bilinear"), (bicubic, "bicubic")):
        pixels = replace(model, record=model.record | {"config": record}).pixels(image)
        assert np.array_equal(pixels, np.asarray(square(image, 24, how)))


def test_load_is_a_name_of_the_package_that_costs_nothing():
    code = "import hmoe_repro, sys; print('torch' in sys.modules); hmoe_repro.load"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
    assert hmoe_repro.load is load
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hmoe_repro.nothing


@pytest.mark.parametrize("algorithm", ["ERM", "HMOE-ND", "SMA", "MIRO", "SWAD"])
def test_the_stored_settings_are_those_of_the_run(algorithm, tmp_path):
    torch.manual_seed(0)
    x, y = torch.rand(3, 10, 3, 32, 32), torch.arange(10) % 2
    data = as_dataset({name: (images, y) for name, images in zip("abc", x)})
    register_dataset("noise", domain_names=tuple("abc"), summary="")(lambda seed, folder: data)
    pretrained = make_featurizer("resnet18", (3, 32, 32), weights="random")
    file = tmp_path / "pretrained.safetensors"
    save_file({name: v.contiguous() for name, v in pretrained.state_dict().items()}, file)
    store = RunStore(tmp_path / "runs")
    config = make_config(
        algorithm,
        "noise",
        ["a"],
        network="resnet18",
        hparams={"weights": str(file), "batch_size": 2},
        steps=1,
    )
    assert config.weights not in (None, "random")
    run(config, store)
    file.unlink()
    model = load(config.run_id, store=store)
    stored = {"network": config.network, "weights": config.weights, **config.hparams}
    for place in (model, load(export_model(model, tmp_path / "out")[0].parent)):
        assert {name: place.algorithm.hparams[name] for name in stored} == stored
    manifest = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert {name: manifest["hyper_parameters"][name] for name in stored} == stored
    assert manifest["record"]["config"]["weights"] == config.weights
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"started from {config.weights}" in card.replace("\\", "")
