"""Those that get every event of a launch, for programs: files, metrics, torch-elastic's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from meshrun.console.console import Console
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event
from meshrun.protocol.result import LaunchResult

if TYPE_CHECKING:
    from meshrun.supervisor.loop import Observer


class Watcher(Protocol):
    """Gets the events of a launch."""

    def __call__(self, event: Event, state: State, console: Console, /) -> None:
        """Take an event and the state after it."""

    def replan(self, plan: LaunchPlan) -> None:
        """Take the plan as it is known now; the nodes may have met."""

    def end(self, state: State, result: LaunchResult, /) -> None:
        """The launch has ended."""


def make_watchers(plan: LaunchPlan, run_id: str, console: Console) -> list[Watcher]:
    """Return those that the request asks for; what nobody asks for is not imported.

    Raises:
        UsageError: If a plug-in or an address does not exist.
        HostError: If a file or a port is not to be had.
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
        from meshrun.report.metrics import serve_metrics

        found.append(serve_metrics(plan, request.metrics, console))
    if request.node_history is not None:
        from meshrun.report.node_history import NodeHistory

        found.append(NodeHistory(plan, run_id, request.node_history, console))
    return found


def make_observers(
    plan: LaunchPlan, console: Console, watchers: Sequence[Watcher]
) -> list[Observer]:
    """Return those that look at the launch now and then, too."""
    from meshrun.supervisor.loop import Observer

    found: list[Observer] = [watcher for watcher in watchers if isinstance(watcher, Observer)]
    if plan.request.status:
        from meshrun.report.status_view import StatusView
        from meshrun.supervisor.live import Live

        found.append(Live(plan, console, StatusView))
    return found
