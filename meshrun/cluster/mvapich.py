"""MVAPICH: a process started by ``mpirun_rsh`` or ``mpiexec``."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings
from meshrun.cluster.tasks import read_task


def detect_mvapich(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process of MVAPICH; ``None`` otherwise.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

    Source:
        MVAPICH2's user guide, and ``mpispawn.c``.
    """
    env = here.env
    names = (f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    placed = read_task(env, *names)
    if placed is None:
        return None
    task, nnodes, node_rank = placed
    return ClusterFacts(
        system="MVAPICH",
        evidence=f"process {task.rank} of {task.world_size} (MV2_COMM_WORLD_RANK)",
        job_id=None,
        nnodes=nnodes,
        node_rank=node_rank,
        task=task,
        one_a_node="mpirun_rsh -np N -hostfile FILE MV2_ENABLE_AFFINITY=0 meshrun ..., with each"
        " host once in the file",
    )
