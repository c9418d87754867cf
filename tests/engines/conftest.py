"""Which variations of the tests over several hosts are of the ordinary set."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one variation of each test, another for each name; the rest are nightly.

    So back ends, nodes and signals are all met in the ordinary set, and it stays short.
    """
    variations: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.path.parent == _HERE and item.get_closest_marker("nightly") is None:
            name = item.originalname if isinstance(item, pytest.Function) else item.name
            variations.setdefault((item.path, name), []).append(item)
    for (_, name), alike in variations.items():
        kept = zlib.crc32(name.encode()) % len(alike)
        for number, item in enumerate(alike):
            if number != kept:
                item.add_marker(pytest.mark.nightly)
