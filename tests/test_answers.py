"""The answer of a page is one sentence of at most 25 words, whose number and interval are those of
the claim's evidence; the words of a claim are the paper's, short, and complete."""

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hmoe_repro.analysis.answers import (
    ANSWER_WORDS,
    PageAnswer,
    benchmark_words,
    page_answer,
    part_answer,
)
from hmoe_repro.analysis.claims import (
    CONTRADICTED,
    CORRELATION,
    NEEDS_SCALE,
    POINTS,
    QUOTE_WORDS,
    RUNS,
    SHORT_WORDS,
    SUPPORTED,
    UNDECIDED,
    UNTESTABLE,
    Claim,
    Evidence,
    Part,
    check_claim_words,
    claim_frames,
    evaluate_claim,
    finding_fields,
    make_rule,
    read_claims,
)
from hmoe_repro.analysis.tables import paper_numbers
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import repo_root
from hmoe_repro.studies.artefacts import ARTEFACTS, artefact_studies
from hmoe_repro.studies.study_file import PROFILES, STUDIES

CLAIMS = {claim.key: claim for claim in read_claims()}
FIRST_WORD = {SUPPORTED: "Yes", CONTRADICTED: "No", UNDECIDED: "Undecided"}
FIRST_WORD |= {NEEDS_SCALE: "Undecided", UNTESTABLE: "Undecided"}
INTERVAL = re.compile(r"(9[05]) % CI ([-+]?[\d.]+) to ([-+]?[\d.]+)")


@pytest.fixture(scope="module")
def answers():
    "Every answer that the committed records allow."
    frames = claim_frames(list(CLAIMS.values()))
    found = []
    for claim in CLAIMS.values():
        for part in evaluate_claim(claim, frames).parts:
            if not math.isnan(part.evidence.value):
                found.append(part_answer(claim, part))
    assert len(found) > 100
    return found


# The sentence


def first_word(answer) -> str:
    return answer.text.split()[0].rstrip(":,")


def test_an_answer_has_at_most_25_words_and_begins_with_its_verdict(answers):
    for answer in answers:
        whose = (answer.claim.key, answer.part.studies)
        assert len(answer.text.split()) <= ANSWER_WORDS == 25, whose
        assert first_word(answer) in {"Yes", "No", "Partly", "Undecided"}, whose
        assert ";" not in answer.text, whose
        assert answer.finding[0].isupper(), whose
        finding = answer.finding.removeprefix("Undecided: ")
        assert finding[1:] in answer.text, whose
        assert answer.text.endswith(")."), whose


def shown_numbers(answer) -> tuple[int, float, float, float]:
    "Level of the interval, the number without its sign, and the ends, as they are printed."
    level, low, high = INTERVAL.search(answer.text).groups()
    return int(level), float(low), float(high), len(low.partition(".")[2])


def test_number_interval_size_and_verdict_are_those_of_the_published_table(answers):
    """Every row of verdicts.csv that is one study's has an answer with its numbers, rounded."""
    table = pd.read_csv(repo_root() / "figures" / "quick" / "verdicts.csv")
    table = table[(table.benchmark != "together") & table.estimate.notna()]
    by_name = {(a.claim.key, " ".join(a.part.studies)): a for a in answers}
    checked = 0
    for row in table.itertuples():
        answer = by_name[row.claim, row.studies]
        evidence = answer.part.evidence
        whose = (row.claim, row.studies)
        assert np.isclose(evidence.value, row.estimate, rtol=1e-9, atol=1e-12), whose
        assert (evidence.seeds, evidence.runs) == (row.seeds, row.runs), whose
        verdict = UNDECIDED if answer.part.is_replaced else row.verdict  # by its fresh trial
        if not answer.claim.scale:
            assert first_word(answer) == FIRST_WORD[verdict], whose
        if math.isnan(row.low):
            assert "no interval" in answer.text, whose
            continue
        level, low, high, decimals = shown_numbers(answer)
        ends = (row.low, row.high) if level == 95 else (row.low_90, row.high_90)
        expected = sorted(map(abs, ends)) if ends[0] * ends[1] >= 0 else list(ends)
        assert np.allclose((low, high), expected, atol=0.5001 * 10**-decimals), whose
        size = f"{row.seeds} " if row.seeds else f" of {row.runs}, "
        assert size in answer.text, whose
        number = abs(row.estimate)
        shown = re.findall(r"[\d.]+(?= %| points| NMI| |$)", answer.finding)
        assert any(
            part.strip(".") and abs(float(part.strip(".")) - number) <= 0.5001 * 10**-decimals
            for part in shown
        ), (whose, shown, number)
        checked += 1
    assert checked > 100


