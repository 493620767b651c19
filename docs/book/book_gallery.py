"""The gallery: every figure and table of the three papers, and every page of every profile."""

import base64
import re
from pathlib import Path

from book_cells import read
from book_text import Book, markdown, plain

from hmoe_repro.report.gallery import (
    PUBLISHED,
    facts_of,
    index_entry,
    item_status,
    status_words,
    title_and_claim,
)
from hmoe_repro.report.render import files_of

PROFILES = {
    "quick": "embedded digits and the toy",
    "mnist": "MNIST, coloured and rotated",
    "pacs": "PACS at low resolution",
    "bench": "time and memory",
}
# The data of a profile, for cards with a line for each; the paper's own scale first.
DATA = {
    "paper": "the paper's data",
    "mnist": "MNIST",
    "pacs": "PACS",
    "quick": "digits",
    "bench": "this machine",
}
# The cell whose picture represents a notebook, where that is not the first one.
STANDS_FOR = {"nbs/01_method/01_toy.ipynb": "figure-mixture-parts"}
COLOURS = {
    "full": "success",
    "reduced": "warning",
    "stand-in": "warning",
    "explained": "info",
    "not run": "secondary",
}


def pages_of(root: Path) -> dict[str, dict]:
    """'figures/quick/hmoe_fig3.ipynb' -> its entry: title, claim, picture, verdict, files."""
    found = {}
    for folder in sorted(p for p in (root / "figures").iterdir() if (p / "README.md").exists()):
        for name, files in files_of(folder).items():
            page = f"figures/{folder.name}/{name}.ipynb"
            if (root / page).exists():
                found[page] = index_entry(folder, name, files) | {"files": files}
    return found


def saved_pictures(root: Path, page: str, files: list[str], cells: list[dict]) -> dict:
    """cell id -> pictures: each file goes to the cell that names it, else to the last that draws,
    and that of the page itself to the first.

    Executed pages hold no pictures of their own: these are saved next to them as files.
    """
    (folder, _, of), placed = page.rpartition("/"), {}
    code = [c for c in cells if c["cell_type"] == "code"]
    drawing = [c for c in code if re.search(r"save_figure|page\.(figure|contrasts)", c["source"])]
    for name in (f for f in files if f.endswith(".png")):
        part = name.removesuffix(".png").removeprefix(of.removesuffix(".ipynb")).strip("_")
        exact = [c for c in drawing if part and f'"{part}"' in c["source"]]
        cell = (exact or drawing or code)[-1 if exact or part else 0]
        placed.setdefault(cell["id"], []).append(f"{folder}/{name}")
    return placed


def picture_alts(root: Path) -> dict[str, str]:
    """Saved picture -> the title and data of its page, with the words that its name adds to that of
    its page: 'hmoe_fig3_errors.png' is 'Figure 3: … (errors). Data: …'."""
    found = {}
    for folder in sorted(path for path in (root / "figures").iterdir() if path.is_dir()):
        for page, files in files_of(folder).items():
            title = plain(title_and_claim(folder / f"{page}.ipynb")[0])
            data = ", ".join(facts_of(folder / f"{page}.ipynb").get("dataset") or [])
            for name in (Path(file).stem for file in files if file.endswith(".png")):
                more = name.removeprefix(page).strip("_").replace("_", " ")
                said = f"{title} ({more})" if more else title
                if data:
                    said += (
                        f"{'' if said.endswith('?') else '.'} Data: {data}, profile {folder.name}"
                    )
                found[f"figures/{folder.name}/{name}.png"] = said
    return found


def explaining() -> list[str]:
    """The notebooks that explain a figure or table of which there is nothing to run."""
    shown = [pages[0] for items in PUBLISHED.values() for _, *pages in items.values()]
    return list(dict.fromkeys(p for p in shown if p.endswith(".ipynb")))


def stored_picture(root: Path, page: str) -> bytes:
    """The picture that represents a notebook, as a rule the first; empty without one."""
    chosen = STANDS_FOR.get(page)
    for cell in (c for c in read(root / page) if chosen in (None, c["id"])):
        for output in cell.get("outputs", []):
            if image := output.get("data", {}).get("image/png"):
                return base64.b64decode("".join(image))
    return b""


def card(title: str, status: str, text: str, links: str, picture: str = "", alt: str = "") -> str:
    """A card of the gallery."""
    image = f"![{alt}](/{picture})\n\n" if picture else ""
    badge = f"{{bdg-{COLOURS[status]}}}`{status}`" if status in COLOURS else ""
    foot = f":::{{card-footer}}\n{links}\n:::\n" if links else ""
    return f"::::{{grid-item-card}} {title}\n{image}{badge} {text}\n\n{foot}::::\n"


def links_of(book: Book, markdown_links: str) -> str:
    """Links of the status table as links of the book."""
    return markdown(book, "README.md", markdown_links) if markdown_links != "–" else ""


def words_of(book: Book, page: str, text: str) -> str:
    """A claim or a finding of an entry, which is written for a cell of a table; the book has its
    own words before a finding."""
    return markdown(book, page, text.removeprefix("**Found:** ").replace("\\|", "|"))


def found_here(book: Book, entries: dict[str, dict]) -> str:
    """What the pages of a figure or table found, a line for each data set; `entries`: the page of
    each profile. Empty where a page says nothing."""
    lines = []
    for profile, entry in entries.items():
        if entry["said"]:
            where = f"Found on {DATA[profile]}" if len(entries) > 1 else "Found here"
            said = words_of(book, entry["page"], entry["said"])
            lines.append(f"\n\n*{where}:* {said}")
    return "".join(lines)


