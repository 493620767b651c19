"""Gathers the sources of the book in build/book/source; Sphinx then makes them a site.

Every page keeps its path in the project, so links between notebooks hold. Nothing is executed.
"""

import json
import re
import shutil
from pathlib import Path

import book_cells
import book_commands
import book_contents
import book_gallery
import book_names
import book_reference
from book_text import ANCHOR, Book, markdown

from hmoe_repro.core.files import repo_root
from hmoe_repro.report.gallery import title_and_claim

HERE = Path(__file__).resolve().parent
PARTS = {
    "00_core": "Foundations",
    "01_method": "The method",
    "02_data": "Data",
    "03_networks": "Networks",
    "04_algorithms": "Algorithms",
    "05_training": "Training",
    "06_studies": "Studies",
    "07_analysis": "Analysis",
    "08_report": "Reports",
    "09_bench": "Benchmarks",
    "10_apps": "Applications",
    "11_cli": "Command line",
}
START = "nbs/00_core/00_start_here.ipynb"
DOCUMENTS = ("results", "deviations", "your_own_data", "commands", "class_plan")
TOP = ("CONTRIBUTING", "CHANGELOG")


def library_notebooks(root: Path) -> list[str]:
    """The notebooks of the library in the order in which it builds on itself."""
    found = sorted((root / "nbs").glob("[0-9][0-9]_*/[0-9]*.ipynb"))
    return [p.relative_to(root).as_posix() for p in found]


