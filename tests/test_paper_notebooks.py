"""Paper notebooks and the machine that renders them:
parameters, all or nothing, the same bytes twice, gallery."""

import ast
import json
import re
from pathlib import Path

import invented
import nbformat
import papermill
import pytest
from commands import hmoe
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from hmoe_repro.core.errors import HmoeError
from hmoe_repro.report.gallery import browsable, gallery, title_and_claim
from hmoe_repro.report.render import (
    KINDS,
    artefacts,
    files_of,
    from_root,
    hide_outside,
    page_texts,
    paper_notebook,
    render,
)
from hmoe_repro.studies import studies
from hmoe_repro.studies.artefacts import ARTEFACTS
from hmoe_repro.studies.study_file import PROFILES

pytestmark = pytest.mark.usefixtures("warm_kernels")
OURS = ("digits_table", "digits_fig5", "learning_curves", "digits_balance")
OURS_IN_ORDER = sorted(OURS)
STUDIES = {"digits_balance": "quick-balance"}  # the others: quick-digits
PARAMETERS = """\
profile: str = "smoke"  # smoke | quick
store: str = ""  # a folder of study files
output: str = ""  # a folder
rate: float = 0.5  # a number
seeds: list = [0, 1]  # trial seeds
fast: bool = False  # a switch
count: int = 3  # how many"""
WRITE = """\
from hmoe_repro.report.provenance import output_folder
folder = output_folder(output, profile)
(folder / 'page.csv').write_text(f'{profile} {rate} {seeds} {fast} {count}')
(folder / 'page_more.md').write_text('**More**\\n\\n| a |\\n|---|\\n| 1 |\\n')"""


def notebook(folder, name="page", cells=(WRITE, "profile"), parameters=(PARAMETERS,), kernel=True):
    "A small paper notebook."
    folder.mkdir(exist_ok=True)
    body = (
        [new_markdown_cell("# A page\n\n> Claim checked: none.")]
        + [new_code_cell(p, metadata={"tags": ["parameters"]}) for p in parameters]
        + [new_code_cell(c) for c in cells]
    )
    for number, cell in enumerate(body):
        cell.id = f"cell-{number}"
    metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3" if kernel is True else kernel,
        }
    }
    nbformat.write(new_notebook(cells=body, metadata=metadata), folder / f"{name}.ipynb")
    return folder


def snapshot(folder):
    "Names and contents of everything below a folder."
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


# Our paper notebooks


def parameters_of(name):
    "Name -> (default, a literal; help) of the parameters of a page."
    found = papermill.inspect_notebook(str(paper_notebook(name)))
    return {n: (ast.literal_eval(p["default"]), p["help"]) for n, p in found.items()}


def test_every_artefact_has_exactly_the_agreed_parameters():
    first = {  # `quick`, which is committed and says something, before `smoke`
        name: next(p for p in artefact.profiles if p != "smoke")
        for name, artefact in ARTEFACTS.items()
    }
    first["study"] = "smoke-digits"  # of any study the profile is its name
    assert set(OURS) <= set(artefacts())
    for name in artefacts():
        found = parameters_of(name)
        assert {"profile", "store", "output"} <= set(found)
        assert found["profile"][0] == first[name]
        assert found["store"][0] == ""
        assert found["output"][0] == ""
        title, claim = title_and_claim(paper_notebook(name))
        assert title, name
        assert claim, name


def sources(name):
    "The code of a paper notebook as one text."
    return "\n".join(
        c.source for c in nbformat.read(paper_notebook(name), 4).cells if c.cell_type == "code"
    )


def test_every_page_is_an_artefact_and_every_artefact_a_page():
    assert set(artefacts()) == {*ARTEFACTS, "study"}  # the last shows any study


TRAINED = [
    name for name in ARTEFACTS if set(ARTEFACTS[name].profiles) <= set(PROFILES)
]  # the others are measured, such as speed


def opens(name):
    "Is the page opened with its own name?"
    return re.search(rf'Page\(\s*"{name}",\s*profile,\s*store,\s*output', sources(name))


