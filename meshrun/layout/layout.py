"""The place of every rank: rank <-> coordinate <-> (node, local rank), and the groups of dims.

Plain values and arithmetic: no torch, no process, no environment. The mesh is row-major over the
ranks, as ``torch.distributed.init_device_mesh`` lays it out; so a rank's place in a dim's group is
its coordinate on that dim. torch sorts the ranks of a group, so where ranks are to sit in another
order, they are numbered otherwise (``slot_order``) and the mesh stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, TypeAlias

from meshrun.errors import LayoutError
from meshrun.layout import placing
from meshrun.layout.axes import Axis, rest_of
from meshrun.layout.choosing import match_ranks, ranks_at
from meshrun.layout.coordinate import Coordinate, coordinate_type, label_template
from meshrun.layout.derived import Flatten, View, parse_derived
from meshrun.layout.dims import Dims, Group
from meshrun.layout.solving import count_slots
from meshrun.layout.spec import AnyMesh, MeshSpec, format_mesh, mesh_text, parse_mesh

_Asked: TypeAlias = "tuple[int, ...] | Mapping[str, object]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Dims):
    """A mesh on its nodes.

    A dim goes by its name, or by its index in the mesh, as a text too where dims have no names.
    Except where a method says so, dims that ``flattens`` joins and dims of ``views`` are dims like
    the mesh's own. A rank that is left out is the own one, and groups are ascending. Layouts are
    equal if every rank has the same place, regardless of ``own_rank`` and of restarts.

    Args:
        mesh: The solved spec (no ``-1``), or ``None`` where a launch has no mesh.
        nproc_per_node: Number of workers on each node, in node order.
        generation: How often the ranks have been started again.
        slot_order: Dims of the mesh, slowest first, in whose order ranks take the slots of the
            nodes; ``None`` for the mesh's own, in which ranks are numbered node by node.
        own_rank: The rank of this process, or ``None`` where there is none.
        flattens: Dims of the mesh that are one dim under another name.
        views: Other factorizations of the mesh's ranks; a ``-1`` in them is worked out.
        previous: The layout of the generation before this one, or ``None``.

    Raises:
        LayoutError: If the mesh and the nodes have not as many ranks, a node has no worker, or
            ``own_rank`` is outside the world; in every method, if there is no such rank or dim,
            or if a rank is left out and there is no own rank.
        SpecError: If ``flattens`` or ``views`` do not fit the mesh.
    """

    generation: int = field(default=0, compare=False)
    previous: Layout | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(
        cls,
        spec: AnyMesh | None,
        *,
        names: str | Iterable[str] | None = None,
        nnodes: int | None = None,
        nproc_per_node: int | Sequence[int] | None = None,
        flatten: str | Iterable[str] = (),
        views: str | Iterable[str] = (),
        intra_node: Sequence[str] = (),
        place: str = "contiguous",
    ) -> Layout:
        """Return the layout of a launch with these options; texts as on the command line.

        Several names, flattens or views may come as a list, or in one text.

        Raises:
            SpecError: If a text cannot be read or does not fit the mesh.
            LayoutError: If the mesh and the workers do not fit.

        Example:
            >>> Layout.parse("dp=-1,tp=4", nnodes=2, nproc_per_node=8).shape
            {'dp': 4, 'tp': 4}
        """
        if names is not None and not isinstance(names, str):
            names = ",".join(names)
        mesh = None if spec is None else parse_mesh(mesh_text(spec), names)
        flattens, parsed = parse_derived(flatten, views)
        return solve_layout(
            mesh,
            nnodes=nnodes,
            nproc_per_node=nproc_per_node,
            flattens=flattens,
            views=parsed,
            intra_node=intra_node,
            renumber=place == "auto",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, the same on every rank; see :meth:`from_dict`."""
        counts = self.nproc_per_node
        return {
            "mesh": format_mesh(self.mesh) if self.mesh else None,
            "flatten": [str(flatten) for flatten in self.flattens],
            "views": [str(view) for view in self.views],
            "nnodes": len(counts),
            "nproc_per_node": list(counts) if self._starts else counts[0],
            "slot_order": list(self.slot_order) if self.slot_order else None,
            "generation": self.generation,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, own_rank: int | None = None) -> Layout:
        """Return the layout that :meth:`to_dict` wrote; with no own rank unless one is given.

        Raises:
            LayoutError: If it wrote no such values.
        """
        try:
            counts, mesh = values["nproc_per_node"], values["mesh"]
            even = isinstance(counts, int)
            nodes = count_slots(None, values["nnodes"], counts) if even else tuple(counts)
            order = tuple(values.get("slot_order") or ())
            flattens, views = parse_derived(values.get("flatten", ()), values.get("views", ()))
            return cls(
                mesh=parse_mesh(mesh) if mesh else None,
                nproc_per_node=nodes,
                slot_order=order or None,
                generation=values.get("generation", 0),
                own_rank=own_rank,
                flattens=flattens,
                views=views,
            )
        except (AttributeError, KeyError, TypeError) as error:
            lacks = f"no {error}" if isinstance(error, KeyError) else str(error)
            hint = "pass what Layout.to_dict() returned"
            raise LayoutError(f"not the values of a layout: {lacks}", hint=hint) from error

    # ---- ranks and coordinates -------------------------------------------------------------

    def coordinate(self, rank: int | None = None) -> Coordinate:
        """Return where a rank sits, one integer per dim of the mesh; empty without one.

        Example:
            >>> Layout.parse("dp=2,tp=4").coordinate(5)
            Coordinate(dp=1, tp=1)
        """
        rank = self._known(rank)
        kind = coordinate_type(self.mesh.mesh_dim_names if self.mesh else None)
        return kind([rank // axis.stride % axis.size for axis in self._own])

    def rank(self, coordinate: Sequence[int] | None = None, /, **indices: int) -> int:
        """Return the rank at a coordinate of the mesh, or at an index on each of some dims.

        Args:
            coordinate: One integer per dim; the inverse of :meth:`coordinate`.
            **indices: Index by dim; what they leave open is as for the own rank.

        Raises:
            LayoutError: If it is outside the mesh, or two dims given have ranks in common.

        Example:
            >>> Layout.parse("dp=2,tp=4").rank(dp=1, tp=1)
            5
        """
        if coordinate is None:
            axes = tuple([self.axis(dim) for dim in indices])
            return self._at(indices, axes, list(indices.values()))
        if indices:
            raise LayoutError("got both a coordinate and indices by dim", hint="pass one of them")
        if len(coordinate) != len(self._own):
            given, dims = tuple(coordinate), len(self._own)
            raise LayoutError(
                f"coordinate {given} has {len(given)} dims, but mesh `{self.mesh}` has {dims}",
                hint="to fix only some dims, name them: rank(dp=1)",
            )
        return self._at(tuple(coordinate), self._own, coordinate)

    def ranks(self, /, **indices: int | Iterable[int]) -> Group:
        """Return the ranks with an index, or one of several, on each of some dims; ascending.

        Raises:
            LayoutError: If an index is outside the mesh.

        Example:
            >>> Layout.parse("dp=2,tp=4").ranks(dp=1, tp=[0, 2])
            [4, 6]
        """
        chosen: list[tuple[Axis, Sequence[int]]] = []
        for dim, given in indices.items():
            axis = self.axis(dim)
            if isinstance(given, Iterable):
                wanted = sorted({index(place) for place in given})
            else:
                wanted = [index(given)]
            if wanted and not 0 <= wanted[0] <= wanted[-1] < axis.size:
                raise self._outside(indices, axis)
            chosen.append((axis, wanted))
        return ranks_at(chosen, self.world_size)

    def label(self, rank: int | None = None) -> str:
        """Return a name for a rank's files, of one width for all: ``dp01_tp3``, ``01_3``."""
        rank = self._known(rank)
        if self.mesh is None:
            return f"rank{rank:0{len(str(self.world_size - 1))}}"
        places = [rank // axis.stride % axis.size for axis in self._own]
        return label_template(self.mesh).format(*places)

    def map_to(
        self,
        other: Layout | Sequence[int],
        rank: int | None = None,
        *,
        among: Sequence[int] | None = None,
    ) -> list[int]:
        """Return the ranks of another mesh that a rank exchanges data with.

        Contiguous blocks of the larger side belong to one rank of the smaller; both sides agree.

        Args:
            other: Another launch's layout, or ranks, such as those of the next pipeline stage.
            rank: Whose partners.
            among: The ranks that are this side, such as those of a stage; all if ``None``.

        Raises:
            LayoutError: If neither side's size is a multiple of the other's, or ``rank`` is not
                among those of this side.

        Example:
            >>> layout = Layout.parse("pp=2,dp=2")
            >>> layout.map_to(layout.ranks(pp=1), 1, among=layout.ranks(pp=0))
            [3]
        """
        rank = self._known(rank)
        mine = range(self.world_size) if among is None else among
        if rank not in mine:
            raise LayoutError(f"rank {rank} is not one of the ranks to match")
        others = range(other.world_size) if isinstance(other, Layout) else other
        return match_ranks(mine.index(rank), len(mine), others)

    def _at(self, asked: _Asked, axes: tuple[Axis, ...], places: Sequence[int]) -> int:
        rank = 0
        for axis, given in zip(axes, places, strict=True):
            at = index(given)
            if not 0 <= at < axis.size:
                raise self._outside(asked, axis)
            rank += axis.offset(at)
        rest = rest_of(self.world_size, axes)
        if rest is None:
            raise LayoutError(
                f"the dims of {_shown(asked)} overlap, so their indices do not identify one rank",
                hint="ranks() returns the ranks at all of them",
            )
        if rest.size > 1:
            own = self._known(None)
            rank += own - rest.first(own)
        return rank

    def _outside(self, asked: _Asked, axis: Axis) -> LayoutError:
        dim = next(dim for dim in reversed(self._axes) if self._axes[dim] is axis)
        hint = f"`{dim}` ranges from 0 to {axis.size - 1}"
        return LayoutError(f"{_shown(asked)} is outside mesh `{self.mesh}`", hint=hint)


def _shown(asked: _Asked) -> str:
    """What was asked for as it may be typed: ``(2, 0)``, ``dp=2, tp=0``."""
    if isinstance(asked, tuple):
        return f"coordinate {asked}"
    return ", ".join(f"{dim}={given}" for dim, given in asked.items())


def solve_layout(
    mesh: MeshSpec | None,
    *,
    nnodes: int | None = None,
    nproc_per_node: int | Sequence[int] | None = None,
    flattens: tuple[Flatten, ...] = (),
    views: tuple[View, ...] = (),
    intra_node: Sequence[str] = (),
    renumber: bool = False,
) -> Layout:
    """Fit a mesh to the machines, working out whatever was left open.

    Args:
        mesh: The spec, perhaps with one size left open; ``None`` for a launch without a mesh.
        nnodes: Number of nodes; 1, or as many as numbers of workers, if ``None``.
        nproc_per_node: Workers that each node may have, one number or one a node; as many as the
            mesh needs if ``None``.
        flattens: Dims of the mesh to join.
        views: Other factorizations of its ranks.
        intra_node: Dims each of whose groups must lie within one node.
        renumber: Whether ranks may take other slots than their own for that.

    Raises:
        LayoutError: With the arithmetic and the nearest choices when the numbers disagree, or the
            first dim that crosses nodes.
        SpecError: If ``flattens`` or ``views`` do not fit the mesh.
    """
    slots = count_slots(mesh, nnodes, nproc_per_node)
    if mesh is None:
        return Layout(mesh=None, nproc_per_node=slots, flattens=flattens, views=views)
    placed = placing.place(mesh, slots, intra_node, renumber=renumber)
    return Layout(
        mesh=placed.mesh,
        nproc_per_node=placed.nproc_per_node,
        slot_order=placed.slot_order,
        flattens=flattens,
        views=views,
    )
