"""Ray: a worker process, or the entry point of a job; neither has variables about nodes."""

from __future__ import annotations

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings

_RUN = "meshrun --submit ray --nnodes N ..."
_OF_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_EVIDENCE = {"RAY_RAYLET_PID": "a worker process", _OF_A_JOB: "the entry point of a job"}


def detect_ray(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a Ray process, from which meshrun may start launchers.

    Source:
        Ray 2.60: ``worker_pool.cc`` for workers, ``job_supervisor.py`` for entry points.
    """
    env = here.env
    name = next((name for name in _EVIDENCE if env.get(name)), None)
    if name is None:
        return None
    return ClusterFacts(
        system="Ray",
        evidence=f"{_EVIDENCE[name]} ({name})",
        job_id=None,
        nnodes=None,
        node_rank=None,
        shell=_RUN,
    )
