"""How the site is built: `make docs`. The reference pages are generated first."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from docs.generate import generate  # noqa: E402
from holdfast import __version__  # noqa: E402

project = "Holdfast"
author = "The Holdfast Authors"
project_copyright = "The Holdfast Authors"
release = version = __version__

extensions = ["myst_parser"]
exclude_patterns = ["**/__pycache__"]
myst_heading_anchors = 4  # So that links to headings are checked too.
myst_enable_extensions = ["attrs_block"]
nitpicky = True
smartquotes = False  # It would turn --json into a dash and a word.
suppress_warnings = ["myst.header"]  # Generated pages may begin a section two levels down.

html_theme = "furo"
html_title = f"Holdfast {release}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["holdfast.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"


def link_architecture(app: Any, name: str, source: list[str]) -> None:
    """ARCHITECTURE.md is at the root of the repository, where people look for it, and a page of the site."""
    source[0] = re.sub(r"\]\((?:\.\./)+ARCHITECTURE\.md", "](/architecture.md", source[0])


def setup(app: Any) -> None:
    app.connect("builder-inited", lambda _: generate(HERE / "reference"))
    app.connect("source-read", link_architecture)
