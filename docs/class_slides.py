"""Prints class_slides.pdf, the slides of the class: `python docs/class_slides.py [SITE]`.

SITE is the built book (`make book`), by default build/book/html. Printing needs playwright and a
Chromium, which is found on the path or named by HMOE_CHROMIUM. The digest of the slides is kept at
the end of the file: a test compares it with the digest of the notebooks of today.
"""

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PDF = ROOT / "docs/class_slides.pdf"
STYLE = ROOT / "docs/book/static/slides.css"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
sys.path.append(str(ROOT / "docs/book"))

import slides  # noqa: E402


def digest() -> str:
    """Return the digest of the slides with their notes, of their style, and of this file."""
    sources = [slides.deck(), STYLE.read_text(encoding="utf-8")]
    sources.append(Path(__file__).read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()


def pages_of(pdf: bytes) -> int:
    """Return the number of pages of a PDF."""
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


def without_dates(pdf: bytes) -> bytes:
    """Return the PDF with its dates set to the beginning of 2000, of the same length."""
    fixed = rb"\1(D:20000101000000+00'00')"
    return re.sub(rb"(/(?:Creation|Mod)Date\s*)\(D:\d{14}\+00'00'\)", fixed, pdf)


def printed(site: Path) -> bytes:
    """Return the slides of a built book as a PDF."""
    from playwright.sync_api import sync_playwright

    found = [os.environ.get("HMOE_CHROMIUM"), *map(shutil.which, BROWSERS)]
    path = next((name for name in found if name), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(300_000)  # on a busy machine
        page.goto((site / "slides/class.html").as_uri() + "?print-pdf")
        page.wait_for_selector("html.reveal-print, html.print-pdf", state="attached")
        page.evaluate("() => MathJax.startup.promise")
        page.wait_for_function("() => [...document.images].every(image => image.complete)")
        page.wait_for_function("() => document.querySelectorAll('.pdf-page').length > 1")
        pdf = page.pdf(prefer_css_page_size=True, print_background=True)
        browser.close()
    return without_dates(pdf)


def main(site: Path) -> None:
    """Write the PDF with the digest of the slides."""
    if not (site / "slides/class.html").is_file():
        sys.exit(f"{site} has no slides/class.html. Fix: make book")
    PDF.write_bytes(printed(site) + f"% digest {digest()}\n".encode())


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or [ROOT / "build/book/html"]).resolve())
