"""The class: its notebook needs nothing but itself, the numbers of its pages are computed, and the
handout is that of its source."""

import ast
import configparser
import json
import re
import sys

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from scipy.special import rel_entr
from scipy.stats import fisher_exact

from hmoe_repro.analysis.statistics import rate
from hmoe_repro.core.files import repo_root
from hmoe_repro.method.gating import entropy_loss, gate_values, load_balance_loss
from hmoe_repro.training.selection import RULES, select_model

DOCS = repo_root() / "docs"
sys.path.append(str(DOCS))
import class_handout  # noqa: E402
import class_slides  # noqa: E402

NOTEBOOK = DOCS / "class.ipynb"
ALLOWED = {"torch", "matplotlib", *sys.stdlib_module_names}


def text(name):
    return (DOCS / name).read_text(encoding="utf-8")


def printed(path):
    "All that the stored outputs of a notebook say."
    said = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for out in cell.get("outputs", []):
            data = out.get("data", {})
            said += out.get("text") or data.get("text/markdown") or data.get("text/plain") or []
    return "".join(said)


# class.ipynb


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, 4)


def test_the_notebook_imports_torch_and_matplotlib_alone(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tree = ast.parse("\n".join(cell.source for cell in code))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [n.module if isinstance(n, ast.ImportFrom) else a.name for n in found for a in n.names]
    assert {name.split(".")[0] for name in names} <= ALLOWED
    assert "torch" in names
    assert all(len(cell.source.splitlines()) <= 80 for cell in code)
    changed = [c for c in code if "# change me" in c.source]
    assert len(changed) == 4
    assert all(c.outputs for c in changed)


def test_its_links_need_nothing_but_the_file(notebook):
    settings = configparser.ConfigParser()
    settings.read(repo_root() / "settings.ini")
    repo = f"{settings['DEFAULT']['user']}/{settings['DEFAULT']['repo']}"
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(c.source for c in notebook.cells))
    assert f"https://colab.research.google.com/github/{repo}/blob/main/docs/class.ipynb" in links
    assert f"https://mybinder.org/v2/gh/{repo}/main?labpath=docs%2Fclass.ipynb" in links
    assert all(link.startswith("https://") for link in links)
    binder = repo_root() / ".binder"
    lines = (binder / "requirements.txt").read_text().splitlines()
    assert "--editable ." in lines  # whose dependencies are PyTorch, matplotlib and more
    assert (binder / "runtime.txt").read_text() == "python-3.11\n"


def test_what_it_printed_is_the_lesson(notebook):
    outputs = {
        c.id: "".join(o.get("text", "") for o in c.outputs)
        for c in notebook.cells
        if "outputs" in c
    }
    assert "domains found" in outputs["found"]
    assert "domains not found" in outputs["change-losses"]
    assert "domains not found" in outputs["change-seen"]


@pytest.mark.slow
def test_the_notebook_runs_where_nothing_else_is(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hmoe_repro.py").write_text("raise ImportError('not here')")
    copy = nbformat.from_dict(notebook)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(copy, timeout=600, startup_timeout=300, resources=where).execute()
    again = {
        c.id: "".join(o.get("text", "") for o in c.outputs) for c in copy.cells if c.get("outputs")
    }
    assert "domains found" in again["found"]
    assert "seeds find" in again["change-seeds"]


# Solutions


def vector(values, digits=3):
    return "$p = (" + ", ".join(f"{value:.{digits}f}" for value in values) + ")$"


def test_gates_of_the_solutions():
    e, v = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]]), torch.tensor([[1.0, 1.0]])
    said = text("class_solutions.md").split("## 2.")[0]
    d2 = torch.cdist(v, e)[0] ** 2
    assert vector(gate_values(v, e, eps=0)[0]) in said
    assert vector((-d2).softmax(-1)) in said
    assert "distances are {:.0f}, {:.0f} and {:.0f}".format(*d2) in said
    for apart in (3.0, 30.0):  # the last code between two embeddings at which p_1 is 0.9
        line = torch.linspace(0, apart / 2, 100_001)[:, None]
        ends = torch.tensor([[0.0], [apart]])
        for p in (gate_values(line, ends, eps=0), (-(torch.cdist(line, ends) ** 2)).softmax(-1)):
            far = line[p[:, 0] >= 0.9].max()
            assert f"at {far:.2f} of {apart:.0f}" in said.replace(" the 3 ", " 3 ")


