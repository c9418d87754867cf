"""What follows a launch and decides nothing: progress, event files, metrics, the live view."""

from __future__ import annotations

from meshrun.host.reactor import Reactor
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event
from meshrun.protocol.result import LaunchResult


class Watcher:
    """Follows a launch; what a subclass does not override is of no interest to it."""

    def begin(self, reactor: Reactor, state: State) -> None:
        """The launch begins; what is to be done now and then, the reactor calls."""

    def see(self, event: Event, state: State) -> None:
        """Take an event and the state after it."""

    def replan(self, plan: LaunchPlan) -> None:
        """Take the plan as it is known now; the nodes may have met."""

    def end(self, state: State, result: LaunchResult) -> None:
        """The launch has ended."""
