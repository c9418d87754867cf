"""Mapping of ranks to slots in another order of dims than the mesh's. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshrun.layout.axes import Axis, Digit, axis_of


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Mapping between ranks and slots: mixed-radix numbers with the same digits in two orders."""

    digits: tuple[tuple[int, int, int], ...]
    """(size, stride among ranks, stride among slots) of each dim of the mesh, slowest first."""

    @classmethod
    def of(cls, sizes: Sequence[int], order: Sequence[int]) -> SlotMap:
        """Return the mapping for a mesh of ``sizes`` whose dims take slots in ``order``.

        ``order`` has each dim once, slowest first.
        """
        digits = tuple(
            (
                size,
                math.prod(sizes[dim + 1 :]),
                math.prod(sizes[later] for later in order[order.index(dim) + 1 :]),
            )
            for dim, size in enumerate(sizes)
        )
        return cls(digits)

    def slot(self, rank: int) -> int:
        """Return the number of a rank's slot."""
        return sum(rank // stride % size * slot_stride for size, stride, slot_stride in self.digits)

    def rank(self, slot: int) -> int:
        """Return the rank in a slot."""
        return sum(slot // slot_stride % size * stride for size, stride, slot_stride in self.digits)

    def axis(self, axis: Axis) -> Axis | None:
        """Return a dim in terms of slots instead of ranks.

        Returns:
            ``None`` if a digit of the dim covers a part of a mesh dim that is not a factor of it,
            which is possible for dims of a view.
        """
        digits: list[Digit] = []
        for size, stride in axis.digits:
            for own_size, own_stride, slot_stride in self.digits:
                low, high = max(stride, own_stride), min(stride * size, own_stride * own_size)
                if high <= low:
                    continue
                if high % low or low % own_stride or own_stride * own_size % high:
                    return None
                digits.append((high // low, slot_stride * (low // own_stride)))
        return axis_of(sorted(digits, key=lambda digit: -digit[1]))
