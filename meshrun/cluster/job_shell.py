"""LSF, PBS and Grid Engine: scripts and shells of an allocation whose hosts are listed."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from meshrun.cluster.cluster_facts import (
    ClusterFacts,
    Surroundings,
    facts_of_node,
    invalid,
    read_number,
    read_task,
)
from meshrun.host.host_names import place_of


def hosts_in(path: str | None, read: Callable[[str], str]) -> tuple[str, ...]:
    """Return the distinct first words of a file's lines; none if it cannot be read."""
    try:
        text = read(path) if path else ""
    except OSError:
        return ()
    return tuple(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def describe_shell(
    system: str,
    here: Surroundings,
    *,
    evidence: str,
    job_id: str,
    hosts: tuple[str, ...] = (),
    path: str | None = None,
    node_rank: int | None = None,
    starter: str = "ssh",
) -> ClusterFacts:
    """Return the facts of a shell in an allocation.

    Without ``hosts``, they are read from the file ``path``. ``node_rank`` is used if they do not
    contain this one. ``starter`` is the command that starts a process on a host.
    """
    hosts = hosts or hosts_in(path, here.read)
    why = "this is a script or shell of the job"
    if not hosts:
        why = (
            f"{path} cannot be read, or names no host" if path else "nothing names the job's hosts"
        )
    place = place_of(here.hostname, hosts)
    return ClusterFacts(  # noqa: S604 - starts nothing
        system=system,
        evidence=evidence,
        job_id=job_id,
        nnodes=len(hosts) or None,
        node_rank=place if place is not None else node_rank,
        hosts=hosts,
        notes=(why,),
        shell="meshrun --nnodes N ...",
        starter=starter,
    )


def detect_jsrun(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a task that ``jsrun`` started.

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
    evidence = f"task {task.rank} of {task.world_size} (JSM_NAMESPACE_RANK)"
    return replace(
        facts_of_node("jsrun", evidence, job_id or None, node_rank, nnodes, hosts=hosts),
        task=task,
        one_a_node="jsrun --rs_per_host 1 --tasks_per_rs 1 --cpu_per_rs ALL_CPUS"
        " --gpu_per_rs ALL_GPUS meshrun ...",
    )


def detect_lsf(here: Surroundings) -> ClusterFacts | None:
    """Return the hosts of a job.

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


def detect_pbs(here: Surroundings) -> ClusterFacts | None:
    """Return the hosts of a job.

    Source:
        qsub(1B): ``PBS_NODEFILE`` has a line for each process of a node, ``PBS_NODENUM`` is 0 in
        the script.
    """
    env = here.env
    if not env.get("PBS_JOBID"):
        return None
    return describe_shell(
        "PBS",
        here,
        evidence=f"job {env['PBS_JOBID']} (PBS_JOBID)",
        job_id=env["PBS_JOBID"],
        path=env.get("PBS_NODEFILE"),
        node_rank=read_number(env, "PBS_NODENUM"),
    )


def detect_gridengine(here: Surroundings) -> ClusterFacts | None:
    """Return the hosts of a job in a parallel environment.

    Source:
        sge_pe(5), ``PE_HOSTFILE``: lines that begin with a host, one per host and queue; qrsh(1),
        ``-inherit``.
    """
    env = here.env
    if not (env.get("PE_HOSTFILE") and env.get("JOB_ID")):
        return None
    return describe_shell(
        "Grid Engine",
        here,
        evidence=f"job {env['JOB_ID']} (JOB_ID, PE_HOSTFILE)",
        job_id=".".join(filter(None, (env["JOB_ID"], env.get("SGE_TASK_ID")))),
        path=env["PE_HOSTFILE"],
        starter="qrsh",
    )
