"""The README's numbers come from the records, and its links lead somewhere."""

import configparser
import json
import re
import runpy
import shlex
import subprocess
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy import stats

from hmoe_repro.algorithms import algorithm_names
from hmoe_repro.analysis.claims import read_claims
from hmoe_repro.analysis.tables import paper_numbers
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import repo_root
from hmoe_repro.core.toml import package_toml
from hmoe_repro.report import readme
from hmoe_repro.report.readme import PAGES_WITH_BLOCKS, README_PROFILES, fill_blocks, readme_blocks

README = repo_root() / "README.md"
NOTEBOOK = r"nbs/[0-9]{2}_\w+/\d\d_\w+\.ipynb"
RESULTS = repo_root() / "docs" / "results.md"
PROSE = sorted([*repo_root().glob("*.md"), *repo_root().glob("docs/**/*.md")])


def test_generated_blocks_are_those_of_the_published_records():
    blocks, used = readme_blocks(), set()
    for name in PAGES_WITH_BLOCKS:
        page = (repo_root() / name).read_text(encoding="utf-8")
        present = re.findall(r"<!-- ([\w-]+):start -->", page)
        used |= set(present)
        for block in present:
            inside = page.split(f"<!-- {block}:start -->")[1].split(f"<!-- {block}:end -->")[0]
            assert inside.strip() == blocks[block].strip(), f"{block} is stale. Fix: make figures"
    assert used == set(blocks)


def test_a_readme_block_is_replaced_and_nothing_else():
    block = "a\n<!-- one:start -->\n{}\n<!-- one:end -->\nb\n"
    rest = "<!-- two:start -->\n<!-- two:end -->\nc\n"
    text = "| x |\n\\1 \\g<0>\n"
    filled = fill_blocks(block.format("old") + rest, {"one": text, "two": "y"})
    assert filled == block.format(text.strip()) + rest.replace("start -->", "start -->\ny")
    with pytest.raises(HmoeError, match="unknown block 'one'. Valid: three"):
        fill_blocks(block, {"three": "x"})


def test_a_figure_is_full_reduced_or_not_run_by_the_runs_behind_its_page(tmp_path, monkeypatch):
    def rendered(profile, page, **facts):
        folder = tmp_path / "figures" / profile
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{page}.provenance.json").write_text(json.dumps(facts))

    monkeypatch.setattr(readme, "repo_root", lambda: tmp_path)
    status = readme.item_status
    assert status(("hmoe_fig5", "digits_fig5")) == ("not run", "[page](nbs/paper/hmoe_fig5.ipynb)")
    assert status(("",)) == ("not run", "–")
    assert status(("nbs/a.ipynb",)) == ("explained", "[notebook](nbs/a.ipynb)")
    rendered("paper", "hmoe_fig5", records=0)  # the paper's own numbers alone
    assert status(("hmoe_fig5",))[0] == "not run"
    rendered("pacs", "hmoe_fig5", records=8)
    rendered("quick", "digits_fig5", records=12)
    where = "[digits](figures/quick/digits_fig5.ipynb), [PACS](figures/pacs/hmoe_fig5.ipynb)"
    assert status(("hmoe_fig5", "digits_fig5")) == ("reduced", where)
    whole = {
        "records": 48,
        "trial_seed": [0, 1, 2],
        "algorithm": ["ERM", "HMOE-DL", "HMOE-DN", "HMOE-ND"],
        "dataset": ["PACS"],
    }
    rendered("paper", "hmoe_fig5", **whole | {"algorithm": ["ERM", "HMOE-DN"]})
    assert status(("hmoe_fig5",))[0] == "reduced"
    rendered("paper", "hmoe_fig5", **whole | {"dataset": []})
    assert status(("hmoe_fig5",))[0] == "reduced"
    rendered("paper", "hmoe_fig5", **whole | {"trial_seed": [0, 1]})
    assert status(("hmoe_fig5",))[0] == "reduced"
    rendered("paper", "hmoe_fig5", **whole | {"records": 47})
    assert status(("hmoe_fig5",))[0] == "reduced"
    rendered("paper", "hmoe_fig5", **whole | {"failed": ["482ab51b1d07"]})
    assert status(("hmoe_fig5",))[0] == "reduced"
    rendered("paper", "hmoe_fig5", **whole)
    assert status(("hmoe_fig5",)) == (
        "full (3 seeds)",
        "[page](figures/paper/hmoe_fig5.ipynb), [PACS](figures/pacs/hmoe_fig5.ipynb)",
    )
    rendered("quick", "hmoe_fig3", records=30)
    assert status(("hmoe_fig3",)) == ("full", "[page](figures/quick/hmoe_fig3.ipynb)")


