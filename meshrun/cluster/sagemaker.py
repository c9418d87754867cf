"""SageMaker: the containers of a training job."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, facts_of_hosts
from meshrun.cluster.read_variables import are_set, invalid, names_in, read_json


def detect_sagemaker(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a container of a training job; ``None`` otherwise.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

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
    return facts_of_hosts("SageMaker", evidence, job_id, hosts, node_rank)
