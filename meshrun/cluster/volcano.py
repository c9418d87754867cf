"""Volcano: the pods of a job with the plug-ins ``svc`` and ``env``."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, facts_of_hosts
from meshrun.cluster.read_variables import invalid, read_number

_OF_ONE_LAUNCH = ("MASTER", "WORKER")
"""Tasks that together form one launch, in node order; any other task is a launch of its own."""


def detect_volcano(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a pod of a job; ``None`` otherwise.

    The pod's name shows its task; ``VC_TASK_INDEX`` is its index within the task.

    Raises:
        UsageError: If a variable is invalid.

    Source:
        Volcano's plug-ins: ``env`` for ``VC_TASK_INDEX``, ``svc`` for ``VC_<TASK>_HOSTS``,
        ``pytorch`` for which tasks form one launch.
    """
    env = here.env
    if read_number(env, "VC_TASK_INDEX") is None:
        return None
    own = here.hostname.partition(".")[0]
    tasks = {
        name.removeprefix("VC_").removesuffix("_HOSTS"): tuple(env[name].split(","))
        for name in env
        if name.startswith("VC_") and name.endswith("_HOSTS") and env[name]
    }
    task = next((task for task in tasks if own in map(_label, tasks[task])), None)
    if task is None:
        return None
    index = list(map(_label, tasks[task])).index(own)
    if str(index) != env["VC_TASK_INDEX"]:
        raise invalid(env, "VC_TASK_INDEX", f"{index}, the place of {own} in VC_{task}_HOSTS")
    together = _OF_ONE_LAUNCH if task in _OF_ONE_LAUNCH else (task,)
    hosts = tuple(host for name in together for host in tasks.get(name, ()))
    node_rank = list(map(_label, hosts)).index(own)
    job_id = hosts[0]
    evidence = f"pod {index} of task {task.lower()} (VC_TASK_INDEX, VC_{task}_HOSTS)"
    return facts_of_hosts("Volcano", evidence, job_id, hosts, node_rank)


def _label(host: str) -> str:
    return host.strip().partition(".")[0]
