"""Placement of ranks in slots so that groups of given dims lie within a node or domain. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from meshrun.errors import LayoutError
from meshrun.layout.axes import Parts, SlotMap, axes_of
from meshrun.layout.derived import shortened_group
from meshrun.layout.domains import shorten_domains, sums_of
from meshrun.layout.solving import fill, solve_sizes
from meshrun.layout.spec import INFERRED, MeshSpec, format_mesh
from meshrun.wording import count, listed, use_dim

Place = Literal["contiguous", "auto"]
"""How ranks are numbered: node by node, or so that groups lie within a node or domain."""


class Placement(Struct, frozen=True, kw_only=True):
    """The slots that the ranks of a mesh take."""

    mesh: MeshSpec
    """The spec with all sizes known."""
    nproc_per_node: tuple[int, ...]
    """Number of workers on each node; its other slots are spare."""
    slot_order: tuple[str, ...] | None = None
    """Dims, slowest first, in the order in which ranks take the slots; ``None`` for the mesh's."""


class Locality(Struct, frozen=True, kw_only=True):
    """The machines, and which groups must stay within one of them or within a domain.

    A group within a node is also within a domain. All dims of a level stay together: the combined
    groups of ``in_node`` must fit on a node.
    """

    slots: tuple[int, ...]
    """Maximum number of workers on each node."""
    in_node: tuple[int, ...] = ()
    """Dims whose groups must each lie within one node."""
    in_domain: tuple[int, ...] = ()
    """Dims whose groups must each lie within one domain."""
    nodes_per_domain: tuple[int, ...] = ()

    @property
    def all_in_domain(self) -> tuple[int, ...]:
        """All dims whose groups must not leave a domain; empty if domains do not matter."""
        return tuple(sorted({*self.in_node, *self.in_domain})) if self.in_domain else ()

    @property
    def units(self) -> tuple[int, ...]:
        """Number of nodes in each unit to fill with blocks: a domain, or all nodes together."""
        return self.nodes_per_domain if self.in_domain else (len(self.slots),)

    def blocks(self, mesh: MeshSpec) -> tuple[int, int]:
        """Return how many ranks must stay together on a node, and how many in a unit."""
        inner = math.prod(mesh.sizes[dim] for dim in self.in_node)
        return inner, math.prod(mesh.sizes[dim] for dim in self.all_in_domain or self.in_node)

    def room(self, inner: int) -> Counter[int]:
        """Return how many units there are by the number of ``inner``-rank blocks they can hold."""
        return Counter(sums_of([slots // inner for slots in self.slots], self.units))


def place(mesh: MeshSpec, locality: Locality, *, renumber: bool = False) -> Placement:
    """Place a mesh so that each group of given dims lies within one node or domain.

    Args:
        mesh: The spec; one size may be open.
        locality: The nodes, the domains, and the dims.
        renumber: Whether ranks may take slots in another order of dims.

    Raises:
        LayoutError: If the numbers disagree, or if a dim crosses nodes or domains, with a remedy.
    """
    solved = solve_sizes(mesh, locality.slots)
    if locality.in_domain and not locality.nodes_per_domain:
        names = ",".join(mesh.keys[dim] for dim in locality.in_domain)
        raise LayoutError(
            f"--intra-domain {names}: no domains are known",
            hint="pass the number of consecutive nodes that share one, such as --domain-size 18",
        )
    straight = Placement(mesh=solved, nproc_per_node=fill(locality.slots, solved.known_size))
    if _first_crossing(straight, locality) is None:
        return straight
    packed = _pack(mesh, solved, locality)
    if packed is None:
        raise _does_not_fit(solved, locality)
    if (crossing := _first_crossing(packed, locality)) is None:
        return packed
    order = _find_order(packed, locality)
    if not renumber:
        raise _crosses(packed, locality, order, *crossing)
    return replace(packed, slot_order=tuple(mesh.keys[dim] for dim in order))


def find_dims(mesh: MeshSpec, dims: Sequence[str], option: str) -> tuple[int, ...]:
    """Return the indices of dims given by name, or by index as a string if they have no names.

    Raises:
        LayoutError: If the mesh has no such dim, or one is given twice.
    """
    names = mesh.keys
    for place, dim in enumerate(dims):
        if dim not in names:
            raise LayoutError(f"{option}: mesh `{mesh}` has no dim `{dim}`", hint=use_dim(names))
        if dim in dims[:place]:
            raise LayoutError(f"{option} names dim `{dim}` twice", hint="name each dim once")
    return tuple(map(names.index, dims))


def _first_crossing(
    placement: Placement, locality: Locality, order: Sequence[int] = ()
) -> tuple[int, Parts] | None:
    """Return the first dim that violates ``locality``, and the nodes or domains that it crosses.

    Ranks take the slots in an ``order`` of dims, slowest first; in the mesh's if it is empty.
    """
    sizes, counts = placement.mesh.sizes, placement.nproc_per_node
    axes = axes_of(sizes)
    if order:
        slot_map = SlotMap.of(sizes, order)
        axes = [slot_map.axis(axis) or axis for axis in axes]
    levels = [(locality.in_node, Parts.of(counts))]
    if locality.in_domain:
        levels.append((locality.in_domain, Parts.of(sums_of(counts, locality.nodes_per_domain))))
    found = ((dim, parts) for dims, parts in levels for dim in dims)
    return next((each for each in found if axes[each[0]].count_crossing(each[1])), None)


def _find_order(packed: Placement, locality: Locality) -> list[int]:
    """Return an order of dims in which nothing crosses, close to the mesh's order.

    Dims that must stay within a node come last. Those that must stay within a domain move past no
    more dims than necessary, so that groups of the others stay close: ``cp,dp,tp`` becomes
    ``dp,cp,tp``, not ``dp,tp,cp``.
    """
    inner = sorted(locality.in_node)
    outer = sorted({*locality.in_domain} - {*inner})
    others = [dim for dim in range(packed.mesh.ndim) if dim not in (*inner, *outer)]
    at_first = sum(dim < min(outer, default=dim + 1) for dim in others)
    orders = (
        [*others[:slower], *outer, *others[slower:], *inner]
        for slower in range(at_first, len(others) + 1)
    )
    return next(order for order in orders if _first_crossing(packed, locality, order) is None)


# ---- packing -------------------------------------------------------------------------------


def _pack(mesh: MeshSpec, solved: MeshSpec, locality: Locality) -> Placement | None:
    """Fill nodes with whole blocks of ranks; ``None`` if they do not fit."""
    if mesh.is_inferred:
        solved = _largest_that_packs(mesh, solved, locality)
    if 0 in solved.sizes:
        return None
    inner, outer = locality.blocks(solved)
    left = solved.known_size
    used: list[int] = []
    nodes = iter(locality.slots)
    for size in locality.units:
        slots = [next(nodes) for _ in range(size)]
        room = sum(each // inner for each in slots) * inner
        share = min(room - room % outer, left)
        used += fill([each - each % inner for each in slots], share)
        left -= share
    return None if left else Placement(mesh=solved, nproc_per_node=tuple(used))


def _largest_that_packs(mesh: MeshSpec, solved: MeshSpec, locality: Locality) -> MeshSpec:
    """Return the spec with the largest value of the open size whose blocks fit; 0 if none does."""
    open_dim = mesh.sizes.index(INFERRED)
    largest, least = solved.sizes[open_dim], (mesh.bounds or (1, None))[0]
    inner, outer = locality.blocks(mesh.with_size(open_dim, 1))
    rows = mesh.known_size // outer
    room = locality.room(inner)
    if open_dim in locality.in_node:
        sizes = range(min(largest, max(locality.slots) // inner), 0, -1)
        fits = (n for n in sizes if _count_blocks(locality.room(inner * n), outer // inner) >= rows)
        size = next(fits, 0)
    elif open_dim in locality.in_domain:
        sizes = range(min(largest, max(room) * inner // outer), 0, -1)
        size = next((n for n in sizes if _count_blocks(room, n * outer // inner) >= rows), 0)
    else:
        size = min(largest, _count_blocks(room, outer // inner) // rows)
    return mesh.with_size(open_dim, size if size >= least else 0)


def _count_blocks(room: Counter[int], each: int) -> int:
    """Return how many outer blocks, of ``each`` inner blocks, all units can hold."""
    return sum(blocks // each * units for blocks, units in room.items())


# ---- errors --------------------------------------------------------------------------------


def _crosses(
    packed: Placement, locality: Locality, order: list[int], dim: int, parts: Parts
) -> LayoutError:
    mesh, names = packed.mesh, packed.mesh.keys
    axis = axes_of(mesh.sizes)[dim]
    crossing = axis.count_crossing(parts)
    groups = mesh.known_size // mesh.sizes[dim]
    reordered = MeshSpec(
        sizes=tuple(mesh.sizes[at] for at in order),
        mesh_dim_names=tuple(names[at] for at in order) if mesh.mesh_dim_names else None,
    )
    what = names[dim] if mesh.mesh_dim_names else f"dim {dim}"
    cross = "crosses" if crossing == 1 else "cross"
    message = f"{crossing:,} of {count(groups, 'group')} of {what} {cross}"
    if dim in locality.in_node:
        message = f"--intra-node: {message} nodes"
    else:
        first, at = next(
            (group, domains)
            for group in axis.groups(mesh.known_size)
            if len(domains := sorted({parts.place(rank)[0] for rank in group})) > 1
        )
        where = f"domains {listed(at, most=4, rest=', ..')}"
        message = (
            f"--intra-domain: {message} domains ({_size_of(locality)}); the first one,"
            f" {shortened_group(first)}, is in {where}"
        )
    move = f"put {what} last" if dim == order[-1] else "reorder the dims"
    return LayoutError(
        message,
        hint=f"{move}: --mesh {format_mesh(reordered)}; or keep the mesh and renumber"
        " ranks: --place auto",
    )


def _size_of(locality: Locality) -> str:
    """Return the sizes of domains: ``18 nodes each, the last 10``, or ``of 18, 10, 18 nodes``."""
    sizes, size = locality.nodes_per_domain, shorten_domains(locality.nodes_per_domain)
    if isinstance(size, int):
        last = f", the last {sizes[-1]}" if sizes[-1] < size else ""
        return f"{count(size, 'node')} each{last}"
    return f"of {listed(sizes, most=4, rest=', ..')} nodes"


def _does_not_fit(mesh: MeshSpec, locality: Locality) -> LayoutError:
    inner, outer = locality.blocks(mesh)
    held = sum(slots // inner for slots in locality.slots)
    if inner > max(locality.slots) or held * inner < mesh.known_size:
        return _does_not_fit_nodes(mesh, locality, inner, held)
    message = (
        f"--intra-domain: {_joined(mesh, locality.all_in_domain)} needs {outer} ranks in one domain"
    )
    largest = max(locality.room(inner)) * inner
    if outer > largest:
        nodes = max(locality.nodes_per_domain)
        return LayoutError(
            f"{message}, but the largest domain has room for only {count(largest, 'rank')} on"
            f" {count(nodes, 'node')}",
            hint="use smaller or fewer dims",
        )
    blocks = _count_blocks(locality.room(inner), outer // inner)
    workers = sums_of(
        [slots - slots % inner for slots in locality.slots], locality.nodes_per_domain
    )
    hint = f"choose sizes whose product divides {math.gcd(*workers)} to fill every domain"
    free = [mesh.keys[dim] for dim in range(mesh.ndim) if dim not in locality.all_in_domain]
    if free:
        hint += f", or infer one, such as {free[0]}=-1, to leave the rest of each spare"
    return LayoutError(
        f"{message}, but domains ({_size_of(locality)}) have room for only {blocks:,} of the"
        f" {mesh.known_size // outer:,} groups of {outer:,} ranks",
        hint=hint,
    )


def _does_not_fit_nodes(mesh: MeshSpec, locality: Locality, block: int, held: int) -> LayoutError:
    message = (
        f"--intra-node: {_joined(mesh, locality.in_node)} needs {block} ranks on one node, but"
    )
    most = max(locality.slots)
    if block > most:
        largest = f"the largest node has only {count(most, 'worker')}"
        return LayoutError(f"{message} {largest}", hint="use smaller or fewer dims")
    return LayoutError(
        f"{message} the nodes have room for only {held:,} of the {mesh.known_size // block:,}"
        f" groups of {block:,} ranks",
        hint=f"use a multiple of {block} workers per node, or a size that divides the workers of a"
        " node",
    )


def _joined(mesh: MeshSpec, dims: Sequence[int]) -> str:
    names = mesh.keys
    return " x ".join(f"{names[dim]}={mesh.sizes[dim]}" for dim in sorted(dims))
