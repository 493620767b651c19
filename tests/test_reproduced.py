"""Fresh records against published ones: counts, cells, sentences, and the one line."""

import copy
import math
import re
import shutil

import invented
import numpy as np
import pytest

from hmoe_repro.algorithms import FAMILIES
from hmoe_repro.analysis.results import load_study
from hmoe_repro.analysis.statistics import accuracy_verdict, minimum_detectable_difference
from hmoe_repro.analysis.tables import run_results
from hmoe_repro.report.comparison import (
    by_chance,
    changed_sentences,
    circumstances,
    compare_records,
    compare_studies,
    compare_tables,
    describe,
    merge_counts,
    row_names,
)
from hmoe_repro.report.reproduce import (
    changed_tables,
    published_pages,
    reproduce_published,
    sample_records,
)
from hmoe_repro.studies.sweep import Batch
from hmoe_repro.training.run_config import TOY, RunSpec
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
        if any(record["spec"][name] != value for name, value in only.items()):
            continue
        for chosen in record["selected"].values():
            chosen["test_accuracy"] += points / 100
    return made


def verdict(records):
    return f"- {accuracy_verdict(records)}\n"


def report(here, there):
    "What is said of one study and its one page."
    return compare_studies(
        {"quick-digits": (here, there)}, {"page": (verdict(there), verdict(here))}
    )


def test_records_that_are_equal_are_the_same_to_the_bit(there):
    slower = [r | {"wall_time_s": 1.0, "finished": "later"} for r in shifted(there, 0)]
    assert report(slower, there) == [
        "bitwise identical",
        "36 of 36 records equal the published ones.",
    ]


def test_another_rounding_with_the_same_findings(there):
    first, total, study, *tables, page, old, new = report(
        shifted(there, 0.4, algorithm="ERM"), there
    )
    assert first == (
        "same findings, different rounding (processor another processor instead of "
        "an invented processor)"
    )
    assert (
        total == "24 of 36 records equal the published ones." and study == f"quick-digits: {total}"
    )
    assert [t.split(":")[0].strip() for t in tables] == ["test accuracy, points", "experts"]
    assert "35 of 35 cells are within the detectable difference." in tables[0]
    assert page == "page: 1 sentence of the verdict changed"
    assert old.startswith("  published: No algorithm") and new.startswith(
        "  here:      No algorithm"
    )
    assert new.endswith("[only numbers changed]") and old.split(":")[1] != new.split(":")[1]


def test_other_findings_are_named(there):
    "ERM falls by forty points on one test domain: two cells, and what the verdict says."
    lines = report(shifted(there, -40, algorithm="ERM", test_domains=["photo"]), there)
    assert lines[0].startswith(
        "different findings: 2 of 91 table cells beyond the detectable difference; "
    )
    assert "changed their statement (page) (processor another processor" in lines[0]
    assert "33 of 35 cells" in lines[3] and "not: ERM on photo 61 -> 21 (detectable " in lines[3]
    assert any(line.startswith("  here:") and "ERM on" not in line for line in lines)


def test_a_few_cells_beyond_are_chance_and_many_or_far_ones_are_not(there):
    "One row that falls everywhere is five cells of 91: chance allows that a little past the limit."
    limit = minimum_detectable_difference(there).detectable.max()

    def first(points, **only):
        return compare_studies({"s": (shifted(there, points, **only), there)}, {})[0]

    near = first(-1.2 * limit, algorithm="ERM")
    assert (
        near.startswith("same findings")
        and "5 of 91 table cells" in near
        and "up to 8 are expected" in near
    )
    assert re.match("different findings: 5 of 91 table cells", first(-4 * limit, algorithm="ERM"))
    assert re.match(r"different findings: \d\d of 91 table cells", first(-1.2 * limit))
    assert [by_chance(n) for n in (1, 4, 20, 100, 638)] == [0, 1, 2, 9, 42]


def test_a_run_that_failed_here_is_another_finding(there):
    here = copy.deepcopy(there)
    here[0] |= {"status": "failed", "selected": {}, "checkpoints": []}
    lines = compare_studies({"s": (here, there)}, {})
    assert (
        lines[0].startswith("different findings: 1 run failed on one side only")
        and "35 of 36" in lines[1]
    )