def test_questions_of_the_handout():
    said = text("class_solutions.md").split("## The questions of the handout")[1]
    assert (
        vector(gate_values(torch.zeros(1, 1), torch.tensor([[1.0], [2.0], [-2.0]]), 0)[0]) in said
    )
    one, none = torch.eye(3)[torch.zeros(12, dtype=torch.long)], torch.full((12, 3), 1 / 3)
    assert entropy_loss(one) == 0
    assert abs(load_balance_loss(none)) < 1e-6
    assert all(f"= {x:.3f}$" in said for x in (load_balance_loss(one), entropy_loss(none)))
    assert f"than the {class_handout.numbers()['detectable']} that" in said
    assert class_handout.PAGES[1].split("## Three questions")[1].count("\n**") == 3


def test_losses_of_the_solutions():
    said = text("class_solutions.md").split("## 2.")[1].split("## 3.")[0]
    by_hand = []
    for sizes in ((12, 12, 36), (24, 12, 24)):
        gate = torch.eye(3).repeat_interleave(torch.tensor(sizes), 0)
        assert entropy_loss(gate) == 0
        assert f"$\\mathcal{{L}}_{{kl}} = {load_balance_loss(gate):.3f}$" in said
        by_hand.append(sum(rel_entr(n / 60, 1 / 3) for n in sizes))
    assert f"lower total by {by_hand[0] - by_hand[1]:.3f}" in said
    lower = re.search(
        r"in (\d+ of 60) seeds", printed(class_handout.ROOT / "figures/quick/hmoe_fig3.ipynb")
    )
    assert f"{lower[1]} seeds did not find" in said


def share(count, of):
    middle, low, high = (f"{100 * x:.0f}" for x in rate(count, of))
    return f"{middle} % ({low} to {high} %)"


def test_counts_of_the_solutions():
    said, page = text("class_solutions.md"), class_handout.table("hmoe_fig3_summary")
    page = page.set_index("losses")
    pairs = []
    for losses in ("all losses", "without L_en"):
        count, of = map(int, page["intervals found"][losses].split(" of "))
        assert f"{count} of {of} seed" in said
        assert share(count, of) in said
        pairs.append([count, of - count])
    assert f"p = {fisher_exact(pairs).pvalue:.2f}" in said
    verdict = printed(class_handout.ROOT / "figures/quick/hmoe_fig3.ipynb")
    near = re.findall(r"(\d+) of (\d+) \(95 % CI", verdict.split("MAX stays within")[1])[:2]
    near = [(int(a), int(b)) for a, b in near]
    assert "{} of {} against {} of {}".format(*near[0], *near[1]) in said
    p = fisher_exact([[count, of - count] for count, of in near]).pvalue
    assert f"p = {p:.4f}" in said
    count, of = map(int, re.search(r"(\d+) of (\d+) seeds find", printed(NOTEBOOK)).groups())
    assert f"{count} of {of} find the domains, {share(count, of)}" in said
    assert f"5 of 10 is {share(5, 10)}" in said


def rows(part):
    "Cells of the tables of a text."
    found = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in found]


