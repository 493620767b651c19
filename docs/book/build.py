"""Builds the book: gathers its sources, runs Sphinx for the site and for the slides.

`python docs/book/build.py [FOLDER]`; the folder is build/book, the site is FOLDER/html. Every page
keeps its path in the project, so links between pages hold. Nothing is executed.
"""

import re
import shutil
import sys
import time
from pathlib import Path

import play
import slides
import sources
import typer
from cells import markdown, notebook
from finish import finish, size_of
from names import ROOT, cell_text, reading_path
from sphinx.cmd.build import build_main
from typer.cli import get_docs_for_click

from hmoe_repro.report.gallery import data_title, title_and_claim
from hmoe_repro.report.readme import PUBLISHED, item_status, status_words

HERE = Path(__file__).resolve().parent
COLOURS = {"full": "success", "reduced": "warning", "stand-in": "warning", "explained": "info"}
PARTS = {"cli": "CLI", "apps": "Applications", "bench": "Benchmarks"}  # titles
CHILDREN = {  # pages that the navigation shows only below these
    "docs/your_own_data.md": ("data_sets", "compare", "discover"),
    "docs/class_plan.md": ("class_notes", "class_misconceptions", "class_solutions"),
}
COPIED = ("nbs", "figures", "docs", ".ci", "hmoe_repro")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE")


def path_lines() -> str:
    """The reading path as lines of a list of contents, with the numbers that the text uses."""
    lines = []
    for page, number in reading_path().items():
        title = re.sub(r"[`$]", "", data_title(title_and_claim(ROOT / page)[0], ROOT / page))
        lines.append(f"{number}. {title} </{page}>" if number else f"/{page}")
    return "\n".join(lines)


def toctree(pages, options=":hidden:") -> str:
    """A list of contents for Sphinx."""
    return "\n\n```{toctree}\n" + options + "\n\n" + "\n".join(pages) + "\n```\n"


def part_page(folder: Path) -> str:
    """The first page of a part: a table of its notebooks. In the bar at the left those of the
    reading path stand there."""
    name = folder.name[3:]
    lines = [f"# {PARTS.get(name, name.capitalize())}\n", "| notebook | content |\n|---|---|"]
    pages = [f"nbs/{folder.name}/{path.name}" for path in sorted(folder.glob("*.ipynb"))]
    for page in pages:
        title, claim = title_and_claim(ROOT / page)
        claim = markdown(page, claim).replace("|", "\\|")
        lines.append(f"| [{title}](/{page}) | {claim} |")
    rest = [f"/{page}" for page in pages if page not in reading_path()]
    return "\n".join(lines) + toctree(rest)


def card(paper: str, item: str, shows: str, pages: tuple[str, ...]) -> str:
    """The card of a figure or table, with the first picture of its pages; the links to them are
    those of the README."""
    status, links = item_status(pages)
    found = [path for page in pages if page for path in sorted(ROOT.glob(f"figures/*/{page}.png"))]
    picture = found and f"![{paper} {item}: {shows}](/{found[0].relative_to(ROOT).as_posix()})"
    links, picture = links.replace("](", "](/"), f"{picture}\n\n" if picture else ""
    badge = f"{{bdg-{COLOURS.get(status.split()[0], 'secondary')}}}`{status}`"
    text = f"{picture}{badge} {shows[0].upper()}{shows[1:]}.\n\n:::{{card-footer}}\n{links}\n:::"
    return f"::::{{grid-item-card}} {paper} {item}\n{text}\n::::\n"


def cards() -> str:
    """The grids of cards, paper by paper."""
    text = [status_words()]
    for paper, items in PUBLISHED.items():
        made = [card(paper, item, shows, tuple(pages)) for item, (shows, *pages) in items.items()]
        grid = ":::::{grid} 1 1 2 3\n:gutter: 3\n\n" + "\n".join(made) + ":::::\n"
        text.append(f"## {paper}\n\n{grid}")
    return "\n".join(text)


