"""Fresh records against published ones: counts, cells, claims, and the one line."""

import copy
import math
import re
import shutil

import invented
import numpy as np
import pandas as pd
import pytest

from hmoe_repro.algorithms import FAMILIES
from hmoe_repro.analysis.results import frame_of
from hmoe_repro.report.compare_published import (
    PageVerdict,
    by_chance,
    changed_claims,
    changed_lines,
    changed_tables,
    circumstances,
    compare_cells,
    compare_runs,
    row_names,
)
from hmoe_repro.report.comparison_text import compare_studies, describe
from hmoe_repro.report.render_many import published_pages
from hmoe_repro.report.reproduce import reproduce_published, sample_runs
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.studies.sweep import SweepOptions
from hmoe_repro.training.run import run
from hmoe_repro.training.run_config import TOY
from hmoe_repro.training.store import RunStore


@pytest.fixture
def there():
    "Three algorithms on four domains, three seeds each, as published."
    return invented.digits(algorithms=("ERM", "HMOE-DL", "HMOE-DN"))


def shifted(records, points, processor="another processor", **only):
    "The same runs elsewhere: test accuracies moved by `points` where the specification fits."
    made = copy.deepcopy(records)
    for record in made:
        record["environment"]["device_name"] = processor
        if any(record["config"][name] != value for name, value in only.items()):
            continue
        for chosen in record["selected"].values():
            chosen["test_accuracy"] += points / 100
    return made


def verdict(records):
    "The largest mean accuracy, and whose it is."
    means = frame_of(records).groupby("algorithm").accuracy.mean()
    best, last = means.idxmax(), means.idxmin()
    line = f"Best on average: {best} ({100 * means.max():.2f}); {last} ({means.min()}) is last."
    return PageVerdict([line], {("ERM is last", "quick-digits"): str(last == "ERM")})


def compared(studies, verdicts=()):
    "`compare_studies` of records."
    framed = {name: tuple(map(frame_of, sides)) for name, sides in studies.items()}
    return compare_studies(framed, dict(verdicts))


def cells_of(here, there):
    "`compare_cells` of records."
    return compare_cells(frame_of(here), frame_of(there))


def report(here, there):
    "What is said of one study and its one page."
    return compared({"quick-digits": (here, there)}, {"page": (verdict(there), verdict(here))})


def test_records_that_are_equal_are_the_same_to_the_bit(there):
    slower = [r | {"wall_time_s": 1.0, "finished": "later"} for r in shifted(there, 0)]
    first, total = report(slower, there)
    assert first == "bitwise identical"
    assert total.startswith("36 of 36")


def test_another_rounding_with_the_same_findings(there):
    first, total, study, page, old, new = report(shifted(there, 0.4, algorithm="ERM"), there)
    assert first.startswith("same findings, different")
    assert "another processor instead" in first
    assert total.startswith("24 of 36")
    assert study == f"quick-digits: {total}"
    assert page.startswith("page: ")
    assert "other lines" in page
    assert old.startswith("  - Best")
    assert new.startswith("  + Best")


def test_other_findings_are_named(there):
    "ERM falls by forty points on all test domains: four cells, and what the verdict says."
    lines = report(shifted(there, -40, algorithm="ERM"), there)
    assert lines[0].startswith("different findings:")
    assert "4 of 28" in lines[0]
    assert "another verdict" in lines[0]
    assert "(quick-digits)" in lines[0]
    assert "another processor" in lines[0]
    off = next(line.split() for line in lines if {"ERM", "photo"} <= {*line.split()})
    assert float(off[5]) == pytest.approx(float(off[4]) - 40, abs=0.11)
    assert any(line.startswith("  + Best") and line.endswith(") is last.") for line in lines)


