"""Messages about a launch: a status line while it starts, and notes when it fails or restarts."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from enum import Enum
from functools import partial

from meshrun.console.console import Console
from meshrun.host.reactor import Reactor, Timer
from meshrun.layout.labels import merged_label, rank_name
from meshrun.lifecycle.local import SECOND_SIGNAL_GRACE_S
from meshrun.lifecycle.phases import NodesPhase, Phase
from meshrun.lifecycle.restart import back_off
from meshrun.lifecycle.root_cause import describe_failure
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol import events, zygote_messages
from meshrun.protocol.rank_end import (
    LOST_PEER,
    RankExited,
    RankRaised,
    describe_raised,
    headline,
    lost_connection,
)
from meshrun.protocol.result import (
    LaunchResult,
    Resize,
    describe_exit,
    signal_name,
    split_wait_status,
)
from meshrun.report.findings import describe_spare_workers
from meshrun.supervisor.watcher import Watcher
from meshrun.wording import count

_IMPORT_TAKES_S = 60.0
"""How long imports may take before a note says how to see what they wait for."""
_THREADS_TAKE_S = 2.0
"""How long threads of a rank that raised may take to end before a note names them."""


class StopNote(Enum):
    """What was noted of how a generation's ranks are stopped."""

    NOTHING = "nothing"
    STOP = "stop"
    """Why they are asked to stop."""
    DEADLINE = "deadline"
    """When they will be killed."""
    KILL = "kill"
    """That they are killed."""


