"""Systems that start one process on each node: SageMaker, SkyPilot, ..., and Kubernetes' pods."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from msgspec.structs import replace

from meshrun.cluster.cluster_facts import (
    ClusterFacts,
    Surroundings,
    Task,
    are_set,
    facts_of_node,
    index_in,
    invalid,
    names_in,
    place_task,
    read_index,
    read_json,
    read_number,
)
from meshrun.errors import UsageError
from meshrun.host.host_names import first_label, place_of
from meshrun.wording import count

_VERTEX_POOLS = ("workerpool0", "workerpool1")
"""The primary replica and the workers; the other pools are parameter servers or evaluators."""
_AZURE_COUNT = "AZUREML_NODE_COUNT"
_AZURE_OLD_ADDRESS = "AZ_BATCH_MASTER_NODE"
_BATCH_NUMBERS = tuple(
    f"AWS_BATCH_JOB_{name}" for name in ("NUM_NODES", "NODE_INDEX", "MAIN_NODE_INDEX")
)
_BATCH_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_DETERMINED_FILE = "/run/determined/info/rendezvous.json"
_RUN_ON_RAY = "meshrun --submit ray --nnodes N ..."
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_RAY_EVIDENCE = {"RAY_RAYLET_PID": "a worker process", _RAY_JOB: "the entry point of a job"}
_TRAINER = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR",
            "PET_MASTER_PORT")  # fmt: skip
_PYTORCH_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_POD_OF_PYTORCH_JOB = re.compile(r"(?P<job>.+)-(?:master|worker)-\d+")
_VOLCANO_LAUNCH = ("MASTER", "WORKER")
"""Tasks that together form one launch, in node order; any other task is a launch of its own."""


def detect_sagemaker(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a container of a training job.

    Source:
        sagemaker-training-toolkit, ``ENVIRONMENT_VARIABLES.md``; SageMaker's documentation for
        ``TRAINING_JOB_NAME``.
    """
    env = here.env
    if not are_set(env, "SM_HOSTS", "SM_CURRENT_HOST"):
        return None
    hosts = names_in(read_json(env, "SM_HOSTS"))
    if not hosts or len({*hosts}) < len(hosts):
        raise invalid(env, "SM_HOSTS", "a list of different hosts")
    if env["SM_CURRENT_HOST"] not in hosts:
        raise invalid(env, "SM_CURRENT_HOST", f"one of SM_HOSTS, {', '.join(hosts[:8])}")
    node_rank = hosts.index(env["SM_CURRENT_HOST"])
    job_id = env.get("TRAINING_JOB_NAME") or ",".join(hosts)
    evidence = f"host {node_rank} of {len(hosts)} (SM_CURRENT_HOST)"
    return facts_of_node("SageMaker", evidence, job_id, node_rank, hosts=hosts)


