"""The book: notebooks become pages without being executed, links and names lead somewhere, and a
real browser finds nothing wrong with any page."""

import csv
import dataclasses
import importlib.util
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import pytest
from notebooks import ROOT

from hmoe_repro.report.gallery import item_status
from hmoe_repro.training import selection

BOOK = ROOT / "docs" / "book"
sys.path.append(str(BOOK))
import book_cells  # noqa: E402
import book_contents  # noqa: E402
import book_gallery  # noqa: E402
import book_names  # noqa: E402
import book_reference  # noqa: E402
import book_text  # noqa: E402
import prepare  # noqa: E402
import slides  # noqa: E402

NEEDED = ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_design", "sphinx_revealjs")
GATE = "hmoe_repro.method.gating.gate_values"


@pytest.fixture(scope="module")
def book():
    "What links need to know, for the whole library."
    made = book_text.Book(ROOT, book_names.Index(book_names.library(ROOT)))
    made.pages = {"nbs/01_method/03_gating.ipynb", "docs/results.md"}
    made.anchors = {"hmoe-eq-4"}
    return made


def test_the_start_page_says_how_many_seeds_found_the_intervals():
    with open(ROOT / "figures/quick/hmoe_fig3_summary.csv", encoding="utf-8", newline="") as file:
        found = {row["losses"]: row["intervals found"] for row in csv.DictReader(file)}
    text = (BOOK / "index.md").read_text(encoding="utf-8")
    assert f"*In {found['all losses']} seeds three experts" in text


def test_names_are_read_with_shapes_and_sources(book):
    name = book.index.names[GATE]
    assert (name.page, name.cell) == ("nbs/01_method/03_gating", "def-gate-values")
    assert ("embeddings", "Tensor", "(..., K, D)") in name.notes
    assert name.returned == "(..., B, K), rows sum to 1" and name.equations == ["hmoe-eq-2"]
    assert name.signature.endswith("eps: float=1e-06) -> Tensor")
    method = book.index.names["hmoe_repro.method.hmoe.HMOE.predict"]
    assert method.kind == "method" and not method.signature.startswith("(self")


def test_every_exported_function_has_its_cell(book):
    lost = [n.full for n in book.index.names.values() if n.kind != "data" and not n.cell]
    assert len(book.index.names) > 800 and not lost


@pytest.mark.parametrize(
    "word, module, full",
    [
        ("gate_values", "", GATE),
        ("method.gating.gate_values", "", GATE),
        ("gate_values()", "", GATE),
        ("entropy", "hmoe_repro.method.gating", "hmoe_repro.method.gating.entropy"),
        ("entropy", "", ""),  # elsewhere this may be a column
        ("no_such_name", "", ""),
    ],
)
def test_a_word_means_a_name_only_where_that_is_certain(book, word, module, full):
    assert book.index.find(word, module) == full


@pytest.mark.parametrize(
    "text, made",
    [
        ("[r](03_gating.ipynb)", "[r](/nbs/01_method/03_gating.ipynb)"),
        ("[eq. 4](03_gating.ipynb#hmoe-eq-4)", "[eq. 4](#hmoe-eq-4)"),
        ("[t](../../docs/example_study.toml)", "{download}`t </files/docs/example_study.toml>`"),
        ("[gone](../nowhere.ipynb)", "gone"),
        ("[out](https://example.org)", "[out](https://example.org)"),
        ("`gate_values`", f"{{py:obj}}`gate_values <{GATE}>`"),
        ("# `gate_values`", "# `gate_values`"),
        ("```\n`gate_values`\n```", "```\n`gate_values`\n```"),
        ('<a id="hmoe-eq-4"></a>\n', "(hmoe-eq-4)=\n\n"),
    ],
)
def test_links_and_names_of_a_text(book, text, made):
    assert book_text.markdown(book, "nbs/01_method/04_hmoe.ipynb", text) == made


@pytest.mark.parametrize(
    "pages, status",
    [
        (("dmg_table1",), "not run"),  # DomainNet
        (("dmg_table3",), "stand-in"),  # DomainNet in the paper; digits and PACS here
        (("dmg_table2",), "reduced"),  # PACS, at a low resolution
        (("hmoe_table4",), "reduced"),  # the digits have a page, too, but MNIST was run
        (("hmoe_fig3",), "full"),
        (("hmoe_table6",), "not run"),
        (("gmoe_table16",), "reduced"),  # a measurement, of no data set
    ],
)
def test_what_was_run_on_other_data_alone_is_a_stand_in(pages, status):
    assert item_status(pages)[0] == status


