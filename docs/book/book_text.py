"""Markdown of the project as Markdown of the book: links, names, folded answers."""

import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path

from book_names import Index

LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^()\s]+)\)")
NAME = re.compile(r"(?<![`\w\[{}])`([A-Za-z_][\w.]*(?:\(\))?)`(?![`\]])")
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>\n?')
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.M | re.S)
ANSWER = re.compile(r"<details>\s*<summary>(.*?)</summary>\n(.*?)</details>", re.S)


@dataclass
class Book:
    """What links need to know: the project's folder, its pages, its names."""

    root: Path
    index: Index
    pages: set[str] = field(default_factory=set)  # sources, such as docs/results.md
    moved: dict[str, str] = field(default_factory=dict)  # source not in the book -> the one shown
    anchors: set[str] = field(default_factory=set)  # targets of the whole book: hmoe-eq-4
    downloads: set[str] = field(default_factory=set)  # files that a page offers as they are
    imported: dict[str, set] = field(default_factory=dict)  # page of evidence -> names it imports
    under_title: dict[str, str] = field(default_factory=dict)  # page -> what follows its title
    alts: dict[str, str] = field(default_factory=dict)  # saved picture -> alternative text


def outside_fences(text: str, change) -> str:
    """`text` with `change` applied to all that is not a fenced block."""
    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def download(book: Book, source: str, words: str) -> str:
    """A link that downloads the file `source` of the project."""
    book.downloads.add(source)
    return f"{{download}}`{words.replace('`', '')} </files/{source}>`"


def link(book: Book, page: str, words: str, target: str) -> str:
    """A link of `page` as the book has it; the words alone where its target is no page or file."""
    if re.match(r"\w+:", target):
        return f"[{words}]({target})"
    path, _, anchor = target.partition("#")
    if anchor in book.anchors:
        return f"[{words}](#{anchor})"
    if not path:  # a heading of this page: Jupyter keeps its capitals, the book does not
        return f"[{words}](#{anchor.lower()})"
    source = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    source = book.moved.get(source, source)
    if source in book.pages:
        return f"[{words}](/{source})"
    if (book.root / source).is_file():
        return download(book, source, words)
    return words


def roles(book: Book, page: str, module: str, text: str) -> str:
    """Names of the library in code font as links to their place in the reference. On a page of
    evidence most such words are columns of its tables: a link has what its code imports."""
    imported = book.imported.get(page)

    def role(match):
        full, word = book.index.find(match[1], module), match[1].removesuffix("()")
        could_be_column = imported is not None and word.islower() and "." not in word
        if not full or (could_be_column and word not in imported):
            return match[0]
        return f"{{py:obj}}`{match[1]} <{full}>`"

    lines = text.split("\n")
    return "\n".join(s if s.startswith("#") else NAME.sub(role, s) for s in lines)


def markdown(book: Book, page: str, text: str, module: str = "") -> str:
    """The text of a cell or a page, for the page of the book made from the source `page`."""

    def change(part):
        part = ANCHOR.sub(lambda m: f"({m[1]})=\n\n", part)
        kept = []  # links are set aside, so that no name inside of one becomes a second link

        def keep(match):
            kept.append(link(book, page, match[1], match[2]))
            return f"\0{len(kept) - 1}\0"

        part = roles(book, page, module, LINK.sub(keep, part))
        return re.sub("\0(\\d+)\0", lambda m: kept[int(m[1])], part)

    text = outside_fences(text, change)
    return ANSWER.sub(lambda m: f":::{{dropdown}} {m[1]}\n{m[2]}\n:::", text)


def plain(text: str) -> str:
    """Words without Markdown, for an alternative text."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\\mathcal\{?(\w)\}?", r"\1", text)
    return re.sub(r"\s+", " ", re.sub(r"[*`$\\{}>|]|^#+ ", "", text, flags=re.M)).strip()


# Where a sentence ends: not behind 'Fig.' or 'et al.', nor in 'Table 3. Accuracy'.
NO_END = r"(?<!\b[Ff]ig\.)(?<!\b[Ee]q\.)(?<!\beqs\.)(?<!\bal\.)(?<!Figure \d\.)(?<!Table \d\.)"
ENDS = re.compile(rf"(?<=[.:?]){NO_END}\s")
SHOWN = re.compile(
    r"\b(pictures?|figure|panels?|curves?|bars?|dots?|lines?|colou?rs?|left|right|top|bottom|below"
    r"|drawn|draws?|plots?|shows?|axis)\b",
    re.I,
)


def first_sentence(text: str, longest: int = 240) -> str:
    """The first sentence of a Markdown text, at most `longest` characters."""
    said = ENDS.split(plain(text))[0].rstrip(":")
    return said if len(said) <= longest else said[:longest].rpartition(" ")[0]


def about_picture(text: str) -> str:
    """The first sentence of a Markdown text that speaks of what a picture shows; '' without one."""
    said = next((s for s in ENDS.split(plain(text)) if SHOWN.search(s)), "")
    return first_sentence(said)


def distinct(words: list[str]) -> list[str]:
    """Alternative texts of a page's pictures; the same ones are numbered: ', picture 2 of 3'."""
    made = []
    for at, said in enumerate(words):
        total, number = words.count(said), words[:at].count(said) + 1
        made.append(f"{said}, picture {number} of {total}" if total > 1 else said)
    return made


def profiled(page: str, text: str) -> str:
    """The text of a page of figures/<profile> with the profile's name, which its template lacks."""
    return text.replace("<profile>", page.split("/")[1]) if page.startswith("figures/") else text
