"""Platforms that start one process on each node: SageMaker, Vertex AI, SkyPilot, ..."""

from __future__ import annotations

import json
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
from meshrun.wording import count


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


_VERTEX_POOLS = ("workerpool0", "workerpool1")
"""The primary replica and the workers; the other pools are parameter servers or evaluators."""


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


_AZURE_COUNT = "AZUREML_NODE_COUNT"
_AZURE_OLD_ADDRESS = "AZ_BATCH_MASTER_NODE"


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


_BATCH_NUMBERS = tuple(
    f"AWS_BATCH_JOB_{name}" for name in ("NUM_NODES", "NODE_INDEX", "MAIN_NODE_INDEX")
)
_BATCH_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


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


_DETERMINED_FILE = "/run/determined/info/rendezvous.json"


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


_RUN_ON_RAY = "meshrun --submit ray --nnodes N ..."
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_RAY_EVIDENCE = {"RAY_RAYLET_PID": "a worker process", _RAY_JOB: "the entry point of a job"}


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
