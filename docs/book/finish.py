"""What is done to the site after Sphinx: files that no page needs are removed, and the search gets
the texts of the pages, with formulas as text. A page opened from a file may not fetch another."""

import json
import re
from html import escape, unescape
from pathlib import Path

from formulas import plain

# Of MathJax only `tex-chtml.js` and what it may load; mathmaps are for formulas read aloud.
UNUSED = [
    "**/*.map",
    "_static/locales/**/*.*",
    "_static/mathjax/core.js",
    "_static/mathjax/node-main.js",
    "_static/mathjax/tex-chtml-*",
    "_static/mathjax/*mml-*",
    "_static/mathjax/tex-svg*",
    "_static/mathjax/input/*.js",
    "_static/mathjax/input/mml/**/*.*",
    "_static/mathjax/output/**/*.js",
    "_static/mathjax/sre/mathmaps/*.json",
    "slides/_static/revealjs/**/*.esm.js",
    "slides/_static/revealjs/**/*.ttf",
    "slides/_static/revealjs/**/*.eot",
    "slides/_static/revealjs/plugin/highlight/*",
]
KEPT = ("base.json", "en.json", "nemeth.json")
LENGTH = 4000  # characters of a page that the search can quote

SEARCH = """const TEXTS = %s;
window.fetch = async url => ({text: async () => {
  const page = new URL(url, location).pathname;
  const name = Object.keys(TEXTS).find(name => page.endsWith(`/${name}`));
  const main = document.createElement("main");
  main.setAttribute("role", "main");
  main.textContent = TEXTS[name] || "";
  return main.outerHTML;
}});
"""
LOAD = '<script src="_static/search_texts.js"></script>\n</head>'


# Marks of names, punctuation and operators, which then have the colour of the text around them.
# They were a tenth of the site.
PLAIN = re.compile(r'<span class="(?:n|nn|p|w|o)">([^<]*)</span>')
MATH = re.compile(r'<(span|div) class="[^"]*\bmath\b[^"]*"[^>]*>(.*?)</\1>', re.S)
DELIMITERS = re.compile(r"\\[()\[\]]|\$\$")
SILENT = re.compile(
    r"<(pre|script|style|h1)\b.*?</\1>|<a class=.headerlink.*?</a>|<summary\b.*?</summary>"
    r"|<div class=.(?:runline|exported)\b.*?</div>",
    re.S,
)


SIGNATURE = re.compile(
    r'<dt class="sig\b.*?<span class="sig-name descname">(.*?)</span>.*?</dt>', re.S
)


def formula(match: re.Match) -> str:
    """Return the formula of a page as text."""
    return plain(DELIMITERS.sub(" ", unescape(match[2])))


def text_of(page: str) -> str:
    """Return the prose of a page: no code, no marks, formulas as text."""
    body = page.partition("<article")[2].partition("</article>")[0].partition(">")[2]
    body = SIGNATURE.sub(r"\1: ", body)
    body = MATH.sub(lambda m: escape(formula(m)), SILENT.sub(" ", body))
    body = re.sub(r"</?(?:code|em|strong|span|a|sup|sub|i|b)\b[^>]*>", "", body)
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())
    return text[:LENGTH]


def finish(site: Path) -> None:
    """Remove what no page needs, and write the texts for the search."""
    for pattern in UNUSED:
        for path in [p for p in site.glob(pattern) if p.is_file() and p.name not in KEPT]:
            path.unlink()
    pages = sorted(p for p in site.rglob("*.html") if not {"_static", "slides"} & {*p.parts})
    texts = {}
    for path in pages:
        page = PLAIN.sub(r"\1", path.read_text(encoding="utf-8"))
        path.write_text(page, encoding="utf-8")
        texts[path.relative_to(site).as_posix()] = text_of(page)
    script = SEARCH % json.dumps(texts, ensure_ascii=False)
    (site / "_static/search_texts.js").write_text(script, encoding="utf-8")
    search = site / "search.html"
    text = search.read_text(encoding="utf-8").replace("</head>", LOAD, 1)
    search.write_text(text, encoding="utf-8")


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
