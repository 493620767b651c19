"""The links of a page of the book to its source: edit it on GitHub, download its notebook."""

import configparser
import json
from pathlib import Path

from names import ROOT, library

MADE = {"every_command": "nbs/11_cli/08_app.ipynb", "class": "docs/class_plan.md"}
HERE = "docs/book"


def repository() -> str:
    """Return the address of the repository at its main branch, from settings.ini."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    return "{git_url}/edit/{branch}".format(**settings["DEFAULT"])


def source_of(page: str) -> str:
    """Return the file of the project to edit for a page of the book; '' if there is none.

    Executed pages are made from the notebooks in nbs/paper, pages of the API from the notebook that
    exports the module, and the page of a part of the library from a table.
    """
    if page.startswith("api/"):
        module = page.removeprefix("api/")
        pages = {name.page for name in library().values() if name.module == module}
        return f"{pages.pop()}.ipynb" if len(pages) == 1 else ""
    if page.startswith("figures/") and Path(page).name != "README":
        page = f"nbs/paper/{Path(page).name}"
    if (ROOT / f"{page}.ipynb").is_file():
        return f"{page}.ipynb"
    found = [MADE.get(page, ""), f"{page}.md", f"{HERE}/{page}.md"]
    if (ROOT / page).is_dir():  # a part of the library
        found.append("docs/notebooks.md")
    return next((path for path in found if path and (ROOT / path).is_file()), "")


def notebook_of(page: str) -> str:
    """Return the notebook of the project that a page shows; '' if it shows none."""
    return f"{page}.ipynb" if (ROOT / f"{page}.ipynb").is_file() else ""


def copy_notebooks(site: Path) -> None:
    """Put each notebook next to its page, for downloading. Outputs are left out to save space."""
    for html in site.rglob("*.html"):
        page = html.relative_to(site).with_suffix("").as_posix()
        if name := notebook_of(page):
            notebook = json.loads((ROOT / name).read_text(encoding="utf-8"))
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    cell |= {"outputs": [], "execution_count": None}
            text = json.dumps(notebook, ensure_ascii=False, indent=0)
            (site / name).write_text(text + "\n", encoding="utf-8")


def buttons(page: str) -> list[dict]:
    """Return the buttons above a page, as the theme draws them."""
    made = []
    if source := source_of(page):
        made.append(
            {
                "type": "link",
                "url": f"{repository()}/{source}",
                "text": "Edit",
                "icon": "fas fa-pencil-alt",
                "tooltip": f"Edit {source} on GitHub",
                "label": "edit-page",
            }
        )
    if notebook := notebook_of(page):
        made.append(
            {
                "type": "link",
                "url": Path(notebook).name,
                "text": "Notebook",
                "icon": "fas fa-download",
                "tooltip": "Download this notebook, without outputs",
                "label": "download-notebook",
            }
        )
    return made
