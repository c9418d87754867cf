"""How many workers a mesh needs, and what fits where the numbers disagree. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from meshrun.errors import LayoutError
from meshrun.spec import INFERRED, MeshSpec, format_mesh

MAX_RANKS = 10_000_000
_LARGEST_SHOWN = 10**18
"""Python refuses to write numbers of thousands of digits, and nobody would read them."""


def solve_sizes(
    mesh: MeshSpec | None, nodes: int, nproc_per_node: int | None
) -> tuple[MeshSpec | None, int]:
    """Work out the sizes and the workers of a node that were left open.

    Args:
        mesh: The spec, perhaps with one ``-1``; ``None`` for a launch without a mesh.
        nodes: Number of nodes.
        nproc_per_node: Workers on each node; as many as the mesh needs if ``None``.

    Returns:
        The spec without ``-1``, and the workers of each node.

    Raises:
        LayoutError: With the arithmetic and the nearest choices when the numbers disagree.
    """
    for flag, value in (("--nnodes", nodes), ("--nproc-per-node", nproc_per_node)):
        if value is not None and value < 1:
            raise LayoutError(f"{flag} is at least 1, found {value}")
        _check_count(value or 0)
    _check_count(mesh.known_size if mesh else 0)
    if mesh is None:
        nproc_per_node = 1 if nproc_per_node is None else nproc_per_node
    elif nproc_per_node is None:
        nproc_per_node = _workers_for(mesh, nodes)
    else:
        mesh = _fitted(mesh, nodes, nproc_per_node)
    _check_count(nodes * nproc_per_node)
    return mesh, nproc_per_node


def _check_count(ranks: int) -> None:
    if ranks > MAX_RANKS:
        found = f"{ranks:,}" if ranks < _LARGEST_SHOWN else f"over {_LARGEST_SHOWN:,}"
        raise LayoutError(f"{found} ranks are more than {MAX_RANKS:,}")


def _fitted(mesh: MeshSpec, nodes: int, nproc: int) -> MeshSpec:
    world_size = nodes * nproc
    if mesh.is_inferred:
        if world_size % mesh.known_size:
            raise _no_multiple(mesh, nodes, nproc)
        mesh = mesh.with_size(mesh.sizes.index(INFERRED), world_size // mesh.known_size)
    if mesh.known_size != world_size:
        raise _mismatch(mesh, nodes, nproc)
    return mesh


def _workers_for(mesh: MeshSpec, nodes: int) -> int:
    if mesh.is_inferred:
        raise LayoutError(
            f"mesh `{mesh}` has a size of -1, and the number of workers is not known",
            hint="pass --nproc-per-node, or write a number in place of -1",
        )
    if mesh.known_size % nodes:
        raise LayoutError(
            f"mesh `{mesh}` needs {mesh.known_size} workers, which {_nodes(nodes)} cannot share"
            f" equally ({mesh.known_size} / {nodes} = {mesh.known_size / nodes:.4g})",
            hint=_hint(mesh, nodes, None),
        )
    return mesh.known_size // nodes


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"


def _given(nodes: int, nproc: int) -> str:
    verb = "gives" if nodes == 1 else "give"
    workers = f"{nproc} worker{'s' if nproc != 1 else ''}"
    return f"{_nodes(nodes)} x {workers} {verb} {nodes * nproc}"


def _mismatch(mesh: MeshSpec, nodes: int, nproc: int) -> LayoutError:
    needs = f"mesh `{mesh}` needs {mesh.known_size} workers"
    if mesh.ndim > 1:
        needs += f" ({' x '.join(str(size) for size in mesh.sizes)})"
    return LayoutError(f"{needs}, and {_given(nodes, nproc)}", hint=_hint(mesh, nodes, nproc))


def _no_multiple(mesh: MeshSpec, nodes: int, nproc: int) -> LayoutError:
    needs = f"mesh `{mesh}` needs a multiple of {mesh.known_size} workers"
    return LayoutError(f"{needs}, and {_given(nodes, nproc)}", hint=_hint(mesh, nodes, nproc))


def _hint(mesh: MeshSpec, nodes: int, nproc: int | None) -> str:
    """The nearest choices: first the meshes that fill the workers, then the counts that fit."""
    choices = []
    if nproc is not None:
        meshes = list(_meshes_that_fill(mesh, nodes * nproc))[:3]
        fits = " or ".join(f"`{format_mesh(choice)}`" for choice in meshes)
        choices.append(f"{fits} fit{'s' if len(meshes) == 1 else ''} {nodes * nproc} workers")
    needed = mesh.known_size
    if mesh.is_inferred and nproc is not None:
        needed *= max(1, round(nodes * nproc / mesh.known_size))
    if nproc != needed // nodes and needed % nodes == 0:
        choices.append(f"--nproc-per-node {needed // nodes} gives {needed}")
    if nproc is not None and needed % nproc == 0 and needed // nproc != nodes:
        choices.append(f"--nnodes {needed // nproc} gives {needed}")
    if nproc is None:
        fewer = next(n for n in range(min(nodes, needed), 0, -1) if needed % n == 0)
        more = (n for n in range(nodes, needed + 1) if needed % n == 0)
        counts = [fewer, *islice(more, 1)]
        choices.append(" or ".join(f"--nnodes {n}" for n in counts) + " can")
    return "; ".join(choices)


def _meshes_that_fill(mesh: MeshSpec, world_size: int) -> Iterator[MeshSpec]:
    """Yield meshes of exactly ``world_size`` ranks, the ones that change least first."""
    found = False
    for dim, size in enumerate(mesh.sizes):
        rest = mesh.known_size // (size if size != INFERRED else 1)
        inferred_elsewhere = mesh.is_inferred and size != INFERRED
        if not inferred_elsewhere and world_size % rest == 0:
            found = True
            yield mesh.with_size(dim, world_size // rest)
    if not found:
        fixed = [math.gcd(size, world_size) if size > 0 else size for size in mesh.sizes]
        for dim in range(mesh.ndim - 1, -1, -1):
            rest = math.prod(size for index, size in enumerate(fixed) if index != dim and size > 0)
            if world_size % rest == 0 and (fixed[dim] == INFERRED or not mesh.is_inferred):
                sizes = (*fixed[:dim], world_size // rest, *fixed[dim + 1 :])
                yield MeshSpec(sizes=sizes, mesh_dim_names=mesh.mesh_dim_names)
                return
        sizes = (world_size, *(1 for _ in mesh.sizes[1:]))
        yield MeshSpec(sizes=sizes, mesh_dim_names=mesh.mesh_dim_names)
