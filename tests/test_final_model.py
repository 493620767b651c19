"""The final model, trained on all domains: what it validates on, its record, and every reader of
test domains: none of them may take it for a result on an unseen domain."""

import copy
import os
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import torch
from commands import hmoe
from PIL import Image

import hmoe_repro as hm
from hmoe_repro.analysis.results import checkpoints, frame_of
from hmoe_repro.analysis.tables import accuracy_table, complete_rows, table_notes
from hmoe_repro.apps.compare import compare, compare_frame, final_config
from hmoe_repro.apps.evaluate import evaluate
from hmoe_repro.apps.export import export_model
from hmoe_repro.apps.predict import load
from hmoe_repro.apps.soup import soup
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data import registry
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.studies.domainbed_export import export_domainbed
from hmoe_repro.studies.filters import filter_runs, matching_runs
from hmoe_repro.studies.search import select_by_rule
from hmoe_repro.studies.sweep import drawn_configs
from hmoe_repro.training.model import build_dataset, load_model
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.run_config import RunOptions
from hmoe_repro.training.selection import differing_selection
from hmoe_repro.training.store import RunStore, check_record, outcome, summary_of
from hmoe_repro.training.trainer import Trainer

OPTIONS = dict(network="small_cnn", steps=12, checkpoint_frequency=4)
DOMAINS = ["negative", "photo", "plain", "sketch"]


