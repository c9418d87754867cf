"""The place of every rank: rank <-> coordinate <-> (node, local rank), and the groups of dims.

Plain values and arithmetic: no torch, no process, no environment. The mesh is row-major over the
ranks, like that of ``torch.distributed.init_device_mesh``, so a rank's place in a dim's group is
its coordinate on that dim. torch sorts the ranks of a group; to place ranks in another order, they
are renumbered (``slot_order``) and the mesh stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, TypeAlias, get_args, overload

from meshrun.errors import LayoutError
from meshrun.layout import placing
from meshrun.layout.axes import Axis, Parts, SlotMap, axes_of, ranks_at, rest_of
from meshrun.layout.coordinate import Coordinate, coordinate_type, label_template
from meshrun.layout.derived import Flatten, View, derive, parse_derived
from meshrun.layout.domains import shorten_domains, split_nodes, sums_of
from meshrun.layout.parameters import check_parameter
from meshrun.layout.placing import Place
from meshrun.layout.solving import count_slots
from meshrun.layout.spec import AnyMesh, MeshSpec, format_mesh, mesh_text, parse_mesh
from meshrun.wording import count, either, quoted

Group: TypeAlias = "range | list[int]"
Between: TypeAlias = Literal["nodes", "domains"]
Within: TypeAlias = Literal["node", "domain", "rail"]
_Request: TypeAlias = "tuple[int, ...] | Mapping[str, object]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A mesh on its nodes.

    A dim is given by its name or its index in the mesh; the index may be a string if dims have no
    names. Unless a method says otherwise, joined dims (``flattens``) and dims of ``views`` work
    like the mesh's own. An omitted rank means the own rank. Groups are ascending. Layouts are equal
    if every rank has the same place, regardless of ``own_rank`` and restarts.

    Args:
        mesh: The solved spec (no ``-1``), or ``None`` for a launch without a mesh.
        nproc_per_node: Number of workers on each node, in node order.
        nodes_per_domain: Number of nodes in each NVLink domain, in node order; empty if unknown.
        generation: The number of the generation, from 0.
        slot_order: Dims of the mesh, slowest first, in the order in which ranks take the slots of
            the nodes; ``None`` for the mesh's own order, which numbers ranks node by node.
        own_rank: The rank of this process, or ``None`` if it is not a rank.
        flattens: Dims of the mesh joined into one under another name.
        views: Other factorizations of the mesh's ranks; a ``-1`` in them is inferred.
        previous: The layout of the previous generation, or ``None``.

    Raises:
        LayoutError: If mesh and nodes differ in their number of ranks, or nodes and domains in
            their number of nodes, if no node has a worker, or if ``own_rank`` is outside the
            world; in every method, if a rank or dim does not exist, or if the rank is omitted and
            there is no own rank.
        SpecError: If ``flattens`` or ``views`` do not fit the mesh.
    """

    nproc_per_node: tuple[int, ...]
    own_rank: int | None = field(default=None, compare=False)
    world_size: int = field(init=False, repr=False, compare=False)
    """Number of ranks over all nodes."""
    mesh: MeshSpec | None
    nodes_per_domain: tuple[int, ...] = field(default=(), compare=False)
    slot_order: tuple[str, ...] | None = None
    flattens: tuple[Flatten, ...] = ()
    views: tuple[View, ...] = ()
    generation: int = field(default=0, compare=False)
    previous: Layout | None = field(default=None, compare=False, repr=False)
    _nodes: Parts = field(init=False, repr=False, compare=False)
    """The slots of each node."""
    _domains: Parts | None = field(init=False, repr=False, compare=False)
    """The slots of each domain; ``None`` if domains are unknown."""
    _axes: dict[str | int, Axis] = field(init=False, repr=False, compare=False)
    _own: tuple[Axis, ...] = field(init=False, repr=False, compare=False)
    _slot_map: SlotMap | None = field(init=False, repr=False, compare=False)
    """The mapping of ranks to slots; ``None`` if rank r takes slot r."""

    def __post_init__(self) -> None:
        self._count_workers()
        self._divide_into_domains()
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
        object.__setattr__(
            self, "_slot_map", None if order is None else SlotMap.of(self.sizes, order)
        )
        if self.own_rank is not None:
            self._known(self.own_rank)

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
        intra_node: str | Sequence[str] = (),
        intra_domain: str | Sequence[str] = (),
        domain_size: int | None = None,
        place: Place = "contiguous",
    ) -> Layout:
        """Return the layout of a launch with these options, written as on the command line.

        Several names, dims, flattens or views may be a list or one string.

        Raises:
            SpecError: If a string cannot be parsed or does not fit the mesh.
            LayoutError: If the mesh and the workers do not fit.

        Example:
            >>> Layout.parse("dp=-1,tp=4", nnodes=2, nproc_per_node=8).shape
            {'dp': 4, 'tp': 4}
        """
        if place not in get_args(Place):
            raise LayoutError(f"place is {either(get_args(Place))}, found `{place}`")
        check_parameter("nnodes", nnodes, int | None)
        check_parameter("nproc_per_node", nproc_per_node, int | Sequence[int] | None)
        check_parameter("domain_size", domain_size, int | None)
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
            intra_node=_listed(intra_node),
            intra_domain=_listed(intra_domain),
            domains=domain_size,
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
            "nproc_per_node": list(counts) if self._nodes.starts else counts[0],
            "nodes_per_domain": shorten_domains(self.nodes_per_domain),
            "slot_order": list(self.slot_order) if self.slot_order else None,
            "generation": self.generation,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, own_rank: int | None = None) -> Layout:
        """Return the layout of the values of :meth:`to_dict`, with an own rank if given.

        Raises:
            LayoutError: If the values are not those of a layout.
        """
        try:
            counts, mesh = values["nproc_per_node"], values["mesh"]
            even = isinstance(counts, int)
            nodes = count_slots(None, values["nnodes"], counts) if even else tuple(counts)
            domains = values.get("nodes_per_domain", ())
            regular = isinstance(domains, int)
            order = tuple(values.get("slot_order") or ())
            flattens, views = parse_derived(values.get("flatten", ()), values.get("views", ()))
            return cls(
                mesh=parse_mesh(mesh) if mesh else None,
                nproc_per_node=nodes,
                nodes_per_domain=split_nodes(len(nodes), domains) if regular else tuple(domains),
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

    # ---- the mesh --------------------------------------------------------------------------

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
        """Size of each of the mesh's dims by name, or by ``"0"``, ``"1"`` without names."""
        return dict(zip(self.mesh.keys, self.sizes, strict=True)) if self.mesh else {}

    @property
    def dim_labels(self) -> tuple[str, ...]:
        """Label of each of the mesh's dims: its name, or ``dim 0``, ``dim 1`` without names."""
        return self.mesh_dim_names or tuple(f"dim {dim}" for dim in range(len(self.sizes)))

    @property
    def derived_dims(self) -> tuple[str, ...]:
        """Names of joined dims and dims of views, without those of the mesh."""
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
        """Return the number of ranks in each group of ``dim``; without ``dim``, the world size."""
        return self.world_size if dim is None else self.axis(dim).size

    def axis(self, dim: str | int) -> Axis:
        """Return the arithmetic of a dim."""
        axis = self._axes.get(dim)
        if axis is None:
            raise self._no_dim(dim)
        return axis

    # ---- ranks and coordinates -------------------------------------------------------------

    def coordinate(self, rank: int | None = None) -> Coordinate:
        """Return the coordinate of a rank, one integer per dim of the mesh; empty without a mesh.

        Example:
            >>> Layout.parse("dp=2,tp=4").coordinate(5)
            Coordinate(dp=1, tp=1)
        """
        rank = self._known(rank)
        kind = coordinate_type(self.mesh_dim_names)
        return kind([rank // axis.stride % axis.size for axis in self._own])

    def rank(self, coordinate: Sequence[int] | None = None, /, **indices: int) -> int:
        """Return the rank at a coordinate of the mesh, or at indices of some dims.

        Args:
            coordinate: One integer per dim; the inverse of :meth:`coordinate`.
            **indices: Index by dim; on the other dims, the own rank's.

        Raises:
            LayoutError: If it is outside the mesh, or the given dims overlap.

        Example:
            >>> Layout.parse("dp=2,tp=4").rank(dp=1, tp=1)
            5
        """
        if coordinate is None:
            axes = tuple([self.axis(dim) for dim in indices])
            return self._at(indices, axes, list(indices.values()))
        if indices:
            raise LayoutError(
                "expected a coordinate or indices by dim, found both", hint="pass one of them"
            )
        if not hasattr(coordinate, "__len__"):
            raise LayoutError(
                f"a coordinate is a list with an index for each dim, found {coordinate!r}",
                hint="to fix only some dims, name them: rank(dp=1)",
            )
        if len(coordinate) != len(self._own):
            given, dims = count(len(coordinate), "dim"), len(self._own)
            raise LayoutError(
                f"coordinate {tuple(coordinate)} has {given}, but mesh `{self.mesh}` has {dims}",
                hint="to fix only some dims, name them: rank(dp=1)",
            )
        return self._at(tuple(coordinate), self._own, coordinate)

    def ranks(self, /, **indices: int | Iterable[int]) -> Group:
        """Return the ranks at an index, or any of several, of each given dim; ascending.

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
        """Return a name for a rank's files, of the same width for all: ``dp01_tp3``, ``01_3``."""
        rank = self._known(rank)
        if self.mesh is None:
            return f"rank{rank:0{len(str(self.world_size - 1))}}"
        return label_template(self.mesh).format(*self.coordinate(rank))

    def map_to(
        self,
        other: Layout | Sequence[int],
        rank: int | None = None,
        *,
        among: Sequence[int] | None = None,
    ) -> list[int]:
        """Return the ranks of another mesh that a rank exchanges data with.

        Each contiguous block of the larger side belongs to one rank of the smaller; both sides
        compute the same pairs.

        Args:
            other: Another launch's layout, or ranks, such as those of the next pipeline stage.
            rank: The rank whose partners to return.
            among: The ranks on this side, such as those of a pipeline stage; all if ``None``.

        Raises:
            LayoutError: If neither side's size is a multiple of the other's, or ``rank`` is not
                on this side.

        Example:
            >>> layout = Layout.parse("pp=2,dp=2")
            >>> layout.map_to(layout.ranks(pp=1), 1, among=layout.ranks(pp=0))
            [3]
        """
        if not isinstance(other, Layout | Sequence) or isinstance(other, str):
            check_parameter("other", other, Layout | Sequence[int])
        rank = self._known(rank)
        mine = range(self.world_size) if among is None else among
        if rank not in mine:
            raise LayoutError(
                f"rank {rank} is not in `among`, which has {count(len(mine), 'rank')}"
            )
        others = range(other.world_size) if isinstance(other, Layout) else other
        place = mine.index(rank)
        if len(others) % len(mine) == 0:
            block = len(others) // len(mine)
            return list(others[place * block : (place + 1) * block])
        if others and len(mine) % len(others) == 0:
            return [others[place // (len(mine) // len(others))]]
        raise LayoutError(
            f"cannot match {len(mine)} ranks with {len(others)}",
            hint="one number must be a multiple of the other",
        )

    # ---- groups ----------------------------------------------------------------------------

    @overload
    def group(self, dim: int, rank: int | None = None) -> range: ...
    @overload
    def group(self, dim: str, rank: int | None = None) -> Group: ...
    def group(self, dim: str | int, rank: int | None = None) -> Group:
        """Return the ranks of the group of ``dim`` that contains ``rank``."""
        return self.axis(dim).group(self._known(rank))

    @overload
    def groups(self, dim: int) -> Iterator[range]: ...
    @overload
    def groups(self, dim: str) -> Iterator[Group]: ...
    def groups(self, dim: str | int) -> Iterator[Group]:
        """Yield every group of ``dim`` in order of its first rank."""
        return self.axis(dim).groups(self.world_size)

    def dim_rank(self, dim: str | int, rank: int | None = None) -> int:
        """Return a rank's place in its group, like ``DeviceMesh.get_local_rank(dim)``."""
        return self.axis(dim).place(self._known(rank))

    def neighbor(
        self, dim: str | int, offset: int, rank: int | None = None, *, wrap: bool = False
    ) -> int | None:
        """Return the rank at an offset in the group; past its ends, ``None``, or wrapped around."""
        axis, rank = self.axis(dim), self._known(rank)
        place = axis.place(rank) + index(offset)
        if not 0 <= place < axis.size:
            if not wrap:
                return None
            place %= axis.size
        return axis.first(rank) + axis.offset(place)

    def is_first(self, dim: str | int, rank: int | None = None) -> bool:
        """Return whether a rank is the first of its group, such as the first pipeline stage."""
        return self.axis(dim).place(self._known(rank)) == 0

    def is_last(self, dim: str | int, rank: int | None = None) -> bool:
        """Return whether a rank is the last of its group."""
        axis = self.axis(dim)
        return axis.place(self._known(rank)) == axis.size - 1

    def source(self, dim: str | int, rank: int | None = None) -> int:
        """Return the first rank of a rank's group, for example for a broadcast."""
        return self.axis(dim).first(self._known(rank))

    def crosses_nodes(self, group: str | int | Sequence[int]) -> bool:
        """Return whether ranks, or those of any group of a dim, span several nodes."""
        return self._crosses(group, "nodes")

    def crosses_domains(self, group: str | int | Sequence[int]) -> bool:
        """Return whether ranks, or those of any group of a dim, span several domains."""
        return self._crosses(group, "domains")

    def _crosses(self, group: str | int | Sequence[int], between: Between) -> bool:
        if isinstance(group, (str, int)):
            return self.count_crossing(group, between) > 0
        place = self.node_rank if between == "nodes" else self.domain
        return len({place(rank) for rank in group}) > 1

    def count_crossing(self, dim: str | int, between: Between = "nodes") -> int:
        """Return how many groups of ``dim`` span several nodes, without listing the groups.

        Args:
            dim: A dim.
            between: ``domains`` to count groups that span several domains instead.
        """
        parts = self._nodes if between == "nodes" else self._known_domains()
        axis = self._axis_over_slots(dim)
        if axis is not None:
            return axis.count_crossing(parts)
        return sum(self._crosses(group, between) for group in self.groups(dim))

    def rail_aligned(self, dim: str | int) -> bool:
        """Return whether the ranks of each group of ``dim`` have the same local rank."""
        axis = self._axis_over_slots(dim)
        if axis is not None:
            return axis.is_rail_aligned(self._nodes)
        groups = self.groups(dim)
        return all(len({self.local_rank(rank) for rank in group}) == 1 for group in groups)

    def within(self, dim: str | int) -> Within | None:
        """Return the smallest unit that contains every group of ``dim``.

        Returns:
            ``node`` or ``domain``, else ``rail`` if the ranks of each group have the same local
            rank, else ``None``.
        """
        if not self.count_crossing(dim):
            return "node"
        if self.nodes_per_domain and not self.count_crossing(dim, "domains"):
            return "domain"
        return "rail" if self.rail_aligned(dim) else None

    def _axis_over_slots(self, dim: str | int) -> Axis | None:
        """Return a dim in terms of slots; ``None`` if its groups have no regular pattern there."""
        axis = self.axis(dim)
        return axis if self._slot_map is None else self._slot_map.axis(axis)

    # ---- nodes and slots -------------------------------------------------------------------

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return len(self.nproc_per_node)

    def node_rank(self, rank: int | None = None) -> int:
        """Return the node that a rank runs on, ``0 <= node_rank < nnodes``."""
        return self.slot(rank)[0]

    def local_rank(self, rank: int | None = None) -> int:
        """Return the place of a rank among the workers of its node."""
        return self.slot(rank)[1]

    def slot(self, rank: int | None = None) -> tuple[int, int]:
        """Return (node rank, local rank)."""
        return self._nodes.place(self.slot_number(rank))

    def rank_at(self, node_rank: int, local_rank: int) -> int:
        """Return the rank in a slot; the inverse of :meth:`slot`.

        Raises:
            LayoutError: If there is no such slot.
        """
        ranks = self.ranks_of_node(node_rank)
        if not 0 <= local_rank < len(ranks):
            raise LayoutError(
                f"node {node_rank} has no local rank {local_rank}",
                hint=f"its local ranks range from 0 to {len(ranks) - 1}",
            )
        return ranks[local_rank]

    def ranks_of_node(self, node_rank: int) -> range | list[int]:
        """Return the ranks that run on a node, in order of their local ranks.

        Raises:
            LayoutError: If there is no such node.
        """
        if not 0 <= node_rank < self.nnodes:
            hint = f"nodes range from 0 to {self.nnodes - 1}"
            raise LayoutError(f"node {node_rank} does not exist", hint=hint)
        slots = self._nodes.slots(node_rank)
        return slots if self._slot_map is None else [self.rank_in_slot(slot) for slot in slots]

    def slot_number(self, rank: int | None = None) -> int:
        """Return the number of a rank's slot among the slots of all nodes, node by node."""
        rank = self._known(rank)
        return rank if self._slot_map is None else self._slot_map.slot(rank)

    def rank_in_slot(self, number: int) -> int:
        """Return the rank in the slot with a number; the inverse of :meth:`slot_number`."""
        number = self._known(number)
        return number if self._slot_map is None else self._slot_map.rank(number)

    # ---- domains ---------------------------------------------------------------------------

    def domain(self, rank: int | None = None) -> int:
        """Return the domain of a rank's node, counting from 0.

        Raises:
            LayoutError: If domains are unknown.
        """
        return self._known_domains().place(self.slot_number(rank))[0]

    def nodes_of_domain(self, domain: int) -> range:
        """Return the node ranks of a domain.

        Raises:
            LayoutError: If there is no such domain.
        """
        sizes = self.nodes_per_domain
        if not 0 <= domain < len(self._known_domains().counts):
            hint = f"domains range from 0 to {len(sizes) - 1}"
            raise LayoutError(f"domain {domain} does not exist", hint=hint)
        first = sum(sizes[:domain])
        return range(first, first + sizes[domain])

    def workers(self, of: Between) -> tuple[int, ...]:
        """Return the number of workers of each node, or of each domain."""
        return self.nproc_per_node if of == "nodes" else self._known_domains().counts

    def _known_domains(self) -> Parts:
        if self._domains is None:
            hint = "set --domain-size to the number of nodes that share one"
            raise LayoutError("no domains are known", hint=hint)
        return self._domains

    # ---- checks ----------------------------------------------------------------------------

    def _count_workers(self) -> None:
        counts = tuple(self.nproc_per_node)
        if not counts:
            raise LayoutError(
                "expected at least one node", hint="for example, two nodes: nproc_per_node=(8, 8)"
            )
        if (fewest := min(counts)) < 0 or not any(counts):
            node = counts.index(fewest)
            raise LayoutError(
                f"numbers of workers cannot be negative or all 0: node {node} has {fewest}"
            )
        object.__setattr__(self, "nproc_per_node", counts)
        object.__setattr__(self, "_nodes", nodes := Parts.of(counts))
        object.__setattr__(self, "world_size", nodes.total)

    def _divide_into_domains(self) -> None:
        sizes = tuple(self.nodes_per_domain)
        if sizes and (sum(sizes) != self.nnodes or min(sizes) < 1):
            raise LayoutError(
                f"{count(len(sizes), 'domain')} with {count(sum(sizes), 'node')} do not divide"
                f" {count(self.nnodes, 'node')}",
                hint="for example, two domains of 36 nodes: nodes_per_domain=(18, 18)",
            )
        domains = Parts.of(sums_of(self.nproc_per_node, sizes)) if sizes else None
        object.__setattr__(self, "nodes_per_domain", sizes)
        object.__setattr__(self, "_domains", domains)

    def _check_mesh(self) -> None:
        if self.mesh is None:
            return
        if self.mesh.is_inferred:
            hint = "use Layout.parse(), which infers it"
            raise LayoutError(f"mesh `{self.mesh}` has a size of -1", hint=hint)
        if self.mesh.known_size != self.world_size:
            have = "has" if self.nnodes == 1 else "have"
            raise LayoutError(
                f"mesh `{self.mesh}` has {count(self.mesh.known_size, 'rank')}, but"
                f" {count(self.nnodes, 'node')} {have} {count(self.world_size, 'worker')}",
                hint="the total of nproc_per_node over all nodes must equal the ranks of the mesh",
            )

    def _known(self, rank: int | None) -> int:
        """Return the rank, or the own rank for ``None``, after checking that it exists."""
        if rank is None:
            if self.own_rank is None:
                hint = "pass a rank; only current_layout() knows the rank of its process"
                raise LayoutError("this layout does not belong to a rank", hint=hint)
            return self.own_rank
        rank = index(rank)  # converts numbers of numpy and torch
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a world of {self.world_size}")
        return rank

    def _at(self, request: _Request, axes: tuple[Axis, ...], places: Sequence[int]) -> int:
        rank = 0
        for axis, given in zip(axes, places, strict=True):
            at = index(given)
            if not 0 <= at < axis.size:
                raise self._outside(request, axis)
            rank += axis.offset(at)
        rest = rest_of(self.world_size, axes)
        if rest is None:
            raise LayoutError(
                f"the dims of {_shown(request)} overlap, so their indices do not identify one rank",
                hint="use ranks(), which returns the ranks at all of them",
            )
        if rest.size > 1:
            own = self._known(None)
            rank += own - rest.first(own)
        return rank

    def _outside(self, request: _Request, axis: Axis) -> LayoutError:
        dim = next(dim for dim in reversed(self._axes) if self._axes[dim] is axis)
        hint = f"`{dim}` ranges from 0 to {axis.size - 1}"
        return LayoutError(f"{_shown(request)} is outside mesh `{self.mesh}`", hint=hint)

    def _no_dim(self, dim: str | int) -> LayoutError:
        if self.mesh is None:
            hint = "define one, as in --mesh dp=2,tp=4"
            return LayoutError(f"there is no mesh and so no dim `{dim}`", hint=hint)
        hint = self._has(*self.derived_dims)
        return LayoutError(f"mesh `{self.mesh}` has no dim `{dim}`", hint=hint)

    def _has(self, *derived: str) -> str:
        return f"use {quoted((*self.dim_labels, *derived))}"


def _shown(request: _Request) -> str:
    """Return a request as the caller may have written it: ``(2, 0)``, ``dp=2, tp=0``."""
    if isinstance(request, tuple):
        return f"coordinate {request}"
    return ", ".join(f"{dim}={given}" for dim, given in request.items())


def solve_layout(
    mesh: MeshSpec | None,
    *,
    nnodes: int | None = None,
    nproc_per_node: int | Sequence[int] | None = None,
    flattens: tuple[Flatten, ...] = (),
    views: tuple[View, ...] = (),
    intra_node: Sequence[str] = (),
    intra_domain: Sequence[str] = (),
    domains: int | Sequence[int] | None = None,
    renumber: bool = False,
) -> Layout:
    """Fit a mesh to the machines, inferring what is open.

    Args:
        mesh: The spec, perhaps with one open size; ``None`` for a launch without a mesh.
        nnodes: Number of nodes; if ``None``, the length of ``nproc_per_node``, or 1.
        nproc_per_node: Maximum number of workers per node, one number or one per node; if ``None``,
            as many as the mesh needs.
        flattens: Dims of the mesh to join.
        views: Other factorizations of its ranks.
        intra_node: Dims whose groups must each lie within one node.
        intra_domain: Dims whose groups must each lie within one domain.
        domains: Number of nodes per NVLink domain, one number or one per domain, in node order.
        renumber: Whether ranks may change slots to keep groups within a node or domain.

    Raises:
        LayoutError: If the numbers disagree, with the arithmetic and the nearest choices; or if a
            dim crosses nodes or domains.
        SpecError: If ``flattens`` or ``views`` do not fit the mesh.
    """
    slots = count_slots(mesh, nnodes, nproc_per_node)
    sizes = split_nodes(len(slots), domains) if isinstance(domains, int) else tuple(domains or ())
    if intra_domain and len(slots) == 1:
        sizes = (1,)
    order = None
    if mesh is not None:
        locality = placing.Locality(
            slots=slots,
            in_node=placing.find_dims(mesh, intra_node, "--intra-node"),
            in_domain=placing.find_dims(mesh, intra_domain, "--intra-domain"),
            nodes_per_domain=sizes,
        )
        placed = placing.place(mesh, locality, renumber=renumber)
        mesh, slots, order = placed.mesh, placed.nproc_per_node, placed.slot_order
    return Layout(
        mesh=mesh,
        nproc_per_node=slots,
        nodes_per_domain=sizes,
        slot_order=order,
        flattens=flattens,
        views=views,
    )


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    """Return the names in a string such as ``tp,pp``, or those of a list."""
    return names.split(",") if names and isinstance(names, str) else names