def test_the_title_of_a_page_of_evidence_names_its_data(book):
    first = "# DMG Table 2: an unknown domain, PACS\n\n> Claim.\n\nMore."
    text = book_cells.titled(book, "figures/quick/dmg_table2.ipynb", first, "")
    assert text.startswith("# DMG Table 2: an unknown domain, PACS · embedded digits\n\n> Claim.")
    kept = book_cells.titled(book, "nbs/paper/dmg_table2.ipynb", first, "")
    assert kept.startswith("# DMG Table 2: an unknown domain, PACS\n")


def test_a_column_on_a_page_of_evidence_is_no_name(book):
    page = "figures/quick/digits_fig5.ipynb"
    here = dataclasses.replace(book, imported={page: {"gate_values"}})
    for word, linked in (
        ("gate_values", True),
        ("gate_logits", False),  # not imported there: a column, for all that is known
        ("gating.gate_logits", True),
        ("GaussianBlur", False),
        ("RunConfig", True),
    ):
        assert book_text.markdown(here, page, f"`{word}`").startswith("{py:obj}") == linked, word
    assert "gate_logits <" in book_text.markdown(here, "docs/results.md", "`gate_logits`")


def test_settings_before_a_result_are_folded():
    opened = "**Profile `quick`.**\n\n- data: D\n- trained at commit c"
    made = book_cells.folded_settings(opened)
    assert made.startswith("**Profile `quick`.**\n\n<details>") and made.count("- data: D") == 1
    for text in ("- data: D", "Found.\n\n- three\n- trained at noon", "**Table**\n\n| a |"):
        assert book_cells.folded_settings(text) == text


def test_an_answer_is_folded(book):
    text = "<details><summary>Answer to 1</summary>\n\nIt is $3$.\n\n</details>"
    made = book_text.markdown(book, "nbs/01_method/04_hmoe.ipynb", text)
    assert made.startswith(":::{dropdown} Answer to 1\n") and "details" not in made


@pytest.fixture(scope="module")
def routing(book):
    "The page of a notebook with everything: equations, exports, pictures, answers."
    page = "nbs/01_method/03_gating.ipynb"
    return book_cells.notebook(book, page, "hmoe_repro.method.gating")["cells"]


def test_no_directive_is_left_and_nothing_is_lost(routing):
    code = "\n".join(c["source"] for c in routing if c["cell_type"] == "code")
    assert "#|" not in code and "default_exp" not in code
    source = book_cells.read(ROOT / "nbs/01_method/03_gating.ipynb")
    for cell in (c for c in source if c["cell_type"] == "code"):
        assert book_cells.DIRECTIVE.sub("", cell["source"]).strip() in code, cell["id"]


def test_a_cell_says_where_it_is_exported_and_what_it_computes(routing):
    start = "(nbs-01-method-03-gating--def-load-balance-loss)="
    line = next(c["source"] for c in routing if c["source"].startswith(start))
    assert "`load_balance_loss <hmoe_repro.method.gating.load_balance_loss>`" in line
    assert "[eq. 4 of HMOE](#hmoe-eq-4)" in line


def test_an_equation_leads_to_its_cell(routing):
    text = next(c["source"] for c in routing if "(hmoe-eq-4)=" in c["source"])
    assert "[`load_balance_loss`](#nbs-01-method-03-gating--def-load-balance-loss)" in text


def test_the_lines_of_the_page_on_installing_run():
    "What they say of shapes and losses is true, and the pins and wheels are those of the README."
    text = (BOOK / "install.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    found = {}
    exec(code, found)
    assert found["logits"].shape == (1, 10)
    assert all(isinstance(value, float) for value in found["losses"].values())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S):
        exec(code, {})
    wheel = re.search(r"torch==[\d.]*\d", text)[0]
    assert wheel in readme
    assert wheel in (ROOT / "constraints.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text, numbers", [("4", [4]), ("3 to 8", [3, 4, 5, 6, 7, 8]), ("1, 3 and 5 to 6", [1, 3, 5, 6])]
)
def test_ranges_of_equations_are_expanded(text, numbers):
    assert book_names.numbers_in(text) == numbers
    name = book_names.Name("a.b", "function", "()", f"Losses (HMOE, eqs. {text}).")
    assert name.equations == [f"hmoe-eq-{n}" for n in numbers]


