"""A status line while a launch starts; a note when it fails, restarts or stops."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from meshrun.console.console import Console
from meshrun.layout.labels import merged_label, rank_name
from meshrun.lifecycle.blame import describe_failure
from meshrun.lifecycle.local import SECOND_SIGNAL_GRACE_S
from meshrun.lifecycle.phases import Phase
from meshrun.lifecycle.restart import back_off
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import (
    Event,
    GenerationAborted,
    LaunchBegan,
    MeetingFailed,
    Met,
    NextBegins,
    NodeLost,
    SignalArrived,
    TimePassed,
    ZygoteGone,
)
from meshrun.protocol.from_zygote import (
    Checked,
    GenerationEnded,
    LeftoversEnded,
    RanksResumed,
    StartFailed,
    StoreEnded,
    ZygoteUnsafe,
)
from meshrun.protocol.raised import describe_raised, headline, lost_connection
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import (
    LaunchResult,
    Resize,
    describe_exit,
    signal_name,
    split_wait_status,
)
from meshrun.report.findings import describe_spares
from meshrun.supervisor.watcher import Watcher
from meshrun.wording import count


class StartProgress(Watcher):
    """Watches a launch: a status line while it starts, a note when it begins to end.

    Args:
        quiet: Whether to say only what nobody else can: another launcher says the rest.
    """

    def __init__(self, plan: LaunchPlan, console: Console, *, quiet: bool = False) -> None:
        self._plan, self._console, self._quiet = plan, console, quiet
        self._began_ns = time.monotonic_ns()
        self._told = False
        self._started = False
        self._told_kill = self._told_deadline = False
        self._told_spares = ""
        self.reported_lost: frozenset[int] = frozenset()
        """Ranks that were said to have lost a connection, in this generation."""
        self._survivors: set[int] = set()
        self._generation = 0
        self._is_checking = bool(plan.request.check_first)

    @property
    def is_first_node(self) -> bool:
        """Whether this is node 0, or the only one."""
        return self._plan.node_rank == 0

    def replan(self, plan: LaunchPlan) -> None:
        """The nodes have met: this is the plan now."""
        self._plan = plan

    def without_shown_lines(self, result: LaunchResult) -> LaunchResult:
        """Return the result without the first rank's last lines if they were just printed."""
        if not result.failures:
            return result
        first, *others = result.failures
        if self._console.has_just_shown(first.last_lines):
            first = replace(first, last_lines=())
        return replace(result, failures=(first, *others))

    def see(self, event: Event, state: State) -> None:
        """Take one event and the state after it."""
        self._tell_oddities(event, state)
        if self._quiet:
            return
        starts_again = state.generation > self._generation
        if _is_next(event, state):
            if starts_again and not self._started:
                self._tell_unstarted(state)
            self._began_ns = time.monotonic_ns()
            self._told = self._started = False
            self.reported_lost = frozenset()
        if isinstance(event, SignalArrived) and self._told and state.alive:
            self._tell_signal(event, state)
        if state.stopping and not self._told:
            self._told = True
            self._console.set_status("")
            is_start = isinstance(event, StartFailed) or state.broken is not None
            is_the_end = is_start and not _count_left(state)
            if not (starts_again or is_the_end or isinstance(event, MeetingFailed | Checked)):
                self._console.note(self._news(event, state))
        if state.stopping and not starts_again:
            self._tell_end(event, state)
        if starts_again:
            self._tell_restart(state)
        if not state.stopping and not self._started:
            self._tell_start(state)

    def _tell_oddities(self, event: Event, state: State) -> None:
        if isinstance(event, ZygoteGone) and state.generation == self._generation:
            self._tell_lost_zygote(event, state)
        if isinstance(event, ZygoteUnsafe):
            self._console.note(f"starting a new interpreter per rank: {event.reason}")
        if isinstance(event, RanksResumed) and not self._quiet:
            stopped_s = event.stopped_ns / 1e9
            self._console.note(
                f"resumed the ranks; they were suspended with meshrun for {stopped_s:.1f} s"
            )
        if isinstance(event, LeftoversEnded):
            self._tell_leftovers(event)
        if isinstance(event, Checked):
            self._tell_check(event)
        if isinstance(event, LaunchBegan) and self._plan.device.too_few:
            self._console.note(f"the mesh is on the CPU: {self._plan.device.reason}")
        if isinstance(event, LaunchBegan) and not self._plan.node_rank:
            for line in (*self._plan.request.notes, *self._plan.request.rendezvous.notes):
                self._console.note(line)
        # What other nodes have is known once they have met, and may change as they come and go.
        is_planned = isinstance(event, Met if self._plan.rendezvous is not None else LaunchBegan)
        if is_planned and self.is_first_node:
            self._tell_spares()

    def _tell_check(self, event: Checked) -> None:
        layout, self._is_checking = self._plan.layout, False
        what = f"{count(layout.world_size, 'rank')} on {count(layout.nnodes, 'node')}"
        speeds = f"; {event.speeds}" if event.speeds else ""
        found = "" if event.findings else ", found nothing wrong"
        self._console.note(f"checked {what} in {event.seconds:.1f} s{found}{speeds}")
        for finding in event.findings:
            self._console.note(f"found: {finding}")

    def _tell_spares(self) -> None:
        spares = describe_spares(self._plan) if self._plan.spares else ""
        if spares and spares != self._told_spares:
            self._console.note(spares)
        self._told_spares = spares

    def _tell_leftovers(self, event: LeftoversEnded) -> None:
        if event.count:
            what = count(event.count, "process")
            self._console.note(f"killed {what} that the ranks left behind")
        if new := self._take_new(event.survivors):
            self._console.note(
                f"{_processes(new)} survived SIGKILL: the kernel cannot kill a process that"
                " waits for a disk, a driver or a network file system (state D in `ps`) until"
                " that responds"
            )
        if new := self._take_new(event.denied):
            self._console.note(
                f"cannot kill {_processes(new)}: owned by another user, as with `sudo` or a"
                " setuid program; only that user or root can"
            )

    def _take_new(self, pids: list[int]) -> list[int]:
        """Return those that were not shown yet."""
        new = sorted({*pids} - self._survivors)
        self._survivors.update(new)
        return new

    def _tell_lost_zygote(self, event: ZygoteGone, state: State) -> None:
        """Say that it ended between two generations, where that costs only time."""
        if not (state.over or state.lost_process or state.phase is Phase.ENDING or state.broken):
            how = describe_exit(*split_wait_status(event.wait_status))
            self._console.note(f"the process that starts the ranks {how}; starting another")

    def _tell_start(self, state: State) -> None:
        self._started = self._started or all(known.ready for known in state.ranks.values())
        if self._console.shows_status:
            self._console.set_status(self._status(state))
        if self._started and state.generation:
            cause = state.causes[-1]
            took_s = (time.monotonic_ns() - cause.at_ns) / 1e9
            text = f"generation {state.generation} is running, {took_s:.2f} s after the failure"
            if cause.resize is not None:
                text = f"{describe_resize(cause.resize)}; it took {took_s:.2f} s"
            self._console.note(text)
        elif self._started and self._has_mesh and self._console.shows_status:
            self._console.note(self._ready())

    def _tell_signal(self, event: SignalArrived, state: State) -> None:
        """Say what one more signal changes."""
        if event.why or (event.signum == signal.SIGTERM and state.sigterm_repeats):
            return
        name = signal_name(event.signum)
        if state.killed and not self._told_kill:
            self._told_kill = True
            self._console.note(f"{name} again: killing {self._victims(state)} now")
        elif not state.killed and state.deadline_ns is not None:
            self._told_deadline = True
            left_s = round((state.deadline_ns - event.at_ns) / 1e9, 1)
            text = f"killing in {left_s:g} s"
            if len(state.signals) == 2:
                press = "press Ctrl-C" if event.signum == signal.SIGINT else "send it"
                name, text = f"{name} again", f"{text}; {press} again to kill now"
            self._console.note(f"{name}: {text}")

    def _tell_end(self, event: Event, state: State) -> None:
        """Say who has ended, for as long as ranks may take; and who is ended then."""
        total, left = len(state.ranks), len(state.alive)
        if isinstance(event, TimePassed) and state.killed and left and not self._told_kill:
            self._told_kill = True
            after = "" if self._told_deadline else f" after {state.shutdown_timeout_s:g} s"
            exited = f"{total - left} of {total} ranks exited"
            self._console.note(f"timed out{after}: {exited}; killing {self._victims(state)}")
        if self._console.shows_status and isinstance(event, RankExited | SignalArrived):
            self._console.set_status(f"{total - left} of {total} ranks exited" if left else "")

    def _tell_restart(self, state: State) -> None:
        """Say why ranks are restarted, and which of the restarts this is."""
        self._generation = state.generation
        cause = state.causes[-1]
        if not cause.is_failure:
            return  # it was reported when it happened
        who = "" if cause.rank is None else f"{rank_name(self._plan.layout, cause.rank)} "
        which = f"restart {state.restarts} of {state.max_restarts}"
        wait_s, why_wait = back_off(state.causes)
        if wait_s:
            which, why_wait = f"{which} in {wait_s:g} s", f"; {why_wait}"
        self._console.note(f"{which}, because {who}{cause.description}{why_wait}")
        if cause.raised is not None and not cause.raised.shown:
            self._console.print_line(cause.raised.traceback.rstrip("\n").encode(), to_stderr=True)

    def _tell_unstarted(self, state: State) -> None:
        """Say who left and came before a generation that ended before its ranks were ready."""
        resize = state.causes[-2].resize if len(state.causes) > 1 else None
        if resize is not None and resize.generation == self._generation:
            self._console.note(
                f"{describe_resize(resize, verb='started')}, but ended before its ranks ran"
            )

    @property
    def _has_mesh(self) -> bool:
        return self._plan.layout.mesh is not None

    def _ready(self) -> str:
        took_s = (time.monotonic_ns() - self._began_ns) / 1e9
        return f"mesh {self._plan.layout.mesh} ready on {self._plan.device_type} in {took_s:.1f} s"

    def _status(self, state: State) -> str:
        total = len(state.ranks)
        began = sum(known.pid is not None for known in state.ranks.values())
        joined = sum(known.joined for known in state.ranks.values())
        ready = sum(known.ready for known in state.ranks.values())
        elapsed = f"{(time.monotonic_ns() - self._began_ns) / 1e9:.1f} s"
        if ready == total:
            return ""
        if state.begin_ns is not None:
            return "waiting to restart"
        if not began:
            waits = (
                state.phase is Phase.WAITING and state.nodes is not None and not state.nodes.is_met
            )
            return "waiting for the other nodes" if waits else "importing torch"
        if began < total:
            return f"started {began} of {total} ranks ({elapsed})"
        if self._has_mesh and joined < total:
            is_checking = self._is_checking and not joined
            what = "checking the mesh" if is_checking else f"{joined} of {total} ranks joined"
            return f"{what} ({elapsed})"
        what = "built their mesh" if self._has_mesh else "are ready"
        return f"{ready} of {total} ranks {what} ({elapsed})"

    def _news(self, event: Event, state: State) -> str:
        rest = _count_left(state)
        match event:
            case RankRaised(rank=rank):
                what = describe_raised(event)
                if event.kind == "SystemExit":
                    what = f"exited: {headline(event).removeprefix('SystemExit: ')}"
                elif lost_connection(event):
                    what = "lost a connection to a peer"
                    self.reported_lost = frozenset({rank})
                return f"{rank_name(self._plan.layout, rank)} {what}{_ending_others(rest - 1)}"
            case RankExited(rank=rank, wait_status=status):
                end = describe_exit(*split_wait_status(status))
                return f"{rank_name(self._plan.layout, rank)} {end}{_ending_others(rest)}"
            case SignalArrived(signum=signum, why=why):
                ending = f"stopping {count(rest, 'rank')}, up to {state.shutdown_timeout_s:g} s"
                if signum == signal.SIGINT and state.shutdown_timeout_s > SECOND_SIGNAL_GRACE_S:
                    ending += f"; press Ctrl-C again to kill in {SECOND_SIGNAL_GRACE_S:g} s"
                has_run = state.generation or any(known.pid for known in state.ranks.values())
                none = "all ranks have exited" if has_run else "no rank was started"
                return f"{why or signal_name(signum)}: {ending if rest else none}"
            case GenerationAborted() | NodeLost():
                what = event.why if isinstance(event, GenerationAborted) else str(event)
                return what + _ending_all(rest)
            case StoreEnded() | ZygoteGone() | StartFailed() if failed := describe_failure(state):
                return failed + _ending_all(rest)
            case _:
                return f"stopping {count(rest, 'rank')}"

    def _victims(self, state: State) -> str:
        """Return who is still alive, as people name them: ``both``, ``all 8``, ``dp0 tp* x4``."""
        alive = state.alive
        if len(alive) < len(state.ranks) or len(alive) == 1:
            return merged_label(self._plan.layout, alive)
        return "both" if len(alive) == 2 else f"all {len(alive)}"


