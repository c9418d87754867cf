"""What a launch does next, as a table of histories."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from meshrun.errors import HostError
from meshrun.events import (
    Event,
    GenerationEnded,
    OthersFailed,
    ProgramBroken,
    RankExited,
    RankFinished,
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
from meshrun.layout import solve_layout
from meshrun.result import LaunchResult, Timings
from meshrun.spec import parse_mesh
from meshrun.supervise.actions import (
    Action,
    EndGeneration,
    EndZygote,
    OpenGate,
    Signal,
    StartAll,
    StartOver,
)
from meshrun.supervise.here import LEFTOVER_GRACE_S
from meshrun.supervise.known import Abroad, RankState, State
from meshrun.supervise.outcome import build_result
from meshrun.supervise.state import step
from tests.histories import play as play_events

S = 1_000_000_000
READY = ZygoteReady(at_ns=0, import_ns=0)
STARTED = [RankStarted(rank=rank, pid=100 + rank, at_ns=0) for rank in range(3)]
GONE = ZygoteGone(wait_status=0, at_ns=99 * S)
LOST_STORE = StoreEnded(wait_status=9, at_ns=5 * S)
KILLED_ZYGOTE = ZygoteGone(wait_status=9, at_ns=99 * S)


def exited(rank: int, status: int, at_s: float) -> RankExited:
    return RankExited(rank=rank, pid=100 + rank, wait_status=status, at_ns=int(at_s * S))


def raised(rank: int, at_s: float, message: str = "bad", kind: str = "RuntimeError") -> RankRaised:
    return RankRaised(
        rank=rank,
        at_ns=int(at_s * S),
        kind=kind,
        message=message,
        traceback=f"{kind}: {message}\n",
        shown=False,
    )


def signalled(signum: int, at_s: float) -> SignalArrived:
    return SignalArrived(signum=signum, at_ns=int(at_s * S))


def passed(at_s: float) -> TimePassed:
    return TimePassed(at_ns=int(at_s * S))


def term(*ranks: int) -> Signal:
    return Signal(ranks=ranks, signum=signal.SIGTERM)


def kill(*ranks: int) -> Signal:
    return Signal(ranks=ranks, signum=signal.SIGKILL, whole_group=True)


FINISH = EndZygote(grace_s=LEFTOVER_GRACE_S)
FINISH_AT_ONCE = EndZygote(grace_s=0.0)
BY_FORCE = EndZygote(by_force=True)

HISTORIES: dict[str, tuple[list[Event], list[Action]]] = {
    "ranks start when the zygote is ready": ([READY], [StartAll(generation=0)]),
    "an unsafe zygote is replaced": ([ZygoteUnsafe(reason="x")], [StartOver(reason="x")]),
    "the zygote ends after the last rank": (
        [*STARTED, exited(0, 0, 1), exited(1, 0, 1), exited(2, 0, 1)],
        [FINISH],
    ),
    "the first failure ends the rest": ([*STARTED, exited(1, 9, 5)], [term(0, 2)]),
    "an exception counts before its process has ended": (
        [*STARTED, raised(1, 5), exited(1, 1 << 8, 6)],
        [term(0, 2)],
    ),
    "a second failure ends nobody again": (
        [*STARTED, exited(1, 9, 5), exited(0, 1 << 8, 5.1)],
        [term(0, 2)],
    ),
    "a deaf rank is killed after the grace period": (
        [*STARTED, exited(1, 9, 5), passed(34.9), passed(35)],
        [term(0, 2), kill(0, 2)],
    ),
    "a rank that raised and does not end is killed too": (
        [*STARTED, raised(1, 5), exited(0, 15, 6), exited(2, 15, 6), passed(35)],
        [term(0, 2), kill(1)],
    ),
    "a zygote that does not answer is ended by force": (
        [*STARTED, exited(1, 9, 5), passed(35), passed(41)],
        [term(0, 2), kill(0, 2), BY_FORCE],
    ),
    "a rank that starts too late is told at once": (
        [*STARTED[:2], exited(1, 9, 5), STARTED[2]],
        [term(0), term(2)],
    ),
    "SIGINT is passed on": (
        [*STARTED, signalled(signal.SIGINT, 5)],
        [Signal(ranks=(0, 1, 2), signum=signal.SIGINT)],
    ),
    "a reader that went away asks ranks to end": (
        [*STARTED, signalled(signal.SIGPIPE, 5)],
        [term(0, 1, 2)],
    ),
    "a second signal shortens the grace period": (
        [*STARTED, signalled(15, 5), signalled(15, 6), passed(8)],
        [term(0, 1, 2), kill(0, 1, 2)],
    ),
    "a third signal ends it at once": (
        [*STARTED, signalled(15, 5), signalled(15, 6), signalled(15, 6.1)],
        [term(0, 1, 2), kill(0, 1, 2)],
    ),
    "signals after the third put nothing off": (
        [*STARTED, *(signalled(15, at) for at in (5, 6, 6.1, 10, 11)), passed(11.2)],
        [term(0, 1, 2), kill(0, 1, 2), BY_FORCE],
    ),
    "a signal before any rank needs no grace": ([signalled(15, 1)], [BY_FORCE]),
    "ranks do not start once the launch is ending": (
        [signalled(15, 1), READY, ZygoteUnsafe(reason="x")],
        [BY_FORCE],
    ),
    "a rank that cannot be made ends the launch": (
        [*STARTED[:2], StartFailed(rank=2, error="EAGAIN", at_ns=5 * S), exited(0, 15, 6),
         exited(1, 15, 6)],
        [term(0, 1), FINISH],
    ),
    "no rank can be made at all": (
        [StartFailed(rank=0, error="EAGAIN", at_ns=5 * S)],
        [FINISH],
    ),
    "finished ranks wait for the last": (
        [*STARTED, RankFinished(rank=0, at_ns=S), RankFinished(rank=1, at_ns=S), exited(2, 0, 2),
         exited(0, 0, 3), exited(1, 0, 3)],
        [OpenGate(), FINISH],
    ),
    "finished ranks leave when another fails": (
        [*STARTED, RankFinished(rank=0, at_ns=S), exited(2, 9, 2)],
        [term(0, 1), OpenGate()],
    ),
    "the store's end ends the launch": (
        [*STARTED, LOST_STORE],
        [term(0, 1, 2)],
    ),
    "after SIGKILL leftovers get no grace either": (
        [*STARTED, exited(1, 9, 5), passed(35), exited(0, 9, 36), exited(2, 9, 36)],
        [term(0, 2), kill(0, 2), FINISH_AT_ONCE],
    ),
}  # fmt: skip


def play(events: list[Event], max_restarts: int = 0) -> tuple[State, list[Action]]:
    """Return the last state of such a launch, and what was done in it."""
    return play_events(events, max_restarts=max_restarts, ranks=3)


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name: str) -> None:
    """A launch in such a history takes these actions and no others."""
    events, expected = HISTORIES[name]
    _, taken = play(events)

    assert taken == expected


def test_one_signal_to_every_node_is_one() -> None:
    """A node that hears of another's first keeps its grace; a second signal of its own counts."""
    state = State(
        shutdown_timeout_s=30.0,
        ranks={rank: RankState() for rank in range(3)},
        abroad=Abroad(is_met=True),
    )
    histories = [*STARTED, OthersFailed(why="node1 was stopped", signum=15, at_ns=5 * S)]
    for event in [*histories, signalled(15, 6)]:
        state, _ = step(state, event)
    once = state
    twice, _ = step(once, signalled(15, 7))
    other, _ = step(replace(once, signals=()), signalled(signal.SIGINT, 7))

    assert [each.deadline_ns for each in (once, twice, other)] == [35 * S, 9 * S, 9 * S]


