"""The report: its numbers follow from the records, and none is typed."""

import csv
import json
import math
import re
import sys

import numpy as np
import pandas as pd
import pytest
from notebooks import ROOT
from scipy import stats

from hmoe_repro.analysis.claims import read_claims
from hmoe_repro.core.toml import package_toml
from hmoe_repro.studies.study_file import read_study

REPORT = ROOT / "docs" / "report"
sys.path.append(str(REPORT))
import build_report as build  # noqa: E402
import report_findings as findings  # noqa: E402
import report_numbers as numbers  # noqa: E402
import report_tables  # noqa: E402

NEED_SCALE = {claim.key for claim in read_claims() if claim.scale or claim.untestable}
PROSE = ("report.typ", "slides.typ", "abstract.typ", "summary.typ")
VALUES = json.loads((REPORT / "numbers.json").read_text(encoding="utf-8"))


def typed_numbers(text: str) -> list[str]:
    """Numbers in the prose of a Typst file that are neither quoted nor part of a name."""
    code = (
        r"//[^\n]*",  # comments, and addresses
        r"\$[^$]*\$",  # formulas
        r"`[^`]*`",  # names of files, studies and options
        r'"[^"\n]*"',  # names of values, tables and claims
        r"<[\w-]+>|@[\w-]+",  # labels
        r"^#?(?:set|show|let|import)\b[^\n]*",
        r"\b\d*\.?\d+(?:pt|cm|em|fr)\b|\b\d+%(?=[,)])",  # lengths
        r"\b(?:numeric|inset|columns|level|top|above|at)\b[:(][^\n]*?\)",
        r"(?:counter\(heading\)\.update)\(\d\)",
    )
    names = (
        r"ResNet-50|EfficientNet-Lite0|H200|V100|x86-64|AVX2|SHA-256",
        r"arXiv \d{4}\.\d{5}|(?:ICLR|ECCV|NeurIPS) \d{4}",
        r"HMOE's (?:Table|Figure) \d+|GMoE's Table \d+",
        r"\b9[05] % CI|\binterval of 9[05] %|\[95 %, over seeds|9[05] % confidence",
        r"interval of 95 %|[+−]90 ?%|[+−]80 ?%",
        r"\(95 % CI\)",
    )
    for pattern in (*code, *names):
        text = re.sub(pattern, " ", text, flags=re.MULTILINE)
    return re.findall(r"[^\s]*\d[^\s]*", text)


@pytest.mark.parametrize("name", PROSE)
def test_no_number_is_typed_in_the_prose(name):
    assert typed_numbers((REPORT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "HMOE-DN is 1.7 points below ERM.",
        "Experts match the domains in 14 of 80 runs.",
        "The gain is +3 %.",
        "We trained 7,428 runs.",
        "A gain of 12pts",
    ],
)
def test_a_typed_number_is_noticed(sentence):
    text = (REPORT / "report.typ").read_text(encoding="utf-8")
    assert typed_numbers(text.replace("*The toy.*", f"*The toy.* {sentence}"))


@pytest.mark.parametrize("name", PROSE)
def test_every_quoted_value_exists(name):
    quoted = build.QUOTED.findall((REPORT / name).read_text(encoding="utf-8"))
    assert quoted
    assert not set(quoted) - set(VALUES)


def test_every_value_names_a_source_that_exists():
    for name, value in VALUES.items():
        assert value["source"], name
        for source in value["source"].split(", "):
            if source.startswith("results/") and "*" not in source:
                study = source.removeprefix("results/")
                found = [ROOT / "results" / f"{study}{ending}" for ending in (".jsonl", ".json")]
                assert any(path.exists() for path in found), name
            if source.startswith("figures/") and "*" not in source:
                assert (ROOT / source).exists(), name