def test_the_index_table_and_the_equations_name_each_other(book):
    "What the page of symbols names for an equation stands under the equation."
    table = prepare.cell_text(ROOT, prepare.START, "md-index")
    made = dataclasses.replace(book, index=book_names.Index(book_names.library(ROOT)))
    made.index.list_equations(table)
    rows = [r for r in table.splitlines() if re.search(r"#\w+-eq-\d+\)", r)]
    assert len(rows) == 11
    for row in rows:
        anchor = re.search(r"#(\w+-eq-\d+)\)", row)[1]
        said = book_cells.computed_by(made, f'<a id="{anchor}"></a>')
        for word in re.findall(r"`([\w.]+)`", row):
            assert f"`{word.split('.', 2)[-1]}`" in said, (anchor, word)
    with pytest.raises(KeyError):
        made.index.list_equations("| [eq. 4](x.ipynb#hmoe-eq-4) | loss | `method.gone` |")


def test_pictures_are_described_and_their_code_is_folded(routing):
    drawn = [c for c in routing if c["cell_type"] == "code" and book_cells.is_picture(c)]
    assert drawn
    for cell in drawn:
        assert "hide-input" in cell["metadata"]["tags"]
        assert len(cell["metadata"]["mystnb"]["image"]["alt"]) > 10


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "With some labels (see Fig. 3 of the paper) it works. So.",
            "With some labels (see Fig. 3",
        ),
        ("By Eq. 4 the load is even. So.", "By Eq. 4 the load is even."),
        ("Figure 3. Top: the outputs. So.", "Figure 3. Top"),
        ("There are 3 experts. So.", "There are 3 experts."),
    ],
)
def test_a_sentence_does_not_end_at_an_abbreviation(text, said):
    assert book_text.first_sentence(text).startswith(said)
    assert "So" not in book_text.first_sentence(text)


def test_what_is_said_of_a_picture_is_about_it():
    text = "The layer has 32 units. The left picture shows its output. Training is short."
    assert book_text.about_picture(text) == "The left picture shows its output."
    assert book_text.about_picture("The layer has 32 units.") == ""
    assert book_text.distinct(["a", "b", "a"]) == ["a, picture 1 of 2", "b", "a, picture 2 of 2"]


def test_a_page_of_evidence_describes_its_pictures_as_its_gallery_does(book):
    page, alts = "figures/quick/hmoe_fig3.ipynb", book_gallery.picture_alts(ROOT)
    files = [f"figures/quick/hmoe_fig3{of}.png" for of in ("", "_ablation", "_errors")]
    assert len({alts[f] for f in files}) == 3 and alts[files[2]].startswith("Figure 3: ")
    assert "(errors). Data: SineIntervals" in alts[files[2]]
    made = dataclasses.replace(book, alts=alts)
    cell = next(c["id"] for c in book_cells.read(ROOT / page) if c["cell_type"] == "code")
    drawn = book_cells.notebook(made, page, "", {cell: files})["cells"]
    drawn = [c for c in drawn if book_cells.is_picture(c)]
    assert [c["metadata"]["mystnb"]["image"]["alt"] for c in drawn] == [alts[f] for f in files]
    assert all(len(c["outputs"]) == 1 or c is drawn[0] for c in drawn)


def test_the_text_of_a_page_names_its_profile(book):
    page = "figures/quick/digits_table.ipynb"
    assert "`<profile>-digits`" in "".join(c["source"] for c in book_cells.read(ROOT / page))
    text = "".join(c["source"] for c in book_cells.notebook(book, page)["cells"])
    assert "<profile>" not in text and "`quick-digits`" in text
    template = "nbs/paper/hmoe_table6.ipynb"
    assert book_text.profiled(template, "`<profile>-vlcs`") == "`<profile>-vlcs`"


def test_every_card_of_the_gallery_has_a_claim(book):
    "Not only those of pages that were run; what a notebook explains has a picture of it, too."
    made, executed, _ = prepare.make_book(ROOT)
    for paper, items in book_gallery.PUBLISHED.items():
        for item, shown in items.items():
            card = book_gallery.item_card(made, executed, paper, item, shown)
            said = card.partition(".**")[2].partition(":::")[0].strip()
            assert len(said) > 40, (paper, item)
            assert "![" in card or "`explained`" not in card, (paper, item)
    for page in book_gallery.explaining():
        assert book_gallery.stored_picture(ROOT, page).startswith(b"\x89PNG"), page
    assert "(/figures/quick/claims.ipynb)" in book_gallery.overview(made)


