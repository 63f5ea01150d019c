"""The documentation site: `make docs` builds it from the pages here and the docstrings, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_site"), str(Path(__file__).parent.parent / "src")]

from unde.version import __version__  # noqa: E402

project, author = "unde", "the authors of unde"
copyright = "the authors of unde, Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "docstrings",  # in _site: Markdown of docstrings, and the command line
    "command_pages",
]
exclude_patterns = ["_site"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!unde\.).*"),  # names of other packages, which are not looked up here
    ("py:.*", r"unde\.\w+\.[\w.]+"),  # types of inner modules, which signatures mention
]
suppress_warnings = ["myst.header"]  # results has sections of very different depth

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes = False  # two hyphens are those of an option
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"unde {__version__}"
html_copy_source = False
html_show_sphinx = False
