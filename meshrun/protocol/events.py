"""Everything that can happen to a launch, as values. Times are monotonic nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshrun.errors import MeshrunError
from meshrun.protocol.collectives import RankTimes
from meshrun.protocol.from_zygote import FromZygote, RankEvent
from meshrun.protocol.generation import Cause, NodeOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchBegan:
    """The zygote was started and is importing."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteGone:
    """The zygote has ended, and with it everything it had started."""

    wait_status: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalArrived:
    """The launcher was sent a signal."""

    signum: int
    at_ns: int
    why: str = ""
    """Why, if the parent sent it; the signal then needs no other report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """No rank has made progress for the hang timeout."""

    idle_s: float
    at_ns: int
    why: str = ""
    """Who waits in which collective, if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLate:
    """Others wait for a rank at collectives, or no longer do."""

    rank: int
    group: str
    """Whose calls it begins late, for people."""
    share: float
    """Of the time, that the others wait for it; 0 if they no longer do."""
    per_call_s: float
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Every node is there; what each of them is to start is known."""

    node_rank: int
    hosts: tuple[str, ...]
    """Host names, in node order."""
    nproc_per_node: tuple[int, ...]
    nodes_per_domain: tuple[int, ...] = ()
    """Empty if no domains are known."""
    roles: tuple[str, ...] = ()
    """What each node calls its workers."""
    run_id: str
    store_address: str
    """By which this node's ranks reach the store."""
    store_port: int
    own_address: str
    """By which the other nodes reach this one."""
    at_ns: int
    ranks: tuple[int, ...] = ()
    """This node's, once that is worked out."""
    causes: tuple[Cause, ...] = ()
    """Why generations before ended, where nodes meet again."""
    previous: dict[str, Any] | None = None
    """The layout of the generation before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingFailed:
    """The nodes did not come together."""

    error: MeshrunError
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """Another node's launcher exited, or has not responded for too long."""

    node_rank: int
    host: str
    why: str
    at_ns: int
    is_silent: bool = False
    """Whether it, or this node to it, has not responded for too long."""

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host}) was lost: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAborted:
    """This generation is to end, as another node says."""

    why: str
    signum: int
    at_ns: int
    is_hung: bool = False
    """Whether no rank on any node makes progress."""
    resizes: bool = False
    """Whether it is because nodes came or went; only the coordinator gets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesRequested:
    """The first node asks when ranks of this node have begun their last collectives."""

    generation: int
    late: list[int]
    """Ranks of any node that were late when it last asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesReported:
    """Another node's answer, by this node's monotonic clock; only the coordinator gets it."""

    answers: list[RankTimes]
    unsure_ns: int
    """By how much the clock of the other node may be misjudged."""
    why: dict[int, str]
    """What holds up those of its ranks that are late, as far as can be seen there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersFinished:
    """The program of every rank of every node has ended."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllIdle:
    """Nothing of this generation is left on any node; only the coordinator gets it."""

    outcomes: tuple[NodeOutcome, ...]
    """Of the other nodes that still answer."""
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBegins:
    """The next generation is to start, on every node."""

    generation: int
    cause: Cause
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOver:
    """The launch has ended on every node."""

    exit_code: int
    signum: int | None
    preempted: bool
    headline: str
    """What decided it, in one line; "" if all went well."""
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """A deadline that was asked for has come."""

    at_ns: int


FromNodes = (
    Met
    | TimesRequested
    | TimesReported
    | MeetingFailed
    | NodeLost
    | GenerationAborted
    | OthersFinished
    | AllIdle
    | NextBegins
    | LaunchOver
)
Event = (
    LaunchBegan
    | FromZygote
    | RankEvent
    | FromNodes
    | ZygoteGone
    | SignalArrived
    | Hung
    | RankLate
    | TimePassed
)
"""What ``lifecycle.step`` takes."""