def test_the_claims_of_the_report_are_those_of_the_rendered_page():
    words = numbers.FIRST_WORDS
    compared = 0
    with open(ROOT / "figures" / "quick" / "verdicts.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["benchmark"] == "together":
                word = words[row["verdict"]].lower()
                assert VALUES[f"{row['claim']}/verdict"]["text"] == word
                continue
            name = f"{row['claim']}/{row['studies'].split()[0]}"
            if f"{name}/verdict" not in VALUES:
                assert row["estimate"] in ("", "nan"), name
                continue
            word = "Undecided" if row["claim"] in NEED_SCALE else words[row["verdict"]]
            assert VALUES[f"{name}/verdict"]["text"] == word.lower(), name
            shown = VALUES[f"{name}/number"]["text"].replace("−", "-")
            if " of " in shown and row["unit"] == "% of runs":
                hits, runs = map(int, re.findall(r"\d+", shown)[:2])
                assert 100 * hits / runs == pytest.approx(float(row["estimate"])), name
            else:
                number = shown.split()[0]
                digits = len(number.partition(".")[2])
                half = 0.51 * 10**-digits
                assert float(number) == pytest.approx(float(row["estimate"]), abs=half), name
            compared += 1
    assert compared > 60


PARTS = ("full", "discovery", "cue", "algorithm", "cost", "absent", "scorecard", "protocol")


@pytest.mark.parametrize("part", PARTS)
def test_values_are_recomputed_from_the_records(part):
    compute = getattr(numbers, f"{part}_values")
    for name, value in compute().items():
        assert VALUES[name] == {"text": value.text, "source": value.source}, name


@pytest.mark.parametrize("part", ["finding_discovery", "comparison", "mask", "toy", "paper"])
def test_findings_are_recomputed_from_the_records(part):
    compute = getattr(findings, f"{part}_values")
    for name, value in compute().items():
        assert VALUES[name] == {"text": value.text, "source": value.source}, name


@pytest.mark.slow
def test_all_values_are_recomputed_from_the_records():
    assert numbers.as_json(build.all_values()) == numbers.as_json(
        {name: numbers.Value(**value) for name, value in VALUES.items()}
    )


def changed_store(folder, study: str, change) -> str:
    """A folder with one published study, whose records a function changes."""
    lines = (ROOT / "results" / f"{study}.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    for record in records:
        change(record)
    text = "\n".join(json.dumps(record) for record in records) + "\n"
    (folder / f"{study}.jsonl").write_text(text, encoding="utf-8")
    return str(folder)


def lower_accuracy(record: dict):
    """Divide the test accuracies of HMOE-DN by two, as if it had learnt less."""
    if record["config"]["algorithm"] != "HMOE-DN":
        return
    [domain] = record["config"]["test_domains"]
    for checkpoint in record["checkpoints"]:
        for split in checkpoint["accuracies"].get(domain, {}).values():
            for mode in split:
                split[mode] /= 2
    for selected in record["selected"].values():
        selected["test_accuracy"] /= 2


def test_a_changed_record_changes_its_number_and_its_words(tmp_path):
    study = "mnist-payoff"
    name = f"discovery pays/{study}"
    same = tmp_path / "same"
    other = tmp_path / "other"
    for folder in (same, other):
        folder.mkdir()
    unchanged = numbers.claim_values(changed_store(same, study, lambda record: None))
    assert unchanged[f"{name}/text"].text == VALUES[f"{name}/text"]["text"]
    store = changed_store(other, study, lower_accuracy)
    changed = numbers.claim_values(store)
    before = float(VALUES[f"{name}/number"]["text"].split()[0].replace("−", "-"))
    after = float(changed[f"{name}/number"].text.split()[0].replace("−", "-"))
    assert after < before - 20
    assert changed[f"{name}/verdict"].text == "no"
    assert numbers.payoff_values(store)["payoff/below"].text == "1"


def as_values(**changed: str) -> dict[str, numbers.Value]:
    values = {name: numbers.Value(**value) for name, value in VALUES.items()}
    for name, text in changed.items():
        values[name] = numbers.Value(text, "a test")
    return values


def test_words_and_passages_follow_the_verdict():
    name = "discovery pays/pacs-payoff/verdict"
    texts = []
    for verdict in ("yes", "no", "undecided"):
        values = as_values(**{name: verdict})
        texts.append(build.phrase_values(values)["phrase/payoff pacs"].text)
        passages = [line for line in build.passages_to_reread(values) if "pays/pacs-payoff" in line]
        assert len(passages) == (verdict != "no")
    assert len(set(texts)) == 3


def test_abstract_and_lay_summary_have_their_lengths():
    values = as_values()
    abstract = build.filled("abstract.typ", values)
    summary = build.filled("summary.typ", values)
    assert "#" not in abstract + summary
    assert 120 <= len(abstract.split()) <= 150
    assert 40 <= len(summary.split()) <= 60


def test_the_pdfs_were_built_from_these_sources():
    listed = {}
    for line in build.STAMP.read_text(encoding="utf-8").splitlines():
        digest, name = line.split("  ")
        listed[name] = digest
    assert {"report.typ", "numbers.json", "report.pdf", "slides.pdf"} <= set(listed)
    for name, digest in listed.items():
        assert build.sha256(REPORT / name) == digest, f"{name} changed: run `make report`"


def test_the_pdf_is_small():
    for name in build.OUTPUTS:
        assert (REPORT / f"{name}.pdf").stat().st_size < 1_500_000


@pytest.mark.parametrize("n", [3, 5, 6, 8, 12])
def test_signed_rank_interval_inverts_the_exact_test(n):
    values = np.random.default_rng(n).normal(0.4, 1, n)
    estimate, low, high = numbers.signed_rank_interval(values)
    first, second = np.triu_indices(n)
    assert estimate == pytest.approx(np.median((values[first] + values[second]) / 2))
    if n < 6:  # 2 / 2**5 is above 5 %
        assert math.isnan(low)
        assert math.isnan(high)
        return

    def p_value(shift: float) -> float:
        return stats.wilcoxon(values - shift, method="exact").pvalue

    step = 1e-6
    assert p_value(low + step) > 0.05 >= p_value(low - step)
    assert p_value(high - step) > 0.05 >= p_value(high + step)


def test_seed_interval_is_students_t_over_seed_means():
    grid = pd.DataFrame({"art": [1.0, 3.0, 5.0], "photo": [3.0, 3.0, 3.0]})
    mean, low, high = numbers.seed_interval(grid)
    assert mean == 3
    half = stats.t.isf(0.025, 2) * 1 / math.sqrt(3)  # seed means 2, 3 and 4
    assert (low, high) == pytest.approx((3 - half, 3 + half))
    assert math.isnan(numbers.seed_interval(grid.iloc[:1])[1])


FAULTS = package_toml("faults.toml")["faults"]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault["where"] for fault in FAULTS])
def test_a_fault_has_runs_of_both_kinds_or_a_reason(fault):
    if "option" not in fault:
        assert fault["effect"]
        return
    kinds = set()
    for block in read_study(numbers.RELEASED).runs:
        if fault["algorithm"] in block.algorithms:
            for variant in block.variants:
                kinds.add(variant.get(fault["option"], fault["corrected"]))
    assert kinds == {fault["released"], fault["corrected"]}


