"""Rows of numbers: read by line and column, standardised by the training domains, trained by every
algorithm that needs no image."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from commands import hmoe

from hmoe_repro.algorithms import algorithm_names, get_algorithm
from hmoe_repro.algorithms.conformance import check_algorithm
from hmoe_repro.analysis.tables import samples_word, small_test_notes
from hmoe_repro.apps.compare import compare
from hmoe_repro.apps.export import FORMATS, TOLERANCE, export_model, run_graph
from hmoe_repro.apps.predict import load
from hmoe_repro.apps.study_page import protocol_table
from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.feature_tables import AGREEMENT, read_features, read_rows, spurious_columns
from hmoe_repro.data import registry
from hmoe_repro.data.base import as_dataset
from hmoe_repro.data.data_sheet import column_sheet, column_table
from hmoe_repro.data.registry import (
    find_dataset,
    keep_data,
    kept_data,
    load_dataset,
    register_dataset,
)
from hmoe_repro.networks.registry import ROW_NETWORK, make_encoder, make_featurizer
from hmoe_repro.networks.small import RowNet, Standardise, standardise_columns
from hmoe_repro.training.model import load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.protocols import make_splits
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore, outcome
from hmoe_repro.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("own_names")
NEED_IMAGES = "ARM CutMix DIVA EFDMix ERM-ViT GMoE HDUVA JiGen MixStyle".split()
NEW = "new hospital"
LINES = "age,class,domain,pulse\n61,ill,north,70\n35,well,north,62\n58,ill,south,90\n"


def config_of(algorithm, steps=2, **options):
    return make_config(algorithm, "SpuriousColumns", [NEW], steps=steps, **options)


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_keeps_the_rules_on_rows_or_says_why_it_needs_images(name):
    cls = get_algorithm(name)
    if name in NEED_IMAGES:
        assert cls.needs_images
        for make in (lambda: check_algorithm(cls, (5,)), lambda: config_of(name)):
            with pytest.raises(HmoeError, match="data are rows of numbers"):
                make()
        return
    assert not cls.needs_images
    check_algorithm(cls, (5,))


def test_every_other_algorithm_trains_on_the_embedded_rows(tmp_path):
    store = RunStore(tmp_path)
    trained = [name for name in algorithm_names() if not get_algorithm(name).needs_images]
    assert len(trained) == len(algorithm_names()) - len(NEED_IMAGES)
    for name in trained:
        record = run(config_of(name), store)
        assert record["status"] == "complete", (name, record.get("reason"))


@pytest.mark.parametrize("name", ["ERM", "HMOE-DL", "DIAL"])
def test_rows_and_their_form_as_images_are_the_same(name):
    results = []
    x = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(8) % 2
    for rows in (x, x[..., None, None]):
        torch.manual_seed(0)
        algorithm = get_algorithm(name)((5,), 2, 3)
        algorithm.update([(part, y) for part in rows])
        results.append(algorithm.eval().predict(rows[0]))
    assert algorithm.input_shape == (5, 1, 1)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_the_network_of_rows_is_that_of_its_formula():
    network = RowNet((3, 2, 1), width=4, layers=2)
    x = torch.randn(6, 2, 3)
    standardise_columns(network, x)
    w = network.state_dict()
    by_hand = []
    for sequence in x.double():
        rows = []
        for row in sequence:
            z = (row - x.double().mean((0, 1))) / x.double().std((0, 1), correction=0)
            for layer in ("layers.0", "layers.2"):
                z = (w[f"{layer}.weight"].double() @ z + w[f"{layer}.bias"]).clamp(min=0)
            rows.append(z)
        by_hand.append(sum(rows) / 2)
    torch.testing.assert_close(network(x), torch.stack(by_hand).float(), rtol=1e-4, atol=1e-5)
    as_image = x.transpose(1, 2)[..., None]
    torch.testing.assert_close(network(as_image), network(x), rtol=0, atol=0)


def test_a_column_that_does_not_vary_is_only_centred():
    layer = Standardise(2)
    standardise_columns(layer, torch.tensor([[5.0, 1], [5, 3]]))
    assert layer(torch.tensor([[5.0, 1], [7, 3]])).tolist() == [[0, -1], [2, 1]]


def test_columns_are_measured_on_the_training_parts_of_the_training_domains():
    config = config_of("SWAD", trial_seed=3)
    data = load_dataset("SpuriousColumns", 3)
    trainer = Trainer(config, data, "cpu")
    seen = []
    for position, domain in enumerate(data.domain_names):
        if domain != NEW:
            seen.append(data.images[position][trainer.splits[domain]["in"]].flatten(1))
    seen = torch.cat(seen).double()
    layers = [m for m in trainer.algorithm.modules() if isinstance(m, Standardise)]
    assert len(layers) == 2  # of the network, and of its average
    for layer in layers:
        torch.testing.assert_close(layer.mean.double(), seen.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.std.double(), seen.std(0, correction=0), rtol=1e-5, atol=0)


def test_a_run_keeps_the_units_with_its_weights_and_predicts_for_new_rows(tmp_path):
    store = RunStore(tmp_path)
    config = config_of("ERM", steps=150)
    record = run(config, store)
    algorithm, _ = load_model(config.run_id, store=store)
    x, y = spurious_columns(seed=9).domains["hospital 1"]
    predicted = algorithm.predict(torch.tensor(x, dtype=torch.float32)).argmax(1)
    assert (predicted.numpy() == y).mean() > 0.85
    assert record["selected"]["default"]["test_accuracy"] < 0.6
    assert 4500 < algorithm.featurizer.standardise.mean[3] < 5500
    model = load(config.run_id, store=store)
    assert model.columns == ["signal_1", "signal_2", "spurious", "noise"]
    table = model.predict(x)
    assert [int(name) for name in table["class"]] == predicted.tolist()


def test_a_run_that_is_killed_resumes_bitwise(tmp_path):
    def kill(step, steps):
        if step == 18:
            raise KeyboardInterrupt

    whole = RunStore(tmp_path / "whole")
    killed = RunStore(tmp_path / "killed")
    config = config_of("HMOE-DL", steps=30, checkpoint_frequency=5)
    run(config, whole)
    with pytest.raises(KeyboardInterrupt):
        run(config, killed, on_step=kill)
    assert run(config, killed)["resumed"]
    first, _ = load_model(config.run_id, store=whole)
    second, _ = load_model(config.run_id, store=killed)
    for name, values in first.state_dict().items():
        assert torch.equal(values, second.state_dict()[name]), name


def test_the_generated_rows_agree_as_often_as_they_say():
    made = spurious_columns(per_domain=4000, seed=1)
    for domain, (x, y) in made.domains.items():
        agreement = ((x[:, 2] > 0) == y).mean()
        assert abs(agreement - AGREEMENT[domain]) < 0.03
        assert y.mean() == 0.5
        signs = 2 * y - 1
        np.testing.assert_allclose((x[:, :2] * signs[:, None]).mean(0), 0.6, atol=0.06)
    assert (
        load_dataset("SpuriousColumns", 1).fingerprint
        != load_dataset("SpuriousColumns").fingerprint
    )


def test_a_table_is_a_data_set_with_the_numbers_of_its_lines(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text(LINES + "29,well,south,64\n")
    name = find_dataset(str(path))
    data = load_dataset(name)
    assert name == "patients"
    assert data.columns == ["age", "pulse"]
    assert data.class_names == ["ill", "well"]
    assert data.images[1].flatten(1).tolist() == [[58, 90], [29, 64]]
    assert data.labels[1].tolist() == [0, 1]
    by_hand = as_dataset(
        {
            "north": (torch.tensor([[61.0, 70], [35, 62]]), [0, 1]),
            "south": (np.array([[58, 90], [29, 64]]), [0, 1]),
        },
        classes=["ill", "well"],
        columns=["age", "pulse"],
    )
    assert by_hand.fingerprint == data.fingerprint
    frames = pd.read_csv(path)
    tables = {}
    for domain, frame in frames.groupby("domain"):
        tables[domain] = (
            frame[["age", "pulse"]],
            (frame["class"] == "well").astype(int).to_numpy(copy=True),
        )
    assert as_dataset(tables, classes=["ill", "well"]).fingerprint == data.fingerprint
    keep_data(data)
    kept_data.__globals__["_read_kept"].cache_clear()
    assert kept_data(data.fingerprint).columns == ["age", "pulse"]
    assert kept_data(data.fingerprint).fingerprint == data.fingerprint


def write_source(form: str, folder, domains, monkeypatch) -> str:
    """Write or register rows under the name `clinic`, and return what names them to a run."""
    if form == "tensors":
        given = {name: (torch.from_numpy(x), torch.from_numpy(y)) for name, (x, y) in domains}
        data = as_dataset(given, classes=["ill", "well"], columns=["age", "pulse"])
        register_dataset("clinic", domain_names=tuple(given), summary="")(lambda seed, folder: data)
        return "clinic"
    path = folder / f"clinic.{form}"
    if form == "npz":
        arrays = {
            "x": np.concatenate([x for _, (x, _) in domains]),
            "class": np.concatenate([np.array(["ill", "well"])[y] for _, (_, y) in domains]),
            "domain": np.concatenate([np.full(len(y), name) for name, (_, y) in domains]),
            "columns": np.array(["age", "pulse"]),
        }
        np.savez(path, **arrays)
        return str(path)
    frames = []
    for name, (x, y) in domains:
        classes = np.where(y, "well", "ill")
        frame = pd.DataFrame(x, columns=["age", "pulse"])
        frames.append(frame.assign(**{"class": classes, "domain": name}))
    table = pd.concat(frames)
    if form == "csv":
        table.to_csv(path, index=False)
        return str(path)
    try:
        table.to_parquet(path, index=False)
    except ImportError:  # the package is optional
        path.write_bytes(b"PAR1")
        monkeypatch.setattr(pd, "read_parquet", lambda given: table)
    return str(path)


@pytest.mark.usefixtures("own_names")
def test_rows_in_every_form_give_bitwise_the_same_run(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    domains = []
    for name in ("north", "south", "west"):
        x = rng.normal(size=(30, 2)) * [1, 1000] + [0.1, 1e5]  # of 17 digits
        domains.append((name, (x, np.arange(30) % 2)))
    records = {}
    for form in ("csv", "parquet", "npz", "tensors"):
        for known in (registry.DATASETS, registry._OWN):  # as in another process
            known.pop("clinic", None)
        registry.load_dataset.cache_clear()
        monkeypatch.setattr(CONFIG, "datasets", ())
        source = write_source(form, tmp_path, domains, monkeypatch)
        config = make_config("ERM", find_dataset(source), ["west"], steps=20)
        store = RunStore(tmp_path / form)
        record = run(config, store)
        assert record["status"] == "complete", record["reason"]
        algorithm, _ = load_model(config.run_id, store=store)
        records[form] = (config.run_id, outcome(record), algorithm.state_dict())
    run_id, expected, weights = records.pop("csv")
    for form, found in records.items():
        assert found[0] == run_id, form
        assert found[1] == expected, form
        assert all(torch.equal(found[2][name], weights[name]) for name in weights), form


@pytest.mark.parametrize(
    "line, said",
    [
        ("old,well,south,64", "line 5.*column age has 'old'"),
        (",well,south,64", "line 5.*column age is empty"),
        ("nan,well,south,64", "line 5.*column age has 'nan'"),
        ("inf,well,south,64", "line 5.*column age has 'inf'"),
        ("29,,south,64", "line 5.*column class is empty"),
        ("29,well,,64", "line 5.*column domain is empty"),
        ("29,well,south,64,1", "line 5.*5 cells"),
    ],
)
def test_a_bad_cell_is_named_by_line_and_column(tmp_path, line, said):
    path = tmp_path / "patients.csv"
    path.write_text(LINES + line + "\n")
    with pytest.raises(HmoeError, match=said):
        read_features(path)


def test_tables_without_columns_lines_or_two_classes_are_refused(tmp_path):
    path = tmp_path / "bad_patients.csv"
    for text, said in [
        ("class,domain\na,b\n", "no column of numbers"),
        ("age,class,domain\n", "no line"),
        ("age,age,class,domain\n1,2,a,b\n", "two columns age"),
        ("age,class\n1,a\n", "no column domain"),
    ]:
        path.write_text(text)
        with pytest.raises(HmoeError, match=said):
            read_features(path)
    path.write_text("age,class,domain\n1,a,north\n2,a,south\n")
    with pytest.raises(HmoeError, match="(?s)two or more|one class"):
        find_dataset(str(path))


ROWS = torch.tensor([[1.0, 2], [3, 4]])


@pytest.mark.parametrize(
    "other, said",
    [
        (ROWS[:, :1], "only one of them has x1"),
        (torch.tensor([[1.0, float("nan")], [3, 4]]), "nan in row 0 of the column 'x1'"),
        (np.array([["1", "two"], ["3", "4"]], dtype=object), "no numbers in the column 'x1'"),
        (torch.rand(2, 3, 8, 8), "no rows of numbers"),
        (pd.DataFrame({"x0": [1, 2], "age": [1, 2]}), "only one of them has x1, age"),
        (pd.DataFrame({"x1": [1, 2], "x0": [1, 2]}), "in another order"),
    ],
)
def test_bad_rows_are_named_by_domain_and_column(other, said):
    with pytest.raises(HmoeError, match=said):
        as_dataset({"a": (ROWS, [0, 1]), "b": (other, [0, 1])})


def test_sequences_are_asked_for_and_have_one_length():
    grey = torch.rand(2, 8, 8)
    with pytest.raises(HmoeError, match=r"shape \(2, 8, 8\)"):
        as_dataset({"a": (grey, [0, 1]), "b": (grey, [0, 1])})
    names = [f"c{i}" for i in range(8)]
    data = as_dataset({"a": (grey, [0, 1]), "b": (grey / 2, [0, 1])}, columns=names)
    assert data.input_shape == (8, 8, 1)
    torch.testing.assert_close(data.images[0][0, :, 3, 0], grey[0, 3])
    with pytest.raises(HmoeError, match="different lengths"):
        as_dataset({"a": (grey, [0, 1]), "b": (grey[:, 1:], [0, 1])}, columns=names)


def test_images_and_rows_have_their_own_networks():
    with pytest.raises(HmoeError, match="takes rows of numbers"):
        make_featurizer("mlp", (3, 16, 16))
    with pytest.raises(HmoeError, match="takes rows of numbers"):
        make_encoder("mlp", (3, 16, 16))
    with pytest.raises(HmoeError, match="takes rows of numbers"):
        make_config("ERM", "DigitDomainsTiny", ["photo"], network="mlp")
    with pytest.raises(HmoeError, match="takes images"):
        config_of("ERM", network="small_cnn")
    with pytest.raises(HmoeError, match="CutMix pastes a box of pixels"):
        config_of("SMA-CutMix")


def test_rows_are_compared_by_domain():
    table = spurious_columns(per_domain=20)
    compared = compare(["ERM", "GroupDRO"], table.domains, seeds=1, steps=2, jobs=1)
    assert set(compared.frame.test_domain) == set(AGREEMENT)
    assert set(compared.frame.network) == {"mlp"}


@pytest.fixture(scope="module")
def patients(tmp_path_factory, own_names_of_file):
    """A folder with a table, new rows in another order, and runs of ERM and HMOE on the table."""
    place = tmp_path_factory.mktemp("patients")
    frames = []
    for domain, (x, y) in spurious_columns(per_domain=40, seed=2).domains.items():
        frame = pd.DataFrame(x, columns=["Age", "pulse", "marker", "dose"])
        frames.append(frame.assign(**{"class": np.where(y, "ill", "well"), "domain": domain}))
    table = pd.concat(frames, ignore_index=True)
    table.to_csv(place / "ward.csv", index=False)
    new = table[["dose", "marker", "pulse", "Age"]].sample(9, random_state=0)
    new.insert(0, "name", [f"n{i}" for i in range(9)])
    new.to_csv(place / "new.csv", index=False)
    (place / "picture.png").write_bytes(b"")
    runs = {}
    for algorithm in ("ERM", "HMOE-DL"):
        given = ["train", "--algorithm", algorithm, "--dataset", str(place / "ward.csv")]
        given += ["--test-domain", NEW, "--steps", "40", "--device", "cpu"]
        done = hmoe(*given, folder=place)
        assert done.returncode == 0, done.stderr
        runs[algorithm] = done.stdout.split(", run ")[1].split()[0]
    return place, runs, table, new


def test_a_table_is_predicted_by_name_of_column(patients):
    place, runs, _, new = patients
    for algorithm, run_id in runs.items():
        given = ["predict", "--model", run_id, "new.csv", "--output", f"{algorithm}.csv"]
        done = hmoe(*given, folder=place)
        assert done.returncode == 0, done.stderr
        assert "9 rows" in done.stdout
        written = pd.read_csv(place / f"{algorithm}.csv")
        assert written.line.tolist() == list(range(2, 11))
        network, _ = load_model(run_id, store=RunStore(place / "runs"))
        x = torch.tensor(new[["Age", "pulse", "marker", "dose"]].values.tolist())
        by_hand = network.predict(x).softmax(1).max(1)
        assert written.probability.tolist() == pytest.approx(by_hand.values.tolist(), abs=6e-5)
        classes = ["ill", "well"]
        assert written["class"].tolist() == [classes[i] for i in by_hand.indices.tolist()]
        assert written.nearest_domain.notna().all() == (algorithm == "HMOE-DL")


def test_rows_in_memory_are_predicted_as_those_of_the_table(patients):
    place, runs, _, new = patients
    model = load(runs["ERM"], store=RunStore(place / "runs"))
    by_file = model.predict(str(place / "new.csv"))
    columns = ["Age", "pulse", "marker", "dose"]
    rows = new[columns].to_numpy()
    by_array = model.predict(rows)
    assert by_array.row.tolist() == list(range(9))
    pd.testing.assert_frame_equal(by_array.iloc[:, 1:], by_file.iloc[:, 1:])
    lower = new.rename(columns=str.lower)
    pd.testing.assert_frame_equal(model.predict(lower).iloc[:, 1:], by_file.iloc[:, 1:])
    one = model.predict(rows[3])
    assert one["probability"] == pytest.approx(by_file.probability[3])
    assert model.predict(dict(zip(model.columns, rows[3]))) == one
    together = load(list(runs.values()), store=RunStore(place / "runs"))
    assert len(together.predict(rows)) == 9


@pytest.mark.parametrize(
    "rows, said",
    [
        (np.zeros((2, 3)), "shape"),
        (np.full((2, 4), np.nan), "missing or infinite"),
        ([["a", 1, 2, 3]], "not numbers"),
        (np.zeros((0, 4)), "no rows"),
        (pd.DataFrame({"age": [1.0]}), "no column 'pulse'"),
        ("picture.png", "no table"),
        ("absent.csv", "absent.csv"),
    ],
)
def test_rows_that_cannot_be_predicted_are_refused(patients, rows, said):
    place, runs, _, _ = patients
    model = load(runs["ERM"], store=RunStore(place / "runs"))
    with pytest.raises(HmoeError, match=said):
        model.predict(rows)


def test_bad_new_tables_are_named_by_line_and_column(tmp_path):
    path = tmp_path / "new.csv"
    for text, said in [
        ("age\n1\n", "no column pulse"),
        ("age,pulse\n1,2\n3,fast\n", "line 3.*column pulse has 'fast'"),
        ("age,pulse\n", "no line"),
        ("age,pulse,age\n1,2,3\n", "two columns age"),
    ]:
        path.write_text(text)
        with pytest.raises(HmoeError, match=said):
            read_rows(path, ["Age", "pulse"])
    path.write_text("id,pulse,AGE\nx,2,1\n")
    assert read_rows(path, ["Age", "pulse"])[1].tolist() == [[1, 2]]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("algorithm", ["ERM", "HMOE-DL"])
def test_an_exported_model_of_rows_agrees_for_any_batch(patients, tmp_path, algorithm, format):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    place, runs, table, _ = patients
    model = load(runs[algorithm], store=RunStore(place / "runs"))
    path, difference = export_model(model, tmp_path / "model", format)
    assert difference < TOLERANCE
    columns = ["Age", "pulse", "marker", "dose"]
    rows = torch.tensor(table[columns].to_numpy(), dtype=torch.float32)
    expected = model.forward_rows(rows)
    if format == "safetensors":
        loaded = load(path.parent)
        assert loaded.columns == ["age", "pulse", "marker", "dose"]
        found = loaded.forward_rows(rows)
    else:
        found = run_graph(path, rows)
    assert ("gate" in found) == (algorithm == "HMOE-DL")
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=TOLERANCE)
    manifest = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    assert manifest["input"]["columns"] == ["age", "pulse", "marker", "dose"]
    card = (path.parent / "README.md").read_text(encoding="utf-8")
    assert "image" not in card
    if format != "safetensors":
        with pytest.raises(HmoeError, match="floats"):
            export_model(model, tmp_path / "bytes", format, as_bytes=True)


def test_sequences_are_predicted_and_exported_in_their_shape(tmp_path):
    x = torch.randn(20, 3, 2, generator=torch.Generator().manual_seed(0))
    y = torch.arange(20) % 2
    domains = {"a": (x, y), "b": (x + 1, y), "c": (x - 1, y)}
    name = "invented sequences"
    data = as_dataset(domains, columns=["u", "v"])
    register_dataset(name, domain_names=("a", "b", "c"), summary="")(lambda seed, folder: data)
    store = RunStore(tmp_path / "runs")
    config = make_config("ERM", name, ["c"], steps=3)
    assert run(config, store)["status"] == "complete"
    model = load(config.run_id, store=store)
    table = model.predict(x)
    assert len(table) == 20
    assert model.predict(x[0])["probability"] == pytest.approx(table.probability[0])
    path, _ = export_model(model, tmp_path / "model", "torch-export")
    outputs = run_graph(path, x)["probability"].max(1)
    np.testing.assert_allclose(outputs, table.probability, atol=TOLERANCE)


def test_the_sheet_of_columns_has_the_numbers_of_the_table(patients):
    place, _, table, _ = patients
    done = hmoe("data", "show", "ward.csv", "--output", "sheet.png", folder=place)
    assert done.returncode == 0, done.stderr
    assert (place / "sheet.png").read_bytes()[:4] == b"\x89PNG"
    data = load_dataset(find_dataset(str(place / "ward.csv")))
    summary = column_table(data).set_index(["column", "class"])
    assert len(summary) == 8
    of_cell = table[(table["class"] == "ill") & (table.domain == NEW)].marker
    mean, _, spread = summary.loc[("marker", "ill"), NEW].split()
    assert float(mean) == pytest.approx(of_cell.mean(), rel=1e-3)
    assert float(spread) == pytest.approx(of_cell.std(ddof=0), rel=1e-3)
    figure = column_sheet(data, ["ill"])
    assert len(figure.axes) == 4 * 4
    patch = figure.axes[4 * 2 + 3].patches[0].get_xy()  # marker in the new hospital
    centre = np.average(patch[:-1, 0], weights=patch[:-1, 1] + 1e-12)
    assert abs(centre - of_cell.mean()) < 0.3
    with pytest.raises(HmoeError, match="no class 'sick'"):
        column_table(data, ["sick"])


def test_a_table_is_verified_row_by_row(patients):
    place, _, table, _ = patients
    done = hmoe("data", "verify", "ward.csv", folder=place)
    assert done.returncode == 0, done.stderr
    counts = table.groupby(["class", "domain"]).size()
    assert f"{len(table)}" in done.stdout
    for name in ("ill", "well"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(name)]
        assert [int(cell) for cell in line.split()[1:]] == [*counts[name], counts[name].sum()]
    assert "images" not in done.stdout
    done = hmoe("data", "verify", "ward.csv", "--images", folder=place)
    assert done.returncode == 1
    assert "--images" in done.stderr
    broken = table.astype({"pulse": object})
    broken.loc[[3, 5], "pulse"] = "high"
    broken.to_csv(place / "broken.csv", index=False)
    done = hmoe("data", "verify", "broken.csv", folder=place)
    assert done.returncode == 1
    assert "line 5" in done.stderr
    assert "1 more line" in done.stderr


def without_markup(page: str) -> str:
    """The text of a page, without tags and embedded pictures."""
    body = page.partition("<body")[2]
    return re.sub(r"<[^>]*>", " ", re.sub(r"data:image/png;base64,[^\"]*", "", body))


def test_rows_are_called_rows_by_evaluate(patients, tmp_path):
    place, runs, _, _ = patients
    given = ["evaluate", runs["ERM"], "--output", str(tmp_path / "page.html")]
    done = hmoe(*given, "--tables", str(tmp_path), "--by", "domain", folder=place)
    assert done.returncode == 0, done.stderr
    assert "image" not in (done.stdout + done.stderr).replace(str(tmp_path), "")
    assert "of the rows of unseen domains" in " ".join(done.stdout.split())
    text = without_markup((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "image" not in text.lower()
    assert "picture" not in text
    assert "Test rows with the largest losses" in text
    rows = pd.read_csv(tmp_path / "rows.csv")
    worst = rows[rows.role == "test"].sort_values("loss", ascending=False).id.iloc[0]
    assert worst in text
    for file in tmp_path.glob("*.csv"):
        header = file.read_text(encoding="utf-8").partition("\n")[0]
        assert file.stem == "runs" or "image" not in header, file
    counts = pd.read_csv(tmp_path / "confusion.csv").rows
    assert counts.sum() == (rows.role == "test").sum()
    done = hmoe(*given, "--tables", str(tmp_path), folder=place)
    assert done.returncode == 1
    assert "--overwrite" in done.stderr


def test_rows_are_called_rows_by_embed(patients, tmp_path):
    place, runs, _, _ = patients
    given = ["embed", runs["ERM"], "--images", "20", "--compare", runs["HMOE-DL"]]
    given += ["--picture", str(tmp_path / "map.png")]
    done = hmoe(*given, folder=place)
    assert done.returncode == 0, done.stderr
    assert "80 rows of" in done.stdout
    assert "image" not in done.stdout + done.stderr
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"


def test_rows_are_called_rows_by_train_select_and_discover(patients):
    place, runs, _, _ = patients
    given = ["train", "--algorithm", "HMOE-DL", "--dataset", "ward.csv", "--test-domain", NEW]
    again = hmoe(*given, "--steps", "40", "--device", "cpu", folder=place)
    assert "validation rows of the training domains" in " ".join(again.stdout.split())
    selected = hmoe("select", folder=place)
    assert selected.returncode == 0, selected.stderr
    assert "test rows: 32" in selected.stdout
    assert "images" not in again.stdout + selected.stdout
    refused = hmoe("discover", "ward.csv", folder=place)
    assert refused.returncode == 1
    assert "lists of images and tables" in refused.stderr


def test_rows_are_called_rows_by_the_page_of_a_search(tmp_path, monkeypatch):
    frames = []
    for domain, (x, y) in spurious_columns(per_domain=20).domains.items():
        frame = pd.DataFrame(x, columns=["a", "b", "c", "d"])
        frames.append(frame.assign(**{"class": np.where(y, "u", "v"), "domain": domain}))
    pd.concat(frames).to_csv(tmp_path / "few.csv", index=False)
    lines = ['title = "few rows"', 'algorithms = ["ERM", "GroupDRO"]', 'datasets = ["few.csv"]']
    lines += [f'test_domains = ["{NEW}"]', "seeds = 1", "steps = 4", "checkpoint_frequency = 2"]
    lines += ["[search]", "trials = 2", "lr = { log_uniform = [0.001, 0.01] }"]
    (tmp_path / "few.toml").write_text("\n".join(lines))
    done = hmoe("sweep", "few.toml", "--jobs", "1", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = hmoe("report", "few.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    page = without_markup((tmp_path / "reports" / "few.html").read_text(encoding="utf-8"))
    assert "test rows alone" in page
    assert "image" not in page.lower().replace("image/svg+xml", "")


def test_rows_are_called_rows_by_the_pages_of_a_comparison(tmp_path):
    table = spurious_columns(per_domain=20)
    store = RunStore(tmp_path)
    compared = compare(["ERM", "GroupDRO"], table.domains, seeds=1, steps=2, jobs=1, store=store)
    page = without_markup(compared.save(tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "image" not in page.lower().replace("image/svg+xml", "")
    settings = protocol_table(compared.frame).setting.tolist()
    assert not {"pixels a side", "validation images"} & set(settings)
    assert "updates" in settings


@pytest.mark.parametrize(
    "resolution, options, said",
    [(8, {}, "no resolution"), (None, {"interpolation": "bicubic"}, "no option interpolation")],
)
def test_options_of_images_are_refused_for_rows(resolution, options, said):
    data = load_dataset("SpuriousColumns")
    with pytest.raises(HmoeError, match=said) as error:
        data.with_options(resolution, options)
    assert "images" not in error.value.cause


def test_small_domains_of_rows_are_counted_in_rows():
    few = (ROWS[:1], [0])
    data = as_dataset({"a": (ROWS.repeat(4, 1), [0, 1] * 4), "b": few}, classes=["u", "v"])
    with pytest.raises(HmoeError, match="'b' has 1 row, too few"):
        make_splits(data, 0)
    with pytest.raises(HmoeError, match="domain 'b' has 1 rows and 2 labels"):
        as_dataset({"a": (ROWS, [0, 1]), "b": (ROWS[:1], [0, 1])})


def test_rows_are_called_rows():
    frame = pd.DataFrame({"network": [ROW_NETWORK], "test_size": [10.0], "accuracy": [0.5]})
    frame = frame.assign(test_domain="a", algorithm="ERM")
    assert samples_word(frame) == "rows"
    (note,) = small_test_notes(frame)
    assert "few test rows: a (10)" in note
    assert "images" not in note
    assert samples_word(frame.assign(network="small_cnn")) == "images"
    assert samples_word(frame.drop(columns="network")) == "images"


def test_a_table_without_classes_is_told_both_forms(patients):
    place, _, table, _ = patients
    table.drop(columns="class").to_csv(place / "bare.csv", index=False)
    for command in (("data", "show"), ("data", "verify")):
        done = hmoe(*command, "bare.csv", folder=place)
        assert done.returncode == 1
        message = " ".join(done.stderr.split())
        assert "file, class and domain" in message
        assert "columns of numbers" in message


def test_a_misspelt_class_of_a_table_is_named_with_its_line(tmp_path):
    lines = [f"{i},{'ill' if i % 2 else 'well'},{'a' if i < 6 else 'b'}" for i in range(12)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["x,class,domain", *lines]))
    assert read_features(path).class_names == ["ill", "well"]
    path.write_text("\n".join(["x,class,domain", *lines[:3], "3,wlel,a", *lines[4:]]))
    with pytest.raises(HmoeError, match="line 5.*'wlel'.*Did you mean 'well'"):
        read_features(path)
