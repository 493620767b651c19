"""Store the outputs of pages in their sources, `nbs/paper`: what a page shows in its first profile.

    python .ci/page_outputs.py [NAME ...]

NAME is a page (payoff). Without one, those are executed whose answer is not that of the published
page in `figures`.
"""

import json
import re
import sys
from pathlib import Path

import nbformat
from notebooks import ROOT, cleaned, run_notebook

PAGES = ROOT / "nbs" / "paper"


def answer_in(notebook) -> str:
    "The line of a page that begins with 'Answer', or '' if it has none."
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            text = "".join(output.get("data", {}).get("text/markdown", ""))
            if text.startswith("**Answer.**"):
                return text.partition("\n")[0]
    return ""


def published(page: Path) -> Path:
    "The published page of a source, in the profile that is its default."
    profile = re.search(r'profile: str = \\"(\w+)\\"', page.read_text(encoding="utf-8"))
    return ROOT / "figures" / (profile[1] if profile else "quick") / page.name


def old_pages() -> list[str]:
    "Names of the pages whose stored answer is not the published one."
    names = []
    for page in sorted(PAGES.glob("*.ipynb")):
        other = published(page)
        if not other.exists():
            continue
        answers = [answer_in(json.loads(p.read_text(encoding="utf-8"))) for p in (page, other)]
        if answers[0] != answers[1]:
            names.append(page.stem)
    return names


def store(name: str):
    "Execute a page with its defaults, and store its outputs."
    page = PAGES / f"{name}.ipynb"
    notebook = cleaned(run_notebook(page))
    text = nbformat.writes(notebook)
    page.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or old_pages():
        store(name)
        print(f"stored  nbs/paper/{name}.ipynb")
