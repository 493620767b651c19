"""What a run is called, and what changes its name."""

import json
import subprocess
import sys

import pytest

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.training.run_config import RunConfig, RunOptions

SPEC = RunConfig(
    algorithm="ERM",
    dataset="DigitDomains",
    dataset_fingerprint="f" * 12,
    test_domains=("sketch",),
    hparams={"lr": 1e-3, "batch_size": 32},
    network="small_cnn",
    resolution=16,
    steps=10,
)


def test_every_field_of_the_specification_changes_the_name():
    changes = dict(
        algorithm="IRM",
        dataset="PACS",
        dataset_fingerprint="0",
        test_domains=("photo",),
        trial_seed=1,
        hparams={"lr": 1e-2, "batch_size": 32},
        network="mnist_cnn",
        weights="V1",
        resolution=28,
        steps=11,
        checkpoint_frequency=5,
        sampler="pooled",
        evaluate="all",
        precision="bf16",
        domainbed_compat=True,
        algorithm_source="abc",
        images={"source": "cache"},
        hparams_seed=1,
        determinism="portable",
        algorithm_version=2,
        protocol="dmg",
        splits="0123456789ab",
        measure="spectra",
        seed_as="IRM",
        classes="union",
    )
    for name in set(RunConfig.model_fields) - {"epochs", *changes}:  # an option that is new
        value = getattr(SPEC, name)
        changes[name] = value + 1 if type(value) is int else not value
    names = {SPEC.replace(**{k: v}).run_id for k, v in changes.items()}
    assert len(names) == len(changes)
    assert SPEC.run_id not in names


def test_the_name_does_not_depend_on_order_or_on_a_trip_through_json():
    other = RunConfig.from_dict(json.loads(json.dumps(SPEC.to_dict())))
    assert (
        other.run_id == SPEC.run_id == SPEC.replace(hparams={"batch_size": 32, "lr": 0.001}).run_id
    )


def test_names_are_stable():
    """The names of published runs; a change here orphans every published record."""
    assert SPEC.run_id == "7bb8f1e32b63"


def test_an_option_that_is_added_renames_no_run():
    class Larger(RunConfig):
        added: int = 0

    kept = {name: getattr(SPEC, name) for name in RunConfig.model_fields}
    assert Larger.of(**kept).run_id == SPEC.run_id != Larger.of(**kept, added=1).run_id
    assert set(SPEC.to_dict()) == set(RunConfig.model_fields) - {"epochs"}


def test_foreign_and_missing_fields_are_named():
    with pytest.raises(HmoeError, match="unknown option 'dropout'.* Valid: algorithm, "):
        RunConfig.from_dict(SPEC.to_dict() | {"dropout": 0.5})
    with pytest.raises(HmoeError, match="algorithm is missing"):
        RunConfig.from_dict({"dataset": "PACS"})


def test_specification_and_store_import_nothing_large():
    "Listing what there is reads records, which need no tensors."
    large = {"torch", "pandas", "numpy", "safetensors"}
    code = f"import hmoe_repro.training.store, sys; print(sorted({large} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"sampler": "x"}, "unknown sampler 'x'.* Valid: domain, pooled"),
        ({"precision": "bf17"}, "unknown precision 'bf17'.* Valid: float32, bf16"),
        ({"measure": "speed"}, "unknown measure 'speed'.* Valid: spectra, clusters."),
        ({"steps": 0}, "steps must be greater than or equal to 1, got 0"),
        ({"steps": 1.0}, "steps must be a valid integer, got 1.0"),
        ({"trial_seed": -1}, "trial_seed must be greater than or equal to 0"),
        ({"domainbed_compat": 1}, "domainbed_compat must be a valid boolean"),
        ({"evaluate": "selection:0"}, "evaluate must be a text that matches .*, got .selection:0"),
        ({"stepps": 1}, "unknown option 'stepps'.* Valid: algorithm, dataset"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_what_is_valid(wrong, said):
    asked = RunOptions(algorithm="ERM", dataset="PACS", test_domains=["photo"])
    with pytest.raises(HmoeError, match=said) as caught:
        asked.replace(**wrong)
    assert caught.value.setting == next(iter(wrong))
    assert "\n" not in str(caught.value)
