"""Slots, numbered one after the other, in parts: the nodes of a launch, or its domains. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Parts:
    """How many slots each part has; alike parts are never looked at one by one."""

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    """First slot of each part, then the number of slots; empty where all parts are alike."""

    @classmethod
    def of(cls, counts: Iterable[int]) -> Parts:
        """Return parts of so many slots, at least one."""
        counts = tuple(counts)
        is_even = counts.count(counts[0]) == len(counts)
        return cls(counts, () if is_even else tuple(accumulate(counts, initial=0)))

    @property
    def total(self) -> int:
        """Number of slots."""
        return self.starts[-1] if self.starts else self.counts[0] * len(self.counts)

    def place(self, slot: int) -> tuple[int, int]:
        """Return (part, place in it) of a slot."""
        if not self.starts:
            return divmod(slot, self.counts[0])
        part = bisect_right(self.starts, slot) - 1
        return part, slot - self.starts[part]

    def slots(self, part: int) -> range:
        """Return the slots of a part."""
        first = self.starts[part] if self.starts else part * self.counts[0]
        return range(first, first + self.counts[part])
