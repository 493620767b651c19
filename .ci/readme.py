"""Rewrite the blocks of README.md and of three pages of docs/ that are made from records.

    python .ci/readme.py                 as `hmoe figures` does after rendering the pages

No number in these pages is typed by hand. A generated block is enclosed in two comments,
`<!-- name:start -->` and `<!-- name:end -->`, and only the text between them is replaced. Most
blocks are tables or verdicts of pages, as they were rendered; `hmoe_repro/pages.toml` names them.
The others are computed here: how long the runs took, the deviations of all notebooks, the status of
every figure and table of the papers, and the findings of all pages. GMoE's paper was available only
as slides about it, whose tables and figures are mostly not numbered; they are named by what they
show.
"""

import json
import posixpath
import re
import runpy
from pathlib import Path

import pandas as pd

from hmoe_repro.analysis.results import results, runs
from hmoe_repro.analysis.statistics import mean_interval, paired_values
from hmoe_repro.analysis.tables import cost_table, paper_numbers
from hmoe_repro.analysis.writers import markdown_table
from hmoe_repro.core.errors import check_choice, plural
from hmoe_repro.core.files import repo_root, write_atomic
from hmoe_repro.core.toml import packaged
from hmoe_repro.report.gallery import README_PROFILES, facts_of, index_entry
from hmoe_repro.report.provenance import STATUS
from hmoe_repro.report.render import files_of, page_texts
from hmoe_repro.studies.artefacts import ARTEFACTS, artefact_studies
from hmoe_repro.studies.study_file import read_study


def fill_blocks(text: str, blocks: dict[str, str]) -> str:
    """The `text` of a page with the content of its blocks replaced. `HmoeError` for an unknown
    one."""

    def filled(found):
        inside = blocks[check_choice(found[1], blocks, "block")].strip()
        return f"<!-- {found[1]}:start -->\n{inside}\n<!-- {found[1]}:end -->"

    return re.sub(r"<!-- ([\w-]+):start -->.*?<!-- \1:end -->", filled, text, flags=re.S)


FULL_ELSEWHERE = {"hmoe_fig3": "quick"}  # at the paper's own scale in a profile of another name
_PAGES = packaged("pages.toml")
PUBLISHED = _PAGES["papers"]  # paper -> figure or table -> what it shows, pages in its place


