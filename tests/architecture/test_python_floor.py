"""The README's install command works on the oldest Python that the project supports."""

import re
from importlib.metadata import metadata, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.kit import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_tested_versions_can_be_installed_by_the_oldest_python() -> None:
    """Or a marker excludes them there."""
    found = re.search(r'requires-python = ">=(.*)"', PROJECT)
    blocks = re.findall(r"^(?:test|tested) = \[$(.*?)^\]$", PROJECT, re.DOTALL | re.MULTILINE)
    assert found is not None
    pins = [
        Requirement(text) for text in re.findall(r'^ +"([^"]*)"', "".join(blocks), re.MULTILINE)
    ]
    asked = [
        pin for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": found[1]})
    ]
    exact = [pin for pin in asked if str(pin.specifier).startswith("==")]
    checked = [pin.name for pin in exact if version(pin.name).split("+")[0] in pin.specifier]

    assert {"rich", "pytest"} <= set(checked)
    for name in checked:
        assert found[1] in SpecifierSet(metadata(name).get("Requires-Python") or ""), name
