"""AWS Batch: the nodes of a multi-node parallel job."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.cluster.read_variables import are_set, read_index, read_number

_NUMBERS = tuple(f"AWS_BATCH_JOB_{name}" for name in ("NUM_NODES", "NODE_INDEX", "MAIN_NODE_INDEX"))
_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def detect_aws_batch(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a node of a multi-node parallel job; ``None`` otherwise.

    The main node is node 0, whatever its index; only the others get its address.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

    Source:
        AWS Batch's user guide, environment variables of multi-node parallel jobs.
    """
    env = here.env
    if not are_set(env, *_NUMBERS):
        return None
    nnodes = read_number(env, _NUMBERS[0], least=1) or 1
    index, main = (read_index(env, nnodes, name) or 0 for name in _NUMBERS[1:])
    if index != main and nnodes > 1:
        are_set(env, _NUMBERS[1], _ADDRESS)
    job_id = env.get("AWS_BATCH_JOB_ID", "").partition("#")[0]  # `ID#INDEX` on each node
    job_id = "/".join(filter(None, (job_id, env.get("AWS_BATCH_JOB_ATTEMPT")))) or "batch"
    address = env.get(_ADDRESS) if index != main else None
    return ClusterFacts(
        system="AWS Batch",
        evidence=f"node {index} of {nnodes} (AWS_BATCH_JOB_NODE_INDEX)",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=(index - main) % nnodes,
        head=(address,) if address else (),
        port=derive_port(job_id),
    )