def test_limits_of_accuracy_are_those_of_the_study(there):
    cells = compare_tables(shifted(there, 1), there)
    limits = minimum_detectable_difference(there).set_index("test_domain").detectable
    cells = cells[cells.table == "test accuracy, points"].set_index("cell")
    assert cells.limit["HMOE-DN OOD on sketch"] == limits["sketch"]
    assert cells.limit["ERM, average"] == limits["Average"]
    mean = (
        100
        * run_results(there).query("algorithm == 'ERM' and test_domain == 'plain'").accuracy.mean()
    )
    assert cells.published["ERM on plain"] == pytest.approx(mean)
    assert cells.fresh["ERM on plain"] == pytest.approx(mean + 1)
    edge = limits["photo"]
    for beyond, expected in ((1.01, "beyond"), (0.99, "within")):
        judged = compare_tables(shifted(there, edge * beyond, algorithm="ERM"), there).set_index(
            "cell"
        )
        assert judged.verdict["ERM on photo"] == expected


def test_limits_of_other_scores_by_hand():
    "Two settings of one algorithm are two rows; the variance between seeds is pooled over them."
    there = invented.balance(seeds=(0, 1, 2))
    for record, nmi in zip(there, (0.1, 0.2, 0.3, 0.5, 0.5, 0.8)):
        record["discovery"]["nmi_domain"] = nmi
    assert set(row_names(there).values()) == {"HMOE-DN, lambda_kl 1.0", "HMOE-DN, lambda_kl 3.0"}
    limit = 2 * math.sqrt(2 * (0.01 + 0.03) / 2 / 3)
    for gap, expected in ((limit - 0.01, "within"), (limit + 0.01, "beyond")):
        here = copy.deepcopy(there)
        for record in here[:3]:
            record["discovery"]["nmi_domain"] += gap
        cells = compare_tables(here, there).set_index("cell")
        cell = cells.loc["HMOE-DN, lambda_kl 1.0: nmi_domain on photo"]
        assert cell.limit == pytest.approx(limit) and cell.verdict == expected


def toy(errors, found):
    "A record of the toy with the MIX errors and the intervals found of its seeds."
    seeds = [
        {"seed": i, "mse": {"mix": e}, "intervals_found": f}
        for i, (e, f) in enumerate(zip(errors, found))
    ]
    return {
        "run_id": "a" * 12,
        "status": "complete",
        "selected": {},
        "checkpoints": [],
        "environment": {},
        "spec": {
            "algorithm": "HMOE",
            "dataset": "SineIntervals",
            "test_domains": [],
            "hparams": {},
        },
        "toy": {"per_seed": seeds},
    }


def test_the_toy_is_compared_in_powers_of_ten():
    there = [toy([1e-5, 1e-4, 1e-3], [True, True, False])]
    near = compare_tables([toy([2e-5, 2e-4, 1e-3], [True, True, False])], there).set_index("cell")
    assert near.verdict.to_dict() == {
        "HMOE: log10 mse mix": "within",
        "HMOE: intervals_found": "within",
    }
    assert near.published["HMOE: log10 mse mix"] == pytest.approx(-4)
    far = compare_tables([toy([1.0, 1.0, 1.0], [False] * 3)], there).set_index("cell")
    assert far.verdict["HMOE: log10 mse mix"] == "beyond"


def test_one_seed_resolves_nothing_beyond_the_images(there):
    single = [r for r in there if r["spec"]["trial_seed"] == 0]
    lines = compare_studies({"s": (shifted(single, 20), single)}, {})
    assert (
        lines[0].startswith("same findings, different rounding")
        and "cells cannot be judged from one seed" in lines[0]
    )
    assert "differ and cannot be judged from one seed" in lines[3]


def test_sentences_are_compared_without_numbers_and_order():
    old = "- In 4 of 12 runs; never for plain, 75.\n- Different: IRM (-4.5), MMD (-3.1)."
    assert changed_sentences(old, old) == []
    new = "- In 5 of 12 runs; never for plain, 75.\n- Different: MMD (-4.5), IRM (-3.1)."
    assert [other for *_, other in changed_sentences(old, new, {"75"})] == [False, False]
    new = "- In 4 of 12 runs; never for plain, 30.\n- Different: IRM (-4.5)."
    assert [other for *_, other in changed_sentences(old, new, {"75", "30"})] == [True, True]
    (gone,) = changed_sentences(old, old.split("\n")[0])
    assert gone == ("Different: IRM (-4.5), MMD (-3.1).", "", True)


def test_what_differs_between_machines_is_said(there):
    def made(asked="portable", **environment):
        return [
            r
            | {
                "spec": r["spec"] | {"arithmetic": asked},
                "environment": r["environment"] | environment,
            }
            for r in there[:2]
        ]

    portable = made(arithmetic="portable")
    assert (
        circumstances(made(arithmetic="native"), portable)
        == "portable arithmetic was requested and native was used"
    )
    gpu = circumstances(made(arithmetic="cuda", device="cuda", device_name="a GPU"), portable)
    assert gpu == (
        "portable arithmetic was requested and cuda was used, "
        "a GPU instead of processor an invented processor"
    )
    assert (
        circumstances(made("native", arithmetic="cuda"), made("native", arithmetic="native"))
        == "arithmetic cuda instead of native"
    )
    assert (
        circumstances(there, portable) == "on an equal processor with equal versions"
    )  # not recorded then
    assert (
        circumstances(made(versions={"torch": "2.14.0"}), portable)
        == "torch 2.14.0 instead of 2.13.0"
    )
    assert circumstances(made(library="x"), portable) == "another version of the library"


