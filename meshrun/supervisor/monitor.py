"""Prints where ranks are, and in which collectives: on request, in a slow start, in a hang."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import IntEnum, auto
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshrun.console.console import Console
from meshrun.host.process_state import cpu_seconds_of_trees
from meshrun.host.reactor import Reactor
from meshrun.layout.labels import merged_label
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol import collectives, rank_end
from meshrun.protocol.events import AllCleared, Event, GenerationAborted, Hung, RankLate
from meshrun.protocol.generation import NodeOutcome
from meshrun.protocol.stacks import current_folder, user_place
from meshrun.supervisor.hung_collectives import HungGroup, describe_elsewhere, find_hung
from meshrun.supervisor.nccl_ras import NcclRas
from meshrun.supervisor.rank_requests import CollectiveRequests, RankPipes
from meshrun.supervisor.stack_requests import ZYGOTE, StackRequests
from meshrun.supervisor.watchdog import Watchdog
from meshrun.supervisor.watcher import Watcher
from meshrun.wording import count

if TYPE_CHECKING:
    from meshrun.supervisor.stragglers import Stragglers

_MOST_GROUPS = 6
_TIMED_OUT = "a collective timed out: showing where the other ranks are"


class _Explain(IntEnum):
    """How much to print about the collectives in which ranks are, once they have answered."""

    NOTHING = 0
    CONFLICTS = auto()
    """Only calls that contradict each other."""
    ALL = auto()


class Monitor(Watcher):
    """Requests the stacks and collectives of ranks, also when the watchdog finds a problem.

    Args:
        emit: Called with the event that ends the ranks, after their places have been printed.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        console: Console,
        reactor: Reactor,
        *,
        emit: Callable[[Hung | GenerationAborted | RankLate], None],
    ) -> None:
        self.plan, self._console, self._emit = plan, console, emit
        self.zygote_pid = 0
        """The process that starts the ranks, which is asked while ranks are missing."""
        self._reactor = reactor
        self._next_check = reactor.call_at(None, self._check)
        self.pipes = RankPipes()
        self.stacks = StackRequests(plan.layout, reactor, self.pipes, self._show)
        self.collectives = CollectiveRequests(reactor, self.pipes, self._conclude)
        self._nccl = NcclRas(reactor, self._conclude)
        self.stragglers: Stragglers | None = None
        if plan.request.straggler_time_s is not None:
            from meshrun.supervisor.stragglers import Stragglers  # it computes with statistics

            send = partial(self.pipes.send, collectives.TIMES)
            self.stragglers = Stragglers(plan, reactor, console.note, emit, send)
        self.watchdog = Watchdog(
            start_timeout_s=plan.request.start_timeout_s,
            hang_timeout_s=plan.request.hang_timeout_s,
            now_ns=reactor.now_ns,
            cpu_seconds=cpu_seconds_of_trees,
            is_held_up=lambda: console.is_full or console.is_read(),
        )
        reactor.on_skip(self.watchdog.skip)
        self._to_explain = _Explain.NOTHING
        self._explained = _Explain.NOTHING
        """What a failure in this generation was a reason to ask."""
        self._after_answers: list[Callable[[], None]] = []
        self.why = ""
        """Who waits in which collective in this generation, if ranks were asked."""
        self._then: Hung | GenerationAborted | None = None
        """The event that ends the ranks, to emit after their places have been printed."""

    def update_plan(self, plan: LaunchPlan) -> None:
        """Take the plan that is complete once all nodes have joined."""
        super().update_plan(plan)
        self.stacks.update_layout(plan.layout)
        if self.stragglers is not None:
            self.stragglers.plan = plan

    def begin(self, reactor: Reactor, state: State) -> None:  # noqa: ARG002
        """Take the state at the start."""
        self.update(state)

    def begin_generation(self) -> None:
        """Prepare for a new generation of ranks."""
        self._then, self._to_explain = None, _Explain.NOTHING
        self.why, self._explained = "", _Explain.NOTHING
        self._after_answers.clear()
        self.pipes.begin()
        self.collectives.begin()
        self.watchdog.begin()
        if self.stragglers is not None:
            self.stragglers.begin()

    def update(self, state: State) -> None:
        """Take the current state of the launch."""
        self._state = state
        self.collectives.expect_only(state.alive)
        if self.stragglers is not None:
            self.stragglers.update(state)
        is_reporting = self._then is not None
        self._next_check.move(None if is_reporting else self.watchdog.next_check_ns(state))

    def ask(
        self,
        why: str,
        *,
        then: Hung | GenerationAborted | None = None,
        pids: Mapping[int, int] | None = None,
    ) -> None:
        """Print ``why``, print the ranks' stacks once all have answered, and then emit ``then``.

        ``pids`` are the processes of the ranks to ask; all by default.
        """
        self._then = self._then or then
        pids = self._state.alive if pids is None else pids
        is_starting = any(rank_state.pid is None for rank_state in self._state.ranks.values())
        self._console.note(why)
        self._to_explain = _Explain.ALL
        self.stacks.ask({**pids, ZYGOTE: self.zygote_pid} if is_starting else pids)
        self.collectives.ask(pids)
        if self.plan.device_type == "cuda":
            self._nccl.ask()

    def receive(self, message: collectives.RankAnswer) -> None:
        """Take a message of a rank's answering thread."""
        match message:
            case collectives.RankListens():
                self.pipes.receive(message)
            case collectives.RankWaits(rank=rank, place=place):
                self.watchdog.record_wait(rank, place)
            case collectives.RankCalled():
                self.collectives.receive(message)
            case collectives.RankTimes() if self.stragglers is not None:
                self.stragglers.receive(message)

    def on_event(self, event: Event, state: State) -> None:
        """Find out which peer a failed rank waited for, before the others are ended."""
        was_stopping = self._state.stopping
        if isinstance(event, rank_end.RankRaised):
            self.update(state)
            self.stacks.drop(event.rank)
            self._on_raised(event, was_stopping=was_stopping)
        elif isinstance(event, rank_end.RankExited) and event.aborted and not was_stopping:
            self.update(state)
            self._explain(is_late=rank_end.aborted_for_timeout(event.error))

    def _on_raised(self, event: rank_end.RankRaised, *, was_stopping: bool) -> None:
        """Explain a timeout, or a lost connection: the peer may have timed out a moment before."""
        is_late = rank_end.timed_out(event.message, event.traceback)
        if not was_stopping:
            if is_late or rank_end.lost_connection(event):
                self._explain(is_late=is_late)
        elif self._explained and not self.why and is_late:  # too late to ask
            self._to_explain = _Explain.ALL
            self._conclude()

    def _explain(self, *, is_late: bool) -> None:
        """Ask the other ranks; unless one was late, print only calls that contradict each other."""
        ranks, wanted = self._state.ranks, _Explain.ALL if is_late else _Explain.CONFLICTS
        others = {rank: pid for rank, pid in self._state.alive.items() if not ranks[rank].raised}
        if not others or wanted <= self._explained or self._to_explain is _Explain.ALL:
            return
        self._explained = wanted
        if is_late:
            self.ask(_TIMED_OUT, pids=others)
        else:
            self._to_explain = wanted
            self.collectives.ask(others, soon=True)
            self._conclude()

    def after_answers(self, call: Callable[[], None]) -> None:
        """Call ``call`` once ranks have answered; now if none was asked."""
        self._after_answers.append(call)
        self._conclude()

    def close(self) -> None:
        """Close all files and pipes."""
        self.stacks.close()
        self.pipes.close()
        self._nccl.close()

    def _check(self) -> None:
        if self.watchdog.must_report_stall(self._state):
            self.ask(self._describe_stall(self._state))
        if self.watchdog.must_ask_waits(self._state):
            self.pipes.send(collectives.WAITS, self._state.alive)
        if self._then is None and (idle_s := self.watchdog.hung_for_s(self._state)) is not None:
            hung = Hung(idle_s=idle_s, at_ns=self._reactor.now_ns())
            self.ask(f"no rank has made progress for {idle_s:.1f} s", then=hung)
        self.update(self._state)

    def _show(self, lines: list[str]) -> None:
        self._print(lines)
        self._conclude()

    def _conclude(self) -> None:
        """Once all answers are there, print the collectives and continue."""
        asked = self.collectives.is_under_way or self._nccl.is_under_way
        if self.stacks.awaits_answers or asked:
            return
        if self._to_explain is not _Explain.NOTHING:
            self._print_collectives(only_conflicts=self._to_explain is _Explain.CONFLICTS)
            self._to_explain = _Explain.NOTHING
        while self._after_answers:
            self._after_answers.pop(0)()
        if self._then is not None and not self.stacks.is_under_way:
            then, self._then = self._then, None
            then = replace(then, why=self.why) if isinstance(then, Hung) else then
            self._emit(replace(then, at_ns=self._reactor.now_ns()))

    def _print_collectives(self, *, only_conflicts: bool) -> None:
        found = self._find(self.calls, self._state.ranks)
        if only_conflicts:
            found = [finding for finding in found if not finding.severity]
        self.why = found[0].summary if found else ""
        if not (found or only_conflicts) and (raised := self._places_raised()):
            places = {**self.stacks.elsewhere, **self.stacks.places}
            self.why = describe_elsewhere(next(iter(raised.values())), places)
        self._print_findings(found)
        if self._nccl.findings:
            self._console.note("NCCL reports:")
            self._print(f"    {line}" for line in self._nccl.findings)

    def _places_raised(self) -> dict[int, str]:
        """Return where ranks of this node raised, the first one first."""
        raised = [
            rank_state.raised
            for rank_state in self._state.ranks.values()
            if rank_state.raised is not None
        ]
        raised.sort(key=lambda event: event.at_ns)
        return {event.rank: user_place(event.traceback, current_folder()) for event in raised}

    @property
    def calls(self) -> dict[int, collectives.RankCalled]:
        """The collectives that ranks of this node have reported, with the ranks' places."""
        places = {**self.stacks.elsewhere, **self._places_raised(), **self.stacks.places}
        return {
            rank: replace(answer, place=places.get(rank, ""))
            for rank, answer in self.collectives.called.items()
        }

    def explain_wait(self, state: State, cleared: AllCleared) -> AllCleared:
        """Print who waits for whom once all nodes have answered, unless it has been printed."""
        calls = {rank: answer for each in cleared.outcomes for rank, answer in each.calls.items()}
        failed = [state.ranks, *(each.ranks for each in cleared.outcomes)]
        is_late = any(rank_state.has_timed_out for ranks in failed for rank_state in ranks.values())
        is_hung = state.hung is not None or any(each.is_hung for each in cleared.outcomes)
        if not calls or not (is_hung or is_late):
            return cleared
        # In a hang, all ranks were asked.
        own = range(self.plan.layout.world_size) if is_hung else {*state.ranks, *calls}
        found = self._find({**self.calls, **calls}, own)
        if not found or found[0].summary == self.why:
            return cleared
        self._print_findings(found)
        self.why = why = found[0].summary
        outcomes = tuple(_with_reason(each, why) for each in cleared.outcomes)
        return replace(cleared, outcomes=outcomes, why_hung=why)

    def _find(
        self, calls: Mapping[int, collectives.RankCalled], own: Container[int]
    ) -> list[HungGroup]:
        places = {rank: answer.place for rank, answer in calls.items() if answer.place}
        gone = {
            rank: _describe_gone(rank_state.exited)
            for rank, rank_state in self._state.ranks.items()
            if rank_state.exited is not None
        }
        return find_hung(
            calls,
            self.plan.layout,
            {**self.stacks.elsewhere, **self.stacks.places, **places},
            own=own,
            why_silent={**self.stacks.why_silent, **gone},
        )

    def _print_findings(self, found: Sequence[HungGroup]) -> None:
        for finding in found[:_MOST_GROUPS]:
            self._console.note(finding.summary)
            self._print(f"    {line}" for line in finding.details)
        if more := found[_MOST_GROUPS:]:
            self._console.note(f"ranks wait in {count(len(more), 'other group')} too")

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print_line(line.encode(errors="backslashreplace"), to_stderr=True)

    def _describe_stall(self, state: State) -> str:
        took = f"still starting after {self.plan.request.start_timeout_s:g} s"
        unstarted = sum(rank_state.pid is None for rank_state in state.ranks.values())
        if unstarted == len(state.ranks):
            return f"{took}: torch is still being imported"
        behind = [rank for rank, rank_state in state.ranks.items() if not rank_state.joined]
        lacks = "not joined the process group"
        if self.plan.layout.mesh is None or not behind:
            behind = [rank for rank, rank_state in state.ranks.items() if not rank_state.ready]
            lacks = "not started the program"
        who = merged_label(self.plan.layout, behind)
        has = "has" if len(behind) == 1 else "have"
        some = f"{len(behind)} of {count(len(state.ranks), 'rank')}"
        text = f"{took}: {some} {has} {lacks}: {who}"
        if state.nodes.is_alone:
            return text
        return f"{text}; check that no firewall blocks ports between the nodes"


def _describe_gone(event: rank_end.RankExited) -> str:
    """Return why a rank that has exited is not in the collective in which others still wait."""
    if not event.wait_status:
        return "has exited with code 0"  # which NCCL does not notice on the same machine
    return "has timed out" if rank_end.aborted_for_timeout(event.error) else "has failed"


def _with_reason(outcome: NodeOutcome, why: str) -> NodeOutcome:
    """Return a node's report with another reason of its hang, or of its timeouts."""
    evidence = {
        rank: replace(evidence, why=why)
        if evidence.why and outcome.ranks[rank].has_timed_out
        else evidence
        for rank, evidence in outcome.evidence.items()
    }
    trouble = outcome.trouble
    if outcome.is_hung and trouble is not None:
        trouble = replace(trouble, message=f"{trouble.message.partition(': ')[0]}: {why}")
    return replace(outcome, evidence=evidence, trouble=trouble)