class StartProgress(Watcher):
    """Shows a status line while a launch starts, and notes on what happens to it.

    Args:
        quiet: Whether another launcher prints what concerns all nodes.
    """

    def __init__(self, plan: LaunchPlan, console: Console, *, quiet: bool = False) -> None:
        self.plan, self._console, self._quiet = plan, console, quiet
        self._began_ns = time.monotonic_ns()
        self._started = False
        self._noted = StopNote.NOTHING
        self._noted_spares = ""
        self.reported_lost: frozenset[int] = frozenset()
        """Ranks of this generation whose lost connection was noted."""
        self._survivors: set[int] = set()
        """Processes that could not be killed and were noted."""
        self._generation = 0
        self._phase = Phase.IMPORTING
        self._slow_import: Timer | None = None
        self._slow_threads: Timer | None = None
        self._is_checking = bool(plan.request.check_first)

    @property
    def is_first_node(self) -> bool:
        """Whether this is node 0, or the only one."""
        return self.plan.node_rank == 0

    def without_shown_lines(self, result: LaunchResult) -> LaunchResult:
        """Return the result without the last lines of the first failure if they were just shown."""
        if not result.failures:
            return result
        first, *others = result.failures
        if self._console.has_just_shown(first.last_lines):
            first = replace(first, last_lines=())
        return replace(result, failures=(first, *others))

    def begin(self, reactor: Reactor, state: State) -> None:
        """Note if the imports of a zygote take long."""
        self._phase, self._reactor = state.phase, reactor
        self._slow_import = reactor.call_later(_IMPORT_TAKES_S, self._note_slow_import)

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase and self._slow_import is not None:
            self._slow_import.restart(_IMPORT_TAKES_S)
        self._phase = phase

    def _note_slow_import(self) -> None:
        if self._phase is Phase.IMPORTING:
            what = " and ".join(("torch", *self.plan.request.own_preload))
            self._console.note(
                f"importing {what} has taken {_IMPORT_TAKES_S:g} s; Ctrl-\\ shows where it is"
            )

    def _note_threads(self, event: RankRaised) -> None:
        most = f"{self.plan.request.shutdown_timeout_s:g} s"
        waits = f"waiting up to {most} for its threads to end ({event.threads})"
        self._console.note(f"{self._describe_error(event)}; {waits}")

    def on_event(self, event: events.Event, state: State) -> None:
        """Show an event and the state after it."""
        self._enter(state.phase)
        self._note_conditions(event, state)
        if self._quiet:
            return
        restarts = state.generation > self._generation
        if _begins_generation(event, state):
            if restarts and not self._started:
                self._note_unstarted(state)
            self._began_ns = time.monotonic_ns()
            self._noted, self._started = StopNote.NOTHING, False
            self.reported_lost = frozenset()
        has_noted = self._noted is not StopNote.NOTHING
        if isinstance(event, events.SignalArrived) and has_noted and state.alive:
            self._note_signal(event, state)
        if isinstance(event, events.NodeLost) and has_noted:
            self._console.note(str(event))
        if state.stopping and not has_noted:
            self._note_stop(event, state, restarts=restarts)
        if state.stopping and not restarts:
            self._show_shutdown(event, state)
        if restarts:
            self._note_restart(state)
        if not state.stopping and not self._started:
            self._show_start(state)

    def _note_conditions(self, event: events.Event, state: State) -> None:
        """Note what is worth knowing even on a quiet node."""
        match event:
            case events.LaunchBegan():
                self._note_plan()
            case events.AllJoined():
                self._note_spares()
            case zygote_messages.ZygoteUnsafe(reason=reason):
                self._console.note(f"starting a new interpreter per rank: {reason}")
            case events.ZygoteGone() if state.generation == self._generation:
                self._note_lost_zygote(event, state)
            case RankRaised() if not (state.stopping or self._quiet or self._slow_threads):
                note = partial(self._note_threads, event)
                self._slow_threads = self._reactor.call_later(_THREADS_TAKE_S, note)
            case zygote_messages.RanksResumed(stopped_ns=stopped_ns) if not self._quiet:
                self._console.note(
                    "resumed the ranks; they were suspended with meshrun for"
                    f" {stopped_ns / 1e9:.1f} s"
                )
            case events.GenerationAborted(why=why, resizes=True) if self.reported_lost:
                self._console.note(why)  # a rank noticed first, and only that it lost a peer
            case zygote_messages.LeftoversEnded():
                self._note_leftovers(event)
            case zygote_messages.Checked():
                self._note_check(event)

    def _note_plan(self) -> None:
        if self.plan.device.too_few:
            self._console.note(f"the mesh is on the CPU: {self.plan.device.reason}")
        if self.is_first_node:
            for text in (*self.plan.request.notes, *self.plan.request.rendezvous.notes):
                self._console.note(text)
        if self.plan.rendezvous is None:  # spares of several nodes are known once they have joined
            self._note_spares()

    def _note_check(self, event: zygote_messages.Checked) -> None:
        layout, self._is_checking = self.plan.layout, False
        what = f"{count(layout.world_size, 'rank')} on {count(layout.nnodes, 'node')}"
        speeds = f"; {event.speeds}" if event.speeds else ""
        found = "" if event.findings else ", found nothing wrong"
        self._console.note(f"checked {what} in {event.seconds:.1f} s{found}{speeds}")
        for finding in event.findings:
            self._console.note(f"found: {finding}")

    def _note_spares(self) -> None:
        if not self.is_first_node:
            return
        spares = describe_spare_workers(self.plan) if self.plan.spare_workers else ""
        if spares and spares != self._noted_spares:
            self._console.note(spares)
        self._noted_spares = spares

    def _note_leftovers(self, event: zygote_messages.LeftoversEnded) -> None:
        if event.count:
            what = count(event.count, "process")
            self._console.note(f"killed {what} that the ranks left behind")
        if new := self._take_new(event.survivors):
            self._console.note(
                f"{_processes(new)} survived SIGKILL: the kernel cannot kill a process that"
                " is waiting for a disk, a driver or a network file system (state D in `ps`) until"
                " that responds"
            )
        if new := self._take_new(event.denied):
            self._console.note(
                f"cannot kill {_processes(new)}: owned by another user, as with `sudo` or a"
                " setuid program; only that user or root can"
            )

    def _take_new(self, pids: list[int]) -> list[int]:
        """Return the processes that were not noted yet."""
        new = sorted({*pids} - self._survivors)
        self._survivors.update(new)
        return new

    def _note_lost_zygote(self, event: events.ZygoteGone, state: State) -> None:
        """Note the end of a zygote between two generations, when it costs only time."""
        if not (state.over or state.lost_process or state.phase is Phase.ENDING or state.broken):
            how = describe_exit(*split_wait_status(event.wait_status))
            self._console.note(f"the process that starts the ranks {how}; starting another")

    def _show_start(self, state: State) -> None:
        self._started = self._started or all(rank.ready for rank in state.ranks.values())
        if self._console.shows_status:
            self._console.set_status(self._status(state))
        if self._started and state.generation:
            cause = state.causes[-1]
            took_s = (time.monotonic_ns() - cause.at_ns) / 1e9
            text = f"generation {state.generation} is running, {took_s:.2f} s after the failure"
            if cause.resize is not None:
                text = f"{describe_resize(cause.resize)}; it took {took_s:.2f} s"
            self._console.note(text)
        elif self._started and (mesh := self.plan.layout.mesh) and self._console.shows_status:
            device = self.plan.device_type
            self._console.note(f"mesh {mesh} ready on {device} in {self._elapsed_s:.1f} s")

    def _note_stop(self, event: events.Event, state: State, *, restarts: bool) -> None:
        """Note why the ranks are stopped, unless another note or the report says so."""
        self._noted = StopNote.STOP
        if self._slow_threads is not None:
            self._slow_threads.cancel()
            self._slow_threads = None
        self._console.set_status("")
        failed_to_start = isinstance(event, zygote_messages.StartFailed) or state.broken is not None
        is_over = failed_to_start and not _count_left(state)
        if not (
            restarts or is_over or isinstance(event, events.JoinFailed | zygote_messages.Checked)
        ):
            self._console.note(self._describe_stop(event, state))

    def _note_signal(self, event: events.SignalArrived, state: State) -> None:
        """Note the effect of a repeated signal."""
        if event.why or (event.signum == signal.SIGTERM and state.sigterm_repeats):
            return
        name = signal_name(event.signum)
        if state.killed and self._noted is not StopNote.KILL:
            self._noted = StopNote.KILL
            self._console.note(f"{name} again: killing {self._alive(state)} now")
        elif not state.killed and state.deadline_ns is not None:
            self._noted = StopNote.DEADLINE
            left_s = round((state.deadline_ns - event.at_ns) / 1e9, 1)
            text = f"killing in {left_s:g} s"
            if len(state.signals) == 2:
                press = "press Ctrl-C" if event.signum == signal.SIGINT else "send it"
                name, text = f"{name} again", f"{text}; {press} again to kill now"
            self._console.note(f"{name}: {text}")

    def _show_shutdown(self, event: events.Event, state: State) -> None:
        """Show how many ranks have exited, and note which ones are killed after the timeout."""
        total, left = len(state.ranks), len(state.alive)
        exited = f"{total - left} of {count(total, 'rank')} exited"
        is_late = isinstance(event, events.TimePassed) and state.killed and left
        if is_late and self._noted is not StopNote.KILL:
            is_known = self._noted is StopNote.DEADLINE
            after = "" if is_known else f" after {state.shutdown_timeout_s:g} s"
            self._noted = StopNote.KILL
            self._console.note(f"timed out{after}: {exited}; killing {self._alive(state)}")
        if self._console.shows_status and isinstance(event, RankExited | events.SignalArrived):
            self._console.set_status(exited if left else "")

    def _note_restart(self, state: State) -> None:
        """Note why ranks are restarted, and how many restarts are left."""
        self._generation = state.generation
        cause = state.causes[-1]
        if not cause.is_failure:
            return  # it was noted when it happened
        who = "" if cause.rank is None else f"rank {cause.rank} "
        if cause.rank is not None and cause.resize is None:  # otherwise, it had another layout
            who = f"{rank_name(self.plan.layout, cause.rank)} "
        which = f"restart {state.restarts} of {state.max_restarts}"
        wait_s, why_wait = back_off(state.causes)
        if wait_s:
            which, why_wait = f"{which} in {wait_s:g} s", f"; {why_wait}"
        self._console.note(f"{which}, because {who}{cause.description}{why_wait}")
        if cause.raised is not None and not cause.raised.shown:
            self._console.print_line(cause.raised.traceback.rstrip("\n").encode(), to_stderr=True)

    def _note_unstarted(self, state: State) -> None:
        """Note the resize before a generation that ended before its ranks were ready."""
        resize = state.causes[-2].resize if len(state.causes) > 1 else None
        if resize is not None and resize.generation == self._generation:
            self._console.note(
                f"{describe_resize(resize, verb='started')}, but ended before its ranks ran"
            )

    @property
    def _elapsed_s(self) -> float:
        """Time since this generation began."""
        return (time.monotonic_ns() - self._began_ns) / 1e9

    def _status(self, state: State) -> str:
        total = len(state.ranks)
        ranks = count(total, "rank")
        started = sum(rank_state.pid is not None for rank_state in state.ranks.values())
        joined = sum(rank_state.joined for rank_state in state.ranks.values())
        ready = sum(rank_state.ready for rank_state in state.ranks.values())
        elapsed, has_mesh = f"{self._elapsed_s:.1f} s", self.plan.layout.mesh is not None
        if ready == total:
            return ""
        if state.begin_ns is not None:
            return "waiting to restart"
        if not started:
            waits = state.phase is Phase.WAITING and state.nodes.phase is NodesPhase.JOINING
            return "waiting for the other nodes" if waits else "importing torch"
        if started < total:
            return f"started {started} of {ranks} ({elapsed})"
        if has_mesh and joined < total:
            is_checking = self._is_checking and not joined
            what = "checking the mesh" if is_checking else f"{joined} of {ranks} joined"
            return f"{what} ({elapsed})"
        some = f"{ready} of {ranks}"
        what = f"mesh built on {some}" if has_mesh else f"{some} ready"
        return f"{what} ({elapsed})"

    def _describe_stop(self, event: events.Event, state: State) -> str:
        """Return why ranks are stopped, and how many."""
        rest = _count_left(state)
        match event:
            case (
                RankRaised() | zygote_messages.RankLeaves() | RankExited() | events.TimePassed()
            ) if raised := _first_raised(event, state):
                if lost_connection(raised):
                    self.reported_lost = frozenset({raised.rank})
                others = rest - (state.ranks[raised.rank].exited is None)
                return f"{self._describe_error(raised)}{_stopping_others(others)}"
            case RankExited(rank=rank, wait_status=status, error=error):
                end = describe_exit(*split_wait_status(status), error)
                return f"{rank_name(self.plan.layout, rank)} {end}{_stopping_others(rest)}"
            case events.SignalArrived(signum=signum, why=why):
                ending = f"stopping {count(rest, 'rank')}, up to {state.shutdown_timeout_s:g} s"
                if signum == signal.SIGINT and state.shutdown_timeout_s > SECOND_SIGNAL_GRACE_S:
                    ending += f"; press Ctrl-C again to kill them after {SECOND_SIGNAL_GRACE_S:g} s"
                has_run = state.generation or any(rank.pid for rank in state.ranks.values())
                none = "all ranks have exited" if has_run else "no rank was started"
                return f"{why or signal_name(signum)}: {ending if rest else none}"
            case events.GenerationAborted() | events.NodeLost():
                what = event.why if isinstance(event, events.GenerationAborted) else str(event)
                return what + _stopping(rest)
            case (
                zygote_messages.StoreEnded() | events.ZygoteGone() | zygote_messages.StartFailed()
            ) if failed := describe_failure(state):
                return failed + _stopping(rest)
            case _:
                return f"stopping {count(rest, 'rank')}"

    def _describe_error(self, event: RankRaised) -> str:
        what = describe_raised(event)
        if event.kind == "SystemExit":
            what = f"exited: {headline(event).removeprefix('SystemExit: ')}"
        elif lost_connection(event):
            what = LOST_PEER
        return f"{rank_name(self.plan.layout, event.rank)} {what}"

    def _alive(self, state: State) -> str:
        """Return the ranks that are still alive: ``both``, ``all 8``, ``dp0 tp* x4``."""
        alive = state.alive
        if len(alive) < len(state.ranks) or len(alive) == 1:
            return merged_label(self.plan.layout, alive)
        return "both" if len(alive) == 2 else f"all {len(alive)}"


