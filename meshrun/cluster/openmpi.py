"""Open MPI: a process that ``mpirun`` started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshrun.cluster.cluster_facts import ClusterFacts, Task, derive_port
from meshrun.cluster.numbers import read_index, read_number
from meshrun.errors import UsageError

_PLACES = re.compile(r"tcp6?://([^;]*?):\d+(?=;|$)")


def detect_openmpi(env: Mapping[str, str]) -> ClusterFacts | None:
    """Return the facts of a process that ``mpirun`` started; ``None`` in any other.

    No variable names the node: ``OMPI_COMM_WORLD_NODE_RANK`` is the rank within it.

    Raises:
        UsageError: If a variable is broken.

    Source:
        mpirun(1), environment; Open MPI 4.1 for ``OMPI_MCA_orte_*``.
    """
    world_size = read_number(env, "OMPI_COMM_WORLD_SIZE", least=1)
    rank = read_index(env, world_size, "OMPI_COMM_WORLD_RANK")
    if world_size is None or rank is None:
        return None
    local_world_size = read_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
    local_rank = read_index(env, local_world_size, "OMPI_COMM_WORLD_LOCAL_RANK")
    if local_world_size is None or local_rank is None or local_world_size > world_size:
        raise UsageError(
            f"OMPI_COMM_WORLD_SIZE {world_size} contradicts OMPI_COMM_WORLD_LOCAL_SIZE"
            f" `{env.get('OMPI_COMM_WORLD_LOCAL_SIZE', '')}` and OMPI_COMM_WORLD_LOCAL_RANK"
            f" `{env.get('OMPI_COMM_WORLD_LOCAL_RANK', '')}`",
        )
    nnodes = read_number(env, "OMPI_MCA_orte_num_nodes", least=1)
    if nnodes is None and world_size % local_world_size == 0:
        nnodes = world_size // local_world_size  # Open MPI 5 does not say it
    is_even = nnodes is not None and nnodes * local_world_size == world_size
    in_blocks = rank % local_world_size == local_rank if is_even else True
    node_rank = 0 if nnodes == 1 else None
    if nnodes is not None and is_even:
        node_rank = rank // local_world_size if in_blocks else rank % nnodes
    key = env.get("OMPI_MCA_orte_precondition_transports")
    job_id = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")
    task = Task(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        per_node=(local_world_size,) * nnodes if nnodes is not None and is_even else (),
        in_blocks=in_blocks,
    )
    return ClusterFacts(
        system="Open MPI",
        evidence=f"process {rank} of {world_size} (OMPI_COMM_WORLD_RANK)",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=node_rank,
        head=_addresses(env.get("OMPI_MCA_orte_hnp_uri", "")),
        port=derive_port(job_id) if job_id else None,
        launchers_on_node=local_world_size,
        launcher_on_node=local_rank,
        task=task,
        secret=key,
    )


def _addresses(uri: str) -> tuple[str, ...]:
    """Return the addresses of mpirun's host, from ``2886.0;tcp://10.0.0.1,10.1.0.1:43537``."""
    listed = ",".join(match[1].strip("[]") for match in _PLACES.finditer(uri))
    return tuple(address for address in listed.split(",") if address)
