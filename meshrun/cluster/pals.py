"""PALS, the ``mpiexec`` and ``aprun`` of HPE Cray systems with PBS."""

from __future__ import annotations

from dataclasses import replace

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.cluster.read_variables import are_set, read_number
from meshrun.cluster.tasks import read_task


def detect_pals(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process that PALS started; ``None`` otherwise.

    Slurm's plug-in ``mpi/cray_shasta`` and Flux's ``cray-pals`` set these variables, too, so Slurm
    and Flux must be detected first.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

    Source:
        Slurm's ``mpi/cray_shasta`` and flux-coral2's ``cray-pals`` for the names; HPE Cray PALS,
        ``mpiexec``.
    """
    env = here.env
    if not are_set(env, "PALS_APID", "PALS_RANKID", "PALS_NODEID"):
        return None
    local = "PALS" if env.get("PALS_LOCAL_SIZE") else "PMI"
    sizes = ("PMI_SIZE", "PALS_LOCAL_RANKID", f"{local}_LOCAL_SIZE")
    placed = read_task(env, "PALS_RANKID", *sizes)
    if placed is None:
        return None
    task, nnodes, _ = placed
    node_rank = read_number(env, "PALS_NODEID") or 0
    if nnodes is not None and node_rank >= nnodes:
        nnodes = None  # nodes have different numbers of processes
        task = replace(task, per_node=())
    job_id = env["PALS_APID"]
    return ClusterFacts(
        system="PALS",
        evidence=f"process {task.rank} of {task.world_size} (PALS_RANKID)",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=node_rank,
        port=derive_port(job_id),
        task=task,
        one_a_node="mpiexec --ppn 1 --cpu-bind none meshrun ...",
    )
