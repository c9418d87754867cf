"""What a rank is called on the console and in reports."""

from __future__ import annotations

from meshrun.layout import Layout


def rank_label(layout: Layout, rank: int) -> str:
    """Return ``dp1 tp3``, ``1,3`` for dims without names, or ``rank 7`` without a mesh."""
    coordinate = layout.coordinate(rank)
    if layout.mesh is None:
        return f"rank {rank}"
    if layout.mesh_dim_names is None:
        return ",".join(str(index) for index in coordinate)
    pairs = zip(layout.mesh_dim_names, coordinate, strict=True)
    return " ".join(f"{name}{index}" for name, index in pairs)
