"""Observers of a launch that decide nothing: progress, event files, metrics, the live view."""

from __future__ import annotations

from meshrun.host.reactor import Reactor
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event
from meshrun.protocol.result import LaunchResult


class Watcher:
    """Follows a launch; subclasses override what they need."""

    plan: LaunchPlan

    def begin(self, reactor: Reactor, state: State) -> None:
        """Prepare for a launch; the reactor makes periodic calls."""

    def see(self, event: Event, state: State) -> None:
        """Take an event and the state after it."""

    def replan(self, plan: LaunchPlan) -> None:
        """Take the plan, also the one that is complete once the nodes have met."""
        self.plan = plan

    def end(self, state: State, result: LaunchResult) -> None:
        """Take the result of the launch, which has ended."""
