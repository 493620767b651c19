"""The book: notebooks become pages without being executed, links and names lead somewhere, and a
real browser finds nothing wrong with any page."""

import ast
import csv
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import pytest
import test_play
from notebooks import ROOT

from hmoe_repro.method.gating import gate_values
from hmoe_repro.report.readme import item_status
from hmoe_repro.report.render import files_of
from hmoe_repro.training import selection

BOOK = ROOT / "docs" / "book"
NEEDED = ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_design", "sphinx_revealjs")
sys.path.append(str(BOOK))
import cells  # noqa: E402
import docstrings  # noqa: E402
import finish  # noqa: E402
import formulas  # noqa: E402
import names  # noqa: E402
import slides  # noqa: E402
import sources  # noqa: E402

GATING = "nbs/01_method/03_gating.ipynb"
HMOE = "nbs/01_method/04_hmoe.ipynb"


def test_a_picture_that_slides_enlarge_is_drawn_with_vectors():
    (drawn,) = [c for c in names.cells_of(names.START) if c["id"] == "figure-hmoe-drawing"]
    (output,) = drawn["outputs"]
    svg = "".join(output["data"]["image/svg+xml"])
    assert "image/png" in output["data"]
    assert "<path" in svg
    assert "<image" not in svg
    assert len(svg) < 300_000


def test_a_name_has_its_cell_and_its_equations():
    assert len(names.library()) > 800
    name = names.library()["hmoe_repro.method.gating.gate_values"]
    assert name.cell == "nbs-01-method-03-gating--def-gate-values"
    assert name.page == "nbs/01_method/03_gating"
    assert name.equations == ["hmoe-eq-2"]
    assert "hmoe_repro.method.hmoe.HMOE.predict" in names.library()


@pytest.mark.parametrize(
    "text, numbers", [("4", [4]), ("3 to 8", [3, 4, 5, 6, 7, 8]), ("1, 3 and 5 to 6", [1, 3, 5, 6])]
)
def test_ranges_of_equations_are_expanded(text, numbers):
    assert names.cited(f"Losses (HMOE, eqs. {text}).") == [f"hmoe-eq-{n}" for n in numbers]


@pytest.mark.parametrize(
    "text, made",
    [
        ("[r](03_gating.ipynb)", "[r](/nbs/01_method/03_gating.ipynb)"),
        ("[eq. 4](03_gating.ipynb#hmoe-eq-4)", "[eq. 4](/nbs/01_method/03_gating.ipynb#hmoe-eq-4)"),
        ("[t](../../docs/example_study.toml)", "[t](/docs/example_study.toml)"),
        ("[page](../paper/hmoe_fig3.ipynb)", "[page](/figures/quick/hmoe_fig3.ipynb)"),
        ("[not run](../paper/hmoe_table6.ipynb)", "[not run](/nbs/paper/hmoe_table6.ipynb)"),
        ("[gone](../nowhere.ipynb)", "gone"),
        ("[here](#At-distance-zero)", "[here](#at-distance-zero)"),
        ("[out](https://example.org)", "[out](https://example.org)"),
        ("```\n[x](nowhere)\n```", "```\n[x](nowhere)\n```"),
        ('<a id="hmoe-eq-4"></a>\n', "(hmoe-eq-4)=\n\n"),
    ],
)
def test_links_of_a_text(text, made):
    assert cells.markdown(HMOE, text) == made


@pytest.mark.parametrize(
    "pages, status",
    [
        (("dmg_table1",), "not run"),  # DomainNet
        (("dmg_table3",), "stand-in"),  # DomainNet in the paper; digits and PACS here
        (("dmg_table2",), "reduced"),  # PACS, at a low resolution
        (("hmoe_table4",), "full (3 seeds)"),  # the digits and reduced MNIST have pages, too
        (("hmoe_fig3",), "full"),
        (("hmoe_table6",), "not run"),
        (("gmoe_table16",), "reduced"),  # a measurement, of no data set
    ],
)
def test_what_was_run_on_other_data_alone_is_a_stand_in(pages, status):
    assert item_status(pages)[0] == status


@pytest.fixture(scope="module")
def gating():
    "The page of a notebook with everything: equations, exports, pictures, answers."
    return json.loads(cells.notebook(GATING))["cells"]


