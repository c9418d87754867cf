"""PBS Professional, OpenPBS and Torque: the script or shell of a job."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings
from meshrun.cluster.job_shell import describe_shell
from meshrun.cluster.read_variables import read_number


def detect_pbs(here: Surroundings) -> ClusterFacts | None:
    """Return the hosts of a job; ``None`` outside one.

    Raises:
        UsageError: If a variable is invalid.

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
