"""Hydra, the ``mpiexec`` of MPICH and Intel MPI; and processes with only PMI's variables."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings
from meshrun.cluster.read_variables import read_index, read_number
from meshrun.cluster.tasks import read_task
from meshrun.errors import UsageError


def detect_hydra(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process that Hydra started; ``None`` otherwise.

    Many systems set ``PMI_RANK`` and ``PMI_SIZE``; only Hydra sets the other two.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

    Source:
        MPICH 4.0.2 and Intel MPI 2021.18; only the latter sets ``I_MPI_HYDRA_UUID``.
    """
    env = here.env
    if not (env.get("MPI_LOCALRANKID") or env.get("MPI_LOCALNRANKS")):
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    placed = read_task(env, *names)
    if placed is None:
        return None
    task, nnodes, node_rank = placed
    is_intels = bool(env.get("I_MPI_HYDRA_UUID"))
    return ClusterFacts(
        system="Intel MPI" if is_intels else "MPICH",
        evidence=f"process {task.rank} of {task.world_size} (PMI_RANK, MPI_LOCALRANKID)",
        job_id=None,
        nnodes=nnodes,
        node_rank=node_rank,
        task=task,
        one_a_node="mpiexec -ppn 1 -genv I_MPI_PIN=off meshrun ..."
        if is_intels
        else "mpiexec -ppn 1 meshrun ...",
    )


def detect_pmi(here: Surroundings) -> ClusterFacts | None:
    """Refuse to run as one of several processes with only PMI's variables.

    Raises:
        UsageError: If this is one: nothing shows which processes share a node.
    """
    env = here.env
    size = read_number(env, "PMI_SIZE", least=1)
    rank = read_index(env, size, "PMI_RANK")
    if rank is None or size is None or size == 1:
        return None
    error = UsageError(
        f"PMI_RANK {rank} of PMI_SIZE {size}: meshrun was started {size} times, on unknown nodes",
        hint="start one meshrun per node with --nnodes, --node-rank and --rdzv-endpoint, or unset"
        " PMI_RANK and PMI_SIZE if they are left over from another job",
    )
    error.is_reported_elsewhere = rank > 0
    raise error
