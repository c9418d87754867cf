"""The documentation site: every page is in its navigation, and it builds without warnings."""

from __future__ import annotations

import html
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from meshrun import __all__
from meshrun.wording import DOCS as SITE
from tests.kit import ROOT

DOCS = ROOT / "docs"


def test_the_index_lists_every_page() -> None:
    """Except decisions, which the sidebar lists separately; the README links it and all guides."""
    listed = set(re.findall(r"^- \[.+\]\((.+\.md)\)$", (DOCS / "index.md").read_text(), re.M))
    pages = {
        str(path.relative_to(DOCS))
        for path in DOCS.rglob("*.md")
        if path.parent.name != "decisions" and path.name != "index.md"
    }

    assert listed == pages
    readme = (ROOT / "README.md").read_text()
    guides = [page for page in pages if page.startswith("how-to/")] + ["index.md"]
    assert [page for page in guides if f"(docs/{page})" not in readme] == []


def test_the_reference_of_docstrings_has_every_public_name() -> None:
    page = (DOCS / "reference" / "api.md").read_text()

    assert [name for name in __all__ if f":: meshrun.{name}\n" not in page] == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors have targets; docstrings, schemas and the sidebar are present."""
    for needed in ("sphinx", "furo", "myst_parser", "sphinx_copybutton", "sphinxcontrib.mermaid"):
        pytest.importorskip(needed, reason="needs the extra `site`")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "doctrees",
         DOCS, tmp_path / "site"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    api = html.unescape((tmp_path / "site" / "reference" / "api.html").read_text())

    sidebar = index.partition('class="sidebar-tree"')[2].partition("</div>")[0]
    captions = re.findall(r'class="caption-text">([^<]+)<', sidebar)
    assert captions[:2] == ["Tutorial", "Get started"]
    assert captions[-1] == "Decisions"
    assert "the part of it along some dims" in api
    examples = (tmp_path / "site" / "tutorial" / "examples.html").read_text()
    assert len(re.findall(r'href="\.\./_downloads/', examples)) > 10
    for name in ("plan", "report", "events"):
        assert (tmp_path / "site" / f"{name}.schema.json").is_file()
    assert "searchindex.js" in {path.name for path in (tmp_path / "site").iterdir()}
    with_addresses = runpy.run_path(str(DOCS / "package_metadata.py"))["with_addresses"]
    readme = with_addresses((ROOT / "README.md").read_text(), SITE)
    for address, anchor in re.findall(rf"\]\({SITE}/([^)#]*)#?([^)]*)\)", readme):
        page = tmp_path / "site" / (address or "index.html")
        assert page.is_file(), address
        assert not anchor or f'id="{anchor}"' in page.read_text(), (address, anchor)
