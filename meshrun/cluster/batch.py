"""Slurm, LSF, PBS and Grid Engine: tasks of a step, and scripts or shells of an allocation.

Slurm's variables list nodes such as ``sl[1-3,7],gpu[01-10]``, and counts such as ``2,1(x2)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from typing import TypeVar

from msgspec.structs import replace

from meshrun.cluster.cluster_facts import (
    ClusterFacts,
    Surroundings,
    Task,
    facts_of_node,
    invalid,
    read_index,
    read_number,
    read_task,
)
from meshrun.errors import UsageError
from meshrun.host.host_names import place_of
from meshrun.wording import count

_MOST = 100_000
_WORD = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"[^\[\]]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_SPECIAL_STEPS = 0xFFFFFFF0
"""From here on, step ids are special: the batch script, the interactive shell, ..."""
_RUN = "srun --ntasks-per-node=1 meshrun ..."
_T = TypeVar("_T")


def detect_step(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a task that ``srun`` started; ``None`` otherwise.

    Source:
        srun(1), output environment variables; Slurm 22.05 for when each is set.
    """
    env = here.env
    if not env.get("SLURM_JOB_ID") or _why_no_task(here) is not None:
        return None
    hosts = _expanded(env, ("SLURM_STEP_NODELIST", "SLURM_NODELIST"), expand_hosts)
    counts = _expanded(env, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), expand_counts)
    nnodes = read_number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1)
    world_size = read_number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    rank = read_index(env, world_size, "SLURM_PROCID")
    node_rank = read_index(env, nnodes, "SLURM_NODEID")
    if not (hosts and counts and nnodes and world_size) or rank is None or node_rank is None:
        wanted = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES",
                  "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NODEID")  # fmt: skip
        missing = ", ".join(name for name in wanted if not env.get(name))
        given = "SLURM_STEP_ID" if env.get("SLURM_STEP_ID") else "SLURM_STEPID"
        raise UsageError(
            f"{given} is set without {missing}, so part of a Slurm step is missing",
            hint="`srun --export=ALL` passes on the variables that Slurm sets",
        )
    if len(counts) != nnodes or sum(counts) != world_size or len(hosts) != nnodes:
        raise UsageError(
            f"SLURM_STEP_NODELIST `{env.get('SLURM_STEP_NODELIST')}` and"
            f" SLURM_STEP_TASKS_PER_NODE `{env.get('SLURM_STEP_TASKS_PER_NODE')}` do not match"
            f" the step's {count(nnodes, 'node')} and {count(world_size, 'task')}"
        )
    hosts, counts = _in_node_order(env, hosts, counts)
    local_size = counts[node_rank]
    local_rank = read_index(env, local_size, "SLURM_LOCALID") or 0
    job, step = env["SLURM_JOB_ID"], _step(env)
    task = Task(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        per_node=counts,
        in_blocks=_in_blocks(env) and rank == sum(counts[:node_rank]) + local_rank,
    )
    evidence = f"step {step} of job {job} (SLURM_STEP_ID)"
    # The first node, with its address if `srun` ran there.
    is_first = env.get("SLURM_SUBMIT_HOST") == hosts[0]
    address = env.get("SLURM_LAUNCH_NODE_IPADDR") if is_first else None
    return replace(
        facts_of_node(
            "Slurm",
            evidence,
            f"{job}.{step}",
            node_rank,
            nnodes,
            hosts=hosts,
            coordinator=(hosts[0], address),
        ),
        domain=_domain(env),
        task=task,
        one_a_node=_RUN,
        more_cores="srun --cpus-per-task={workers} gives each worker a core",
        repeats_sigterm=True,
    )