def test_the_effects_are_those_of_the_page_of_released_faults(root):
    page = pd.read_csv(root / "figures" / "quick" / "released.csv")
    on_page = {
        row.algorithm: f"{row.effect:+.1f} ({row.low:+.1f} to {row.high:+.1f})"
        for row in page.itertuples()
    }
    in_report = {
        fault["where"]: numbers.released_effect(fault).replace("−", "-")
        for fault in FAULTS
        if "option" in fault
    }
    assert in_report == on_page


def released_rows() -> pd.DataFrame:
    """Runs of an algorithm with and without an option: released is 2 and 4 points higher."""
    rows = []
    for tau, gains in ((1.0, (0.02, 0.04)), (0.5, (0.0, 0.0))):
        for seed, gain in enumerate(gains):
            for domain in ("photo", "sketch"):
                row = {"algorithm": "SANDMask", "trial_seed": seed, "test_domain": domain}
                row |= {"dataset": "DigitDomains", "status": "complete"}
                rows.append(row | {"accuracy": 0.5 + gain, "mode": "default", "hparams.tau": tau})
    return pd.DataFrame(rows)


def test_a_released_effect_is_released_minus_corrected(monkeypatch):
    fault = {"algorithm": "SANDMask", "option": "tau", "released": 1.0, "corrected": 0.5}
    monkeypatch.setattr(numbers, "has_study", lambda study, store="": False)
    assert numbers.released_effect(fault) == "not measured"
    monkeypatch.setattr(numbers, "has_study", lambda study, store="": True)
    monkeypatch.setattr(numbers, "results", lambda study, store="": released_rows())
    assert numbers.released_effect(fault).startswith("+3.0 (")
    swapped = fault | {"released": 0.5, "corrected": 1.0}
    assert numbers.released_effect(swapped).startswith("−3.0 (")
    assert numbers.released_effect(fault | {"released": 0.9}) == "not measured"
    assert numbers.released_effect({"effect": "no option"}) == "no option"


