"""When ranks restart, after how long, and when they no longer do: histories of generations."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshrun.lifecycle import advance
from meshrun.lifecycle.actions import (
    EndGeneration,
    EndZygote,
    Report,
    StartAll,
    StartZygote,
)
from meshrun.lifecycle.phases import NodesPhase, Phase, Stop
from meshrun.lifecycle.state import ALONE, NodesState, State, skip_time
from meshrun.protocol.events import (
    Event,
    GenerationAborted,
    Hung,
    NextBegins,
    SignalArrived,
    TimePassed,
    ZygoteGone,
)
from meshrun.protocol.generation import Cause
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.zygote_messages import (
    GenerationEnded,
    RankBeat,
    RankReady,
    RankStarted,
    ZygoteReady,
)
from tests.histories import S, follow, launch
from tests.kit import NO_PROGRESS, ZYGOTE


@dataclass(frozen=True)
class End:
    """How a generation ends, and the step it reached."""

    step: int | None
    how: str = "SIGKILL"
    """A signal's name, ``hang``, or the message of an exception; ``message@41`` in line 41."""
    ran_s: float = 1.0


def events_of(end: End, now_s: float) -> list[Event]:
    """Return the events of a generation of one rank that starts now."""
    began_ns, at_ns = int(now_s * S), int((now_s + end.ran_s) * S)
    events: list[Event] = [
        RankStarted(rank=0, pid=100, at_ns=began_ns),
        RankReady(rank=0, at_ns=began_ns),
    ]
    if end.step is not None:
        events += [RankBeat(rank=0, at_ns=began_ns, step=each) for each in (end.step, end.step - 1)]
    if end.how == "hang":
        status = signal.SIGTERM
        events.append(Hung(idle_s=60.0 + now_s, at_ns=at_ns))
    elif end.how in signal.Signals.__members__:
        status = signal.Signals[end.how]
    else:
        status = 1 << 8
        message, _, line = end.how.partition("@")
        trace = f'Traceback\n  File "/job/train.py", line {line or 1}, in main\nValueError: no\n'
        events.append(
            RankRaised(rank=0, at_ns=at_ns, kind="ValueError", message=message, traceback=trace,
                       shown=False)
        )  # fmt: skip
    events.append(RankExited(rank=0, pid=100, wait_status=status, at_ns=at_ns))
    return events


def play(ends: list[End]) -> tuple[list[float], str | None]:
    """Return the wait before each restart, and why there was no other, if so."""
    state, _ = advance(launch(1, max_restarts=10**6), ZygoteReady(at_ns=0, import_ns=0))
    now_s, waits = 0.0, []
    for end in ends:
        state, _ = follow(state, *events_of(end, now_s))
        if state.no_restart is not None:
            return waits, state.no_restart
        now_s += end.ran_s + 1
        state, actions = advance(state, GenerationEnded(at_ns=int(now_s * S)))
        wake = state.wake_ns or int(now_s * S)
        waits.append(wake / S - now_s)
        if wake > now_s * S:
            assert actions == []
            state, actions = advance(state, TimePassed(at_ns=wake - 1))
            assert actions == []
            state, actions = advance(state, TimePassed(at_ns=wake))
        assert actions == [StartAll(generation=len(waits))]
        now_s = wake / S
    return waits, None


