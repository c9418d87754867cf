"""Which variations of a costly test are of the ordinary set, and in which order tests run."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable
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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Leave some variations to the nightly set, and deal the rest out to xdist's workers."""
    _mark_variations(items)
    yield
    _deal(items, getattr(config, "workerinput", {}).get("workercount", 1))


def _mark_variations(items: list[pytest.Item]) -> None:
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


def _deal(items: list[pytest.Item], workers: int) -> None:
    """Give each worker long tests first, several hosts before others, and then quick ones.

    Of three workers with as many items each, as ``worksteal`` hands them out, one has those of
    ``engines`` and so the only cluster; what is left at the end to steal from each other is quick.
    """
    engines, unit = _TESTS / "engines", _TESTS / "unit"
    quick = [item for item in items if item.path.parent == unit]
    long = [item for item in items if item.path.parent != unit]
    long.sort(key=lambda item: item.path.parent != engines)
    items[:] = [
        item
        for worker in range(workers)
        for part in (long, quick)
        for item in part[len(part) * worker // workers : len(part) * (worker + 1) // workers]
    ]
