"""Which variations of a costly test are of the ordinary set; the others are nightly."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent
_ONE_OF = {_TESTS / "engines": 100, _TESTS / "process": 3}
"""Of so many variations of each test in a folder one is ordinary, however few there are."""


def ordinary(values: Iterable[Any], *kept: object) -> list[Any]:
    """Return the parameters of a test, of which all but those ``kept`` are nightly.

    One is kept by its value, by what it is called, or by the first value of its row.
    """

    def param(value: Any) -> Any:
        row = value if isinstance(value, tuple) else (value,)
        if any(name in kept for name in (value, row[0], str(value))):
            return value
        return pytest.param(*row, marks=pytest.mark.nightly)

    return [param(value) for value in values]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep some variations of each test in the costliest folders, other ones for each name.

    So back ends, nodes and signals are all met in the ordinary set, and it stays short.
    """
    variations: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.path.parent in _ONE_OF and item.get_closest_marker("nightly") is None:
            name = item.originalname if isinstance(item, pytest.Function) else item.name
            variations.setdefault((item.path, name), []).append(item)
    for (path, name), alike in variations.items():
        one_of = min(_ONE_OF[path.parent], len(alike))
        for number, item in enumerate(alike):
            if number % one_of != zlib.crc32(name.encode()) % one_of:
                item.add_marker(pytest.mark.nightly)
