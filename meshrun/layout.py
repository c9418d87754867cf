"""Where every rank sits: rank <-> coordinate <-> (node, local rank), and the groups of each dim.

Plain values and arithmetic: no torch, no process, no environment. Ranks are numbered node by
node, and the mesh is row-major over them, as ``torch.distributed.init_device_mesh`` lays it out;
so a rank's place in a dim's group is its coordinate on that dim.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, product

from meshrun.errors import LayoutError
from meshrun.spec import INFERRED, MeshSpec, format_mesh

MAX_RANKS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A mesh on its nodes.

    Args:
        mesh: The solved spec (no ``-1``), or ``None`` where a launch has no mesh.
        nproc_per_node: Number of workers on each node, in node order.
        generation: How often the ranks have been started again.
    """

    mesh: MeshSpec | None
    nproc_per_node: tuple[int, ...]
    generation: int = 0
    _first_rank: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _strides: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = tuple(accumulate(self.nproc_per_node, initial=0))
        object.__setattr__(self, "_first_rank", starts)
        sizes = self.mesh.sizes if self.mesh else ()
        strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        object.__setattr__(self, "_strides", strides)

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return self._first_rank[-1]

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return len(self.nproc_per_node)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the dims, slowest first; ``None`` without a mesh or without names."""
        return self.mesh.mesh_dim_names if self.mesh else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each dim, slowest first; empty without a mesh."""
        return self.mesh.sizes if self.mesh else ()

    @property
    def dim_labels(self) -> tuple[str, ...]:
        """What to call each dim: its name, or ``dim 0``, ``dim 1`` where it has none."""
        return self.mesh_dim_names or tuple(f"dim {dim}" for dim in range(len(self.sizes)))

    # ---- ranks and coordinates -------------------------------------------------------------

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return where ``rank`` sits, one integer per dim; empty without a mesh.

        Raises:
            LayoutError: If ``rank`` is not in ``range(world_size)``.

        Example:
            >>> Layout(mesh=MeshSpec(sizes=(2, 4)), nproc_per_node=(8,)).coordinate(5)
            (1, 1)
        """
        self._check_rank(rank)
        pairs = zip(self._strides, self.sizes, strict=True)
        return tuple(rank // stride % size for stride, size in pairs)

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """Return the rank at ``coordinate``; the inverse of :meth:`coordinate`.

        Raises:
            LayoutError: If the coordinate has another length than the mesh or lies outside it.
        """
        inside = len(coordinate) == len(self.sizes) and all(
            0 <= index < size for index, size in zip(coordinate, self.sizes, strict=True)
        )
        if not inside:
            raise LayoutError(f"coordinate {coordinate} is outside mesh `{self.mesh}`")
        return sum(i * stride for i, stride in zip(coordinate, self._strides, strict=True))

    # ---- nodes -----------------------------------------------------------------------------

    def node_rank(self, rank: int) -> int:
        """Return the node that ``rank`` runs on, ``0 <= node_rank < nnodes``."""
        self._check_rank(rank)
        return bisect_right(self._first_rank, rank) - 1

    def local_rank(self, rank: int) -> int:
        """Return the place of ``rank`` among the workers of its node."""
        return rank - self._first_rank[self.node_rank(rank)]

    def ranks_of_node(self, node_rank: int) -> range:
        """Return the ranks that run on a node."""
        return range(self._first_rank[node_rank], self._first_rank[node_rank + 1])

    # ---- groups ----------------------------------------------------------------------------

    def dim(self, name: str | int) -> int:
        """Return the index of a dim given by name or by index.

        Raises:
            LayoutError: If the mesh has no such dim.
        """
        if isinstance(name, int) and 0 <= name < len(self.sizes):
            return name
        if isinstance(name, str) and name in (self.mesh_dim_names or ()):
            return (self.mesh_dim_names or ()).index(name)
        known = ", ".join(f"`{label}`" for label in self.dim_labels) or "no dims"
        raise LayoutError(f"mesh `{self.mesh}` has no dim `{name}`", hint=f"it has {known}")

    def group(self, dim: str | int, rank: int) -> range:
        """Return the ranks that share a group of ``dim`` with ``rank``, ``rank`` among them."""
        index = self.dim(dim)
        self._check_rank(rank)
        stride, size = self._strides[index], self.sizes[index]
        first = rank - rank // stride % size * stride
        return range(first, first + size * stride, stride)

    def groups(self, dim: str | int) -> Iterator[range]:
        """Yield every group of ``dim`` in order of its first rank."""
        index = self.dim(dim)
        stride, size = self._strides[index], self.sizes[index]
        for outer, inner in product(range(0, self.world_size, stride * size), range(stride)):
            yield range(outer + inner, outer + inner + size * stride, stride)

    def crosses_nodes(self, group: range) -> bool:
        """Whether the ranks of ``group`` lie on more than one node."""
        return self.node_rank(group[0]) != self.node_rank(group[-1])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a world of {self.world_size}")


def solve_layout(
    mesh: MeshSpec | None, *, nnodes: int | None = None, nproc_per_node: int | None = None
) -> Layout:
    """Fit a mesh to the machines, working out whatever was left open.

    Args:
        mesh: The spec, perhaps with one ``-1``; ``None`` for a launch without a mesh.
        nnodes: Number of nodes; 1 if ``None``.
        nproc_per_node: Workers on each node; as many as the mesh needs if ``None``.

    Raises:
        LayoutError: With the arithmetic and the nearest choices when the numbers disagree.
    """
    nodes = 1 if nnodes is None else nnodes
    for flag, value in (("--nnodes", nodes), ("--nproc-per-node", nproc_per_node)):
        if value is not None and value < 1:
            raise LayoutError(f"{flag} is at least 1, found {value}")
    if mesh is None:
        return _checked(None, nodes, 1 if nproc_per_node is None else nproc_per_node)
    if nproc_per_node is None:
        return _checked(mesh, nodes, _workers_for(mesh, nodes))
    world_size = nodes * nproc_per_node
    if mesh.is_inferred:
        if world_size % mesh.known_size:
            raise _no_multiple(mesh, nodes, nproc_per_node)
        mesh = mesh.with_size(mesh.sizes.index(INFERRED), world_size // mesh.known_size)
    if mesh.known_size != world_size:
        raise _mismatch(mesh, nodes, nproc_per_node)
    return _checked(mesh, nodes, nproc_per_node)


def _checked(mesh: MeshSpec | None, nodes: int, nproc: int) -> Layout:
    if nodes * nproc > MAX_RANKS:
        raise LayoutError(f"{nodes * nproc:,} ranks are more than {MAX_RANKS:,}")
    return Layout(mesh=mesh, nproc_per_node=(nproc,) * nodes)


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
        counts = [n for n in range(nodes, 0, -1) if needed % n == 0][:1]
        counts += [n for n in range(nodes, needed + 1) if needed % n == 0][:1]
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
