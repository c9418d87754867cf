"""What setuptools does for this package besides: the README of an index links to the site."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from setuptools.command.egg_info import egg_info

_BESIDE_THE_PAGES = {
    "LICENSE": "LICENSE",
    "docs/index.md": "",
    "docs/explanation/decisions/": "",  # the sidebar lists them
    "examples/README.md": "tutorial/examples.html",
}


def with_addresses(readme: str, site: str) -> str:
    """Return the README with the site's address for each path of a page or a picture."""

    def address(found: re.Match[str]) -> str:
        mark, text, path, anchor = found.groups(default="")
        page = _BESIDE_THE_PAGES.get(path)
        if page is None and mark:
            page = f"_images/{Path(path).name}"
        elif page is None:
            page = path.removeprefix("docs/").replace(".md", ".html")
        return f"{mark}[{text}]({site}/{page}{anchor})"

    return re.sub(r"(!?)\[([^]]*)\]\(([^):#]+)(#[^)]*)?\)", address, readme)


class WithAddresses(egg_info):
    """Puts the README with addresses into the metadata, and this file into the sdist."""

    def run(self) -> None:
        """Write the metadata."""
        site = runpy.run_path("meshrun/wording.py")["DOCS"]
        self.distribution.metadata.long_description = with_addresses(
            Path("README.md").read_text(), site
        )
        super().run()

    def find_sources(self) -> None:
        """List the files of the sdist."""
        super().find_sources()
        self.filelist.append("docs/package_metadata.py")
