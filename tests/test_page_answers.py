"""Every rendered page answers its own claim: one sentence with the number of the evaluation, and
pictures with their finding as alternative text. Averages stand before single domains."""

import csv
import json
import math
import re
import subprocess
import sys

import pandas as pd
import pytest
from PIL import Image

from hmoe_repro.analysis.claims import read_claims
from hmoe_repro.core.files import repo_root
from hmoe_repro.report.gallery import facts_of, title_and_claim
from hmoe_repro.report.render import PICTURES, artefacts, files_of, page_texts, paper_notebook
from hmoe_repro.studies.artefacts import ARTEFACTS

FIGURES = repo_root() / "figures"
PAGES = sorted(path for path in FIGURES.glob("*/*.ipynb"))
IDS = [f"{path.parent.name}/{path.stem}" for path in PAGES]
CLAIMS = {claim.key: claim for claim in read_claims()}
MAX_WORDS = 25
VERDICT_WORDS = {
    "supported": ("Yes",),
    "contradicted": ("No",),
    "mixed": ("Partly",),
    "inconclusive": ("Undecided",),
}


def cells_of(page):
    "The cells of an executed page."
    return json.loads(page.read_text(encoding="utf-8"))["cells"]


def answer_at_the_head(page):
    "The displayed answer; '' without one."
    for cell in cells_of(page):
        for output in cell.get("outputs", []):
            text = "".join(output.get("data", {}).get("text/markdown", ""))
            if text.startswith("**Answer.** "):
                first, _, _ = text.removeprefix("**Answer.** ").partition("\n")
                return first.strip()
    return ""


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_answers_in_one_sentence_at_its_head(page):
    answer = answer_at_the_head(page)
    assert answer
    assert len(answer.split()) <= MAX_WORDS
    assert ";" not in answer
    assert re.match(r"[A-Z]", answer), "a number or a sign before the subject"
    texts = page_texts(page)
    verdict = texts[f"{page.stem}_verdict.md"].removeprefix("- ")
    assert verdict.startswith(answer)
    assert facts_of(page)["answer"] == answer


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_answer_is_that_of_the_evaluated_claim(page):
    facts = facts_of(page)
    if not facts.get("claim"):
        return
    assert facts["claim"] in ARTEFACTS[page.stem].claims
    verdicts = pd.read_csv(FIGURES / "quick" / "verdicts.csv").set_index("claim")
    rows = verdicts.loc[[facts["claim"]]]
    rows = rows[rows.studies == " ".join(facts["claim_studies"])]
    assert len(rows) >= 1, "no such row in verdicts.csv"
    row = rows.iloc[0]
    numbers = [float(text) for text in re.findall(r"\d+(?:\.\d+)?", facts["answer"])]
    possible = [abs(row.estimate), 100 * abs(row.estimate), row.estimate * row.runs / 100]
    tolerance = 0.5 if row.unit == "% of runs" else 0.051 if row.unit == "points" else 0.0051
    near = [math.isclose(n, p, abs_tol=tolerance) for n in numbers for p in possible]
    assert any(near), (facts["answer"], row.estimate)
    needs_scale = CLAIMS[facts["claim"]].scale and not facts["claim_studies"][0].startswith(
        "paper-"
    )
    repeated_in_vain = "not confirmed on new seeds" in row.plan  # its planned trial counts instead
    words = VERDICT_WORDS.get(row.verdict)
    if needs_scale or repeated_in_vain:
        words = ("Undecided",)
    if words:
        assert facts["answer"].startswith(words), row.verdict


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_picture_is_shown_with_its_finding(page):
    pictures = [n for n in files_of(page.parent)[page.stem] if n.endswith(".png")]
    shown = [cell for cell in cells_of(page) if cell.get("id") == PICTURES]
    if not pictures:
        assert not shown
        return
    links = dict(
        (name, alternative)
        for alternative, name in re.findall(r"!\[(.*?)\]\((.*?)\)", "".join(shown[0]["source"]))
    )
    assert set(links) == set(pictures)
    title, _ = title_and_claim(paper_notebook(page.stem))
    for name, alternative in links.items():
        assert alternative, name
        assert not alternative.startswith(title), f"{name} has the page's title, not a finding"
        assert len(alternative.split()) <= 20, alternative


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_pictures_are_wide_enough_and_light(page):
    for name in files_of(page.parent)[page.stem]:
        if name.endswith(".png"):
            assert re.fullmatch(r"[a-z0-9_.+-]+", name), name
            with Image.open(page.parent / name) as picture:
                assert picture.width >= 1200, name
                assert picture.mode == "P", "more than 256 colours"


def test_all_figures_weigh_no_more_than_before():
    files = [path for path in FIGURES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 18.0e6


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_average_is_the_first_number_of_a_table(page):
    for name, text in page_texts(page).items():
        rows = [line for line in text.splitlines() if line.startswith("|")]
        if not rows:
            continue
        heads = [head.strip() for head in rows[0].strip("|").split("|")]
        averages = [i for i, head in enumerate(heads) if head.lower().startswith("average")]
        if not averages or len(rows) < 3:
            continue
        kinds = [kind.strip() for kind in rows[1].strip("|").split("|")]
        numeric = [i for i, kind in enumerate(kinds) if kind.endswith(":")]
        assert averages[0] == numeric[0], (name, heads)


@pytest.mark.parametrize("name", sorted(set(artefacts()) & set(ARTEFACTS)))
def test_a_page_states_its_claim_in_the_papers_words(name):
    _, shown = title_and_claim(paper_notebook(name))
    claims = ARTEFACTS[name].claims
    if not claims:
        assert shown
        return
    claim = CLAIMS[claims[0]]
    if claim.ours:
        return
    assert claim.quote in shown
    assert claim.paper in shown
    assert claim.section in shown


def test_verdicts_csv_has_every_claim_of_the_pages():
    with (FIGURES / "quick" / "verdicts.csv").open(encoding="utf-8") as file:
        keys = {row["claim"] for row in csv.DictReader(file)}
    assert keys <= set(CLAIMS)
    for page in PAGES:
        claim = facts_of(page).get("claim")
        assert claim is None or claim in keys, page


def test_the_source_of_a_page_shows_the_answer_that_is_published():
    "`.ci/page_outputs.py` names the others, and without arguments executes them."
    code = "from page_outputs import *; print(len(list(PAGES.iterdir())), *old_pages())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repo_root() / ".ci",
        check=True,
        capture_output=True,
        text=True,
    )
    number, *old = done.stdout.split()
    assert int(number) > 60
    assert not old, "run .ci/page_outputs.py"