def test_the_direction_in_words_is_the_sign_of_the_number(answers):
    words = {"above": 1, "below": -1, "more": 1, "less": -1, "higher": 1, "lower": -1}
    checked = 0
    for answer in answers:
        fields = finding_fields(answer.claim.finding)
        if not fields & {"gap", "more", "higher"} or answer.part.evidence.value == 0:
            continue
        template = answer.claim.finding.format_map(
            {"benchmark": benchmark_words(answer.part)} | dict.fromkeys(fields - {"benchmark"}, "@")
        )
        before, after = template.split("@")
        said = answer.text.partition(": ")[2].partition(before)[2].partition(after or " (")[0]
        assert words[said.split()[-1]] == np.sign(answer.part.evidence.value), answer.text
        checked += 1
    assert checked > 70


RULES = {name: make_rule(name) for name in ("larger", "smaller", "within", "not_worse")}
RULES |= {
    "sized": make_rule("larger", 4.7),
    "small": make_rule("smaller", 4.7),
    "half": make_rule("more_than", 50, RUNS),
    "cheap": make_rule("less_than", 1.1, "x ERM's time"),
    "nmi": make_rule("not_worse", unit="NMI"),
    "correlated": make_rule("larger", unit=CORRELATION),
}
GAP = "on {benchmark} X is {gap} Y"


def said_of(rule, evidence, finding=GAP, studies=("pacs-pacs",), **claim):
    "The answer to an invented claim, judged by its rule."
    invented = Claim("HMOE", "invented", "a claim", finding=finding, rule=RULES[rule], **claim)
    verdict = RULES[rule].judge(evidence)
    return part_answer(invented, Part("PACS", studies, evidence, verdict, None)).text


def points(value, half, **more):
    "Evidence of a difference, with ten seeds."
    known = {"seeds": 10, "freedom": 9.0} | more
    return Evidence(value, value - half, value + half, **known)


def test_answers_by_hand():
    x = "on PACS X is "
    but = "Yes, but under the paper's"
    for rule, evidence, expected in [
        ("larger", points(2.0, 1.0), f"Yes: {x}2.0 points above Y (95 % CI 1.0 to 3.0, 10 seeds)."),
        ("larger", points(-2, 1.6), f"No: {x}2.0 points below Y (95 % CI 0.4 to 3.6, 10 seeds)."),
        (
            "larger",
            points(1.2, 1.7),
            f"Undecided: {x}1.2 points above Y (95 % CI -0.5 to +2.9, 10 seeds).",
        ),
        ("smaller", points(-2, 1), f"Yes: {x}2.0 points below Y (95 % CI 1.0 to 3.0, 10 seeds)."),
        (
            "sized",
            points(1.3, 0.6),
            f"{but} 4.7: {x}1.3 points above Y (95 % CI 0.7 to 1.9, 10 seeds).",
        ),
        (
            "sized",
            points(1.0, 1.3),
            f"No, under the paper's 4.7: {x}1.0 points above Y (95 % CI -0.3 to +2.3, 10 seeds).",
        ),
        ("sized", points(4, 1), f"Yes: {x}4.0 points above Y (95 % CI 3.0 to 5.0, 10 seeds)."),
        (
            "small",
            points(-1.3, 0.6),
            f"{but} 4.7: {x}1.3 points below Y (95 % CI 0.7 to 1.9, 10 seeds).",
        ),
        (
            "within",
            points(-0.2, 0.3),
            f"Yes, within 1 point: {x}0.20 points below Y (95 % CI -0.50 to +0.10, 10 seeds).",
        ),
        ("within", points(6, 2), f"No: {x}6.0 points above Y (95 % CI 4.0 to 8.0, 10 seeds)."),
        (
            "within",
            points(1.5, 1.2),
            f"Undecided whether within 1 point: {x}1.5 points above Y "
            "(95 % CI 0.3 to 2.7, 10 seeds).",
        ),
        (
            "not_worse",
            points(1.5, 1),
            f"Yes: {x}1.5 points above Y (95 % CI 0.5 to 2.5, 10 seeds).",
        ),
        (
            "not_worse",
            points(0.0, 1.1),
            f"Yes: {x}level with Y (90 % CI -0.9 to +0.9, 10 seeds).",  # 95 % reaches beyond -1
        ),
    ]:
        assert said_of(rule, evidence) == expected


