"""TPU slices on GKE: the pods of one slice, or of several."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.cluster.read_variables import are_set, invalid, read_index, read_number


def detect_tpu(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a pod of a TPU slice; ``None`` otherwise.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

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
    head = hosts[:1]
    if slices > 1:
        are_set(env, "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
        own = read_index(env, slices, "MEGASCALE_SLICE_ID") or 0
        head = (env["MEGASCALE_COORDINATOR_ADDRESS"].partition(":")[0],)
    nnodes = len(hosts) * slices
    job_id = head[0]
    return ClusterFacts(
        system="TPU slice",
        evidence=f"worker {worker} of {len(hosts)} (TPU_WORKER_ID)",
        job_id=job_id,
        nnodes=nnodes,
        node_rank=own * len(hosts) + worker,
        hosts=hosts if slices == 1 else (),
        head=head,
        port=derive_port(job_id),
    )
