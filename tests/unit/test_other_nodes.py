"""What a launcher does next when there are other nodes, as a table of histories."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.lifecycle.actions import Action, OpenGate, Signal, StartAll, StartZygote, WakeAt
from meshrun.lifecycle.phases import NodesPhase, Phase
from meshrun.lifecycle.state import NodesState, State
from meshrun.lifecycle.step import step
from meshrun.protocol.events import Event, GenerationAborted, TimePassed
from meshrun.protocol.from_zygote import ProgramBroken, StartFailed
from tests.histories import (
    BY_FORCE,
    CLEAR,
    CLEARED,
    FINISH,
    GONE,
    KILLED_ZYGOTE,
    LOST_STORE,
    READY,
    S,
    exited,
    kill,
    signalled,
    started,
    term,
)
from tests.node_histories import (
    COORDINATOR,
    COORDINATOR_LOST,
    DIES,
    END,
    FAILED,
    FINISHED,
    IDLE,
    NEXT,
    NODE_LOST,
    NOT_MET,
    OTHERS_FAILED,
    OTHERS_FINISHED,
    PARTICIPANT,
    PARTICIPANT_ENDED,
    START,
    THE_END,
    WELL,
    WELL_THERE,
    all_idle,
    finished,
    met,
    over,
    play,
    reported,
)

NO_RANKS = replace(met(1), ranks=())
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
    "a failure is reported to the coordinator": (
        [*PARTICIPANT, exited(2, 7 << 8, 5)],
        [START, term(3), FAILED],
    ),
    "then that nothing is left, and the coordinator says what comes next": (
        [*PARTICIPANT, *DIES, CLEARED],
        [START, term(3), FAILED, CLEAR, IDLE],
    ),
    "the end as the coordinator decides it": (
        [*PARTICIPANT, *DIES, CLEARED, over(7), GONE],
        [START, term(3), FAILED, CLEAR, IDLE, END],
    ),
    "the next generation as the coordinator decides it": (
        [*PARTICIPANT, *DIES, CLEARED, NEXT],
        [START, term(3), FAILED, CLEAR, IDLE, StartAll(generation=1)],
    ),
    "and the end of that one": (
        [*PARTICIPANT, *DIES, CLEARED, NEXT, *started(2, 3), *WELL_THERE, CLEARED, over(0, "")],
        [START, term(3), FAILED, CLEAR, IDLE, StartAll(generation=1), FINISHED, CLEAR, IDLE, END],
    ),
    "another node's failure ends the ranks here, and is not told back": (
        [*PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, CLEARED],
        [START, term(2, 3), CLEAR, IDLE],
    ),
    "with the signal that the other node had": (
        [*PARTICIPANT, GenerationAborted(why="stopped", signum=signal.SIGINT, at_ns=5 * S)],
        [START, Signal(ranks=(2, 3), signum=signal.SIGINT)],
    ),
    "ranks that do not heed it are killed": (
        [*PARTICIPANT, OTHERS_FAILED, TimePassed(at_ns=35 * S)],
        [START, term(2, 3), kill(2, 3)],
    ),
    "finished ranks wait for those of other nodes": (
        [*PARTICIPANT, *finished(2, 3)],
        [START, FINISHED],
    ),
    "until all have finished": (
        [*PARTICIPANT, *finished(2, 3), OTHERS_FINISHED, *WELL_THERE, CLEARED],
        [START, FINISHED, OpenGate(), CLEAR, IDLE],
    ),
    "or one of another node failed": (
        [*PARTICIPANT, *finished(2, 3), OTHERS_FAILED],
        [START, FINISHED, term(2, 3), OpenGate()],
    ),
    "a node that the mesh has no rank for has finished at once": (
        [NO_RANKS, READY],
        [START, FINISHED],
    ),
    "and ends with the others": (
        [NO_RANKS, READY, OTHERS_FINISHED, CLEARED, over(0, "")],
        [START, FINISHED, OpenGate(), CLEAR, IDLE, END],
    ),
    "or takes part in their next generation": (
        [NO_RANKS, READY, OTHERS_FAILED, CLEARED, NEXT, OTHERS_FINISHED, CLEARED],
        [START, FINISHED, CLEAR, IDLE, StartAll(generation=1), FINISHED, OpenGate(), CLEAR, IDLE],
    ),
    "or one failed": (
        [*PARTICIPANT, *finished(2), exited(3, 9, 5)],
        [START, term(2), OpenGate(), FAILED],
    ),
    "the coordinator learns that all are idle, and ends the launch": (
        [*COORDINATOR, *WELL, CLEARED, all_idle(reported())],
        [START, FINISHED, CLEAR, IDLE, THE_END],
    ),
    "a lost node ends the ranks, and is no news to the coordinator": (
        [*COORDINATOR, NODE_LOST],
        [START, term(0, 1)],
    ),
    "a second lost node ends nobody again": (
        [*COORDINATOR, NODE_LOST, NODE_LOST],
        [START, term(0, 1)],
    ),
    "a lost coordinator: this node ends by itself": (
        [*PARTICIPANT, COORDINATOR_LOST, *PARTICIPANT_ENDED, GONE],
        [START, term(2, 3), FINISH],
    ),
    "a coordinator lost while nothing is left here": (
        [*PARTICIPANT, *DIES, CLEARED, COORDINATOR_LOST],
        [START, term(3), FAILED, CLEAR, IDLE, END],
    ),
    "a coordinator lost while the zygote clears up": (
        [*PARTICIPANT, *DIES, COORDINATOR_LOST, CLEARED],
        [START, term(3), FAILED, CLEAR, END],
    ),
    "a coordinator lost before ranks are started": (
        [met(1), COORDINATOR_LOST, READY],
        [FINISH],
    ),
    "a signal is reported to the coordinator": (
        [*PARTICIPANT, signalled(15, 5), *PARTICIPANT_ENDED, CLEARED],
        [START, term(2, 3), FAILED, CLEAR, IDLE],
    ),
    "a signal while waiting for the coordinator": (
        [*PARTICIPANT, *DIES, CLEARED, signalled(15, 8)],
        [START, term(3), FAILED, CLEAR, IDLE],
    ),
    "a third signal leaves without it": (
        [*PARTICIPANT, *DIES, CLEARED, signalled(15, 8), signalled(15, 8), signalled(15, 8)],
        [START, term(3), FAILED, CLEAR, IDLE, BY_FORCE],
    ),
    "a zygote that is gone is a failure, and nothing is left": (
        [*PARTICIPANT, KILLED_ZYGOTE],
        [START, FAILED, IDLE],
    ),
    "what comes next has another zygote": (
        [*PARTICIPANT, KILLED_ZYGOTE, NEXT, READY],
        [START, FAILED, IDLE, StartZygote(), StartAll(generation=1)],
    ),
    "so, too, if it died once no rank was left, which is no failure": (
        [*PARTICIPANT, *DIES, CLEARED, KILLED_ZYGOTE, NEXT, READY],
        [START, term(3), FAILED, CLEAR, IDLE, StartZygote(), StartAll(generation=1)],
    ),
    "or while it cleared up": (
        [*PARTICIPANT, *DIES, KILLED_ZYGOTE, NEXT, READY],
        [START, term(3), FAILED, CLEAR, IDLE, StartZygote(), StartAll(generation=1)],
    ),
    "or did not, and was ended by force": (
        [*PARTICIPANT, *DIES, TimePassed(at_ns=99 * S), KILLED_ZYGOTE, NEXT, READY],
        [START, term(3), FAILED, CLEAR, BY_FORCE, IDLE, StartZygote(), StartAll(generation=1)],
    ),
    "if nothing comes next there is none": (
        [*PARTICIPANT, KILLED_ZYGOTE, over(137)],
        [START, FAILED, IDLE],
    ),
    "a signal once the zygote is gone ends the generation that comes next": (
        [*PARTICIPANT, *DIES, KILLED_ZYGOTE, signalled(15, 7.5), NEXT, over(143, signum=15)],
        [START, term(3), FAILED, CLEAR, IDLE, FAILED, IDLE],
    ),
    "a program that is broken has no next generation here": (
        [met(1), ProgramBroken(text="SyntaxError: x", exit_code=1), GONE, NEXT],
        [FAILED, IDLE, FAILED, IDLE],
    ),
    "before the nodes meet a zygote is replaced only if ranks may be started again": (
        [KILLED_ZYGOTE],
        [],
    ),
    "a signal once no rank is left ends the generation that comes next": (
        [
            *PARTICIPANT, *DIES, CLEARED, signalled(15, 7.5), NEXT, CLEARED,
            over(143, signum=15), GONE,
        ],
        [START, term(3), FAILED, CLEAR, IDLE, FAILED, CLEAR, IDLE, END],
    ),
    "a guard that is killed while ranks end is no matter": (
        [*PARTICIPANT, OTHERS_FAILED, LOST_STORE, *PARTICIPANT_ENDED],
        [START, term(2, 3), CLEAR],
    ),
    "a program that is broken here is a failure of all": (
        [met(1), ProgramBroken(text="SyntaxError: x", exit_code=1), GONE],
        [FAILED, IDLE],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name: str) -> None:
    """A launch in such a history takes these actions and no others."""
    events, expected = HISTORIES[name]
    _, taken = play(events)

    assert taken == expected


def test_a_plan_that_fails_once_all_have_met_is_told() -> None:
    """The others are about to start ranks, and the coordinator learns that none is left here."""
    state = State(
        shutdown_timeout_s=30.0,
        ranks={},
        nodes=NodesState(phase=NodesPhase.RUNNING),
        phase=Phase.WAITING,
    )
    state, first = step(state, NOT_MET)
    state, then = step(state, CLEARED)

    assert [each for each in (*first, *then) if not isinstance(each, WakeAt)] == [
        FAILED, CLEAR, IDLE,
    ]  # fmt: skip


OVER: dict[str, tuple[list[Event], bool]] = {
    "one whose zygote is gone waits for the coordinator": ([*PARTICIPANT, KILLED_ZYGOTE], False),
    "and is over with what it says": ([*PARTICIPANT, KILLED_ZYGOTE, over(137)], True),
    "or without, if that is lost": ([*PARTICIPANT, KILLED_ZYGOTE, COORDINATOR_LOST], True),
    "nodes that never met have nobody to wait for": ([READY, NOT_MET, GONE], True),
    "a broken program before the nodes met": (
        [ProgramBroken(text="SyntaxError: x", exit_code=1), GONE], True,
    ),
    "coordinator waits too": ([*COORDINATOR, *WELL, CLEARED, all_idle(reported()), GONE], False),
    "a third signal waits for nobody": (
        [*PARTICIPANT, signalled(15, 5), signalled(15, 5), signalled(15, 5), KILLED_ZYGOTE], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER)
def test_what_is_waited_for(name: str) -> None:
    """A launch in such a history is over, or is not."""
    events, is_over = OVER[name]

    assert play(events)[0].over is is_over


ANYTHING = [
    *started(2, 3), exited(2, 0, 5), exited(3, 0, 5), exited(2, 9, 5), exited(3, 15, 6),
    *finished(2, 3), OTHERS_FAILED, OTHERS_FINISHED, CLEARED, NEXT, COORDINATOR_LOST, over(7),
    signalled(15, 5), StartFailed(rank=3, error="EAGAIN", at_ns=5 * S),
    LOST_STORE, TimePassed(at_ns=40 * S),
]  # fmt: skip


@given(events=st.lists(st.sampled_from(ANYTHING), max_size=14))
def test_no_participant_stays_without_a_coordinator(events: list[Event]) -> None:
    """Whatever came before: without coordinator and ranks, a launcher ends."""
    state, _ = play([READY, met(1), *events, COORDINATOR_LOST], max_restarts=2)
    state, _ = _go_on(state, [exited(rank, 15, 50) for rank in sorted(state.alive)])
    state, _ = _go_on(state, [CLEARED, TimePassed(at_ns=900 * S), TimePassed(at_ns=999 * S)])

    assert state.phase is Phase.ENDING
    assert _go_on(state, [GONE])[0].over


def _go_on(state: State, events: Iterable[Event]) -> tuple[State, list[Action]]:
    taken: list[Action] = []
    for event in events:
        state, actions = step(state, event)
        taken += actions
    return state, taken