def config_of_run(domain="none", algorithm="ERM", lr=0.001, **changed):
    hparams = {"lr": lr, "batch_size": 8}
    return make_config(
        algorithm, "DigitDomainsTiny", [domain], hparams=hparams, **(OPTIONS | changed)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store with two final models of ERM and a run that held out the sketches, and their ids."""
    store = RunStore(tmp_path_factory.mktemp("final") / "runs")
    ids = {}
    configs = {
        "final": config_of_run(),
        "other": config_of_run(lr=0.003),
        "sketch": config_of_run("sketch"),
    }
    for name, config in configs.items():
        assert run(config, store)["status"] == "complete"
        ids[name] = config.run_id
    return store, ids


def test_it_trains_on_the_training_parts_of_all_domains():
    config = config_of_run()
    trainer = Trainer(config, build_dataset(config), "cpu")
    assert trainer.domains == DOMAINS
    assert config.test_domains == ()
    for domain, indices in zip(DOMAINS, trainer.sampler.splits):
        held_out = set(trainer.splits[domain]["out"].tolist())
        assert held_out
        assert not held_out & set(indices.tolist())


def test_no_run_id_of_before_has_changed():
    # ids of the version before final models existed
    assert config_of_run("sketch").run_id == "fb5c37ef52f8"
    toy = make_config("HMOE", "SineIntervals", [], hparams={"seeds": 2}, steps=6)
    assert toy.run_id == "8add9a319c79"


def test_it_selects_the_checkpoint_that_is_best_on_all_held_out_parts(trained):
    store, ids = trained
    record = store.read(ids["final"])
    means = []
    for point in record["checkpoints"]:
        assert list(point["accuracies"]) == DOMAINS
        assert all(list(splits) == ["out"] for splits in point["accuracies"].values())
        means.append(np.mean([s["out"]["default"] for s in point["accuracies"].values()]))
    selected = record["selected"]["default"]
    assert selected["validation_accuracy"] == pytest.approx(max(means))
    assert selected["step"] == record["checkpoints"][int(np.argmax(means))]["step"]
    assert "test_accuracy" not in selected
    assert "test_size" not in record


def test_an_edited_selection_is_noticed(trained):
    store, ids = trained
    record = store.read(ids["final"])
    assert check_record(copy.deepcopy(record), "it") == record
    for changed in (
        {"default": record["selected"]["default"] | {"step": 99}},
        {"default": record["selected"]["default"] | {"test_accuracy": 0.9}},
        {},
    ):
        assert differing_selection(record | {"selected": changed}) == "selected"


def test_it_is_never_in_a_table_of_test_accuracy(trained):
    store, ids = trained
    records = [store.read(run_id) for run_id in ids.values()]
    alone = frame_of([store.read(ids["sketch"])])
    mixed = frame_of(records)
    assert complete_rows(mixed).run_id.tolist() == [ids["sketch"]]
    pd.testing.assert_frame_equal(accuracy_table(mixed), accuracy_table(alone))
    assert table_notes(mixed) == table_notes(alone)
    assert compare_frame(mixed, "ERM").verdict == compare_frame(alone, "ERM").verdict
    chosen, missing = select_by_rule(records)
    assert chosen.run_id.tolist() == [ids["sketch"]]
    curves = checkpoints(mixed)
    assert set(curves[curves.quantity == "test_accuracy"].test_domain) == {"sketch"}
    with pytest.raises(HmoeError):
        accuracy_table(frame_of([store.read(ids["final"])]))


def test_domainbed_gets_no_final_model(trained, tmp_path):
    store, ids = trained
    with pytest.raises(HmoeError, match=ids["final"]):
        export_domainbed([store.read(ids["final"])], tmp_path / "lines")


def test_it_predicts_and_exports_and_its_card_claims_no_test_accuracy(trained, tmp_path):
    store, ids = trained
    model = load(ids["final"], store=store)
    assert model.domain_names == DOMAINS
    path, difference = export_model(model, tmp_path / "out")
    assert difference == 0
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    assert load(path.parent).predict(picture) == model.predict(picture)
    card = (path.parent / "README.md").read_text(encoding="utf-8")
    assert "model-index" not in card
    assert "all its domains" in card


def test_evaluate_measures_its_validation_images(trained, tmp_path):
    store, ids = trained
    evaluated = evaluate(ids["final"], store=store, device="cpu")
    assert set(evaluated.images.role) == {"validation"}
    by_domain = evaluated.images.groupby("domain", observed=True).correct.mean()
    selected = store.read(ids["final"])["selected"]["default"]
    assert by_domain.mean() == pytest.approx(selected["validation_accuracy"])
    assert "unseen" not in evaluated.verdict
    assert evaluated.confusion(normalise=False).to_numpy().sum() == len(evaluated.images)
    page = evaluated.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert evaluated.verdict in page
    with pytest.raises(HmoeError, match="test images"):
        evaluated.differences()
    assert evaluated.save_tables(tmp_path / "tables")


def test_soups_of_final_models_have_no_test_accuracy(trained, tmp_path):
    store, ids = trained
    soups = soup([ids["final"], ids["other"]], store=store, device="cpu")
    (group,) = soups.groups
    assert soups.table.accuracy.isna().all()
    assert soups.table.available.tolist() == [2, 2, 2]
    best = max(
        store.read(ids[name])["selected"]["default"]["validation_accuracy"]
        for name in ("final", "other")
    )
    assert group.results["best single"].validation == pytest.approx(best)
    (folder,) = soups.save(tmp_path / "soups")
    record = load(folder).record
    assert "test_accuracy" not in record["selected"]["default"]
    assert soup([ids["final"], ids["sketch"]], store=store, device="cpu").table.available.max() == 1


def test_filters_name_it_none(trained):
    store, ids = trained
    records = [store.read(run_id) for run_id in ids.values()]
    found = filter_runs(records, ["test_domain=none"])
    assert {record["run_id"] for record in found} == {ids["final"], ids["other"]}
    runs = matching_runs([summary_of(record) for record in records], {"test_domain": ["none"]})
    assert {found.run_id for found in runs} == {ids["final"], ids["other"]}
    assert all(run.accuracies == {} for run in runs)


@pytest.mark.parametrize(
    "algorithm, changed, entry",
    [
        ("HMOE-DN", {}, "discovery"),
        ("HMOE-DL", {}, "discovery"),
        ("DMG", {"protocol": "dmg", "checkpoint_frequency": None, "steps": 4}, "in_domain"),
        ("ERM", {"measure": "spectra"}, "spectra"),
        ("ERM", {"measure": "clusters"}, "clusters"),
        ("ERM", {"evaluate": "all"}, "selected"),
    ],
)
def test_measurements_need_no_test_domain(tmp_path, algorithm, changed, entry):
    config = config_of_run(algorithm=algorithm, **changed)
    record = run(config, RunStore(tmp_path))
    assert record["status"] == "complete", record["reason"]
    assert record[entry]
    assert RunStore(tmp_path).read(config.run_id) == record
    assert load(config.run_id, store=RunStore(tmp_path)).domain_names == DOMAINS


def test_bad_input():
    for domains in ([], ["none", "sketch"], ["nothing"], ["sketch", "sketch"], DOMAINS):
        with pytest.raises(HmoeError):
            make_config("ERM", "DigitDomainsTiny", domains, **OPTIONS)
    options = RunOptions.of(
        algorithm="ERM", dataset="DigitDomainsTiny", test_domains=["none"], network="small_cnn"
    )
    with pytest.raises(HmoeError, match="n-hparams"):
        drawn_configs(options, 3)


def test_a_domain_that_is_called_none_is_not_silently_held_out(tmp_path):
    names = set(registry.DATASETS)
    data = load_dataset("DigitDomainsTiny", 0, None)
    domains = {name: (data.images[i], data.labels[i]) for i, name in enumerate(("none", "b"))}
    with pytest.raises(HmoeError, match="none"):
        compare(["ERM"], domains, 1, ["none"], steps=2, jobs=1, store=RunStore(tmp_path))
    for name in set(registry.DATASETS) - names:
        del registry.DATASETS[name]


def test_a_killed_final_model_resumes_bitwise(tmp_path):
    config = config_of_run()
    whole = run(config, RunStore(tmp_path / "whole"))
    program = f"""
        import os
        from hmoe_repro.training.run import run
        from hmoe_repro.training.run_config import RunConfig
        from hmoe_repro.training.store import RunStore

        config = RunConfig.from_dict({config.to_dict()!r})
        stop = lambda done, total: os._exit(9) if done == 7 else None
        run(config, RunStore({str(tmp_path / "killed")!r}), on_step=stop)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ})
    assert killed.returncode == 9
    resumed = run(config, RunStore(tmp_path / "killed"))
    assert resumed["resumed"]
    assert outcome(resumed) == outcome(whole)


