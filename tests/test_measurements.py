"""What an algorithm brings to measure: it lands in the record and beside it, the library's own
algorithms bring theirs, and what would damage a record is refused before training."""

import textwrap

import pytest
import torch
from safetensors.torch import load_file

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.base import ERM, register
from hmoe_repro.algorithms.from_file import algorithm_from_file
from hmoe_repro.algorithms.hmoe import collect_codes, collect_panels
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.networks.measuring import Measurement, TrainedRun, for_disk, in_turns
from hmoe_repro.training.measurements import (
    check_measure,
    declared_measurements,
    measure_run,
    trained_run,
)
from hmoe_repro.training.model import build_dataset
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore
from hmoe_repro.training.trainer import Trainer

SHORT = {"network": "small_cnn", "hparams": {"batch_size": 4}, "steps": 2}


def spec_of(algorithm, **changes):
    return make_config(algorithm, "DigitDomainsTiny", ["photo"], **SHORT | changes)


def trainer_of(config):
    return Trainer(config, build_dataset(config), torch.device("cpu"))


def bringing(*measurements):
    "An ERM with these measurements, by its name."

    @register("Bringing", paper="own", needs_domain_labels=False)
    class Bringing(ERM):
        pass

    Bringing.measurements = measurements
    return "Bringing"


def counted(run: TrainedRun):
    found = run.collect(run.domains, "out", None, lambda x: {"mean": x.flatten(1).mean(1)})
    images = {
        name: int((found["domain"] == run.data.domain_index(name)).sum()) for name in run.domains
    }
    return {"step": run.step, "images": images}, {"mean_pixel": found["mean"]}


def test_a_measurement_of_ones_own_is_in_the_record_and_beside_it(own_names, tmp_path):
    name = bringing(*ERM.measurements, Measurement("counted", counted))
    config, store = spec_of(name), RunStore(tmp_path)
    record = run(config, store)
    assert record["status"] == "complete", record["reason"]
    splits = trainer_of(config).splits
    sizes = {d: len(splits[d]["out"]) for d in ("plain", "negative", "sketch")}
    assert record["counted"] == {"step": 1, "images": sizes}
    assert record["discovery"] is None
    assert store.read(config.run_id)["counted"] == record["counted"]
    assert not (store.path(config.run_id) / "selected-last.safetensors").exists()
    frame = frame_of([record])
    assert len(frame) == 1
    kept = load_file(store.path(config.run_id) / "arrays.safetensors")
    assert len(kept["mean_pixel"]) == sum(sizes.values())


