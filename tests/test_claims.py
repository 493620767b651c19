"""What holds of the three papers: every verdict is tied to its numbers, and the numbers are those
of the records, computed here again without the library."""

import copy
import itertools
import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from hmoe_repro.analysis.claims import (
    CONTRADICTED,
    SCALE,
    SUPPORTED,
    UNDECIDED,
    VERDICTS,
    Claim,
    ClaimResult,
    Evidence,
    Loaded,
    chance_line,
    claims_markdown,
    claims_table,
    count_line,
    evaluate_claim,
    explanation,
    larger,
    less_than,
    load_claims,
    more_than,
    not_worse,
    over_grid,
    over_groups,
    page_link,
    paired_evidence,
    plot_claims,
    rate_evidence,
    run_grid,
    smaller,
    student_along,
    student_line,
    wanted_lines,
    within,
)
from hmoe_repro.analysis.claims_accuracy import ACCURACY_CLAIMS, all_modes
from hmoe_repro.analysis.claims_experts import EXPERT_CLAIMS
from hmoe_repro.analysis.claims_gmoe_dmg import OTHER_CLAIMS
from hmoe_repro.analysis.published import min_validation_accuracy
from hmoe_repro.analysis.results import load_arrays
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import repo_root
from hmoe_repro.studies.artefacts import ARTEFACTS, artefact_studies
from hmoe_repro.studies.study_file import STUDIES

CLAIMS = EXPERT_CLAIMS + ACCURACY_CLAIMS + OTHER_CLAIMS
RESULTS = repo_root() / "results"
T = {1: 12.706, 2: 4.303, 3: 3.182}  # Student's t, quantile 0.975


@pytest.fixture(scope="module")
def loaded():
    return load_claims(CLAIMS)


@pytest.fixture(scope="module")
def weighed(loaded):
    return {claim.key: evaluate_claim(claim, loaded) for claim in CLAIMS}


def lines(study):
    "The records of a published study, straight from its file."
    path = RESULTS / f"{study}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_cell(records, value):
    "(seed, test domain) -> value."
    return pd.Series(
        {(r["spec"]["trial_seed"], ",".join(r["spec"]["test_domains"])): value(r) for r in records}
    )


def of(records, algorithm, **hparams):
    "The runs of an algorithm whose hyper-parameters are those given."
    return [
        r
        for r in records
        if r["spec"]["algorithm"] == algorithm
        and all(r["spec"]["hparams"].get(name) == value for name, value in hparams.items())
    ]


def modes(record):
    return 100 * np.mean([m["test_accuracy"] for m in record["selected"].values()])


# The list


def test_claims_have_distinct_names_known_studies_and_pages_that_exist():
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS) >= 30
    assert {claim.paper for claim in CLAIMS} == {"HMOE", "GMoE", "DMG"}
    for claim in CLAIMS:
        assert set(claim.needs) | set(claim.also) <= set(STUDIES), claim.key
        if claim.page:
            profile, page = claim.page.split("/")
            assert (repo_root() / "nbs" / "paper" / f"{page}.ipynb").exists(), claim.key
            assert profile in ARTEFACTS[page].profiles, claim.key
        assert claim.rule or claim.scale or claim.wanted, claim.key


def test_the_artefact_reads_every_quick_study_of_the_claims():
    read = {s for claim in CLAIMS for s in (*claim.needs, *claim.also)}
    quick = {study for study in read if study.startswith("quick-")}
    assert quick == set(artefact_studies("claims", "quick"))
    assert ARTEFACTS["claims"].optional == ("quick",)  # never part of `make reproduce`


# Rules and verdicts


RULES = {
    larger(1): ((2, 1, 3), (-2, -3, -1), [(0.5, 0.2, 0.8), (2, -1, 5), (-0.5, -0.8, -0.2)]),
    smaller(1): ((-2, -3, -1), (2, 1, 3), [(-0.5, -0.8, -0.2), (-2, -5, 1)]),
    more_than(50): ((80, 60, 90), (20, 5, 40), [(60, 40, 80), (50, 50, 60)]),
    less_than(0.1): ((0.05, 0.01, 0.09), (0.3, 0.2, 0.4), [(0.1, 0.05, 0.2)]),
    within(2): ((0, -1.9, 1.9), (3, 2.1, 5), [(1, -1, 3), (0, -3, 3)]),
    not_worse(2): ((-1, -1.9, 0), (-5, -7, -2.1), [(-2, -4, 1)]),
}


