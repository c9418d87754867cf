"""Grid Engine: the script or shell of a parallel job."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings
from meshrun.cluster.job_shell import describe_shell


def detect_gridengine(here: Surroundings) -> ClusterFacts | None:
    """Return the hosts of a job in a parallel environment; ``None`` outside one.

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