def test_a_file_may_bring_a_measurement(own_names, tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        from hmoe_repro.algorithms.base import ERM, register
        from hmoe_repro.networks.measuring import Measurement


        def length(run):
            weight = run.algorithm.classifier.weight
            return {"length": weight.norm().item()}, {}


        @register("Long", paper="own", needs_domain_labels=False)
        class Long(ERM):
            measurements = (*ERM.measurements, Measurement("length", length, keeps_weights=True))
        """)
    )
    store = RunStore(tmp_path / "runs")
    config = spec_of(algorithm_from_file(f"{tmp_path / 'mine.py'}:Long"))
    record = run(config, store)
    assert record["status"] == "complete", record["reason"]
    assert record["length"]["length"] > 0
    assert (store.path(config.run_id) / "selected-last.safetensors").exists()
    assert not (store.path(config.run_id) / "arrays.safetensors").exists()


@pytest.mark.parametrize(
    "algorithm, network, expected",
    [
        ("ERM", "small_cnn", []),
        ("HMOE-DN", "small_cnn", ["discovery"]),
        ("GMoE", "gmoe_small", ["expert_choices"]),
        ("CORAL", "gmoe_small", ["expert_choices"]),
        ("HMOE-ND", "gmoe_small", ["discovery", "expert_choices"]),
        ("DMG", "small_cnn", ["masks"]),
        ("SWAD-HMOE-DN", "small_cnn", []),
    ],
)
def test_each_algorithm_brings_its_own(algorithm, network, expected):
    made = get_algorithm(algorithm)((3, 16, 16), 10, 3, {"network": network})
    assert [m.name for m in declared_measurements(made)] == expected


@pytest.mark.parametrize("field", ["checkpoints", "selected", "sha256", "parts", "spectra", "a-b"])
def test_a_name_that_the_record_has_is_refused_before_training(own_names, tmp_path, field):
    name = bringing(Measurement(field, counted))
    with pytest.raises(HmoeError, match=f"cannot be called '{field}'"):
        check_measure(trainer_of(spec_of(name)))
    record = run(spec_of(name), RunStore(tmp_path))
    assert record["status"] == "failed"
    assert record["checkpoints"] == []


def test_two_measurements_of_one_name_and_a_bare_function_are_refused(own_names):
    twice = Measurement("counted", counted)
    with pytest.raises(HmoeError, match="'counted'"):
        check_measure(trainer_of(spec_of(bringing(twice, twice))))
    get_algorithm("Bringing").measurements = (counted,)
    with pytest.raises(HmoeError, match="no Measurement"):
        check_measure(trainer_of(spec_of("Bringing")))


@pytest.mark.parametrize(
    "returned",
    [None, {"score": 1}, ({"score": {1, 2}}, {}), ([1], {}), ({}, {"values": [1, 2]}), ({}, None)],
)
def test_what_no_record_can_hold_is_refused(own_names, returned):
    name = bringing(Measurement("odd", lambda run: returned))
    with pytest.raises(HmoeError, match="'odd' did not return"):
        measure_run(trainer_of(spec_of(name)))


def test_arrays_of_two_measurements_have_different_names(own_names):
    name = bringing(Measurement("one", counted), Measurement("two", counted))
    with pytest.raises(HmoeError, match="'two' returned an array 'mean_pixel'"):
        measure_run(trainer_of(spec_of(name)))


def test_a_trained_run_gives_the_images_of_a_split_evenly_and_in_order():
    trainer = trainer_of(spec_of("ERM"))
    trained = trained_run(trainer)
    seen = list(trained.batches(trained.domains, "out", limit=6, size=1))
    assert [position for position, *_ in seen] == [0, 0, 2, 2, 3, 3]
    for position, chosen, x, y in seen:
        assert torch.equal(x, trainer.data.inputs(position, chosen))
        assert torch.equal(y, trainer.data.labels[position][chosen])
    assert list(trained.test_domains) == ["photo"]
    assert trained.step == -1


def test_images_are_taken_from_the_classes_in_turn():
    classes = torch.tensor([5, 5, 5, 2, 5, 7, 2])
    assert in_turns(classes, 3).tolist() == [0, 3, 5]
    assert in_turns(classes, 5).tolist() == [0, 1, 3, 5, 6]
    assert in_turns(classes, 100).tolist() == list(range(7))


def test_arrays_are_small_and_no_number_overflows():
    kept = for_disk({"a": torch.tensor([1.5]), "b": torch.tensor([3]), "c": torch.tensor([300])})
    assert [a.dtype for a in kept.values()] == [torch.float16, torch.int16, torch.int16]
    bytes_ = for_disk({"b": torch.tensor([3]), "c": torch.tensor([300])}, torch.uint8)
    assert [a.dtype for a in bytes_.values()] == [torch.uint8, torch.int16]
    assert bytes_["c"].tolist() == [300]


def test_each_kept_image_belongs_to_its_row_of_the_codes():
    trainer = trainer_of(spec_of("HMOE-DN"))
    trained = trained_run(trainer)
    codes = collect_codes(trained, trained.domains, "out")
    tested = collect_codes(trained, ["photo"], "in")
    panels = collect_panels(trained, codes["domain"], tested["domain"])
    images, rows = panels["panel_images"], panels["panel_index"].long()
    domains, classes = codes["domain"][rows], codes["class"][rows]
    for i in (0, 5, len(rows) - 1):
        position = int(domains[i])
        of_domain = trainer.splits[trainer.data.domain_names[position]]["out"]
        index = of_domain[rows[i] - rows[domains == position].min()]
        assert torch.equal(images[i], trainer.data.pictures(position, index[None])[0])
        assert int(classes[i]) == int(trainer.data.labels[position][index])
