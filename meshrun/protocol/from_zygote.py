"""Messages to the launcher from the zygote and what it starts: the ranks, and torch's rendezvous.

Times are monotonic nanoseconds.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Literal

from msgspec import Struct

from meshrun.host.shortage import TOO_FEW_PROCESSES
from meshrun.protocol.collectives import RankAnswer
from meshrun.protocol.generation import Withdraw
from meshrun.protocol.packing import Line, Port, Secret
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import describe_broken

STORE = -1
"""The store's process, in place of a rank."""


class _OfRank(Struct, frozen=True, kw_only=True):
    rank: int
    at_ns: int


class ZygoteReady(Struct, frozen=True, kw_only=True):
    """The zygote has imported its preloads and is ready to fork."""

    at_ns: int
    import_ns: int
    """How long the imports took."""


class ZygoteUnsafe(Struct, frozen=True, kw_only=True):
    """The zygote must not fork; each rank needs its own interpreter."""

    reason: str


class ProgramBroken(Struct, frozen=True, kw_only=True):
    """The program or a preload failed before any rank started."""

    text: str
    """What ``python`` would have printed, or an error of meshrun's with its hint."""
    exit_code: int

    @property
    def headline(self) -> str:
        """The error in one line."""
        return describe_broken(self.text)


class RankStarted(_OfRank, frozen=True, kw_only=True):
    """A rank's process exists."""

    pid: int


class StartFailed(Struct, frozen=True, kw_only=True):
    """A process could not be started: a rank, the store, or something that all ranks need."""

    rank: int | None
    """:data:`STORE` for the store, ``None`` for all."""
    error: str
    at_ns: int
    hint: str | None = TOO_FEW_PROCESSES


class RankJoined(_OfRank, frozen=True, kw_only=True):
    """A rank has joined the process group of its mesh."""


class RankReady(_OfRank, frozen=True, kw_only=True):
    """A rank begins the first line of the program, with its mesh if it has one."""


class RankBeat(_OfRank, frozen=True, kw_only=True):
    """A rank's program called ``meshrun.heartbeat()`` or ``progress()``."""

    step: int | None = None
    """The step that it reported, if any."""


class BreakpointPassed(_OfRank, frozen=True, kw_only=True):
    """A rank without stdin reached a breakpoint and continued."""


class CallEnded(_OfRank, frozen=True, kw_only=True):
    """A rank that serves calls has finished one and flushed its output."""

    number: int


class Checked(_OfRank, frozen=True, kw_only=True):
    """The check before the program has finished; rank 0 reports it."""

    findings: list[Line]
    """What is wrong, one line each."""
    hosts: list[Line]
    """The hosts to blame; they are left out if enough others remain."""
    speeds: Line
    """The speed of each dim, for display."""
    seconds: float


class NodeExcluded(_OfRank, frozen=True, kw_only=True):
    """A rank's node must not be used."""

    reason: Line
    remedy: Line
    """How to leave the node out, for display."""
    found_by: Literal["program", "check", "driver"] = "program"
    """Who excludes it: ``exclude_node()``, the check before the program, or the GPUs' driver."""

    @property
    def who(self) -> str:
        """Who excludes it, for display."""
        names = {"check": "the check before the program", "driver": "the driver of the GPUs"}
        return names.get(self.found_by, f"rank {self.rank}")


class RankFinished(_OfRank, frozen=True, kw_only=True):
    """A rank's program has succeeded; its process waits for those of its peers."""


class RankLeaves(_OfRank, frozen=True, kw_only=True):
    """A rank's program has ended with a status other than 0; its connections close next."""


class RanksResumed(Struct, frozen=True, kw_only=True):
    """Ranks that were suspended with the launcher run again."""

    stopped_ns: int
    """How long they were suspended."""


class StoreEnded(Struct, frozen=True, kw_only=True):
    """The store's process has exited while ranks may still need it."""

    wait_status: int
    at_ns: int
    why: str | None = None
    """Why it was killed, if the launcher knows that."""


class LeftoversEnded(Struct, frozen=True, kw_only=True):
    """Processes that ranks had left behind were ended after the last rank."""

    count: int
    survivors: list[int]
    """Process ids of those that survived SIGKILL, as the kernel holds them (state D)."""
    denied: list[int] = []
    """Process ids of those that run as another user, and could not be killed."""


class GenerationEnded(Struct, frozen=True, kw_only=True):
    """Only the zygote is left of a generation."""

    at_ns: int


class NodeInfo(Struct, frozen=True, kw_only=True):
    """Where a node's launcher listens, as in torch's store, to which anyone may write."""

    host: Line
    address: str
    port: Port
    secret: Secret
    """Generated for this launch; no safer than torch's store, which anyone can read."""

    def __post_init__(self) -> None:
        ip_address(self.address.partition("%")[0])


class Negotiated(Struct, frozen=True, kw_only=True):
    """torch's rendezvous is done: how many nodes there are, and where node 0 listens."""

    node_rank: int | None
    """``None`` if the launch is already running."""
    nnodes: int
    coordinator: NodeInfo


class NegotiationWaits(Struct, frozen=True, kw_only=True):
    """torch's rendezvous waits for nodes."""

    text: str


class NegotiationFailed(Struct, frozen=True, kw_only=True):
    """torch's rendezvous has failed."""

    text: str
    hint: str = "check that every node was started, with the same --rdzv-id and --nnodes"


FromZygote = (
    ZygoteReady
    | ZygoteUnsafe
    | ProgramBroken
    | RankStarted
    | StartFailed
    | RankExited
    | RanksResumed
    | StoreEnded
    | LeftoversEnded
    | GenerationEnded
)
RankEvent = (
    RankJoined
    | RankReady
    | RankRaised
    | RankBeat
    | Checked
    | NodeExcluded
    | RankFinished
    | RankLeaves
)
FromRank = RankEvent | BreakpointPassed | CallEnded | RankAnswer
FromNegotiation = Negotiated | NegotiationWaits | NegotiationFailed | Withdraw