def test_collected_deviations_point_at_nothing_that_stays_in_the_notebook():
    collected = readme_blocks()["deviations"]
    found = re.findall(r".*\babove\b.*", collected)
    assert not found
    assert "this notebook" not in collected


def rows_of(markdown):
    """The rows of the tables in a text, without their heads, as lists of cells."""
    lines = re.findall(r"^\|(.*)\|$", markdown, re.M)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    return [row for row in cells if row[0] != "what" and not row[0].startswith("---")]


def test_deviations_are_collected_from_the_notebooks():
    collected = readme_blocks()["deviations"]
    rows = rows_of(collected)
    titles = [row for row in rows if row[0].startswith("**[")]
    assert len(titles) >= 50
    assert all(row[1:] == ["", "", ""] for row in titles)
    assert all(len(row) == 4 and all(row) for row in rows if row not in titles)
    assert len(rows) > 250
    assert "](../nbs/01_method/04_hmoe.ipynb)" in collected
    assert "None:" not in collected
    assert "`near_zero=true`" in collected


@pytest.mark.parametrize(
    "folder", ["01_method", "02_data", "03_networks", "04_algorithms", "05_training"]
)
def test_deviations_of_a_notebook_are_a_table_or_none(folder):
    for notebook in sorted((repo_root() / "nbs" / folder).glob("[0-9]*.ipynb")):
        section = readme.deviations_of(notebook).partition("\n\n")[2]
        if section:
            head, rule, *rows = section.splitlines()
            assert head == "| what | paper | here | why |", notebook
            assert rule == "|---|---|---|---|"
            assert rows
            assert all(row.startswith("| ") and row.endswith(" |") for row in rows), notebook