def test_a_few_cells_beyond_are_chance_and_many_are_not(there):
    "One cell of 28 is chance, twelve are not."
    limit = cells_of(there, there).limit.max()

    def first(**only):
        return compared({"s": (shifted(there, -1.2 * limit, **only), there)}, {})[0]

    assert first(algorithm="ERM", test_domains=["photo"]).startswith("same findings")
    assert re.match(r"different findings:\s\d\d of 28", first())
    assert [by_chance(n) for n in (1, 4, 20, 100, 638)] == [0, 1, 2, 9, 42]


def test_a_run_that_failed_here_is_another_finding(there):
    here = copy.deepcopy(there)
    here[0] |= {"status": "failed", "selected": {}, "checkpoints": []}
    lines = compared({"s": (here, there)}, {})
    assert lines[0].startswith("different findings:")
    assert "1 run failed" in lines[0]
    assert "35 of 36" in lines[1]


def test_limits_of_accuracy_by_hand(there):
    "The variance between seeds, and that of the test images."
    cells = cells_of(shifted(there, 1), there).query("test_domain == 'photo'").set_index("name")
    frame = frame_of(there).query("test_domain == 'photo' and algorithm == 'ERM'")
    erm = 100 * frame.accuracy
    images = erm.mean() * (100 - erm.mean()) / frame.test_size.iloc[0]
    limit = 2 * math.sqrt(2 * (erm.var() / 3 + images))
    assert cells.limit["ERM"] == pytest.approx(limit)
    assert cells.published["ERM"] == pytest.approx(erm.mean())
    assert cells.fresh["ERM"] == pytest.approx(erm.mean() + 1)
    for share, expected in ((1.01, True), (0.99, False)):
        judged = cells_of(shifted(there, limit * share, algorithm="ERM"), there)
        judged = judged.query("name == 'ERM' and test_domain == 'photo'")
        assert judged.beyond.tolist() == [expected]


def test_settings_of_one_algorithm_are_rows():
    there = invented.balance(seeds=(0, 1, 2))
    assert set(row_names(frame_of(there)).values()) == {
        "HMOE-DN, lambda_kl 1.0",
        "HMOE-DN, lambda_kl 3.0",
    }


def test_lines_of_two_verdicts_are_compared_and_so_are_the_claims():
    claim, other = ("masks beat heads", "quick-dmg"), ("IoU falls", "quick-dmg")
    old = PageVerdict(["In 4 of 12 runs.", "Different: IRM (-4.5)."], {claim: "supported"})
    assert changed_lines(old, old) == [] == changed_claims(old, old)
    new = old._replace(lines=["In 5 of 12 runs.", "Different: IRM (-4.5)."])
    assert changed_lines(old, new) == [f"- {old.lines[0]}", f"+ {new.lines[0]}"]
    assert changed_claims(old, new) == []  # the numbers of a sentence are no finding
    judged = old._replace(claims={claim: "inconclusive", other: "supported"})
    (one,) = changed_claims(old, judged)
    assert "masks beat heads" in one
    assert "(quick-dmg)" in one
    assert changed_claims(judged, judged._replace(claims={})) == []  # not run there


def test_what_differs_between_machines_is_said(there):
    def made(asked="portable", **environment):
        return frame_of(
            [
                r
                | {
                    "config": r["config"] | {"determinism": asked},
                    "environment": r["environment"] | environment,
                }
                for r in there[:2]
            ]
        )

    portable = made(determinism="portable")
    gpu = circumstances(made(determinism="cuda", device="cuda", device_name="a GPU"), portable)
    kind, device = gpu.split(", ")
    assert kind.split(" instead of ") == ["determinism cuda", "portable"]
    assert device.split(" instead of ") == ["on a GPU", "an invented processor"]
    same = circumstances(frame_of(there), portable)  # not recorded then
    assert "equal processor" in same
    assert "equal versions" in same
    newer = made(versions={"torch": "2.14.0"}, library="x")
    assert circumstances(newer, portable).split(" instead of ") == ["torch 2.14.0", "2.13.0"]
    other = circumstances(made(library="x"), made(library="y"))
    assert other.split(" instead of ") == ["library x", "y"]


