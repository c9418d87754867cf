"""Detection of the system that started this process; of several, the innermost."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from meshrun.cluster import batch, mpi, platforms
from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.errors import UsageError
from meshrun.host.host_names import place_of

Detector = Callable[[Surroundings], ClusterFacts | None]
"""Returns the facts of this process, or ``None`` if its system did not start it; raises a
``UsageError`` if a variable is invalid, or only some are set of those that are set together."""

DETECTORS: tuple[Detector, ...] = (
    batch.detect_jsrun,
    mpi.detect_openmpi,
    mpi.detect_prrte,
    mpi.detect_mvapich,
    mpi.detect_hydra,
    platforms.detect_skypilot,
    platforms.detect_dstack,
    platforms.detect_ray,
    mpi.detect_flux,
    batch.detect_step,
    mpi.detect_pals,
    platforms.detect_sagemaker,
    platforms.detect_azure_ml,
    platforms.detect_vertex,
    platforms.detect_determined,
    platforms.detect_trainer,
    platforms.detect_pytorch_job,
    platforms.detect_volcano,
    platforms.detect_tpu,
    platforms.detect_leader_worker_set,
    platforms.detect_indexed_job,
    platforms.detect_aws_batch,
    batch.detect_shell,
    batch.detect_lsf,
    batch.detect_pbs,
    batch.detect_gridengine,
    mpi.detect_pmi,
)
"""Innermost first: jsrun also sets Open MPI's variables, mpirun starts its daemons with srun and in
any job, SkyPilot and dstack run on Ray, Kubernetes and Slurm, Ray's workers inherit the variables
of whatever started the cluster, Slurm and Flux set the variables of PALS, Slurm's nodes may be
pods, every TrainJob and JobSet consists of Indexed Jobs, and a shell is outermost."""


def detect_cluster(here: Surroundings, plug_ins: Iterable[Detector] = ()) -> ClusterFacts | None:
    """Return the facts of the system that started this process; ``None`` if none is recognized.

    ``plug_ins`` are additional detectors, which come first.

    Raises:
        UsageError: If a variable of the innermost system is invalid, or that system started only
            this process while an outer one started several.
    """
    systems: list[ClusterFacts] = []
    for detect in (*plug_ins, *DETECTORS):
        recorded = _RecordingEnv(here.env)
        try:
            facts = detect(here._replace(env=recorded))
        except UsageError:
            if not systems:
                raise
            continue  # an outer system is not used
        if facts is not None:
            systems.append(replace(facts, variables=tuple(recorded.found.items())))
    if not systems:
        return None
    found, *around = systems
    _check_alone(found, around)
    notes = [f"{outer.system}: {outer.evidence}, around {found.system}" for outer in around]
    return _with_hosts(replace(found, notes=(*found.notes, *notes)), around, here.hostname)


class _RecordingEnv(UserDict[str, str]):
    """An environment that records which variables are read."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(env)
        self.found: dict[str, str] = {}
        """The variables that were read and are set."""

    def __getitem__(self, name: str) -> str:
        value = super().__getitem__(name)
        if value:
            self.found[name] = value
        return value


def _check_alone(found: ClusterFacts, around: list[ClusterFacts]) -> None:
    """Check that no outer system started several processes if ``found`` started only this one.

    Raises:
        UsageError: If one did: each of its processes would launch by itself.
    """
    if found.shell is not None or found.task is None or found.task.world_size > 1:
        return
    for outer in around:
        total = max(outer.nnodes or 1, outer.task.world_size if outer.task else 1)
        if outer.shell is None and total > 1:
            rank = outer.node_rank or (outer.task and outer.task.rank)
            raise UsageError(
                f"{found.system} started 1 process ({found.evidence}), but {outer.system} around"
                f" it started {total} ({outer.evidence})",
                hint=f"start meshrun with only one of them, or unset the variables of the other"
                f" ({found.variables[0][0]}, {outer.variables[0][0]}, ...); --nnodes 1 launches on"
                " this node alone",
                is_reported_elsewhere=bool(rank),
            )


def _with_hosts(found: ClusterFacts, around: list[ClusterFacts], hostname: str) -> ClusterFacts:
    """Return the facts with the hosts of the surrounding job, if they match.

    MPI's launchers give processes neither hosts nor addresses, but start them on a job's hosts.
    """
    if found.coordinator or found.task is None or found.node_rank is None:
        return found
    for outer in around:
        same = len(outer.hosts) == found.nnodes
        if same and place_of(hostname, outer.hosts) == found.node_rank:
            job_id = found.job_id or outer.job_id
            return replace(
                found,
                hosts=outer.hosts,
                coordinator=outer.hosts[:1],
                job_id=job_id,
                port=found.port or (derive_port(job_id) if job_id else None),
            )
    return found