def test_domains_found_on_pacs_are_counted_by_held_out_domain():
    counts = {True: [0, 0], False: [0, 0]}
    for study in ("pacs-linear", "pacs-restarts"):
        for line in (ROOT / "results" / f"{study}.jsonl").read_text("utf-8").splitlines():
            record = json.loads(line)
            config = record["config"]
            if config["algorithm"] != "HMOE-DN" or config.get("restart"):
                continue
            count = counts[config["test_domains"] == ["art_painting"]]
            count[0] += record["discovery"]["nmi_domain"] >= 0.9
            count[1] += 1
    assert VALUES["held out/art"]["text"] == "{} of {}".format(*counts[True])
    assert VALUES["held out/others"]["text"] == "{} of {}".format(*counts[False])


def test_the_main_comparisons_are_counted_by_their_intervals():
    rows = [row for row in findings.comparison_rows() if row["comparison"].main]
    assert VALUES["compare/main"]["text"] == str(len(rows))
    for mode in findings.MODES:
        below = sum(row[mode]["high"] < 0 for row in rows)
        assert VALUES[f"compare/{mode}/below"]["text"] == str(below)
        assert all(row[mode]["low"] < row[mode]["mean"] < row[mode]["high"] for row in rows)


@pytest.mark.slow
def test_three_analyses_start_from_the_estimate_of_the_claim():
    for row in numbers.three_analyses():
        evidence = row["part"].evidence
        wanted = (evidence.value, evidence.low, evidence.high)
        assert row["t"] == pytest.approx(wanted), row["part"].studies


def test_minus_signs():
    assert numbers.minus("(-1.5 to -0.2), +0.3, ViT-8, 2026-11-27") == (
        "(−1.5 to −0.2), +0.3, ViT-8, 2026-11-27"
    )


def test_judged_claims_are_numbered_by_paper():
    rows = [row for row in report_tables.numbered_scores() if row[0]]
    for letter, paper in (("H", "HMOE"), ("G", "GMoE"), ("D", "DMG")):
        own = [number for number, score in rows if score.artefact.startswith(paper)]
        assert own == [f"{letter}{position}" for position in range(1, len(own) + 1)]


@pytest.mark.slow
def test_reduced_studies_have_their_label():
    for rows in numbers.claim_parts().values():
        for row in rows:
            study = row["studies"][0]
            if row["scale"]:
                assert (row["scale"] == "full") == study.startswith(("paper-", "quick-toy"))


@pytest.mark.slow
def test_the_pdf_builds_with_the_same_bytes(tmp_path, monkeypatch):
    typst = pytest.importorskip("typst", reason="`pip install -c constraints.txt '.[report]'`")
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    values = build.write_inputs()
    date = build.creation_date(values)
    for name in build.OUTPUTS:
        build.compile_pdf(name, tmp_path / f"{name}.pdf", date)
        assert (tmp_path / f"{name}.pdf").read_bytes() == (REPORT / f"{name}.pdf").read_bytes()
    options = {"root": str(ROOT), "ignore_system_fonts": True, "font_paths": [], "ppi": 10}
    options["sys_inputs"] = {"date": f"{date:%Y-%m-%d}"}
    for name, least, most in (("report", 8, 14), ("slides", 10, 10)):
        pictures = str(tmp_path / f"{name}-{{0p}}.png")
        typst.compile(str(REPORT / f"{name}.typ"), output=pictures, format="png", **options)
        assert least <= len(list(tmp_path.glob(f"{name}-*.png"))) <= most, name
