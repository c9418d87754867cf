"""What a launcher does next when there are other nodes, as a table of histories."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import RendezvousError
from meshrun.events import (
    AllIdle,
    Event,
    GenerationEnded,
    LaunchOver,
    MeetingFailed,
    Met,
    NextBegins,
    NodeLost,
    OthersFailed,
    OthersFinished,
    ProgramBroken,
    RankExited,
    RankFinished,
    RankStarted,
    SignalArrived,
    StartFailed,
    StoreEnded,
    TimePassed,
    ZygoteGone,
    ZygoteReady,
)
from meshrun.layout import solve_layout
from meshrun.result import LaunchResult, Timings
from meshrun.spec import parse_mesh
from meshrun.supervise.actions import (
    Action,
    Decide,
    EndGeneration,
    EndZygote,
    OpenGate,
    Signal,
    StartAll,
    Tell,
    WakeAt,
)
from meshrun.supervise.evidence import Evidence
from meshrun.supervise.here import LEFTOVER_GRACE_S
from meshrun.supervise.known import Abroad, Cause, State
from meshrun.supervise.outcome import build_result, find_trouble, headline
from meshrun.supervise.outcome_json import cause_to_json, outcome_to_json
from meshrun.supervise.state import step
from tests.histories import play as play_events

S = 1_000_000_000
READY = ZygoteReady(at_ns=0, import_ns=0)
CLEARED = GenerationEnded(at_ns=7 * S)
GONE = ZygoteGone(wait_status=0, at_ns=99 * S)
LOST_GUARD = StoreEnded(wait_status=9, at_ns=5 * S)
KILLED_ZYGOTE = ZygoteGone(wait_status=9, at_ns=99 * S)
OTHERS_FAILED = OthersFailed(why="rank 2 failed", signum=0, at_ns=5 * S)
OTHERS_FINISHED = OthersFinished(at_ns=6 * S)
HEAD_LOST = NodeLost(node_rank=0, host="node0", why="it closed the connection", at_ns=5 * S)
NODE_LOST = NodeLost(node_rank=1, host="node1", why="it fell silent", at_ns=5 * S)
CAUSE = Cause(rank=2, description="exited with code 7", raised=None, ran_s=None, at_ns=5 * S)
NEXT = NextBegins(generation=1, cause=cause_to_json(CAUSE), at_ns=8 * S)
NOT_MET = MeetingFailed(error=RendezvousError("1 of 2 nodes joined"), at_ns=5 * S)

FINISH = EndZygote(grace_s=LEFTOVER_GRACE_S)
CLEAR = EndGeneration(grace_s=LEFTOVER_GRACE_S)
BY_FORCE = EndZygote(by_force=True)
END = EndZygote()
START = StartAll(generation=0)
FAILED, FINISHED, IDLE = Tell(what="failed"), Tell(what="finished"), Tell(what="idle")
THE_END = Decide(next_after=None)


def met(node_rank: int) -> Met:
    ranks = (0, 1) if node_rank == 0 else (2, 3)
    return Met(
        node_rank=node_rank, hosts=("node0", "node1"), nproc_per_node=(2, 2), run_id="r",
        store_address="10.0.0.1", store_port=1, own_address="10.0.0.2", at_ns=1, ranks=ranks,
    )  # fmt: skip


def started(*ranks: int) -> list[Event]:
    return [RankStarted(rank=rank, pid=100 + rank, at_ns=0) for rank in ranks]


def exited(rank: int, status: int, at_s: float) -> RankExited:
    return RankExited(rank=rank, pid=100 + rank, wait_status=status, at_ns=int(at_s * S))


def finished(*ranks: int) -> list[Event]:
    return [RankFinished(rank=rank, at_ns=3 * S) for rank in ranks]


def signalled(signum: int, at_s: float) -> SignalArrived:
    return SignalArrived(signum=signum, at_ns=int(at_s * S))


def over(code: int, headline: str = "rank 2 failed", signum: int | None = None) -> LaunchOver:
    return LaunchOver(
        exit_code=code, signum=signum, preempted=False, headline=headline, at_ns=9 * S
    )


def term(*ranks: int) -> Signal:
    return Signal(ranks=ranks, signum=signal.SIGTERM)


def kill(*ranks: int) -> Signal:
    return Signal(ranks=ranks, signum=signal.SIGKILL, whole_group=True)


def told(*ranks: tuple[int, int], trouble: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the other node says: these of its ranks ended so."""
    return {
        "host": "node1",
        "headline": "rank 2 failed",
        "signum": 0,
        "is_well": not ranks,
        "killed": False,
        "trouble": trouble,
        "ranks": {
            str(rank): {
                "pid": 100 + rank,
                "exited": {"rank": rank, "pid": 100 + rank, "wait_status": status, "at_ns": 5 * S},
            }
            for rank, status in ranks
        },
        "evidence": {},
    }


