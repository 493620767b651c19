"""The chapters of the book, as lists for Sphinx and as the bar at the left."""

import json
import re
from pathlib import Path


def title_of(path: Path) -> str:
    """The first title of a page, without marks."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "".join(cells[0]["source"])
    else:
        text = path.read_text(encoding="utf-8")
    found = re.search(r"^# (.*)$", text, re.M)
    return re.sub(r"[`\\]", "", found[1]) if found else path.stem


def page_at(source: Path, doc: str) -> Path:
    """The source of the page `doc`, which is named without its suffix."""
    kinds = (source / f"{doc}{suffix}" for suffix in (".ipynb", ".md"))
    return next(path for path in kinds if path.exists())


def listed(source: Path, doc: str) -> list[str]:
    """The pages that the list of contents in the page `doc` names."""
    path = page_at(source, doc)
    if path.suffix == ".ipynb":
        return []
    trees = re.findall(
        r"^```\{toctree\}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S
    )
    lines = [s for tree in trees for s in tree.splitlines() if s and not s.startswith(":")]
    folder = doc.rpartition("/")[0]
    return [s[1:] if s[0] == "/" else f"{folder}/{s}".lstrip("/") for s in lines]


def entry(source: Path, doc: str) -> dict:
    """A page of the bar at the left, with those below it."""
    children = [entry(source, child) for child in listed(source, doc)]
    inside = [d for c in children for d in (c["doc"], *c["inside"])]
    title = title_of(page_at(source, doc))
    return {"doc": doc, "title": title, "children": children, "inside": inside}


def tree(caption: str, docs: list[str]) -> str:
    """A hidden list of contents with a caption, for Sphinx."""
    pages = "\n".join(docs)
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def reference_entry(overview: dict, modules: dict[str, list[tuple[str, str]]]) -> dict:
    """The entry of the reference with a line for each part, which leads to its list and has the
    modules of the part, (page, title), below it. Sphinx need not read a list of them all."""
    lines = []
    for part, pages in modules.items():
        children = [{"doc": d, "title": t, "children": [], "inside": []} for d, t in pages]
        anchor = re.sub("[^a-z0-9]+", "-", part.lower()).strip("-")  # as docutils names a section
        found = {"doc": overview["doc"], "anchor": f"#{anchor}", "title": part}
        lines.append(found | {"children": children, "inside": [d for d, _ in pages]})
    inside = [d for line in lines for d in line["inside"]]
    return overview | {"children": lines, "inside": inside}


def numbered(path: list[dict], numbers: dict[str, str]) -> None:
    """Number the pages of the reading path, which the text calls by their numbers."""
    for page in path:
        if number := numbers.get(page["doc"]):
            page["title"] = f"{number}. {page['title']}"


def once(pages: list[dict], seen: set[str]) -> None:
    """Leave a page in the bar only where it stands first: a reader is at one place."""
    for page in pages:
        below = page.get("pages") or page.get("children") or []
        if "doc" in page:
            seen.add(page["doc"])
        below[:] = [p for p in below if p.get("anchor") or p["doc"] not in seen]
        once(below, seen)
        if "inside" in page:
            page["inside"] = [d for p in below for d in (p["doc"], *p["inside"])]


def write(
    source: Path,
    chapters: dict[str, list[str]],
    modules: dict[str, list[tuple[str, str]]],
    numbers: dict[str, str],
) -> None:
    """Add the chapters (caption -> pages) to index.md, and write them to contents.json, with the
    `modules` (part -> page and title of each) below `api/index`; `numbers`: page -> its number."""
    docs = {
        name: [re.sub(r"\.(ipynb|md)$", "", d) for d in pages] for name, pages in chapters.items()
    }
    index = source / "index.md"
    trees = "\n".join(tree(name, pages) for name, pages in docs.items())
    index.write_text(index.read_text(encoding="utf-8") + "\n" + trees, encoding="utf-8")
    bar = [
        {"caption": name, "pages": [entry(source, d) for d in pages]}
        for name, pages in docs.items()
    ]
    for chapter in bar:
        chapter["pages"] = [
            reference_entry(page, modules) if page["doc"] == "api/index" else page
            for page in chapter["pages"]
        ]
    numbered(bar[0]["pages"], {re.sub(r"\.(ipynb|md)$", "", d): n for d, n in numbers.items()})
    once(bar, set())
    (source / "contents.json").write_text(json.dumps(bar), encoding="utf-8")
