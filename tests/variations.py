"""Which variations of the costliest tests are of the ordinary set."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
_COSTLY = (_TESTS / "engines", _TESTS / "torch" / "test_side_by_side.py")
"""Launches over several hosts, and those that are compared with torchrun's."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one of three variations of each test, others for each name; the rest are nightly.

    So back ends, nodes and signals are all met in the ordinary set, and it stays short.
    """
    variations: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        is_costly = item.path in _COSTLY or item.path.parent in _COSTLY
        if is_costly and item.get_closest_marker("nightly") is None:
            name = item.originalname if isinstance(item, pytest.Function) else item.name
            variations.setdefault((item.path, name), []).append(item)
    for (_, name), alike in variations.items():
        kept = zlib.crc32(name.encode()) % min(3, len(alike))
        for number, item in enumerate(alike):
            if number % 3 != kept:
                item.add_marker(pytest.mark.nightly)
