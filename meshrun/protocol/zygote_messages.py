"""Messages between the launcher and what is below it: the zygote, ranks, and torch's rendezvous.

Descriptors come along with some orders. Times are monotonic nanoseconds.
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


class Prepare(Struct, frozen=True, kw_only=True):
    """Launcher to zygote, first: what to import, and how ranks will start."""

    start_method: str
    preload: list[str]
    """Modules that forks share; with ``exec``, those that each rank will import itself."""
    backends: list[str]
    """Backends to register with torch before the program's first line."""
    device: str
    """A device type to count before ranks start; "" for none."""
    workers: int
    """How many of these devices are needed."""
    scratch_dir: str
    """A folder that the zygote removes if the launcher dies first; "" for none."""
    ignored: list[int]
    """Signals that ranks ignore: the scheduler sends them to every process, but only the launcher
    handles them."""


class StartRank(Struct, frozen=True, kw_only=True):
    """Launcher to zygote: start one rank; the packet carries its stdout and stderr."""

    rank: int
    environment: dict[str, str]
    """Variables to add to the zygote's own, in place of its thread variables."""
    coordinate: list[int]
    local_rank: int
    lazy: bool
    """Whether the program's first ``current_mesh()`` builds the mesh."""
    cpus: list[int]
    """Logical CPUs to bind it to; empty for no binding."""
    imports: list[str]
    """Modules that a rank started with ``exec`` imports before it builds the mesh."""
    label: str = ""
    """The rank's coordinate for display; "" without a mesh."""
    stdin: bool = True
    """Whether it reads the zygote's stdin rather than the null device."""
    debug: bool = False
    """Whether the rank is being debugged, with one terminal for all its streams."""
    imports_file: str = ""
    """The file to which the rank writes what it imported when it exits; "" for none."""
    check: tuple[str, ...] = ()
    """What to check before the program: the values of ``--require``, then folders that should be
    writable; empty for no check."""


class StartStore(Struct, frozen=True, kw_only=True):
    """Launcher to zygote, before a generation of ranks: serve their store.

    The packet carries the exit barrier, a pipe whose other end closes once finished ranks may exit,
    and the listening socket, unless the store is on another node.
    """


class Negotiate(Struct, frozen=True, kw_only=True):
    """Launcher to zygote: run torch's rendezvous with the other nodes in a separate process.

    The fields up to ``timeout_s`` repeat what torch's rendezvous needs of ``RendezvousConfig``,
    which is in ``plan/``, above this room, and holds the job's secret.
    """

    backend: str
    endpoint_host: str
    endpoint_port: int
    run_id: str
    least_nodes: int
    nnodes: int
    conf: dict[str, str]
    timeout_s: float
    host: str
    """This node's host name."""
    address: str
    """The address at which other nodes reach this one."""
    port: int
    """The port on which its launcher listens."""


class SignalRanks(Struct, frozen=True, kw_only=True):
    """Launcher to zygote: send a signal to ranks, or to their whole process groups."""

    ranks: tuple[int, ...]
    signum: int
    whole_group: bool = False


class SuspendRanks(Struct, frozen=True, kw_only=True):
    """Launcher to zygote: the launcher is about to be suspended; suspend the ranks."""


class ResumeRanks(Struct, frozen=True, kw_only=True):
    """Launcher to zygote: the launcher was resumed; resume the ranks."""


class EndGeneration(Struct, frozen=True, kw_only=True):
    """Launcher to zygote, after a generation: end the store and leftovers, but keep running."""

    grace_s: float


class Exit(Struct, frozen=True, kw_only=True):
    """Launcher to zygote: no ranks will follow; end what is left, then exit."""

    grace_s: float


ToZygote = (
    Prepare
    | StartRank
    | StartStore
    | Negotiate
    | SignalRanks
    | SuspendRanks
    | ResumeRanks
    | EndGeneration
    | Exit
)


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
