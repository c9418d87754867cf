"""Consecutively numbered slots, divided into parts: the nodes of a launch, or domains. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Parts:
    """The number of slots in each part; equal parts are handled without iterating over them."""

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    """First slot of each part, then the total number of slots; empty if all parts are equal."""

    @classmethod
    def of(cls, counts: Iterable[int]) -> Parts:
        """Return the parts with these numbers of slots; there must be at least one."""
        counts = tuple(counts)
        is_even = counts.count(counts[0]) == len(counts)
        return cls(counts, () if is_even else tuple(accumulate(counts, initial=0)))

    @property
    def total(self) -> int:
        """Number of slots."""
        return self.starts[-1] if self.starts else self.counts[0] * len(self.counts)

    def place(self, slot: int) -> tuple[int, int]:
        """Return (part, index within the part) of a slot."""
        if not self.starts:
            return divmod(slot, self.counts[0])
        part = bisect_right(self.starts, slot) - 1
        return part, slot - self.starts[part]

    def slots(self, part: int) -> range:
        """Return the slots of a part."""
        first = self.starts[part] if self.starts else part * self.counts[0]
        return range(first, first + self.counts[part])
