"""What a launch does next: step(state, event) -> (state, actions). Pure; time comes in events."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from meshrun.events import (
    Event,
    LaunchBegan,
    LeftoversEnded,
    ProgramBroken,
    RankExited,
    RankFinished,
    RankJoined,
    RankRaised,
    RankReady,
    RankStarted,
    SignalArrived,
    StartFailed,
    StoreEnded,
    TimePassed,
    ZygoteGone,
    ZygoteReady,
    ZygoteUnsafe,
)

LEFTOVER_GRACE_S = 2.0
"""How long what ranks left behind may take to end after the last rank."""
SECOND_SIGNAL_GRACE_S = 2.0
_ZYGOTE_GRACE_S = LEFTOVER_GRACE_S + 3.0
"""How long the zygote may take to answer before it is ended, and its ranks with it."""
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAll:
    """Start the store and every rank of this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOver:
    """Start the zygote anew, without torch, to give each rank an interpreter of its own."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Send a signal to ranks, or to their whole process groups."""

    ranks: tuple[int, ...]
    signum: int
    whole_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndZygote:
    """Have the zygote end what is left and then itself; or end it without asking."""

    grace_s: float = 0.0
    by_force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send TimePassed at a monotonic time."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGate:
    """Let ranks that have finished leave."""


Action = StartAll | StartOver | Signal | EndZygote | WakeAt | OpenGate


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What is known of one rank."""

    pid: int | None = None
    joined: bool = False
    ready: bool = False
    raised: RankRaised | None = None
    finished: bool = False
    """Whether its program is over and it waits for its peers."""
    exited: RankExited | None = None
    told_to_end_ns: int | None = None
    """When it was first sent a signal to end it, if it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A launch at one moment."""

    shutdown_timeout_s: float
    ranks: dict[int, RankState]
    stopping: bool = False
    killed: bool = False
    """Whether SIGKILL has been sent to the ranks."""
    deadline_ns: int | None = None
    signals: tuple[int, ...] = ()
    """Signals the launcher was sent, in order."""
    broken: ProgramBroken | None = None
    start_error: StartFailed | None = None
    store_ended: StoreEnded | None = None
    gate_open: bool = False
    """Whether ranks that have finished may leave."""
    finishing: bool = False
    zygote_gone: ZygoteGone | None = None
    alive: frozenset[int] = field(default_factory=frozenset)
    """Ranks that were started and have not ended."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.zygote_gone is not None


Step = tuple[State, list[Action]]


def step(state: State, event: Event) -> Step:
    """Return the state after ``event`` and what to do about it."""
    return _STEPS[type(event)](state, event)


def _zygote_ready(state: State, _: ZygoteReady) -> Step:
    return (state, []) if state.stopping else (state, [StartAll()])


def _zygote_unsafe(state: State, event: ZygoteUnsafe) -> Step:
    return (state, []) if state.stopping else (state, [StartOver(reason=event.reason)])


def _raised(state: State, event: RankRaised) -> Step:
    return _stop(_with_rank(state, event.rank, raised=event), event.at_ns, sparing=event.rank)


def _start_failed(state: State, event: StartFailed) -> Step:
    # Ranks that were ordered after it may still start; they are ended as they come.
    stopped, actions = _stop(replace(state, start_error=event), event.at_ns)
    return _finish(stopped, actions, event.at_ns)


def _store_ended(state: State, event: StoreEnded) -> Step:
    stopped, actions = _stop(replace(state, store_ended=event), event.at_ns)
    return _finish(stopped, actions, event.at_ns)


def _with_rank(state: State, rank: int, **changes: object) -> State:
    changed = replace(state.ranks[rank], **changes)  # type: ignore[arg-type]
    return replace(state, ranks={**state.ranks, rank: changed})


def _started(state: State, event: RankStarted) -> Step:
    state = _with_rank(state, event.rank, pid=event.pid)
    state = replace(state, alive=state.alive | {event.rank})
    if not state.stopping:
        return state, []
    signum = signal.SIGKILL if state.killed else signal.SIGTERM
    return _tell(state, (event.rank,), signum, event.at_ns)


def _finished(state: State, event: RankFinished) -> Step:
    state = _with_rank(state, event.rank, finished=True)
    return _open_gate_if_due(state, [])


def _open_gate_if_due(state: State, actions: list[Action]) -> Step:
    """Ranks that have finished may leave once each has, or none is waited for any more."""
    known = state.ranks.values()
    waiting = any(rank.finished and not rank.exited for rank in known)
    due = state.stopping or all(rank.finished or rank.exited for rank in known)
    if state.gate_open or not waiting or not due:
        return state, actions
    return replace(state, gate_open=True), [*actions, OpenGate()]