def detect_vertex(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a replica that trains.

    Source:
        Vertex AI's documentation, "Distributed training", format of ``CLUSTER_SPEC``.
    """
    env = here.env
    if "workerpool" not in env.get("CLUSTER_SPEC", ""):
        return None
    spec = read_json(env, "CLUSTER_SPEC")
    cluster, task = (
        spec.get(name) if isinstance(spec, dict) else None for name in ("cluster", "task")
    )
    if not (isinstance(cluster, dict) and isinstance(task, dict)):
        raise invalid(env, "CLUSTER_SPEC", "JSON with `cluster` and `task`")
    pools = [names_in(cluster.get(pool)) for pool in _VERTEX_POOLS]
    hosts = tuple(each.rpartition(":")[0] or each for pool in pools for each in pool)
    if task.get("type") not in _VERTEX_POOLS:
        return None
    pool = _VERTEX_POOLS.index(task["type"])
    index = index_in(task.get("index"), len(pools[pool]))
    if index is None:
        raise invalid(env, "CLUSTER_SPEC", "a task whose index is below the size of its pool")
    node_rank = len(pools[0]) * pool + index
    job_id = env.get("CLOUD_ML_JOB_ID") or hosts[0]
    evidence = f"replica {index} of {task['type']} (CLUSTER_SPEC)"
    return facts_of_node("Vertex AI", evidence, job_id, node_rank, hosts=hosts)


def detect_azure_ml(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a job.

    Many systems set ``NODE_RANK``, ``MASTER_ADDR`` and ``RANK``, but only Azure ML sets
    ``AZUREML_NODE_COUNT``.

    Source:
        Azure Machine Learning's documentation, "Distributed GPU training guide"; Azure Batch's,
        "Compute node environment variables", for ``AZ_BATCH_MASTER_NODE``.
    """
    env = here.env
    nnodes = read_number(env, _AZURE_COUNT, least=1)
    if nnodes is None:
        return None
    rank_name = "NODE_RANK" if env.get("NODE_RANK") else "AZ_BATCHAI_TASK_INDEX"
    address_name = "MASTER_ADDR" if env.get("MASTER_ADDR") else _AZURE_OLD_ADDRESS
    if nnodes > 1:
        are_set(env, _AZURE_COUNT, "NODE_RANK" if not env.get(rank_name) else rank_name)
        are_set(env, _AZURE_COUNT, "MASTER_ADDR" if not env.get(address_name) else address_name)
    node_rank = read_index(env, nnodes, rank_name) or 0
    address = env.get(address_name, "").partition(":")[0]
    job_id = env.get("AZUREML_RUN_ID") or address or "azureml"
    task = _azure_task(env, nnodes)
    port = read_number(env, "MASTER_PORT", least=1) if address_name == "MASTER_ADDR" else None
    evidence = f"node {node_rank} of {nnodes} ({_AZURE_COUNT}, {rank_name})"
    return replace(
        facts_of_node(
            "Azure ML", evidence, job_id, node_rank, nnodes, coordinator=(address,), port=port
        ),
        task=task,
        one_a_node="process_count_per_instance: 1 in the job's distribution",
    )


def _azure_task(env: Mapping[str, str], nnodes: int) -> Task | None:
    """Return the task of this process if the job's distribution starts several per node."""
    size = read_number(env, "WORLD_SIZE", least=1)
    if size is None or size <= nnodes or not env.get("RANK") or not env.get("LOCAL_RANK"):
        return None
    if size % nnodes:
        raise invalid(env, "WORLD_SIZE", f"a multiple of the {nnodes} nodes")
    local_size = size // nnodes
    rank = read_index(env, size, "RANK") or 0
    local_rank = read_index(env, local_size, "LOCAL_RANK") or 0
    return place_task(rank, local_rank, size, local_size, nnodes=nnodes).task


def detect_aws_batch(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a multi-node parallel job.

    The main node is node 0, whatever its index; only the others get its address.

    Source:
        AWS Batch's user guide, environment variables of multi-node parallel jobs.
    """
    env = here.env
    if not are_set(env, *_BATCH_NUMBERS):
        return None
    nnodes = read_number(env, _BATCH_NUMBERS[0], least=1) or 1
    index, main = (read_index(env, nnodes, name) or 0 for name in _BATCH_NUMBERS[1:])
    if index != main and nnodes > 1:
        are_set(env, _BATCH_NUMBERS[1], _BATCH_ADDRESS)
    job_id = env.get("AWS_BATCH_JOB_ID", "").partition("#")[0]  # `ID#INDEX` on each node
    job_id = "/".join(filter(None, (job_id, env.get("AWS_BATCH_JOB_ATTEMPT")))) or "batch"
    address = env.get(_BATCH_ADDRESS) if index != main else None
    evidence = f"node {index} of {nnodes} (AWS_BATCH_JOB_NODE_INDEX)"
    node_rank = (index - main) % nnodes
    return facts_of_node("AWS Batch", evidence, job_id, node_rank, nnodes, coordinator=(address,))


def detect_skypilot(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a SkyPilot task.

    Source:
        SkyPilot's documentation, "Environment Variables and Secrets".
    """
    env = here.env
    hosts = tuple(env.get("SKYPILOT_NODE_IPS", "").split())
    nnodes = read_number(env, "SKYPILOT_NUM_NODES", least=1) or len(hosts) or None
    node_rank = read_index(env, nnodes, "SKYPILOT_NODE_RANK")
    if node_rank is None or nnodes is None:
        are_set(env, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
        return None
    if hosts and len(hosts) != nnodes:
        raise invalid(
            env, "SKYPILOT_NODE_IPS", f"{count(nnodes, 'address')}, to match SKYPILOT_NUM_NODES"
        )
    job_id = env.get("SKYPILOT_TASK_ID") or None
    evidence = f"node {node_rank} of {nnodes} (SKYPILOT_NODE_RANK)"
    return facts_of_node("SkyPilot", evidence, job_id, node_rank, nnodes, hosts=hosts)


def detect_dstack(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a task.

    Source:
        dstack's documentation, "System environment variables", and its runner.
    """
    env = here.env
    if not are_set(env, "DSTACK_NODE_RANK", "DSTACK_NODES_NUM"):
        return None
    nnodes = read_number(env, "DSTACK_NODES_NUM", least=1) or 1
    node_rank = read_index(env, nnodes, "DSTACK_NODE_RANK") or 0
    hosts = tuple(env.get("DSTACK_NODES_IPS", "").split())
    if hosts and len(hosts) != nnodes:
        raise invalid(
            env, "DSTACK_NODES_IPS", f"{count(nnodes, 'address')}, to match DSTACK_NODES_NUM"
        )
    if nnodes > 1:
        are_set(env, "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP")
    address = env.get("DSTACK_MASTER_NODE_IP")
    job_id = env.get("DSTACK_RUN_NAME") or address or "dstack"
    evidence, coordinator = f"node {node_rank} of {nnodes} (DSTACK_NODE_RANK)", (address,)
    return facts_of_node(
        "dstack", evidence, job_id, node_rank, nnodes, hosts=hosts, coordinator=coordinator
    )


def detect_determined(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a container of a trial.

    Source:
        determined's ``_info.py``, ``RendezvousInfo``: written before any user code runs.
    """
    env = here.env
    if env.get("DET_TASK_TYPE") != "TRIAL" or not env.get("DET_ALLOCATION_ID"):
        return None
    try:
        found = json.loads(here.read(_DETERMINED_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise _bad_trial(f"cannot be read: {error}") from None
    hosts = names_in(found.get("container_addrs")) if isinstance(found, dict) else ()
    node_rank = index_in(found.get("container_rank"), len(hosts)) if hosts else None
    if node_rank is None:
        raise _bad_trial("does not say which container this is (container_addrs, container_rank)")
    job_id = env["DET_ALLOCATION_ID"]
    evidence = f"container {node_rank} of {len(hosts)} (DET_ALLOCATION_ID, {_DETERMINED_FILE})"
    return facts_of_node("Determined", evidence, job_id, node_rank, hosts=hosts)


def _bad_trial(why: str) -> UsageError:
    return UsageError(
        f"DET_TASK_TYPE is TRIAL, but {_DETERMINED_FILE} {why}",
        hint="unset DET_TASK_TYPE outside a trial",
    )


def detect_ray(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a Ray process, from which meshrun may start launchers.

    Source:
        Ray 2.60: ``worker_pool.cc`` for workers, ``job_supervisor.py`` for entry points.
    """
    env = here.env
    name = next((name for name in _RAY_EVIDENCE if env.get(name)), None)
    if name is None:
        return None
    evidence = f"{_RAY_EVIDENCE[name]} ({name})"
    return replace(facts_of_node("Ray", evidence, None, None), shell=_RUN_ON_RAY)


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