def commands_page() -> str:
    """Every command with its arguments and options, from the command line's own help."""
    from hmoe_repro.cli.app import app

    group = typer.main.get_command(app)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group, info_name="hmoe"), name="hmoe")
    text = re.sub(r"^(#+) `(.*)`$", r"\1 \2", text, flags=re.M).replace("```console", "```text")
    text = re.sub(
        r"^Example:\n((?:\S.*\n|  .*\n)+)", r"Example:\n\n```sh\n\1```\n", text, flags=re.M
    )
    parts = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.S)
    parts[::2] = [re.sub(r"([<$\[])", r"\\\1", part) for part in parts[::2]]
    return "".join(["# CLI: every command", *parts]).replace("# hmoe\n", "\n", 1)


def document(page: str, text: str) -> str:
    """A page that is Markdown already. `<<page cell>>` stands for the text of a cell. The index of
    a profile lists its pages, and its pictures get an alternative text."""
    if not (HERE / page).exists():
        text = markdown(page, text)
    text = text.replace("<<path>>", path_lines()).replace("<<cards>>", cards())
    for mark in re.findall(r"<<(\S+) ([^>]+)>>", text):
        text = text.replace("<<{} {}>>".format(*mark), markdown(mark[0], cell_text(*mark)))
    text = re.sub(r'<img src="(\w+)\.png"', r'<img alt="Picture of \1" src="\1.png"', text)
    if page == "docs/class_solutions.md":
        text = "---\nno-search: true\n---\n\n" + text
    if page in CHILDREN:
        return text + toctree(CHILDREN[page])
    return text + (toctree("*", ":hidden:\n:glob:") if page.startswith("figures") else "")


def gather(source: Path) -> None:
    """Copy and make all sources in the folder `source`, anew."""
    ignored = shutil.ignore_patterns("_*", "book", "executed.json")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in FILES:
        shutil.copyfile(ROOT / name, source / name)
    shutil.copytree(HERE, source, ignore=shutil.ignore_patterns("*.py", "_*"), dirs_exist_ok=True)
    for path in source.glob("nbs/paper/*.ipynb"):
        if any(ROOT.glob(f"figures/*/{path.name}")):
            path.unlink()  # its executed pages are shown
    for path in source.rglob("*.ipynb"):
        path.write_text(notebook(path.relative_to(source).as_posix()), encoding="utf-8")
    for path in (*source.glob("*.md"), *source.glob("docs/*.md"), *source.glob("figures/*/*.md")):
        text = path.read_text(encoding="utf-8")
        path.write_text(document(path.relative_to(source).as_posix(), text), encoding="utf-8")
    for folder in source.glob("nbs/[0-9]*"):
        (source / f"nbs/{folder.name}.md").write_text(part_page(folder), encoding="utf-8")
    (source / "every_command.md").write_text(commands_page(), encoding="utf-8")
    (source / "class.ipynb").write_text(slides.deck(), encoding="utf-8")


def main(folder: Path) -> int:
    """Build everything in `folder`, anew; Sphinx's exit status. Sources, caches and copies of
    notebooks stay in a folder that is removed."""
    start, work, site = time.monotonic(), folder / "work", folder / "html"
    shutil.rmtree(folder, ignore_errors=True)
    gather(work / "source")
    common = ["-q", "-E", "-d", str(work / "doctrees"), "-c", str(HERE), str(work / "source")]
    status = build_main(["-j", "auto", *common, str(work / "html")])
    deck = ["-b", "revealjs", "-t", "slides", *common, str(work / "slides")]
    status = status or build_main(deck)
    if status == 0:
        (work / "html").rename(site)
        (work / "slides").rename(site / "slides")
        play.write(site / "_static/play_data.js")
        finish(site)
        sources.copy_notebooks(site)
        shutil.rmtree(work)
        took, size = time.monotonic() - start, size_of(folder) / 1e6
        print(f"Built in {took:.0f} s, {size:.0f} MB. Open {site / 'index.html'} in a browser, or:")
        print(f"python -m http.server --directory {site}")
    return status


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:2] or [ROOT / "build/book"]).resolve()))
