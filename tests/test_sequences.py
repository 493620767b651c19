"""Sequences of features (N, T, F): a network that sees the order of their steps, arrays in files,
every algorithm that needs no image."""

import numpy as np
import pytest
import torch
from commands import hmoe

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.analysis.tables import small_test_notes
from hmoe_repro.apps.compare import compare
from hmoe_repro.apps.export import FORMATS, TOLERANCE, export_model, run_graph
from hmoe_repro.apps.predict import load
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.feature_tables import read_arrays, read_features, read_rows
from hmoe_repro.data.base import as_dataset, sample_word
from hmoe_repro.data.registry import find_dataset, load_dataset, register_dataset
from hmoe_repro.networks.registry import make_featurizer
from hmoe_repro.networks.small import SequenceNet, standardise_columns
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

pytestmark = pytest.mark.usefixtures("own_names")
TRAINED = [name for name in algorithm_names() if not get_algorithm(name).needs_images]
UNITS = np.array([1.0, 1000.0])


def movements(per_domain: int = 60, seed: int = 0):
    """Sequences (N, 8, 2) that rise (class 1) or fall (class 0), from another start by domain.

    Their steps have the same values in both classes, in the opposite order.
    """
    rng = np.random.default_rng(seed)
    domains = {}
    for shift, domain in enumerate(("a", "b", "c")):
        y = np.arange(per_domain) % 2
        steps = np.linspace(-1, 1, 8)[None, :, None] * (2 * y - 1)[:, None, None]
        x = steps + 0.3 * rng.normal(size=(per_domain, 8, 2)) + shift
        domains[domain] = (x * UNITS, y)
    return domains


@pytest.fixture
def registered():
    data = as_dataset(movements(), classes=["fall", "rise"], columns=["position", "force"])
    name = "invented movements"
    register_dataset(name, domain_names=("a", "b", "c"), summary="")(lambda seed, folder: data)
    return name


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_keeps_the_rules_on_sequences_or_says_why_it_needs_images(name):
    cls = get_algorithm(name)
    if cls.needs_images:
        with pytest.raises(HmoeError, match="data are rows of numbers"):
            check_algorithm(cls, (7, 5))
        return
    check_algorithm(cls, (7, 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_algorithm_keeps_the_rules_with_the_perceptron_of_each_step(name):
    check_algorithm(get_algorithm(name), (7, 5), hparams={"network": "mlp"})


def test_the_default_network_of_an_algorithm_sees_the_order_of_the_steps():
    torch.manual_seed(0)
    algorithm = get_algorithm("ERM")((7, 5), 2, 3).eval()
    x = torch.randn(4, 7, 5)
    assert algorithm.hparams["network"] == "conv1d"
    assert not torch.allclose(algorithm.predict(x), algorithm.predict(x.flip(1)), atol=1e-4)
    torch.manual_seed(0)
    algorithm = get_algorithm("ERM")((7, 5), 2, 3, {"network": "mlp"}).eval()
    torch.testing.assert_close(algorithm.predict(x), algorithm.predict(x.flip(1)))


def test_the_network_of_sequences_is_that_of_its_formula():
    network = SequenceNet((2, 4, 1), width=3, layers=2, kernel=3)
    x = 5 + 2 * torch.randn(6, 4, 2)
    standardise_columns(network, x)
    w = {name: value.double() for name, value in network.state_dict().items()}
    hidden = (x.double() - x.double().mean((0, 1))) / x.double().std((0, 1), correction=0)
    for layer in ("convolutions.0", "convolutions.1"):
        padded = torch.zeros(6, 6, hidden.shape[2], dtype=torch.float64)
        padded[:, 1:5] = hidden
        steps = []
        for step in range(4):
            value = w[f"{layer}.bias"].expand(6, -1)
            for k in range(3):
                value = value + padded[:, step + k] @ w[f"{layer}.weight"][:, :, k].T
            steps.append(value.clamp(min=0))
        hidden = torch.stack(steps, 1)
    torch.testing.assert_close(network(x).double(), hidden.mean(1), rtol=1e-4, atol=1e-5)
    as_image = x.transpose(1, 2)[..., None]
    torch.testing.assert_close(network(as_image), network(x), rtol=0, atol=0)


def test_hyper_parameters_of_the_network_are_chosen_by_name(registered):
    chosen = {"row_width": 12, "row_layers": 3, "row_kernel": 7}
    config = make_config("ERM", registered, ["c"], hparams=chosen, steps=2)
    assert config.network == "conv1d"
    assert {name: config.hparams[name] for name in chosen} == chosen
    network = make_featurizer("conv1d", (2, 8, 1), width=12, layers=3, kernel=7)
    shapes = [tuple(layer.weight.shape) for layer in network.convolutions]
    assert shapes == [(12, 2, 7), (12, 12, 7), (12, 12, 7)]
    assert make_config("ERM", registered, ["c"], network="mlp", steps=2).network == "mlp"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"hparams": {"row_kernel": 4}}, "row_kernel=4 is even"),
        ({"network": "mlp", "hparams": {"row_kernel": 3}}, "row_kernel"),
        ({"network": "small_cnn"}, "network=conv1d"),
    ],
)
def test_wrong_networks_of_sequences_are_refused(registered, options, said):
    with pytest.raises(HmoeError, match=said):
        make_config("ERM", registered, ["c"], steps=2, **options)


