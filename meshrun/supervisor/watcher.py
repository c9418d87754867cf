"""Observers of a launch that decide nothing: progress, event files, metrics, the live view."""

from __future__ import annotations

import time

from meshrun.host.reactor import Reactor
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event
from meshrun.protocol.rank_end import RankExited
from meshrun.protocol.result import LaunchResult, Timings
from meshrun.protocol.zygote_messages import RankJoined, RankReady, RankStarted, ZygoteReady


class Watcher:
    """Follows a launch; subclasses override what they need."""

    plan: LaunchPlan

    def begin(self, reactor: Reactor, state: State) -> None:
        """Prepare for a launch; the reactor makes periodic calls."""

    def on_event(self, event: Event, state: State) -> None:
        """Take an event and the state after it."""

    def update_plan(self, plan: LaunchPlan) -> None:
        """Take the plan, also the one that is complete once all nodes have joined."""
        self.plan = plan

    def end(self, state: State, result: LaunchResult) -> None:
        """Take the result of the launch, which has ended."""


class Stopwatch(Watcher):
    """Keeps the last time of each kind of event."""

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self._import_ns: int | None = None
        self._last: dict[type, int] = {}

    def on_event(self, event: Event, state: State) -> None:  # noqa: ARG002
        """Note the time of ``event``."""
        if isinstance(event, ZygoteReady):
            self._import_ns = event.import_ns
        if isinstance(event, ZygoteReady | RankStarted | RankJoined | RankReady | RankExited):
            self._last[type(event)] = max(event.at_ns, self._last.get(type(event), 0))

    def timings(self) -> Timings:
        """Return the times so far."""
        return Timings(
            began_ns=self._began_ns,
            import_ns=self._import_ns,
            zygote_ready_ns=self._last.get(ZygoteReady),
            last_started_ns=self._last.get(RankStarted),
            last_joined_ns=self._last.get(RankJoined),
            last_ready_ns=self._last.get(RankReady),
            last_exited_ns=self._last.get(RankExited),
            ended_ns=time.monotonic_ns(),
        )
