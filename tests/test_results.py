"""One tidy frame: a row per run and inference mode, against the records read line by line."""

import json
import time

import nbformat
import pytest
from invented import digits, write_study

from hmoe_repro.analysis.results import (
    METRICS,
    accuracies_at,
    config_of,
    frame_of,
    last_losses,
    margin_of,
    measurement,
    metric_of,
    results,
    runs,
    validated_domains,
    with_omitted_defaults,
)
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import results_dir
from hmoe_repro.training.store import sealed_record


def lines(study):
    text = (results_dir() / f"{study}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_row_for_each_run_and_mode_with_what_the_record_says():
    frame, records = results("quick-digits"), lines("quick-digits")
    assert len(frame) == sum(len(r["selected"]) for r in records)
    assert len(runs(frame)) == len(records)
    for record in records:
        for mode, chosen in record["selected"].items():
            row = frame[(frame.run_id == record["run_id"]) & (frame["mode"] == mode)].squeeze()
            assert row.accuracy == chosen["test_accuracy"]
            assert row.step == chosen["step"]
            assert row.test_domain == ",".join(record["config"]["test_domains"])
            assert row["hparams.lr"] == record["config"]["hparams"]["lr"]
            if record.get("discovery"):
                assert row["discovery.nmi_domain"] == record["discovery"]["nmi_domain"]


def test_a_mode_that_needs_the_domain_has_an_accuracy_on_known_domains_alone():
    frame = results("quick-dmg")
    inside = frame[frame.accuracy.isna() & (frame.status == "complete")]
    assert len(inside)
    assert inside.accuracy_in_domain.notna().all()
    assert set(frame.protocol) == {"dmg"}


def test_two_studies_with_a_run_in_common_count_it_once():
    once = results("quick-digits")
    assert len(results(["quick-digits", "quick-digits"])) == len(once)
    both = results(["quick-digits", "quick-gmoe"])
    assert not both.duplicated(["run_id", "mode"]).any()
    assert set(both.study) == {"quick-digits", "quick-gmoe"}


def test_a_file_a_store_and_a_folder_of_runs_give_the_same_rows(tmp_path):
    records = lines("quick-balance")[:3]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    for record in records:
        folder = tmp_path / "runs" / record["run_id"]
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(sealed_record(record))
    by_file, by_store = results(file), results("mine", str(tmp_path))
    by_folder = results(tmp_path / "runs")
    for other in (by_store, by_folder):
        assert list(other.columns) == list(by_file.columns)
        assert sorted(other.accuracy) == sorted(by_file.accuracy)
    (folder / "record.json").write_text("{")
    with pytest.raises(HmoeError, match="Fix: delete the folder of that run"):
        results(tmp_path / "runs")


def test_a_failed_run_keeps_a_row_and_its_reason(tmp_path):
    whole, other = lines("quick-balance")[:2]
    failed = other | {"status": "failed", "reason": "diverged", "selected": {}, "checkpoints": []}
    (tmp_path / "mine.jsonl").write_text(json.dumps(whole) + "\n" + json.dumps(failed) + "\n")
    frame = results("mine", str(tmp_path))
    row = frame[frame.status == "failed"].squeeze()
    assert row.reason == "diverged"
    assert row.isna()["mode"]
    assert frame.accuracy.isna().sum() == 1


@pytest.mark.parametrize("source", ["quick-absent", ["quick-digits", "quick-absent"]])
def test_a_study_that_is_not_there_is_named(source):
    with pytest.raises(HmoeError, match="no records of study 'quick-absent'"):
        results(source)


@pytest.mark.slow
@pytest.mark.serial
def test_a_page_over_ten_thousand_records_takes_seconds(root, tmp_path):
    write_study(tmp_path, "quick-digits", digits(seeds=range(625)))
    cells = nbformat.read(root / "nbs/paper/digits_table.ipynb", 4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    names, started = {}, time.process_time()
    exec(sources[0], names)
    names |= {"store": str(tmp_path), "output": str(tmp_path / "out")}
    for source in sources[1:]:
        exec(source, names)
    assert len(runs(names["page"].frame)) == 10_000
    assert "625 trial seeds" in names["page"].folder.joinpath("digits_table.md").read_text()
    taken = time.process_time() - started
    assert taken < 90, taken  # 28 to 31 s on a busy core; other processors are slower


def test_a_metric_has_its_unit_scale_and_margin():
    assert metric_of("accuracy_in_domain") == ("accuracy_in_domain", "points", 100.0, 1.0)
    assert metric_of("discovery.nmi_class")[1:] == ("NMI", 1.0, 0.05)
    assert metric_of("inaccuracy") == ("inaccuracy", "score", 1.0, 0.05)  # not by its letters
    with pytest.raises(HmoeError, match="unit"):
        margin_of("furlongs")
    assert all(metric.name == name for name, metric in METRICS.items())


def test_what_a_name_omits_is_filled_with_the_declared_default():
    """`experts` of HMOE-DN and the load balance of the toy are recorded at other values alone."""
    frame = with_omitted_defaults(results(["quick-digits", "quick-toy", "quick-classloss"]))
    of = frame.set_index("algorithm")["hparams.experts"]
    assert set(of["HMOE-DN"]) == {"hypernetwork"}
    assert of["ERM"].isna().all()
    toy = frame[frame.dataset == "SineIntervals"]["hparams.load_balance"]
    assert set(toy) == {"kl", "cv2"}


def test_parts_of_a_record_are_those_of_its_line():
    (record,) = [r for r in lines("quick-dmg-short") if r["config"]["algorithm"] == "DMG"][:1]
    row = next(frame_of([record]).itertuples())
    assert measurement(row, "masks") == record["masks"]
    assert measurement(row, "toy") == {}
    assert last_losses(row) == record["checkpoints"][-1]["losses"]
    assert accuracies_at(row) == record["checkpoints"][-1]["accuracies"]
    assert config_of(row).run_id == record["run_id"]
    held_out = set(record["config"]["test_domains"])
    assert validated_domains(row) == set(accuracies_at(row)) - held_out
