"""dstack: the nodes of a task."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.cluster.read_variables import are_set, invalid, read_index, read_number


def detect_dstack(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a task; ``None`` otherwise.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

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
        raise invalid(env, "DSTACK_NODES_IPS", f"{nnodes} addresses, to match DSTACK_NODES_NUM")
    if nnodes > 1:
        are_set(env, "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP")
    address = env.get("DSTACK_MASTER_NODE_IP")
    job_id = env.get("DSTACK_RUN_NAME") or address or "dstack"
    return ClusterFacts(
        system="dstack",
        evidence=f"node {node_rank} of {nnodes} (DSTACK_NODE_RANK)",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts,
        head=(address,) if address else (),
        port=derive_port(job_id),
    )
