"""What happens to the zygote and its ranks, as the launcher gets it from them on a socket.

Times are monotonic nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshrun.errors import MeshrunError
from meshrun.protocol.checked import ExitCode, Line
from meshrun.protocol.collectives import FromRecorder
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import describe_broken

STORE = -1
"""Stands for the process of the store where a rank is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteReady:
    """The zygote has imported what it preloads and will fork."""

    at_ns: int
    import_ns: int
    """How long the imports took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteUnsafe:
    """The zygote may not fork; ranks must start as fresh interpreters."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramBroken:
    """The program or a preload failed before any rank was started."""

    text: str
    """What ``python`` would have printed, or an error of meshrun's with its hint."""
    exit_code: int

    @property
    def headline(self) -> str:
        """Return what is wrong, in one line."""
        return describe_broken(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """A rank's process exists."""

    rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """A rank's process could not be made, or the store's, or what all of them need."""

    rank: int | None
    """:data:`STORE` for the store, ``None`` for all."""
    error: str
    at_ns: int
    hint: str | None = (
        "check `ulimit -u` and `free -h`: the machine may be out of processes or memory"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A rank is in the process group of its mesh."""

    rank: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """A rank begins the first line of the program, with its mesh if it has one."""

    rank: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """A rank's program called ``meshrun.heartbeat()`` or ``progress()``."""

    rank: int
    at_ns: int
    step: int | None = None
    """How far it has come, if it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakpointPassed:
    """A rank that has no stdin came to a breakpoint, and went on."""

    rank: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """A rank that stays has made a call, and has flushed all that it printed."""

    rank: int
    at_ns: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The check before the program has ended; rank 0 reports it."""

    rank: int
    findings: list[str]
    """What is wrong, in a line each."""
    hosts: list[str]
    """Whose nodes are to blame; they are left out if the others suffice."""
    speeds: str
    """Of each dim, for people."""
    seconds: float
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExcluded:
    """A rank's node must not be used."""

    rank: int
    reason: str
    remedy: str
    """How to leave the node out, for people."""
    found_by: Literal["program", "check", "driver"] = "program"
    """Whose word it is: exclude_node()'s, that of the check before the program, or a GPU's."""
    at_ns: int

    @property
    def who(self) -> str:
        """Return who says so."""
        names = {"check": "the check before the program", "driver": "the driver of the GPUs"}
        return names.get(self.found_by, f"rank {self.rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished:
    """A rank's program has ended without an error; its process waits for those of its peers."""

    rank: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLeaves:
    """A rank's program has ended with a status other than 0; its connections are closed next."""

    rank: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksResumed:
    """Ranks that were stopped with the launcher run again."""

    stopped_ns: int
    """For how long they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEnded:
    """The store's process has ended while ranks may still need it."""

    wait_status: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoversEnded:
    """Processes that ranks had left behind were ended after the last rank."""

    count: int
    survivors: list[int]
    """Process ids of those that live on after SIGKILL, since the kernel holds them (state D)."""
    denied: list[int] = field(default_factory=list)
    """Of those that have become another user's, and live on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded:
    """Nothing is left of a generation of ranks but the zygote."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiated:
    """torch's rendezvous is done: how many nodes there are, and where the first one listens."""

    node_rank: int | None
    """``None`` in a launch that already runs."""
    nnodes: int
    coordinator_address: str
    coordinator_port: int
    secret: str
    """Drawn by the coordinator; no safer than torch's store, which anyone can read."""
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NegotiationWaits:
    """torch's rendezvous waits for nodes."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NegotiationFailed:
    """torch's rendezvous has failed."""

    text: str
    hint: str = "check that every node was started, with the same --rdzv-id and --nnodes"
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """Before all nodes have joined, one says that it will not take part."""

    host: Line
    reason: Line
    exit_code: ExitCode

    @classmethod
    def of(cls, host: str, error: MeshrunError) -> GaveUp:
        """Return it with its reason."""
        return cls(host=host, reason=error.message, exit_code=error.exit_code)

    def as_error(self) -> MeshrunError:
        """Return what it is for the whole launch."""
        error = MeshrunError(
            f"{self.host} exited before all nodes had joined: {self.reason}",
            hint="see its output for details",
        )
        error.exit_code = self.exit_code
        return error


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
FromRank = RankEvent | BreakpointPassed | CallEnded | FromRecorder
FromNegotiation = Negotiated | NegotiationWaits | NegotiationFailed | GaveUp