def test_an_interval_of_90_percent_is_that_of_student():
    """Half of it is t(0.95) / t(0.975) of half of the other: 1.833 / 2.262 with 9 degrees."""
    said = said_of("not_worse", points(-0.3, 0.8))
    half = 0.8 * 1.8331 / 2.2622
    level, low, high = INTERVAL.search(said).groups()
    assert level == "90"
    assert np.allclose((float(low), float(high)), (-0.3 - half, -0.3 + half), atol=0.05)


def test_rates_scores_times_and_correlations_by_hand():
    rate = Evidence(100 * 5 / 32, 5.3, 32.8, RUNS, runs=32, hits=5)
    said = said_of("half", rate, "X {benchmark} in {rate}")
    assert said.startswith("No: X PACS")
    assert re.findall(r"\d+", said) == ["16", "5", "32", "95", "5", "33"]
    time = Evidence(1.02, 1.002, 1.045, "x ERM's time", seeds=30)
    said = said_of("cheap", time, "X takes {value}")
    assert said.startswith("Yes: X takes")
    assert "1.02 times ERM's" in said
    assert re.findall(r"1\.\d+|\d+ rounds", said) == ["1.02", "1.00", "1.04", "30 rounds"]
    score = points(-0.20, 0.1, unit="NMI")
    said = said_of("nmi", score, "X {more}")
    assert said.startswith("No: X")
    assert "0.20 NMI less" in said
    close = points(-0.02, 0.01, unit="NMI")
    said = said_of("nmi", close, "X agrees {more}")
    assert said.startswith("Yes, within 0.05")
    assert "X agrees 0.02" in said
    r = points(-0.15, 0.18, unit=CORRELATION)
    said = said_of("correlated", r, "X by {value}")
    assert said.startswith("Undecided: X by")
    assert re.findall(r"[+-][\d.]+", said) == ["-0.15", "-0.33", "+0.03"]
    assert "10 seeds" in said
    joint = points(-11, 2, level=0.99)
    assert re.search("joint.*9.0 to 13.0", said_of("within", joint))


def test_what_limits_a_number_is_said():
    far = points(-5, 1, problem="undertrained: X (PACS)")
    assert said_of("larger", far).startswith("Undecided (undertrained networks)")
    short = points(-5, 1)
    assert said_of("larger", short, scale="few updates").startswith("Undecided at this")
    full = said_of("larger", short, scale="few updates", studies=("paper-pacs",))
    assert full.startswith("No: ")  # at the paper's scale the number counts
    unmade = said_of("larger", short, untestable="nothing to remove")
    assert unmade.startswith("Undecided, untestable")
    alone = Evidence(2.0, seeds=1, runs=4)
    said = said_of("larger", alone)
    assert said.startswith("Undecided: ")
    assert "2.0 points above" in said
    assert "no interval, 1" in said


def test_a_full_sentence_leaves_out_what_qualifies_its_first_word():
    finding = " ".join(["word"] * 12) + " {gap}"
    said = said_of("larger", points(-5, 1), finding, scale="too few updates")
    assert said.startswith("Undecided: ")
    assert len(said.split()) == 1 + 15 + 8


@pytest.mark.parametrize("low", [0.04, -0.04, 0.96, 1.04, -0.96, -1.04, 3.66, 3.74])
@pytest.mark.parametrize("name", ["larger", "sized", "within", "not_worse"])
def test_a_rounded_interval_is_on_the_side_of_the_exact_one(name, low):
    """An end of 0.04 is not printed as 0.0, nor one of -0.96 as -1.0, if the rule compares it."""
    rule = RULES[name]
    evidence = Evidence(low + 3, low, low + 6, seeds=10)
    _, shown, _, _ = shown_numbers(
        PageAnswer(Claim("", "", ""), None, said_of(name, evidence), "")  # only its text is read
    )
    thresholds = {0.0, *rule.between, *rule.beyond} - {math.inf, -math.inf}
    for threshold in thresholds:
        assert (shown > threshold) == (low > threshold)
        assert shown != threshold


# The answer of a page


def studies_of(name, profile):
    "What a page reads; a benchmark has no study."
    artefact = ARTEFACTS[name]
    return [artefact.study] if profile == "bench" else artefact_studies(name, profile)