def test_the_network_of_sequences_takes_neither_rows_nor_images():
    with pytest.raises(HmoeError, match="these are rows"):
        make_config("ERM", "SpuriousColumns", ["new hospital"], network="conv1d")
    with pytest.raises(HmoeError, match="takes rows of numbers"):
        make_config("ERM", "DigitDomainsTiny", ["photo"], network="conv1d")
    with pytest.raises(HmoeError, match="no weights"):
        make_featurizer("conv1d", (2, 8, 1), weights="IMAGENET1K_V1")


def test_order_is_learned_by_convolutions_and_not_by_the_mean_of_steps(registered, tmp_path):
    store = RunStore(tmp_path)
    accuracy = {}
    for network in ("conv1d", "mlp"):
        config = make_config("ERM", registered, ["c"], network=network, steps=150)
        record = run(config, store)
        accuracy[network] = record["selected"]["default"]["test_accuracy"]
    assert accuracy["conv1d"] > 0.95
    assert accuracy["mlp"] < 0.75


def test_sequences_are_compared_by_domain(tmp_path):
    data = as_dataset(movements(per_domain=20), columns=["position", "force"])
    store = RunStore(tmp_path)
    compared = compare(["ERM", "GroupDRO"], data, seeds=1, steps=2, jobs=1, store=store)
    assert set(compared.frame.test_domain) == {"a", "b", "c"}
    assert set(compared.frame.network) == {"conv1d"}
    (note,) = small_test_notes(compared.frame)
    assert "few test sequences: a (16)" in note


def test_a_run_that_is_killed_resumes_bitwise(registered, tmp_path):
    def kill(step, steps):
        if step == 18:
            raise KeyboardInterrupt

    whole = RunStore(tmp_path / "whole")
    killed = RunStore(tmp_path / "killed")
    config = make_config("HMOE-DL", registered, ["c"], steps=30, checkpoint_frequency=5)
    run(config, whole)
    with pytest.raises(KeyboardInterrupt):
        run(config, killed, on_step=kill)
    assert run(config, killed)["resumed"]
    first, _ = load_model(config.run_id, store=whole)
    second, _ = load_model(config.run_id, store=killed)
    for name, values in first.state_dict().items():
        assert torch.equal(values, second.state_dict()[name]), name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("algorithm", ["ERM", "HMOE-DL"])
