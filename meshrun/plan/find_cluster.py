"""Finds out what scheduler, if any, a launch is part of."""

from __future__ import annotations

from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import detect_here, is_rank, with_starter
from meshrun.plan.request import LaunchRequest


def find_cluster(
    request: LaunchRequest, *, is_child: bool = False
) -> tuple[ClusterFacts | None, bool]:
    """Return the scheduler's facts, and whether a launch here can start launchers on its nodes.

    A rank's scheduler is not its own.

    Args:
        request: What the user said.
        is_child: Whether a caller of launch() waits for the answer of this one process.

    Raises:
        UsageError: If a variable of the scheduler is broken.
    """
    if is_rank() or request.remote is not None:
        return None, False
    asked = request.rendezvous
    says_where = bool(asked.endpoint or asked.master_addr or asked.standalone)
    found = detect_here(together=not says_where and request.nnodes != 1)
    return (found, False) if found is None or is_child else with_starter(found)