def test_pages_name_claims_that_exist_and_every_claim_is_on_its_page():
    for name, artefact in ARTEFACTS.items():
        assert set(artefact.claims) <= set(CLAIMS), name
        assert len(set(artefact.claims)) == len(artefact.claims), name
    for claim in CLAIMS.values():
        profile, _, page = claim.page.partition("/")
        assert claim.key in ARTEFACTS[page].claims, claim.key
        assert profile in ARTEFACTS[page].profiles, claim.key


def test_a_page_with_claims_has_an_answer_from_its_own_study_or_names_the_other():
    """Of every page that is published."""
    answered = 0
    for name, artefact in ARTEFACTS.items():
        for profile in artefact.profiles:
            page = repo_root() / "figures" / profile / f"{name}.ipynb"
            if not artefact.claims or not page.exists():
                continue
            studies = studies_of(name, profile)
            answer = page_answer(list(artefact.claims), profile, studies)
            if answer is None:
                continue
            answered += 1
            assert len(answer.text.split()) <= ANSWER_WORDS, name
            of_profile = [s.partition("-")[0] == profile for s in answer.part.studies]
            assert all(of_profile) or answer.part.benchmark == "average", name
            shares = not set(answer.part.studies).isdisjoint(studies)
            assert shares or f" of {answer.part.studies[0]}" in answer.text, name
    assert answered > 45


def test_the_first_claim_measured_on_the_pages_own_study_answers():
    key = "competitive with ERM"  # on digits by two studies, quick-discovery first
    assert page_answer([key], "quick", ["quick-digits"]).part.studies == ("quick-digits",)
    assert page_answer([key], "quick", ["quick-discovery"]).part.studies == ("quick-discovery",)
    both = page_answer([key, "MAX is safe"], "quick", ["quick-rotated"])
    assert both.claim.key == "MAX is safe"
    assert both.part.studies == ("quick-rotated",)


def test_benchmarks_that_contradict_each_other_answer_together():
    "One planned study of digits says yes, the one of PACS no: neither of them is the answer."
    key = "discovery pays"
    studies = artefact_studies("payoff", "quick")
    result = evaluate_claim(CLAIMS[key], claim_frames([CLAIMS[key]]))
    verdicts = [part.verdict for part in result.parts]
    assert (verdicts.count(SUPPORTED), verdicts.count(CONTRADICTED)) == (1, 1)
    answer = page_answer([key], "quick", studies)
    assert answer.text.startswith("Undecided (yes on 1 of 6, no on 1): on average HMOE-DN is ")
    assert f"{result.evidence.value:.1f} points above ERM" in answer.text
    assert f"{result.evidence.low:.1f} to {result.evidence.high:+.1f}" in answer.text
    assert answer.finding.startswith("Undecided: on average HMOE-DN is ")
    alone = page_answer([key], "quick", ["quick-payoff-double"])
    assert alone.text.startswith("Yes: on digits at 1,401 updates ")


def test_a_planned_study_answers_before_an_older_one_on_the_same_data():
    key = "as ERM, PACS"
    studies = ["pacs-pacs", "pacs-power"]
    assert page_answer([key], "pacs", studies[:1]).part.studies == ("pacs-pacs",)
    planned = page_answer([key], "pacs", studies).part
    assert planned.studies == ("pacs-power",)
    assert planned.evidence.seeds == 7
    # a planned study of other data does not answer in place of the page's own
    competitive = page_answer(["competitive with ERM"], "mnist", ["mnist-colored", "pacs-power"])
    assert competitive.part.benchmark == "ColoredMNIST"


def test_another_study_answers_only_on_the_same_data_and_is_named():
    key = "experts beat dense twin"
    answer = page_answer([key], "quick", ["quick-gmoe"])
    assert answer.part.studies == ("quick-systems",)
    assert "8 seeds of" in answer.text
    assert page_answer(["experts are not classes"], "quick", ["quick-rotated"]) is None


def test_without_a_measurement_of_the_profile_there_is_no_answer():
    assert page_answer(["ARM, ColoredMNIST"], "quick", ["quick-colored"]) is None
    assert page_answer(["masks beat one network"], "paper", ["paper-dmg-pacs"]) is None
    assert page_answer([], "quick", ["quick-digits"]) is None
    with pytest.raises(HmoeError, match="unknown claim"):
        page_answer(["invented"], "quick", [])