def test_code_of_an_answer_is_folded(routing):
    source = {book_cells.DIRECTIVE.sub("", c["source"]).strip(): c for c in routing}
    for cell in book_cells.read(ROOT / "nbs/01_method/03_gating.ipynb"):
        if cell["id"].startswith("answer"):
            assert "hide-cell" in source[cell["source"].strip()]["metadata"]["tags"]


def test_the_bar_at_the_left_leads_to_every_module(book):
    modules = list(book.index.modules.values())
    parts = book_reference.by_part(modules, {"01_method": "The method", "02_data": "Data, read"})
    made = book_contents.reference_entry({"doc": "api/index", "title": "Reference"}, parts)
    method, data = made["children"]
    assert (method["doc"], method["anchor"]) == ("api/index", "#the-method")
    assert data["anchor"] == "#data-read" and data["children"]
    assert {"doc", "title", "children", "inside"} <= set(method["children"][0])
    assert "api/hmoe_repro.method.gating" in method["inside"] and "doc" in made
    assert made["inside"] == method["inside"] + data["inside"]
    folders = [m.page.split("/")[1] for m in modules]
    assert len(made["inside"]) == folders.count("01_method") + folders.count("02_data")


def test_the_path_has_the_numbers_of_its_table_and_a_page_one_place():
    numbers = prepare.path_numbers(ROOT)
    assert list(numbers.values()) == [str(n) for n in range(1, len(numbers) + 1)]
    assert set(numbers) <= set(prepare.reading_path(ROOT)) and numbers[prepare.START] == "1"

    def entry(doc, *children):
        inside = [d for c in children for d in (c["doc"], *c["inside"])]
        return {"doc": doc, "title": doc, "children": list(children), "inside": inside}

    bar = [
        {"caption": "Path", "pages": [entry("a"), entry("b")]},
        {"caption": "Results", "pages": [entry("a"), entry("g", entry("b"), entry("c"))]},
    ]
    book_contents.numbered(bar[0]["pages"], {"a": "1"})
    book_contents.once(bar, set())
    assert [p["title"] for p in bar[0]["pages"]] == ["1. a", "b"]
    assert bar[1]["pages"] == [entry("g", entry("c"))]


def test_each_page_of_the_path_leads_to_the_next():
    "Its last section names the page that the table of the path has next, before any other."
    path, lost = prepare.reading_path(ROOT), []
    for page, following in zip(path[1:], path[2:]):
        texts = [c["source"] for c in book_cells.read(ROOT / page)]
        (last,) = [t for t in texts if t.startswith("## Where this goes next")] or [""]
        found = re.search(r"\]\(([^)#]+)\.ipynb", last)
        if page.startswith("nbs/") and (not found or Path(found[1]).name != Path(following).stem):
            lost.append((page, following, found and found[1]))
    assert len(path) == 20 and not lost


# The slides of the class, made without the site.


@pytest.fixture(scope="module")
def class_slides():
    "All slides of the class but its title."
    made, executed, _ = prepare.make_book(ROOT)
    pages = [page for page in slides.planned(ROOT) if page in executed]
    pictures = {page: prepare.pictures_of(made, executed, page) for page in pages}
    return slides.slides_of_class(made, pictures)


def words(slide):
    "What can be read on a slide, but its title and its question."
    body = re.sub(r"<[^>]*>", " ", slides.html(slide)["body"])
    return re.sub(r"\s+", " ", unescape(body)).strip()


# How a question of the plan begins: what is said or shown in its answer, and not before.
ANSWERS = {
    "Which of the three methods": "needed in training",
    "Will one network fail": "The mixture fits about as well as the single network",
    "What happens with the entropy loss alone": "trivial solution",
    "And with the load balance alone": "a gate that decides nothing",
    "Which loss teaches": "'L_ad': ['encoder', 'adversary']",
    "Do you believe": "seeds find all three intervals",
    "Which rows differ": "differs significantly from ERM in average accuracy",
    "Which checkpoint does each rule": "'training-domain': (100, 0.2)",
}


def test_every_question_stands_before_its_answer(class_slides):
    asked = [question for part in slides.plan(ROOT) for question in part.questions]
    assert [s.question for s in class_slides if s.question] == asked
    assert [next(q for q in asked if q.startswith(start)) for start in ANSWERS] == asked
    texts = [words(s) for s in class_slides]
    for start, answer in ANSWERS.items():
        place = next(i for i, s in enumerate(class_slides) if s.question.startswith(start))
        assert place < next(i for i, text in enumerate(texts) if answer in text), start


