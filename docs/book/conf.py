"""How Sphinx makes the book of the sources that `prepare.py` gathered."""

import functools
import json
from importlib.util import find_spec
from pathlib import Path

from sphinx.domains.python import PythonDomain
from sphinx.search.en import SearchEnglish
from sphinx.util.fileutil import copy_asset

project = "hmoe_repro"
author = "hmoe_repro contributors"
copyright = "2026, hmoe_repro contributors"  # noqa: A001  (Sphinx's name for it)

extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]
exclude_patterns = ["files/**"]
nb_execution_mode = "off"  # outputs are those stored in the notebooks
nb_merge_streams = True
nb_render_markdown_format = "myst"
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "dollarmath", "html_image"]
myst_ref_domains = ["std", "py"]  # asking every domain about every link took minutes
myst_heading_anchors = 3
myst_dmath_double_inline = True
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type", "misc.highlighting_failure"]

add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries = False
highlight_language = "python"
templates_path = ["templates"]
html_theme = "sphinx_book_theme"
html_title = "hmoe_repro"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "components/contents.html"]}
html_domain_indices = False
html_theme_options = {
    # No bar at the top: the theme would listen to the copies of the buttons there.
    **dict.fromkeys(("navbar_start", "navbar_center", "navbar_end", "navbar_persistent"), []),
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "collapse_navbar": True,
    "home_page_in_toc": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_exclude = ".linenos, .gp, .go"
mathjax_path = "mathjax/tex-chtml.js"


class English(SearchEnglish):
    """Sphinx's own, which forgets between two pages how a word was cut to its stem."""

    @functools.cached_property
    def stem(self):
        return functools.cache(super().stem)


class Python(PythonDomain):
    """Sphinx's own, which looks through all objects again each time a type's name comes up."""

    @functools.cached_property
    def found(self):
        return {}

    def find_obj(self, env, *question):
        key = (len(self.objects), question)
        if key not in self.found:
            self.found[key] = super().find_obj(env, *question)
        return list(self.found[key])


def copy_mathjax(app, error):
    """Use the local MathJax. The package's own hook would forbid reading in parallel."""
    package = Path(find_spec("sphinx-mathjax-offline").submodule_search_locations[0])
    if error is None:
        copy_asset(package / "static" / "mathjax", app.outdir / "_static" / "mathjax")


def read_contents(app, config):
    """The chapters, for the bar at the left."""
    text = (Path(app.srcdir) / "contents.json").read_text(encoding="utf-8")
    config.html_context["contents"] = json.loads(text)


def setup(app):
    """Called by Sphinx."""
    app.add_search_language(English)
    app.add_domain(Python, override=True)
    app.connect("config-inited", read_contents)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
