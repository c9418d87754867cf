"""Vertex AI: the replicas of a custom training job."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, facts_of_hosts
from meshrun.cluster.read_variables import index_in, invalid, names_in, read_json

_PARTS = ("cluster", "task")
_POOLS = ("workerpool0", "workerpool1")
"""The primary replica and the workers; the other pools are parameter servers or evaluators."""


def detect_vertex(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a replica that trains; ``None`` otherwise.

    Raises:
        UsageError: If the variable is invalid.

    Source:
        Vertex AI's documentation, "Distributed training", format of ``CLUSTER_SPEC``.
    """
    env = here.env
    if "workerpool" not in env.get("CLUSTER_SPEC", ""):
        return None
    spec = read_json(env, "CLUSTER_SPEC")
    cluster, task = (spec.get(name) if isinstance(spec, dict) else None for name in _PARTS)
    if not (isinstance(cluster, dict) and isinstance(task, dict)):
        raise invalid(env, "CLUSTER_SPEC", "JSON with `cluster` and `task`")
    pools = [names_in(cluster.get(pool)) for pool in _POOLS]
    hosts = tuple(each.rpartition(":")[0] or each for pool in pools for each in pool)
    if task.get("type") not in _POOLS:
        return None
    pool = _POOLS.index(task["type"])
    index = index_in(task.get("index"), len(pools[pool]))
    if index is None:
        raise invalid(env, "CLUSTER_SPEC", "a task whose index is below the size of its pool")
    node_rank = len(pools[0]) * pool + index
    job_id = env.get("CLOUD_ML_JOB_ID") or hosts[0]
    evidence = f"replica {index} of {task['type']} (CLUSTER_SPEC)"
    return facts_of_hosts("Vertex AI", evidence, job_id, hosts, node_rank)
