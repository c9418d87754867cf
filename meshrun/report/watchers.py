"""The watchers of a launch that options request."""

from __future__ import annotations

from meshrun.console.console import Console
from meshrun.plan.plan import LaunchPlan
from meshrun.supervisor.watcher import Watcher


def make_watchers(plan: LaunchPlan, run_id: str, console: Console) -> list[Watcher]:
    """Return the requested watchers, without importing the others.

    Raises:
        UsageError: If a plug-in or an address does not exist.
        HostError: If a file or a port cannot be opened.
    """
    request = plan.request
    found: list[Watcher] = []
    if request.event_log_handler != "null":
        from meshrun.report.elastic_events import make_elastic_events

        if (events := make_elastic_events(plan, run_id, console)) is not None:
            found.append(events)
    if request.events is not None:
        from meshrun.report.launch_events import open_event_log

        found.append(open_event_log(plan, run_id, request.events, console))
    if request.metrics is not None:
        from meshrun.report.metrics import Metrics

        found.append(Metrics(plan, request.metrics, console))
    if request.node_history is not None:
        from meshrun.report.node_history import NodeHistory

        found.append(NodeHistory(plan, run_id, request.node_history, console))
    if request.status:
        from meshrun.report.live_status import LiveStatus

        found.append(LiveStatus(plan, console))
    return found
