"""Benchmarks: one scaffold for all of them, and published records give the committed tables."""

import ast
import io
import re

import pandas as pd
import pytest
from notebooks import ROOT, page_code

from hmoe_repro.analysis.results import read_benchmark
from hmoe_repro.analysis.writers import csv_text
from hmoe_repro.bench.benchmark import Bench
from hmoe_repro.bench.timing import SCALES, Target
from hmoe_repro.cli.select_report import _benches
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import repo_root, results_dir
from hmoe_repro.studies.artefacts import ARTEFACTS

BENCHES = _benches()
PAGES = {name: bench for name, bench in BENCHES.items() if bench.page}
PUBLISHED = [
    name for name, bench in PAGES.items() if (results_dir() / bench.file_name("full")).exists()
]


def counting(**changed):
    "A benchmark of the sizes of `moe` whose jobs count their calls."
    calls = []

    def jobs(size):
        return {
            ("sum", "plain"): lambda: calls.append("plain"),
            ("sum", "ours"): lambda: calls.append("ours"),
            ("sum", "compiled"): impossible,
        }

    def impossible():
        raise HmoeError("no compiler.", fix="one.")

    given = {"what": "moe", "jobs": jobs, "tables": {}} | changed
    return Bench(**given), calls


def test_a_record_has_sizes_times_reasons_and_further_entries():
    seen = []

    def entries(measured):
        seen.append(measured)
        return {"images": measured.size.images, "skipped": {"replaced": "yes"}}

    bench, calls = counting(entries=entries)
    lines = []
    record = bench.run(3, "tiny", lines.append)
    assert calls == ["plain", "ours"] + ["plain", "ours", "ours", "plain", "plain", "ours"]
    assert lines == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert (record["what"], record["scale"], record["rounds"]) == ("moe", "tiny", 3)
    assert record["sizes"] == SCALES["moe"]["tiny"]
    assert record["images"] == 2
    assert {name: len(s) for name, s in record["seconds"]["sum"].items()} == {"plain": 3, "ours": 3}
    assert record["skipped"] == {"replaced": "yes"}, "an entry replaces one of the same name"
    (measured,) = seen
    assert [*measured.skipped] == ["compiled"]
    assert measured.seconds == record["seconds"]
    assert {*measured.first_call} == {("sum", "plain"), ("sum", "ours")}
    assert (measured.scale, measured.rounds, measured.device.type) == ("tiny", 3, "cpu")
    assert record["environment"]["threads"] == 1
    assert record["busy"] > 0


def test_without_jobs_nothing_is_timed():
    record = Bench(what="moe", entries=lambda measured: {"trials": [1]}, tables={}).run(3, "tiny")
    assert record["trials"] == [1]
    assert "seconds" not in record


def test_a_device_is_refused_unless_the_jobs_take_one():
    bench, calls = counting()
    with pytest.raises(HmoeError, match="'moe' measures only the processor. Fix: use --device cpu"):
        bench.run(3, "tiny", device="cuda")
    assert not calls
    devices = []

    def jobs(size, device):
        devices.append(device.type)
        return {}

    counting(jobs=jobs, any_device=True)[0].run(3, "tiny", lambda line: None)
    assert devices == ["cpu"]
    assert [n for n, b in BENCHES.items() if b.any_device] == ["algorithms", "together"]


def test_targets_are_given_or_computed_from_the_record():
    target = Target("images", "≥", 2.0, lambda record: record["images"])
    for targets in ([target], lambda record: [target]):
        bench, _ = counting(targets=targets, tables={"Images": lambda record: pd.DataFrame([2])})
        record = {"scale": "full", "bf16": "amx", "images": 2}
        assert bench.target_table(record).verdict.tolist() == ["met"]
        assert [*bench.all_tables(record)] == ["Images", "Targets"]
    assert [*counting()[0].all_tables(record)] == []


def test_every_benchmark_has_its_scales_and_its_own_file():
    names = [bench.file_name(bench.default_scale) for bench in BENCHES.values()]
    assert len(set(names)) == len(names)
    assert {"bench.json", "bench-systems-quick.json"} <= {*names}
    for name, bench in BENCHES.items():
        assert {bench.default_scale, "tiny"} <= {*SCALES[name]}
        assert not bench.page or "bench" in ARTEFACTS[bench.page].profiles
    judged = {target["text"] for targets in SCALES["targets"].values() for target in targets}
    used = {
        target.text
        for bench in BENCHES.values()
        if not callable(bench.targets)
        for target in bench.targets
    }
    assert used == judged


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tables_of_a_published_record_are_those_of_its_page(name):
    bench = PAGES[name]
    record = read_benchmark(results_dir() / bench.file_name("full"), name)
    tables = bench.all_tables(record)
    targets = tables.pop("Targets", None)
    whole_run = tables.pop("A whole run of ERM on RotatedMNIST, computed", None)
    (table,) = tables.values()
    folder = repo_root() / "figures" / "bench"
    pairs = [(table, folder / f"{bench.page}.csv")]
    if whole_run is not None:
        pairs.append((whole_run, folder / f"{bench.page}_whole_run.csv"))
    if targets is not None:
        pairs.append((targets, folder / f"{bench.page}_targets.csv"))
    for ours, committed in pairs:
        pd.testing.assert_frame_equal(
            pd.read_csv(io.StringIO(csv_text(ours))), pd.read_csv(committed), rtol=1e-6
        )


def test_the_scaffold_is_written_once():
    """Only `benchmark` opens a record; the module of a benchmark has its jobs, tables and
    targets."""
    opening = []
    for path in sorted((ROOT / "hmoe_repro" / "bench").glob("*.py")):
        names = {
            getattr(node.func, "id", getattr(node.func, "attr", ""))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
        }
        if "new_record" in names:
            opening.append(path.stem)
    assert opening == ["benchmark"]


@pytest.mark.parametrize("name", [bench.page for bench in PAGES.values()])
def test_a_page_has_its_table_then_how_it_was_measured_then_its_verdict(name):
    cells = page_code(name)
    places = [
        next(at for at, source in enumerate(cells) if call in source)
        for call in ("page.table(", "page.figure(", "page.measured(", "page.verdict(")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("name", [PAGES[name].page for name in PUBLISHED])
def test_the_published_record_is_answered_in_25_words_and_a_finding(name, monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda *objects, **options: None)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    monkeypatch.setattr("hmoe_repro.report.page.save_figure", lambda *arguments: None)
    space = {"__name__": "page"}
    for source in page_code(name):
        exec(source, space)
    page = space["page"]
    assert 0 < len(page.answer.split()) <= 25
    assert re.search(r"\d", page.answer)
    for finding in page.findings.values():
        assert 0 < len(finding.split()) <= 14
