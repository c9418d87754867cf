"""The arithmetic of dims and slots: a rank's index in a dim, its groups, how many cross nodes.

A rank is a mixed-radix number, and a dim is some of its digits: one for a dim of a mesh, several
for a dim joined from others. Only methods that return groups list them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise, product

Digit = tuple[int, int]
"""(size, stride): a rank's index is ``rank // stride % size``."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Consecutive slots, divided into parts: the nodes of a launch, or domains.

    Equal parts are handled without iterating over them.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """One dim over the ranks of a world.

    Args:
        size: Number of ranks in each of its groups.
        stride: Distance between neighbors in a group; 0 if it varies.
        digits: Its digits, slowest first, adjacent ones joined, those of size 1 left out. Two
            dims have the same groups if and only if their digits are equal.
    """

    size: int
    stride: int
    digits: tuple[Digit, ...]

    def place(self, rank: int) -> int:
        """Return the place of ``rank`` in its group, ``0 <= place < size``."""
        place = 0
        for size, stride in self.digits:
            place = place * size + rank // stride % size
        return place

    def offset(self, place: int) -> int:
        """Return the distance of the rank at ``place`` from the first rank of its group."""
        offset = 0
        for size, stride in reversed(self.digits):
            place, index = divmod(place, size)
            offset += index * stride
        return offset

    def first(self, rank: int) -> int:
        """Return the first rank of the group of ``rank``."""
        return rank - sum(rank // stride % size * stride for size, stride in self.digits)

    def group(self, rank: int) -> range | list[int]:
        """Return the ranks of the group of ``rank``, ascending."""
        first = self.first(rank)
        if self.stride:
            return range(first, first + self.size * self.stride, self.stride)
        ranks = [first]
        for size, stride in self.digits:
            ranks = [at + step for at in ranks for step in range(0, size * stride, stride)]
        return ranks

    def groups(self, world_size: int) -> Iterator[range | list[int]]:
        """Yield every group in order of its first rank."""
        if not self.stride:
            others = rest_of(world_size, (self,))
            firsts: Iterable[int] = others.group(0) if others else ()
            yield from (self.group(first) for first in firsts)
            return
        span = self.stride * self.size
        for outer, inner in product(range(0, world_size, span), range(self.stride)):
            yield range(outer + inner, outer + inner + span, self.stride)

    def count_crossing(self, parts: Parts) -> int:
        """Return how many groups span more than one part."""
        reach = sum((size - 1) * stride for size, stride in self.digits)
        groups = parts.total // self.size
        if reach == 0:
            return 0
        starts: Iterable[int] = parts.starts
        repeats = 1
        if not parts.starts:
            each = parts.counts[0]
            if reach >= each:
                return groups
            # The pattern of groups repeats after `period` ranks.
            period = math.lcm(self.digits[0][0] * self.digits[0][1], each)
            starts, repeats = range(0, period + 1, each), parts.total // period
        inside = sum(
            self._firsts_below(end - reach) - self._firsts_below(start)
            for start, end in pairwise(starts)
            if end - start > reach
        )
        return groups - inside * repeats

    def is_rail_aligned(self, nodes: Parts) -> bool:
        """Return whether the ranks of each group have the same local rank."""
        each = {*nodes.counts} - {0}
        if len(each) == 1:
            return all(stride % max(each) == 0 for _, stride in self.digits)
        of_first: dict[int, int] = {}
        return all(
            of_first.setdefault(self.first(slot), local) == local
            for slot, local in enumerate(chain.from_iterable(map(range, nodes.counts)))
        )

    def _firsts_below(self, end: int) -> int:
        """Return how many groups have a first rank below ``end``."""
        count, each = 0, math.prod(size for size, _ in self.digits)
        for size, stride in self.digits:
            each //= size
            blocks, end = divmod(end, size * stride)
            count += blocks * (stride // each)
            if end >= stride:
                return count + stride // each
        return count + end


def axis_of(digits: Iterable[Digit]) -> Axis:
    """Return the dim with these digits, slowest first."""
    given = list(digits)
    joined: list[Digit] = []
    for size, stride in given:
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    stride = joined[0][1] if len(joined) == 1 else 0
    if not joined:
        stride = given[0][1] if len(given) == 1 else 1
    return Axis(size=math.prod(size for size, _ in joined), stride=stride, digits=tuple(joined))


def axes_of(sizes: Sequence[int]) -> list[Axis]:
    """Return the dims of a mesh of these sizes, right dim fastest."""
    axes: list[Axis] = []
    stride = 1
    for size in reversed(sizes):
        axes.append(axis_of([(size, stride)]))
        stride *= size
    return axes[::-1]


@lru_cache(maxsize=128)
def rest_of(world_size: int, axes: tuple[Axis, ...]) -> Axis | None:
    """Return the digits that none of ``axes`` has, as one dim.

    Returns:
        ``None`` if the axes overlap, so that their places cannot be chosen independently.
    """
    digits = sorted((digit for axis in axes for digit in axis.digits), key=lambda d: -d[1])
    rest, left = [], world_size
    for size, stride in digits:
        if left % (size * stride):
            return None
        rest.append((left // (size * stride), size * stride))
        left = stride
    return axis_of([*rest, (left, 1)])


def ranks_at(chosen: Sequence[tuple[Axis, Sequence[int]]], world_size: int) -> range | list[int]:
    """Return the ranks at any combination of places, ascending.

    ``chosen`` are dims, each with its places, in any order.
    """
    rest = rest_of(world_size, tuple([axis for axis, _ in chosen]))
    if rest is None:  # dims that overlap, such as one of the mesh and one of a view
        sets = [(axis, frozenset(places)) for axis, places in chosen]
        ranks = range(world_size)
        return [rank for rank in ranks if all(axis.place(rank) in at for axis, at in sets)]
    if all(len(places) == 1 for _, places in chosen):
        return rest.group(sum([axis.offset(places[0]) for axis, places in chosen]))
    offsets = [[axis.offset(place) for place in places] for axis, places in chosen]
    firsts = [sum(parts) for parts in product(*offsets)]
    return sorted(rank for first in firsts for rank in rest.group(first))


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Mapping of ranks to slots in another order of dims: the same digits in two orders."""

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