def test_selection_of_the_solutions():
    """By the library's own rules, from the table of the homework."""
    table = [row for row in rows(text("class_homework.md")) if len(row) == 5 and row[1][:1] == "*"]
    by = {re.sub("[*`]", "", row[1]): [float(x) for x in row[2:]] for row in table}
    half = [0.5] * 3

    def record(name, held_out, accuracies):
        points = [
            {
                "step": 100 * t,
                "accuracies": {
                    d: {part: {"default": v[t]} for part, v in splits.items()}
                    for d, splits in accuracies.items()
                },
            }
            for t in range(3)
        ]
        config = {"test_domains": held_out, "hparams_seed": 0}
        return {"run_id": name, "config": config, "checkpoints": points}

    d = {"in": by["in part of d"], "out": by["out part of d"]}
    a, b = ({"out": by[f"out part of {x}"]} for x in "ab")
    runs = [record("d", ["d"], {"a": a, "b": b, "d": d})]
    for held, other in (("a", "b"), ("b", "a")):
        seen = {"in": by[f"in part of {held}, held out together with d"], "out": half}
        rest = {other: {"out": half}, "d": {"in": half}}
        runs.append(record(held, ["d", held], {held: seen} | rest))
    solved = {row[0]: row[1:] for row in rows(text("class_solutions.md")) if len(row) == 4}
    reported = []
    for rule in RULES:
        chosen = select_model(runs, "d", rule)
        assert solved[rule][1:] == [str(chosen["step"]), f"{chosen['test_accuracy']:.2f}"], rule
        reported.append(chosen["test_accuracy"])
    means = [sum(pair) / 2 for pair in zip(a["out"], b["out"])]
    assert solved["training-domain"][0] == ", ".join(f"{x:.2f}" for x in means)
    pair = [by[f"in part of {x}, held out together with d"] for x in "ab"]
    means = [sum(both) / 2 for both in zip(*pair)]
    assert solved["leave-one-domain-out"][0] == ", ".join(f"{x:.2f}" for x in means)
    gap = 100 * (max(d["in"]) - reported[RULES.index("training-domain")])
    assert f"is {max(d['in']):.2f}, which is {gap:.0f} points above" in text("class_solutions.md")


# Misconceptions


def test_numbers_of_the_misconceptions_are_on_the_page_that_is_named():
    checked = 0
    for said, answer, place in rows(text("class_misconceptions.md"))[1:]:
        seen = ""
        for link in re.findall(r"\]\(([^)]+)\)", place):
            path = DOCS / link
            seen += printed(path) + path.read_text(encoding="utf-8")
        numbers = re.findall(r"\d+\.\d+|\d+ of \d+", said + answer)
        for number in numbers:
            count, _, of = number.partition(" of ")
            short = re.escape(number.rstrip("0")) if "." in number else number
            listed = rf"(?<!\d){count}, 0, 0(?!\d)"  # 60 of 60 points, as the cell shows them
            assert re.search(rf"(?<!\d){short}|{listed}", seen), (number, place)
            checked += 1
    assert checked >= 10


# The handout


def test_the_handout_has_two_pages_and_is_that_of_its_source(tmp_path):
    stored = class_handout.PDF.read_bytes()
    assert len(re.findall(rb"/Type /Page\b", stored)) == 2
    assert class_handout.digest().encode() in stored, "Fix: python docs/class_handout.py"
    class_handout.draw(tmp_path / "again.pdf")
    drawn = (tmp_path / "again.pdf").read_bytes()
    assert len(re.findall(rb"/Type /Page\b", drawn)) == 2
    assert abs(len(drawn) - len(stored)) < 0.1 * len(stored)


def test_a_handout_with_too_much_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(class_handout, "PAGES", ["\n".join(["# Too long"] * 40)])
    with pytest.raises(ValueError, match="too long"):
        class_handout.draw(tmp_path / "long.pdf")


# The slides


def test_the_pdf_of_the_slides_is_that_of_their_sources():
    stored = class_slides.PDF.read_bytes()
    assert len(stored) < 1_500_000
    assert class_slides.pages_of(stored) == 1 + len(class_slides.slides.slides_of_class())
    fix = "Fix: make book && python docs/class_slides.py"
    assert stored.endswith(f"% digest {class_slides.digest()}\n".encode()), fix
    assert b"(D:20000101" in stored


def test_dates_of_a_pdf_are_removed():
    pdf = b"/CreationDate (D:20261128120000+00'00')\n/ModDate (D:20261128120000+00'00')>>"
    made = class_slides.without_dates(pdf)
    assert len(made) == len(pdf)
    assert b"2026" not in made


def test_slides_need_a_built_book(tmp_path):
    with pytest.raises(SystemExit, match="make book"):
        class_slides.main(tmp_path)