def test_studies_are_added_up_and_new_ones_named(there):
    lines = compared({"a": (there, there), "b": (there[:3], there[:3]), "c": (there[:1], [])})
    first, total, new = lines
    assert first == "bitwise identical"
    assert total.startswith("39 of 39")
    assert new.startswith("c: nothing")
    first, again = compared({"c": (there, [])})
    assert first.startswith("nothing published")
    assert again == new


def test_only_the_outcome_is_counted(there):
    broken = copy.deepcopy(there)
    broken[0]["checkpoints"][0]["losses"]["loss"] += 1e-9
    stranger = invented.record("HMOE-ND", "photo", 0, np.random.default_rng(0))
    result = compare_runs(frame_of(broken[:-1] + [stranger]), frame_of(there))
    assert result.different.sum() == 1
    assert not result.failed.any()
    absent = result.run_id[result.side == "published"]
    assert absent.tolist() == [there[-1]["run_id"]]
    equal, new, lost = describe(result).split(", ")
    assert equal.startswith("34 of 35")
    assert re.match("1 .*not published", new)
    assert re.match("1 .*not repeated", lost)
    nan = copy.deepcopy(there)
    nan[0]["checkpoints"][0]["losses"]["loss"] = math.nan
    assert not compare_runs(frame_of(nan), frame_of(copy.deepcopy(nan))).different.any()
    assert describe(pd.concat([result, result])).startswith("68 of 70")


def test_the_published_pages_are_those_of_the_committed_figures(root):
    committed = {(p.parent.name, p.stem) for p in (root / "figures").glob("*/*.ipynb")}
    assert set(published_pages()) == {page for page in committed if page[0] != "smoke"}


def test_the_sample_has_the_toy_and_every_family():
    configs = [record["config"] for record in sample_runs().record]
    families = {FAMILIES[config["algorithm"]] for config in configs if config["dataset"] != TOY}
    waiting = {"sharpness", "style", "generative", "self_supervised"}  # no published runs yet
    assert families == set(FAMILIES.values()) - waiting
    assert any(config["dataset"] == TOY for config in configs)
    assert all(config["determinism"] == "portable" for config in configs)


def test_what_is_published_is_rendered_trained_and_compared(
    warm_kernels, root, tmp_path, monkeypatch
):
    shutil.copytree(root / "figures" / "bench", tmp_path / "figures" / "bench")
    monkeypatch.setenv("HMOE_FIGURES", str(tmp_path / "figures"))
    record = run(study_configs("smoke-toy")[0], RunStore(tmp_path / "published"))
    how = SweepOptions(RunStore(tmp_path / "runs"), "cpu", jobs=1)
    pages, made, said = [("bench", "speed")], tmp_path / "made", []
    reproduce_published(pages, frame_of([record]), how, made, said.append)
    assert "1 page and" in said[0]
    assert "1 run afresh" in said[0]
    found = [re.match(r"(\d+) of (\d+) (\w+)(.*)", line) for line in said]
    counts = {m[3]: (m[1], m[2]) for m in found if m}
    assert (counts["pages"], counts["tables"]) == (("1", "1"), ("4", "4"))
    assert counts["records"] == ("1", "1")
    assert any(m and m[4].startswith(" bitwise identical") for m in found)
    assert 'href="bench/index.html"' in (made / "index.html").read_text()
    assert "<table>" in (made / "bench" / "index.html").read_text()
    table = tmp_path / "figures" / "bench" / "speed_targets.csv"
    changed = re.sub(r"\d(?=\D*\Z)", lambda digit: str((int(digit[0]) + 1) % 10), table.read_text())
    table.write_text(changed)
    (made / "bench" / "speed.csv").unlink()
    assert changed_tables(pages, made) == (4, ["bench/speed.csv", "bench/speed_targets.csv"])
