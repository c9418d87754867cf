"""The number of workers a mesh needs, and the nearest choices if numbers disagree. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from meshrun.errors import LayoutError
from meshrun.layout.spec import INFERRED, MeshSpec, format_mesh
from meshrun.wording import count, either, listed

MAX_RANKS = 10_000_000
_MOST_LISTED = 4
"""Most nodes whose workers a hint lists one by one."""
_LARGEST_SHOWN = 10**18
"""Python refuses to format numbers with thousands of digits, and nobody would read them."""


def count_slots(
    mesh: MeshSpec | None, nnodes: int | None, nproc_per_node: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the maximum number of workers on each node.

    The parameters are those of :func:`meshrun.layout.solve_layout`.

    Raises:
        LayoutError: If a number is below 1, or they disagree.
    """
    given = list(nproc_per_node) if isinstance(nproc_per_node, Sequence) else [nproc_per_node]
    nodes = nnodes if nnodes is not None else len(given)
    for flag, value in (("--nnodes", nodes), *(("--nproc-per-node", each) for each in given)):
        if value is not None and value < 1:
            raise LayoutError(f"{flag} must be at least 1, found {value}")
        _check_count(value or 0)
    _check_count(mesh.known_size if mesh else 0)
    if len(given) > 1 and len(given) != nodes:
        raise LayoutError(
            f"--nproc-per-node lists {len(given)} numbers for {count(nodes, 'node')}",
            hint=f"pass one number for all nodes, or one per node, or --nnodes {len(given)}",
        )
    counts = [1 if mesh is None else _workers_for(mesh, nodes)] if None in given else given
    slots = [number for number in counts if number is not None]
    _check_count(sum(slots) * (nodes if len(slots) == 1 else 1))
    return tuple(slots * nodes if len(slots) == 1 else slots)


def solve_sizes(mesh: MeshSpec, slots: Sequence[int]) -> MeshSpec:
    """Return the spec with its open size, if any, replaced by the largest that fits.

    Args:
        mesh: The spec; it must use every slot, unless one size is open.
        slots: Maximum number of workers on each node.

    Raises:
        LayoutError: If the numbers disagree, with the arithmetic and the nearest choices.
    """
    total = sum(slots)
    if not mesh.is_inferred:
        if mesh.known_size != total:
            raise _mismatch(mesh, count(mesh.known_size, "worker"), slots)
        return mesh
    least, most = mesh.bounds or (1, None)
    size = total // mesh.known_size
    if size < least:
        at_least = f"at least {count(least * mesh.known_size, 'worker')}"
        raise _mismatch(mesh, at_least, slots, least=least)
    return mesh.with_size(mesh.sizes.index(INFERRED), size if most is None else min(size, most))


