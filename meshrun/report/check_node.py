"""Checks of this node that were requested, before ranks start."""

from __future__ import annotations

import os

from meshrun.errors import HostError
from meshrun.host.stderr import note
from meshrun.plan.plan import LaunchPlan


def check_gpus(plan: LaunchPlan) -> None:
    """Check the GPUs that ranks will use, if ``--check-gpus`` is given, and note what is wrong.

    Raises:
        HostError: If one fails the check.
    """
    if not plan.request.check_gpus:
        return
    from meshrun.supervisor.check_gpus import examine_gpus

    examine_gpus(plan, note)


def check_node(plan: LaunchPlan) -> None:
    """Check that this node is fit for ranks, as far as options request it.

    Raises:
        HostError: If a GPU fails the check.
        NodeExcludedError: If the node has failed too often.
    """
    request = plan.request
    path, most = request.node_history, request.max_node_failures
    if path is not None and most is not None:
        from meshrun.report.node_history import check_own_history

        check_own_history(path, most)
    try:
        check_gpus(plan)
    except HostError as error:
        if path is not None:
            from meshrun.host.exclusion import node_name
            from meshrun.report.node_history import record_failure

            run_id = request.rendezvous.run_id or ""
            record_failure(path, node_name(os.environ), run_id, error.message, note)
        raise
