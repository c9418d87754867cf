"""PBS Professional, OpenPBS and Torque: the script or shell of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrun.cluster.cluster_facts import ClusterFacts
from meshrun.cluster.job_shell import describe_shell
from meshrun.cluster.numbers import read_number


def detect_pbs(
    env: Mapping[str, str], hostname: str, read: Callable[[str], str]
) -> ClusterFacts | None:
    """Return the hosts of a job; ``None`` outside one.

    Raises:
        UsageError: If a variable is invalid.

    Source:
        qsub(1B): ``PBS_NODEFILE`` has a line for each process of a node, ``PBS_NODENUM`` is 0 in
        the script.
    """
    if not env.get("PBS_JOBID"):
        return None
    return describe_shell(
        "PBS",
        evidence=f"job {env['PBS_JOBID']} (PBS_JOBID)",
        job_id=env["PBS_JOBID"],
        path=env.get("PBS_NODEFILE"),
        read=read,
        hostname=hostname,
        node_rank=read_number(env, "PBS_NODENUM"),
    )