def invented(algorithm, domain, seed, test, validation, lr=0.001, status="complete"):
    config = config_of_run(domain, algorithm, lr).replace(trial_seed=seed)
    selected = {"default": {"step": 4, "validation_accuracy": validation, "test_accuracy": test}}
    return {
        "run_id": config.run_id,
        "status": status,
        "reason": None,
        "config": config.to_dict(),
        "checkpoints": [],
        "selected": selected if status == "complete" else {},
        "test_size": 48,
    }


def test_the_best_algorithm_is_that_on_unseen_domains_with_its_best_settings():
    records = [
        invented("ERM", "photo", 0, 0.3, 0.99),
        invented("ERM", "sketch", 0, 0.5, 0.98),
        invented("SAM", "photo", 0, 0.6, 0.7, lr=0.002),
        invented("SAM", "sketch", 0, 0.4, 0.8, lr=0.004),
        invented("CORAL", "photo", 0, 0.9, 0.9),  # its other run failed
        invented("CORAL", "sketch", 0, 0.9, 0.9, status="failed"),
    ]
    frame = frame_of(records)
    config = final_config(frame)
    assert (config.algorithm, config.hparams["lr"]) == ("SAM", 0.004)
    assert config.test_domains == ()
    assert final_config(frame, "ERM").algorithm == "ERM"
    with pytest.raises(HmoeError, match="IRM"):
        final_config(frame, "IRM")
    with pytest.raises(HmoeError):
        final_config(frame[frame.status == "failed"])