def test_an_exported_model_of_sequences_agrees_for_any_batch(
    registered, tmp_path, algorithm, format
):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    store = RunStore(tmp_path / "runs")
    config = make_config(algorithm, registered, ["c"], steps=20)
    run(config, store)
    model = load(config.run_id, store=store)
    path, difference = export_model(model, tmp_path / "model", format)
    assert difference < TOLERANCE
    x = torch.tensor(movements(seed=5)["a"][0][:11], dtype=torch.float32)
    expected = model.forward_rows(x)
    found = load(path.parent).forward_rows(x) if format == "safetensors" else run_graph(path, x)
    assert ("gate" in found) == (algorithm == "HMOE-DL")
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=TOLERANCE)
    card = (path.parent / "README.md").read_text(encoding="utf-8")
    assert "image" not in card
    assert "sequences of numbers" in card


def save(path, x=None, **arrays):
    """Write movements as a file of arrays, with other arrays in place of some."""
    made = {"x": [], "class": [], "domain": []}
    for domain, (values, y) in movements(per_domain=20).items():
        made["x"].append(values)
        made["class"].append(np.where(y, "rise", "fall"))
        made["domain"].append(np.full(len(y), domain))
    whole = {name: np.concatenate(parts) for name, parts in made.items()}
    whole["columns"] = np.array(["position", "force"])
    if x is not None:
        whole["x"] = x
    whole |= arrays
    np.savez(path, **{name: value for name, value in whole.items() if value is not None})
    return path


def test_a_file_of_arrays_is_a_data_set_with_its_numbers(tmp_path):
    name = find_dataset(str(save(tmp_path / "walks.npz")))
    data = load_dataset(name)
    assert name == "walks"
    assert sample_word(data) == "sequence"
    assert data.columns == ["position", "force"]
    assert data.class_names == ["fall", "rise"]
    assert data.input_shape == (2, 8, 1)
    x, y = movements(per_domain=20)["b"]
    np.testing.assert_allclose(data.images[1][..., 0].transpose(1, 2), x, rtol=1e-6)
    assert data.labels[1].tolist() == y.tolist()
    given = movements(per_domain=20)
    by_hand = as_dataset(given, classes=["fall", "rise"], columns=["position", "force"])
    assert by_hand.fingerprint == data.fingerprint


def test_arrays_of_rows_and_numbers_of_classes_are_read(tmp_path):
    path = tmp_path / "rows.npz"
    labels = {"class": [3, 1], "domain": [10, 2]}
    np.savez(path, x=np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int16), **labels)
    table = read_features(path)
    assert table.columns == ["x0", "x1", "x2"]
    assert table.class_names == ["1", "3"]
    assert table.domains["10"][0].tolist() == [[1, 2, 3]]
    assert table.domains["10"][1].tolist() == [1]


X = np.zeros((60, 8, 2))
GAP = X.copy()
GAP[7, 3, 1] = np.nan


@pytest.mark.parametrize(
    "arrays, said",
    [
        ({"x": GAP}, r"nan in x\[7, 3, 1\], the column 'force'"),
        ({"x": np.full(X.shape, np.inf)}, r"inf in x\[0, 0, 0\]"),
        ({"x": X.astype(str)}, "x of walks.npz is <U"),
        ({"x": X.astype(complex)}, "complex128"),
        ({"x": X[..., None]}, r"shape \(60, 8, 2, 1\)"),
        ({"x": X[:0]}, r"shape \(0, 8, 2\)"),
        ({"x": X.astype(object)}, "cannot be read as arrays.*pickle"),
        ({"x": X[:5]}, r"array class .*shape \(60,\).*\(5,\)"),
        ({"class": None}, "no array class"),
        ({"domain": None}, "no array domain"),
        ({"domain": np.full(60, " ")}, r"no domain for x\[0\]"),
        ({"class": np.linspace(0, 1, 60)}, "array class .*float64"),
        ({"columns": np.array(["a"])}, "1 names in columns"),
        ({"columns": np.array(["a", "a"])}, "2 names in columns"),
    ],
)
def test_bad_arrays_are_named(tmp_path, arrays, said):
    with pytest.raises(HmoeError, match=said):
        read_arrays(save(tmp_path / "walks.npz", **arrays))


