"""The site: ``python -m sphinx -W docs site``, with the extra ``site``.

The navigation is made of the lists of ``index.md``, so that a page is listed in one place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from meshrun import __version__
from meshrun.wording import DOCS

project = "meshrun"
author = "the authors of meshrun"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["images/*.py"]
suppress_warnings = ["misc.highlighting_failure"]  # a console block may show any output
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_type_aliases = {"AnyMesh": "AnyMesh"}
napoleon_numpy_docstring = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
linkcheck_ignore = [DOCS]

html_theme = "furo"
html_title = f"meshrun {__version__}"
html_baseurl = DOCS + "/"
html_static_path: list[str] = []
html_extra_path = [
    "../LICENSE",
    "reference/plan.schema.json",
    "reference/report.schema.json",
    "reference/events.schema.json",
]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}


def _add_examples(_app: Any, page: str, source: list[str]) -> None:
    """Show the table of examples, whose programs can be downloaded from the site."""
    if page == "tutorial/examples":
        text = (Path(__file__).parent.parent / "examples" / "README.md").read_text()
        source[0] = re.sub(r"\]\((\w+\.py)\)", r"](../../examples/\1)", text)


def _add_navigation(_app: Any, page: str, source: list[str]) -> None:
    """Give the sidebar what the index lists, a caption for each heading."""
    if page != "index":
        return
    for caption, lines in re.findall(r"^## (.+)\n\n((?:- .+\n)+)", source[0], re.MULTILINE):
        pages = re.findall(r"^- \[(.+)\]\((.+)\.md\)$", lines, re.MULTILINE)
        source[0] += _toctree(caption, [f"{title} <{name}>" for title, name in pages])
    source[0] += _toctree("Decisions", ["explanation/decisions/*"], ":glob:")


def _toctree(caption: str, entries: list[str], *options: str) -> str:
    lines = [":hidden:", f":caption: {caption}", *options, "", *entries]
    return "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def setup(app: Any) -> None:
    """Register what is done to each page."""
    app.connect("source-read", _add_navigation)
    app.connect("source-read", _add_examples)