def test_a_benchmark_answers_the_page_of_its_profile():
    answer = page_answer(["cost as ERM's"], "bench", ["bench-algorithms"])
    assert answer.part.studies == ("bench-algorithms",)
    assert "30 rounds" in answer.text


def test_studies_of_claims_are_of_the_library_or_benchmarks():
    """Otherwise their profile is not known (`PROFILE_OF`)."""
    for claim in CLAIMS.values():
        for arguments in claim.tables:
            for study in arguments.get("studies", ()):
                assert study in STUDIES or study.startswith("bench-"), study
    assert "paper" in PROFILES


def test_the_answer_is_that_of_the_store_as_it_is_now(tmp_path):
    """A page of other records answers from them, and again after they changed."""
    lines = (repo_root() / "results" / "quick-styles-norm.jsonl").read_text("utf-8").splitlines()
    file = tmp_path / "quick-styles-norm.jsonl"
    key = "tuned setting, DigitStyles"
    assert page_answer([key], "quick", ["quick-styles-norm"], str(tmp_path)) is None
    file.write_text("\n".join(lines[:20]) + "\n", "utf-8")
    first = page_answer([key], "quick", ["quick-styles-norm"], str(tmp_path))
    assert first.part.evidence.runs == 20
    shutil.copy(repo_root() / "results" / "quick-styles-norm.jsonl", file)
    again = page_answer([key], "quick", ["quick-styles-norm"], str(tmp_path))
    assert again.part.evidence.runs == 40


# The words of claims


def test_claims_have_short_words_and_the_papers():
    for claim in CLAIMS.values():
        assert 0 < len(claim.short.split()) <= SHORT_WORDS == 10, claim.key
        assert len(claim.quote.split()) <= QUOTE_WORDS == 30, claim.key
        assert bool(claim.quote) != claim.ours, claim.key
        assert not re.search(r"[$\\]|\.\.\.", claim.quote), (
            claim.key
        )  # plain text, and … for omissions
        assert claim.section or claim.ours or not claim.quote, claim.key


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"short": ""}, "has no short form"),
        ({"short": "word " * 11}, "short of the claim .* has 11 words"),
        ({"quote": ""}, "has no quote"),
        ({"quote": "word " * 31}, "quote of the claim .* has 31 words"),
        ({"ours": True}, "is a finding of ours and has a quote"),
        ({"finding": ""}, "has no finding"),
        ({"finding": "X is {wide} Y"}, "unknown field of the finding .* 'wide'"),
        ({"finding": "X is {} Y"}, "field without a name"),
        ({"finding": "X is {gap Y"}, "is no template"),
    ],
)
def test_words_that_are_missing_too_long_or_unknown_are_refused(changes, said):
    claim = CLAIMS["competitive with ERM"]
    check_claim_words(claim)
    with pytest.raises(HmoeError, match=said):
        check_claim_words(replace(claim, **changes))


def test_a_finding_has_one_number_and_its_field_fits_the_measure():
    """Rates are said as `rate`, thresholds and correlations as `value`, differences in words."""
    for claim in CLAIMS.values():
        (number,) = finding_fields(claim.finding) - {"benchmark"}
        if claim.measure == "rate":
            assert number == "rate", claim.key
        elif claim.measure == "correlation" or claim.rule and math.isnan(claim.rule.margin):
            assert number == "value", claim.key
        else:
            assert number in {"gap", "more", "higher"}, claim.key


def leading_number(text: str) -> float:
    return float(re.search(r"[-+]?[\d.]+", text)[0])


def test_a_size_of_a_rule_is_the_papers_number():
    sized = [claim for claim in CLAIMS.values() if claim.rule and claim.rule.size]
    assert len(sized) > 10
    for claim in sized:
        if claim.key != "KD beats averaging" and claim.rule.text.startswith("above 0"):
            assert np.isclose(leading_number(claim.paper_number), claim.rule.size), claim.key


def hmoe(algorithm, mode, dataset):
    table = paper_numbers(artefact="HMOE Table 1", dataset=dataset)
    return table.set_index(["algorithm", "mode"]).value[algorithm, mode]


SIX = ("ColoredMNIST", "RotatedMNIST", "VLCS", "PACS", "OfficeHome", "TerraIncognita")