def test_files_that_are_no_arrays_are_refused(tmp_path):
    path = tmp_path / "walks.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(HmoeError, match="cannot be read as arrays"):
        find_dataset(str(path))
    with open(path, "wb") as file:
        np.save(file, X)
    with pytest.raises(HmoeError, match="cannot be read as arrays"):
        read_arrays(path)
    np.savez(path, y=X)
    with pytest.raises(HmoeError, match="no array x .its arrays: y"):
        read_arrays(path)
    whole = save(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HmoeError, match="cannot be read as arrays"):
        read_arrays(path)


@pytest.mark.parametrize("cell", ["1;2;3", "[1.5, -2]", "1 2", "(1e3|2)"])
def test_a_table_has_one_number_in_a_cell(tmp_path, cell):
    path = tmp_path / "table.csv"
    path.write_text(f'x,class,domain\n"{cell}",a,north\n2,b,north\n')
    with pytest.raises(HmoeError, match=r"line 2.*several numbers.*\.npz"):
        read_features(path)


def test_missing_values_in_memory_are_named_by_sequence_and_step():
    given = movements(per_domain=10)
    given["b"][0][4, 2, 1] = np.nan
    with pytest.raises(HmoeError, match="domain 'b' has nan in step 2 of sequence 4.*'force'"):
        as_dataset(given, columns=["position", "force"])


def test_sequences_without_names_of_columns_are_told_how():
    given = movements(per_domain=10)
    with pytest.raises(HmoeError, match="sequences.*columns="):
        as_dataset(given)


def test_new_arrays_are_read_by_name_of_column(tmp_path):
    path = tmp_path / "new.npz"
    x = np.arange(12.0).reshape(2, 3, 2)
    np.savez(path, x=x, columns=["Force", "position"])
    places, values = read_rows(path, ["position", "force"])
    assert places == [0, 1]
    assert values.tolist() == x[..., ::-1].tolist()
    with pytest.raises(HmoeError, match="no column speed"):
        read_rows(path, ["position", "speed"])


def test_sequences_go_from_a_file_to_predictions_by_commands(tmp_path):
    save(tmp_path / "walks.npz")
    given = ["train", "--algorithm", "ERM", "--dataset", "walks.npz", "--test-domain", "c"]
    done = hmoe(*given, "--steps", "60", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "image" not in done.stdout + done.stderr
    run_id = done.stdout.split(", run ")[1].split()[0]
    x, _ = movements(seed=3)["a"]
    np.savez(tmp_path / "new.npz", x=x[:9])
    output = ["--output", "out.csv"]
    done = hmoe("predict", "--model", run_id, "new.npz", *output, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "9 sequences" in done.stdout
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0].startswith("row,class,probability")
    assert [line.split(",")[0] for line in lines[1:]] == [str(i) for i in range(9)]
    model = load(run_id, store=RunStore(tmp_path / "runs"))
    assert [line.split(",")[1] for line in lines[1:]] == list(model.predict(x[:9])["class"])
    done = hmoe("evaluate", run_id, "--tables", "tables", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of the sequences of unseen domains" in " ".join(done.stdout.split())
    assert "image" not in done.stdout
    assert (tmp_path / "tables" / "sequences.csv").exists()
    (tmp_path / "new.csv").write_text("position,force\n1,2\n")
    done = hmoe("predict", "--model", run_id, "new.csv", folder=tmp_path)
    assert done.returncode == 1
    assert "trained on sequences" in done.stderr
    done = hmoe("data", "verify", "walks.npz", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("rise")]
    assert line.split()[1:] == ["10", "10", "10", "30"]
    assert "image" not in done.stdout
    assert "sequence" in done.stdout
    done = hmoe("data", "show", "walks.npz", "--output", "sheet.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sheet.png").read_bytes()[:4] == b"\x89PNG"
    assert "image" not in done.stdout