@pytest.mark.parametrize("name", TRAINED)
def test_a_page_takes_the_profiles_and_the_study_of_its_artefact(name):
    artefact = ARTEFACTS[name]
    assert parameters_of(name)["profile"][1].split(" | ") == list(artefact.profiles)
    assert artefact.profiles[0] in PROFILES
    assert set(artefact.optional) <= set(artefact.profiles)
    assert all(artefact.study_at(p) in studies.STUDIES for p in artefact.profiles)
    assert opens(name) or f'artefact_study("{name}", profile)' in sources(name)


@pytest.mark.parametrize("name", TRAINED)
def test_a_page_leaves_its_evidence_and_nothing_under_another_name(name):
    text = sources(name)
    if opens(name):  # its steps use the name that it was opened with
        assert "page.verdict(" in text
        return
    assert re.search(rf'provenance\(\s*"{name}"', text)
    assert "header(profile, " in text
    stems = re.findall(r'save_(?:table|figure)\([^"]*?,\s*folder,\s*f?"([\w{}]+)"', text)
    assert name in stems, stems
    assert all(stem == name or stem.startswith(f"{name}_") for stem in stems), stems


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Our notebooks rendered from one invented study with a failed and a missing run,
    and two of them once more into another folder, in kernels whose hashes differ."""
    base = tmp_path_factory.mktemp("paper")
    runs = [
        r
        for r in invented.digits(seeds=(0, 1), domains=("photo", "sketch"))
        if not (r["config"]["algorithm"] == "HMOE-ND" and r["config"]["test_domains"] == ["sketch"])
    ]
    invented.write_study(
        base / "store",
        "quick-digits",
        runs + [invented.failed("HMOE-ND", "sketch", 1)],
        with_arrays=(0,),
    )
    invented.write_study(
        base / "store",
        "quick-balance",
        invented.balance() + [invented.failed("HMOE-DN", "photo", 2, lambda_kl=1.0)],
    )
    for folder, names in (("one", OURS), ("two", OURS[1:3])):
        with pytest.MonkeyPatch.context() as patch:
            if folder == "two":
                patch.delenv("JUPYTER_PATH", raising=False)  # ordinary kernels
            for name in names:
                render(
                    name,
                    "quick",
                    store=base / "store",
                    output=base / folder / "figures",
                    formats=KINDS,
                )
        gallery("quick", base / folder / "figures", base / "store")
    return base


@pytest.mark.slow
def test_two_renders_are_the_same_to_the_byte(rendered):
    one, two = snapshot(rendered / "one"), snapshot(rendered / "two")
    twice = [name for name in one if Path(name).name.startswith(OURS[1:3])]
    assert len(twice) > 10
    assert twice == [n for n in two if n in twice]
    assert [name for name in twice if one[name] != two[name]] == []


@pytest.mark.parametrize("name", OURS)
def test_what_an_artefact_leaves(rendered, name):
    folder = rendered / "one" / "figures" / "quick"
    kinds = {file.removeprefix(name + ".") for file in files_of(folder)[name]}
    assert {"ipynb", "png", "pdf", "csv", "md", "tex", "provenance.json"} <= kinds
    evidence = json.loads((folder / f"{name}.provenance.json").read_text())
    assert evidence["profile"] == "quick"
    assert evidence["study"] == STUDIES.get(name, "quick-digits")
    assert evidence["study_sha256"]
    assert len(evidence["run_ids"]) == evidence["records"] > 0
    lost = (
        invented.failed("HMOE-DN", "photo", 2, lambda_kl=1.0)
        if name == "digits_balance"
        else invented.failed("HMOE-ND", "sketch", 1)
    )
    assert evidence["failed"] == [lost["run_id"]]
    assert name != "digits_fig5" or "last update" in evidence["selection_rule"]


@pytest.mark.parametrize("name", OURS)
def test_the_executed_notebook_is_clean(rendered, name):
    text = (rendered / "one" / "figures" / "quick" / f"{name}.ipynb").read_text()
    page = nbformat.reads(text, 4)
    nbformat.validate(page)
    assert str(rendered) not in text
    assert "/tmp/" not in text
    assert set(page.metadata) == {"kernelspec", "hmoe_texts"}
    injected = [c for c in page.cells if "injected-parameters" in c.metadata.get("tags", [])]
    assert [c.id for c in injected] == ["injected-parameters"]
    assert "profile = 'quick'" in injected[0].source
    assert "output = '(outside)/figures'" in injected[0].source
    for cell in page.cells:
        assert set(cell.metadata) <= {"tags"}
        if cell.cell_type == "code":
            assert cell.execution_count is None
            assert all(o.output_type != "error" and o.get("name") != "stderr" for o in cell.outputs)


def test_the_table_page_says_what_it_is_and_what_is_missing(rendered):
    folder = rendered / "one" / "figures" / "quick"
    table = (folder / "digits_table.md").read_text()
    assert "stand-in" in table.splitlines()[0]
    assert "– (0/2)" in table
    page = (folder / "digits_table.ipynb").read_text()
    assert "HMOE-ND on sketch" in page
    assert "missing: HMOE-ND" in page
    assert "failed: HMOE-ND" in page
    assert "sketch, seed 1" in page
    assert "NaN loss" in page
    assert "not comparable" in page
    assert "stderr" in (folder / "digits_table.csv").read_text().splitlines()[0]


def test_the_discovery_page_shows_every_run(rendered):
    folder = rendered / "one" / "figures" / "quick"
    lines = (folder / "digits_fig5_runs.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * 2 * 2 - 2
    assert "nmi_domain" in lines[0]
    assert "ari_class" in lines[0]
    summary = (folder / "digits_fig5.md").read_text()
    assert "highest possible nmi" in summary
    assert "0.81" in next(line for line in summary.splitlines() if line.startswith("| HMOE-ND"))
    assert "at most 0.81" in (folder / "digits_fig5.ipynb").read_text()
    assert "photo (test)" in (folder / "digits_fig5_confusion.csv").read_text()


def test_the_gallery_shows_pictures_tables_and_links_that_exist(rendered):
    folder = rendered / "one" / "figures" / "quick"
    page = (folder / "README.md").read_text()
    assert "papers' protocol" in page
    assert page.count("\n| <img") == len(OURS)
    assert "`hmoe reproduce`" in page
    assert "`results/`" not in page
    pictures, pages = re.findall(r'src="([^"]+)"', page), re.findall(r"\]\(([^)#]+)\)", page)
    assert pictures
    assert all((folder / target).is_file() for target in pictures + pages)
    assert sorted(pages) == sorted(f"{name}.ipynb" for name in OURS)
    index = browsable(rendered / "one" / "figures", ["quick"])
    assert 'href="quick/index.html"' in index.read_text()
    sections = (folder / "index.html").read_text().split('<a id="')[1:]
    assert [section.partition('"')[0] for section in sections] == list(OURS_IN_ORDER)
    for name, section in zip(OURS_IN_ORDER, sections):
        assert "Verdict, computed" in section
        assert "<blockquote>" in section
        linked = set(re.findall(r'(?:href|src)="([^"#]+)"', section))
        assert linked
        assert all((folder / target).is_file() for target in linked)
        assert {f"{name}.png", f"{name}.csv", f"{name}.provenance.json"} <= linked


def test_the_gallery_of_published_records_says_so(tmp_path):
    folder = notebook(tmp_path / "quick")
    assert "`results/`" in gallery("quick", folder.parent).read_text()


def test_the_gallery_says_what_kind_of_study_each_profile_is(tmp_path):
    notes = {
        profile: gallery(profile, notebook(tmp_path / profile).parent).read_text().split("\n\n")[1]
        for profile in PROFILES
    }
    assert all(
        f"`{p}` is a" in notes[p] and "**stand-in**" in notes[p] and "papers' protocol" in notes[p]
        for p in ("smoke", "quick")
    )
    for p in ("mnist", "pacs"):
        assert f"`{p}` is **reduced**" in notes[p]
        assert "papers' protocol" in notes[p]
        assert "not be compared" in notes[p]
    assert notes["paper"].startswith("Profile `paper`")
    assert "**full**" in notes["paper"]
    assert "not be compared" not in notes["paper"]
    assert set(notes) == {"smoke", "quick", "mnist", "pacs", "paper"}


def test_pages_answer_their_question_in_computed_lines(rendered):
    folder = rendered / "one" / "figures" / "quick"
    curves, table = (
        (folder / "learning_curves.ipynb").read_text(),
        (folder / "digits_table.ipynb").read_text(),
    )
    assert "HMOE-DN: gate entropy" in curves
    assert "below a tenth" in curves
    assert "domain loss at" in curves
    assert "in average accuracy" in table
    assert "after Holm's correction" in table


def test_the_page_in_contributing_runs(root, tmp_path):
    import matplotlib.pyplot as plt

    text = (root / "docs" / "contributing.md").read_text(encoding="utf-8")
    page = re.search(r"```python\n(.*?)```", text, re.S)[1]
    assert len([x for x in page.splitlines() if x and not x.startswith(" ")]) <= 10
    exec(page.replace('output: str = ""', f"output: str = {str(tmp_path)!r}"), {})
    plt.close("all")
    made = {path.name for path in (tmp_path / "quick").iterdir()}
    assert {"digits_table.png", "digits_table.csv", "digits_table_verdict.md"} <= made


@pytest.mark.slow
def test_plain_papermill_refuses_an_unknown_parameter(root, tmp_path):
    page = root / "nbs" / "paper" / "hmoe_table4.ipynb"
    with pytest.raises(papermill.PapermillExecutionError, match="profil.*Valid: .*profile"):
        papermill.execute_notebook(
            str(page), str(tmp_path / "page.ipynb"), {"profil": "mnist"}, progress_bar=False
        )


@pytest.mark.slow
def test_plain_papermill_runs_a_paper_notebook(fresh_kernels, tmp_path, root, monkeypatch):
    from papermill import execute_notebook

    monkeypatch.delenv("HMOE_RESULTS", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    execute_notebook(
        str(root / "nbs" / "paper" / "digits_table.ipynb"),
        str(tmp_path / "plain.ipynb"),
        cwd=str(tmp_path),
        progress_bar=False,
        log_output=False,
    )
    page = (tmp_path / "plain.ipynb").read_text()
    assert "a stand-in" in page
    assert "injected-parameters" not in page
    assert list(tmp_path.glob("hmoe-*/digits_table.csv"))


def test_what_cannot_be_rendered_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("hmoe_repro.report.render.util.find_spec", lambda package: None)
    done = hmoe("reproduce", "hmoe_fig3", "--profile", "smoke", folder=tmp_path)
    assert done.returncode == 1
    assert "papermill ipykernel" in done.stderr
    assert not list(tmp_path.glob("runs/*/"))


def test_a_missing_study_is_one_line_with_the_fix(tmp_path):
    with pytest.raises(HmoeError, match="digits_table: .*'quick-digits'") as caught:
        render("digits_table", "quick", store=tmp_path, output=tmp_path / "figures")
    assert "`hmoe reproduce --profile quick`" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(snapshot(tmp_path / "figures")) == ["quick/digits_table.failed.log"]


# The machine


def test_parameters_arrive_with_their_types(tmp_path):
    notebooks = notebook(tmp_path / "nbs")
    page = render(
        "page",
        "quick",
        output=tmp_path / "figures",
        notebooks=notebooks,
        rate=2.0,
        seeds=[5],
        fast=True,
    )
    assert page == tmp_path / "figures" / "quick" / "page.ipynb"
    assert (page.parent / "page.csv").read_text() == "quick 2.0 [5] True 3"
    assert sorted(p.name for p in page.parent.iterdir()) == ["page.csv", "page.ipynb"]
    assert [p.name for p in page.parent.parent.iterdir()] == ["quick"]
    assert page_texts(page) == {"page_more.md": "**More**\n\n| a |\n|---|\n| 1 |\n"}
    assert snapshot(notebooks).keys() == {"page.ipynb"}


def test_a_failing_notebook_leaves_the_target_untouched(tmp_path):
    notebooks, figures = notebook(tmp_path / "nbs"), tmp_path / "figures"
    render("page", "quick", output=figures, notebooks=notebooks)
    before = snapshot(figures)
    notebook(
        notebooks,
        cells=(WRITE.replace("{profile}", "changed"), "def f(): raise KeyError('lost')", "f()"),
    )
    with pytest.raises(HmoeError, match="page: .*KeyError: 'lost'.*page.failed.log") as caught:
        render("page", "quick", output=figures, notebooks=notebooks)
    assert "\n" not in str(caught.value)
    after = snapshot(figures)
    log = after.pop("quick/page.failed.log").decode()
    assert after == before
    assert "KeyError" in log
    assert "\x1b" not in log
    notebook(notebooks)
    render("page", "quick", output=figures, notebooks=notebooks)
    assert snapshot(figures) == before


def test_files_that_are_no_longer_made_are_removed_and_no_others(tmp_path):
    notebooks, figures = notebook(tmp_path / "nbs"), tmp_path / "figures"
    notebook(notebooks, "page_two")
    folder = render("page", "quick", output=figures, notebooks=notebooks).parent
    for name in (
        "page_old.png",
        "page.tex",
        "page_two.csv",
        "page_two_old.png",
        "pages.png",
        "page_three.ipynb",
        "page_three.png",
        "README.md",
    ):
        (folder / name).write_text("kept")
    notebook(notebooks, cells=("1 / 0",))
    with pytest.raises(HmoeError):
        render("page", "quick", output=figures, notebooks=notebooks)
    assert (folder / "page_old.png").exists()
    notebook(notebooks)
    render("page", "quick", output=figures, notebooks=notebooks)
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "page.csv",
        "page.ipynb",
        "page_three.ipynb",
        "page_three.png",
        "page_two.csv",
        "page_two_old.png",
        "pages.png",
    ]


def test_formats_that_are_asked_for_are_written_and_later_removed(tmp_path):
    place = {"output": tmp_path / "figures", "notebooks": notebook(tmp_path / "nbs")}
    folder = render("page", "quick", formats=["csv", "md"], **place).parent
    assert {p.name for p in folder.iterdir()} == {"page.csv", "page.ipynb", "page_more.md"}
    render("page", "quick", **place)
    assert {p.name for p in folder.iterdir()} == {"page.csv", "page.ipynb"}
    with pytest.raises(HmoeError, match="format 'docx'") as caught:
        render("page", "quick", formats=["docx"], **place)
    assert list(caught.value.choices) == ["png", "pdf", "csv", "md", "tex"]


def test_a_kernel_that_does_not_exist_is_a_clear_error(tmp_path):
    with pytest.raises(HmoeError, match="page: .*NoSuchKernel"):
        render(
            "page",
            "quick",
            output=tmp_path / "figures",
            notebooks=notebook(tmp_path / "nbs", kernel="fortran"),
        )


def test_unknown_artefact_and_unwritable_output(tmp_path):
    notebooks = notebook(tmp_path / "nbs")
    with pytest.raises(HmoeError, match="artefact 'pag'") as caught:
        render("pag", "quick", output=tmp_path, notebooks=notebooks)
    assert list(caught.value.choices) == ["page"]
    (tmp_path / "file").write_text("")
    with pytest.raises(HmoeError, match="cannot write"):
        render("page", "quick", output=tmp_path / "file", notebooks=notebooks)


def test_paths_are_shown_without_the_machine(root, tmp_path):
    assert from_root(root / "results") == "results"
    assert from_root("figures") == "figures"
    assert from_root("") == ""
    assert hide_outside(str(tmp_path / "store")) == "(outside)/store"
    assert hide_outside("figures") == "figures"


def test_an_artefact_owns_the_files_of_its_name_only(tmp_path):
    for name in (
        "a.ipynb",
        "a_b.ipynb",
        "a.png",
        "a_b.png",
        "a_b_c.md",
        "a_x.csv",
        "ab.png",
        "a.failed.log",
        "README.md",
    ):
        (tmp_path / name).write_text("")
    assert files_of(tmp_path) == {
        "a": ["a.ipynb", "a.png", "a_x.csv"],
        "a_b": ["a_b.ipynb", "a_b.png", "a_b_c.md"],
    }
    assert files_of(tmp_path, ["a_x"])["a"] == ["a.ipynb", "a.png"]
    assert files_of(tmp_path, ["a_x"])["a_x"] == ["a_x.csv"]


def test_an_empty_gallery_says_what_to_do(tmp_path):
    with pytest.raises(HmoeError, match="profile 'quick'.*`make figures`"):
        gallery("quick", tmp_path)
