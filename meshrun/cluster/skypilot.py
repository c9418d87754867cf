"""SkyPilot: the ``run`` commands of a task, one per node."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.cluster.read_variables import are_set, invalid, read_index, read_number


def detect_skypilot(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a SkyPilot task; ``None`` otherwise.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

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
        raise invalid(env, "SKYPILOT_NODE_IPS", f"{nnodes} addresses, to match SKYPILOT_NUM_NODES")
    job_id = env.get("SKYPILOT_TASK_ID") or None
    return ClusterFacts(
        system="SkyPilot",
        evidence=f"node {node_rank} of {nnodes} (SKYPILOT_NODE_RANK)",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts,
        head=hosts[:1],
        port=derive_port(job_id) if job_id else None,
    )