def item_card(book: Book, pages: dict, paper: str, item: str, shown: tuple) -> str:
    """The card of a figure or table of a paper."""
    shows, *artefacts = shown
    status, links = item_status(tuple(artefacts))
    entries = {}
    for profile in DATA:
        made = [f"figures/{profile}/{a}.ipynb" for a in artefacts]
        if page := next((m for m in made if m in pages), None):
            entries[profile] = pages[page] | {"page": page}
    text, picture, alt = f"**{shows[0].upper() + shows[1:]}.**", "", ""
    if not entries:  # explained in a notebook, or a page that was not run
        page = artefacts[0] if status == "explained" else f"nbs/paper/{artefacts[0]}.ipynb"
        if artefacts[0]:
            text += f" {markdown(book, page, title_and_claim(book.root / page)[1])}"
        if status == "explained" and stored_picture(book.root, page):
            picture = f"gallery/{Path(page).stem}.png"
            alt = plain(f"{paper} {item}: {shows}, a picture of the notebook {Path(page).stem}")
    else:
        entry = next((e for e in entries.values() if e["picture"]), next(iter(entries.values())))
        text += f" {markdown(book, entry['page'], entry['claim'])}"
        text += " None of the data below are the paper's." if status == "stand-in" else ""
        text += found_here(book, entries) if status != "not run" else ""
        if entry["picture"]:
            picture = f"{entry['page'].rpartition('/')[0]}/{entry['picture']}"
            alt = plain(f"{paper} {item}: {shows}")
    return card(f"{paper} {item}", status, text, links_of(book, links), picture, alt)


def across(book: Book, pages: dict) -> dict[str, str]:
    """Page of evidence -> the lines under its title: its finding, and links to the same figure or
    table on other data and in the gallery."""
    placed = {}
    for paper, items in PUBLISHED.items():
        for item, (_, *artefacts) in items.items():
            links = links_of(book, item_status(tuple(artefacts))[1])
            more = f"{paper} {item}: {links} · [in the gallery](/gallery/{paper.lower()}.md)"
            for artefact in filter(None, artefacts):
                placed.setdefault(artefact, []).append(more)
    found = {}
    for page, entry in pages.items():
        said = words_of(book, page, entry["said"])
        lines = [f"*Found here:* {said}"] if said else []
        if page.split("/")[1] != "bench":
            lines += placed.get(entry["name"], [])
        found[page] = "".join(f"\n{line}\n" for line in lines)
    return found


def gallery_page(book: Book, pages: dict, paper: str) -> str:
    """The gallery of one paper."""
    items = PUBLISHED[paper]
    cards = [item_card(book, pages, paper, item, shown) for item, shown in items.items()]
    grid = ":::::{grid} 1 1 2 2\n:gutter: 3\n\n" + "\n".join(cards) + ":::::\n"
    return f"# {paper}: every figure and table\n\n{grid}"


def overview(book: Book) -> str:
    """The first page of the gallery: the status of every figure and table in one table."""
    text = [
        "# Is it reproduced?\n",
        f"Every figure and table of the three papers, with its status: {status_words()} Only "
        "*full* results may be compared with the paper's numbers. *Explained* is a notebook about "
        "it. What is *not run* needs pretrained weights, large image sets or a GPU.\n",
    ]
    if "figures/quick/claims.ipynb" in book.pages:
        text.append(
            "The page of [claims](/figures/quick/claims.ipynb) summarises them, with a verdict for "
            "each claim of the papers.\n"
        )
    for paper, items in PUBLISHED.items():
        text.append(f"## {paper}\n\n[Pictures and claims](/gallery/{paper.lower()}.md)\n")
        text.append("| | shows | status | where |\n|---|---|---|---|")
        for item, (shows, *artefacts) in items.items():
            status, links = item_status(tuple(artefacts))
            badge = f"{{bdg-{COLOURS[status]}}}`{status}`"
            text.append(f"| {item} | {shows} | {badge} | {links_of(book, links)} |")
        text.append("")
    listed = "\n".join([*(p.lower() for p in PUBLISHED), *PROFILES])
    return "\n".join(text) + f"\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"


def profile_page(book: Book, pages: dict, profile: str) -> str:
    """Every executed page of a profile, with its claim and what it found."""
    inside = {p: e for p, e in pages.items() if p.startswith(f"figures/{profile}/")}
    cards = []
    for page, e in inside.items():
        claim, said = (words_of(book, page, e[k]) for k in ("claim", "said"))
        text = claim + (f"\n\n*Found here:* {said}" if said else "")
        picture = f"figures/{profile}/{e['picture']}" if e["picture"] else ""
        links = f"[the page](/{page})"
        cards.append(card(e["title"], "", text, links, picture, plain(e["title"])))
    grid = ":::::{grid} 1 1 2 2\n:gutter: 3\n\n" + "\n".join(cards) + ":::::\n"
    listed = "\n".join(f"/{page.removesuffix('.ipynb')}" for page in inside)
    said = f"All pages of the profile `{profile}`: {PROFILES.get(profile, profile)}."
    tree = f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    return f"# Pages: {PROFILES.get(profile, profile)}\n\n{said}\n\n{grid}\n{tree}"