def test_studies_are_added_up_and_new_ones_named(there):
    lines = compare_studies(
        {"a": (there, there), "b": (there[:3], there[:3]), "c": (there[:1], [])}, {}
    )
    assert lines == [
        "bitwise identical",
        "39 of 39 records equal the published ones.",
        "c: nothing is published to compare with.",
    ]
    assert compare_studies({"c": (there, [])}, {}) == [
        "nothing published to compare with",
        "c: nothing is published to compare with.",
    ]
    alone = compare_studies({"a": (shifted(there, 1), there)}, {"page": (None, "- New.")})
    assert alone[-1] == "No published verdict to compare with: page."


def test_only_the_outcome_is_counted(there):
    broken = copy.deepcopy(there)
    broken[0]["checkpoints"][0]["losses"]["loss"] += 1e-9
    result = compare_records(
        broken[:-1] + [invented.record("HMOE-ND", "photo", 0, np.random.default_rng(0))], there
    )
    assert (result["equal"], len(result["different"]), result["failed"]) == (34, 1, [])
    assert result["not_repeated"] == [there[-1]["run_id"]]
    assert (
        describe(result) == "34 of 35 records equal the published ones; 1 are not published; "
        "1 published ones were not repeated."
    )
    nan = copy.deepcopy(there)
    nan[0]["checkpoints"][0]["losses"]["loss"] = math.nan
    assert compare_records(nan, copy.deepcopy(nan))["equal"] == len(there)
    assert describe(merge_counts([result, result])).startswith("68 of 70 records equal")


def test_a_difference_that_no_page_prints_is_none():
    "All seeds agree, so the spread between them is zero; a whole expert more is another thing."
    there = invented.balance(seeds=(0, 1, 2))
    for name, gap, expected in (("gate_entropy", 1e-6, "within"), ("experts_used", 1, "beyond")):
        here = copy.deepcopy(there)
        here[0]["discovery"][name] += gap
        judged = compare_tables(here, there).set_index("cell").verdict
        assert judged[f"HMOE-DN, lambda_kl 1.0: {name} on photo"] == expected


def test_the_published_pages_are_those_of_the_committed_figures(root):
    committed = {(p.parent.name, p.stem) for p in (root / "figures").glob("*/*.ipynb")}
    assert set(published_pages()) == {page for page in committed if page[0] != "smoke"}


def test_the_sample_has_the_toy_and_every_family():
    specs = [record["spec"] for record in sample_records()]
    families = {FAMILIES[spec["algorithm"]] for spec in specs if spec["dataset"] != TOY}
    assert families == set(FAMILIES.values()) and any(spec["dataset"] == TOY for spec in specs)
    assert all(spec["arithmetic"] == "portable" for spec in specs)


def test_what_is_published_is_rendered_trained_and_compared(
    warm_kernels, root, tmp_path, monkeypatch
):
    shutil.copytree(root / "figures" / "bench", tmp_path / "figures" / "bench")
    monkeypatch.setenv("HMOE_FIGURES", str(tmp_path / "figures"))
    record = load_study("smoke-toy")[0]
    batch = Batch([RunSpec.from_dict(record["spec"])], RunStore(tmp_path / "runs"), jobs=1)
    pages, made, said = [("bench", "speed")], tmp_path / "made", []
    reproduce_published(pages, [record], batch, made, said.append)
    assert said[0].startswith("renders 1 page and trains 1 run afresh; last time")
    assert {
        "1 of 1 pages rendered",
        "3 of 3 tables equal the committed ones",
        "1 of 1 records bitwise identical to the published ones",
    } <= set(said)
    assert 'href="bench/index.html"' in (made / "index.html").read_text()
    assert "<table>" in (made / "bench" / "index.html").read_text()
    table = tmp_path / "figures" / "bench" / "speed_targets.csv"
    changed = re.sub(r"\d(?=\D*\Z)", lambda digit: str((int(digit[0]) + 1) % 10), table.read_text())
    table.write_text(changed)
    (made / "bench" / "speed.csv").unlink()
    assert changed_tables(pages, made) == (3, ["bench/speed.csv", "bench/speed_targets.csv"])
