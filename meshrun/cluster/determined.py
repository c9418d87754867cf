"""Determined: the containers of a trial."""

from __future__ import annotations

import json

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings, facts_of_hosts
from meshrun.cluster.read_variables import index_in, names_in
from meshrun.errors import UsageError

_FILE = "/run/determined/info/rendezvous.json"


def detect_determined(here: Surroundings) -> ClusterFacts | None:
    """Return the facts of a container of a trial; ``None`` otherwise.

    Raises:
        UsageError: If the file of a trial is invalid.

    Source:
        determined's ``_info.py``, ``RendezvousInfo``: written before any user code runs.
    """
    env = here.env
    if env.get("DET_TASK_TYPE") != "TRIAL" or not env.get("DET_ALLOCATION_ID"):
        return None
    try:
        found = json.loads(here.read(_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(f"cannot be read: {error}") from None
    hosts = names_in(found.get("container_addrs")) if isinstance(found, dict) else ()
    node_rank = index_in(found.get("container_rank"), len(hosts)) if hosts else None
    if node_rank is None:
        raise _broken("does not say which container this is (container_addrs, container_rank)")
    job_id = env["DET_ALLOCATION_ID"]
    evidence = f"container {node_rank} of {len(hosts)} (DET_ALLOCATION_ID, {_FILE})"
    return facts_of_hosts("Determined", evidence, job_id, hosts, node_rank)


def _broken(why: str) -> UsageError:
    return UsageError(
        f"DET_TASK_TYPE is TRIAL, but {_FILE} {why}",
        hint="unset DET_TASK_TYPE outside a trial",
    )