def test_no_directive_is_left_and_nothing_is_lost(gating):
    code = "\n".join(c["source"] for c in gating if c["cell_type"] == "code")
    assert "#|" not in code
    for cell in (c for c in names.cells_of(GATING) if c["cell_type"] == "code"):
        if cell["source"].startswith("#| hide"):
            continue
        assert names.DIRECTIVE.sub("", cell["source"]).strip() in code, cell["id"]


def test_a_cell_says_where_it_is_exported_and_an_equation_leads_to_its_cell(gating):
    label = "nbs-01-method-03-gating--def-load-balance-loss"
    texts = [c["source"] for c in gating]
    line = next(text for text in texts if text.startswith(f"({label})="))
    assert "{py:mod}`hmoe_repro.method.gating`: `LOAD_BALANCES`, `load_balance_loss`" in line
    assert "[eq. 4 of HMOE](#hmoe-eq-4)" in line
    assert f"[`load_balance_loss`](#{label})" in next(t for t in texts if "(hmoe-eq-4)=" in t)


def test_the_index_table_and_the_equations_name_each_other():
    "What the page of symbols names for an equation stands under the equation."
    table = names.text_of(names.INDEX)
    rows = [row for row in table.splitlines() if re.search(r"#\w+-eq-\d+\)", row)]
    assert len(rows) == 11
    for row in rows:
        anchor = re.search(r"#(\w+-eq-\d+)\)", row)[1]
        said = cells.computed_by(f'<a id="{anchor}"></a>')
        for word in re.findall(r"`([\w.]+)`", row):
            assert f"`{word.split('.', 2)[-1]}`" in said, (anchor, word)


def test_pictures_are_described_and_folds_hide_what_they_should(gating):
    drawn = [c for c in gating if c["cell_type"] == "code" and cells.is_picture(c)]
    alts = [c["metadata"]["mystnb"]["image"]["alt"] for c in drawn]
    assert "Gate values in the plane" in alts
    assert len(set(alts)) == len(alts)
    assert all(alts)
    assert all("hide-input" in c["metadata"]["tags"] for c in drawn)
    tags = {c["source"].strip(): c["metadata"].get("tags") for c in gating}
    answers = [c for c in names.cells_of(GATING) if c["id"].startswith("answer")]
    codes = [c["source"].strip() for c in answers if c["cell_type"] == "code"]
    assert codes
    assert all(tags[code] == ["hide-cell"] for code in codes)


def test_a_page_of_evidence_has_its_data_its_profile_and_its_pictures():
    page = "figures/quick/digits_table.ipynb"
    text = "".join(c["source"] for c in json.loads(cells.notebook(page))["cells"])
    assert "<profile>" not in text
    made = json.loads(cells.notebook("figures/quick/dmg_table2.ipynb"))["cells"]
    assert made[0]["source"].startswith("# DMG Tables 2 and 6: an unknown domain, PACS · embedded")
    page = "figures/quick/hmoe_fig3.ipynb"
    placed = cells.saved_pictures(page, names.cells_of(page))
    assert placed["picture-errors"] == ["hmoe_fig3_errors.png"]
    text = "".join(c["source"] for c in json.loads(cells.notebook(page))["cells"])
    assert "![With and without the entropy loss (2) hmoe_fig3_errors](hmoe_fig3_errors.png)" in text
    made = json.loads(cells.notebook(page))["cells"]
    pictures = [c["source"] for c in made if c["source"].startswith("![")]
    assert made[1]["source"].startswith("## Figure 3\n")
    assert "hmoe_fig3.png" in pictures[0]


@pytest.mark.parametrize("folder", sorted((ROOT / "figures").iterdir()), ids=lambda f: f.name)
def test_the_book_shows_each_picture_of_a_page_once(folder):
    for name, files in files_of(folder).items():
        page = f"figures/{folder.name}/{name}.ipynb"
        text = "\n".join(c["source"] for c in json.loads(cells.notebook(page))["cells"])
        shown = re.findall(r"^!\[.+\]\((.+\.png)\)$", text, re.M)
        assert sorted(map(unquote, shown)) == [f for f in files if f.endswith(".png")], page