def all_idle(*outcomes: dict[str, Any]) -> AllIdle:
    return AllIdle(outcomes=outcomes, at_ns=8 * S)


HEAD: list[Event] = [READY, met(0), *started(0, 1)]
MEMBER: list[Event] = [READY, met(1), *started(2, 3)]
HEAD_ENDED: list[Event] = [exited(0, 15, 6), exited(1, 15, 6)]
MEMBER_ENDED: list[Event] = [exited(2, 15, 6), exited(3, 15, 6)]
DIES: list[Event] = [exited(2, 7 << 8, 5), exited(3, 15, 6)]
WELL: list[Event] = [exited(0, 0, 5), exited(1, 0, 5)]
WELL_THERE: list[Event] = [exited(2, 0, 5), exited(3, 0, 5)]

HISTORIES: dict[str, tuple[list[Event], list[Action]]] = {
    "ranks wait for the nodes": ([READY], []),
    "and for the zygote": ([met(1)], []),
    "nodes first, zygote later": ([met(1), READY], [START]),
    "zygote first, nodes later": ([READY, met(0)], [START]),
    "nodes that do not meet end it at once": ([READY, NOT_MET], [BY_FORCE]),
    "once": ([READY, NOT_MET, NOT_MET], [BY_FORCE]),
    "others fail while this one still imports": (
        [met(1), OTHERS_FAILED, READY],
        [CLEAR],
    ),
    "one that failed while importing says that nothing is left": (
        [met(1), OTHERS_FAILED, READY, CLEARED],
        [CLEAR, IDLE],
    ),
    "a signal while waiting for the others": ([READY, signalled(15, 3)], [BY_FORCE]),
    "a failure is told to the head": (
        [*MEMBER, exited(2, 7 << 8, 5)],
        [START, term(3), FAILED],
    ),
    "then that nothing is left, and the head says what comes next": (
        [*MEMBER, *DIES, CLEARED],
        [START, term(3), FAILED, CLEAR, IDLE],
    ),
    "the end as the head decides it": (
        [*MEMBER, *DIES, CLEARED, over(7), GONE],
        [START, term(3), FAILED, CLEAR, IDLE, END],
    ),
    "the next generation as the head decides it": (
        [*MEMBER, *DIES, CLEARED, NEXT],
        [START, term(3), FAILED, CLEAR, IDLE, StartAll(generation=1)],
    ),
    "and the end of that one": (
        [*MEMBER, *DIES, CLEARED, NEXT, *started(2, 3), *WELL_THERE, CLEARED, over(0, "")],
        [START, term(3), FAILED, CLEAR, IDLE, StartAll(generation=1), FINISHED, CLEAR, IDLE, END],
    ),
    "another node's failure ends the ranks here, and is not told back": (
        [*MEMBER, OTHERS_FAILED, *MEMBER_ENDED, CLEARED],
        [START, term(2, 3), CLEAR, IDLE],
    ),
    "with the signal that the other node had": (
        [*MEMBER, OthersFailed(why="stopped", signum=signal.SIGINT, at_ns=5 * S)],
        [START, Signal(ranks=(2, 3), signum=signal.SIGINT)],
    ),
    "ranks that do not heed it are killed": (
        [*MEMBER, OTHERS_FAILED, TimePassed(at_ns=35 * S)],
        [START, term(2, 3), kill(2, 3)],
    ),
    "finished ranks wait for those of other nodes": (
        [*MEMBER, *finished(2, 3)],
        [START, FINISHED],
    ),
    "until all have finished": (
        [*MEMBER, *finished(2, 3), OTHERS_FINISHED, *WELL_THERE, CLEARED],
        [START, FINISHED, OpenGate(), CLEAR, IDLE],
    ),
    "or one failed": (
        [*MEMBER, *finished(2), exited(3, 9, 5)],
        [START, term(2), OpenGate(), FAILED],
    ),
    "the head hears that all are idle, and ends it": (
        [*HEAD, *WELL, CLEARED, all_idle(told())],
        [START, FINISHED, CLEAR, IDLE, THE_END],
    ),
    "a lost node ends the ranks, and is no news to the head": (
        [*HEAD, NODE_LOST],
        [START, term(0, 1)],
    ),
    "a second lost node ends nobody again": (
        [*HEAD, NODE_LOST, NODE_LOST],
        [START, term(0, 1)],
    ),
    "a lost head: this node ends by itself": (
        [*MEMBER, HEAD_LOST, *MEMBER_ENDED, GONE],
        [START, term(2, 3), FINISH],
    ),
    "a head lost while nothing is left here": (
        [*MEMBER, *DIES, CLEARED, HEAD_LOST],
        [START, term(3), FAILED, CLEAR, IDLE, END],
    ),
    "a head lost while the zygote clears up": (
        [*MEMBER, *DIES, HEAD_LOST, CLEARED],
        [START, term(3), FAILED, CLEAR, END],
    ),
    "a head lost before ranks are started": (
        [met(1), HEAD_LOST, READY],
        [FINISH],
    ),
    "a signal is told to the head": (
        [*MEMBER, signalled(15, 5), *MEMBER_ENDED, CLEARED],
        [START, term(2, 3), FAILED, CLEAR, IDLE],
    ),
    "a signal while waiting for the head": (
        [*MEMBER, *DIES, CLEARED, signalled(15, 8)],
        [START, term(3), FAILED, CLEAR, IDLE],
    ),
    "a third signal leaves without it": (
        [*MEMBER, *DIES, CLEARED, signalled(15, 8), signalled(15, 8), signalled(15, 8)],
        [START, term(3), FAILED, CLEAR, IDLE, BY_FORCE],
    ),
    "a zygote that is gone is a failure, and nothing is left": (
        [*MEMBER, KILLED_ZYGOTE],
        [START, FAILED, IDLE],
    ),
    "what comes next finds no zygote, and the others are told": (
        [*MEMBER, KILLED_ZYGOTE, NEXT, over(137)],
        [START, FAILED, IDLE, FAILED, IDLE],
    ),
    "so, too, if it died once no rank was left": (
        [*MEMBER, *DIES, CLEARED, KILLED_ZYGOTE, NEXT, over(137)],
        [START, term(3), FAILED, CLEAR, IDLE, FAILED, IDLE],
    ),
    "a signal once no rank is left ends the generation that comes next": (
        [*MEMBER, *DIES, CLEARED, signalled(15, 7.5), NEXT, CLEARED, over(143, signum=15), GONE],
        [START, term(3), FAILED, CLEAR, IDLE, FAILED, CLEAR, IDLE, END],
    ),
    "a guard that is killed while ranks end is no matter": (
        [*MEMBER, OTHERS_FAILED, LOST_GUARD, *MEMBER_ENDED],
        [START, term(2, 3), CLEAR],
    ),
    "a program that is broken here is a failure of all": (
        [met(1), ProgramBroken(text="SyntaxError: x", exit_code=1), GONE],
        [FAILED, IDLE],
    ),
}  # fmt: skip


