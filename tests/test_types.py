"""Declared types of records, data sets, algorithms and searches fit the real ones."""

import json

import pytest

from hmoe_repro.algorithms import get_algorithm
from hmoe_repro.algorithms.base import DomainAlgorithm
from hmoe_repro.algorithms.domainbed_adapter import _Trial
from hmoe_repro.algorithms.hmoe import CodedAlgorithm, has_codes
from hmoe_repro.core.files import results_dir
from hmoe_repro.data.base import DomainDataset
from hmoe_repro.data.registry import load_dataset
from hmoe_repro.networks.search_space import Choice, LogUniform, SeededDistribution, Uniform
from hmoe_repro.training.run_config import TOY
from hmoe_repro.training.selection import Checkpoint, InDomain, Record, Selected
from hmoe_repro.training.store import _Record

STUDIES = sorted(results_dir().glob("*.jsonl"))


def fits(entries, declared):
    "Has a dictionary all required keys of a TypedDict, and no key that it lacks?"
    return declared.__required_keys__ <= entries.keys() <= declared.__annotations__.keys()


def members(protocol):
    "Names that a Protocol and its bases declare."
    found = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False) and base.__module__.startswith("hmoe_repro"):
            found |= {name for name in vars(base) if not name.startswith("_")}
    return found


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_published_records_have_the_declared_entries(path):
    with path.open(encoding="utf-8") as lines:
        record = json.loads(next(lines))
    assert fits(record, Record)
    assert all(fits(scores, Selected) for scores in record["selected"].values())
    assert all(fits(scores, InDomain) for scores in record.get("in_domain", {}).values())
    is_toy = record["config"]["dataset"] == TOY
    for checkpoint in record["checkpoints"]:
        if is_toy:
            assert checkpoint.keys() == {"step", "losses"}
        else:
            assert fits(checkpoint, Checkpoint)


def test_what_is_checked_at_run_time_is_declared():
    assert _Record.model_fields.keys() <= Record.__annotations__.keys()
    always = {name for name, field in _Record.model_fields.items() if field.is_required()}
    assert always <= Record.__required_keys__


def test_a_misspelt_or_a_missing_entry_does_not_fit():
    whole = {"step": 0, "losses": {}, "accuracies": {}}
    assert fits(whole, Checkpoint)
    assert not fits(whole | {"accuracy": 1.0}, Checkpoint)
    assert not fits({"step": 0, "losses": {}}, Checkpoint)


def test_algorithms_have_the_declared_interface():
    declared = members(DomainAlgorithm)
    assert {"loss", "update", "predict", "predict_modes", "hparams"} <= declared
    for name in ("ERM", "HMOE-DN", "DMG"):
        algorithm = get_algorithm(name)((3, 16, 16), 3, 2, {"network": "small_cnn"})
        assert not [member for member in declared if not hasattr(algorithm, member)], name
        assert has_codes(algorithm) == name.startswith("HMOE")
        if has_codes(algorithm):
            assert not [m for m in members(CodedAlgorithm) if not hasattr(algorithm, m)]


def test_data_sets_have_the_declared_interface():
    declared = members(DomainDataset)
    assert {"fingerprint", "inputs", "labels", "with_options"} <= declared
    data = load_dataset("DigitDomainsTiny")
    assert not [member for member in declared if not hasattr(data, member)]


def test_only_domainbeds_own_searches_draw_from_a_seed():
    assert isinstance(_Trial(json, "ERM", "PACS", "lr", float), SeededDistribution)
    for search in (Uniform(0, 1), LogUniform(-3, -1), Choice((1, 2))):
        assert not isinstance(search, SeededDistribution)