def test_the_lines_of_the_page_on_installing_run():
    "What they say of shapes and losses is true, and the wheel is the one that is pinned."
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    found = {}
    exec(code, found)
    assert found["logits"].shape == (1, 10)
    assert all(isinstance(value, float) for value in found["losses"].values())
    wheel = re.search(r"torch==[\d.]*\d", text)[0]
    assert wheel in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_path_has_the_numbers_of_its_table_and_each_page_leads_to_the_next():
    "Its last section names the page that the table of the path has next, before any other."
    numbers = [int(number) for number in names.reading_path().values() if number]
    path, lost = list(names.reading_path()), []
    for page, following in zip(path[1:], path[2:]):
        texts = [c["source"] for c in names.cells_of(page)]
        (last,) = [t for t in texts if t.startswith("## Where this goes next")] or [""]
        found = re.search(r"\]\(([^)#]+)\.ipynb", last)
        if page.startswith("nbs/") and (not found or Path(found[1]).name != Path(following).stem):
            lost.append((page, following, found and found[1]))
    assert len(path) == 20
    assert numbers == list(range(1, 20))
    assert not lost


# The slides of the class, made without the site.


@pytest.fixture(scope="module")
def class_slides():
    "All slides of the class but its title."
    return slides.slides_of_class()


def words(slide):
    "What can be read on a slide, but its title and its question."
    found = [cell["source"] for cell in slide.cells if "remove-input" not in str(cell["metadata"])]
    for output in (o for cell in slide.cells for o in cell.get("outputs", [])):
        data = output.get("data", {})
        shown = data.get("text/markdown") or data.get("text/plain") or output.get("text", "")
        found.append("".join(shown))
    return re.sub(r"\s+", " ", unescape(" ".join(found))).strip()


# How a question of the plan begins: what is said or shown in its answer, and not before.
ANSWERS = {
    "Which of the three methods": "needed in training",
    "Will one network fail": "of the single network",
    "What happens with the entropy loss alone": "trivial solution",
    "And with the load balance alone": "one expert for all, or no decision",
    "Which loss teaches": "L_ad encoder, adversary",
    "Do you believe": "identifies the toy's three intervals",
    "Which rows differ": "differs significantly from ERM in average accuracy",
    "Which checkpoint does each rule": "training-domain 100 0.2",
}


def test_every_question_stands_before_its_answer(class_slides):
    asked = [question for part in slides.plan() for question in part.questions]
    assert [s.question for s in class_slides if s.question] == asked
    assert [next(q for q in asked if q.startswith(start)) for start in ANSWERS] == asked
    texts = [words(s) for s in class_slides]
    for start, answer in ANSWERS.items():
        place = next(i for i, s in enumerate(class_slides) if s.question.startswith(start))
        assert place < next(i for i, text in enumerate(texts) if answer in text), start


def test_every_part_begins_with_its_minutes(class_slides):
    parts = slides.plan()
    times = [part.minutes.split("–") for part in parts]
    assert times[0][0] == "0"
    assert times[-1][1] == "90"
    assert all(before[1] == after[0] for before, after in zip(times, times[1:]))
    opening = [s for s in class_slides if s.opens]
    assert [s.opens for s in opening] == [f"Minute {p.minutes}: {p.happens}" for p in parts]
    assert [s.page for s in opening] == [p.pages[0] for p in parts]
    assert class_slides[0].opens
    assert class_slides[-1].title == "To take home"


def test_every_slide_has_notes_whose_minutes_are_those_of_the_plan(class_slides):
    notes = slides.speaker_notes()
    assert [n.title for n in notes] == [slides.TITLE, *(s.title for s in class_slides)]
    assert [n.number for n in notes] == [*range(1, len(notes) + 1)]
    assert all(len(n.text.split()) >= 12 for n in notes)
    begins = [i for i, s in enumerate(class_slides, 1) if s.opens]
    begins[0] = 0  # the first part has the title too
    for part, first, last in zip(slides.plan(), begins, [*begins[1:], None], strict=True):
        start, end = map(int, part.minutes.split("–"))
        assert sum(n.minutes for n in notes[first:last]) == end - start, part.minutes
        assert f"## Minute {part.minutes}\n" in (ROOT / slides.NOTES).read_text(encoding="utf-8")
    assert slides.deck().count("revealjs-notes") == len(notes)


# What the answers to the exercises of the gate's slide say, and no slide.
EXERCISE_ANSWERS = ("0.953", "0.562", "0.824")


def test_no_slide_answers_an_exercise_that_is_set(class_slides):
    answers = " ".join(c["source"] for c in names.cells_of(GATING) if "answer" in c["id"])
    assert all(number in answers for number in EXERCISE_ANSWERS)
    (exercises,) = [s for s in class_slides if s.title == "Exercises"]
    assert "four experts" in words(exercises)
    assert not [n for s in class_slides for n in EXERCISE_ANSWERS if n in words(s)]


