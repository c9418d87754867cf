"""MPI's launchers, PALS and Flux, which start and number each process."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec.structs import replace

from meshrun.cluster.cluster_facts import (
    ClusterFacts,
    Surroundings,
    are_set,
    facts_of_node,
    invalid,
    place_task,
    read_index,
    read_number,
    read_task,
)
from meshrun.errors import UsageError

_ADDRESSES = re.compile(r"tcp6?://([^;]*?):\d+(?=;|$)")
_PRTERUN = re.compile(r"prterun-(?P<host>[\w.-]+)-\d+@\d+")


def detect_openmpi(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process that ``mpirun`` started.

    No variable has the node rank: ``OMPI_COMM_WORLD_NODE_RANK`` is the rank within the node.

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
    evidence = f"process {task.rank} of {task.world_size} (OMPI_COMM_WORLD_RANK)"
    job_id = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")
    coordinator = _addresses(env.get("OMPI_MCA_orte_hnp_uri", "")) or _host_of_prterun(env)
    return replace(
        facts_of_node("Open MPI", evidence, job_id, node_rank, nnodes, coordinator=coordinator),
        task=task,
        secret=env.get("OMPI_MCA_orte_precondition_transports"),
        one_a_node="mpirun -npernode 1 --bind-to none meshrun ...",
        more_cores="mpirun --bind-to none lifts the limit",
    )


def detect_prrte(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process that ``prterun`` started without an MPI's variables.

    The number of processes is unknown.

    Source:
        PRRTE, ``setup_fork`` of its schizo components for ``PRTE_LAUNCHED``; PMIx, ``PMIX_RANK``.
    """
    env = here.env
    rank = read_number(env, "PMIX_RANK")
    if rank is None or not env.get("PRTE_LAUNCHED") or not env.get("PMIX_NAMESPACE"):
        return None
    job_id, evidence = env["PMIX_NAMESPACE"], f"process {rank} (PMIX_RANK)"
    return replace(
        facts_of_node("PRRTE", evidence, job_id, rank, coordinator=_host_of_prterun(env)),
        is_one_of_several=True,
        one_a_node="prterun --map-by ppr:1:node --bind-to none meshrun --nnodes N ...",
    )


def _addresses(uri: str) -> tuple[str, ...]:
    """Return the addresses of mpirun's host, from ``2886.0;tcp://10.0.0.1,10.1.0.1:43537``."""
    listed = ",".join(match[1].strip("[]") for match in _ADDRESSES.finditer(uri))
    return tuple(address for address in listed.split(",") if address)


def _host_of_prterun(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the host of ``prterun``, which is also Open MPI 5's ``mpirun``.

    Source:
        PRRTE names its first job ``prterun-HOST-PID@1``.
    """
    match = _PRTERUN.fullmatch(env.get("PMIX_NAMESPACE", ""))
    return (match["host"],) if match else ()


def detect_mvapich(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process of MVAPICH.

    Source:
        MVAPICH2's user guide, and ``mpispawn.c``.
    """
    env = here.env
    names = (f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    placed = read_task(env, *names)
    if placed is None:
        return None
    task, nnodes, node_rank = placed
    evidence = f"process {task.rank} of {task.world_size} (MV2_COMM_WORLD_RANK)"
    return replace(
        facts_of_node("MVAPICH", evidence, None, node_rank, nnodes),
        task=task,
        one_a_node="mpirun_rsh -np N -hostfile FILE MV2_ENABLE_AFFINITY=0 meshrun ..., with each"
        " host once in the file",
    )


def detect_hydra(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process that Hydra started.

    Many systems set ``PMI_RANK`` and ``PMI_SIZE``; only Hydra sets the other two.

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
    evidence = f"process {task.rank} of {task.world_size} (PMI_RANK, MPI_LOCALRANKID)"
    return replace(
        facts_of_node("Intel MPI" if is_intels else "MPICH", evidence, None, node_rank, nnodes),
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
    raise UsageError(
        f"PMI_RANK {rank} of PMI_SIZE {size}: meshrun was started {size} times, on unknown nodes",
        hint="start one meshrun per node with --nnodes, --node-rank and --rdzv-endpoint, or unset"
        " PMI_RANK and PMI_SIZE if they are left over from another job",
        is_reported_elsewhere=rank > 0,
    )


def detect_pals(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a process that PALS started.

    Slurm's plug-in ``mpi/cray_shasta`` and Flux's ``cray-pals`` set these variables, too, so Slurm
    and Flux must be detected first.

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
    evidence = f"process {task.rank} of {task.world_size} (PALS_RANKID)"
    return replace(
        facts_of_node("PALS", evidence, env["PALS_APID"], node_rank, nnodes),
        task=task,
        one_a_node="mpiexec --ppn 1 --cpu-bind none meshrun ...",
    )


_FLUX = (
    "FLUX_JOB_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID",
)  # fmt: skip


def detect_flux(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a task of a Flux job.

    The shell of ``flux alloc`` and the script of ``flux batch`` have none of these variables.

    Source:
        flux-environment(7), "job environment".
    """
    env = here.env
    if not are_set(env, *_FLUX):
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
    evidence = f"task {rank} of job {job_id} (FLUX_TASK_RANK)"
    return replace(
        facts_of_node("Flux", evidence, job_id, node_rank, nnodes),
        task=task,
        one_a_node="flux run -N NODES -n NODES --exclusive -o cpu-affinity=off meshrun ...",
    )
