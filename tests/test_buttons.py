"""Buttons of Colab and Binder on the notebooks of the reading path, and the cell that installs."""

import configparser
import re
import sys
from urllib.parse import quote

import pytest
from notebooks import ROOT, read

sys.path += [str(ROOT / "docs" / "book"), str(ROOT / ".ci")]
import cells as book  # noqa: E402
import names  # noqa: E402
import reading_path  # noqa: E402

# Pages of evidence are rendered from records into `figures/`, and need no kernel.
PATH = [page for page in names.reading_path() if page.startswith("nbs/")]
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "settings.ini")
URL = SETTINGS["DEFAULT"]["git_url"]
REPO = URL.removeprefix("https://github.com/")
BRANCH = SETTINGS["DEFAULT"]["branch"]


def uses_the_library(page):
    "Does a notebook import the library, outside of the cell that installs it?"
    code = [c for c in read(ROOT / page)["cells"] if c["cell_type"] == "code"]
    found = [c["id"] for c in code if re.search(r"^(from|import) hmoe_repro", c["source"], re.M)]
    return any(cell != reading_path.INSTALL for cell in found)


def test_most_notebooks_of_the_path_use_the_library():
    assert len(PATH) > 15
    assert [page for page in PATH if not uses_the_library(page)] == [names.START]


@pytest.mark.parametrize("page", PATH)
def test_buttons_open_this_notebook(page):
    text = read(ROOT / page)["cells"][0]["source"]
    lines = text.split("\n")
    assert lines[0].startswith("# ")
    assert lines[2].startswith("> ")
    targets = re.findall(r"\[!\[[\w ]+\]\(https://[^)]+\.svg\)\]\(([^)]+)\)", lines[4])
    assert targets == [
        f"https://colab.research.google.com/github/{REPO}/blob/{BRANCH}/{page}",
        f"https://mybinder.org/v2/gh/{REPO}/{BRANCH}?labpath={quote(page, safe='')}",
    ]


def test_the_book_has_links_in_place_of_pictures():
    text = read(ROOT / PATH[1])["cells"][0]["source"]
    titled = book.titled(PATH[1], text, "")
    assert "![" not in titled
    assert f"[Open in Colab](https://colab.research.google.com/github/{REPO}" in titled


class Shell:
    """Runs the source of a cell as IPython does, and keeps commands instead of running them."""

    def __init__(self):
        from IPython.core.inputtransformer2 import TransformerManager

        self.transform = TransformerManager().transform_cell
        self.commands = []

    def system(self, command):
        self.commands.append(command)

    def run_line_magic(self, name, line):
        self.commands.append(f"{name} {line}")

    def run(self, source):
        exec(self.transform(source), {"get_ipython": lambda: self})
        return self.commands


INSTALLS = [page for page in PATH if uses_the_library(page)]


@pytest.mark.parametrize("page", INSTALLS)
def test_the_first_code_cell_installs_only_what_is_absent(page, monkeypatch):
    first = next(c for c in read(ROOT / page)["cells"] if c["cell_type"] == "code")
    assert first["id"] == reading_path.INSTALL
    assert first["source"].startswith("#| hide\n")  # in the book
    assert first["outputs"] == []
    assert Shell().run(first["source"]) == []
    monkeypatch.setitem(sys.modules, "hmoe_repro", None)  # as if it were not installed
    clone, folder, install = Shell().run(first["source"])
    assert clone.split()[-1] == URL
    assert "--depth 1" in clone
    assert folder.split() == ["cd", "-q", URL.rpartition("/")[2]]
    # Of the folder, and of the PyTorch that is there, so that pip keeps it.
    assert install == 'pip install --quiet . "torch=={torch.__version__}"'


def test_all_install_in_the_same_way():
    found = set()
    for page in INSTALLS:
        (cell,) = [c for c in read(ROOT / page)["cells"] if c["id"] == reading_path.INSTALL]
        found.add(cell["source"])
    assert len(found) == 1


def test_pip_is_told_the_version_that_is_installed():
    import torch
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance() if InteractiveShell.initialized() else InteractiveShell()
    shell.user_ns["torch"] = torch
    assert shell.var_expand('"torch=={torch.__version__}"') == f'"torch=={torch.__version__}"'
