"""Sphinx: the pages of this folder and the reference, as a site. `bash scripts/docs.sh` builds
it.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import cl_train  # noqa: E402

project = "cl_train"
author = "The cl_train developers"
copyright = "The cl_train developers"
release = cl_train.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
nitpicky = False
highlight_language = "text"  # a block without a language is a command or its output
default_role = "code"  # docstrings put names in single backquotes
suppress_warnings = ["myst.header"]  # a page may begin with a command
nb_execution_mode = "off"  # the notebook is stored with its outputs

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"cl_train {release}"
html_theme_options = {"source_repository": "", "navigation_with_keys": True}
