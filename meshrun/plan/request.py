"""The request as values: LaunchRequest and its parts. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Literal

from meshrun.layout import Flatten, View
from meshrun.layout.spec import MeshSpec
from meshrun.plan.group_options import GroupOptions
from meshrun.plan.hostfile import Host
from meshrun.plan.numa import BindingMode
from meshrun.plan.parse import NO_STREAMS, GpuMemoryWait, Streams
from meshrun.plan.rank_program import Program

StartMethod = Literal["fork", "exec"]
ExitCodes = Literal["worker", "torchrun"]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that end a launch; torchrun's have SIGQUIT too, which here asks where ranks are."""


TEMPLATE_FIELDS = (
    "role_name", "local_rank", "rank", "hostname", "host", "node_rank", "coordinate", "time",
)  # fmt: skip
"""What ``--log-line-prefix-template`` fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSettings:
    """What options and schedulers say of the rendezvous, from the flag to the launcher's side."""

    backend: str = "static"
    conf: tuple[tuple[str, str], ...] = ()
    """Settings of the backend, as texts."""
    run_id: str | None = None
    node_rank: int | None = None
    least_nodes: int | None = None
    """How many nodes are enough, where ``--nnodes`` is a range."""
    present: int | None = None
    """How many of a range are known to be present from the beginning."""
    local_addr: str | None = None
    """The address to listen on, if it was given."""
    coordinators: tuple[str, ...] = ()
    """All addresses and names of the first node, where a scheduler says them."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in node order, where a scheduler says them."""
    domain: str = ""
    """The domain of this node, where a scheduler says it."""
    secret: str | None = field(default=None, repr=False)
    """What only the job's processes know, where a scheduler has such a thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous(RendezvousSettings):
    """Where workers meet, as torchrun's options say it; on one node little of it matters."""

    endpoint: str = ""
    standalone: bool = False
    compares_programs: bool = True
    """Whether all nodes have to run the same program with the same arguments."""
    master_addr: str | None = None
    master_port: int | None = None
    step_of: str | None = None
    """The Slurm job whose ``srun`` is to start a launcher on each node, from this shell of it."""
    notes: tuple[str, ...] = ()
    """Notes about the facts of a scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How to get to other hosts."""

    starter: str = ""
    """What starts a process on a host: ``ssh``, another that meshrun knows, or a plug-in; ``""``
    for what the scheduler has, else ssh."""
    ssh: tuple[str, ...] = ("ssh",)
    """The words that run ssh."""
    connect_timeout_s: float = 10.0
    """How long each host may take to answer."""
    export: tuple[str, ...] = ()
    """Further variables that go to every host: names, or patterns such as ``WANDB_*``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote(Reach):
    """Hosts to start a launcher on, and how to connect to them."""

    hosts: tuple[Host, ...]
    way: tuple[str, ...] = ()
    """The words of a process here that starts an agent on the host whose name follows them, where
    what chose the hosts has a way of its own to them; ``starter`` is its name then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Which streams go to files, and where."""

    log_dir: str | None = None
    is_shared: bool = False
    """Whether others may write to where that is."""
    redirects: Streams = NO_STREAMS
    """To files only."""
    tee: Streams = NO_STREAMS
    """To files and to the console."""
    stdout_filters: tuple[str, ...] = ()
    """Lines with one of these are copied from stdout to ``filtered_stdout.log``."""
    stderr_filters: tuple[str, ...] = ()
    logs_specs: str | None = None
    """Name of a plug-in that chooses the files (entry point group ``torchrun.logs_specs``)."""

    @property
    def writes_files(self) -> bool:
        """Whether any stream may go to a file."""
        return bool(self.redirects or self.tee) or self.logs_specs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleRequest:
    """What is seen of the ranks' output."""

    prefix: Literal["mesh", "torchrun", "none"] = "mesh"
    """The prefix of each line: a coordinate, what torchrun prints there, or nothing."""
    template: str | None = None
    """Text before each line, with ``${rank}``, ``${coordinate}`` and others in it."""
    show: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    local_ranks: frozenset[int] | None = None
    collapse: bool = False
    nodes: Literal["all", "first-node"] = "all"
    """On which nodes lines of ranks are printed."""
    verbose: bool = False
    """Whether it is said what listens."""
    is_json: bool = False
    """Whether each line is a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What the user asked for; ``None`` means "not given"."""

    program: Program
    mesh: MeshSpec | None = None
    flattens: tuple[Flatten, ...] = ()
    views: tuple[View, ...] = ()
    intra_node: tuple[str, ...] = ()
    """Dims each of whose groups must lie within one node."""
    intra_domain: tuple[str, ...] = ()
    """Dims each of whose groups must lie within one NVLink domain."""
    domain_size: int | None = None
    """How many consecutive nodes share a domain."""
    renumber: bool = False
    """Whether ranks may take other slots than their own for that."""
    nnodes: int | None = None
    nproc_per_node: int | tuple[int, ...] | str | None = None
    """A number, one a node, or what decides it: ``auto``, ``gpu``, ``cpu``, or a device type."""
    device: str = "auto"
    gpus: tuple[str, ...] | None = None
    """What ``plan/gpu_choice.py`` reads; ``None`` for all visible GPUs."""
    groups: GroupOptions = GroupOptions()  # noqa: RUF009 - frozen
    mesh_init: Literal["eager", "lazy"] = "eager"
    start_method: StartMethod | None = None
    shutdown_timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    """How long all ranks may take to begin the program until it is said where they are; 0: ever."""
    hang_timeout_s: float = 0.0
    """How long all ranks may make no progress before they are stopped; 0: no limit."""
    straggler_time_s: float | None = None
    """How long a rank may be late at collectives before that is reported; ``None``: ever."""
    node_timeout_s: float = 30.0
    """How long another node may be silent until it is lost."""
    preload: tuple[str, ...] = ()
    warm_idle_s: float | None = None
    """How long a warm server waits for the next run; ``None`` not to use one, nor to leave one."""
    role: str = "default"
    max_restarts: int = 0
    gpu_memory_wait: GpuMemoryWait | None = None
    """How long restarts wait until memory of GPUs is free; ``None`` not to wait."""
    virtual_local_rank: bool = False
    numa_binding: BindingMode | None = None
    check_gpus: bool = False
    """Whether GPUs are looked at before ranks are started there."""
    check_first: tuple[str, ...] = ()
    """What is checked before the program: requirements as ``--require`` has them, and then folders
    that should be writable; empty for no check."""
    nic_affinity: bool = False
    """Whether each rank is kept to the network cards nearest its GPU."""
    stop_signals: tuple[int, ...] = STOP_SIGNALS
    forwarded_signals: tuple[int, ...] = ()
    """Signals that are passed to ranks alone, and end nothing."""
    stop_even_if_ignored: bool = False
    """Whether to handle a signal that was ignored when meshrun began, as nohup does to SIGHUP."""
    sigterm_repeats: bool = False
    """Whether repeated SIGTERMs are routine and change nothing, as under Slurm."""
    status: bool = False
    """Whether to show how the ranks do."""
    status_interval_s: float | None = None
    """How often; ``None`` for what suits the place where it is shown."""
    debug_rank: str | None = None
    """The one rank that is given the terminal: a number, or conditions as for ``--show``."""
    exit_codes: ExitCodes = "worker"
    event_log_handler: str = "null"
    events: str | None = None
    """The file that events are appended to, or ``-``."""
    node_history: str | None = None
    """The file that failures of nodes are appended to."""
    max_node_failures: int | None = None
    """How many a node may have there; ``None`` for any number."""
    metrics: tuple[str, int] | None = None
    """Address and port to serve metrics at."""
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    reach: Reach = Reach()
    """How to get to hosts, if there are any."""
    remote: Remote | None = None
    """The hosts that are to be launched on, where this launch starts them."""
    logs: LogRequest = field(default_factory=LogRequest)
    console: ConsoleRequest = field(default_factory=ConsoleRequest)
    sources: tuple[tuple[str, str, str], ...] = ()
    """(option, value, where it came from) of each that was given."""
    notes: tuple[str, ...] = ()
    """Notes about options that are ignored."""

    @property
    def own_preload(self) -> tuple[str, ...]:
        """Modules that the user named, without those of torch."""
        return tuple(name for name in self.preload if name.partition(".")[0] != "torch")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes in node order, where this launch starts them."""
        return () if self.remote is None else tuple(host.name for host in self.remote.hosts)
