"""Which nodes of a launch take part, in which order, and which are spares. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

from msgspec import Struct

from meshrun.errors import LayoutError, MeshrunError, UsageError
from meshrun.layout import Layout, solve_layout
from meshrun.layout.domains import domains_of, split_nodes
from meshrun.plan.plan import solve_request
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.generation import Cause
from meshrun.rendezvous.expected_nodes import list_names
from meshrun.rendezvous.messages import Join
from meshrun.wording import count

Fit = Callable[[Sequence[Join]], Layout]
"""Solves the mesh for nodes; raises a MeshrunError if it does not fit them."""


class NodeChoice(Struct, frozen=True, kw_only=True):
    """Which nodes take part in a generation."""

    participants: tuple[int, ...]
    """The numbers of these nodes, in node order."""
    spares: tuple[int, ...]
    layout: Layout


class Membership(Struct):
    """The nodes that are connected.

    Args:
        fit: Solves the mesh.
        least: How many nodes are required.
        most: How many may take part.
        infos: The Join of each node by its permanent number, the coordinator's first.
    """

    fit: Fit
    least: int
    most: int
    infos: dict[int, Join]
    layout: Layout | None = None
    """The layout over the nodes that take part now."""
    _places: list[int | None] = []
    """The numbers of nodes by node rank; ``None`` for a lost node."""
    _rank_of: dict[int, int] = {}
    free_places: set[int] = set()
    """The node ranks of lost nodes."""
    _spares: dict[int, None] = {}
    """Numbers of nodes, in the order in which they joined."""
    _by_host: dict[str, set[int]] = {}
    _by_launcher: dict[str, int] = {}
    _failures: list[tuple[str, str]] = []
    """The host and the description of each failure; "" if no single host failed."""

    def __post_init__(self) -> None:
        self._place(self.infos)
        for number, info in self.infos.items():
            self._index(number, info)

    def on_host(self, host: str) -> Collection[int]:
        """Return the nodes on a host."""
        return self._by_host.get(host, ())

    def of_launcher(self, launcher: str) -> int | None:
        """Return the node of a launcher, if that launcher has an id and is known."""
        return self._by_launcher.get(launcher) if launcher else None

    def check_place(self, info: Join) -> None:
        """Check that a node is missing whose place another one may take.

        Raises:
            UsageError: If there is none.
        """
        free, most = self.free_places, self.most
        if free and (info.node_rank is None or info.node_rank in free):
            return
        if info.node_rank in (None, *range(1, most)):
            hosts = list_names([each.host for each in self.infos.values()])
            raise UsageError(
                f"all {most} nodes are already running: {hosts}",
                hint="check that the launcher was not started twice on a host",
            )
        raise UsageError(
            f"{info.host} has --node-rank {info.node_rank}; it must be 1 to {most - 1}"
        )

    def add(self, number: int, info: Join) -> None:
        """Add a node, as a spare until the next choice."""
        self.infos[number] = info
        self._index(number, info)
        self._spares[number] = None

    def remove(self, number: int) -> int | None:
        """Remove a node, whose place another may take; return its node rank, if it took part."""
        info = self.infos.pop(number)
        self._by_host[info.host].discard(number)
        if self._by_launcher.get(info.launcher) == number:
            del self._by_launcher[info.launcher]
        if number in self._spares:
            del self._spares[number]
            return None
        place = self._rank_of.pop(number)
        self._places[place] = None
        self.free_places.add(place)
        return place

    def _index(self, number: int, info: Join) -> None:
        self._by_host.setdefault(info.host, set()).add(number)
        if info.launcher:
            self._by_launcher[info.launcher] = number

    def _place(self, numbers: Collection[int]) -> None:
        self._places = list(numbers)
        self._rank_of = {number: place for place, number in enumerate(numbers)}
        self.free_places = set()

    def record_failure(self, number: int | None, cause: Cause) -> str:
        """Record the node of a failure, if one is known; return why to exclude it, or ""."""
        info = None if number is None else self.infos.get(number)
        if info is None or number is None:
            self._failures.append(("", ""))
            return ""
        host, what = info.host, cause.description.removeprefix(f"on {info.host}, ")
        self._failures.append((host, what))
        is_first = [each for each, _ in self._failures[-2:]] != [host, host]
        is_shared = any(other == what and each != host for each, other in self._failures)
        are_many = len(self._by_host[host]) > 1  # as of containers with one host name
        if is_first or is_shared or are_many or not self._can_do_without(number):
            return ""
        what = what if cause.rank is None else f"rank {cause.rank} {what}"
        return f"the last two failures were on {host} and on no other node: {what}"

    def _can_do_without(self, number: int) -> bool:
        """Return whether the launch can continue without a node that takes part."""
        place = self._rank_of[number]
        if place == 0:  # the coordinator
            return False
        self._places[place] = None
        try:
            self.choose()
        except MeshrunError:
            return False
        finally:
            self._places[place] = number
        return True

    def choose(self) -> NodeChoice:
        """Return which nodes should take part: as many as the mesh can use, in stable places.

        Raises:
            MeshrunError: If there are too few, or the mesh does not fit any number of them.
        """
        order = self._in_order()
        if len(order) < self.least:
            raise MeshrunError(self.describe())
        chosen = order[: self.most]
        if self.least == self.most:  # all take part, even without ranks
            layout = self.fit([self.infos[number] for number in chosen])
        else:
            chosen, layout = self._largest_fit(chosen)
        taken = {*chosen}
        spares = tuple(number for number in order if number not in taken)
        return NodeChoice(participants=tuple(chosen), spares=spares, layout=layout)

    def _in_order(self) -> list[int]:
        """Return all nodes: those in their places, spares in free places, and the other spares."""
        waiting = dict(self._spares)
        ranked: dict[int | None, int] = {}
        for spare in waiting:
            ranked.setdefault(self.infos[spare].node_rank, spare)
        order: list[int] = []
        for place, number in enumerate(self._places):
            if number is not None:
                order.append(number)
            elif waiting:
                meant = ranked.get(place, -1)
                order.append(meant if meant in waiting else next(iter(waiting)))
                del waiting[order[-1]]
        return [*order, *waiting]

    def _largest_fit(self, chosen: list[int]) -> tuple[list[int], Layout]:
        """Return the first nodes, as many as the mesh can use, with its layout over them."""
        why: MeshrunError | None = None
        while chosen:
            try:
                layout = self.fit([self.infos[number] for number in chosen])
            except MeshrunError as error:
                why = why or error
                chosen = chosen[:-1]
                continue
            counts = zip(chosen, layout.nproc_per_node, strict=True)
            used = [number for number, workers in counts if workers]
            if used == chosen:
                return chosen, layout
            # The mesh needs fewer nodes; the first one is the coordinator, and stays.
            chosen = used if chosen[0] in used else chosen[: len(used)]
        raise why or MeshrunError(self.describe())

    def apply(self, choice: NodeChoice) -> None:
        """Make a choice the current membership."""
        self._place(choice.participants)
        self._spares = dict.fromkeys(choice.spares)
        self.layout = choice.layout

    def describe(self) -> str:
        """Return a description such as ``1 of at least 2 nodes joined (a)``."""
        hosts = [info.host for info in self.infos.values()]
        least = "at least " if self.least < self.most else ""
        need = f"{least}{count(self.least, 'node')}"
        return f"{len(hosts)} of {need} joined ({list_names(hosts)})"


def fit_without_mesh(nodes: Sequence[Join]) -> Layout:
    """Return the layout of a launch without a mesh over nodes."""
    return solve_layout(None, nnodes=len(nodes), nproc_per_node=[node.nproc for node in nodes])


def fit_nodes(request: LaunchRequest, nodes: Sequence[Join]) -> Layout:
    """Return the layout of a launch over nodes.

    Raises:
        LayoutError: If the mesh does not fit.
    """
    workers: Sequence[int] = [node.nproc for node in nodes]
    requested = request.nproc_per_node
    if isinstance(requested, tuple) and len(requested) == len(nodes):
        workers = requested
    domains = domains_of([node.domain for node in nodes])
    if request.domain_size:
        domains = split_nodes(len(nodes), min(request.domain_size, len(nodes)))
        _check_domains(request.domain_size, domains, nodes)
    try:
        return solve_request(
            request, nnodes=len(nodes), nproc_per_node=workers, nodes_per_domain=domains
        )
    except LayoutError as error:
        if (apart := _apart(nodes)) and not request.domain_size:
            error.hint = f"{apart}: number the nodes domain by domain; {error.hint or ''}"
        raise


def _check_domains(size: int, domains: Sequence[int], nodes: Sequence[Join]) -> None:
    """Check that nodes which ``--domain-size`` puts together report the same NVLink domain.

    Raises:
        LayoutError: With two nodes that do not.
    """
    rest = iter(enumerate(nodes))
    for domain, held in enumerate(domains):
        known = [(rank, node) for rank, node in islice(rest, held) if node.domain]
        for rank, node in known:
            first_rank, first = known[0]
            if node.domain != first.domain:
                raise LayoutError(
                    f"--domain-size {size}: nodes {first_rank} ({first.host}) and {rank}"
                    f" ({node.host}) would share domain {domain}, but NVML reports the NVLink"
                    f" domains {first.domain} and {node.domain}",
                    hint="number the nodes domain by domain, or remove --domain-size to use the"
                    " domains that the nodes report",
                )


def _apart(nodes: Sequence[Join]) -> str:
    """Return a description of nodes of one domain that are not consecutive; "" if none."""
    last: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        if node.domain and last.setdefault(node.domain, rank) < rank - 1:
            before = last[node.domain]
            return f"nodes {before} and {rank} of domain {node.domain} do not follow each other"
        last[node.domain] = rank
    return ""


def describe_shapes(before: Layout | None, after: Layout) -> str:
    """Return the changes from one layout to the next: ``dp 3 -> 4``."""
    ranks = count(after.world_size, "rank")
    if before is None:
        return str(after.mesh) if after.mesh else ranks
    if after.mesh is None or before.mesh is None:
        if before.world_size == after.world_size:
            return f"{ranks} as before"
        return f"{before.world_size} -> {ranks}"
    old, new = before.shape, after.shape
    changed = [f"{dim} {old[dim]} -> {new[dim]}" for dim in new if old.get(dim) != new[dim]]
    return ", ".join(changed) or f"{after.mesh} as before"