def _count_left(state: State) -> int:
    """Return how many ranks are alive, with those whose start is not heard of yet."""
    if not state.alive or state.start_error is not None:
        return len(state.alive)
    return sum(known.exited is None for known in state.ranks.values())


def _is_next(event: Event, state: State) -> bool:
    """Whether another generation of ranks is about to start."""
    if isinstance(event, NextBegins):
        return True
    if state.nodes is not None and state.nodes.is_met:
        return isinstance(event, Met) and bool(event.causes)
    return isinstance(event, GenerationEnded | ZygoteGone) and not state.over


def describe_resize(resize: Resize, *, verb: str = "runs") -> str:
    """Return who left and who came, and what became of the mesh."""
    who = [f"without {', '.join(resize.left)}"] if resize.left else []
    who += [f"with {', '.join(resize.joined)}"] if resize.joined else []
    return f"generation {resize.generation} {verb} {' and '.join(who)}: {resize.shapes}"


def _ending_all(number: int) -> str:
    if number < 1:
        return ""
    return "; stopping the rank on this node" if number == 1 else f"; stopping {number} ranks"


def _processes(pids: list[int]) -> str:
    return f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))}"


def _ending_others(number: int) -> str:
    if number < 1:
        return ""
    return "; stopping the other rank" if number == 1 else f"; stopping the other {number} ranks"
