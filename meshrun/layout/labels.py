"""Labels of one or several ranks: ``dp1 tp3``, ``dp0-1 tp* x8``. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshrun.layout.layout import Layout
from meshrun.wording import number_ranges


def rank_label(layout: Layout, rank: int) -> str:
    """Return ``dp1 tp3``, ``1,3`` for dims without names, or ``rank 7`` without a mesh."""
    coordinate = layout.coordinate(rank)
    if layout.mesh is None:
        return f"rank {rank}"
    if layout.mesh_dim_names is None:
        return ",".join(str(index) for index in coordinate)
    pairs = zip(layout.mesh_dim_names, coordinate, strict=True)
    return " ".join(f"{name}{index}" for name, index in pairs)


def rank_name(layout: Layout, rank: int) -> str:
    """Return ``rank 7 [dp1 tp3]``, or ``rank 7`` without a mesh."""
    return f"rank {rank} [{rank_label(layout, rank)}]" if layout.mesh else f"rank {rank}"


def merged_label(layout: Layout, ranks: Iterable[int]) -> str:
    """Return one label for a set of ranks, with their number.

    It consists of coordinates if the ranks are all combinations of some indices of each dim, and
    of rank numbers otherwise or if dims have no names. It takes time in proportion to the number
    of ranks, so keep the result.

    Returns:
        ``dp0-1 tp* x8`` with ``*`` for all of a dim, ``rank 0,3,5-7 x5``, ``all x16`` for all
        ranks, or :func:`rank_label` for a single rank.
    """
    chosen = sorted(set(ranks))
    first = rank_label(layout, chosen[0])
    if len(chosen) == 1:
        return first
    count = f"x{len(chosen)}"
    if len(chosen) == layout.world_size:
        return f"all {count}"
    return f"{_by_dim(layout, chosen) or f'rank {number_ranges(chosen)}'} {count}"


def _by_dim(layout: Layout, ranks: list[int]) -> str:
    """Return ``dp0-1 tp*``, or "" if the ranks are not all combinations of indices."""
    names = layout.mesh_dim_names
    if names is None:
        return ""
    indices = [set(map(layout.axis(dim).place, ranks)) for dim in range(len(layout.sizes))]
    # The ranks are a subset of the combinations of their indices: equal if as many.
    if math.prod(len(found) for found in indices) != len(ranks):
        return ""
    return " ".join(
        f"{name}*" if 1 < len(found) == size else f"{name}{number_ranges(found)}"
        for name, size, found in zip(names, layout.sizes, indices, strict=True)
    )


def group_label(layout: Layout, ranks: Iterable[int], description: str) -> str:
    """Return a name for a process group, by its dim if it has one, and by its ranks.

    ``description`` is torch's: ``mesh_tp`` for a group of a dim.
    """
    members = sorted(ranks)
    numbers = f"{{{number_ranges(members)}}}"
    if description.startswith("mesh_"):
        return f"the {description.removeprefix('mesh_')} group {numbers}"
    if len(members) == layout.world_size:
        return "the group of all ranks"
    for dim, name in enumerate(layout.mesh_dim_names or ()):
        if members == list(layout.group(dim, members[0])):
            return f"the {name} group {numbers}"
    return f"the group {numbers}"