def fill(slots: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the number of workers on each node if ranks take slots in order."""
    used = []
    for number in slots:
        used.append(min(number, world_size))
        world_size -= used[-1]
    return tuple(used)


def _check_count(ranks: int) -> None:
    if ranks > MAX_RANKS:
        found = f"{ranks:,}" if ranks < _LARGEST_SHOWN else f"over {_LARGEST_SHOWN:,}"
        raise LayoutError(f"{found} ranks exceed the limit of {MAX_RANKS:,}")


def _workers_for(mesh: MeshSpec, nodes: int) -> int:
    if mesh.is_inferred:
        open_size = format_mesh(MeshSpec(sizes=(INFERRED,), bounds=mesh.bounds))
        raise LayoutError(
            f"cannot infer the size {open_size} of mesh `{mesh}`: the number of workers is unknown",
            hint=f"pass --nproc-per-node, or write a number in place of {open_size}",
        )
    if mesh.known_size % nodes:
        raise LayoutError(
            f"mesh `{mesh}` needs {count(mesh.known_size, 'worker')}, which"
            f" {'does' if mesh.known_size == 1 else 'do'} not divide evenly"
            f" over {count(nodes, 'node')} ({mesh.known_size} / {nodes} ="
            f" {mesh.known_size / nodes:.4g})",
            hint=_hint_for_nodes(mesh.known_size, nodes),
        )
    return mesh.known_size // nodes


def _slots_in_words(slots: Sequence[int]) -> str:
    """Return ``2 nodes x 3 workers give 6``, or ``2 nodes with 8, 4 workers give 12``."""
    total = sum(slots)
    if len(set(slots)) == 1:
        verb = "gives" if len(slots) == 1 else "give"
        return f"{count(len(slots), 'node')} x {count(slots[0], 'worker')} {verb} {total:,}"
    few = listed(slots, most=4, rest=", ..")
    return f"{count(len(slots), 'node')} with {few} workers give {total:,}"


def _mismatch(mesh: MeshSpec, needs: str, slots: Sequence[int], *, least: int = 1) -> LayoutError:
    message = f"mesh `{mesh}` needs {needs}"
    if mesh.ndim > 1 and not mesh.is_inferred:
        message += f" ({' x '.join(str(size) for size in mesh.sizes)})"
    return LayoutError(
        f"{message}, but {_slots_in_words(slots)}", hint=_hint(mesh, slots, least * mesh.known_size)
    )


def _hint(mesh: MeshSpec, slots: Sequence[int], needed: int) -> str:
    """Return the nearest choices: first meshes that use all workers, then counts that fit."""
    total, nodes = sum(slots), len(slots)
    meshes = _meshes_that_fill(mesh, total)[:3]
    fits = either([f"`{format_mesh(choice)}`" for choice in meshes])
    choices = [f"{fits} for {count(total, 'worker')}"]
    if len(set(slots)) == 1:
        if slots[0] != needed // nodes and needed % nodes == 0:
            choices.append(f"--nproc-per-node {needed // nodes} for {needed}")
        if needed % slots[0] == 0 and needed // slots[0] != nodes:
            choices.append(f"--nnodes {needed // slots[0]} for {needed}")
        of_each = fill(slots, needed)
        if needed % nodes and sum(of_each) == needed and all(of_each) and nodes <= _MOST_LISTED:
            choices.append(f"--nproc-per-node {','.join(map(str, of_each))} for {needed}")
    return f"use {', or '.join(choices)}"


def _hint_for_nodes(needed: int, nodes: int) -> str:
    fewer = next(n for n in range(min(nodes, needed), 0, -1) if needed % n == 0)
    more = (n for n in range(nodes, needed + 1) if needed % n == 0)
    counts = [fewer, *islice(more, 1)]
    return f"use {' or '.join(f'--nnodes {n}' for n in counts)}"


def _meshes_that_fill(mesh: MeshSpec, world_size: int) -> list[MeshSpec]:
    """Return meshes of exactly ``world_size`` ranks, those with the fewest changes first."""
    is_open = [size == INFERRED or not mesh.is_inferred for size in mesh.sizes]
    dims = [dim for dim, may_change in enumerate(is_open) if may_change]
    sizes = mesh.sizes
    if found := [dim for dim in dims if world_size % _others(sizes, dim) == 0]:
        return [mesh.with_size(dim, world_size // _others(sizes, dim)) for dim in found]
    shared = [math.gcd(size, world_size) if size > 0 else size for size in sizes]
    fits = [dim for dim in dims if world_size % _others(shared, dim) == 0]
    sizes = (world_size, *(1 for _ in sizes[1:]))
    if fits:
        last = fits[-1]
        sizes = (*shared[:last], world_size // _others(shared, last), *shared[last + 1 :])
    return [MeshSpec(sizes=sizes, mesh_dim_names=mesh.mesh_dim_names)]


def _others(sizes: Sequence[int], dim: int) -> int:
    """Return the product of the known sizes of the other dims."""
    return math.prod(size for index, size in enumerate(sizes) if index != dim and size > 0)
