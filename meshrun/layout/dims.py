"""The dims of a mesh over ranks on nodes, and the groups of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TypeAlias, overload

from meshrun.errors import LayoutError
from meshrun.layout.axes import Axis, axes_of
from meshrun.layout.derived import Flatten, View, derive
from meshrun.layout.moved import Moved
from meshrun.layout.nodes import Nodes
from meshrun.layout.spec import MeshSpec
from meshrun.wording import count

Group: TypeAlias = "range | list[int]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims(Nodes):
    """The dims that there are: the mesh's own, joined ones and those of views.

    Args:
        mesh: The solved spec (no ``-1``), or ``None`` where a launch has no mesh.
        nproc_per_node: Number of workers on each node, in node order.
        slot_order: Dims of the mesh, slowest first, in whose order ranks take slots.
        own_rank: The rank of this process, or ``None`` where there is none.
        flattens: Dims of the mesh that are one dim under another name.
        views: Other factorizations of the mesh's ranks; a ``-1`` in them is worked out.

    Raises:
        LayoutError: If the mesh and the nodes have not as many ranks, a node has no worker, or
            ``own_rank`` is outside the world; in every method, if there is no such rank or dim,
            or if a rank is left out and there is no own rank.
        SpecError: If ``flattens`` or ``views`` do not fit the mesh.
    """

    mesh: MeshSpec | None
    slot_order: tuple[str, ...] | None = None
    flattens: tuple[Flatten, ...] = ()
    views: tuple[View, ...] = ()
    _axes: dict[str | int, Axis] = field(init=False, repr=False, compare=False)
    _own: tuple[Axis, ...] = field(init=False, repr=False, compare=False)
    _moved: Moved | None = field(init=False, repr=False, compare=False)
    """How ranks are moved to slots; ``None`` where rank r takes slot r."""

    def __post_init__(self) -> None:
        Nodes.__post_init__(self)  # super() does not find the class that slots create again
        self._check_mesh()
        own = axes_of(self.sizes)
        axes: dict[str | int, Axis] = {**dict(enumerate(own)), **dict(zip(self.shape, own))}  # noqa: B905
        if self.flattens or self.views:
            if self.mesh is None:
                raise LayoutError("flattens and views require a mesh")
            views, derived = derive(self.mesh, self.flattens, self.views)
            object.__setattr__(self, "views", views)
            axes.update(derived)
        object.__setattr__(self, "_axes", axes)
        object.__setattr__(self, "_own", tuple(own))
        order = None if self.slot_order is None else [self.dim(dim) for dim in self.slot_order]
        if order is not None and sorted(order) != list(range(len(own))):
            raise LayoutError(f"slot order {self.slot_order} must contain each dim once")
        object.__setattr__(self, "_moved", None if order is None else Moved.to(self.sizes, order))

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the mesh's dims, slowest first; ``None`` without a mesh or without names."""
        return self.mesh.mesh_dim_names if self.mesh else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each of the mesh's dims, slowest first; empty without a mesh."""
        return self.mesh.sizes if self.mesh else ()

    @property
    def shape(self) -> dict[str, int]:
        """Size of each of the mesh's dims by its name, by ``"0"``, ``"1"`` if it has none."""
        names = self.mesh_dim_names or tuple(str(dim) for dim in range(len(self.sizes)))
        return dict(zip(names, self.sizes, strict=True))

    @property
    def dim_labels(self) -> tuple[str, ...]:
        """What to call each dim: its name, or ``dim 0``, ``dim 1`` where it has none."""
        return self.mesh_dim_names or tuple(f"dim {dim}" for dim in range(len(self.sizes)))

    @property
    def derived_dims(self) -> tuple[str, ...]:
        """Names of joined dims and of those of views, without the mesh's own."""
        own = {*self.shape, *range(len(self.sizes))}
        return tuple(str(name) for name in self._axes if name not in own)

    def dim(self, name: str | int) -> int:
        """Return the index of one of the mesh's own dims."""
        names = tuple(self.shape)
        if isinstance(name, int) and 0 <= name < len(names):
            return name
        if name in names:
            return names.index(str(name))
        if name in self._axes:
            raise LayoutError(f"dim `{name}` is not one of the mesh's own dims", hint=self._has())
        raise self._no_dim(name)

    def size(self, dim: str | int | None = None) -> int:
        """Return how many ranks each group of ``dim`` has; the world size without ``dim``."""
        return self.world_size if dim is None else self.axis(dim).size

    # ---- groups ----------------------------------------------------------------------------

    @overload
    def group(self, dim: int, rank: int | None = None) -> range: ...
    @overload
    def group(self, dim: str, rank: int | None = None) -> Group: ...
    def group(self, dim: str | int, rank: int | None = None) -> Group:
        """Return the ranks that share a group of ``dim`` with ``rank``, ``rank`` among them."""
        return self.axis(dim).group(self._known(rank))

    @overload
    def groups(self, dim: int) -> Iterator[range]: ...
    @overload
    def groups(self, dim: str) -> Iterator[Group]: ...
    def groups(self, dim: str | int) -> Iterator[Group]:
        """Yield every group of ``dim`` in order of its first rank."""
        return self.axis(dim).groups(self.world_size)

    def dim_rank(self, dim: str | int, rank: int | None = None) -> int:
        """Return a rank's place in its group, as ``DeviceMesh.get_local_rank(dim)``."""
        return self.axis(dim).place(self._known(rank))

    def neighbor(
        self, dim: str | int, offset: int, rank: int | None = None, *, wrap: bool = False
    ) -> int | None:
        """Return the rank so many places on in the group; past its ends ``None``, or around."""
        axis, rank = self.axis(dim), self._known(rank)
        place = axis.place(rank) + index(offset)
        if not 0 <= place < axis.size:
            if not wrap:
                return None
            place %= axis.size
        return axis.first(rank) + axis.offset(place)

    def is_first(self, dim: str | int, rank: int | None = None) -> bool:
        """Whether a rank is the first of its group, as of the first pipeline stage."""
        return self.axis(dim).place(self._known(rank)) == 0

    def is_last(self, dim: str | int, rank: int | None = None) -> bool:
        """Whether a rank is the last of its group."""
        axis = self.axis(dim)
        return axis.place(self._known(rank)) == axis.size - 1

    def source(self, dim: str | int, rank: int | None = None) -> int:
        """Return the first rank of a group, such as for a broadcast."""
        return self.axis(dim).first(self._known(rank))

    def crosses_nodes(self, group: str | int | Sequence[int]) -> bool:
        """Whether some ranks lie on more than one node, or those of any group of a dim do."""
        if isinstance(group, (str, int)):
            return self.count_crossing(group) > 0
        if not group:
            return False
        if self._moved is not None:
            return len({self.node_rank(rank) for rank in group}) > 1
        ends = (group[0], group[-1]) if isinstance(group, range) else (min(group), max(group))
        return self.node_rank(ends[0]) != self.node_rank(ends[1])

    def count_crossing(self, dim: str | int) -> int:
        """Return how many groups of ``dim`` lie on more than one node, without listing them."""
        if self._moved is None:
            return self.axis(dim).count_crossing(self.nproc_per_node, self._starts)
        axis = self._moved.axis(self.axis(dim))
        if axis is not None:
            return axis.count_crossing(self.nproc_per_node, self._starts)
        return sum(self.crosses_nodes(group) for group in self.groups(dim))

    def rail_aligned(self, dim: str | int) -> bool:
        """Whether the ranks of each group of ``dim`` have one local rank."""
        axis = self.axis(dim)
        if self._moved is not None:
            moved = self._moved.axis(axis)
            if moved is None:
                groups = self.groups(dim)
                return all(len({self.local_rank(rank) for rank in group}) == 1 for group in groups)
            axis = moved
        return axis.is_rail_aligned(self.nproc_per_node, self._starts)

    # ---- slots -----------------------------------------------------------------------------

    def slot_number(self, rank: int | None = None) -> int:
        """Return the place of a rank among the slots of all nodes, node by node."""
        rank = self._known(rank)
        return rank if self._moved is None else self._moved.slot(rank)

    def rank_in_slot(self, number: int) -> int:
        """Return the rank in a slot, by the slot's number; the inverse of :meth:`slot_number`."""
        number = self._known(number)
        return number if self._moved is None else self._moved.rank(number)

    @property
    def _takes_own_slots(self) -> bool:
        return self._moved is None

    def axis(self, dim: str | int) -> Axis:
        """Return the arithmetic of a dim."""
        axis = self._axes.get(dim)
        if axis is None:
            raise self._no_dim(dim)
        return axis

    def _check_mesh(self) -> None:
        if self.mesh is None:
            return
        if self.mesh.is_inferred:
            hint = "Layout.parse() infers it"
            raise LayoutError(f"mesh `{self.mesh}` has a size of -1", hint=hint)
        if self.mesh.known_size != self.world_size:
            have = "has" if self.nnodes == 1 else "have"
            raise LayoutError(
                f"mesh `{self.mesh}` has {count(self.mesh.known_size, 'rank')}, but"
                f" {count(self.nnodes, 'node')} {have} {count(self.world_size, 'worker')}",
                hint="the total of nproc_per_node over all nodes must equal the ranks of the mesh",
            )

    def _no_dim(self, dim: str | int) -> LayoutError:
        if self.mesh is None:
            hint = "define one, as in --mesh dp=2,tp=4"
            return LayoutError(f"there is no mesh and so no dim `{dim}`", hint=hint)
        hint = self._has(*self.derived_dims)
        return LayoutError(f"mesh `{self.mesh}` has no dim `{dim}`", hint=hint)

    def _has(self, *derived: str) -> str:
        return "it has " + ", ".join(f"`{name}`" for name in (*self.dim_labels, *derived))
