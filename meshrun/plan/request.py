"""The launch request as a value: LaunchRequest and its parts. Pure."""

from __future__ import annotations

import signal

from msgspec import Struct
from msgspec.structs import replace

from meshrun.layout import Flatten, View
from meshrun.layout.placing import Place
from meshrun.layout.spec import MeshSpec
from meshrun.plan import choices
from meshrun.plan.group_options import GroupOptions
from meshrun.plan.hostfile import Host
from meshrun.plan.parse import NO_STREAMS, GpuMemoryWait, Streams, parse_endpoint
from meshrun.plan.rank_program import Program


class RendezvousSettings(Struct, frozen=True, kw_only=True):
    """Rendezvous settings of options and schedulers that a launcher needs unchanged.

    They have no defaults, so that none can be left out where they are passed on.
    """

    backend: str
    node_timeout_s: float
    """How long another node may be silent before it counts as lost."""
    conf: tuple[tuple[str, str], ...]
    """Settings of the backend, as strings."""
    run_id: str | None
    node_rank: int | None
    least_nodes: int | None
    """The fewest nodes to start with, if ``--nnodes`` is a range."""
    present: int | None
    """How many nodes of a range are known to be present from the start."""
    local_addr: str | None
    """The address to listen on, if given."""
    coordinator: tuple[str, ...]
    """Addresses and names of the coordinator, best first, if a scheduler provides them."""
    hosts: tuple[str, ...]
    """Names of the nodes in node order, if a scheduler provides them."""
    domain: str
    """The domain of this node, if a scheduler provides it."""
    secret: str | None
    """A secret that only the job's processes know, if a scheduler provides one."""
    join_command: str | None
    """The command to print for the other nodes, with ``ENDPOINT`` in place of the endpoint."""

    def __repr__(self) -> str:
        return Struct.__repr__(replace(self, secret=None))

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may join and leave during the launch."""
        return self.least_nodes is not None


class Rendezvous(RendezvousSettings, frozen=True, kw_only=True):
    """Where workers meet, in terms of torchrun's options; on one node, most of it is unused."""

    endpoint: str = ""
    standalone: bool = False
    compares_programs: bool = True
    """Whether nodes compare their programs, which must be the same, and the arguments."""
    master_addr: str | None = None
    master_port: int | None = None
    step_of: str | None = None
    """The Slurm job of this shell, if ``srun`` is to start a launcher on each of its nodes."""
    notes: tuple[str, ...] = ()
    """Notes about the scheduler."""

    @property
    def has_address(self) -> bool:
        """Whether the address of node 0 is given."""
        return bool(self.endpoint or self.master_addr)

    @property
    def address(self) -> tuple[str | None, int | None]:
        """Host and port of node 0, as far as given.

        Raises:
            UsageError: If the endpoint cannot be parsed.
        """
        return (
            parse_endpoint(self.endpoint) if self.endpoint else (self.master_addr, self.master_port)
        )


class HostAccess(Struct, frozen=True, kw_only=True):
    """How to reach other hosts."""

    starter: str = ""
    """What starts a process on a host: ``ssh``, another command that meshrun knows, or a plug-in;
    ``""`` for the scheduler's own command if it has one, else ssh."""
    ssh: tuple[str, ...]
    """The command line of ssh, without a host."""
    connect_timeout_s: float
    """How long each host may take to answer."""
    export: tuple[str, ...] = ()
    """Additional variables to send to every host: names, or patterns such as ``WANDB_*``."""


class RemoteHosts(Struct, frozen=True, kw_only=True):
    """Hosts to start a launcher on, and how to reach them."""

    hosts: tuple[Host, ...]
    access: HostAccess
    start_command: tuple[str, ...] = ()
    """A local command that starts an agent on the host appended to it, if whatever chose the hosts
    (Ray) has a way of its own; ``access.starter`` is then only a name for it."""


class LogRequest(Struct, frozen=True, kw_only=True):
    """Which streams go to files, and where."""

    log_dir: str | None = None
    allow_shared: bool = False
    """Whether ``log_dir`` may be in a folder that others can write to."""
    redirects: Streams = NO_STREAMS
    """Streams that go to files only."""
    tee: Streams = NO_STREAMS
    """Streams that go to files and to the console."""
    stdout_filters: tuple[str, ...] = ()
    """Texts; stdout lines that contain one are copied to ``filtered_stdout.log``."""
    stderr_filters: tuple[str, ...] = ()
    logs_specs: str | None = None
    """Name of a plug-in that chooses the files (entry point group ``torchrun.logs_specs``)."""

    @property
    def writes_files(self) -> bool:
        """Whether any stream may go to a file."""
        return bool(self.redirects or self.tee) or self.logs_specs is not None


class ConsoleRequest(Struct, frozen=True, kw_only=True):
    """Which of the ranks' output is printed, and how."""

    prefix: choices.Prefix
    """The prefix of each line: a coordinate, torchrun's prefix, or nothing."""
    template: str | None = None
    """A template of the prefix with fields such as ``${rank}``: see ``TEMPLATE_FIELDS``."""
    show: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    local_ranks: frozenset[int] | None = None
    collapse: bool = False
    nodes: choices.ShownNodes
    """The nodes that print lines of their ranks."""
    verbose: bool = False
    """Whether to print which sockets listen."""
    is_json: bool = False
    """Whether each line is a JSON object."""