def test_no_slide_is_empty_crowded_or_named_as_its_neighbour(class_slides):
    for slide, after in zip(class_slides, [*class_slides[1:], None]):
        where = f"{slide.page}: {slide.title}"
        pictures = "![" in words(slide) or any(map(cells.is_picture, slide.cells))
        assert slide.question or pictures or len(words(slide)) > 100, where
        assert len(words(slide)) <= 2000, where
        assert not after or slide.title != after.title or slide.question, where


def test_the_code_of_the_class_is_shown():
    made = json.loads(cells.notebook("docs/class.ipynb"))["cells"]
    code = [cell for cell in made if cell["cell_type"] == "code"]
    assert len(code) > 8
    assert not [cell for cell in code if cell["metadata"]["tags"]]


def test_the_problem_and_the_rules_are_named(class_slides):
    texts = [words(s) for s in class_slides]
    first = texts[0]
    assert "Domain generalization* asks" in first
    assert "test domain" in first
    assert "ERM" in first
    part = " ".join(t for t, s in zip(texts, class_slides) if s.page.endswith("04_selection.ipynb"))
    assert all(rule in part for rule in ("training-domain validation", *selection.RULES[1:]))


DOCSTRING = """Return `a_b`s, times *two*.

    x = W * h

Args:
    a_b, c: weights of `shape
        (n,)`, summed.
    **more: options.

Returns:
    The product, and
    its sum.

Raises:
    HmoeError: `c` is 0.

>>> double_up(2) * 2
8"""


def test_sections_of_a_docstring_become_fields():
    assert docstrings.as_rst(DOCSTRING) == [
        r"Return `a_b`\ s, times \*two\*.",
        "",
        r"| x = W \* h",
        "",
        r":param a\_b/c: weights of `shape (n,)`, summed.",
        r":param \*\*more: options.",
        "",
        ":returns: The product, and its sum.",
        "",
        ":raises HmoeError: `c` is 0.",
        "",
        ">>> double_up(2) * 2",
        "8",
        "",
    ]