def cell_text(root: Path, page: str, cell: str) -> str:
    """The text of the cell of a notebook with this id; of a Markdown file, of the section whose
    title is `cell`, without it."""
    if page.endswith(".md"):
        text = (root / page).read_text(encoding="utf-8")
        return re.search(rf"^## {re.escape(cell)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]
    return next(c["source"] for c in book_cells.read(root / page) if c["id"] == cell)


def reading_path(root: Path) -> list[str]:
    """The pages of the reading path, in the order of the table in the notebook 'Start here'."""
    links = re.findall(r"\]\(([^)]+\.ipynb)\)", cell_text(root, START, "md-path"))
    rows = [(root / START).parent.joinpath(link).resolve() for link in links]
    return [START, *(p.relative_to(root.resolve()).as_posix() for p in rows)]


def path_numbers(root: Path) -> dict[str, str]:
    """Page of the reading path -> the number of its row; a second page of a row has none."""
    rows = re.findall(
        r"^\| (\d+) \|[^\n]*?\]\(([^)]+\.ipynb)\)", cell_text(root, START, "md-path"), re.M
    )
    folder = (root / START).parent
    pages = {folder.joinpath(link).resolve().relative_to(root.resolve()): n for n, link in rows}
    return {START: "1"} | {page.as_posix(): number for page, number in pages.items()}


def unexecuted(root: Path, executed: dict) -> tuple[list[str], dict[str, str]]:
    """(pages of nbs/paper that were never run, {the others: the first page made from them})."""
    alone, moved = [], {}
    for path in sorted((root / "nbs/paper").glob("[!_]*.ipynb")):
        source = path.relative_to(root).as_posix()
        order = [f"figures/{p}/{path.name}" for p in ("paper", *book_gallery.PROFILES)]
        made = next((page for page in order if page in executed), None)
        if made:
            moved[source] = made
        else:
            alone.append(source)
    return alone, moved


def make_book(root: Path) -> tuple[Book, dict, list[str]]:
    """(the data that links need, the executed pages, the pages that were never run)."""
    book = Book(root, book_names.Index(book_names.library(root)))
    book.index.list_equations(cell_text(root, START, "md-index"))
    executed = book_gallery.pages_of(root)
    alone, book.moved = unexecuted(root, executed)
    book.moved |= {f"figures/{p}/README.md": f"gallery/{p}.md" for p in book_gallery.PROFILES}
    book.moved |= {f"figures/{p}": f"gallery/{p}.md" for p in book_gallery.PROFILES}
    book.moved |= {"README.md": "gallery/index.md", "figures": "gallery/index.md"}
    book.pages = {*library_notebooks(root), *executed, *alone}
    book.pages |= {f"docs/{name}.md" for name in DOCUMENTS} | {f"{name}.md" for name in TOP}
    book.pages |= {f"gallery/{name}.md" for name in ("index", *book_gallery.PROFILES)}
    book.pages |= {f"gallery/{paper.lower()}.md" for paper in book_gallery.PUBLISHED}
    book.pages |= {"symbols.md", "every_command.md", "install.md"}
    for page in (p for p in book.pages if p.endswith(".ipynb")):
        for cell in book_cells.read(root / page):
            if cell["cell_type"] == "markdown":
                book.anchors |= set(ANCHOR.findall(cell["source"]))
    for page in (*executed, *alone):
        book.imported[page] = book_cells.imported_names(root / page)
    book.alts = book_gallery.picture_alts(root)
    book.under_title = book_gallery.across(book, executed)
    return book, executed, alone


def write(target: Path, text: str) -> None:
    """Write a file, and the folders above it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def write_notebooks(book: Book, executed: dict, source: Path) -> None:
    """Every notebook as a page."""
    modules = {f"{m.page}.ipynb": m.name for m in reversed(book.index.modules.values())}
    for page in sorted(p for p in book.pages if p.endswith(".ipynb")):
        pictures = pictures_of(book, executed, page) if page in executed else {}
        made = book_cells.notebook(book, page, modules.get(page, ""), pictures)
        write(source / page, json.dumps(made, ensure_ascii=False))


def write_slides(book: Book, executed: dict, site: Path) -> None:
    """Add the slides to the built site, with reveal.js."""
    import slides

    pictures = {
        page: pictures_of(book, executed, page)
        for page in slides.planned(book.root)
        if page in executed
    }
    write(site / "slides/index.html", slides.deck(book, pictures))
    folder = slides.reveal_folder()
    files = ("dist/reset.css", "dist/reveal.css", "dist/reveal.js", "dist/theme/white.css")
    (site / "slides/reveal").mkdir(exist_ok=True)
    for name in files:
        text = (folder / name).read_text(encoding="utf-8")
        text = re.sub(r"@import [^;]*;", "", text) if name.endswith(".css") else text
        write(site / "slides/reveal" / Path(name).name, text)


def pictures_of(book: Book, executed: dict, page: str) -> dict:
    """Cell id -> pictures of an executed page."""
    inside = book_cells.read(book.root / page)
    return book_gallery.saved_pictures(book.root, page, executed[page]["files"], inside)


def write_documents(book: Book, source: Path) -> None:
    """The pages that are Markdown already."""
    for page in (*(f"docs/{name}.md" for name in DOCUMENTS), *(f"{name}.md" for name in TOP)):
        text = (book.root / page).read_text(encoding="utf-8")
        text = re.sub(r"^<!-- [\w-]+:(start|end) -->$", "", text, flags=re.M)
        if page == "docs/class_plan.md":
            title, _, rest = text.partition("\n")
            text = f'{title}\n\n<a href="../slides/index.html">Slides of this class</a>\n{rest}'
        write(source / page, markdown(book, page, text))
    for path in HERE.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        for mark in re.findall(r"<<(\S+) ([^>]+)>>", text):
            words = markdown(book, mark[0], cell_text(book.root, *mark))
            text = text.replace(f"<<{mark[0]} {mark[1]}>>", words)
        write(source / path.name, text)


def write_reference(book: Book, source: Path) -> None:
    """The reference of the library and of the commands."""
    modules = list(book.index.modules.values())
    write(source / "api/index.md", book_reference.overview(modules, PARTS))
    for module in modules:
        write(source / f"api/{module.name}.md", book_reference.module_page(book, module))
    write(source / "every_command.md", book_commands.commands_page())


def write_gallery(book: Book, executed: dict, source: Path) -> None:
    """The gallery, by paper and by profile, and its pictures."""
    write(source / "gallery/index.md", book_gallery.overview(book))
    for paper in book_gallery.PUBLISHED:
        page = book_gallery.gallery_page(book, executed, paper)
        write(source / f"gallery/{paper.lower()}.md", page)
    for profile in book_gallery.PROFILES:
        page = book_gallery.profile_page(book, executed, profile)
        write(source / f"gallery/{profile}.md", page)
    for page in book_gallery.explaining():
        if image := book_gallery.stored_picture(book.root, page):
            (source / f"gallery/{Path(page).stem}.png").write_bytes(image)
    for page, entry in executed.items():
        if entry["picture"]:
            picture = f"{page.rpartition('/')[0]}/{entry['picture']}"
            (source / picture).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(book.root / picture, source / picture)


def part_page(book: Book, folder: str, path: list[str]) -> str:
    """The first page of a part: a table of its notebooks."""
    inside = [p for p in sorted(book.pages) if p.startswith(f"nbs/{folder}/")]
    lines = [f"# {PARTS[folder]}\n", "| notebook | content |\n|---|---|"]
    for page in inside:
        title, claim = title_and_claim(book.root / page)
        claim = markdown(book, page, claim).replace("|", "\\|")
        lines.append(f"| [{title}](/{page}) | {claim} |")
    rest = "\n".join(f"/{p.removesuffix('.ipynb')}" for p in inside if p not in path)
    return "\n".join(lines) + f"\n\n```{{toctree}}\n:hidden:\n\n{rest}\n```\n"


def write_contents(book: Book, alone: list[str], source: Path) -> None:
    """The chapters of the bar at the left."""
    path = reading_path(book.root)
    for folder in PARTS:
        write(source / f"parts/{folder}.md", part_page(book, folder, path))
    own = "nbs/paper/study.ipynb"  # the page of any study, not of a paper
    waiting = "\n".join(f"/{p.removesuffix('.ipynb')}" for p in alone if p != own)
    text = (
        "# Pages that are not run\n\nThe notebooks below need data or a scale that was not "
        "available. They show the paper's numbers and the estimated cost of running them.\n\n"
    )
    write(source / "gallery/waiting.md", f"{text}```{{toctree}}\n:titlesonly:\n\n{waiting}\n```\n")
    claims = ["figures/quick/claims"] if "figures/quick/claims.ipynb" in book.pages else []
    use = ["install", "docs/your_own_data", "docs/commands", own, "every_command"]
    use += ["CONTRIBUTING", "CHANGELOG"]
    chapters = {
        "The reading path": path,
        "Results": [*claims, "gallery/index", "docs/results", "docs/deviations", "gallery/waiting"],
        "Use it": use,
        "For a class": ["docs/class_plan"],
        "Reference": ["symbols", "api/index"],
        "All notebooks": [f"parts/{folder}" for folder in PARTS],
    }
    modules = book_reference.by_part(list(book.index.modules.values()), PARTS)
    book_contents.write(source, chapters, modules, path_numbers(book.root))


def main(target: Path) -> tuple[Book, dict]:
    """Gather everything in the folder `target`, anew; returns what `write_slides` needs."""
    root = repo_root()
    shutil.rmtree(target, ignore_errors=True)
    book, executed, alone = make_book(root)
    write_notebooks(book, executed, target)
    write_documents(book, target)
    write_reference(book, target)
    write_gallery(book, executed, target)
    write_contents(book, alone, target)
    for name in sorted(book.downloads):
        (target / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target / "files" / name)
    print(f"{len(book.pages)} pages of the project, {len(book.index.modules)} of the reference")
    return book, executed
