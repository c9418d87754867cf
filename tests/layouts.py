"""Random layouts."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from meshrun.layout import Layout
from meshrun.layout.spec import MeshSpec

_NAMES = ("dp", "pp", "tp", "ep_2")

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


@st.composite
def node_counts(draw: st.DrawFn, world_size: int) -> tuple[int, ...]:
    """Numbers of workers of each node, equal or not."""
    if draw(st.booleans()):
        workers = draw(st.sampled_from(divisors(world_size)))
        return (workers,) * (world_size // workers)
    cuts = draw(st.sets(st.integers(1, max(1, world_size - 1)), max_size=6)) - {world_size}
    return tuple(end - start for start, end in itertools.pairwise([0, *sorted(cuts), world_size]))


@st.composite
def layouts(draw: st.DrawFn, are_named: bool = False) -> Layout:
    """Meshes on even and uneven nodes, with an own rank; some without names, or no mesh at all."""
    shape = draw(shapes)
    names = _NAMES[: len(shape)] if are_named or draw(st.integers(0, 2)) else None
    mesh = MeshSpec(sizes=shape, mesh_dim_names=names)
    return Layout(
        mesh=mesh if are_named or draw(st.integers(0, 4)) else None,
        nproc_per_node=draw(node_counts(mesh.known_size)),
        own_rank=draw(st.integers(0, mesh.known_size - 1)),
    )
