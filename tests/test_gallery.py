"""The galleries and their templates: the committed pages are what their folders give, and a hole
that nobody fills is an error."""

import json
import shutil

import jinja2
import pandas as pd
import pytest

from hmoe_repro.data.registry import DATASETS
from hmoe_repro.report.gallery import data_title, gallery, template, title_and_claim
from hmoe_repro.studies.artefacts import ARTEFACTS


@pytest.mark.parametrize("profile", ["bench", "mnist", "pacs", "quick"])
def test_the_committed_gallery_is_what_its_folder_gives(root, tmp_path, profile):
    shutil.copytree(root / "figures" / profile, tmp_path / profile)
    committed = (root / "figures" / profile / "README.md").read_text(encoding="utf-8")
    assert gallery(profile, str(tmp_path)).read_text(encoding="utf-8") == committed


def test_markdown_stays_as_it_is_and_html_is_escaped():
    section = {"name": "one", "title": "a < b", "claim": "", "verdict": "it's"}
    lists = dict.fromkeys(("pictures", "tables", "linked"), [])
    text = template("gallery_section.md").render(**section, **lists)
    assert "## a < b" in text
    assert "it's" in text
    frame = pd.DataFrame(columns=["a < b"])
    assert "a &lt; b" in template("discover_parts.html").module.table(frame)


def test_a_hole_that_nobody_fills_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'(made|status)' is undefined"):
        template("gallery.md").render(profile="quick", sections=[], index=[])


@pytest.mark.parametrize(
    "page, title",
    [
        ("quick/dmg_table2", "DMG Tables 2 and 6: an unknown domain, PACS · embedded digits"),
        ("pacs/dmg_table2", "DMG Tables 2 and 6: an unknown domain, PACS"),
        ("quick/hmoe_table5", "HMOE Table 5: RotatedMNIST · embedded digits"),
        ("mnist/hmoe_table5", "HMOE Table 5: RotatedMNIST"),
        ("pacs/hmoe_table3", "HMOE Table 3: the six data sets, with samples"),
        ("quick/claims", "Claims of the three papers"),
    ],
)
def test_a_title_names_the_data_of_its_page(root, page, title):
    path = root / "figures" / f"{page}.ipynb"
    assert data_title(title_and_claim(path)[0], path) == title


def test_the_data_that_a_title_names_are_those_of_the_table(root):
    titles = {info.title for info in DATASETS.values() if info.title}
    for name, artefact in ARTEFACTS.items():
        shown = artefact.short_title or title_and_claim(root / "nbs" / "paper" / f"{name}.ipynb")[0]
        named = {title for title in titles if title.lower() in shown.lower()}
        if name != "hmoe_table3":  # about all of them
            assert set(artefact.named_data) == named, name


def test_every_page_has_its_answer_as_data(root):
    files = sorted((root / "figures").glob("*/*.provenance.json"))
    assert len(files) > 70
    for file in files:
        facts = json.loads(file.read_text(encoding="utf-8"))
        assert facts["answer"], file.name
        assert facts["verdict"][0].startswith(facts["answer"]), file.name