def test_fit_best_trains_the_run_that_make_config_names(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    store = RunStore(tmp_path)
    compared = compare(
        ["ERM", "SAM"], "DigitDomainsTiny", 1, ["photo", "sketch"], steps=10, jobs=1, store=store
    )
    rows = complete_rows(compared.frame).groupby("algorithm").accuracy.mean()
    assert compared.folder == tmp_path
    assert repr(compared).splitlines()[-1] == f"4 runs in {tmp_path.name}"
    assert f"4 runs in {tmp_path.name}" in compared._repr_html_()
    page = compared.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert "4 runs in" not in page
    capsys.readouterr()
    run_id = compared.fit_best(device="cpu")
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"final model: {rows.idxmax()}, run {run_id} in {tmp_path.name}/{run_id}"
    assert (compared.folder / run_id / "record.json").exists()
    monkeypatch.chdir(compared.folder / run_id)
    assert repr(compared).splitlines()[-1] == f"4 runs in {tmp_path}"
    record = store.read(run_id)
    assert record["config"]["algorithm"] == rows.idxmax()
    again = make_config(
        rows.idxmax(),
        "DigitDomainsTiny",
        ["none"],
        network="small_cnn",
        steps=10,
        checkpoint_frequency=1,
        hparams={"batch_size": 32},
    )
    assert run_id == again.run_id
    assert record["config"]["steps"] == 10
    assert hm.load(run_id, store=store).domain_names == DOMAINS
    assert compared.fit_best(device="cpu") == run_id
    assert torch.is_tensor(next(load(run_id, store=store).algorithm.parameters()))


def tinted(tint: float, count: int, seed: int):
    """Images of noise, brighter at the left (class 0) or the right, and tinted by domain."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    x = torch.rand(count, 3, 16, 16, generator=generator)
    x[y == 0, :, :, :8] += 0.05
    x[y == 1, :, :, 8:] += 0.05
    x[:, 0] *= tint
    return x.clamp(0, 1), y


def test_the_final_model_predicts_what_the_comparison_promised(tmp_path, own_names):
    """On images of a domain that neither the comparison nor the final model has seen."""
    tints = {"a": 1.0, "b": 0.8, "c": 0.6, "d": 0.4}
    domains = {name: tinted(tint, 200, i) for i, (name, tint) in enumerate(tints.items())}
    store = RunStore(tmp_path)
    options = dict(steps=60, network="small_cnn", checkpoint_frequency=20)
    compared = compare(["ERM"], domains, 2, jobs=1, store=store, **options)
    rows = complete_rows(compared.frame)
    promised = rows.accuracy.mean()
    assert 0.7 < promised < 0.98, "neither chance nor too easy"
    model, _ = load_model(compared.fit_best(device="cpu"), store=store)
    x, y = tinted(0.7, 2000, 99)
    measured = (model.predict(x).argmax(1) == y).double().mean().item()
    spread = np.sqrt(promised * (1 - promised) / rows.test_size.sum())  # of what was promised
    assert abs(measured - promised) < 3 * spread + 0.03


def test_train_says_that_there_is_no_test_accuracy(tmp_path):
    given = ["train", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--network"]
    given += ["small_cnn", "--steps", "3", "--device", "cpu", "--test-domain"]
    trained = hmoe(*given, "none", folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "no test accuracy" in " ".join(trained.stdout.split())
    listed = hmoe("runs", "--test-domain", "none", folder=tmp_path)
    assert config_of_run().dataset in listed.stdout
    assert "none" in listed.stdout
    assert hmoe(*given, "none", "--n-hparams", "2", folder=tmp_path).returncode != 0


def test_predict_counts_the_predictions_that_are_unsure(tmp_path):
    given = ["train", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--network"]
    given += ["small_cnn", "--steps", "3", "--device", "cpu", "--test-domain", "none"]
    run_id = hmoe(*given, folder=tmp_path).stdout.split(", run ")[1].split()[0]
    new = tmp_path / "new"
    new.mkdir()
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3))):
        Image.fromarray(pixels.astype(np.uint8)).save(new / f"{i}.png")
    done = hmoe("predict", "new", "--model", run_id, "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "predictions.csv")
    unsure = int((table.probability < 0.5).sum())
    assert unsure == 5, "ten classes after three updates"
    assert "5 of 5 have a probability below 50%" in done.stdout
    assert done.stdout.splitlines()[-1] == "5 images in predictions.csv"
    quiet = hmoe("--quiet", "predict", "new", "--model", run_id, "--overwrite", folder=tmp_path)
    assert quiet.stdout.splitlines() == ["5 images in predictions.csv"]


def test_none_stands_alone():
    with pytest.raises(HmoeError, match="'none' means that no domain is held out") as caught:
        make_config("ERM", "DigitDomainsTiny", ["none", "sketch"], **OPTIONS)
    assert "alone" in caught.value.fix