def hmoe_numbers() -> dict[str, float]:
    "Claim -> the number of the paper, from its Table 1."
    of_mix = {}
    for mode in ("max", "ood"):
        gaps = []
        for name in ("HMOE-DN", "HMOE-ND"):
            gaps += [hmoe(name, mode, dataset) - hmoe(name, "mix", dataset) for dataset in SIX]
        of_mix[mode] = np.mean(gaps)
    to_erm = {data: hmoe("HMOE-DN", "mix", data) - hmoe("ERM", "default", data) for data in SIX}
    colored = {name: hmoe(name, "mix", "ColoredMNIST") for name in ("HMOE-DN", "HMOE-ND")}
    found = {
        "MAX is safe": of_mix["max"],
        "OOD is safe": of_mix["ood"],
        "competitive with ERM": np.mean(list(to_erm.values())),
        "as ERM, ColoredMNIST": to_erm["ColoredMNIST"],
        "as ERM, RotatedMNIST": to_erm["RotatedMNIST"],
        "as ERM, PACS": hmoe("HMOE-ND", "ood", "PACS") - hmoe("ERM", "default", "PACS"),
        "ND is as DN": colored["HMOE-ND"] - colored["HMOE-DN"],
        "DN, ND beat DL, ColoredMNIST": np.mean(list(colored.values()))
        - hmoe("HMOE-DL", "mix", "ColoredMNIST"),
        "DN beats DL, RotatedMNIST": hmoe("HMOE-DN", "mix", "RotatedMNIST")
        - hmoe("HMOE-DL", "mix", "RotatedMNIST"),
    }
    for dataset in ("ColoredMNIST", "RotatedMNIST"):
        table = paper_numbers(artefact="HMOE Table 1", dataset=dataset)
        table = table[table["mode"].isin(["default", "mix"])].set_index("algorithm").value
        others = table.drop("ARM")
        found[f"ARM, {dataset}"] = table["ARM"] - others.mean()
        found[f"others alike, {dataset}"] = (others - table["ERM"]).abs().max()
    return found


def gmoe_and_dmg_numbers() -> dict[str, float]:
    "Claim -> the number of the paper, from its tables."
    gmoe = paper_numbers(artefact="GMoE algorithms").set_index(["dataset", "algorithm"]).value
    gmoe = gmoe.unstack().mean()
    one = paper_numbers(artefact="GMoE single source", quantity="accuracy")
    one = one.groupby("algorithm").value.mean()
    cost = paper_numbers(artefact="GMoE Table 16", quantity="training step time")
    cost = cost.set_index("algorithm").value
    dmg = paper_numbers(artefact="DMG Table 2", test_domain="average")
    dmg = dmg[~dmg.setting.str.contains("quoted")]
    dmg = dmg.assign(network=dmg.setting.str.partition(";")[0])
    dmg = dmg.set_index(["network", "algorithm"]).value.unstack()
    inside = paper_numbers(artefact="DMG Table 3", test_domain="average")
    inside = inside.assign(network=inside.setting.str.partition(";")[0])
    inside = inside.set_index(["algorithm", "mode", "network"]).value
    kept = inside["DMG", "pred-ens"] - inside["Aggregate", "default"]
    known = inside["DMG", "kd"] - inside["DMG", "pred-ens"]
    modes = paper_numbers(artefact="DMG Table 5", test_domain="average", quantity="accuracy")
    modes = modes[modes.algorithm == "DMG"].set_index("mode").value
    return {
        "ViT beats ResNet": gmoe["ERM-ViT"] - gmoe["ERM"],
        "experts beat dense twin": gmoe["GMoE"] - gmoe["ERM-ViT"],
        "one source": one["GMoE"] - one["ERM-ViT"],
        "cost as ERM's": cost["GMoE"] / cost["ERM"],
        "masks beat one network": (dmg["DMG"] - dmg["Aggregate"]).mean(),
        "masks beat heads": (dmg["DMG"] - dmg["Multi-Headed"]).mean(),
        "in-domain kept": kept.mean(),
        "KD beats averaging": known.mean(),
        "Mask-Ens as Pred-Ens": modes["mask-ens"] - modes["pred-ens"],
    }


def test_the_papers_numbers_are_those_of_its_tables():
    for key, number in (hmoe_numbers() | gmoe_and_dmg_numbers()).items():
        text = CLAIMS[key].paper_number
        decimals = len(re.search(r"[\d.]+", text)[0].partition(".")[2])
        assert abs(leading_number(text) - number) <= 0.51 * 10**-decimals, (key, number)
    assert POINTS in CLAIMS["L_ad helps"].paper_number
