"""Everything that can happen to a launch, as values. Times are monotonic nanoseconds.

Node 0 also sends the others its decisions as such values; there, ``at_ns`` is when they arrive.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from meshrun.errors import MeshrunError
from meshrun.protocol.collectives import AskTimes, RankTimes
from meshrun.protocol.generation import Cause, Ending, NodeOutcome
from meshrun.protocol.packing import Generation, Line, Port, Rank, Signum, Size, Time
from meshrun.protocol.zygote_messages import FromZygote, RankEvent


class LaunchBegan(Struct, frozen=True, kw_only=True):
    """The zygote has started and is importing torch."""

    at_ns: int


class ZygoteGone(Struct, frozen=True, kw_only=True):
    """The zygote has exited, and everything that it started with it."""

    wait_status: int
    at_ns: int
    why: str | None = None
    """Why it was killed, if that is known."""


class SignalArrived(Struct, frozen=True, kw_only=True):
    """The launcher received a signal."""

    signum: int
    at_ns: int
    why: str = ""
    """The reason, if the launcher's parent sent it."""


class Hung(Struct, frozen=True, kw_only=True):
    """No rank has made progress for the hang timeout."""

    idle_s: float
    at_ns: int
    why: str = ""
    """Which ranks wait in which collective, if known."""


class RankLate(Struct, frozen=True, kw_only=True):
    """Others wait for a rank at collectives, or no longer do."""

    rank: int
    group: str
    """The group whose calls it begins late, for display."""
    share: float
    """The share of the time that the others wait for it; 0 if they no longer do."""
    per_call_s: float
    at_ns: int


class NodeAssignment(Struct, frozen=True, kw_only=True):
    """The nodes of a generation, and what one of them needs to know to start its part."""

    node_rank: Rank
    hosts: tuple[Line, ...]
    """Host names, in node order."""
    nproc_per_node: tuple[Size, ...]
    nodes_per_domain: tuple[Size, ...] = ()
    """Empty if no domains are known."""
    roles: tuple[str, ...] = ()
    """The ``--role`` of each node, in node order."""
    run_id: str
    store_port: Port
    """The port of the ranks' store, on the coordinator."""
    causes: tuple[Cause, ...] = ()
    """Why each generation before this one ended."""
    previous: dict[str, Any] = {}
    """The layout of the generation before this one; empty for the first."""


class AllJoined(NodeAssignment, frozen=True, kw_only=True):
    """All nodes have joined, and each knows what to start."""

    store_address: str
    """The address at which this node's ranks reach the store."""
    own_address: str
    """The address at which the other nodes reach this one."""
    at_ns: int
    ranks: tuple[int, ...] = ()
    """The ranks of this node; the loop fills them in."""


class JoinFailed(Struct, frozen=True, kw_only=True):
    """This node could not join the launch, or the launch has too few nodes."""

    error: MeshrunError
    at_ns: int
    joined: AllJoined | None = None
    """Set if all nodes have joined, but do not fit together here."""


class NodeLost(Struct, frozen=True, kw_only=True):
    """Another node's launcher exited, or has not responded for too long."""

    node_rank: int
    host: str
    why: str
    at_ns: int
    heard_ns: int
    """When it was last heard from."""
    is_silent: bool = False
    """Whether one of the two nodes has not responded to the other for too long."""

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host}) was lost: {self.why}"


class GenerationAborted(Struct, frozen=True, kw_only=True):
    """Another node ends this generation."""

    why: Line
    """What happened on which node, as text."""
    signum: Signum
    at_ns: Time
    title: Line = ""
    """What all nodes print above the stacks of their ranks, if ranks wait for each other."""
    resizes: bool = False
    """Whether the reason is a change of the nodes; only set on the coordinator."""


class TimesReported(Struct, frozen=True, kw_only=True):
    """Another node's answer to the coordinator, by the coordinator's monotonic clock."""

    answers: list[RankTimes]
    unsure_ns: int
    """The error of the difference between the two clocks."""
    why: dict[int, str]
    """What delays that node's late ranks, as far as it can tell."""


class ShowStacks(Struct, frozen=True, kw_only=True):
    """The coordinator has the other nodes print where their ranks are."""

    why: Line = ""


class OthersFinished(Struct, frozen=True, kw_only=True):
    """The programs of all ranks on all nodes have finished, so ranks may exit."""

    at_ns: Time


class AllCleared(Struct, frozen=True, kw_only=True):
    """Nothing of this generation is left on any node; an event of the coordinator alone."""

    outcomes: tuple[NodeOutcome, ...]
    """The reports of the other nodes."""
    why_hung: str = ""
    """Who waits for whom, if that explains a hang."""
    at_ns: int


class NextBegins(Struct, frozen=True, kw_only=True):
    """Nothing is left on any node, and each starts the next generation."""

    generation: Generation
    cause: Cause
    """Why the previous generation ended."""
    at_ns: Time


class LaunchOver(Ending, frozen=True, kw_only=True):
    """The launch has ended on every node."""

    generation: Generation
    """The last one, in which a spare had no ranks."""
    at_ns: Time


class TimePassed(Struct, frozen=True, kw_only=True):
    """A requested deadline has passed."""

    at_ns: int


NodesEvent = (
    AllJoined
    | JoinFailed
    | NodeLost
    | GenerationAborted
    | OthersFinished
    | AllCleared
    | NextBegins
    | LaunchOver
)
FromNodes = NodesEvent | AskTimes | TimesReported | ShowStacks
Event = (
    LaunchBegan
    | FromZygote
    | RankEvent
    | NodesEvent
    | ZygoteGone
    | SignalArrived
    | Hung
    | RankLate
    | TimePassed
)
"""The events that ``lifecycle.advance()`` accepts."""
