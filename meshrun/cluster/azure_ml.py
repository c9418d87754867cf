"""Azure Machine Learning: the nodes of a job, or a process per GPU on them."""

from __future__ import annotations

from collections.abc import Mapping

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, Task, derive_port
from meshrun.cluster.read_variables import are_set, invalid, read_index, read_number
from meshrun.cluster.tasks import place_task

_COUNT = "AZUREML_NODE_COUNT"
_OLD_ADDRESS = "AZ_BATCH_MASTER_NODE"


def detect_azure_ml(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a job; ``None`` otherwise.

    Many systems set ``NODE_RANK``, ``MASTER_ADDR`` and ``RANK``, but only Azure ML sets
    ``AZUREML_NODE_COUNT``.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

    Source:
        Azure Machine Learning's documentation, "Distributed GPU training guide"; Azure Batch's,
        "Compute node environment variables", for ``AZ_BATCH_MASTER_NODE``.
    """
    env = here.env
    nnodes = read_number(env, _COUNT, least=1)
    if nnodes is None:
        return None
    rank_name = "NODE_RANK" if env.get("NODE_RANK") else "AZ_BATCHAI_TASK_INDEX"
    address_name = "MASTER_ADDR" if env.get("MASTER_ADDR") else _OLD_ADDRESS
    if nnodes > 1:
        are_set(env, _COUNT, "NODE_RANK" if not env.get(rank_name) else rank_name)
        are_set(env, _COUNT, "MASTER_ADDR" if not env.get(address_name) else address_name)
    node_rank = read_index(env, nnodes, rank_name) or 0
    address = env.get(address_name, "").partition(":")[0]
    job_id = env.get("AZUREML_RUN_ID") or address or "azureml"
    task = _task(env, nnodes)
    port = read_number(env, "MASTER_PORT", least=1) if address_name == "MASTER_ADDR" else None
    return ClusterFacts(
        system="Azure ML",
        evidence=f"node {node_rank} of {nnodes} ({_COUNT}, {rank_name})",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=node_rank,
        head=(address,) if address else (),
        port=port or derive_port(job_id),
        task=task,
        one_a_node="process_count_per_instance: 1 in the job's distribution",
    )


def _task(env: Mapping[str, str], nnodes: int) -> Task | None:
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
