"""The galleries and their templates: the committed pages are what their folders give, and a hole
that nobody fills is an error."""

import shutil

import jinja2
import pytest

from hmoe_repro.evidence.gallery import gallery, template


@pytest.mark.parametrize("profile", ["bench", "mnist", "pacs", "quick"])
def test_the_committed_gallery_is_what_its_folder_gives(root, tmp_path, profile):
    shutil.copytree(root / "figures" / profile, tmp_path / profile)
    committed = (root / "figures" / profile / "README.md").read_text(encoding="utf-8")
    assert gallery(profile, str(tmp_path)).read_text(encoding="utf-8") == committed


def test_markdown_stays_as_it_is_and_html_is_escaped():
    section = {
        "name": "one",
        "title": "a < b",
        "claim": "",
        "data": "",
        "profile": "",
        "verdict": "it's",
    }
    lists = dict.fromkeys(("pictures", "tables", "linked"), [])
    text = template("gallery_section.md").render(**section, **lists, evidence="")
    assert "## a < b" in text and "it's" in text
    assert "a &lt; b" in template("discover_parts.html").module.table(["a < b"], [])


def test_a_hole_that_nobody_fills_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'made' is undefined"):
        template("gallery.md").render(profile="quick", sections=[], index=[])
