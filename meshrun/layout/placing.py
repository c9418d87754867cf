"""Which slots ranks fill, so that the groups of some dims lie within one node. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshrun.errors import LayoutError
from meshrun.layout.axes import axes_of
from meshrun.layout.solving import fill, solve_sizes
from meshrun.layout.spec import INFERRED, MeshSpec, format_mesh
from meshrun.wording import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the ranks of a mesh go."""

    mesh: MeshSpec
    """The spec with all sizes known."""
    nproc_per_node: tuple[int, ...]
    """Workers of each node; what is left of its slots is spare."""
    slot_order: tuple[str, ...] | None = None
    """Dims, slowest first, in whose order ranks take the slots; ``None`` for the mesh's own."""


def place(
    mesh: MeshSpec, slots: Sequence[int], together: Sequence[str] = (), *, renumber: bool = False
) -> Placement:
    """Place a mesh so that each group of some dims lies within one node.

    Args:
        mesh: The spec; one size may be left open.
        slots: Workers that each node may have.
        together: Names of these dims, or their indices as texts where dims have no names.
        renumber: Whether ranks may take slots in another order than their own.

    Raises:
        LayoutError: If the numbers disagree, or with the first dim that crosses nodes and what
            would help.
    """
    solved = solve_sizes(mesh, slots)
    straight = Placement(mesh=solved, nproc_per_node=fill(slots, solved.known_size))
    dims = [_index(mesh, dim) for dim in together]
    crossing = next((dim for dim in dims if _count_crossing(straight, dim)), None)
    if crossing is None:
        return straight
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    in_order = others == list(range(len(others)))
    packed = _pack(mesh, solved, slots, dims)
    if packed is None:
        raise _does_not_fit(solved, slots, dims)
    if not (in_order or renumber):
        raise _crosses(straight, crossing, [*others, *sorted(dims)])
    if in_order:
        return packed
    order = tuple(names_of(mesh)[dim] for dim in [*others, *sorted(dims)])
    return Placement(mesh=packed.mesh, nproc_per_node=packed.nproc_per_node, slot_order=order)


def names_of(mesh: MeshSpec) -> tuple[str, ...]:
    """Return what dims go by: their names, or ``"0"``, ``"1"`` where they have none."""
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


def _index(mesh: MeshSpec, dim: str) -> int:
    names = names_of(mesh)
    if dim not in names:
        has = ", ".join(f"`{name}`" for name in names)
        raise LayoutError(f"--intra-node: mesh `{mesh}` has no dim `{dim}`", hint=f"it has {has}")
    return names.index(dim)


def _count_crossing(placement: Placement, dim: int) -> int:
    counts = placement.nproc_per_node
    starts = [sum(counts[:node]) for node in range(len(counts) + 1)] if len({*counts}) > 1 else []
    return axes_of(placement.mesh.sizes)[dim].count_crossing(counts, starts)


def _pack(
    mesh: MeshSpec, solved: MeshSpec, slots: Sequence[int], dims: Sequence[int]
) -> Placement | None:
    """Put whole blocks of the ranks that belong together on nodes; ``None`` if they do not fit."""
    if mesh.is_inferred:
        solved = _largest_that_packs(mesh, solved, slots, dims)
    block = _block(solved, dims)
    if block == 0 or sum(count // block for count in slots) * block < solved.known_size:
        return None
    used = fill([count - count % block for count in slots], solved.known_size)
    return Placement(mesh=solved, nproc_per_node=used)


def _largest_that_packs(
    mesh: MeshSpec, solved: MeshSpec, slots: Sequence[int], dims: Sequence[int]
) -> MeshSpec:
    """Return the spec with the largest open size whose blocks fit; with 0 if none does."""
    open_dim = mesh.sizes.index(INFERRED)
    largest, least = solved.sizes[open_dim], (mesh.bounds or (1, None))[0]
    known_block = math.prod(mesh.sizes[dim] for dim in dims if dim != open_dim)
    rows = mesh.known_size // known_block
    if open_dim not in dims:
        size = min(largest, sum(count // known_block for count in slots) // rows)
    else:
        sizes = range(min(largest, max(slots) // known_block), 0, -1)
        fits = (n for n in sizes if sum(count // (known_block * n) for count in slots) >= rows)
        size = next(fits, 0)
    return mesh.with_size(open_dim, size if size >= least else 0)


def _block(mesh: MeshSpec, dims: Sequence[int]) -> int:
    """Return how many ranks belong on one node together."""
    return 0 if 0 in mesh.sizes else math.prod(mesh.sizes[dim] for dim in dims)


def _crosses(straight: Placement, dim: int, order: list[int]) -> LayoutError:
    mesh, names = straight.mesh, names_of(straight.mesh)
    crossing = _count_crossing(straight, dim)
    groups = mesh.known_size // mesh.sizes[dim]
    sizes = tuple(mesh.sizes[at] for at in order)
    reordered = MeshSpec(
        sizes=sizes,
        mesh_dim_names=tuple(names[at] for at in order) if mesh.mesh_dim_names else None,
    )
    what = names[dim] if mesh.mesh_dim_names else f"dim {dim}"
    cross = "crosses" if crossing == 1 else "cross"
    return LayoutError(
        f"--intra-node: {crossing:,} of {groups:,} groups of {what} {cross} nodes",
        hint=f"put {what} last: --mesh {format_mesh(reordered)}; or keep the mesh and renumber"
        " ranks: --place auto",
    )


def _does_not_fit(mesh: MeshSpec, slots: Sequence[int], dims: Sequence[int]) -> LayoutError:
    names, block = names_of(mesh), math.prod(mesh.sizes[dim] for dim in dims)
    joined = " x ".join(f"{names[dim]}={mesh.sizes[dim]}" for dim in sorted(dims))
    most = max(slots)
    message = f"--intra-node: {joined} needs {block} ranks on one node, but"
    if block > most:
        largest = f"the largest node has only {count(most, 'worker')}"
        return LayoutError(f"{message} {largest}", hint="use smaller or fewer dims")
    blocks, needed = sum(count // block for count in slots), mesh.known_size // block
    return LayoutError(
        f"{message} the nodes hold only {blocks} of the {needed} such blocks",
        hint=f"use a multiple of {block} workers per node, or a size that divides the workers of a"
        " node",
    )
