"""Prints where ranks are, and in which collectives: on request, in a long start, in a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from meshrun.console.console import Console
from meshrun.host.reactor import Reactor
from meshrun.host.usage import cpu_seconds_of_trees
from meshrun.layout.labels import merged_label
from meshrun.lifecycle.hung_collectives import Finding, describe_peers, find_hung
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.collectives import (
    TIMES,
    WAITS,
    FromRecorder,
    RankCalled,
    RankTimes,
    RankWaits,
)
from meshrun.protocol.events import AllIdle, GenerationAborted, Hung, RankLate
from meshrun.protocol.generation import Trouble
from meshrun.protocol.raised import lost_connection, timed_out
from meshrun.protocol.rank_end import RankRaised
from meshrun.protocol.stacks import current_folder, user_place
from meshrun.supervisor.collective_requests import CollectiveRequests
from meshrun.supervisor.nccl_ras import NcclRas
from meshrun.supervisor.stack_requests import ZYGOTE, StackRequests
from meshrun.supervisor.watchdog import Watchdog
from meshrun.wording import count

if TYPE_CHECKING:
    from meshrun.supervisor.stragglers import Stragglers

_MOST_GROUPS = 6
_TIMED_OUT = "a collective timed out: showing where the other ranks are"
_WATCHDOG = "Watchdog caught collective operation timeout"
"""What torch prints before it ends a rank whose NCCL collective takes too long."""


class Monitor:
    """The stacks and collectives of ranks, and the watchdog that may ask for them.

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
        happen: Callable[[Hung | GenerationAborted | RankLate], None],
        zygote_pid: Callable[[], int],
    ) -> None:
        self._plan, self._console = plan, console
        self._happen, self._zygote_pid = happen, zygote_pid
        self._next_look = reactor.call_at(None, self._look)
        self.stacks = StackRequests(plan.layout, reactor, self._show)
        self.collectives = CollectiveRequests(reactor, self._conclude)
        self._nccl = NcclRas(reactor, self._conclude)
        self.stragglers: Stragglers | None = None
        if plan.request.straggler_time_s is not None:
            from meshrun.supervisor.stragglers import Stragglers  # it computes with statistics

            put = partial(self.collectives.put, TIMES)
            self.stragglers = Stragglers(plan, reactor, console.note, happen, put)
        self.watchdog = Watchdog(
            start_timeout_s=plan.request.start_timeout_s,
            hang_timeout_s=plan.request.hang_timeout_s,
            cpu_seconds=cpu_seconds_of_trees,
        )
        reactor.on_skip(self.watchdog.skip)
        self._pids: dict[int, int] = {}
        self._is_open = False
        """Whether it is still to be said in which collectives ranks are."""
        self._is_quiet = False
        """Whether that is said only if their calls contradict each other."""
        self.gave_up: int | None = None
        """The rank whose collective timed out first."""
        self._waiting: list[Callable[[], None]] = []
        self.why = ""
        """Who waits in which collective, of this generation, if ranks were asked."""
        self._then: Hung | GenerationAborted | None = None
        """What ends the ranks, once people were shown where they are."""

    def replan(self, plan: LaunchPlan) -> None:
        """The nodes have met: this is the plan now."""
        self._plan = plan
        self.stacks.replan(plan.layout)
        if self.stragglers is not None:
            self.stragglers.replan(plan)

    def begin(self) -> None:
        """A generation of ranks is started."""
        self._then, self._is_open, self.why, self.gave_up = None, False, "", None
        self._waiting.clear()
        self._pids = {}  # whoever was asked has exited
        self.collectives.begin()
        self.watchdog.begin()
        if self.stragglers is not None:
            self.stragglers.begin()

    def see(self, state: State) -> None:
        """Take the launch as it is now."""
        self._state = state
        self.collectives.expect_only(state.alive)
        if self.stragglers is not None:
            self.stragglers.see(state)
        self._next_look.move(self.watchdog.next_look_ns(state))

    def ask(
        self,
        why: str,
        *,
        then: Hung | GenerationAborted | None = None,
        without: int | None = None,
    ) -> None:
        """Ask every rank for its stacks; they are printed once all have answered.

        Args:
            why: For people.
            then: What is to happen after that.
            without: A rank that is not asked.
        """
        ranks = self._state.ranks
        self._then = self._then or then
        self._pids = {
            rank: known.pid
            for rank, known in ranks.items()
            if known.pid is not None and known.exited is None and rank != without
        }
        asked = dict(self._pids)
        if any(known.pid is None for known in ranks.values()):
            asked[ZYGOTE] = self._zygote_pid()
        self._console.note(why)
        self._is_open, self._is_quiet = True, False
        self.stacks.ask(asked)
        self.collectives.ask(self._pids)
        if self._plan.device_type == "cuda":
            self._nccl.ask()

    def hear(self, message: FromRecorder) -> None:
        """Take a rank's answer about its collectives."""
        if isinstance(message, RankWaits):
            self.watchdog.waits(message.rank, message.place)
        elif isinstance(message, RankTimes):
            if self.stragglers is not None:
                self.stragglers.hear(message)
        else:
            self.collectives.hear(message)

    def see_raised(self, event: RankRaised, *, was_stopping: bool) -> None:
        """Find out for which peer a rank waited that timed out, before the others are ended.

        A rank whose peer gave up a moment before may only see that its connection is lost.
        """
        is_late = timed_out(event.message, event.traceback)
        if was_stopping:  # what is known by now has to do
            if self.gave_up is not None and not self.why and is_late:
                self._is_open, self._is_quiet = True, False
                self._conclude()
            return
        if not self._state.alive - {event.rank} or self._is_open:
            return
        self.gave_up = event.rank
        if is_late:
            self.ask(_TIMED_OUT, without=event.rank)
        elif lost_connection(event):
            self._ask_quietly(event.rank)

    def see_aborted(self, rank: int, last_lines: Iterable[str]) -> None:
        """The same for a rank that native code has ended."""
        if not self._state.alive or self._is_open:
            return
        self.gave_up = rank
        if any(_WATCHDOG in line for line in last_lines):
            self.ask(_TIMED_OUT, without=rank)
        else:
            self._ask_quietly(rank)

    def _ask_quietly(self, failed: int) -> None:
        """Ask the others, and say something only if calls contradict each other."""
        self._is_open, self._is_quiet = True, True
        pids = {rank: self._state.ranks[rank].pid for rank in self._state.alive - {failed}}
        self.collectives.ask({rank: pid for rank, pid in pids.items() if pid}, soon=True)
        self._conclude()

    def once_known(self, call: Callable[[], None]) -> None:
        """Call once ranks have answered in which collectives they are; now if none is asked."""
        self._waiting.append(call)
        self._conclude()

    def close(self) -> None:
        """Let go of files and pipes."""
        self.stacks.close()
        self.collectives.close()
        self._nccl.close()

    def _look(self) -> None:
        if self.watchdog.stalls(self._state):
            self.ask(self._describe_stall(self._state))
        if self.watchdog.looks_at_waits(self._state):
            self.collectives.put(WAITS, self._state.alive)
        if self._then is None and (idle_s := self.watchdog.idle_s(self._state)) is not None:
            hung = Hung(idle_s=idle_s, at_ns=time.monotonic_ns())
            self.ask(f"no rank has made progress for {idle_s:.1f} s", then=hung)
        self.see(self._state)

    def _show(self, lines: list[str]) -> None:
        self._print(lines)
        if self._pids:
            self.stacks.tell_native(self._pids.values())
            self._pids = {}
        self._conclude()

    def _conclude(self) -> None:
        """Say in which collectives ranks are, and continue, once all is known."""
        if self._pids or self.collectives.is_under_way or self._nccl.is_under_way:
            return
        if self._is_open:
            self._is_open = False
            self._tell_collectives()
        while self._waiting:
            self._waiting.pop(0)()
        if self._then is not None and not self.stacks.is_under_way:
            then, self._then = self._then, None
            then = replace(then, why=self.why) if isinstance(then, Hung) else then
            self._happen(replace(then, at_ns=time.monotonic_ns()))

    def _tell_collectives(self) -> None:
        found = self._find(self.calls, self._state.ranks)
        if self._is_quiet:
            found = [finding for finding in found if not finding.severity]
        self.why = found[0].summary if found else ""
        self._tell_findings(found)
        if self._nccl.findings:
            self._console.note("NCCL reports:")
            self._print(f"    {line}" for line in self._nccl.findings)

    @property
    def calls(self) -> dict[int, RankCalled]:
        """What ranks of this node have reported of their collectives, with their places."""
        raised = {
            rank: user_place(known.raised.traceback, current_folder())
            for rank, known in self._state.ranks.items()
            if known.raised is not None
        }
        places = {**self.stacks.elsewhere, **raised, **self.stacks.places}
        return {
            rank: replace(told, place=places.get(rank, ""))
            for rank, told in self.collectives.called.items()
        }

    def describe_peers(self, rank: int, place: str) -> str:
        """Return what a peer of a rank has called; "" if that is not known."""
        return describe_peers(self.calls, self._plan.layout, rank, place)

    def explain_hang(self, state: State, idle: AllIdle) -> tuple[State, AllIdle]:
        """Say who waits for whom once all nodes have answered, if that is more than was known."""
        calls = {rank: told for each in idle.outcomes for rank, told in each.calls.items()}
        is_hung = state.hung is not None or any(each.is_hung for each in idle.outcomes)
        if not calls or not is_hung:
            return state, idle
        found = self._find({**self.calls, **calls}, range(self._plan.layout.world_size))
        if not found or found[0].summary == self.why:
            return state, idle
        self._tell_findings(found)
        why = found[0].summary
        hung = None if state.hung is None else replace(state.hung, why=why)
        outcomes = tuple(
            replace(each, trouble=_because(each.trouble, why))
            if each.is_hung and each.trouble
            else each
            for each in idle.outcomes
        )
        return replace(state, hung=hung), replace(idle, outcomes=outcomes)

    def _find(self, calls: Mapping[int, RankCalled], own: Container[int]) -> list[Finding]:
        places = {rank: told.place for rank, told in calls.items() if told.place}
        return find_hung(
            calls,
            self._plan.layout,
            {**self.stacks.elsewhere, **self.stacks.places, **places},
            own=own,
            why_silent=self.stacks.why_silent,
        )

    def _tell_findings(self, found: Sequence[Finding]) -> None:
        for finding in found[:_MOST_GROUPS]:
            self._console.note(finding.summary)
            self._print(f"    {line}" for line in finding.details)
        if more := found[_MOST_GROUPS:]:
            self._console.note(f"ranks wait in {count(len(more), 'other group')} too")

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print_line(line.encode(errors="backslashreplace"), to_stderr=True)

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


def _because(trouble: Trouble, why: str) -> Trouble:
    """Return the trouble of a hang with another reason."""
    return replace(trouble, message=f"{trouble.message.partition(': ')[0]}: {why}")
