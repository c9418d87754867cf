"""Which nodes have joined, which are missing, and whether they can start together. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

from meshrun.errors import UsageError
from meshrun.host.host_names import first_label
from meshrun.host.printable import lines, one_line
from meshrun.rendezvous.messages import Join
from meshrun.wording import count

PROGRAM = "the program"
"""The part of a program that says what kind it is, and its name."""
PROGRAM_FILE = "the file of the program"
"""The part of a program that a node leaves out if it did not find the file."""
_NOTHING = ["", "not given"]
_MOST_NAMED = 8


class TooManyNodesError(UsageError):
    """A node joined a launch that is complete; the others continue without it."""


class ExpectedNodes(Struct):
    """The nodes of a launch until all have joined.

    Args:
        nnodes: How many nodes the launch has, or may have.
        least: How many are enough, if the number is not fixed.
        hosts: Their names in node order, if a scheduler knows them.
        own: The coordinator itself, node 0.
    """

    nnodes: int
    own: Join
    least: int | None = None
    hosts: tuple[str, ...] = ()
    joined: dict[int, Join] = {}
    """The other nodes, by the number of the connection."""
    _by_host: dict[str, set[int]] = {}
    _by_rank: dict[int, int] = {}
    left_out: dict[str, str] = {}
    """Hosts that have withdrawn, and why. Unless the number of nodes is open, they are no longer
    expected."""

    def join(self, number: int, info: Join) -> None:
        """Add a node.

        Raises:
            TooManyNodesError: If all have already joined.
            UsageError: If it was started differently, which ends the launch.
        """
        if len(self.joined) + 1 >= self.nnodes:
            names = list_names(self._names())
            raise TooManyNodesError(
                f"all {count(self.nnodes, 'node')} have already joined: {names}",
                hint=f"to add a node, use --nnodes {self.nnodes + 1} on every node",
            )
        self._check_rank(info)
        check_settings(self.own, info)
        self.joined[number] = info
        self.left_out.pop(info.host, None)
        self._by_host.setdefault(info.host, set()).add(number)
        if info.node_rank is not None:
            self._by_rank[info.node_rank] = number

    def leave(self, number: int) -> None:
        """Remove a node, if it has joined."""
        info = self.joined.pop(number, None)
        if info is not None:
            self._by_host[info.host].discard(number)
            if info.node_rank is not None:
                del self._by_rank[info.node_rank]

    def on_host(self, host: str) -> tuple[int, ...]:
        """Return the connections of nodes that have joined from a host."""
        return tuple(self._by_host.get(host, ()))

    def is_taken(self, node_rank: int) -> bool:
        """Return whether a node with this node rank has joined."""
        return node_rank in self._by_rank

    @property
    def is_complete(self) -> bool:
        """Whether every expected node has joined."""
        absent = len(self.left_out) if self.least is None else 0
        return len(self.joined) + 1 + absent >= self.nnodes

    def order(self) -> list[int]:
        """Return the numbers of the connections in node order, from node 1 on.

        Nodes with a node rank keep it. The others fill the gaps domain by domain, that of node 0
        first, and by name in natural order: ``node2`` before ``node10``.
        """
        ranked = {info.node_rank: number for number, info in self.joined.items()}
        ranked.pop(None, None)
        free = iter(
            sorted(
                (number for number, info in self.joined.items() if info.node_rank is None),
                key=lambda number: (*self._by_domain(self.joined[number]), number),
            )
        )
        ranks = range(1, self.nnodes)
        order = (ranked[rank] if rank in ranked else next(free, None) for rank in ranks)
        return [number for number in order if number is not None]

    def _by_domain(self, info: Join) -> tuple[object, ...]:
        return info.domain != self.own.domain, natural(info.domain), natural(info.host)

    def missing(self) -> str:
        """Return a description such as ``2 of 4 nodes joined; missing: sl3, sl4``."""
        reasons = [f"{host} withdrew: {why}" for host, why in self.left_out.items()]
        return "; ".join([self._present(), *reasons[:1]])

    def _present(self) -> str:
        present = 1 + len(self.joined)
        if self.least is not None:
            few = f"{self.least} to" if present >= self.least else "at least"
            most = self.nnodes if present >= self.least else self.least
            return f"{present} of {few} {count(most, 'node')} joined ({list_names(self._names())})"
        joined = f"{present} of {count(self.nnodes, 'node')} joined"
        if missing := self._missing_names():
            return f"{joined}; missing: {list_names(missing)}"
        return f"{joined} ({list_names(self._names())}); {self.left} missing"

    def _missing_names(self) -> list[str]:
        """Return the names or numbers of missing nodes, if they can be determined."""
        taken = {info.node_rank for info in self.joined.values()} | {0}
        if None not in taken:
            ranks = [rank for rank in range(self.nnodes) if rank not in taken]
            return [
                self.hosts[rank] if rank < len(self.hosts) else f"node {rank}" for rank in ranks
            ]
        present = {first_label(host) for host in self._names()}
        missing = [host for host in self.hosts if first_label(host) not in present]
        return missing if len(missing) == self.left else []

    @property
    def left(self) -> int:
        """How many nodes are missing."""
        return max(0, (self.least or self.nnodes) - 1 - len(self.joined))

    def _names(self) -> list[str]:
        return [self.own.host, *(info.host for info in self.joined.values())]

    def _check_rank(self, info: Join) -> None:
        if info.node_rank is None:
            return
        if info.node_rank >= self.nnodes:
            raise UsageError(
                f"{info.host} has --node-rank {info.node_rank}, but there are only"
                f" {count(self.nnodes, 'node')}",
                hint="number nodes from 0",
            )
        number = self._by_rank.get(info.node_rank)
        same = self.own if info.node_rank == 0 else None if number is None else self.joined[number]
        if same is not None and info.probe:
            raise UsageError(
                f"{same.host} and {info.host} are both node 0",
                hint="pass --node-rank 0, or is_host=1 with c10d, on one of them; without either,"
                " node 0 is the node that has the name or the address in --rdzv-endpoint",
            )
        if same is not None:
            raise UsageError(
                f"{same.host} and {info.host} both have --node-rank {info.node_rank}",
                hint="pass each node its own --node-rank, or pass none to number nodes by name",
            )


def check_settings(first: Join, info: Join) -> None:
    """Check that a node has the same settings as the first one.

    Raises:
        UsageError: With the setting that differs.
    """
    for name in dict.fromkeys([*first.settings, *info.settings]):
        own, other = (lines(each.settings.get(name, "")) for each in (first, info))
        if other != own:
            theirs, ours = (one_line(value) or "not set" for value in (other, own))
            raise UsageError(
                f"{one_line(name)} is {theirs} on {info.host}, but {ours} on {first.host} (node 0)",
                hint="start every node with the same command and the same versions",
            )
    _check_program(first, info)


def _check_program(first: Join, info: Join) -> None:
    """Check that two nodes run the same program, whose arguments may differ."""
    for part, difference in _program_differences(first, info):
        if part in (PROGRAM, PROGRAM_FILE):
            raise UsageError(
                f"{difference} (node 0)",
                hint="start every node with the same program, or pass --allow-different-programs"
                " on each",
            )


def note_different_arguments(first: Join, others: Iterable[Join]) -> str:
    """Return a note if nodes pass other arguments to the program than the first one, or ""."""
    firsts = (next(_program_differences(first, info), None) for info in others)
    different = [found for found in firsts if found is not None]
    if not different:
        return ""
    _, difference = different[0]
    more = f"; {len(different):,} nodes differ from it" if different[1:] else ""
    return (
        f"{difference} (node 0{more}); if this is intended, pass --allow-different-programs on each"
    )


def _program_differences(first: Join, info: Join) -> Iterator[tuple[str, str]]:
    """Yield each part of the program that differs, and how, if both sent theirs for one role."""
    if first.role != info.role or not (first.program and info.program):
        return
    for part in dict.fromkeys([*first.program, *info.program]):
        own, other = first.program.get(part, _NOTHING), info.program.get(part, _NOTHING)
        if own[:1] == other[:1] or (part == PROGRAM_FILE and _NOTHING in (own, other)):
            continue
        theirs, ours = (one_line(" ".join(each[1:])) for each in (other, own))
        shown = f"is {theirs} on {info.host}, but {ours} on {first.host}"
        if theirs == ours:  # a secret, or cut off before the difference
            shown = f"({ours}) differs between {info.host} and {first.host}"
        yield part, f"{one_line(part)} {shown}"


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts names in natural order: ``node2`` before ``node10``."""
    parts = re.split(r"(\d+)", text)
    return tuple(
        (1, int(part), part) if index % 2 else (0, 0, part) for index, part in enumerate(parts)
    )


def list_names(names: list[str]) -> str:
    """Return the first eight names, and how many more there are."""
    shown = names[:_MOST_NAMED]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