def deviations_of(notebook: Path) -> str:
    """The section 'Deviations' of a library notebook, below its title; '' where there are none.
    Links are relative to the folder `docs`."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    found = re.search(r"^## Deviation.*\n+((?:(?!## ).*\n?)*)", "\n\n".join(texts), re.M)
    if not found or found[1].startswith("None"):
        return ""
    folder = Path("..", *notebook.parts[-3:-1]).as_posix()

    def from_docs(link):
        return f"]({posixpath.normpath(posixpath.join(folder, link[1]))})"

    body = re.sub(r"\]\((?!\w+:|#)([^)]+)\)", from_docs, found[1].strip())
    title = texts[0].partition("\n")[0].removeprefix("# ")
    return f"### [{title}]({folder}/{notebook.name})\n\n{body}"


def all_deviations() -> str:
    """The deviations of the notebooks of methods, data, networks, algorithms and training, in
    reading order: what the parts around them do has no counterpart in the papers."""
    notebooks = sorted((repo_root() / "nbs").glob("0[1-5]_*/[0-9]*.ipynb"))
    return "\n\n".join(filter(None, map(deviations_of, notebooks)))


def item_status(pages: tuple[str, ...]) -> tuple[str, str]:
    """(status, links) of the `pages` of a figure or table: 'explained' in a notebook, or a word of
    `STATUS`. Links are relative to the project."""
    if pages[0].endswith(".ipynb"):
        return "explained", f"[notebook]({pages[0]})"
    made = {}  # (profile, page) -> its provenance, if it is rendered from runs
    for profile in README_PROFILES:
        for page in filter(None, pages):
            facts = facts_of(repo_root() / "figures" / profile / f"{page}.ipynb")
            if facts.get("records") or "record_sha256" in facts:
                made[profile, page] = facts
    if not made:
        return "not run", f"[page](nbs/paper/{pages[0]}.ipynb)" if pages[0] else "–"
    full = [p for p, page in made if p == "paper" or FULL_ELSEWHERE.get(page) == p]
    names = {"quick": "digits", "mnist": "MNIST", "pacs": "PACS", "bench": "measured"}
    names |= dict.fromkeys(full, "page")
    links = dict.fromkeys(f"[{names[p]}](figures/{p}/{page}.ipynb)" for p, page in made)
    used = {name for facts in made.values() for name in facts.get("dataset") or []}
    wanted = {
        name
        for page in pages
        if "paper" in getattr(ARTEFACTS.get(page), "profiles", ())
        for study in artefact_studies(page, "paper")
        for block in read_study(study).runs
        for name in block.datasets
    }
    status = "stand-in" if wanted and used and not used & wanted else "reduced"
    seeds = {len(made[p, page]["trial_seed"]) for p, page in made if p == "paper"}
    if full:
        status = f"full ({plural(min(seeds), 'seed')})" if seeds else "full"
    return status, ", ".join(links)


def status_words() -> str:
    """Markdown: the definitions of `STATUS`, in one line."""
    return "; ".join(f"**{word}**: {meaning}" for word, meaning in STATUS.items()) + "."


def status_table() -> str:
    """Markdown: the definitions of the status words, and every figure and table of the papers with
    its status and the links to its pages, relative to `docs/`."""
    rows = [status_words(), "", "| | shows | status | where |", "|---|---|---|---|"]
    for paper, items in PUBLISHED.items():
        for item, (shows, *pages) in items.items():
            status, links = item_status(tuple(pages))
            links = links.replace("](", "](../")
            rows.append(f"| {paper} {item} | {shows} | {status} | {links} |")
    return "\n".join(rows)


def findings() -> str:
    """Markdown: of each profile a table of its pages with the first sentence of their verdicts,
    which is the answer; links are relative to `docs/`."""
    lines = []
    for profile in README_PROFILES:
        folder = repo_root() / "figures" / profile
        lines += ["", f"### {profile}", "", "| page | finding |", "|---|---|"]
        for name, made in files_of(folder).items():
            entry = index_entry(folder, name, made)
            link = f"[{entry['title']}](../figures/{profile}/{name}.ipynb)"
            lines.append(f"| {link} | {entry['said']} |")
    return "\n".join(lines[1:])


def _runs_of(study: str, where: str) -> pd.DataFrame:
    """The complete runs of a published study that a pandas query picks, a row for each."""
    return runs(results(study)).query("status == 'complete'").query(where)


# The runs of HMOE-DN that the README speaks of, by benchmark: (study, which of its runs). A restart
# is the same run from other random weights; the first is counted.
TUNED = "algorithm == 'HMOE-DN' and steps == 1401 and restart == 0 and trial_seed >= 4"
DISCOVERY = {
    "digits": [("quick-restarts", TUNED)],  # seeds other than those of the tuning
    "PACS": [
        ("pacs-linear", "algorithm == 'HMOE-DN'"),
        ("pacs-restarts", "algorithm == 'HMOE-DN' and restart == 0"),
    ],
}
FOUND = 0.9  # an NMI from which on the domains count as found


def found_by_experts() -> pd.DataFrame:
    """Agreement of HMOE-DN's experts in each run that the README speaks of: benchmark, row (the
    held-out domain; on ColoredMNIST what they are compared with) and nmi."""
    parts = []
    for benchmark, studies in DISCOVERY.items():
        for study, where in studies:
            rows = _runs_of(study, where)
            nmi = rows["discovery.nmi_domain"].astype(float)
            parts.append(pd.DataFrame({"row": rows.test_domain, "nmi": nmi}))
            parts[-1]["benchmark"] = benchmark
    coloured = _runs_of("paper-colored", "algorithm == 'HMOE-DN'")
    for row in ("colour", "domain"):
        nmi = coloured[f"discovery.nmi_{row}"].astype(float)
        parts.append(pd.DataFrame({"row": row, "nmi": nmi, "benchmark": "ColoredMNIST"}))
    return pd.concat(parts, ignore_index=True)[["benchmark", "row", "nmi"]]


def found_by_kmeans() -> pd.DataFrame:
    """Mean NMI with the domains of k-means on the colour and contrast of images, which trains
    nothing, by benchmark and held-out domain (`row`)."""
    parts = []
    for benchmark, study in (("digits", "quick-restarts"), ("PACS", "pacs-restarts")):
        rows = _runs_of(study, "algorithm == 'ERM'")
        nmi = rows["clusters.statistics.nmi_domain"].astype(float)
        means = nmi.groupby(rows.test_domain).mean()
        parts.append(pd.DataFrame({"benchmark": benchmark, "row": means.index, "nmi": means}))
    return pd.concat(parts, ignore_index=True)


def _accuracy_on_pacs() -> str:
    """The accuracy of HMOE-DN (MIX) against ERM on frozen features of PACS, in words: the interval
    is Student's t over the means of seeds, each over all test domains."""
    pairs = paired_values(results("pacs-linear"), ("HMOE-DN", "mix"), "ERM")
    found = mean_interval(pairs.mean(axis=1).to_frame("all test domains"))
    how = f"{found.seeds} seeds"
    if found.low <= 0 <= found.high:
        interval = f"95 % CI {found.low:+.1f} to {found.high:+.1f}, {how}"
        return f"{found.mean:+.1f} points ({interval}, undecided) better"
    word = "worse" if found.mean < 0 else "better"
    low, high = sorted(abs(end) for end in (found.low, found.high))
    return f"{abs(found.mean):.1f} points {word} (95 % CI {low:.1f} to {high:.1f}, {how})"