def test_a_sigterm_that_slurm_repeats_is_one() -> None:
    """Ranks keep their grace then, and Ctrl-C still counts."""
    state = State(
        shutdown_timeout_s=30.0,
        ranks={rank: RankState() for rank in range(3)},
        sigterm_repeats=True,
    )
    for event in [*STARTED, *(signalled(15, at) for at in (5, 5.1, 5.2, 6))]:
        state, _ = step(state, event)
    interrupted, _ = step(state, signalled(signal.SIGINT, 7))

    assert [each.deadline_ns for each in (state, interrupted)] == [35 * S, 9 * S]
    assert not state.killed


CLEARED = GenerationEnded(at_ns=7 * S)
AGAIN = EndGeneration(grace_s=LEFTOVER_GRACE_S)
LOST_ONE = [exited(1, 9, 5), exited(0, 15, 6), exited(2, 15, 6)]
RUNNING = [*STARTED, *(RankReady(rank=rank, at_ns=4 * S) for rank in range(3))]
NO_MODULE = [
    raised(1, 5, "No module named 'x'", "ModuleNotFoundError"),
    exited(1, 1 << 8, 5),
    exited(0, 15, 6),
    exited(2, 15, 6),
]

RESTARTS: dict[str, tuple[int, list[Event], list[Action]]] = {
    "a failure starts all again": (
        1,
        [*STARTED, *LOST_ONE, CLEARED],
        [term(0, 2), AGAIN, StartAll(generation=1)],
    ),
    "until no restart is left": (
        1,
        [*STARTED, *LOST_ONE, CLEARED, *STARTED, *LOST_ONE],
        [term(0, 2), AGAIN, StartAll(generation=1), term(0, 2), FINISH],
    ),
    "after which all may end well": (
        3,
        [*STARTED, *LOST_ONE, CLEARED, *STARTED, *(exited(r, 0, 9) for r in range(3))],
        [term(0, 2), AGAIN, StartAll(generation=1), FINISH],
    ),
    "a signal to the launcher is no failure": (
        3,
        [*STARTED, signalled(15, 5), *(exited(r, 15, 6) for r in range(3))],
        [term(0, 1, 2), FINISH],
    ),
    "a signal between two generations ends it": (
        3,
        [*STARTED, *LOST_ONE, signalled(15, 6.5), CLEARED],
        [term(0, 2), AGAIN, BY_FORCE],
    ),
    "a zygote that does not clear up is ended by force": (
        3,
        [*STARTED, *LOST_ONE, passed(12)],
        [term(0, 2), AGAIN, BY_FORCE],
    ),
    "the lost store may be had anew": (
        1,
        [*STARTED, LOST_STORE, *(exited(r, 15, 6) for r in range(3))],
        [term(0, 1, 2), AGAIN],
    ),
    "a module that is not there is tried once more, and no more": (
        9,
        [*RUNNING, *NO_MODULE, CLEARED, *RUNNING, *NO_MODULE],
        [term(0, 2), AGAIN, StartAll(generation=1), term(0, 2), FINISH],
    ),
    "another error in between is another matter": (
        9,
        [*RUNNING, *NO_MODULE, CLEARED, *RUNNING, *LOST_ONE],
        [term(0, 2), AGAIN, StartAll(generation=1), term(0, 2), AGAIN],
    ),
    "a program that cannot be read is not tried again": (
        9,
        [ProgramBroken(text="SyntaxError", exit_code=1), GONE],
        [],
    ),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_restarts(name: str) -> None:
    """A launch with so many restarts left takes these actions and no others."""
    max_restarts, events, expected = RESTARTS[name]
    _, taken = play(events, max_restarts)

    assert taken == expected


def test_a_useless_restart_is_explained() -> None:
    """The state says why nothing is tried any more."""
    state, _ = play([*RUNNING, *NO_MODULE, CLEARED, *RUNNING, *NO_MODULE], 9)

    assert state.no_restart == (
        "it raised ModuleNotFoundError: No module named 'x' at once after each of 2 starts"
    )


@pytest.mark.parametrize(
    ("ended_by", "code", "says"),
    [("somebody", 139, "starts the ranks was ended by SIGSEGV"), ("us", 9, None)],
)
def test_a_zygote_that_ends_between_two_generations(
    ended_by: str, code: int, says: str | None
) -> None:
    """It is the cause if it was killed, and not if it was ended for not clearing up."""
    killed = ZygoteGone(wait_status=11, at_ns=12 * S)
    gone = [passed(12), KILLED_ZYGOTE] if ended_by == "us" else [killed]
    state, _ = play([*STARTED, *(exited(rank, 9 << 8, 5) for rank in range(3)), *gone], 1)
    result = build_result(
        state, solve_layout(parse_mesh("dp=3")), hosts=["node"], timings=Timings(began_ns=0)
    )

    assert result.exit_code == code
    assert (says is None) == (result.trouble is None)
    assert says is None or says in str(result.trouble)


def result_of(*events: Event) -> LaunchResult:
    state, _ = play([*STARTED, *events])
    layout = solve_layout(parse_mesh("dp=3"))
    return build_result(state, layout, hosts=["node"], timings=Timings(began_ns=0))


PEER_GONE = "[..] Connection closed by peer [127.0.0.1]:3"
ALL_WELL = [exited(rank, 0, 1) for rank in range(3)]

OUTCOMES: dict[str, tuple[list[Event], int, int | None]] = {
    "all well": ([*ALL_WELL, GONE], 0, None),
    "own exit code": ([exited(1, 7 << 8, 5), exited(0, 15, 6), exited(2, 15, 6), GONE], 7, 1),
    "a signal is 128 + n": ([exited(2, 11, 5), exited(0, 15, 6), exited(1, 15, 6), GONE], 139, 2),
    "the exception is older than the exit": (
        [raised(2, 5), exited(0, 3 << 8, 5.5), exited(2, 1 << 8, 6), exited(1, 15, 6), GONE],
        1,
        2,
    ),
    "peers' lost connections come first and are no cause": (
        [raised(0, 5.00, PEER_GONE), raised(2, 5.001, PEER_GONE), exited(1, 9, 5.002),
         exited(0, 1 << 8, 5.1), exited(2, 1 << 8, 5.1), GONE],
        137,
        1,
    ),
    "only lost connections: the first of them": (
        [raised(0, 5.0, PEER_GONE), exited(0, 1 << 8, 5.1), exited(1, 15, 6), exited(2, 15, 6),
         GONE],
        1,
        0,
    ),
    "dying of our SIGKILL is no cause": (
        [exited(1, 3 << 8, 5), passed(35), exited(0, 9, 36), exited(2, 9, 36), GONE],
        3,
        1,
    ),
    "our SIGTERM meets a rank that is ending of its exception": (
        [raised(2, 5), raised(1, 4.999), exited(1, 15, 5.1), exited(2, 1 << 8, 5.2),
         exited(0, 15, 6), GONE],
        1,
        1,
    ),
    "obeying late is no cause": (
        [raised(0, 5, PEER_GONE), exited(0, 1 << 8, 5.1), exited(1, 5 << 8, 6), exited(2, 15, 6),
         GONE],
        1,
        0,
    ),
    "the launcher's signal decides": (
        [signalled(15, 5), exited(0, 15, 6), exited(1, 3 << 8, 6), exited(2, 15, 6), GONE],
        143,
        0,
    ),
    "a killed zygote": ([KILLED_ZYGOTE], 137, None),
    "a zygote that is killed while ranks end": ([exited(1, 3 << 8, 5), KILLED_ZYGOTE], 3, 1),
    "a lost store": (
        [StoreEnded(wait_status=9, at_ns=S), *(exited(r, 15, 2) for r in range(3)), GONE],
        71,
        0,
    ),
    "a store that is lost while ranks end": (
        [exited(1, 3 << 8, 5), LOST_STORE, exited(0, 15, 6), exited(2, 15, 6), GONE],
        3,
        1,
    ),
    "a store that is lost after its ranks had noticed": (
        [raised(0, 5, PEER_GONE), LOST_STORE, *(exited(r, 1 << 8, 6) for r in range(3)), GONE],
        71,
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcome(name: str) -> None:
    """Such an end has this exit code and this rank as its cause."""
    events, exit_code, cause = OUTCOMES[name]
    result = result_of(*events)

    assert result.exit_code == exit_code
    assert (result.failures[0].rank if result.failures else None) == cause


def test_a_broken_program_ends_with_its_own_code() -> None:
    """Nothing was started, and python's text is kept."""
    state, _ = play([ProgramBroken(text="SyntaxError", exit_code=1), GONE])
    layout = solve_layout(parse_mesh("dp=3"))
    result = build_result(state, layout, hosts=["node"], timings=Timings(began_ns=0))

    assert (result.exit_code, result.broken_program) == (1, "SyntaxError")


def test_a_rank_that_cannot_start_is_the_machines_trouble() -> None:
    """The error names the rank and what the system said."""
    failed = StartFailed(rank=2, error="Resource temporarily unavailable", at_ns=S)
    state, _ = play([*STARTED[:2], failed, exited(0, 15, 6), exited(1, 15, 6), GONE])
    layout = solve_layout(parse_mesh("dp=3"))
    result = build_result(state, layout, hosts=["node"], timings=Timings(began_ns=0))

    assert isinstance(result.trouble, HostError)
    assert "rank 2 could not be started: Resource temporarily unavailable" in str(result.trouble)
    assert result.exit_code == 71


def test_stepping_never_changes_the_state_it_was_given() -> None:
    """States are values; a watcher may keep them."""
    state, _ = play(STARTED)
    before = replace(state)
    step(state, exited(1, 9, 5))

    assert state == before
