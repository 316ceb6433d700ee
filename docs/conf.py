"""Settings of the documentation site. `make book` writes it to build/book; so does `sphinx-build -n -W docs FOLDER`.

`tools/book.py` is the extension that adds the course and the generated pages before Sphinx reads this folder.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import dtlib
from tools import addresses

project = "dtlib"
author = "The dtlib authors"
copyright = "The dtlib authors"
release = version = dtlib.__version__
root_doc = "index"
# imgmath: MathJax would add a script from a network to every page. The lessons write formulas in plain letters.
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.imgmath", "tools.book"]
exclude_patterns = ["_static"]

html_theme = "sphinx_book_theme"
html_title = f"dtlib {release}"
html_theme_options = {
    "home_page_in_toc": False,
    "use_download_button": False,
    "show_toc_level": 2,
    "search_bar_text": "Search",
}
if repository := addresses.repository():
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": "main",
        "path_to_docs": "docs",
        "use_repository_button": True,
        "use_edit_page_button": True,
    }
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "imgmath"

myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_ipywidgets_js: dict = {}  # widgets live in JupyterLab; their scripts would be fetched from a network

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# With -n a reference to a function or method of dtlib must be right. Types in signatures are not all documented, and to
# look up names of other libraries needs a network.
nitpick_ignore_regex = [("py:class", ".*"), ("py:.*", r"(?!dtlib\.).*")]
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header"]  # JupyterLab's own types; notebooks skip heading levels
