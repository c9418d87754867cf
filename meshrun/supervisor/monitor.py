"""Prints where ranks are: on request, when a start stalls, when no rank makes progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from meshrun.console.console import Console
from meshrun.host.reactor import Reactor
from meshrun.host.usage import cpu_seconds_of_trees
from meshrun.layout.labels import merged_label
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import GenerationAborted, Hung
from meshrun.supervisor.stack_requests import ZYGOTE, StackRequests
from meshrun.supervisor.watchdog import Watchdog


class Monitor:
    """The stacks of ranks, and the watchdog that may ask for them.

    Args:
        happen: Called with what ends the ranks, once people were shown where they are.
        zygote_pid: Returns the process that starts the ranks, asked while some are missing.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        console: Console,
        reactor: Reactor,
        *,
        happen: Callable[[Hung | GenerationAborted], None],
        zygote_pid: Callable[[], int],
    ) -> None:
        self._plan, self._console = plan, console
        self._happen, self._zygote_pid = happen, zygote_pid
        self._next_look = reactor.call_at(None, self._look)
        self.stacks = StackRequests(plan.layout, reactor, self._show)
        self.watchdog = Watchdog(
            start_timeout_s=plan.request.start_timeout_s,
            hang_timeout_s=plan.request.hang_timeout_s,
            cpu_seconds=cpu_seconds_of_trees,
        )
        reactor.on_skip(self.watchdog.skip)
        self._pids: dict[int, int] = {}
        self._then: Hung | GenerationAborted | None = None
        """What ends the ranks, once people were shown where they are."""

    def replan(self, plan: LaunchPlan) -> None:
        """The nodes have met: this is the plan now."""
        self._plan = plan
        self.stacks.replan(plan.layout)

    def begin(self) -> None:
        """A generation of ranks is started."""
        self._then = None
        self.watchdog.begin()

    def see(self, state: State) -> None:
        """Take the launch as it is now."""
        self._state = state
        self._next_look.move(self.watchdog.next_look_ns(state))

    def ask(self, why: str, *, then: Hung | GenerationAborted | None = None) -> None:
        """Ask every rank for its stacks; they are printed once all have answered.

        Args:
            why: For people.
            then: What is to happen after that.
        """
        ranks = self._state.ranks
        self._then = self._then or then
        self._pids = {
            rank: known.pid
            for rank, known in ranks.items()
            if known.pid is not None and known.exited is None
        }
        asked = dict(self._pids)
        if any(known.pid is None for known in ranks.values()):
            asked[ZYGOTE] = self._zygote_pid()
        self._console.note(why)
        self.stacks.ask(asked)

    def _look(self) -> None:
        if self.watchdog.stalls(self._state):
            self.ask(self._describe_stall(self._state))
        if self._then is None and (idle_s := self.watchdog.idle_s(self._state)) is not None:
            hung = Hung(idle_s=idle_s, at_ns=time.monotonic_ns())
            self.ask(f"no rank has made progress for {idle_s:.1f} s", then=hung)
        self.see(self._state)

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self._console.print_line(line.encode(errors="backslashreplace"), to_stderr=True)
        if self._pids:
            self.stacks.tell_native(self._pids.values())
            self._pids = {}
        if self._then is not None and not self.stacks.is_under_way:
            then, self._then = self._then, None
            self._happen(replace(then, at_ns=time.monotonic_ns()))

    def _describe_stall(self, state: State) -> str:
        took = f"still starting after {self._plan.request.start_timeout_s:g} s"
        unborn = sum(known.pid is None for known in state.ranks.values())
        if unborn == len(state.ranks):
            return f"{took}: torch is still being imported"
        behind = [rank for rank, known in state.ranks.items() if not known.joined]
        lacks = "have not joined the process group"
        if self._plan.layout.mesh is None or not behind:
            behind = [rank for rank, known in state.ranks.items() if not known.ready]
            lacks = "have not started the program"
        who = merged_label(self._plan.layout, behind)
        told = f"{took}: {len(behind)} of {len(state.ranks)} ranks {lacks}: {who}"
        if state.nodes is None:
            return told
        return f"{told}; check that no firewall blocks ports between the nodes"
