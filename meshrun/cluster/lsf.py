"""LSF: the script or shell of a job, and the tasks of ``jsrun``."""

from __future__ import annotations

from dataclasses import replace

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, derive_port
from meshrun.cluster.job_shell import describe_shell, hosts_in, place_of
from meshrun.cluster.read_variables import invalid
from meshrun.cluster.tasks import read_task


def detect_jsrun(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a task that ``jsrun`` started; ``None`` otherwise.

    Raises:
        UsageError: If a variable is invalid, or only some are set.

    Source:
        IBM's Job Step Manager, ``JSM_NAMESPACE_*``; LSF's reference, ``LSB_DJOB_RANKFILE``, whose
        first line is the node that runs the script and no tasks.
    """
    env = here.env
    names = (f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    placed = read_task(env, *names)
    if placed is None:
        return None
    task, nnodes, node_rank = placed
    hosts = hosts_in(env.get("LSB_DJOB_RANKFILE"), here.read)[1:]
    place = place_of(here.hostname, hosts)
    if len(hosts) != nnodes or place is None:
        hosts = ()
    elif node_rank != place:
        node_rank, task = place, replace(task, in_blocks=False)
    job_id = ".".join(
        filter(None, (env.get("LSB_JOBID"), env.get("LSB_JOBINDEX"), env.get("PMIX_NAMESPACE")))
    )
    return ClusterFacts(
        system="jsrun",
        evidence=f"task {task.rank} of {task.world_size} (JSM_NAMESPACE_RANK)",
        job_id=job_id or None,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts,
        head=hosts[:1],
        port=derive_port(job_id) if job_id else None,
        task=task,
        one_a_node="jsrun --rs_per_host 1 --tasks_per_rs 1 --cpu_per_rs ALL_CPUS"
        " --gpu_per_rs ALL_GPUS meshrun ...",
    )


def detect_lsf(here: Surroundings) -> ClusterFacts | None:
    """Return the hosts of a job; ``None`` outside one.

    Raises:
        UsageError: If a variable is invalid.

    Source:
        LSF's reference: ``LSB_MCPU_HOSTS`` is ``host slots host slots ...``; blaunch(8).
    """
    env = here.env
    if not (env.get("LSB_JOBID") and env.get("LSB_MCPU_HOSTS")):
        return None
    words = env["LSB_MCPU_HOSTS"].split()
    if len(words) % 2 or not all(each.isdecimal() for each in words[1::2]):
        raise invalid(env, "LSB_MCPU_HOSTS", "hosts, each followed by a number")
    index = env.get("LSB_JOBINDEX", "")
    return describe_shell(
        "LSF",
        here,
        evidence=f"job {env['LSB_JOBID']} (LSB_JOBID, LSB_MCPU_HOSTS)",
        job_id=f"{env['LSB_JOBID']}.{index}" if index else env["LSB_JOBID"],
        hosts=tuple(dict.fromkeys(words[::2])),
        starter="blaunch",
    )