def play(events: list[Event], max_restarts: int = 0) -> tuple[State, list[Action]]:
    """Return the last state of such a launch, and what was done in it."""
    return play_events(events, max_restarts=max_restarts, ranks=2, abroad=Abroad())


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name: str) -> None:
    """A launch in such a history takes these actions and no others."""
    events, expected = HISTORIES[name]
    _, taken = play(events)

    assert taken == expected


def test_a_plan_that_fails_once_all_have_met_is_told() -> None:
    """The others are about to start ranks; and the head hears that none is left here."""
    state = State(shutdown_timeout_s=30.0, ranks={}, abroad=Abroad(is_met=True), zygote_ready=True)
    state, first = step(state, NOT_MET)
    state, then = step(state, CLEARED)

    assert [each for each in (*first, *then) if not isinstance(each, WakeAt)] == [
        FAILED, CLEAR, IDLE,
    ]  # fmt: skip


OVER: dict[str, tuple[list[Event], bool]] = {
    "a member whose zygote is gone waits for the head": ([*MEMBER, KILLED_ZYGOTE], False),
    "and is over with what it says": ([*MEMBER, KILLED_ZYGOTE, over(137)], True),
    "or without, if the head is lost": ([*MEMBER, KILLED_ZYGOTE, HEAD_LOST], True),
    "nodes that never met have nobody to wait for": ([READY, NOT_MET, GONE], True),
    "a broken program before the nodes met": (
        [ProgramBroken(text="SyntaxError: x", exit_code=1), GONE], True,
    ),
    "the head waits for itself too": ([*HEAD, *WELL, CLEARED, all_idle(told()), GONE], False),
    "a third signal waits for nobody": (
        [*MEMBER, signalled(15, 5), signalled(15, 5), signalled(15, 5), KILLED_ZYGOTE], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER)
def test_what_is_waited_for(name: str) -> None:
    """A launch in such a history is over, or is not."""
    events, is_over = OVER[name]

    assert play(events)[0].over is is_over


def decided(events: list[Event], max_restarts: int = 0) -> Decide:
    """Return what the head decided last."""
    taken = play(events, max_restarts)[1]
    return [action for action in taken if isinstance(action, Decide)][-1]


TWO_DIED = told((2, 7 << 8), (3, 15))
TROUBLE = told(trouble={"message": "no room", "hint": None, "exit_code": 71})


def test_the_head_starts_all_again_after_a_failure_elsewhere() -> None:
    """The cause is the other node's rank, and it stays at the head once the next begins."""
    events = [*HEAD, OTHERS_FAILED, *HEAD_ENDED, CLEARED, all_idle(TWO_DIED)]
    cause = decided(events, max_restarts=1).next_after

    assert cause is not None
    assert (cause.rank, cause.description) == (2, "exited with code 7")
    state, taken = play([*events, NEXT], max_restarts=1)
    assert taken[-1] == StartAll(generation=1)
    assert state.causes == (CAUSE,)
    assert state.everywhere.keys() == {0, 1}


@pytest.mark.parametrize(
    ("events", "outcome", "restarts"),
    [
        ([OTHERS_FAILED, *HEAD_ENDED], TWO_DIED, 0),
        ([NODE_LOST, *HEAD_ENDED], None, 3),
        ([OTHERS_FAILED, *HEAD_ENDED], TROUBLE, 3),
        ([OTHERS_FAILED, *HEAD_ENDED], {**told(), "signum": 15}, 3),
        ([signalled(15, 5), *HEAD_ENDED], told(), 3),
        (WELL, told(), 3),
    ],
    ids=["no restart left", "a lost node", "trouble elsewhere", "a signal elsewhere",
         "a signal here", "all went well"],
)  # fmt: skip
def test_the_head_ends_it(
    events: list[Event], outcome: dict[str, Any] | None, restarts: int
) -> None:
    """There is no other start after these."""
    idle = all_idle(*([] if outcome is None else [outcome]))

    assert decided([*HEAD, *events, CLEARED, idle], restarts) == THE_END


def result(events: list[Event]) -> LaunchResult:
    return build_result(
        play(events)[0], solve_layout(parse_mesh("dp=4"), nnodes=2), hosts=["node0", "node1"],
        timings=Timings(began_ns=0),
    )  # fmt: skip


CODES: dict[str, tuple[list[Event], int]] = {
    "all well": ([*HEAD, *WELL, CLEARED, all_idle(told()), over(0, ""), GONE], 0),
    "all well, at a member": ([*MEMBER, *WELL_THERE, CLEARED, over(0, ""), GONE], 0),
    "a rank elsewhere": (
        [*HEAD, OTHERS_FAILED, *HEAD_ENDED, CLEARED, all_idle(TWO_DIED), over(7), GONE], 7,
    ),
    "as the head says": (
        [*MEMBER, OTHERS_FAILED, *MEMBER_ENDED, CLEARED, over(42, "rank 0 failed"), GONE], 42,
    ),
    "trouble elsewhere": (
        [*HEAD, OTHERS_FAILED, *HEAD_ENDED, CLEARED, all_idle(TROUBLE), over(71), GONE], 71,
    ),
    "a signal at the head once all is decided": (
        [*HEAD, *WELL, CLEARED, all_idle(told()), over(0, ""), signalled(15, 9.5), GONE], 0,
    ),
    "a signal at a member once all is decided": (
        [*MEMBER, *WELL_THERE, CLEARED, over(0, ""), signalled(15, 9.5), GONE], 0,
    ),
    "a signal while the head decides": (
        [*MEMBER, *DIES, CLEARED, signalled(15, 8), over(7), GONE], 7,
    ),
    "a lost node": ([*HEAD, NODE_LOST, *HEAD_ENDED, CLEARED, all_idle(), over(69), GONE], 69),
    "a lost head": ([*MEMBER, HEAD_LOST, *MEMBER_ENDED, GONE], 69),
    "nodes that did not meet": ([READY, NOT_MET, ZygoteGone(wait_status=9, at_ns=6 * S)], 69),
    "a head that is lost after a failure here": (
        [*MEMBER, *DIES, HEAD_LOST, CLEARED, GONE], 69,
    ),
    "a signal while nobody else is there": (
        [READY, signalled(15, 3), ZygoteGone(wait_status=9, at_ns=6 * S)], 143,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CODES)
def test_exit_code(name: str) -> None:
    """Such an end has this exit code."""
    events, code = CODES[name]
    came = result(events)

    assert came.exit_code == code
    assert came.signum in (None, code - 128)


def test_the_members_own_report_is_the_heads_headline() -> None:
    """The whole report is on the head."""
    told_of = result([*MEMBER, OTHERS_FAILED, *MEMBER_ENDED, CLEARED, over(42, "rank 0 x"), GONE])

    assert told_of.elsewhere == "rank 0 x"


def test_a_failure_elsewhere_is_named_with_its_host_and_evidence() -> None:
    """As if it had been here."""
    state, _ = play([*MEMBER, *DIES])
    evidence = {2: Evidence(last_lines=("bad",), place="work at train.py:4")}
    outcome = outcome_to_json(state, headline="", trouble=None, evidence=evidence)
    events = [*HEAD, OTHERS_FAILED, *HEAD_ENDED, CLEARED, all_idle(outcome), over(7), GONE]
    (first, *_) = result(events).failures

    assert (first.rank, first.host, first.pid, first.exit_code) == (2, "node1", 102, 7)
    assert (first.last_lines, first.place) == (("bad",), "work at train.py:4")


def test_trouble_is_told_with_its_host() -> None:
    """By the node that has it, to all; by the head of its own, too."""
    layout, hosts = solve_layout(parse_mesh("dp=4"), nnodes=2), ["node0", "node1"]
    killed = "the process that starts the ranks was ended by SIGKILL, and they with it"
    member, _ = play([*MEMBER, KILLED_ZYGOTE])
    line = headline(member, layout, hosts, "node1")
    outcome = outcome_to_json(
        member, headline=line, trouble=find_trouble(member, "node1"), evidence={}
    )
    at_head = result([*HEAD, OTHERS_FAILED, *HEAD_ENDED, CLEARED, all_idle(outcome), over(137)])
    of_head = result([*HEAD, KILLED_ZYGOTE])
    guard, _ = play([*MEMBER, LOST_GUARD])

    assert headline(guard, layout, hosts, "node1") == (
        "on node1, the process that guards the ranks was ended by SIGKILL, and they need it"
    )
    assert at_head.trouble is not None
    assert of_head.trouble is not None
    assert line == at_head.trouble.message == f"on node1, {killed}"
    assert of_head.trouble.message == f"on node0, {killed}"


ANYTHING = [
    *started(2, 3), exited(2, 0, 5), exited(3, 0, 5), exited(2, 9, 5), exited(3, 15, 6),
    *finished(2, 3), OTHERS_FAILED, OTHERS_FINISHED, CLEARED, NEXT, HEAD_LOST, over(7),
    signalled(15, 5), StartFailed(rank=3, error="EAGAIN", at_ns=5 * S),
    LOST_GUARD, TimePassed(at_ns=40 * S),
]  # fmt: skip


@given(events=st.lists(st.sampled_from(ANYTHING), max_size=14))
def test_no_member_stays_without_a_head(events: list[Event]) -> None:
    """Whatever happened before: once the head is lost and its ranks are gone, a launcher ends."""
    state, _ = play([READY, met(1), *events, HEAD_LOST], max_restarts=2)
    state, _ = _go_on(state, [exited(rank, 15, 50) for rank in sorted(state.alive)])
    state, _ = _go_on(state, [CLEARED, TimePassed(at_ns=900 * S), TimePassed(at_ns=999 * S)])

    assert state.finishing
    assert _go_on(state, [GONE])[0].over


def _go_on(state: State, events: Iterable[Event]) -> tuple[State, list[Action]]:
    taken: list[Action] = []
    for event in events:
        state, actions = step(state, event)
        taken += actions
    return state, taken
