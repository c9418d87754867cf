"""Flux: a task of a job."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.cluster.read_variables import are_set, invalid, read_index, read_number
from meshrun.cluster.tasks import place_task

_VARIABLES = (
    *("FLUX_JOB_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
)


def detect_flux(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a task of a Flux job; ``None`` otherwise.

    The shell of ``flux alloc`` and the script of ``flux batch`` have none of these variables.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

    Source:
        flux-environment(7), "job environment".
    """
    env = here.env
    if not are_set(env, *_VARIABLES):
        return None
    size = read_number(env, "FLUX_JOB_SIZE", least=1) or 1
    nnodes = read_number(env, "FLUX_JOB_NNODES", least=1) or 1
    if nnodes > size:
        raise invalid(env, "FLUX_JOB_NNODES", f"no more than FLUX_JOB_SIZE, which is {size}")
    rank = read_index(env, size, "FLUX_TASK_RANK") or 0
    local_rank = read_index(env, size, "FLUX_TASK_LOCAL_ID") or 0
    # No variable has the number of tasks on this node: if nodes differ, it is at least this.
    local_size = max(size // nnodes, local_rank + 1)
    task, _, node_rank = place_task(rank, local_rank, size, local_size, nnodes=nnodes)
    job_id = env["FLUX_JOB_ID"]
    return ClusterFacts(
        system="Flux",
        evidence=f"task {rank} of job {job_id} (FLUX_TASK_RANK)",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=node_rank,
        port=derive_port(job_id),
        task=task,
        one_a_node="flux run -N NODES -n NODES --exclusive -o cpu-affinity=off meshrun ...",
    )