def _count_left(state: State) -> int:
    """Return how many ranks are alive or may just have been started."""
    if not state.alive or state.start_error is not None:
        return len(state.alive)
    return sum(rank_state.exited is None for rank_state in state.ranks.values())


def _first_raised(event: events.Event, state: State) -> RankRaised | None:
    """Return the first exception of a rank, if that is why ``event`` stopped the ranks."""
    if isinstance(event, RankRaised):
        return event
    if isinstance(event, RankExited) and state.ranks[event.rank].raised is None:
        return None
    raised = [rank.raised for rank in state.ranks.values() if rank.raised is not None]
    return min(raised, key=lambda error: error.at_ns, default=None)


def _begins_generation(event: events.Event, state: State) -> bool:
    """Whether another generation of ranks is about to start."""
    if isinstance(event, events.NextBegins):
        return True
    if state.nodes.have_joined:
        return isinstance(event, events.AllJoined) and bool(event.causes)
    return isinstance(event, zygote_messages.GenerationEnded | events.ZygoteGone) and not state.over


def describe_resize(resize: Resize, *, verb: str = "runs") -> str:
    """Return which nodes left and joined, and how the mesh changed."""
    left = [host for host in resize.left if host not in resize.joined]
    joined = [host for host in resize.joined if host not in resize.left]
    again = [host for host in resize.joined if host in resize.left]
    who = [f"without {', '.join(left)}"] if left else []
    who += [f"with {', '.join(joined)}"] if joined else []
    who += [f"with {', '.join(again)} again"] if again else []
    return f"generation {resize.generation} {verb} {' and '.join(who)}: {resize.shapes}"


def _processes(pids: list[int]) -> str:
    return f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))}"


def _stopping(number: int, one: str = "the rank on this node", several: str = "") -> str:
    what = one if number == 1 else f"{several}{number} ranks"
    return f"; stopping {what}" if number > 0 else ""


def _stopping_others(number: int) -> str:
    return _stopping(number, "the other rank", "the other ")
