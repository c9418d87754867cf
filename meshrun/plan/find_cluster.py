"""Detection of the scheduler, if any, that a launch runs under."""

from __future__ import annotations

from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import detect_here, is_rank, with_starter
from meshrun.plan.request import LaunchRequest


def find_cluster(
    request: LaunchRequest, *, is_child: bool = False
) -> tuple[ClusterFacts | None, bool]:
    """Return the scheduler's facts, and whether a launch here can start launchers on its nodes.

    In a rank there are none: its variables describe the launch that it belongs to.

    Args:
        request: What the user requested.
        is_child: Whether a caller of launch() waits for the result of this process.

    Raises:
        UsageError: If a variable of the scheduler cannot be parsed.
    """
    if is_rank() or request.remote is not None:
        return None, False
    knows_where = request.rendezvous.has_address or request.rendezvous.standalone
    found = detect_here(collective=not knows_where and request.nnodes != 1)
    return (found, False) if found is None or is_child else with_starter(found)
