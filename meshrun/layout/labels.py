"""The labels of ranks, one or several: ``dp1 tp3``, ``dp0-1 tp* x8``. Pure."""

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

    Coordinates are used where they say it exactly, that is where the ranks are every combination
    of some indices of each dim; rank numbers where they do not, and where dims have no names.
    It takes time in proportion to the number of ranks, so keep what it returns for a set.

    Args:
        layout: Where every rank sits.
        ranks: At least one; their order does not matter.

    Returns:
        ``dp0-1 tp* x8`` with ``*`` for all of a dim, ``rank 0,3,5-7 x5``, ``all x16`` for all
        ranks, and for a single rank what :func:`rank_label` says.

    Raises:
        LayoutError: If a rank is not in ``range(world_size)``.
    """
    chosen = sorted(set(ranks))
    if not chosen:
        raise ValueError("a label is for at least one rank")
    first = rank_label(layout, chosen[0])
    if len(chosen) == 1:
        return first
    layout.coordinate(chosen[-1])
    count = f"x{len(chosen)}"
    if len(chosen) == layout.world_size:
        return f"all {count}"
    return f"{_by_dim(layout, chosen) or f'rank {number_ranges(chosen)}'} {count}"


def _by_dim(layout: Layout, ranks: list[int]) -> str:
    """Return ``dp0-1 tp*``, or ``""`` if the ranks cannot be named so."""
    names = layout.mesh_dim_names
    if names is None:
        return ""
    indices = []
    for dim, size in enumerate(layout.sizes):
        stride = layout.group(dim, 0).step
        indices.append({rank // stride % size for rank in ranks})
    # Every rank is among the combinations of its own indices: as many means the same ones.
    if math.prod(len(found) for found in indices) != len(ranks):
        return ""
    return " ".join(
        f"{name}*" if 1 < len(found) == size else f"{name}{number_ranges(found)}"
        for name, size, found in zip(names, layout.sizes, indices, strict=True)
    )


def group_label(layout: Layout, ranks: Iterable[int], description: str = "") -> str:
    """Return a process group as people know it: by its dim where it is one, and by its ranks.

    Args:
        layout: Where every rank sits.
        ranks: The ranks of the group.
        description: What torch says of it, ``mesh_tp`` for a group of a dim.
    """
    members = sorted(ranks)
    numbers = f"{{{number_ranges(members)}}}"
    if description.startswith("mesh_"):
        return f"the {description.removeprefix('mesh_')} group {numbers}"
    if len(members) == layout.world_size:
        return "the group of all ranks"
    names = (layout.mesh_dim_names or ()) if layout.mesh else ()
    for dim, name in enumerate(names):
        if members == list(layout.group(dim, members[0])):
            return f"the {name} group {numbers}"
    return f"the group {numbers}"
