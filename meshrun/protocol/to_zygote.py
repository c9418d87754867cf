"""The launcher's orders to the zygote, as values. Descriptors come along with some."""

from __future__ import annotations

from msgspec import Struct


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
