"""Slurm's lists: nodes such as ``sl[1-3,7],gpu[01-10]``, counts such as ``2,1(x2)``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod

_MOST = 100_000
_WORD = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"[^\[\]]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names of a node list, in order.

    Raises:
        ValueError: If it is not a node list, or has more than 100,000 names.

    Source:
        ``scontrol show hostnames``.
    """
    names: list[str] = []
    words = _WORD.findall(text)
    if not words or ",".join(words) != text:
        raise ValueError("not a node list")
    for word in words:
        parts = [
            list(_numbers(part[1:-1])) if part.startswith("[") else [part]
            for part in _PART.findall(word)
        ]
        if len(names) + prod(map(len, parts)) > _MOST:
            raise ValueError(f"more than {_MOST:,} nodes")
        names += map("".join, product(*parts))
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in which ``2(x3)`` stands for ``2,2,2``.

    Raises:
        ValueError: If it is not such a list, or has more than 100,000 numbers.

    Source:
        ``SLURM_TASKS_PER_NODE`` in sbatch(1).
    """
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        if match is None:
            raise ValueError("not a list of counts")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST:
            raise ValueError(f"more than {_MOST:,} nodes")
        counts += [int(match[1])] * times
    return tuple(counts)


def _numbers(text: str) -> Iterator[str]:
    """Yield the numbers of ``1-3,07``, each padded to the width of the first in its range."""
    for word in text.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise ValueError(f"`{word}` is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _MOST:
            raise ValueError(f"more than {_MOST:,} nodes")
        if int(last) < int(first):
            raise ValueError(f"range `{word}` is reversed")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
