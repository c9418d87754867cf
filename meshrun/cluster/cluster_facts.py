"""What detectors may read, and the facts that they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

_PORTS = range(20000, 30000)
"""Below the ports that the kernel uses for outgoing connections (from 32768 on Linux)."""


def _cannot_read(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory", path)


class Surroundings(NamedTuple):
    """Everything a detector may look at."""

    env: Mapping[str, str]
    hostname: str
    """This machine's own name; a pod's includes its number."""
    terminal: bool | None = None
    """Whether this process has a controlling terminal, ``None`` if unknown.

    The tasks of a step inside an ``srun --pty`` shell inherit its variables, but have no terminal.
    """
    read: Callable[[str], str] = _cannot_read
    """Returns the text of a small file, such as a list of hosts, or raises an ``OSError``."""


class Task(Struct, frozen=True, kw_only=True):
    """This process as one of those that the system starts and numbers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    per_node: tuple[int, ...] = ()
    """Number of tasks on each node, if known."""
    in_blocks: bool = True
    """Whether the ranks of a node are consecutive, instead of going round the nodes."""


class ClusterFacts(Struct, frozen=True, kw_only=True):
    """The position of this process among the nodes of its job; ``None`` for unknown facts."""

    system: str
    """Name for messages: ``Slurm``, ``Open MPI``, ..."""
    evidence: str
    """How it was recognized: ``step 0 of job 7 (SLURM_STEP_ID)``."""
    job_id: str | None
    """An id of this step of a job, unique at any time and the same on every node: ``7.0``."""
    nnodes: int | None
    node_rank: int | None
    hosts: tuple[str, ...] = ()
    """Names or addresses of the nodes, in node order."""
    coordinator: tuple[str, ...] = ()
    """Names or addresses at which the coordinator, node 0, may be reached, best first."""
    port: int | None = None
    """The port of node 0: the system's own, or one derived from ``job_id``."""
    task: Task | None = None
    """This process as a worker, if the system starts each worker itself."""
    secret: str | None = None
    """A secret that only the processes of this job know."""
    domain: str = ""
    """Name of the part of the network that this node shares with its nearest neighbors."""
    notes: tuple[str, ...] = ()
    """Notes about ignored variables."""
    shell: str | None = None
    """The command to use here, if this is a shell or batch script of an allocation, not a task."""
    starter: str = ""
    """The command that starts a process on one of ``hosts`` from this shell: ``ssh``, ``qrsh``."""
    step_starter: str = ""
    """The command that starts a process on every node, if the system requires it: ``srun``."""
    can_start: bool = False
    """Whether this shell has a command that starts launchers on other nodes."""
    one_a_node: str = "start one meshrun per node"
    """The command, or advice, that starts one launcher on each node."""
    more_cores: str = "widen the affinity mask"
    """How to give each worker a core; ``{workers}`` stands for their number."""
    repeats_sigterm: bool = False
    """Whether the system sends SIGTERM twice to end a process."""
    is_one_of_several: bool = False
    """Whether there are other processes, although their number is unknown."""
    variables: tuple[tuple[str, str], ...] = ()
    """The variables that were read and are set, with their values."""

    def __repr__(self) -> str:
        return Struct.__repr__(replace(self, secret=None, variables=()))  # may be secret


def derive_port(job_id: str) -> int:
    """Return a port for a job, the same on every node."""
    from hashlib import sha256

    digest = sha256(job_id.encode(errors="surrogateescape")).digest()
    return _PORTS[int.from_bytes(digest[:8], "big") % len(_PORTS)]


def facts_of_node(
    system: str,
    evidence: str,
    job_id: str | None,
    node_rank: int | None,
    nnodes: int | None = None,
    *,
    hosts: tuple[str, ...] = (),
    coordinator: Iterable[str | None] | None = None,
    port: int | None = None,
) -> ClusterFacts:
    """Return the facts of a node, or of a task on it, with a port if the job has an id.

    Args:
        system: Name of the system.
        evidence: How it was recognized.
        job_id: An id of the job, the same on every node.
        node_rank: Index of this node.
        nnodes: Number of nodes; by default that of ``hosts``, if any.
        hosts: The hosts in node order.
        coordinator: Names or addresses of the coordinator, node 0, without those that are empty; by
            default the first host.
        port: The system's own port, if it chooses one.
    """
    return ClusterFacts(
        system=system,
        evidence=evidence,
        job_id=job_id,
        nnodes=nnodes or len(hosts) or None,
        node_rank=node_rank,
        hosts=hosts,
        coordinator=hosts[:1] if coordinator is None else tuple(filter(None, coordinator)),
        port=port or (derive_port(job_id) if job_id else None),
    )
