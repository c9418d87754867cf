"""Kubernetes: the pods of the usual kinds of jobs."""

from __future__ import annotations

import re

from msgspec.structs import replace

from meshrun.cluster.cluster_facts import (
    ClusterFacts,
    Surroundings,
    are_set,
    facts_of_node,
    invalid,
    read_index,
    read_number,
)
from meshrun.host.host_names import first_label, place_of

_TRAINER = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR",
            "PET_MASTER_PORT")  # fmt: skip
_PYTORCH_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_POD_OF_PYTORCH_JOB = re.compile(r"(?P<job>.+)-(?:master|worker)-\d+")


def detect_trainer(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a Kubeflow TrainJob.

    meshrun reads its variables as options anyway. Detecting it here prevents its Indexed Job from
    being detected instead.

    Source:
        Kubeflow Trainer v2, the torch plugin.
    """
    env = here.env
    if not all(env.get(name) for name in _TRAINER):
        return None
    nnodes = env["PET_NNODES"]
    count = read_number(env, "PET_NNODES", least=1) if ":" not in nnodes else None
    address = env["PET_MASTER_ADDR"]
    evidence = f"node {env['PET_NODE_RANK']} of {nnodes} (PET_NODE_RANK)"
    node_rank, port = read_index(env, count, "PET_NODE_RANK"), read_number(env, "PET_MASTER_PORT")
    return facts_of_node(
        "Kubeflow Trainer", evidence, address, node_rank, count, coordinator=(address,), port=port
    )


def detect_pytorch_job(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a pod of a Kubeflow PyTorchJob, whose RANK counts pods.

    So does WORLD_SIZE, unless the job has ``nprocPerNode``; then there is PET_NNODES, too.

    Source:
        Kubeflow training operator v1, ``SetPodEnv`` of its PyTorchJob.
    """
    env = here.env
    pod = _POD_OF_PYTORCH_JOB.fullmatch(here.hostname.partition(".")[0])
    if pod is None or not env.get("KUBERNETES_SERVICE_HOST") or env.get("LOCAL_RANK"):
        return None
    address = env.get("MASTER_ADDR", "")
    of_this_job = {f"{pod['job']}-master-0", f"{pod['job']}-worker-0", "localhost"}
    if not all(env.get(name) for name in _PYTORCH_JOB) or address not in of_this_job:
        return None
    pet_nnodes = env.get("PET_NNODES", "")
    # An elastic job has a range there.
    number = "PET_NNODES" if pet_nnodes and ":" not in pet_nnodes else "WORLD_SIZE"
    nnodes = read_number(env, number, least=1)
    node_rank = read_index(env, nnodes, "RANK")
    evidence = f"pod {node_rank} of {nnodes} (RANK, {number})"
    port = read_number(env, "MASTER_PORT")
    # The first pod's MASTER_ADDR is localhost.
    coordinator = (here.hostname if address == "localhost" else address,)
    return replace(
        facts_of_node(
            "Kubeflow PyTorchJob",
            evidence,
            pod["job"],
            node_rank,
            nnodes,
            coordinator=coordinator,
            port=port,
        ),
        notes=("RANK and WORLD_SIZE, which are not those of processes here",),
    )


def detect_leader_worker_set(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a pod in a group of a LeaderWorkerSet.

    Source:
        LeaderWorkerSet's documentation, labels and environment variables.
    """
    env = here.env
    nnodes = read_number(env, "LWS_GROUP_SIZE", least=1)
    node_rank = read_index(env, nnodes, "LWS_WORKER_INDEX")
    leader = env.get("LWS_LEADER_ADDRESS")
    if nnodes is None or node_rank is None or not leader:
        are_set(env, "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")
        return None
    evidence = f"worker {node_rank} of {nnodes} (LWS_WORKER_INDEX)"
    return facts_of_node(
        "LeaderWorkerSet", evidence, leader, node_rank, nnodes, coordinator=(leader,)
    )


def detect_indexed_job(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a pod of an Indexed Job, by itself or in a JobSet.

    The number of pods is unknown.

    Source:
        Kubernetes, "Indexed Job"; JobSet, "DNS hostnames for pods".
    """
    env = here.env
    node_rank = read_number(env, "JOB_COMPLETION_INDEX")
    if node_rank is None:
        return None
    name, dot, domain = here.hostname.partition(".")
    job, dash, index = name.rpartition("-")
    jobset = env.get("JOBSET_NAME")
    coordinator: tuple[str, ...] = ()
    job_id = None
    if dash and index == str(node_rank):
        first = f"{job}-0"
        domains = [domain] if dot else [jobset] if jobset else []
        coordinator = (*(f"{first}.{each}" for each in domains), first)
        attempt = env.get("JOBSET_RESTART_ATTEMPT")
        job_id = f"{job}/{attempt}" if attempt else job
    system = "JobSet" if jobset else "Kubernetes Indexed Job"
    evidence = f"index {node_rank} (JOB_COMPLETION_INDEX)"
    return facts_of_node(system, evidence, job_id, node_rank, coordinator=coordinator)


_VOLCANO_LAUNCH = ("MASTER", "WORKER")
"""Tasks that together form one launch, in node order; any other task is a launch of its own."""


def detect_volcano(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a pod of a job.

    The pod's name shows its task; ``VC_TASK_INDEX`` is its index within the task.

    Source:
        Volcano's plug-ins: ``env`` for ``VC_TASK_INDEX``, ``svc`` for ``VC_<TASK>_HOSTS``,
        ``pytorch`` for which tasks form one launch.
    """
    env = here.env
    if read_number(env, "VC_TASK_INDEX") is None:
        return None
    tasks = {
        name.removeprefix("VC_").removesuffix("_HOSTS"): [*map(str.strip, env[name].split(","))]
        for name in env
        if name.startswith("VC_") and name.endswith("_HOSTS") and env[name]
    }
    own = first_label(here.hostname)
    task = next((task for task in tasks if place_of(own, tasks[task]) is not None), None)
    if task is None:
        return None
    index = place_of(own, tasks[task])
    if str(index) != env["VC_TASK_INDEX"]:
        raise invalid(env, "VC_TASK_INDEX", f"{index}, the place of {own} in VC_{task}_HOSTS")
    together = _VOLCANO_LAUNCH if task in _VOLCANO_LAUNCH else (task,)
    hosts = tuple(host for name in together for host in tasks.get(name, ()))
    node_rank, job_id = place_of(own, hosts), hosts[0]
    evidence = f"pod {index} of task {task.lower()} (VC_TASK_INDEX, VC_{task}_HOSTS)"
    return facts_of_node("Volcano", evidence, job_id, node_rank, hosts=hosts)


def detect_tpu(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a pod of a TPU slice.

    Source:
        GKE's documentation, "About TPUs in GKE", ``TPU_WORKER_ID`` and ``TPU_WORKER_HOSTNAMES``;
        "Multislice" for ``MEGASCALE_*``.
    """
    env = here.env
    if not are_set(env, "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"):
        return None
    names = env["TPU_WORKER_HOSTNAMES"].split(",")
    hosts = tuple(host for name in names if (host := name.strip().partition(":")[0]))
    if len(hosts) < len(names):
        raise invalid(env, "TPU_WORKER_HOSTNAMES", "names, separated by commas")
    worker = read_index(env, len(hosts), "TPU_WORKER_ID") or 0
    slices, own = read_number(env, "MEGASCALE_NUM_SLICES", least=1) or 1, 0
    coordinator = hosts[:1]
    if slices > 1:
        are_set(env, "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
        own = read_index(env, slices, "MEGASCALE_SLICE_ID") or 0
        coordinator = (env["MEGASCALE_COORDINATOR_ADDRESS"].partition(":")[0],)
    nnodes = len(hosts) * slices
    evidence = f"worker {worker} of {len(hosts)} (TPU_WORKER_ID)"
    node_rank, known = own * len(hosts) + worker, hosts if slices == 1 else ()
    return facts_of_node(
        "TPU slice",
        evidence,
        coordinator[0],
        node_rank,
        nnodes,
        hosts=known,
        coordinator=coordinator,
    )
