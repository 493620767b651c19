"""Commands on a store of many runs: generated records, what a process used, table and page."""

import json
import math
import re

import pandas as pd
import pytest
from notebooks import page_functions

from hmoe_repro.bench.store_commands import (
    STORE,
    generated_records,
    store_table,
    times_target,
    used_by,
    write_generated,
)
from hmoe_repro.bench.timing import write_record
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.report.render import render
from hmoe_repro.report.render_many import published_artefacts
from hmoe_repro.studies.artefacts import ARTEFACTS
from hmoe_repro.training.store import sealed_record

PAGE = page_functions("speed_store")


@pytest.fixture(scope="module")
def tiny():
    return STORE.run(1, "tiny", lambda line: None)


def invented():
    "Two stores, two commands, three rounds. At 200 records `pack` is slower, above its target."
    seconds = {
        "100": {"runs": [0.3, 0.3, 0.6], "pack": [0.9, 0.9, 0.9]},
        "200": {"runs": [0.75, 0.6, 0.6], "pack": [6.0, 4.5, 3.0]},
    }
    sizes = {"records": [100, 200], "commands": ["runs", "pack"], "target_seconds": [1.0, 3.0]}
    return {
        "what": "store",
        "scale": "full",
        "rounds": 3,
        "sizes": sizes,
        "bf16": "amx",
        "seconds": seconds,
        "first_seconds": {count: {"runs": 2.25, "pack": 7.0} for count in seconds},
        "mebibytes": {count: {"runs": [50.0, 60.4, 55.0], "pack": [70.0] * 3} for count in seconds},
    }


def test_generated_files_are_sealed_records(tmp_path):
    study = write_generated(tmp_path / "runs", 40)
    expected = {record["run_id"]: sealed_record(record) for record in generated_records(40)}
    assert len(expected) == 40
    found = {path.parent.name: path.read_text() for path in study.parent.glob("*/record.json")}
    assert found == expected
    assert re.search(r"^seeds = \[1000, 1001, 1002\]$", study.read_text(), re.MULTILINE)


def test_a_process_is_measured_without_the_one_that_starts_it():
    held = bytearray(400 * 2**20)
    held[:: 2**12] = b"\1" * len(held[:: 2**12])  # memory that this process has in use
    idle = used_by(["-S", "-c", "pass"], {})
    assert 1 < idle.mebibytes < 200
    larger = used_by(["-S", "-c", "held = b'1' * (300 * 2**20)"], {})
    assert larger.mebibytes > 300
    busy = used_by(["-S", "-c", "import time\nwhile time.process_time() < 0.5: pass"], {})
    assert 0.4 < busy.seconds - idle.seconds < 5
    with pytest.raises(HmoeError, match="failed"):
        used_by(["-c", "raise SystemExit(3)"], {})


def test_the_table_has_medians_first_calls_and_the_largest_memory():
    table = store_table(invented()).set_index(["records", "command"])
    assert table.loc[("200", "pack")].to_dict() == {
        "seconds, first call": 7.0,
        "seconds": 4.5,
        "times the target": 1.5,
        "MiB at the peak": 70,
    }
    assert table.loc[("100", "runs"), "MiB at the peak"] == 60
    assert times_target(invented(), 200).runs.tolist() == pytest.approx([0.25, 0.2, 0.2])


def test_a_target_is_judged_where_it_is_missed_most():
    pack = next(target for target in STORE.targets if target.text.startswith("pack"))
    assert pack.values(invented()).tolist() == [2.0, 1.5, 1.0]
    slower = invented()
    slower["seconds"]["100"]["pack"] = [2.5, 2.5, 2.5]
    assert pack.values(slower).tolist() == [2.5, 2.5, 2.5]
    table = STORE.target_table(invented()).set_index("target")
    verdicts = table.verdict.rename(lambda text: text.partition(":")[0])
    assert verdicts[["runs", "pack"]].tolist() == ["met", "not met"]
    unmeasured = [target for target in STORE.targets if target.text.startswith("plan")]
    assert math.isnan(unmeasured[0].values(invented()).median())


def test_the_answer_names_the_slowest_command():
    line = PAGE.slowest_line
    assert line(invented()) == (
        "The slowest command against its target, `pack` on 200 records, takes 4.5 processor "
        "seconds (quartiles 3.8 to 5.2), above the target of 3 s."
    )


def test_the_page_is_rendered_from_a_record(warm_kernels, tiny, tmp_path):
    assert set(tiny["seconds"]["16"]) == {"runs", "pack"}
    write_record(tiny, tmp_path / STORE.file_name("tiny"))
    shown = render("speed_store", "bench", store=tmp_path, output=tmp_path / "figures")
    made = {f"speed_store{end}" for end in (".png", ".csv", "_targets.csv", ".provenance.json")}
    assert made <= {path.name for path in shown.parent.iterdir()}
    evidence = json.loads((shown.parent / "speed_store.provenance.json").read_text())
    assert (evidence["artefact"], evidence["scale"]) == ("speed_store", "tiny")
    table = pd.read_csv(shown.parent / "speed_store.csv")
    assert table.command.tolist() == ["runs", "pack"]
    assert (table["MiB at the peak"] > 10).all()


def test_without_a_record_the_page_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HMOE_RESULTS", str(tmp_path))
    write_record({}, ARTEFACTS["speed"].results_file("bench"))
    assert published_artefacts(None, "bench") == ["speed"]
    with pytest.raises(HmoeError) as refused:
        render("speed_store", "bench", store=str(tmp_path), output=tmp_path / "figures")
    assert "hmoe bench --what store --publish" in str(refused.value)