def library_docstrings():
    "(place, docstring) of everything in the library that has one."
    for path in sorted((ROOT / "hmoe_repro").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                if text := ast.get_docstring(node):
                    yield f"{path.name}: {getattr(node, 'name', 'module')}", text


def test_no_code_span_of_a_docstring_is_left_open():
    "In a formula, a list and a field each line or entry stands alone, so that a span ends in it."
    broken = []
    for place, text in library_docstrings():
        for line in docstrings.as_rst(text):
            separate = line.startswith(("| ", ":"))
            if separate and line.count("`") % 2:
                broken.append((place, line))
    assert not broken


@pytest.mark.slow
def test_docstrings_are_restructured_text():
    core = pytest.importorskip("docutils.core")
    messages = pytest.importorskip("docutils.nodes").system_message
    settings = {"report_level": 2, "halt_level": 5, "warning_stream": False}
    faults = []
    for place, text in library_docstrings():
        source = "\n".join(docstrings.as_rst(text))
        document = core.publish_doctree(source, settings_overrides=settings)
        faults += [(place, m.astext()) for m in document.findall(messages) if m["level"] > 1]
    assert not faults


TEXT = "## Title\n\nOne is\n\n$$a = b,$$\n\nif so. More.\n\nSecond.\n\n- a\n- b\n\n| x |"


def test_what_a_slide_keeps_of_a_text():
    kept = "One is\n\n$$a = b,$$\n\nif so. More.\n\n- a\n- b\n\n| x |"
    assert slides.shortened(TEXT, whole=False) == kept
    assert slides.shortened(TEXT, whole=True) == TEXT.removeprefix("## Title\n\n")


CODE = '''
def one(x):
    """Return x.

    Args:
        x: a number.
    """
    return x


def two():
    """Return 2."""
    return 2


class Three:
    """A three.

    It has a method.
    """

    def four(self):
        """Return 4."""
        text = """a

        b"""
        return 4

    def five(self):
        """Return 5.

        It is odd.
        """
        return 5


def six():
    """Return 6.

    It is even.
    """
    return 6
'''
SHOWN = '''
def one(x):
    """Return x."""
    return x


def two():
    """Return 2."""
    return 2


class Three:
    """A three."""

    def four(self):
        """Return 4."""
        text = """a

        b"""
        return 4

    def five(self):
        """Return 5."""
        return 5


def six():
    """Return 6."""
    return 6'''


def test_a_slide_shows_the_first_paragraph_of_a_docstring():
    assert slides.with_short_docstrings(CODE) == SHOWN
    assert slides.with_short_docstrings("%time f()\n\n") == "%time f()\n\n"


@pytest.mark.parametrize(
    "formula, text",
    [
        (r"\mathcal{L}_{en} = \frac{1}{N}\sum_i H(p_i)", "L_en = 1/N∑_i H(p_i)"),
        (r"\frac{1/(d_k^2 + \epsilon)}{2}", "(1/(d_k^2 + ε))/2"),
        (r"v \in \{0, 1\}^{D \times 2}", "v ∈ {0, 1}^(D × 2)"),
        (r"\bar g_d, \quad \lVert x \rVert", "ḡ_d, ‖ x ‖"),
        (r"\sqrt n \log \big(a\big)", "√n log (a)"),
    ],
)
def test_formulas_as_text(formula, text):
    assert formulas.plain(formula) == text


def test_every_formula_of_the_notebooks_becomes_text():
    texts = [c["source"] for page in names.library_notebooks() for c in names.cells_of(page)]
    found = [f for text in texts for f in re.findall(r"\$\$(.+?)\$\$", text, re.S)]
    assert len(found) > 80
    assert not [f for f in found if re.search(r"\\|\bfrac|\bmath", formulas.plain(f))]


def test_the_text_of_a_page_for_the_search():
    page = """<article><h1>Gating</h1><div class="runline"><p>run it</p></div>
      <p>A <code>gate</code>s value <span class="math notranslate">\\(p_k &lt; 1\\)</span>.</p>
      <pre>code</pre><details><summary>Show the code</summary><p>More.</p></details></article>"""
    assert finish.text_of(page) == "A gates value p_k < 1. More."


@pytest.mark.parametrize(
    "page, source, notebook",
    [
        ("index", "docs/book/index.md", ""),
        ("docs/install", "docs/install.md", ""),
        ("README", "README.md", ""),
        (GATING[:-6], GATING, GATING),
        ("figures/quick/hmoe_fig3", "nbs/paper/hmoe_fig3.ipynb", "figures/quick/hmoe_fig3.ipynb"),
        ("figures/quick/README", "figures/quick/README.md", ""),
        ("nbs/01_method", "docs/notebooks.md", ""),
        ("api/hmoe_repro.method.gating", GATING, ""),
        ("every_command", "nbs/11_cli/08_app.ipynb", ""),
        ("search", "", ""),
    ],
)
def test_the_source_of_a_page(page, source, notebook):
    assert (sources.source_of(page), sources.notebook_of(page)) == (source, notebook)


def test_buttons_lead_to_the_repository_of_the_settings():
    edit, download = sources.buttons(GATING[:-6])
    assert edit["url"] == f"https://github.com/hmoe-repro/hmoe_repro/edit/main/{GATING}"
    assert download["url"] == "03_gating.ipynb"


def test_no_page_for_students_names_the_solutions():
    told = (ROOT / "docs/class_homework.md").read_text(encoding="utf-8")
    told += (ROOT / "docs/class.ipynb").read_text(encoding="utf-8")
    told += (BOOK / "index.md").read_text(encoding="utf-8")
    assert "class_solutions" not in told
    assert "class_solutions" in (ROOT / "docs/class_plan.md").read_text(encoding="utf-8")


# The site itself, where Sphinx is installed: `make book` installs it.


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The folder of the built book: HMOE_BOOK, or a new one."
    if built := os.environ.get("HMOE_BOOK"):
        return Path(built).resolve()
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
    "gallery",
    "reference",
    "api/hmoe_repro.method.gating",
    "every_command",
    "docs/symbols",
    "search",
    "docs/class_plan",
    "play",
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
    assert len(marks) > 300, broken[:20]
    assert not broken, broken[:20]


def test_the_site_is_small_and_nothing_else_is_left(site):
    assert [path.name for path in site.parent.iterdir()] == ["html"]
    assert finish.size_of(site) < 70e6
    unused = [p for pattern in finish.UNUSED for p in site.glob(pattern) if p.is_file()]
    assert {path.name for path in unused} == set(finish.KEPT)


def test_no_page_shows_what_a_machine_wrote_to_stderr(site):
    pages = {p.name for p in html_pages(site) if "output stderr" in p.read_text(encoding="utf-8")}
    assert not pages


def test_names_and_the_reference_lead_to_each_other(site):
    notebook = (site / "nbs/01_method/03_gating.html").read_text(encoding="utf-8")
    assert "api/hmoe_repro.method.gating.html#hmoe_repro.method.gating.gate_values" in notebook
    reference = (site / "api/hmoe_repro.method.gating.html").read_text(encoding="utf-8")
    assert "03_gating.html#nbs-01-method-03-gating-def-gate-values" in reference
    assert "03_gating.html#hmoe-eq-2" in reference
    *_, last_sentence = inspect.getdoc(gate_values).split(". ")
    assert last_sentence in reference


def test_a_page_leads_to_its_source(site):
    text = (site / "nbs/01_method/03_gating.html").read_text(encoding="utf-8")
    assert f'href="{sources.repository()}/{GATING}"' in text
    assert 'href="03_gating.ipynb"' in text
    copied = json.loads((site / GATING).read_text(encoding="utf-8"))["cells"]
    assert [c["source"] for c in copied] == [
        c["source"] for c in json.loads((ROOT / GATING).read_text(encoding="utf-8"))["cells"]
    ]
    assert not [c for c in copied if c.get("outputs")]


def navigation(path):
    "The bar at the left of a page."
    text = path.read_text(encoding="utf-8")
    return text.partition("bd-sidebar-primary")[2].partition("<main")[0]


def test_the_navigation_has_the_commands_and_not_the_solutions(site):
    for name in ("index", "docs/class_homework", "docs/class", "play"):
        assert re.search(r">\s*CLI: every command\s*<", navigation(site / f"{name}.html"))
        assert "class_solutions" not in (site / f"{name}.html").read_text(encoding="utf-8"), name
    assert "class_solutions" in navigation(site / "docs/class_plan.html")
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    terms = index.partition('"terms":')[2]
    assert '"clopper"' in terms or "clopper" in terms
    assert "<title>CLI" in (site / "nbs/11_cli.html").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("words", ["load balance", "log_gate_values"])
def test_the_search_finds(site, window, words):
    browser.opened(window, site / "search.html", f"?q={words.replace(' ', '+')}")
    window.wait_for_selector("#search-results li a", timeout=20_000)
    hits = window.eval_on_selector_all("#search-results li a", "all => all.map(a => a.href)")
    assert any("gating" in hit for hit in hits), hits
    # A page opened from a file may not read the others: their texts come with the search.
    window.wait_for_selector("#search-results li p.context", timeout=20_000)
    quoted = window.eval_on_selector_all(
        "#search-results p.context", "all => all.map(p => p.innerText)"
    )
    assert any(words.split()[0] in text.lower() for text in quoted), quoted


def test_excerpts_of_the_search_have_no_marks(site):
    text = (site / "_static/search_texts.js").read_text(encoding="utf-8")
    texts = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    marks = re.compile(
        r"\\(?:[(\[]|frac|math|sum|lambda|log|left)|</?(?:p|span|div|em|code|a)\b"
        r"|&(?:lt|gt|amp);| object at 0x"
    )
    assert len(texts) > 300
    assert not {page: marks.findall(text) for page, text in texts.items() if marks.search(text)}
    assert "L_en" in texts["nbs/01_method/03_gating.html"]


@pytest.mark.parametrize("width", [1280, 1920])
def test_a_table_of_accuracies_shows_all_its_columns(site, window, width):
    window.set_viewport_size({"width": width, "height": 1000})
    browser.opened(window, site / "figures/pacs/hmoe_table7.html")
    table = window.locator("article table").first
    place = table.locator("xpath=..")
    assert place.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    assert table.evaluate("e => e.scrollWidth <= e.clientWidth + 1")


def test_a_wide_window_is_used_and_lines_stay_short(site, window):
    window.set_viewport_size({"width": 1920, "height": 1000})
    browser.opened(window, site / "nbs/01_method/03_gating.html")
    bar = window.locator(".bd-sidebar-secondary").bounding_box()
    assert bar["x"] + bar["width"] > 1900
    text = window.locator("article section > p").nth(1)
    letters = text.evaluate("e => e.clientWidth / (parseFloat(getComputedStyle(e).fontSize) * 0.5)")
    assert 60 < letters < 95
    code = window.locator("article .cell_input").nth(1).bounding_box()
    left, right = code["x"] - 248, bar["x"] - code["x"] - code["width"]
    assert abs(left - right) < 120  # the column stands in the middle


def test_folded_answers_open(site, window):
    browser.opened(window, site / "nbs/01_method/03_gating.html")
    folds = window.locator("details", has_text="Answer to 1").first
    assert not folds.evaluate("e => e.open")
    folds.locator("summary").first.click()
    assert folds.evaluate("e => e.open")
    assert "0.953" in folds.inner_text()


QUESTIONS = {
    "What is HMOE?": (["What is HMOE?"], "Start here", "An image takes two paths."),
    "Where is equation 4 computed?": (
        ["Where is an equation computed?", "eq. 4", "load_balance_loss"],
        "Gating",
        "math.log(load.shape[-1]) - entropy(load)",
    ),
    "What is the code of equation 2?": (
        ["Where is an equation computed?", "eq. 2"],
        "Gating",
        "F.log_softmax(-torch.log(d2 + eps), dim=-1)",
    ),
    "Does it work?": (["Does it work?"], "Claims", "Does HMOE find the domains"),
    "Is Table 5 reproduced?": (["Is it reproduced?"], "Is it reproduced?", "RotatedMNIST"),
    "How do I add an algorithm?": (["How do I add an algorithm?"], "An algorithm", "hmoe sweep"),
    "Can I run it on my own images?": (
        ["Run it on my own images"],
        "Your own data",
        "hmoe discover path/to/my_images",
    ),
    "Where can I play?": (["Play with it"], "Play with it", "Drag the three embeddings"),
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


def test_the_front_page_begins_with_a_picture_and_its_cards(site, window):
    window.set_viewport_size({"width": 400, "height": 900})
    browser.opened(window, site / "index.html")
    cards = window.locator("article .sd-card")
    picture = window.locator("article img").first.bounding_box()
    assert picture["y"] < cards.first.bounding_box()["y"] < 680
    titles = cards.locator(".sd-card-title").all_inner_texts()[:3]
    assert titles == ["What is HMOE?", "Does it work?", "Where is an equation computed?"]


def test_slides_fit_their_page(site, window):
    window.set_viewport_size({"width": 1280, "height": 800})
    browser.opened(window, site / "slides" / "class.html")
    total = window.evaluate("() => Reveal.getTotalSlides()")
    assert total > 15
    assert window.locator(".reveal mjx-container").count() > 15
    for number in range(total):
        window.evaluate(f"() => Reveal.slide({number})")
        high = window.evaluate("() => Reveal.getCurrentSlide().scrollHeight")
        assert high <= 800, f"slide {number + 1}: {high} of 800 pixels"
        wide = window.evaluate(
            "() => [...Reveal.getCurrentSlide().querySelectorAll('img')].map(i => "
            "Math.min(i.offsetWidth, i.offsetHeight * i.naturalWidth / i.naturalHeight))"
        )
        assert all(w >= 640 for w in wide), f"slide {number + 1}: {wide} of 1280 pixels wide"
        assert window.evaluate(browser.SLIDE) == [], f"slide {number + 1}"
    assert not window.complaints


def test_the_page_of_fig_3_begins_with_the_figure(site, window):
    window.set_viewport_size({"width": 1400, "height": 900})
    browser.opened(window, site / "figures/quick/hmoe_fig3.html")
    picture = window.locator("article img").first
    assert picture.get_attribute("alt").startswith("Figure 3")
    assert picture.bounding_box()["y"] < 750


# The page to play with.


@pytest.fixture(params=browser.WIDTHS)
def played(site, window, request):
    "The page to play with, fresh, at each width; nothing on it is wider than the window."
    window.set_viewport_size({"width": request.param, "height": 900})
    browser.opened(window, site / "play.html")
    yield window
    assert window.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    assert not window.complaints


def middle(window, selector):
    "The middle of an element, which is scrolled into view."
    element = window.locator(selector)
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def value(window, name):
    "A number of the gate's page, such as 'p1' or 'L_en'."
    return float(window.locator(f'#play-gate [data-value="{name}"]').inner_text())


def test_a_dragged_code_changes_its_gate(played):
    before = value(played, "p1")
    assert before > 0.9
    x, y = middle(played, '[data-name="v1"] .play-code')
    assert played.locator('[data-name="e2"] rect').is_visible()
    played.mouse.move(x, y)
    played.mouse.down()
    to = played.locator('[data-name="e2"] rect').bounding_box()
    played.mouse.move(to["x"] + to["width"] / 2, to["y"] + to["height"] / 2, steps=5)
    played.mouse.up()
    assert value(played, "p2") > 0.99
    assert value(played, "P1") < 0.3
    played.locator('[data-name="v1"]').focus()
    for _ in range(5):
        played.keyboard.press("ArrowUp")
    assert value(played, "p2") < 0.98


def test_a_finger_drags_an_embedding(played):
    before = value(played, "p1")
    x, y = middle(played, '[data-name="e1"] text')
    y -= 0.5 * played.locator(".play-plane").bounding_box()["height"] / 16
    touch = played.context.new_cdp_session(played)
    touch.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    for kind, points in (
        ("touchStart", [{"x": x, "y": y}]),
        ("touchMove", [{"x": x + 30, "y": y - 60}]),
        ("touchMove", [{"x": x + 60, "y": y - 90}]),
        ("touchEnd", []),
    ):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    touch.send("Emulation.setTouchEmulationEnabled", {"enabled": False})
    assert value(played, "p1") < before - 0.05


def test_only_the_softmax_of_distances_has_a_scale(played):
    stretch = played.get_by_label("stretch").first
    gates = {}
    for kind in ("paper", "square"):
        played.locator("#play-gate select").select_option(kind)
        for power in ("0", "-1"):
            stretch.fill(power)
            gates[kind, power] = value(played, "p1")
    assert gates["paper", "0"] == gates["paper", "-1"]
    assert gates["square", "0"] > 0.9 > 0.5 > gates["square", "-1"]
    played.locator("#play-gate select").select_option("paper")
    played.get_by_label("ε").first.fill("2")
    assert value(played, "L_en") > 1
    assert value(played, "L_kl") < 0.01
    stretch.fill("0")
    played.get_by_label("ε").first.fill("-6")
    played.get_by_role("button", name="all at one expert").click()
    assert value(played, "L_en") < 0.5 < value(played, "L_kl")


def test_the_gate_in_a_browser_is_that_of_the_library(site, window):
    browser.opened(window, site / "play.html")
    given = test_play.cases()
    found = window.evaluate(f"cases => {test_play.COMPUTED}", given)
    test_play.assert_equals_the_library(found, given)


def test_the_reader_counts_the_seeds_of_the_film(played):
    film = played.locator("#play-film")
    picture = film.locator("canvas")
    for button in ("✓ found", "✗ not found", "✓ found"):
        film.get_by_role("button", name=button, exact=True).click()
    assert "You: 2 found of 3 judged, of 60 seeds." in film.inner_text()
    assert film.locator("output").first.inner_text() == "3"
    with open(ROOT / "figures/quick/hmoe_fig3_summary.csv", encoding="utf-8", newline="") as file:
        rule = next(csv.DictReader(file))["intervals found"]
    assert rule not in film.inner_text()
    film.get_by_role("button", name="compare with the rule").click()
    assert f"Fig. 3: {rule}." in film.inner_text()
    last = picture.evaluate("c => c.toDataURL()")
    film.get_by_label("epoch").fill("0")
    assert picture.evaluate("c => c.toDataURL()") != last
    film.get_by_role("button", name="play the epochs").click()
    played.wait_for_function(
        "() => document.querySelectorAll('#play-film output')[1].textContent === '20,000'"
    )
    assert picture.evaluate("c => c.toDataURL()") == last
    film.locator("select").select_option("L_y alone")
    assert "0 judged, of 6 seeds" in film.inner_text()


def test_the_map_shows_the_image_of_a_code(played):
    place = played.locator("#play-map")
    shown = "c => new Set(c.getContext('2d').getImageData(0, 0, 128, 128).data).size"
    picture, image = place.locator("canvas").first, place.locator(".play-image")
    assert image.evaluate(shown) == 1
    assert "Point at a code" in place.inner_text()
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    for step in range(400):  # until it comes by a code
        row, column = divmod(step, 20)
        played.mouse.move(
            box["x"] + (column + 0.5) * box["width"] / 20,
            box["y"] + (row + 0.5) * box["height"] / 20,
        )
        if "gate values" in place.inner_text():
            break
    assert image.evaluate(shown) > 5
    assert re.search(r"\w+, digit \d, expert \d", place.inner_text())
    before = image.evaluate("c => c.toDataURL()")
    picture.focus()
    played.keyboard.press("ArrowRight")
    assert image.evaluate("c => c.toDataURL()") != before
    runs = place.locator("option").all_inner_texts()
    assert any(": found" in run for run in runs)
    assert any("not found" in run for run in runs)
    for colour, named in (
        ("class", "digit 9"),
        ("expert", "expert 3"),
        ("kmeans", "k-means group 3"),
    ):
        place.locator("select").nth(1).select_option(colour)
        assert named in place.locator(".play-legend").inner_text()