class LaunchRequest(Struct, frozen=True, kw_only=True):
    """What the user requested; ``None`` means "not given" unless noted otherwise.

    The table of options has the defaults other than ``None``, zero and what is empty.
    """

    program: Program
    mesh: MeshSpec | None = None
    flattens: tuple[Flatten, ...] = ()
    views: tuple[View, ...] = ()
    intra_node: tuple[str, ...] = ()
    """Dims whose groups must each lie within one node."""
    intra_domain: tuple[str, ...] = ()
    """Dims whose groups must each lie within one NVLink domain."""
    domain_size: int | None = None
    """How many consecutive nodes share a domain."""
    place: Place
    """How ranks are numbered: ``auto`` may change slots to keep groups within a node or domain."""
    nnodes: int | None = None
    nproc_per_node: int | tuple[int, ...] | str | None = None
    """A number, one number per node, or what determines it: ``auto``, ``gpu``, ``cpu`` or a
    device type."""
    device: str
    gpus: tuple[str, ...] | None = None
    """Entries as ``parse_gpus`` returns them; ``None`` for all visible GPUs."""
    groups: GroupOptions = GroupOptions()
    mesh_init: choices.MeshInit
    start_method: choices.StartMethod | None = None
    shutdown_timeout_s: float
    start_timeout_s: float
    """How long ranks may take to start the program before meshrun reports where they are; 0 for
    no limit."""
    hang_timeout_s: float = 0.0
    """How long all ranks may make no progress before they are stopped; 0 for no limit."""
    straggler_time_s: float | None = None
    """How late a rank may be at collectives before it is reported; ``None`` for no limit."""
    preload: tuple[str, ...] = ()
    warm_idle_s: float | None = None
    """How long a warm server waits for the next run; ``None`` neither to use nor to leave one."""
    role: str
    max_restarts: int = 0
    gpu_memory_wait: GpuMemoryWait | None = None
    """How long a restart waits for GPU memory to be freed; ``None`` not to wait."""
    virtual_local_rank: bool = False
    numa_binding: choices.NumaBinding | None = None
    check_gpus: bool = False
    """Whether to check the health of GPUs before ranks start on them."""
    check_first: tuple[str, ...] = ()
    """Checks to run before the program: the requirements of ``--require``, then folders that must
    be writable; empty for none."""
    nic_affinity: bool = False
    """Whether each rank uses only the network cards nearest its GPU."""
    stop_signals: tuple[int, ...]
    forwarded_signals: tuple[int, ...] = ()
    """Signals that are only forwarded to the ranks and do not end the launch."""
    stop_even_if_ignored: bool = False
    """Whether to handle signals that meshrun inherited as ignored, such as SIGHUP under nohup."""
    sigterm_repeats: bool = False
    """Whether repeated SIGTERMs are routine and change nothing, as under Slurm."""
    status: bool = False
    """Whether to show the status of the ranks."""
    status_interval_s: float | None = None
    """How often to show it; ``None`` for an interval that suits the output."""
    debug_rank: str | None = None
    """The rank that gets the terminal: a number, or conditions as for ``--show``."""
    exit_codes: choices.ExitCodes
    event_log_handler: str
    events: str | None = None
    """The file to append events to, or ``-``."""
    node_history: str | None = None
    """The file to append failures of nodes to."""
    max_node_failures: int | None = None
    """How many failures a node may have in that file; ``None`` for no limit."""
    metrics: tuple[str, int] | None = None
    """Address and port to serve metrics at."""
    rendezvous: Rendezvous
    access: HostAccess
    """How to reach hosts, if there are any."""
    remote: RemoteHosts | None = None
    """The hosts to start launchers on, if this launch does so."""
    logs: LogRequest = LogRequest()
    console: ConsoleRequest
    sources: tuple[tuple[str, str, str], ...] = ()
    """(option, value, where it came from) of each option that was given."""
    notes: tuple[str, ...] = ()
    """Notes about options that are ignored."""

    @property
    def only_launcher_gets_sigquit(self) -> bool:
        """Whether ranks ignore SIGQUIT, which Slurm may send to every process of a job."""
        asked = (*self.stop_signals, *self.forwarded_signals)
        return self.sigterm_repeats and signal.SIGQUIT not in asked

    @property
    def needs_scheduler(self) -> bool:
        """Whether only a scheduler can say where the nodes meet."""
        knows_where = self.rendezvous.has_address or self.rendezvous.standalone
        return not knows_where and self.nnodes != 1

    @property
    def is_mesh_inferred(self) -> bool:
        """Whether the size of a dim depends on the number of workers."""
        return self.mesh is not None and self.mesh.is_inferred

    @property
    def own_preload(self) -> tuple[str, ...]:
        """The modules to preload that are not part of torch."""
        return tuple(name for name in self.preload if name.partition(".")[0] != "torch")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts to start launchers on, in node order."""
        return () if self.remote is None else tuple(host.name for host in self.remote.hosts)