def _exited(state: State, event: RankExited) -> Step:
    state = _with_rank(state, event.rank, pid=event.pid, exited=event)
    state = replace(state, alive=state.alive - {event.rank})
    actions: list[Action] = []
    if event.wait_status != 0:
        state, actions = _stop(state, event.at_ns)
    state, actions = _open_gate_if_due(state, actions)
    return _finish(state, actions, event.at_ns)


def _finish(state: State, actions: list[Action], at_ns: int) -> Step:
    if not (finish := _finish_if_idle(state)):
        return state, actions
    deadline_ns = at_ns + int(_ZYGOTE_GRACE_S * _NS)
    state = replace(state, finishing=True, deadline_ns=deadline_ns)
    return state, [*actions, *finish, WakeAt(at_ns=deadline_ns)]


def _finish_if_idle(state: State) -> list[Action]:
    if state.alive or state.finishing:
        return []
    if not state.stopping and any(rank.exited is None for rank in state.ranks.values()):
        return []
    return [EndZygote(grace_s=0.0 if state.killed else LEFTOVER_GRACE_S)]


def _stop(
    state: State, at_ns: int, *, sparing: int | None = None, signum: int = signal.SIGTERM
) -> Step:
    """Tell the ranks to end, once, and set the time by which they must have."""
    if state.stopping:
        return state, []
    deadline_ns = at_ns + int(state.shutdown_timeout_s * _NS)
    state = replace(state, stopping=True, deadline_ns=deadline_ns)
    told = tuple(sorted(state.alive - {sparing}))
    state, actions = _tell(state, told, signum, at_ns)
    state, actions = _open_gate_if_due(state, actions)
    return state, [*actions, WakeAt(at_ns=deadline_ns)]


def _tell(state: State, ranks: tuple[int, ...], signum: int, at_ns: int) -> Step:
    for rank in ranks:
        if state.ranks[rank].told_to_end_ns is None:
            state = _with_rank(state, rank, told_to_end_ns=at_ns)
    whole_group = signum == signal.SIGKILL
    return state, [Signal(ranks=ranks, signum=signum, whole_group=whole_group)] if ranks else []


def _kill(state: State, at_ns: int) -> Step:
    state = replace(state, killed=True, stopping=True)
    state, actions = _tell(state, tuple(sorted(state.alive)), signal.SIGKILL, at_ns)
    deadline_ns = at_ns + int(_ZYGOTE_GRACE_S * _NS)
    state = replace(state, deadline_ns=deadline_ns)
    return state, [*actions, WakeAt(at_ns=deadline_ns)]


def _signalled(state: State, event: SignalArrived) -> Step:
    first = not state.signals
    state = replace(state, signals=(*state.signals, event.signum))
    if first and not state.stopping:
        # Python ignores SIGPIPE, so ranks are asked to end in words that they know.
        signum = signal.SIGTERM if event.signum == signal.SIGPIPE else event.signum
        state, actions = _stop(state, event.at_ns, signum=signum)
    elif first or len(state.signals) == 2:
        grace_ns = int(min(SECOND_SIGNAL_GRACE_S, state.shutdown_timeout_s) * _NS)
        deadline_ns = min(event.at_ns + grace_ns, state.deadline_ns or event.at_ns + grace_ns)
        state = replace(state, deadline_ns=deadline_ns)
        actions = [WakeAt(at_ns=deadline_ns)]
    else:
        state, actions = _kill(state, event.at_ns)
    if state.alive or state.finishing:
        return state, actions
    # No rank was started yet: there is nothing to wait for.
    return replace(state, finishing=True), [EndZygote(by_force=True)]


def _time_passed(state: State, at_ns: int) -> Step:
    if state.deadline_ns is None or at_ns < state.deadline_ns or state.over:
        return state, []
    if state.killed or state.finishing:
        # SIGKILL was not enough, or the zygote does not answer: end it, and its ranks with it.
        return replace(state, deadline_ns=None), [EndZygote(by_force=True)]
    return _kill(state, at_ns)


_STEPS: dict[type[Any], Callable[[State, Any], Step]] = {
    LaunchBegan: lambda state, _: (state, []),
    ZygoteReady: _zygote_ready,
    ZygoteUnsafe: _zygote_unsafe,
    ProgramBroken: lambda state, event: (replace(state, broken=event), []),
    RankStarted: _started,
    StartFailed: _start_failed,
    RankJoined: lambda state, event: (_with_rank(state, event.rank, joined=True), []),
    RankReady: lambda state, event: (_with_rank(state, event.rank, joined=True, ready=True), []),
    RankRaised: _raised,
    RankFinished: _finished,
    RankExited: _exited,
    StoreEnded: _store_ended,
    LeftoversEnded: lambda state, _: (state, []),
    ZygoteGone: lambda state, event: (replace(state, zygote_gone=event), []),
    SignalArrived: _signalled,
    TimePassed: lambda state, event: _time_passed(state, event.at_ns),
}
