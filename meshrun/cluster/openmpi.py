"""Open MPI and PRRTE: a process started by ``mpirun`` or ``prterun``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.cluster.read_variables import read_number
from meshrun.cluster.tasks import read_task

_PLACES = re.compile(r"tcp6?://([^;]*?):\d+(?=;|$)")
_NAMESPACE = re.compile(r"prterun-(?P<host>[\w.-]+)-\d+@\d+")
_ONE_A_NODE = "mpirun -npernode 1 --bind-to none meshrun ..."


def detect_openmpi(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process that ``mpirun`` started; ``None`` otherwise.

    No variable has the node rank: ``OMPI_COMM_WORLD_NODE_RANK`` is the rank within the node.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

    Source:
        mpirun(1), environment; Open MPI 4.1 for ``OMPI_MCA_orte_*``.
    """
    env = here.env
    nnodes = read_number(env, "OMPI_MCA_orte_num_nodes", least=1)
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    placed = read_task(env, *names, nnodes=nnodes)  # Open MPI 5 has no variable for nnodes
    if placed is None:
        return None
    task, nnodes, node_rank = placed
    job_id = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")
    return ClusterFacts(
        system="Open MPI",
        evidence=f"process {task.rank} of {task.world_size} (OMPI_COMM_WORLD_RANK)",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=node_rank,
        head=_addresses(env.get("OMPI_MCA_orte_hnp_uri", "")) or _host_of_prterun(env),
        port=derive_port(job_id) if job_id else None,
        task=task,
        secret=env.get("OMPI_MCA_orte_precondition_transports"),
        one_a_node=_ONE_A_NODE,
        more_cores="mpirun --bind-to none lifts the limit",
    )


def detect_prrte(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process that ``prterun`` started without an MPI's variables.

    The number of processes is unknown.

    Raises:
        UsageError: If a variable is invalid.

    Source:
        PRRTE, ``setup_fork`` of its schizo components for ``PRTE_LAUNCHED``; PMIx, ``PMIX_RANK``.
    """
    env = here.env
    rank = read_number(env, "PMIX_RANK")
    if rank is None or not env.get("PRTE_LAUNCHED") or not env.get("PMIX_NAMESPACE"):
        return None
    job_id = env["PMIX_NAMESPACE"]
    return ClusterFacts(
        system="PRRTE",
        evidence=f"process {rank} (PMIX_RANK)",
        job_id=job_id,
        nnodes=None,
        node_rank=rank,
        head=_host_of_prterun(env),
        port=derive_port(job_id),
        is_one_of_several=True,
        one_a_node="prterun --map-by ppr:1:node --bind-to none meshrun --nnodes N ...",
    )


def _addresses(uri: str) -> tuple[str, ...]:
    """Return the addresses of mpirun's host, from ``2886.0;tcp://10.0.0.1,10.1.0.1:43537``."""
    listed = ",".join(match[1].strip("[]") for match in _PLACES.finditer(uri))
    return tuple(address for address in listed.split(",") if address)


def _host_of_prterun(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the host of ``prterun``, which is also Open MPI 5's ``mpirun``.

    Source:
        PRRTE names its first job ``prterun-HOST-PID@1``.
    """
    match = _NAMESPACE.fullmatch(env.get("PMIX_NAMESPACE", ""))
    return (match["host"],) if match else ()