def test_a_rule_names_the_numbers_that_it_judges_by():
    words = "above 0, and at least 1|below 0, and at most -1|above 50|below 0.1|within ±2|above -2"
    assert "|".join(rule.text for rule in RULES) == words


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.text)
def test_invented_evidence_gets_every_verdict(rule):
    holds, fails, open_ones = RULES[rule]
    assert rule.judge(Evidence(*holds)) == SUPPORTED
    assert rule.judge(Evidence(*fails)) == CONTRADICTED
    for numbers in open_ones:
        assert rule.judge(Evidence(*numbers)) == UNDECIDED
    assert rule.judge(Evidence(*holds, problem="undertrained: A")) == UNDECIDED
    assert rule.judge(Evidence(holds[0])) == UNDECIDED  # no interval


# Evidence


def invented(algorithm, domain, seed, accuracy, validation=0.8, **hparams):
    "A complete run of an algorithm with one mode."
    spec = {"algorithm": algorithm, "dataset": "Invented", "test_domains": [domain]}
    spec |= {"trial_seed": seed, "steps": 10, "hparams": hparams}
    chosen = {"step": 9, "validation_accuracy": validation, "test_accuracy": accuracy}
    run_id = f"{algorithm}-{domain}-{seed}-{sorted(hparams.items())}"
    return {"run_id": run_id, "status": "complete", "spec": spec, "selected": {"default": chosen}}


def grid_of(algorithm, accuracy, seeds=3, **more):
    return [invented(algorithm, d, s, accuracy, **more) for d in "ab" for s in range(seeds)]


def test_pairs_are_runs_of_equal_seed_and_domain():
    ours, theirs = grid_of("A", 0.7, seeds=4), grid_of("B", 0.6)
    found = paired_evidence(ours, theirs, modes)
    assert found.runs == 12 and "3 seeds" in found.size
    assert np.allclose((found.value, found.low, found.high), 10)
    assert paired_evidence(ours, [], modes).problem
    with pytest.raises(HmoeError, match="two runs hold out a with seed 0"):
        run_grid([*ours, ours[0]], modes)


def test_what_has_hardly_trained_decides_nothing():
    ours, theirs = grid_of("A", 0.7), grid_of("B", 0.1, validation=0.2)
    claim = Claim(
        "P", "k", "a is better", "", ("x",), lambda _: paired_evidence(ours, theirs, modes)
    )
    claim = Claim(**{**claim.__dict__, "rule": larger(1)})
    claim, found, verdict = evaluate_claim(claim, Loaded({"x": ours}))
    assert verdict == UNDECIDED and found.problem == "undertrained: B" and found.measured


def test_intervals_are_those_of_student_where_the_grid_is_small():
    random = np.random.default_rng(1)
    one_domain = pd.DataFrame(random.normal(size=(3, 1)))
    values = one_domain[0]
    half = T[2] * values.std(ddof=1) / math.sqrt(3)
    assert np.allclose(
        over_grid(one_domain), (values.mean(), values.mean() - half, values.mean() + half)
    )
    two_seeds = pd.DataFrame(random.normal(size=(2, 4)))
    domains = two_seeds.mean()
    half = T[3] * domains.std(ddof=1) / 2
    assert np.allclose(over_grid(two_seeds)[1:], (domains.mean() - half, domains.mean() + half))
    assert all(map(math.isnan, over_grid(two_seeds.iloc[:1, :1])[1:]))


def test_groups_are_drawn_whole():
    values = np.repeat([0.0, 1.0, 5.0, 2.0], 25)
    _, low, high = over_groups(values, np.repeat(list("abcd"), 25))
    _, near_low, near_high = over_groups(values, range(100))
    assert high - low > 2 * (near_high - near_low) and low < 2 < high
    assert math.isnan(over_groups([1, 2], "ab")[1])


