"""A headless Chromium that looks at pages of the book, for tests/test_book.py."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

WIDTHS = (1400, 800, 400)
NAMES = ("chromium", "chromium-browser", "google-chrome")

# What is wrong with a page at the width it has now, as a list of sentences.
LOOK = """() => {
  const wrong = [], root = document.documentElement;
  if (root.scrollWidth > window.innerWidth + 1)
    wrong.push(`${root.scrollWidth} pixels wide in a window of ${window.innerWidth}`);
  for (const img of document.images) {
    if (img.complete && !img.naturalWidth) wrong.push(`picture not loaded: ${img.src}`);
    if (!img.alt) wrong.push(`picture without alternative text: ${img.src}`);
  }
  for (const e of document.querySelectorAll("mjx-merror, [data-mjx-error]"))
    wrong.push(`formula: ${e.textContent}`);
  const walker = document.createTreeWalker(document.querySelector("article") || document.body,
    NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const kept = node.parentElement.closest("pre, code, .sig, script, style, mjx-container");
    const raw = /\\$|\\\\\\(|\\\\\\[/.test(node.data);
    if (raw && !kept) wrong.push(`raw formula: ${node.data.trim()}`);
  }
  for (const e of document.querySelectorAll("mjx-container[display=true]"))
    if (e.getBoundingClientRect().left < 0) wrong.push(`begins outside: ${e.textContent}`);
  for (const math of document.querySelectorAll(".math"))
    if (!math.querySelector("mjx-container")) wrong.push(`not typeset: ${math.textContent}`);
  for (const cell of document.querySelectorAll("td.number, table.dataframe td")) {
    const range = document.createRange();
    let text = cell;
    while (text.firstChild) text = text.firstChild;
    range.selectNodeContents(text);
    const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
    if (/^[-+−]?\\d\\S*$/.test(cell.textContent.trim()) && lines.size > 1)
      wrong.push(`a number on ${lines.size} lines: ${cell.textContent}`);
  }
  for (const e of document.querySelectorAll("mjx-container:not([display])")) {
    if (!e.checkVisibility()) continue;
    const style = getComputedStyle(e), scrolls = style.overflowX === "auto";
    if (scrolls && style.scrollbarWidth !== "none" && e.scrollWidth > e.clientWidth)
      wrong.push(`a bar under ${e.textContent}`);
    const cut = e.getBoundingClientRect().right > window.innerWidth + 1;
    if (cut && !e.closest("table, pre, .cell_output"))  // which scroll
      wrong.push(`beyond the edge: ${e.textContent}`);
  }
  return wrong;
}"""

# Lines of code that scroll although they have at most 100 columns.
LONG_LINES = """() => [...document.querySelectorAll(".cell_input pre")].filter(
  pre => pre.offsetParent && pre.scrollWidth > pre.clientWidth + 1 &&
  pre.textContent.split("\\n").every(line => line.length <= 100)
).map(pre => pre.textContent.slice(0, 80))"""


# What of a slide's code or output is cut, and what the arrows cover.
SLIDE = """() => {
  const slide = Reveal.getCurrentSlide();
  const cut = [...slide.querySelectorAll("pre, code")].filter(e => e.clientWidth &&
    (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1));
  const range = document.createRange(), boxes = [...slide.querySelectorAll("img")];
  const arrows = [...document.querySelectorAll(".reveal .controls button")]
    .filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect());
  const walker = document.createTreeWalker(slide, NodeFilter.SHOW_TEXT);
  const rects = boxes.map(e => e.getBoundingClientRect());
  while (walker.nextNode()) {
    range.selectNodeContents(walker.currentNode);
    if (walker.currentNode.data.trim()) rects.push(...range.getClientRects());
  }
  const covered = rects.filter(box => arrows.some(a => a.left < box.right &&
    box.left < a.right && a.top < box.bottom && box.top < a.bottom));
  return [...cut.map(e => `cut: ${e.textContent.slice(0, 60)}`),
    ...covered.map(box => `below an arrow: ${JSON.stringify(box)}`)];
}"""

# Texts with too little contrast to the ground behind them (WCAG 2.2, 1.4.3: 4.5, or 3 where they
# are large), as [ratio, needed, text]; of pictures and hidden or disabled text nothing is said.
CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => below.map((v, i) => top[i] * top[3] + v * (1 - top[3]));
  const light = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    if (!element) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, ground(element.parentElement));
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    const shown = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!text || !shown || element.closest("script, style, svg, :disabled, mjx-container"))
      continue;
    const style = getComputedStyle(element), below = ground(element);
    const [high, low] = [light(over(rgba(style.color), below)), light(below)]
      .sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), bold = style.fontWeight >= 700;
    const needed = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < needed) found.push([Math.round(100 * ratio) / 100, needed, text.slice(0, 60)]);
  }
  return found;
}"""


def chromium() -> str:
    "The path of a Chromium on this machine; '' without."
    found = [os.environ.get("HMOE_CHROMIUM", ""), *map(shutil.which, NAMES)]
    return next((f for f in found if f), "")


@contextmanager
def pages(width=WIDTHS[0], scheme="light"):
    "A page of a headless Chromium; what it complains about is gathered in `page.complaints`."
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--allow-file-access-from-files"]
        browser = driver.chromium.launch(executable_path=chromium(), args=flags)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(120_000)  # on a machine that is busy with training
        page = context.new_page()
        page.complaints = []
        page.on("console", lambda m: m.type == "error" and page.complaints.append(m.text))
        page.on("pageerror", lambda e: page.complaints.append(str(e)))
        page.on("request", lambda r: page.complaints.extend(outside(r.url)))
        yield page
        browser.close()


def outside(url):
    "A complaint about a request that leaves the folder."
    return [] if url.startswith(("file:", "data:", "blob:")) else [f"request to {url}"]


def opened(page, path: Path, fragment=""):
    "Load a page and wait until its formulas are typeset."
    page.complaints.clear()
    page.goto(path.as_uri() + fragment)
    page.evaluate("() => window.MathJax && MathJax.startup && MathJax.startup.promise")
    page.evaluate("() => { for (const i of document.images) i.loading = 'eager'; }")
    page.add_style_tag(content="* { transition: none !important; }")  # no colour on its way
    page.wait_for_function("() => [...document.images].every(i => i.complete)")


def faults(page, path: Path) -> list[str]:
    "What is wrong with a page at any of the three widths."
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    opened(page, path)
    found = [*page.evaluate(LONG_LINES)]
    found = [f"scrolls at {WIDTHS[0]} pixels: {line}" for line in found]
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        found += [f"{width}: {fault}" for fault in page.evaluate(LOOK)]
    return list(dict.fromkeys([*page.complaints, *found]))