def detect_shell(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a shell or batch script of a job that is not a task; else ``None``."""
    env = here.env
    job = env.get("SLURM_JOB_ID")
    why = _why_no_task(here) if job else None
    if why is None:
        return None
    components = _components(env)
    hosts = tuple(host for component in components for host in component)
    hosts = _expanded(env, ("SLURM_JOB_NODELIST", "SLURM_NODELIST"), expand_hosts) or hosts
    return ClusterFacts(
        system="Slurm",
        evidence=f"job {job} (SLURM_JOB_ID)",
        job_id=job,
        nnodes=read_number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES", least=1)
        or len(hosts)
        or None,
        node_rank=None,
        hosts=hosts,
        notes=(f"{why}, not a task",),
        step_starter="srun",
        repeats_sigterm=True,
        shell=_RUN
        if not components
        else _RUN.replace(" ", f" --het-group=0-{len(components) - 1} ", 1),
    )


def _components(env: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the nodes of each component of a heterogeneous job; an empty list in other jobs.

    Source:
        "Heterogeneous Job Support", environment variables; Slurm 22.05 for their contents.
    """
    found = []
    for number in range(read_number(env, "SLURM_HET_SIZE") or 0):
        nodes = _expanded(env, (f"SLURM_JOB_NODELIST_HET_GROUP_{number}",), expand_hosts)
        if nodes is None:
            break
        found.append(nodes)
    return found


def _in_node_order(
    env: Mapping[str, str], hosts: tuple[str, ...], counts: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a step's nodes, and the number of tasks on each, in the order of node ranks.

    A step of several components lists its nodes by name, but numbers them by component.
    """
    count_of = dict(zip(hosts, counts, strict=True))
    numbered = [host for nodes in _components(env) for host in nodes if host in count_of]
    if sorted(numbered) != sorted(hosts):
        return hosts, counts
    return tuple(numbered), tuple(count_of[host] for host in numbered)


def _why_no_task(here: Surroundings) -> str | None:
    """Return why a process of a job is not a task of a step, ``None`` if it is one."""
    env = here.env
    step = _step(env)
    if step is None:
        # A batch script has SLURM_PROCID 0, like a task.
        kind = "a batch script" if env.get("SLURM_PROCID") else "an salloc shell"
        seen = "SLURM_PROCID" if env.get("SLURM_PROCID") else "SLURM_JOB_ID"
        return f"{seen} without SLURM_STEP_ID: {kind}"
    if step >= _SPECIAL_STEPS:
        return f"SLURM_STEP_ID {step}: a batch script or an interactive shell"
    if env.get("SLURM_PTY_PORT") and here.terminal is not False:
        return "SLURM_PTY_PORT: a shell of `srun --pty`"
    if _is_left_from_another_job(env):
        return f"SLURM_STEP_ID {step} of another job: a batch script submitted by a task"
    return None


def _step(env: Mapping[str, str]) -> int | None:
    return read_number(env, "SLURM_STEP_ID", "SLURM_STEPID")


def _is_left_from_another_job(env: Mapping[str, str]) -> bool:
    """Return whether the step's variables contradict the job's.

    A job submitted by a task inherits its step's variables, but its script is not a task.
    """
    pairs = (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
    if any(
        env.get(step)
        and env.get(job)
        and read_number(env, step, least=1) != read_number(env, job, least=1)
        for step, job in pairs
    ):
        return True
    step_hosts = _expanded(env, ("SLURM_STEP_NODELIST",), expand_hosts)
    job_hosts = _expanded(env, ("SLURM_JOB_NODELIST",), expand_hosts)
    if step_hosts is None or job_hosts is None:
        return False
    return not set(step_hosts) <= set(job_hosts)


def _in_blocks(env: Mapping[str, str]) -> bool:
    """Return whether the ranks of this node's tasks are consecutive."""
    text = env.get("SLURM_GTIDS", "")
    numbers = [int(word) for word in text.split(",") if word.isascii() and word.isdecimal()]
    return numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True


def _domain(env: Mapping[str, str]) -> str:
    """Return the block of this node, or its leaf switch with the switches above it.

    Source:
        srun(1), ``SLURM_TOPOLOGY_ADDR``: names from the top level down to the node, joined by
        periods, and ``SLURM_TOPOLOGY_ADDR_PATTERN`` with the kind of each: ``switch.switch.node``
        of topology/tree, ``block.node`` of topology/block (``topology_p_get_node_addr`` there),
        only ``node`` without a topology.
    """
    address, pattern = (env.get(f"SLURM_TOPOLOGY_ADDR{end}", "") for end in ("", "_PATTERN"))
    *_, last = pattern.removesuffix(".node").split(".")
    above, _, node = address.rpartition(".")
    if (own := env.get("SLURMD_NODENAME")) and address.endswith(f".{own}"):
        above = address.removesuffix(f".{own}")  # a node's name may contain periods
    return above if last in ("switch", "block") and node else ""


def _expanded(
    env: Mapping[str, str], names: tuple[str, ...], expand: Callable[[str], _T]
) -> _T | None:
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return None
    try:
        return expand(env[name])
    except ValueError as error:
        raise invalid(env, name, f"a valid Slurm list ({error})") from None


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names of a node list, in order.

    Raises:
        ValueError: If it is not a node list, or has more than 100,000 names.

    Source:
        ``scontrol show hostnames``.
    """
    names: list[str] = []
    words = _WORD.findall(text)
    if not words or ",".join(words) != text:
        raise ValueError("not a node list")
    for word in words:
        parts = [
            list(_numbers(part[1:-1])) if part.startswith("[") else [part]
            for part in _PART.findall(word)
        ]
        if len(names) + prod(map(len, parts)) > _MOST:
            raise ValueError(f"more than {_MOST:,} nodes")
        names += map("".join, product(*parts))
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in which ``2(x3)`` stands for ``2,2,2``.

    Raises:
        ValueError: If it is not such a list, or has more than 100,000 numbers.

    Source:
        ``SLURM_TASKS_PER_NODE`` in sbatch(1).
    """
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        if match is None:
            raise ValueError("not a list of counts")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST:
            raise ValueError(f"more than {_MOST:,} nodes")
        counts += [int(match[1])] * times
    return tuple(counts)


def _numbers(text: str) -> Iterator[str]:
    """Yield the numbers of ``1-3,07``, each padded to the width of the first in its range."""
    for word in text.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise ValueError(f"`{word}` is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _MOST:
            raise ValueError(f"more than {_MOST:,} nodes")
        if int(last) < int(first):
            raise ValueError(f"range `{word}` is reversed")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


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
