"""The facts that a scheduler gives a process, for any scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

_PORTS = range(20000, 30000)
"""Below the ports that the kernel gives to outgoing connections (from 32768 on Linux)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """This process as the system numbers the processes that it starts itself."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    per_node: tuple[int, ...] = ()
    """How many there are on each node, where that is known."""
    in_blocks: bool = True
    """Whether the ranks of a node follow each other; not so where they go round the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """Where this process stands among the nodes of its job; ``None`` where nothing says."""

    system: str
    """For people: ``Slurm``, ``Open MPI``, ..."""
    evidence: str
    """What it was recognized by: ``step 0 of job 7 (SLURM_STEP_ID)``."""
    job_id: str | None
    """Names this step of a job and no other at the same time, alike on every node: ``7.0``."""
    nnodes: int | None
    node_rank: int | None
    hosts: tuple[str, ...] = ()
    """Names or addresses of the nodes, in node order."""
    head: tuple[str, ...] = ()
    """Names or addresses at which node 0 may be reached, best first."""
    port: int | None = None
    """The port of node 0: the system's own, or one that follows from ``job_id``."""
    task: Task | None = None
    """This process as a worker, where the system started each worker itself."""
    secret: str | None = None
    """Something that only the processes of this job know."""
    domain: str = ""
    """Names the part of the network that this node shares with its nearest ones."""
    notes: tuple[str, ...] = ()
    """Notes about variables that were ignored."""
    shell: str | None = None
    """What to type in this shell or batch script, which is inside an allocation and is no task."""
    starter: str = ""
    """What starts a process on one of ``hosts`` from this shell: ``ssh``, ``qrsh``, ..."""
    step_starter: str = ""
    """What starts one on every node at once, where the system has to: ``srun``."""
    one_a_node: str = "start one meshrun per node"
    """What to type, or to do, to have one launcher on each node."""
    more_cores: str = "widen the affinity mask"
    """What gives each worker a core, where ``{workers}`` stands for their number."""
    repeats_sigterm: bool = False
    """Whether the system ends a process with SIGTERM twice."""
    is_one_of_several: bool = False
    """Whether there are other processes, although nothing says how many."""
    variables: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    """Variables that were read and are set, with their values."""


def derive_port(job_id: str) -> int:
    """Return a port for a job, the same one on every node."""
    digest = sha256(job_id.encode(errors="surrogateescape")).digest()
    return _PORTS[int.from_bytes(digest[:8], "big") % len(_PORTS)]


def facts_of_hosts(
    system: str, evidence: str, job_id: str, hosts: tuple[str, ...], node_rank: int
) -> ClusterFacts:
    """Return the facts of one of several hosts, where the system names all and has no port.

    Args:
        system: Its name.
        evidence: What it was recognized by.
        job_id: Names the job, alike on every host.
        hosts: In node order; the first is node 0.
        node_rank: The place of this one.
    """
    return ClusterFacts(
        system=system,
        evidence=evidence,
        job_id=job_id,
        nnodes=len(hosts),
        node_rank=node_rank,
        hosts=hosts,
        head=hosts[:1],
        port=derive_port(job_id),
    )