AT_120 = "3 failures in a row at step 120"
HISTORIES: dict[str, tuple[list[End], list[float], str | None]] = {
    "after progress, at once": ([End(5), End(6), End(7), End(8)], [0, 0, 0, 0], None),
    "without progress, at once first, then after longer and longer waits": (
        [End(5), *(End(5 - n) for n in range(9))],
        [0, 0, 1, 2, 4, 8, 16, 32, 60, 60],
        None,
    ),
    "progress resets the wait": (
        [End(5), End(4), End(3), End(6), End(2), End(1)],
        [0, 0, 1, 0, 0, 1],
        None,
    ),
    "a start that reports no step made no progress": (
        [End(5), End(None, ran_s=90), End(None, ran_s=95)],
        [0, 0, 1],
        None,
    ),
    "the same failure at the same step is tried twice more": (
        [End(100, "no@41"), End(120, "no@41"), End(120, "no@41"), End(120, "no@41")],
        [0, 0, 0],
        f"{AT_120}: ValueError (/job/train.py:41 in main)",
    ),
    "other numbers in its message make no other failure": (
        [End(120, "sample 7 at 0x7f@41"), End(120, "sample 8 at 0xa0@41"),
         End(120, "sample 88 at 0x00@41")],
        [0, 0],
        f"{AT_120}: ValueError (/job/train.py:41 in main)",
    ),
    "another line is another failure": (
        [End(120, "no@41"), End(120, "no@42"), End(120, "no@41"), End(120, "no@42")],
        [0, 0, 1, 2],
        None,
    ),
    "another message is another failure": (
        [End(120, "no@41"), End(120, "never@41"), End(120, "no@41")],
        [0, 0, 1],
        None,
    ),
    "before that step it is the same failure, too": (
        [End(120, "no@41"), End(110, "no@41"), End(120, "no@41")],
        [0, 0],
        "3 failures in a row that did not get past step 120: ValueError (/job/train.py:41 in main)",
    ),
    "a signal at the same step is the same failure": (
        [End(120), End(120), End(120)],
        [0, 0],
        f"{AT_120}: was killed by SIGKILL",
    ),
    "signals at different steps come from outside": (
        [End(120), End(110), End(115), End(101)],
        [0, 0, 1, 2],
        None,
    ),
    "another signal is another failure": (
        [End(120), End(120, "SIGSEGV"), End(120)],
        [0, 0, 1],
        None,
    ),
    "a hang is a failure like any other": (
        [End(120, "hang"), End(120, "hang"), End(120, "hang")],
        [0, 0],
        f"{AT_120}: {NO_PROGRESS} 64.0 s",
    ),
    "a program that reports no step is restarted without limit": (
        [End(None, "no@41", ran_s=600)] * 5,
        [0] * 5,
        None,
    ),
    "after longer and longer waits if it ends within seconds": (
        [End(None, "no@41")] * 5,
        [0, 1, 2, 4, 8],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_restarts_of_a_history(name: str) -> None:
    """Generations that end like this are followed by others after these waits, then by none."""
    ends, waits, why_not = HISTORIES[name]

    assert play(ends) == (waits, why_not)


ENDS = st.builds(
    End,
    st.none() | st.integers(0, 4),
    st.sampled_from(["SIGKILL", "SIGSEGV", "hang", "no@41", "no@42"]),
    st.sampled_from([1.0, 60.0]),
)


@given(st.lists(ENDS, max_size=12))
def test_ranks_that_make_progress_restart_at_once(ends: list[End]) -> None:
    """No wait exceeds a minute, and ranks that report no step are never given up."""
    waits, why_not = play(ends)
    best = -1
    for end, wait in zip(ends, waits, strict=False):
        progressed = end.step is not None and end.step > best
        best = max(best, end.step if end.step is not None else -1)
        assert 0 <= wait <= 60
        assert not (progressed and wait)
    if why_not is not None:
        last = ends[len(waits) - 2 : len(waits) + 1]
        assert {end.how for end in last} == {last[0].how}
        assert max(end.step or -1 for end in last[1:]) <= best
    else:
        assert len(waits) == len(ends)
    assert why_not is None or any(end.step is not None for end in ends)


def waiting(nodes: NodesState = ALONE) -> State:
    """Return a launch that waits for its second restart, due at 10 s."""
    causes = tuple(
        Cause(rank=0, description="exited with code 3", raised=None, ran_s=1.0, at_ns=each * S)
        for each in (1, 2)
    )
    return launch(
        1, max_restarts=9, causes=causes, phase=Phase.WAITING, begin_ns=10 * S, nodes=nodes
    )


def test_a_signal_ends_the_wait() -> None:
    """Nothing starts when the wait would have ended."""
    signalled = SignalArrived(signum=signal.SIGTERM, at_ns=5 * S)

    _, taken = follow(waiting(), signalled, TimePassed(at_ns=10 * S))

    assert taken == [EndZygote(by_force=True)]


def test_ranks_that_have_ended_do_not_hang() -> None:
    """One may succeed while it is being asked where it is, and then nothing is wrong."""
    events = events_of(End(5), 0.0)
    events[-1] = RankExited(rank=0, pid=100, wait_status=0, at_ns=S)
    hung = Hung(idle_s=60.0, at_ns=2 * S)
    state, _ = follow(launch(1, phase=Phase.WAITING), *events, hung)

    assert (state.hung, state.stopping) == (None, False)


def test_a_zygote_that_is_lost_meanwhile_is_another_failure() -> None:
    """If a restart is left, another zygote imports during the wait for it."""
    state, taken = follow(waiting(), lost := ZygoteGone(wait_status=9, at_ns=5 * S))

    assert taken == [StartZygote()]
    assert (state.restarts, state.causes[-1].description) == (
        3,
        f"{ZYGOTE} was killed by SIGKILL",
    )
    ready = ZygoteReady(at_ns=6 * S, import_ns=S)
    assert follow(state, ready, TimePassed(at_ns=7 * S))[1] == [StartAll(generation=3)]
    assert advance(replace(waiting(), max_restarts=2), lost)[0].over


def test_each_node_waits_by_itself() -> None:
    """All know the same failures, so a node that learns of another's end has nothing to stop."""
    causes = waiting().causes
    cleared = NodesState(phase=NodesPhase.CLEARED)
    before = launch(
        1, max_restarts=9, causes=causes[:1], stop=Stop.ASKED, phase=Phase.CLEARING, nodes=cleared
    )
    begins = NextBegins(generation=2, cause=causes[1], at_ns=9 * S)
    others = GenerationAborted(why="node1 was stopped by SIGTERM", signum=15, at_ns=7 * S)

    after, actions = advance(before, begins)
    assert (after.wake_ns, actions) == (10 * S, [])
    assert follow(before, begins, TimePassed(at_ns=10 * S))[1] == [StartAll(generation=2)]
    ended = GenerationEnded(at_ns=11 * S)
    _, taken = follow(
        waiting(NodesState(phase=NodesPhase.RUNNING)), others, TimePassed(at_ns=10 * S), ended
    )
    assert taken == [EndGeneration(grace_s=2.0), Report(what="cleared")]


def test_a_signal_to_one_waiting_node_is_reported_to_all() -> None:
    """It ends the launch, not this node alone."""
    signalled = SignalArrived(signum=signal.SIGTERM, at_ns=5 * S)
    _, taken = follow(waiting(NodesState(phase=NodesPhase.RUNNING)), signalled)

    assert taken == [Report(what="failed"), EndZygote(by_force=True)]


def test_skipped_time_makes_nothing_due() -> None:
    """Neither the next start nor the end of the grace period."""
    waits, ends = waiting(), replace(waiting(), begin_ns=None, stop=Stop.ASKED, deadline_ns=30 * S)

    later = skip_time(waits, 100 * S)
    assert (later.wake_ns, skip_time(ends, 100 * S).wake_ns) == (110 * S, 130 * S)
    assert follow(later, TimePassed(at_ns=109 * S))[1] == []
    assert follow(later, TimePassed(at_ns=110 * S))[1] == [StartAll(generation=2)]
    assert not advance(skip_time(ends, 100 * S), TimePassed(at_ns=129 * S))[0].killed
    assert advance(skip_time(ends, 100 * S), TimePassed(at_ns=130 * S))[0].killed