def test_missing_records_decide_nothing_and_say_so(loaded):
    empty = Loaded({study: [] for study in loaded.records})
    for claim in CLAIMS:
        _, found, verdict = evaluate_claim(claim, empty)
        assert verdict == (SCALE if claim.scale else UNDECIDED), claim.key
        assert not found.measured and not found.runs
        if claim.needs:
            assert found.problem == f"not run: {', '.join(claim.needs)}"


def test_the_adversarial_loss_is_weighed_once_its_study_is_there():
    (claim,) = (c for c in CLAIMS if c.key == "L_ad helps")
    runs = []
    for name in ("HMOE-DN", "HMOE-ND"):
        for used, accuracy in ((0.01, 0.7), (0.0, 0.65)):
            runs += grid_of(name, accuracy, lambda_ad=used)
    for run in runs:
        run["discovery"] = {"nmi_domain": 0.5}
    _, found, verdict = evaluate_claim(claim, Loaded({"quick-adversarial": runs}))
    assert verdict == SUPPORTED and found.runs == 24 and abs(found.value - 5) < 1e-9
    assert found.more == "HMOE-DN +5.0, HMOE-ND +5.0."


# The numbers, from the files alone


def test_rate_of_found_domains(weighed):
    runs = of(lines("quick-discovery"), "HMOE-DN")
    plain = [
        r
        for r in runs
        if r["spec"]["hparams"].get("code_norm", "none") == "none"
        and r["spec"]["hparams"].get("d2v_small_norm", "none") == "none"
    ]
    hits, n = sum(r["discovery"]["nmi_domain"] >= 0.9 for r in plain), len(plain)
    found = weighed["experts are domains"].evidence
    assert (found.hits, found.runs) == (hits, n) and n >= 32

    def tail(rate, counts):
        return sum(math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in counts)

    assert abs(tail(found.low / 100, range(hits, n + 1)) - 0.025) < 1e-6
    assert abs(tail(found.high / 100, range(hits + 1)) - 0.025) < 1e-6
    assert weighed["experts are domains"].verdict == CONTRADICTED


def test_ood_and_the_entropy_of_the_gate(weighed):
    studies = next(c for c in CLAIMS if c.key == "OOD is safe").also
    seen, rows, young = set(), [], 0
    for study in (s for s in studies if (RESULTS / f"{s}.jsonl").exists()):
        for r in lines(study):
            h = r["spec"]["hparams"]
            if r["spec"]["algorithm"] not in ("HMOE-DN", "HMOE-ND") or h["lambda_en"] == 0:
                continue
            if h["lambda_d"] > 0 or h.get("code_norm", "none") != "none":
                continue
            key = json.dumps(
                {k: v for k, v in r["spec"].items() if k != "evaluate"}, sort_keys=True
            )
            if key in seen:
                continue
            seen.add(key)
            trained_on = {
                d for p in r["checkpoints"] for d, s in p["accuracies"].items() if "out" in s
            } - set(r["spec"]["test_domains"])
            experts = h.get("num_experts") or len(trained_on)
            share = r["discovery"]["gate_entropy"] / math.log(experts)
            best = max(mode["validation_accuracy"] for mode in r["selected"].values())
            if 100 * best < min_validation_accuracy(r["spec"]["dataset"]):
                young += 1
                continue
            ood, mix = (r["selected"][m]["test_accuracy"] for m in ("ood", "mix"))
            rows.append((share, 100 * (ood - mix)))
    share, gap = np.array(rows).T
    for key, part in (
        ("OOD is safe", share < 9),
        ("OOD, gate decided (ours)", share < 0.5),
        ("OOD, gate uniform (ours)", share > 0.9),
    ):
        found = weighed[key].evidence
        assert found.runs == part.sum() and abs(found.value - gap[part].mean()) < 1e-9, key
        assert found.low < found.value < found.high
    said = weighed["OOD is safe"].evidence.more
    assert young >= 60 and f"Excluded: {young} undertrained runs." in said


@pytest.mark.parametrize(
    "key", ["DN, ND beat DL", "PACS, Terra; VLCS, OfficeHome", "L_ad helps", "Mask-Ens as Pred-Ens"]
)
def test_numbers_of_networks_that_are_not_trained_are_called_so(weighed, key):
    "None of the networks on PACS reaches 81 % on validation images."
    more = weighed[key].evidence.more
    assert "PACS" in more and "undertrained" in more