def test_every_part_begins_with_its_minutes(class_slides):
    parts = slides.plan(ROOT)
    times = [part.minutes.split("–") for part in parts]
    assert times[0][0] == "0" and times[-1][1] == "90"
    assert all(before[1] == after[0] for before, after in zip(times, times[1:]))
    opening = [s for s in class_slides if s.opens]
    assert [s.opens for s in opening] == [f"Minute {p.minutes}: {p.happens}" for p in parts]
    assert [s.page for s in opening] == [p.pages[0] for p in parts]
    assert class_slides[0].opens and class_slides[-1].title == "To take home"


def test_no_slide_is_empty_or_ends_amid_a_sentence(class_slides):
    for slide in class_slides:
        last = slide.cells[-1] if slide.cells else {"cell_type": "question"}
        where = f"{slide.page}: {slide.title}"
        assert slide.question or "<img" in slides.html(slide)["body"] or len(words(slide)) > 100
        if last["cell_type"] == "markdown":
            assert not re.search(r"[,:](\s*\$\$)?\s*$", last["source"]), where
        assert all(c["source"].strip() or c.get("outputs") for c in slide.cells), where


def test_no_slide_is_crowded(class_slides):
    for slide in class_slides:
        body, where = slides.html(slide)["body"], f"{slide.page}: {slide.title}"
        assert len(words(slide)) <= 1500 and body.count("<li>") <= 6, where
        assert sum(c["source"].count("\n") for c in slide.cells if c["cell_type"] == "code") <= 25


def test_neighbours_have_titles_of_their_own(class_slides):
    for slide, after in zip(class_slides, class_slides[1:]):
        assert slide.title != after.title or slide.question, slide.title


def test_the_problem_and_the_rules_are_named(class_slides):
    texts = [words(s) for s in class_slides]
    first = texts[0]
    assert "Domain generalization asks" in first and "test domain" in first and "ERM" in first
    part = " ".join(t for t, s in zip(texts, class_slides) if s.page.endswith("04_selection.ipynb"))
    assert all(rule in part for rule in ("training-domain validation", *selection.RULES[1:]))


TEXT = "## Title\n\nOne is\n\n$$a = b,$$\n\nif so. More.\n\nSecond.\n\n- a\n- b\n- c\n\n| x |"


@pytest.mark.parametrize(
    "tags, made",
    [
        (["slide"], "One is\n\n$$a = b,$$\n\nif so. More.\n\n- a\n- b\n- c\n\n| x |"),
        (["slide-whole"], TEXT.removeprefix("## Title\n\n")),
        (["slide-items-1-last"], "One is\n\n$$a = b,$$\n\nif so. More.\n\n- a\n- c\n\n| x |"),
    ],
)
def test_what_a_slide_keeps_of_a_text(tags, made):
    assert slides.shortened(TEXT, tags) == made


# The site itself, where Sphinx is installed: `make book` installs it.


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The folder of the built book."
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (`make book` installs them)")
    folder = tmp_path_factory.mktemp("book")
    build = [sys.executable, str(BOOK / "build.py"), str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder / "html"


@pytest.fixture(scope="module")
def window(site):
    "A page of a headless browser."
    if not importlib.util.find_spec("playwright"):
        pytest.skip("playwright is not installed: `pip install -c constraints.txt '.[browser]'`")
    if not browser.chromium():
        pytest.skip("there is no Chromium here: install one, or name it in HMOE_CHROMIUM")
    with browser.pages() as page:
        yield page


# One page of each kind: cards, a notebook, a page of results, the reference, commands, symbols.
LOOKED_AT = [
    "index",
    "nbs/01_method/03_gating",
    "figures/quick/digits_table",
    "gallery/index",
    "api/index",
    "api/hmoe_repro.method.gating",
    "every_command",
    "symbols",
    "search",
    "docs/class_plan",
]


class Marks(HTMLParser):
    "The links and the anchors of a page."

    def __init__(self, path):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[k] for k in ("id", "name") if attrs.get(k)}
        self.links += [attrs[k] for k in ("href", "src") if attrs.get(k)]


def html_pages(site):
    "Every page of the book."
    return sorted(p for p in site.rglob("*.html") if "_static" not in p.parts)


def test_every_link_leads_somewhere(site):
    marks = {p: Marks(p) for p in html_pages(site)}
    broken = []
    for path, page in marks.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link in ("#", ""):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = marks[target].ids if target in marks else None
            fragment = unquote(parts.fragment)
            if not target.exists() or (known is not None and fragment and fragment not in known):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(marks) > 300 and not broken, broken[:20]


