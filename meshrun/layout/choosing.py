"""Selection of ranks by indices in several dims, and matching of the ranks of two meshes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from meshrun.errors import LayoutError
from meshrun.layout.axes import Axis, rest_of


def ranks_at(chosen: Sequence[tuple[Axis, Sequence[int]]], world_size: int) -> range | list[int]:
    """Return the ranks at any combination of places, ascending.

    Args:
        chosen: Dims, each with its places, in any order.
        world_size: Number of ranks.
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


def match_ranks(place: int, count: int, others: Sequence[int]) -> list[int]:
    """Return the ranks of ``others`` with which the rank at ``place`` of ``count`` exchanges data.

    Both sides are cut into as many blocks of neighbors as the smaller side has ranks.

    Raises:
        LayoutError: If neither number is a multiple of the other.
    """
    if count and len(others) % count == 0:
        block = len(others) // count
        return list(others[place * block : (place + 1) * block])
    if others and count % len(others) == 0:
        return [others[place // (count // len(others))]]
    raise LayoutError(
        f"cannot match {count} ranks with {len(others)}",
        hint="one number must be a multiple of the other",
    )
