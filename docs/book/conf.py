"""How Sphinx makes the book of the sources that `build.py` gathered."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from fastcore.docments import docments
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))
import names  # noqa: E402
import sources  # noqa: E402
from docstrings import as_rst  # noqa: E402

project = "hmoe_repro"
author = "hmoe_repro contributors"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_design"]
nb_execution_mode = "off"  # outputs are those stored in the notebooks
nb_merge_streams = True
nb_output_stderr = "remove"  # progress and warnings of the machine that ran the notebook
nb_render_markdown_format = "myst"
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "dollarmath", "html_image"]
myst_ref_domains = ["std", "py"]  # asking every domain about every link took minutes
myst_heading_anchors = 3
myst_dmath_double_inline = True
# That every link leads somewhere is a test of the site.
suppress_warnings = ["myst.header", "myst.xref_missing", "mystnb.unknown_mime_type"]
suppress_warnings += ["misc.highlighting_failure", "toc.multiple_toctrees", "ref.python"]
exclude_patterns = ["class.ipynb", "README.md", "hmoe_repro/**", "templates/**"]

autodoc_default_options = dict.fromkeys(("members", "undoc-members", "no-value"), True)
autodoc_default_options |= {"member-order": "bysource"}
autodoc_inherit_docstrings = False
default_role = "py:obj"
add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries = False
templates_path = ["templates"]
highlight_language = "text"  # of a block that names none
html_theme = "sphinx_book_theme"
html_title = "hmoe_repro"
mathjax = Path(find_spec("sphinx-mathjax-offline").submodule_search_locations[0])
html_static_path = ["static", str(mathjax / "static")]
mathjax_path = "mathjax/tex-chtml.js"
html_css_files = ["book.css"]
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_copy_source = False
html_domain_indices = False
html_theme_options = {
    # No bar at the top: the theme would listen to the copies of the buttons there.
    **dict.fromkeys(("navbar_start", "navbar_center", "navbar_end", "navbar_persistent"), []),
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "collapse_navbar": True,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_exclude = ".linenos, .gp, .go"

extensions += ["sphinx_revealjs" if tags.has("slides") else "sphinx_copybutton"]  # noqa: F821
if tags.has("slides"):  # noqa: F821  (Sphinx's name for the tags of a build)
    root_doc = "class"
    include_patterns, exclude_patterns = ["class.ipynb"], []
    autosummary_generate = False
    revealjs_style_theme = "white"
    # The slides stand in a folder of the site, whose MathJax they use.
    revealjs_static_path, mathjax_path = ["static"], f"../../_static/{mathjax_path}"
    revealjs_css_files = ["slides.css"]
    revealjs_script_plugins = [{"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"}]
    revealjs_script_conf = {"hash": True, "slideNumber": "c/t", "transition": "none"}
    revealjs_script_conf |= {"width": 1280, "height": 800, "margin": 0.03, "center": False}
    kinds = ("text/html", "image/svg+xml", "image/png", "text/markdown", "text/plain")
    nb_mime_priority_overrides = [("revealjs", kind, 10 * i) for i, kind in enumerate(kinds, 1)]


def describe(app, what, full, thing, options, lines):
    """Complete a docstring: the comments of its parameters, the cell that defines it, and the
    equations that it computes."""
    lines[:] = as_rst("\n".join(lines))
    if what in ("function", "method", "class"):
        try:
            notes = docments(thing, full=True, returns=True)
        except (TypeError, ValueError, OSError, AttributeError):
            notes = {}
        for key, comment in ((key, note.docment) for key, note in notes.items() if note.docment):
            field = ":returns:" if key == "return" else f":param {key}:"
            lines.append(f"{field} {' '.join(as_rst(comment))}")
    if found := names.library().get(full):
        parts = [f"Defined in :ref:`its notebook <{found.cell}>`"]
        parts += [f":ref:`{names.equation(e)} <{e}>`" for e in found.equations]
        lines += ["", ".. container:: exported", "", f"   {' · '.join(parts)}", ""]


class Numbers(SphinxPostTransform):
    """A short cell of a table that begins with a number is kept on one line."""

    default_priority = 200

    def run(self):
        for entry in self.document.findall(nodes.entry):
            if re.match(r"[-+−]?\d", entry.astext()) and len(entry.astext()) <= 20:
                entry["classes"].append("number")


class NameLinks(SphinxPostTransform):
    """A name of the library in code font leads to the reference where only one name can be meant:
    a plain word, such as `loss`, is one only on the page of its module, or where it is called, as
    in `loss()`. On a page of evidence most such words are columns of its tables."""

    default_priority = 200
    meant = {}  # word -> full names

    def run(self):
        page, objects = self.env.docname, self.env.domains.python_domain.objects
        if not self.meant:
            for full in objects:
                parts = full.removeprefix("hmoe_repro.").split(".")
                for first in range(len(parts)):
                    self.meant.setdefault(".".join(parts[first:]), set()).add(full)
        here = {n.module for n in names.library().values() if n.page == page}
        for literal in list(self.document.findall(nodes.literal)):
            word = literal.astext().removesuffix("()")
            own = [f"{module}.{word}" for module in here if f"{module}.{word}" in objects]
            full = own or [*self.meant.get(word, ())]
            called = own or "." in word or word != literal.astext() or not word.islower()
            certain = called or ("_" in word and not page.startswith(("figures", "nbs/paper")))
            taken = isinstance(literal.parent, (nodes.reference, nodes.title))
            if len(full) == 1 and certain and not taken:
                found = objects[full[0]]
                to = (page, found.docname, found.node_id, literal.deepcopy(), full[0])
                literal.replace_self(make_refnode(self.app.builder, *to))


def add_buttons(app, page, template, context, doctree):
    """Put the links to the page's source before the theme's buttons."""
    if doctree:
        context["header_buttons"][:0] = sources.buttons(page)


def setup(app):
    """Called by Sphinx."""
    if not tags.has("slides"):  # noqa: F821
        app.connect("html-page-context", add_buttons, priority=502)  # after the theme's
    app.connect("autodoc-process-docstring", describe)
    app.add_post_transform(NameLinks)
    app.add_post_transform(Numbers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
