"""Which nodes of an elastic launch take part, in which order, and which are spares. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from meshrun.errors import MeshrunError
from meshrun.layout import Layout, solve_layout
from meshrun.plan.plan import solve_request
from meshrun.plan.request import LaunchRequest
from meshrun.rendezvous.messages import Join

Fit = Callable[[Sequence[int]], Layout]
"""Solves the mesh over nodes with so many workers each; raises a MeshrunError if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Who takes part."""

    participants: tuple[int, ...]
    """Numbers of nodes, in node order."""
    spares: tuple[int, ...]
    layout: Layout


@dataclass(slots=True)
class Membership:
    """The nodes that are there.

    Args:
        fit: Solves the mesh.
        least: How many must be there.
        most: How many may take part.
        infos: What each said of itself, by a number that it keeps; the coordinator's own first.
    """

    fit: Fit
    least: int
    most: int
    infos: dict[int, Join]
    layout: Layout | None = None
    """Of those that take part now."""
    _places: list[int | None] = field(init=False)
    """By node rank; ``None`` where a node was lost."""
    _spares: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places = list(self.infos)

    @property
    def hosts(self) -> list[str]:
        """Names of those that take part, in node order."""
        return [self.infos[number].host for number in self.participants]

    @property
    def free_places(self) -> list[int]:
        """Node ranks of which the node was lost."""
        return [place for place, number in enumerate(self._places) if number is None]

    @property
    def participants(self) -> list[int]:
        """Numbers of those that take part, in node order."""
        return [number for number in self._places if number is not None]

    def rank(self, number: int) -> int:
        """Return the place of a node that takes part."""
        return self._places.index(number)

    def add(self, number: int, info: Join) -> None:
        """Add a node, as a spare until nodes are chosen again."""
        self.infos[number] = info
        self._spares.append(number)

    def remove(self, number: int) -> None:
        """Remove a node; its place is kept for another."""
        del self.infos[number]
        if number in self._spares:
            self._spares.remove(number)
        else:
            self._places[self.rank(number)] = None

    def can_do_without(self, number: int) -> bool:
        """Whether the others are enough without a node that takes part."""
        place = self.rank(number)
        self._places[place] = None
        try:
            self.choose()
        except MeshrunError:
            return False
        finally:
            self._places[place] = number
        return True

    def choose(self) -> Choice:
        """Return who should take part: as many as may and the mesh can use, in stable places.

        Raises:
            MeshrunError: If too few are there, or the mesh does not fit any number of them.
        """
        waiting = list(self._spares)
        order: list[int] = []
        for place, number in enumerate(self._places):
            if number is not None:
                order.append(number)
            elif waiting:
                told = (each for each in waiting if self.infos[each].node_rank == place)
                order.append(next(told, waiting[0]))
                waiting.remove(order[-1])
        order += waiting
        if len(order) < self.least:
            raise MeshrunError(self.describe())
        if self.least == self.most:  # whatever the mesh has for each of them
            layout = self.fit([self.infos[number].nproc for number in order[: self.most]])
            spares = tuple(order[self.most :])
            return Choice(participants=tuple(order[: self.most]), spares=spares, layout=layout)
        why: MeshrunError | None = None
        count = min(len(order), self.most)
        while count:
            try:
                layout = self.fit([self.infos[number].nproc for number in order[:count]])
            except MeshrunError as error:
                why = why or error
                count -= 1
                continue
            if all(layout.nproc_per_node):
                return Choice(
                    participants=tuple(order[:count]), spares=tuple(order[count:]), layout=layout
                )
            count = sum(map(bool, layout.nproc_per_node))  # the mesh needs no more
        raise why or MeshrunError(self.describe())

    def apply(self, choice: Choice) -> None:
        """Make it so."""
        self._places, self._spares = list(choice.participants), list(choice.spares)
        self.layout = choice.layout

    def describe(self) -> str:
        """Return who is there, in words."""
        hosts = [info.host for info in self.infos.values()]
        listed = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
        need = f"at least {self.least}" if self.least < self.most else str(self.least)
        return f"{len(hosts)} of {need} nodes joined ({listed})"


def fit_without_mesh(workers: Sequence[int]) -> Layout:
    """Return the layout of ranks without a mesh over nodes with so many workers each."""
    return solve_layout(None, nnodes=len(workers), nproc_per_node=workers)


def fit_nodes(request: LaunchRequest, workers: Sequence[int]) -> Layout:
    """Return the layout of a launch over nodes with so many workers each.

    Raises:
        LayoutError: If there is none.
    """
    asked = request.nproc_per_node
    if isinstance(asked, tuple) and len(asked) == len(workers):
        workers = asked
    domains = request.domain_size and min(request.domain_size, len(workers))
    fewer = replace(request, domain_size=domains)
    return solve_request(fewer, nnodes=len(workers), nproc_per_node=workers)


def describe_shapes(before: Layout | None, after: Layout) -> str:
    """Return what changes from one layout to the next: ``dp 3 -> 4``."""
    if before is None:
        return str(after.mesh) if after.mesh else f"{after.world_size} ranks"
    if after.mesh is None or before.mesh is None:
        if before.world_size == after.world_size:
            return f"{after.world_size} ranks as before"
        return f"{before.world_size} -> {after.world_size} ranks"
    old, new = before.shape, after.shape
    changed = [f"{dim} {old[dim]} -> {new[dim]}" for dim in new if old.get(dim) != new[dim]]
    return ", ".join(changed) or f"{after.mesh} as before"