def test_accuracy_of_unlabelled_hmoe(weighed):
    records = lines("quick-digits")
    dn, nd, dl = (by_cell(of(records, f"HMOE-{name}"), modes) for name in ("DN", "ND", "DL"))
    assert abs(weighed["DN, ND beat DL"].evidence.value - ((dn + nd) / 2 - dl).mean()) < 1e-9
    assert abs(weighed["ND is as DN"].evidence.value - (nd - dn).mean()) < 1e-9
    assert abs(modes(records[0]) - all_modes(records[0])) < 1e-9


def test_domain_loss(weighed):
    def last(study, domains):
        runs = of(lines(study), "HMOE-DL")
        return by_cell(runs, lambda r: r["checkpoints"][-1]["losses"]["L_d"] / math.log(domains))

    gap = last("quick-colored", 2).mean() - last("quick-digits", 3).mean()
    found = weighed["L_d stalls"].evidence
    assert abs(found.value - gap) < 1e-9 and found.low < gap < found.high


def test_eight_experts(weighed):
    runs = lines("quick-collapse")
    light, heavy = (of(runs, "HMOE-DN", lambda_kl=weight) for weight in (1.0, 3.0))
    idle = [
        r["discovery"]["experts_used"] < 8
        for r in light
        if r["discovery"]["gate_entropy"] < 0.9 * math.log(8)
    ]
    assert weighed["K = 8: idle experts"].evidence.hits == sum(idle)
    use = [by_cell(p, lambda r: math.exp(-r["discovery"]["load_balance"])) for p in (heavy, light)]
    assert abs(weighed["larger lambda_kl helps"].evidence.value - (use[0] - use[1]).mean()) < 1e-9
    three = of(lines("quick-discovery-choose"), "HMOE-DN", lambda_kl=1.0)
    gap = by_cell(light, lambda r: r["discovery"]["load_balance"]) - by_cell(
        three, lambda r: r["discovery"]["load_balance"]
    )
    found = weighed["K = 8: larger L_kl"].evidence
    assert abs(found.value - gap.dropna().mean()) < 1e-9 and found.runs == 2 * gap.notna().sum()


def test_modes_between_the_intervals_of_the_toy(weighed):
    (run,) = (
        r
        for r in lines("quick-toy")
        if r["spec"]["hparams"]["lambda_en"] and r["spec"]["hparams"]["lambda_kl"]
    )
    arrays = load_arrays(run, "quick-toy")
    x = arrays["grid"]
    gaps = [i for i, v in enumerate(x) if 0.5 < v < 1 or 1.5 < v < 2]
    wrong = arrays["curves"][:, :, gaps] - np.sin(4 * np.pi * x[gaps])
    best = sum((w**2).mean(1).argmin() == 0 for w in wrong)
    assert weighed["toy: MIX in the gaps"].evidence.hits == best
    found = sum(s["intervals_found"] for s in run["toy"]["per_seed"])
    assert weighed["toy: intervals"].evidence.hits == found


def test_router_by_hand(weighed):
    runs = of(lines("quick-gmoe-placement"), "GMoE")
    rows = [
        {
            "router": r["spec"]["hparams"]["moe_router"],
            "rest": (r["spec"]["hparams"]["moe_placement"], r["spec"]["network"]),
            "seed": r["spec"]["trial_seed"],
            "domain": r["spec"]["test_domains"][0],
            "accuracy": 100 * next(iter(r["selected"].values()))["test_accuracy"],
        }
        for r in runs
    ]
    wide = pd.DataFrame(rows).pivot(index=["seed", "domain", "rest"], columns="router")["accuracy"]
    seeds = (wide["cosine"] - wide["linear"]).groupby("seed").mean()
    half = T[len(seeds) - 1] * seeds.std(ddof=1) / math.sqrt(len(seeds))
    found = weighed["cosine beats linear"].evidence
    assert np.allclose(
        (found.value, found.low, found.high),
        (seeds.mean(), seeds.mean() - half, seeds.mean() + half),
    )


