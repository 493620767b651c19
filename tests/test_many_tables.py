"""Tables of many runs: the shortcuts for speed give what the plain computation gives."""

import json
import math
import subprocess
import sys

import pandas as pd
import pytest
from many_runs import write_store

from hmoe_repro.core.toml import package_toml
from hmoe_repro.data.registry import DATASETS
from hmoe_repro.studies import study_file
from hmoe_repro.studies.search import _texts, _varied

VALUES = [0, 1, 2, -0.0, 0.0, 1.0, 0.5, True, False, None, "1", "", "null", [1], [1.0], {"b": 1}]
MIXTURES = [VALUES, [0, 1, 1], [True, False], [0.0, -0.0, 0.5], [None, "x"], [1, 1.0], [0, 0.0]]


def plain_texts(dictionaries):
    "Every value as JSON, one after another."
    rows = []
    for values in dictionaries:
        rows.append({name: json.dumps(value, sort_keys=True) for name, value in values.items()})
    return pd.DataFrame(rows, dtype=object)


@pytest.mark.parametrize("values", MIXTURES, ids=repr)
@pytest.mark.parametrize("absent", [False, True])
def test_texts_are_those_of_json(values, absent):
    dictionaries = [{"a": value, "b": number % 2} for number, value in enumerate(values)]
    if absent:
        dictionaries.append({"b": 0})
    texts = _texts(pd.Series(dictionaries, dtype=object))
    expected = plain_texts(dictionaries)
    assert list(texts) == list(expected)
    pd.testing.assert_frame_equal(texts, expected)


def test_varied_columns_are_those_with_two_values():
    table = pd.DataFrame(
        {
            "constant": ["1", "1", "1"],
            "missing": [None, math.nan, None],
            "partly": ["1", None, "1"],
            "two": ["1", "2", "1"],
        },
        dtype=object,
    )
    assert _varied(table) == ["partly", "two"]
    assert _varied(table.iloc[:0]) == []


def test_listed_domains_are_those_of_the_registry():
    listed = package_toml("domains.toml")
    assert {"DigitDomains", "PACS", "RotatedMNIST"} <= set(listed)
    for dataset, domains in listed.items():
        assert tuple(domains) == DATASETS[dataset].domain_names
    assert study_file.domain_names("no such data set") == ()


WITHOUT_TORCH = """
import sys
from hmoe_repro.studies.study_file import domain_names
from hmoe_repro.report.study_report import selected_tables
from hmoe_repro.training.store import RunStore
selected_tables(RunStore(sys.argv[1]).outlines()[0], "training-domain")
print(domain_names("DigitDomains"), [name for name in ("torch", "seaborn") if name in sys.modules])
"""


def test_a_table_of_runs_is_made_without_torch(tmp_path):
    write_store(tmp_path, 8)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "('negative', 'photo', 'plain', 'sketch') []\n"


def test_a_data_set_registered_in_this_process_has_its_own_domains(monkeypatch):
    changed = DATASETS["DigitDomains"].__class__(build=None, domain_names=("x", "y"), summary="")
    monkeypatch.setitem(DATASETS, "DigitDomains", changed)
    assert study_file.domain_names("DigitDomains") == ("x", "y")