def records(study):
    "The records of a published study, read without the library."
    lines = (repo_root() / "results" / f"{study}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def words_of(markdown):
    "The words that a reader of Markdown sees: without comments, pictures and targets of links."
    text = re.sub(r"<!--.*?-->", "", markdown, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)  # pictures
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [word for word in re.split(r"[\s|]+", text) if re.search(r"\w", word)]


def test_the_numbers_of_the_readme_by_hand():
    """How often colours and domains were found, counted in the records as they are stored, and the
    mean of the paper's gains as its Table 1 prints them."""
    works = (
        README.read_text("utf-8").split("<!-- works:start -->")[1].split("<!-- works:end -->")[0]
    )
    coloured = [
        r["discovery"]["nmi_colour"]
        for r in records("paper-colored")
        if r["config"]["algorithm"] == "HMOE-DN" and r["status"] == "complete"
    ]
    count = sum(nmi >= 0.9 for nmi in coloured)
    assert f"by colour in {count} of {len(coloured)} runs" in works
    pacs = [
        (r["config"]["test_domains"], r["discovery"]["nmi_domain"] >= 0.9)
        for study in ("pacs-linear", "pacs-restarts")
        for r in records(study)
        if r["config"]["algorithm"] == "HMOE-DN" and not r["config"].get("restart")
    ]
    found = [domains for domains, hit in pacs if hit]
    assert all(domains == ["art_painting"] for domains in found)
    art = [hit for domains, hit in pacs if domains == ["art_painting"]]
    counted = (
        f"{sum(art)} of {len(art)} runs with art held out, 0 of {len(pacs) - len(art)} otherwise"
    )
    assert counted in works
    styles = [r["discovery"]["nmi_domain"] >= 0.9 for r in records("quick-styles")]
    assert f"on other digit styles in {sum(styles)} of {len(styles)} (default)" in works
    default = [
        r["discovery"]["nmi_domain"] >= 0.9
        for r in records("quick-discovery")
        if r["config"]["algorithm"] == "HMOE-DN"
        and not {"batch", "instance"} & set(r["config"]["hparams"].values())
    ]
    assert f"in {sum(default)} of {len(default)} runs (default)" in works
    given_labels = [
        r["discovery"]["nmi_domain"]
        for study in ("pacs-linear", "pacs-payoff", "pacs-pacs")
        for r in records(study)
        if r["config"]["algorithm"] == "HMOE-DL"
        and r["config"]["test_domains"][0] in ("cartoon", "sketch")
    ]
    assert len(given_labels) > 40
    assert max(given_labels) < 0.9  # "even if all labels are given"
    gains = [0.4, -0.5, -0.7, -0.7, -1.1, 2.6]  # HMOE-DN MIX - ERM, HMOE's Table 1
    assert f"the average gain of this mode is {abs(round(sum(gains) / 6, 1)):.1f}" in works


def test_the_readme_is_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert len(words_of(text)) <= 900
    assert (
        words_of("[a b](c d) ![x](y) `e` | f | --- | <!-- g --> 2.0 %") == "a b `e` f 2.0".split()
    )
    works = readme.does_it_work().splitlines()
    assert len(works) == 3
    assert all(len(words_of(line)) <= 50 for line in works)


def test_the_gain_of_the_readme_is_that_of_the_planned_study():
    """HMOE-DN with MIX minus ERM on PACS at equal seeds: means over held-out domains, by hand."""
    gaps = {}
    for r in records("pacs-payoff"):
        config = r["config"]
        name = config["algorithm"]
        if name == "ERM" or name == "HMOE-DN" and not config["hparams"]["lambda_d"]:
            (accuracy,) = [
                v["test_accuracy"] for m, v in r["selected"].items() if m in ("mix", "default")
            ]
            sign = -1 if name == "ERM" else 1
            gaps[config["trial_seed"]] = gaps.get(config["trial_seed"], 0) + sign * 25 * accuracy
    values = np.array(list(gaps.values()))
    half = stats.t.isf(0.025, len(values) - 1) * stats.sem(values)
    low, high = -values.mean() - half, -values.mean() + half
    said = (
        f"{-values.mean():.1f} points worse (95 % CI {low:.1f} to {high:.1f}, {len(values)} seeds)"
    )
    assert said in readme.does_it_work()


def test_k_means_on_features_and_experts_are_compared_at_equal_seeds():
    ours, theirs = {}, {}
    for r in records("pacs-restarts"):
        cell = r["config"]["test_domains"][0], r["config"]["trial_seed"]
        if r["config"]["algorithm"] == "ERM":
            theirs[cell] = r["clusters"]["features"]["nmi_domain"]
        elif not r["config"].get("restart"):
            ours[cell] = r["discovery"]["nmi_domain"]
    both = set(ours) & set(theirs)
    assert len(both) == 20
    means = [np.mean([found[cell] for cell in both]) for found in (theirs, ours)]
    assert f"finds the styles better (NMI {means[0]:.2f} against {means[1]:.2f})" in (
        readme.does_it_work()
    )
    assert means[0] > means[1]


def test_the_readme_says_what_to_type():
    commands = "\n".join(text for language, text in fences(README) if language == "sh").splitlines()
    clone = next(line for line in commands if line.startswith("git clone"))
    assert "--depth 1" in clone
    assert {"make reproduce", "make test"} <= set(commands)
    assert commands.index(clone) < commands.index("make reproduce")
    assert [language for language, _ in fences(README)].count("python") == 1
    settings = configparser.ConfigParser()
    settings.read(repo_root() / "settings.ini")
    address = settings["DEFAULT"]["git_url"]
    assert clone.endswith(address)
    assert f"{address}/actions/workflows/tests.yml" in README.read_text()
    named = re.findall(r"actions/workflows/(\w+\.yml)", README.read_text(encoding="utf-8"))
    assert all((repo_root() / ".github" / "workflows" / name).exists() for name in named)


def test_the_counts_of_the_readme_are_those_of_its_tables():
    text = README.read_text(encoding="utf-8")
    assert f"| {len(algorithm_names())}, including all 34 of DomainBed |" in text
    scores = readme.scorecard()
    full = [score for score in scores if score.status.startswith("full")]
    assert f"Of {len(scores)} figures and tables" in text
    assert f"**{len(full)} full**" in text
    assert f"| {len(full)} of {len(scores)} figures and tables |" in text
    judged = [score for score in scores if score.verdict]
    assert f"Claims of {len(judged)} of them were judged" in text


def test_the_scorecard_says_what_its_pages_say():
    """Number and verdict of a row are those of `verdicts.csv`, for the benchmark of the page."""
    verdicts = pd.read_csv(repo_root() / "figures" / "quick" / "verdicts.csv")
    claims = {claim.short: claim for claim in read_claims()}
    for score in readme.scorecard():
        if not score.verdict:
            assert not score.ours, score.artefact
            continue
        rows = verdicts[verdicts.claim == claims[score.claim].key].dropna(subset="estimate")
        of_paper = rows.studies.str.startswith("paper-")
        if claims[score.claim].scale:  # of reduced studies the claim needs the paper's scale
            stated = rows.verdict.where(of_paper, "needs paper scale")
        else:
            stated = rows.verdict
        assert score.verdict in set(stated), score.artefact
        number = re.search(r"[-+]?\d[\d.]*", score.ours)[0]
        of_rates = {str(round(row.estimate * row.runs / 100)) for row in rows.itertuples()}
        of_values = {f"{row.estimate:.2f}" for row in rows.itertuples()}
        of_values |= {f"{row.estimate:.1f}" for row in rows.itertuples()}
        assert number.lstrip("+") in of_rates | of_values, score.artefact


def test_numbers_that_the_scorecard_quotes_are_the_papers():
    said = {name: number for name, (_, number) in package_toml("pages.toml")["said"].items()}
    for dataset, item in (("VLCS", 6), ("OfficeHome", 8), ("TerraIncognita", 9)):
        numbers = paper_numbers(artefact="HMOE Table 1", dataset=dataset)
        own = numbers[(numbers.algorithm == "HMOE-DN") & (numbers["mode"] == "mix")].value
        gain = own.iloc[0] - numbers[numbers.algorithm == "ERM"].value.iloc[0]
        assert said[f"HMOE Table {item}"] == f"{gain:+.1f} points"
    fmow = paper_numbers(artefact="GMoE WILDS", dataset="WILDSFMoW").set_index("algorithm").value
    assert said["GMoE wild data"] == f"{fmow['GMoE'] - fmow['ERM-ViT']:+.1f} points"
    pacs = paper_numbers(artefact="GMoE Table 15", dataset="PACS").set_index("algorithm").value
    assert said["GMoE Table 15"] == f"{pacs['GMoE'] - pacs['ERM']:+.1f} points"
    masks = paper_numbers(artefact="DMG Table 1", test_domain="average", network="resnet18")
    masks = masks.drop_duplicates("algorithm").set_index("algorithm").value
    assert said["DMG Table 1"] == f"{masks['DMG'] - masks['Aggregate']:+.1f} points"


def numbers_in(row):
    "The means of a row of accuracies."
    return [float(number) for number in re.findall(r"(\d+\.\d) ±", row)]


@pytest.mark.slow
def test_the_example_of_the_readme_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    """Its columns and rows, and its accuracies within ten points: another processor rounds in
    another order."""
    for name in ("runs", "cache"):
        monkeypatch.setenv(f"HMOE_{name.upper()}", str(tmp_path / name))
    monkeypatch.setattr("hmoe_repro.apps.compare.default_jobs", lambda device: 1)
    (code,) = [text for language, text in fences(README) if language == "python"]
    (shown,) = [text for language, text in fences(README) if language == "text"]
    assert len([line for line in code.splitlines() if line]) == 5
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()[-3:]
    for expected, line in zip(shown.splitlines(), printed, strict=True):
        assert expected.split()[0] == line.split()[0]
        assert numbers_in(line) == pytest.approx(numbers_in(expected), abs=10)
    assert printed[0].split() == shown.splitlines()[0].split()
    assert [len(numbers_in(line)) for line in printed] == [0, 3, 3]


def test_the_picture_of_the_readme_is_small_and_drawn_from_the_records():
    picture = runpy.run_path(str(repo_root() / "docs" / "readme_picture.py"))
    assert picture["PNG"].stat().st_size <= 150_000
    assert not picture["is_stale"](), "make figures draws it again"
    with Image.open(picture["PNG"]) as drawn:
        assert drawn.width >= 1400
        assert drawn.mode in ("RGB", "RGBA")
        alpha = drawn.convert("RGBA").getchannel("A").getextrema()
    assert alpha == (255, 255)  # legible on a dark page


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/contributing.md",
        "docs/results.md",
        "docs/install.md",
        "docs/commands.md",
        "docs/porting.md",
        "docs/cluster.md",
        "docs/deviations.md",
        "docs/differences.md",
        "docs/your_own_data.md",
        "docs/data_sets.md",
        "docs/compare.md",
        "docs/discover.md",
        "docs/class_plan.md",
        "docs/class_notes.md",
        "docs/class_misconceptions.md",
        "docs/class_homework.md",
        "docs/class_solutions.md",
        "figures/paper/README.md",
        "figures/quick/README.md",
        "figures/mnist/README.md",
        "figures/pacs/README.md",
        "figures/bench/README.md",
    ],
)
def test_links_lead_to_files(page):
    path = repo_root() / page
    links = [
        link
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    missing = [link for link in links if not (path.parent / link).exists()]
    assert links, missing
    assert not missing, missing


def fences(path):
    "(language, text) of each block of code of a page."
    found = re.findall(r"^```([^\n]*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    return [pair for pair in found if not pair[0].startswith("{")]


@pytest.mark.parametrize("path", [p for p in PROSE if fences(p)], ids=lambda p: p.name)
def test_blocks_of_code_name_their_language_and_fit_the_page(path):
    assert all(language for language, _ in fences(path))
    wide = [x for _, text in fences(path) for x in text.splitlines() if len(x) > 100]
    assert not wide, wide
    commands = "\n".join(text for language, text in fences(path) if language == "sh")
    done = subprocess.run(["bash", "-n"], input=commands, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert not done.stderr, done.stderr
    # A remark has a line of its own, and no command is left with a gap to fill in.
    lines = [x.strip() for x in commands.splitlines() if not x.startswith("#")]
    assert not [x for x in lines if re.search(r"\s{2}|…|\s#", x)]


def test_every_command_of_the_pages_is_one_that_hmoe_takes(tmp_path, monkeypatch):
    from typer.main import get_command

    from hmoe_repro.cli.app import app

    monkeypatch.chdir(tmp_path)
    options = 'algorithm = "ERM"\ndataset = "DigitDomains"\ntest_domains = ["sketch"]\n'
    (tmp_path / "run.toml").write_text(options)  # of `hmoe train --config run.toml`
    called = []
    for path in PROSE:
        text = "\n".join(text for language, text in fences(path) if language == "sh")
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if "hmoe" in words:
                command, words = get_command(app), words[words.index("hmoe") + 1 :]
                own = {flag for parameter in command.params for flag in parameter.opts}
                while words and words[0].startswith("-"):  # an option of `hmoe` itself
                    assert words.pop(0) in own, line
                while words and getattr(command, "commands", None):
                    command = command.commands[words.pop(0)]
                if not hasattr(command, "commands"):
                    command.make_context(line, words)  # an unknown option is an error
                called.append(line)
    assert len(called) > 40


@pytest.mark.parametrize("folder", README_PROFILES)
def test_links_of_executed_pages_lead_to_files(folder):
    missing, found = [], 0
    for page in sorted((repo_root() / "figures" / folder).glob("*.ipynb")):
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        prose = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        for link in re.findall(r"\]\(([^)#\s]+)\)", "\n".join(prose)):
            if "://" not in link:
                found += 1
                if not (page.parent / unquote(link)).exists():
                    missing.append(f"{page.name}: {link}")
    assert not missing
    assert found


def anchors(path):
    """The anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_anchors_of_pages_exist():
    linked = 0
    for path in PROSE:
        for page, anchor in re.findall(r"\]\(([\w./]*\.md)?#([\w-]+)\)", path.read_text("utf-8")):
            target = path.parent / page if page else path
            assert anchor in anchors(target), f"{path.name}: {page}#{anchor}"
            linked += 1
    assert linked > 5


@pytest.mark.parametrize(
    "name", ["commands", "your_own_data", "data_sets", "compare", "discover", "deviations"]
)
def test_a_paragraph_has_at_most_five_lines(name):
    """Of 100 columns, without its links. Tables and code are no paragraphs."""
    text = (repo_root() / "docs" / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", text)
    long = [p for p in paragraphs if len(p) > 500 and not p.lstrip().startswith("|")]
    assert not long, long


def test_the_page_of_commands_has_the_groups_of_the_help():
    """In the same order, and every command in its group."""
    from hmoe_repro.cli.app import GROUPS

    text = (repo_root() / "docs" / "commands.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.M))
    assert list(sections)[: len(GROUPS)] == list(GROUPS)
    for title, names in GROUPS.items():
        found = re.findall(r"^### ([a-z, -]+)$", sections[title], re.M)
        described = [name for heading in found for name in heading.split(", ")]
        assert described == [name for name in names if name != "data"]
        assert "```text" in sections[title]  # an output


def test_notebooks_that_are_named_in_prose_exist():
    pages = [*repo_root().glob("*.md"), *(repo_root() / "docs").glob("*.md")]
    pages += (repo_root() / "nbs").rglob("[!_]*.ipynb")
    named = {n for p in pages for n in re.findall(NOTEBOOK, p.read_text(encoding="utf-8"))}
    missing = [name for name in named if not (repo_root() / name).exists()]
    assert len(named) >= 5, missing
    assert not missing, missing


def test_the_tests_that_contributing_names_exist():
    pages = ("CONTRIBUTING.md", "docs/contributing.md")
    text = "".join((repo_root() / page).read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"`(tests/\w+\.py)`", text))
    assert len(named) > 15
    assert not [name for name in named if not (repo_root() / name).exists()]


def test_the_lines_for_researchers_draw_every_run():
    import matplotlib.pyplot as plt

    text = RESULTS.read_text(encoding="utf-8").split("## All runs as one frame")[1]
    plt.figure()
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], {})
    points = sum(len(dots.get_offsets()) for dots in plt.gca().collections)
    plt.close()
    from hmoe_repro.analysis.results import results

    assert points == results("quick-digits").accuracy.notna().sum()


def test_the_scorecard_and_the_galleries_are_short():
    said = RESULTS.read_text(encoding="utf-8")
    assert len(said.splitlines()) <= 120
    for score in readme.scorecard():
        assert f"| {score.artefact} | {score.claim} |" in said
    assert all(
        path.stat().st_size <= 40_000 for path in (repo_root() / "figures").glob("*/README.md")
    )
