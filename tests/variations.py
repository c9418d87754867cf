"""Which variations of a costly test belong to the ordinary set, and in which order tests run."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent
_ONE_OF = {_TESTS / "engines": 100, _TESTS / "process": 4}
"""For each folder: one of this many variations of a test is ordinary, and always at least one."""


def ordinary(values: Iterable[Any], *kept: object) -> list[Any]:
    """Return a test's parameters, with all except those in ``kept`` marked as nightly.

    ``kept`` has values, their names, or the first values of rows.
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
    """Leave some variations to the nightly set, and deal tests out to xdist's workers."""
    _mark_variations(items)
    yield
    _deal(items, getattr(config, "workerinput", {}).get("workercount", 1))


def _mark_variations(items: list[pytest.Item]) -> None:
    """Mark all but some variations of each test in the costliest folders as nightly.

    Which ones stay depends on the test's name, so that the ordinary set is short and still
    includes every back end, number of nodes and signal.
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
    """Give each worker long tests first, those of ``engines`` before others, and then quick ones.

    ``worksteal`` hands each worker a block of equal size. With three workers, one has all of
    ``engines`` and so the only cluster, and only quick tests are left to steal at the end.
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