def test_nothing_is_fetched_from_elsewhere(site):
    pattern = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    found = {p.name: pattern.findall(p.read_text(encoding="utf-8")) for p in html_pages(site)}
    assert not {name: hits for name, hits in found.items() if hits}


def test_a_browser_finds_nothing_wrong(site, window):
    skip = {"slides"}
    wrong = {}
    for path in html_pages(site):
        if path.parent.name not in skip and (found := browser.faults(window, path)):
            wrong[path.relative_to(site).as_posix()] = found[:5]
    assert not wrong, f"{len(wrong)} pages: {dict(list(wrong.items())[:10])}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_text_can_be_read_on_its_ground(site, window, name, scheme):
    window.set_viewport_size({"width": browser.WIDTHS[0], "height": 900})
    window.emulate_media(color_scheme=scheme)
    browser.opened(window, site / f"{name}.html")
    assert window.evaluate("document.documentElement.dataset.theme") == scheme
    assert window.evaluate(browser.CONTRAST) == []
    window.emulate_media(color_scheme="light")


@pytest.mark.parametrize("width", [400, 800])
def test_the_menus_open_where_the_bars_are_hidden(site, window, width):
    window.set_viewport_size({"width": width, "height": 900})
    browser.opened(window, site / "nbs/00_core/00_start_here.html")
    for which in ("primary", "secondary"):
        menu = window.locator(f"#pst-{which}-sidebar-modal")
        assert not menu.is_visible()
        window.locator(f".{which}-toggle:visible").first.click()
        menu.wait_for(state="visible")
        window.keyboard.press("Escape")
        menu.wait_for(state="hidden")


@pytest.mark.parametrize("words", ["load balance", "gate_logits"])
def test_the_search_finds(site, window, words):
    browser.opened(window, site / "search.html", f"?q={words.replace(' ', '+')}")
    window.wait_for_selector("#search-results li a", timeout=20_000)
    hits = window.eval_on_selector_all("#search-results li a", "all => all.map(a => a.href)")
    assert any("routing" in hit for hit in hits), hits


def test_folded_answers_open(site, window):
    browser.opened(window, site / "nbs/01_method/03_gating.html")
    folds = window.locator("details", has_text="Answer to 1").first
    assert not folds.evaluate("e => e.open")
    folds.locator("summary").first.click()
    assert folds.evaluate("e => e.open") and "0.953" in folds.inner_text()


QUESTIONS = {
    "What is HMOE?": (["What is HMOE?"], "Start here", "An image goes down two paths."),
    "Where is equation 4 computed?": (
        ["Where is an equation computed?", "eq. 4", "load_balance_loss"],
        "Gating",
        "log(p.shape[-1]) - entropy(p.mean(-2))",
    ),
    "Is Table 5 reproduced?": (["Is it reproduced?"], "Is it reproduced?", "RotatedMNIST"),
    "How do I add an algorithm?": (["How do I add an algorithm?"], "An algorithm", "hmoe sweep"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_three_clicks_answer_a_question(site, window, question):
    clicks, title, answer = QUESTIONS[question]
    assert len(clicks) <= 3
    browser.opened(window, site / "index.html")
    for words in clicks:
        card = window.locator("article .sd-card", has_text=words)
        link = window.locator("article").get_by_role("link", name=words)
        (card if card.count() else link).first.click()
        window.wait_for_load_state()
    assert title in window.locator("h1").first.inner_text()
    assert answer in window.locator("article").inner_text()


def test_slides_fit_their_page(site, window):
    browser.opened(window, site / "slides" / "index.html")
    total = window.evaluate("() => Reveal.getTotalSlides()")
    assert total > 15
    for number in range(total):
        window.evaluate(f"() => Reveal.slide({number})")
        high, room = window.evaluate(
            "() => { const b = Reveal.getCurrentSlide().querySelector('.body') || "
            "Reveal.getCurrentSlide(); return [b.scrollHeight, Math.max(b.clientHeight, 800)] }"
        )
        assert high <= room, f"slide {number + 1}: {high} of {room} pixels"
        wide = window.evaluate(
            "() => [...Reveal.getCurrentSlide().querySelectorAll('img')].map(i => "
            "Math.min(i.offsetWidth, i.offsetHeight * i.naturalWidth / i.naturalHeight))"
        )
        assert all(w >= 640 for w in wide), f"slide {number + 1}: {wide} of 1280 pixels wide"
    assert not window.complaints