def _gain_in_the_paper() -> float:
    """The accuracy of HMOE-DN (MIX) minus that of ERM in HMOE's own Table 1, mean over its data
    sets, in points."""
    table = paper_numbers(artefact="HMOE Table 1")
    own = table[(table.algorithm == "HMOE-DN") & (table["mode"] == "mix")]
    erm = table[table.algorithm == "ERM"]
    gains = own.set_index("dataset").value - erm.set_index("dataset").value
    return float(gains.mean())


def does_it_work() -> str:
    """Markdown: three answers to the question whether HMOE works, each from the runs that say the
    most about it."""
    runs_of_experts = found_by_experts()
    found = runs_of_experts[runs_of_experts.nmi >= FOUND]
    said = {}
    for name, own in runs_of_experts.groupby("benchmark"):
        said[name] = f"{(own.nmi >= FOUND).sum()} of {len(own)}"
    colours = runs_of_experts[runs_of_experts.row == "colour"].nmi
    domains = found[found.benchmark == "PACS"].row.unique()
    held_out = f", always with {domains[0].partition('_')[0]} held out" if len(domains) == 1 else ""
    gain = round(_gain_in_the_paper(), 1) + 0.0  # no -0.0
    lines = [
        "**HMOE groups images by visible style.** On full-scale ColoredMNIST its experts divide "
        f"the images by colour in {(colours >= FOUND).sum()} of {len(colours)} runs.",
        "**Style is only sometimes the domain.** Experts match the domains in "
        f"{said['PACS']} runs on PACS{held_out}, and in {said['digits']} on digits, tuned with "
        "true domains.",
        "**We find no gain in accuracy over ERM.** On frozen PACS features HMOE-DN is "
        f"{_accuracy_on_pacs()}. In the HMOE paper's Table 1 its average gain is {gain:.1f}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def status_counts() -> str:
    """Markdown: how many figures and tables of the papers have each status."""
    counts = dict.fromkeys([*STATUS, "explained"], 0)
    for items in PUBLISHED.values():
        for _, *pages in items.values():
            counts[item_status(tuple(pages))[0].partition(" (")[0]] += 1
    said = ", ".join(f"**{count} {status}**" for status, count in counts.items())
    return f"Of {sum(counts.values())} figures and tables of the three papers: {said}."


def readme_blocks() -> dict[str, str]:
    """Name -> Markdown of each generated block of the README, from the published records and the
    pages rendered from them."""
    blocks = {"deviations": all_deviations(), "findings": findings(), "status": status_table()}
    blocks |= {"works": does_it_work(), "counts": status_counts()}
    for name, place in _PAGES["blocks"].items():  # such as 'quick/hmoe_fig3 summary'
        page, _, part = place.partition(" ")
        texts = page_texts(repo_root() / "figures" / f"{page}.ipynb")
        blocks[name] = texts[f"{page.partition('/')[2]}_{part}.md"]
    costs = cost_table(results(_PAGES["times"]["studies"])).groupby(["data set", "updates"])
    seconds = "median seconds a run"
    times = costs.agg(runs=("runs", "sum"), quickest_s=(seconds, "min"), slowest_s=(seconds, "max"))
    return blocks | {"times": markdown_table(times.reset_index(), 1)}


PAGES_WITH_BLOCKS = ("README.md", "docs/results.md", "docs/deviations.md", "docs/book/index.md")


def update_readme() -> str:
    """Rewrite the blocks of `PAGES_WITH_BLOCKS` and draw the picture of the README again, if the
    records have changed; returns a line that names the pages that changed.
    `HmoeError` for an unknown block."""
    blocks, changed = readme_blocks(), []
    for name in PAGES_WITH_BLOCKS:
        page = repo_root() / name
        text = page.read_text(encoding="utf-8")
        if (new := fill_blocks(text, blocks)) != text:
            write_atomic(page, new)
            changed.append(name)
    picture = runpy.run_path(str(repo_root() / "docs" / "readme_picture.py"))
    if picture["is_stale"]():
        picture["draw"]()
        changed.append("docs/readme_picture.png")
    return f"pages with changed blocks: {', '.join(changed) or 'none'}"


if __name__ == "__main__":
    print(update_readme())