def test_masks_by_hand(weighed):
    gains = {}
    for r in lines("pacs-dmg"):
        if r["spec"]["algorithm"] == "DMG":
            masks, each = r["masks"], []
            for domain, measured in masks["accuracy"].items():
                if measured["split"] == "test":
                    by = list(measured["by_mask"])
                    own = by.pop(masks["domains"].index(domain))
                    each.append(100 * (own - np.mean(by)))
            gains[r["spec"]["trial_seed"], r["spec"]["test_domains"][0]] = np.mean(each)
    grid = pd.Series(gains).unstack().to_numpy()
    assert grid.shape == (3, 4)
    # All draws of three seeds and of four targets, each equally likely: no random numbers here.
    draws = [
        grid[np.ix_(seeds, targets)].mean()
        for seeds in itertools.product(range(3), repeat=3)
        for targets in itertools.product(range(4), repeat=4)
    ]
    found = weighed["right mask beats wrong"].evidence
    assert abs(found.value - grid.mean()) < 1e-9
    assert np.allclose((found.low, found.high), np.quantile(draws, [0.025, 0.975]), atol=0.1)

    def target(record):
        return 100 * record["selected"]["pred-ens"]["test_accuracy"]

    for key, study, knob in (
        ("insensitive to lambda_O", "quick-dmg-overlap", "lambda_o"),
        ("sensitive to lambda_S", "quick-dmg-sparsity", "lambda_s"),
    ):
        ends = [by_cell(of(lines(study), "DMG", **{knob: w}), target) for w in (1.0, 0.0)]
        assert abs(weighed[key].evidence.value - (ends[0] - ends[1]).mean()) < 1e-9, key


def test_purity_of_five_experts(weighed):
    paths = [s for s in ("quick-digits", "quick-discovery-nd") if (RESULTS / f"{s}.jsonl").exists()]
    runs = [r for study in paths for r in of(lines(study), "HMOE-ND")]
    plain = [r for r in runs if r["spec"]["hparams"].get("code_norm", "none") == "none"]
    found = weighed["five experts split"].evidence
    assert found.runs == len(plain) >= 12
    assert found.hits == sum(r["discovery"]["purity"] >= 0.95 for r in plain)


def test_intervals_over_one_side_alone():
    wide = pd.DataFrame(np.random.default_rng(2).normal(size=(3, 1)) + np.array([0, 5, 1, 9]))
    with student_along("domains"):
        _, low, high = over_grid(wide)
    domains = wide.mean()
    assert abs(high - low - 2 * T[3] * domains.std(ddof=1) / 2) < 1e-9
    with student_along("seeds"):
        assert over_grid(wide)[1] > low
    with pytest.raises(HmoeError), student_along("rows"):
        pass


def test_a_verdict_that_hangs_on_the_kind_of_interval_is_named():
    runs = [
        *(invented("A", d, s, 0.5 + g) for d, g in (("a", 0.3), ("b", 0.1)) for s in range(3)),
        *grid_of("B", 0.5),
    ]

    def measure(loaded):
        records = loaded.records["x"]
        return paired_evidence(of(records, "A"), of(records, "B"), modes)

    loaded = Loaded({"x": runs})
    row = evaluate_claim(Claim("P", "k", "a is better", "", ("x",), measure, larger(1)), loaded)
    line = student_line([row], loaded)
    assert row.verdict == SUPPORTED and "over trial seeds alone, none" in line
    assert "over test domains alone, a is better becomes *inconclusive*" in line


# The page


def shown():
    "Four invented claims, one for each verdict."
    facts = {"size": "12 runs, 3 seeds", "runs": 12}
    texts = ("a | b", "c", "d", "e")
    found = [
        Evidence(2, 1, 3, **facts),
        rate_evidence(1, 12, "12 runs"),
        Evidence(problem="not run: quick-x"),
        Evidence(0.3, 0.2, 0.4, "NMI", **facts),
    ]
    pages = ("quick/digits_table", "pacs/hmoe_fig5", "quick/hmoe_table2", "")
    rules = (larger(1), more_than(50), larger(1), None)
    rows = []
    for text, evidence, page, rule, verdict in zip(texts, found, pages, rules, VERDICTS):
        scale = "weights are not here" if verdict == SCALE else ""
        claim = Claim("P", text, text, page, rule=rule, wanted="more seeds", scale=scale)
        rows.append(ClaimResult(claim, evidence, verdict))
    return rows


def test_the_table_links_each_row_and_keeps_pipes_from_splitting_it():
    rows = shown()
    text = claims_markdown(rows)
    assert r"| a \| b | **supported** | +2.0 points (+1.0 to +3.0) | [digits_table](digits" in text
    assert page_link(rows[1]) == "[hmoe_fig5](../../figures/pacs/hmoe_fig5.ipynb)"
    assert page_link(rows[2]) == "[hmoe_table2](../../nbs/paper/hmoe_table2.ipynb)"
    table, numbers = claims_table(rows)
    assert table.verdict.tolist() == list(VERDICTS) == numbers.verdict.tolist()
    assert numbers.rule.tolist() == ["above 0, and at least 1", "above 50", larger(1).text, ""]


def test_sentences_give_number_rule_and_reason():
    good, bad, absent, scale = map(explanation, shown())
    assert good == (
        "**A | b**: supported. +2.0 points (+1.0 to +3.0). Rule: above 0, and at least 1 (points)."
    )
    assert bad.startswith("**C**: contradicted. 1 of 12 (0 to 38 %). Rule: above 50 (% of runs)")
    assert absent == "**D**: inconclusive (not run: quick-x)."
    assert scale.startswith("**E**: needs paper scale, because weights are not here. 0.30 NMI")
    assert count_line(shown()).startswith("4 claims: supported 1, contradicted 1")
    assert chance_line(shown()).startswith("2 intervals of 95 % were evaluated: about 0.1 would")
    assert wanted_lines(shown()) == ["**More seeds**: d (P); e (P)."]


def test_findings_of_ours_are_not_counted_among_the_papers_claims():
    rows = [
        ClaimResult(Claim("P", str(k), text, rule=larger(1)), Evidence(2, 1, 3), SUPPORTED)
        for k, text in enumerate(("a", "ours: b", "ours and theirs"))
    ]
    said = "2 claims: supported 2. Of these, P: supported 2."
    assert count_line(rows) == f"{said} And 1 finding of ours: supported 1."
    assert count_line([rows[0], rows[2]]) == said


def test_nothing_is_said_of_masks_in_a_network_that_is_not_trained():
    loaded = load_claims([c for c in OTHER_CLAIMS if c.key == "right mask beats wrong"])
    records = [copy.deepcopy(r) for r in loaded.records["pacs-dmg"]]
    (claim,) = (c for c in OTHER_CLAIMS if c.key == "right mask beats wrong")
    assert evaluate_claim(claim, loaded).verdict == UNDECIDED
    assert (
        evaluate_claim(claim, loaded).evidence.problem
        == "undertrained: Aggregate, DMG, Multi-Headed"
    )
    for record in records:
        for chosen in record["selected"].values():
            chosen["validation_accuracy"] = 0.95
    trained = evaluate_claim(claim, Loaded(loaded.records | {"pacs-dmg": records}))
    assert trained.verdict == SUPPORTED and trained.evidence.value > 1


def test_a_supported_equality_says_that_a_difference_was_seen():
    rows = [
        ClaimResult(Claim("P", "k", "as good", rule=rule), Evidence(-1, -1.5, -0.5), SUPPORTED)
        for rule in (not_worse(2), smaller(1))
    ]
    assert ["within the margin" in explanation(row) for row in rows] == [True, False]


def test_the_picture_has_a_panel_for_each_kind_of_unit():
    figure = plot_claims(shown())
    assert [len(axis.get_yticklabels()) for axis in figure.axes] == [1, 1, 1]
    with pytest.raises(HmoeError, match="no claim has a number"):
        plot_claims(shown()[2:3])


def test_links_of_the_rendered_page_lead_to_files():
    for folder in ("figures/quick", "nbs/paper"):
        page = json.loads((repo_root() / folder / "claims.ipynb").read_text(encoding="utf-8"))
        outputs = [o for c in page["cells"] for o in c.get("outputs", [])]
        text = "\n".join("".join(o.get("data", {}).get("text/markdown", "")) for o in outputs)
        links = re.findall(r"\]\(([^)#\s]+\.ipynb)\)", text)
        missing = [link for link in links if not (repo_root() / folder / link).exists()]
        assert len(links) >= 30 and not missing, missing
