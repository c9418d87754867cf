"""What a launcher of several nodes does next, as a table of histories."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshrun.lifecycle.actions import (
    Action,
    EndZygote,
    ReleaseRanks,
    SignalRanks,
    StartAll,
    StartZygote,
)
from meshrun.lifecycle.phases import NodesPhase, Phase
from meshrun.lifecycle.state import NodesState
from meshrun.protocol.events import Event, GenerationAborted, TimePassed
from meshrun.protocol.zygote_messages import ProgramBroken, StartFailed
from tests.histories import (
    BY_FORCE,
    CLEAR,
    ENDED,
    FINISH,
    GONE,
    KILLED_ZYGOTE,
    LOST_STORE,
    READY,
    S,
    exited,
    follow,
    kill,
    launch,
    signalled,
    started,
    term,
)
from tests.node_histories import (
    CLEARED,
    COORDINATOR,
    COORDINATOR_LOST,
    DIES,
    END,
    FAILED,
    FINISHED,
    JOIN_FAILED,
    NEXT,
    NODE_LOST,
    OTHERS_FAILED,
    OTHERS_FINISHED,
    PARTICIPANT,
    PARTICIPANT_ENDED,
    START,
    THE_END,
    WELL,
    WELL_THERE,
    all_cleared,
    all_joined,
    finished,
    over,
    play,
    reported,
)

KILLED = [
    OTHERS_FAILED, TimePassed(at_ns=35 * S), exited(2, 9, 35), exited(3, 9, 35), ENDED,
]  # fmt: skip
CLEAR_NOW = replace(CLEAR, grace_s=0.0)
NO_RANKS = replace(all_joined(1), ranks=())
HISTORIES: dict[str, tuple[list[Event], list[Action]]] = {
    "ranks wait for the nodes": ([READY], []),
    "and for the zygote": ([all_joined(1)], []),
    "nodes first, zygote later": ([all_joined(1), READY], [START]),
    "zygote first, nodes later": ([READY, all_joined(0)], [START]),
    "nodes that cannot join end it at once": ([READY, JOIN_FAILED], [BY_FORCE]),
    "once": ([READY, JOIN_FAILED, JOIN_FAILED], [BY_FORCE]),
    "a node whom the nodes do not fit once they have joined tells the others": (
        [READY, replace(JOIN_FAILED, joined=NO_RANKS)],
        [FAILED, CLEAR],
    ),
    "others fail while this node still imports": (
        [all_joined(1), OTHERS_FAILED, KILLED_ZYGOTE],
        [BY_FORCE, CLEARED],
    ),
    "and the coordinator ends the launch": (
        [all_joined(1), OTHERS_FAILED, KILLED_ZYGOTE, over(7)],
        [BY_FORCE, CLEARED],
    ),
    "a signal while waiting for the others": ([READY, signalled(15, 3)], [BY_FORCE]),
    "a failure is reported to the coordinator": (
        [*PARTICIPANT, exited(2, 7 << 8, 5)],
        [START, term(3), FAILED],
    ),
    "then that the node is cleared, and the coordinator decides what comes next": (
        [*PARTICIPANT, *DIES, ENDED],
        [START, term(3), FAILED, CLEAR, CLEARED],
    ),
    "the end as the coordinator decides it": (
        [*PARTICIPANT, *DIES, ENDED, over(7), GONE],
        [START, term(3), FAILED, CLEAR, CLEARED, END],
    ),
    "the next generation as the coordinator decides it": (
        [*PARTICIPANT, *DIES, ENDED, NEXT],
        [START, term(3), FAILED, CLEAR, CLEARED, StartAll(generation=1)],
    ),
    "and the end of that one": (
        [*PARTICIPANT, *DIES, ENDED, NEXT, *started(2, 3), *WELL_THERE, ENDED, over(0, "")],
        [
            START, term(3), FAILED, CLEAR, CLEARED,
            StartAll(generation=1), FINISHED, CLEAR, CLEARED, END,
        ],
    ),
    "another node's failure stops the ranks here, and is not reported back": (
        [*PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, ENDED],
        [START, term(2, 3), CLEAR, CLEARED],
    ),
    "with the signal that the other node received": (
        [*PARTICIPANT, GenerationAborted(why="stopped", signum=signal.SIGINT, at_ns=5 * S)],
        [START, SignalRanks(ranks=(2, 3), signum=signal.SIGINT)],
    ),
    "ranks that ignore it are killed": (
        [*PARTICIPANT, OTHERS_FAILED, TimePassed(at_ns=35 * S)],
        [START, term(2, 3), kill(2, 3)],
    ),
    "finished ranks wait for those of other nodes": (
        [*PARTICIPANT, *finished(2, 3)],
        [START, FINISHED],
    ),
    "until all have finished": (
        [*PARTICIPANT, *finished(2, 3), OTHERS_FINISHED, *WELL_THERE, ENDED],
        [START, FINISHED, ReleaseRanks(), CLEAR, CLEARED],
    ),
    "or until one on another node fails": (
        [*PARTICIPANT, *finished(2, 3), OTHERS_FAILED],
        [START, FINISHED, term(2, 3), ReleaseRanks()],
    ),
    "a node without ranks has finished at once": (
        [NO_RANKS, READY],
        [START, FINISHED],
    ),
    "and ends with the others": (
        [NO_RANKS, READY, OTHERS_FINISHED, ENDED, over(0, "")],
        [START, FINISHED, ReleaseRanks(), CLEAR, CLEARED, END],
    ),
    "or takes part in their next generation": (
        [NO_RANKS, READY, OTHERS_FAILED, ENDED, NEXT, OTHERS_FINISHED, ENDED],
        [
            START, FINISHED, CLEAR, CLEARED,
            StartAll(generation=1), FINISHED, ReleaseRanks(), CLEAR, CLEARED,
        ],
    ),
    "or until one here fails": (
        [*PARTICIPANT, *finished(2), exited(3, 9, 5)],
        [START, term(2), ReleaseRanks(), FAILED],
    ),
    "the coordinator learns that all are cleared, and ends the launch": (
        [*COORDINATOR, *WELL, ENDED, all_cleared(reported())],
        [START, FINISHED, CLEAR, CLEARED, THE_END],
    ),
    "a lost node stops the ranks, and is not reported to the coordinator, which knows": (
        [*COORDINATOR, NODE_LOST],
        [START, term(0, 1)],
    ),
    "a second lost node stops no rank again": (
        [*COORDINATOR, NODE_LOST, NODE_LOST],
        [START, term(0, 1)],
    ),
    "without its coordinator, a node ends by itself": (
        [*PARTICIPANT, COORDINATOR_LOST, *PARTICIPANT_ENDED, GONE],
        [START, term(2, 3), FINISH],
    ),
    "a coordinator lost while this node is cleared": (
        [*PARTICIPANT, *DIES, ENDED, COORDINATOR_LOST],
        [START, term(3), FAILED, CLEAR, CLEARED, END],
    ),
    "a coordinator lost while the zygote clears up": (
        [*PARTICIPANT, *DIES, COORDINATOR_LOST, ENDED],
        [START, term(3), FAILED, CLEAR, END],
    ),
    "a coordinator lost before ranks are started": (
        [all_joined(1), COORDINATOR_LOST, KILLED_ZYGOTE],
        [BY_FORCE],
    ),
    "a signal is reported to the coordinator": (
        [*PARTICIPANT, signalled(15, 5), *PARTICIPANT_ENDED, ENDED],
        [START, term(2, 3), FAILED, CLEAR, CLEARED],
    ),
    "a signal while waiting for the coordinator": (
        [*PARTICIPANT, *DIES, ENDED, signalled(15, 8)],
        [START, term(3), FAILED, CLEAR, CLEARED],
    ),
    "a third signal ends the node without it": (
        [*PARTICIPANT, *DIES, ENDED, signalled(15, 8), signalled(15, 8), signalled(15, 8)],
        [START, term(3), FAILED, CLEAR, CLEARED, BY_FORCE],
    ),
    "a lost zygote is a failure, and leaves the node cleared": (
        [*PARTICIPANT, KILLED_ZYGOTE],
        [START, FAILED, CLEARED],
    ),
    "the next generation gets another zygote": (
        [*PARTICIPANT, KILLED_ZYGOTE, NEXT, READY],
        [START, FAILED, CLEARED, StartZygote(), StartAll(generation=1)],
    ),
    "also if the zygote died after the last rank, which is no failure": (
        [*PARTICIPANT, *DIES, ENDED, KILLED_ZYGOTE, NEXT, READY],
        [START, term(3), FAILED, CLEAR, CLEARED, StartZygote(), StartAll(generation=1)],
    ),
    "or while it cleaned up": (
        [*PARTICIPANT, *DIES, KILLED_ZYGOTE, NEXT, READY],
        [START, term(3), FAILED, CLEAR, CLEARED, StartZygote(), StartAll(generation=1)],
    ),
    "or did not clean up, and was ended by force": (
        [*PARTICIPANT, *DIES, TimePassed(at_ns=99 * S), KILLED_ZYGOTE, NEXT, READY],
        [START, term(3), FAILED, CLEAR, BY_FORCE, CLEARED, StartZygote(), StartAll(generation=1)],
    ),
    "without a next generation there is no other zygote": (
        [*PARTICIPANT, KILLED_ZYGOTE, over(137)],
        [START, FAILED, CLEARED],
    ),
    "a signal after the zygote is lost ends the next generation": (
        [*PARTICIPANT, *DIES, KILLED_ZYGOTE, signalled(15, 7.5), NEXT, over(143, signum=15)],
        [START, term(3), FAILED, CLEAR, CLEARED, FAILED, CLEARED],
    ),
    "a broken program has no next generation here": (
        [all_joined(1), ProgramBroken(text="SyntaxError: x", exit_code=1), GONE, NEXT],
        [FAILED, CLEARED, FAILED, CLEARED],
    ),
    "before all nodes have joined, a zygote is replaced only if a restart is left": (
        [KILLED_ZYGOTE],
        [],
    ),
    "a signal after the last rank ends the next generation": (
        [
            *PARTICIPANT, *DIES, ENDED, signalled(15, 7.5), NEXT, ENDED,
            over(143, signum=15), GONE,
        ],
        [START, term(3), FAILED, CLEAR, CLEARED, FAILED, CLEAR, CLEARED, END],
    ),
    "also if this node's ranks had been killed": (
        [*PARTICIPANT, *KILLED, signalled(15, 37), NEXT, ENDED, over(143, signum=15), GONE],
        [START, term(2, 3), kill(2, 3), CLEAR_NOW, CLEARED, FAILED, CLEAR, CLEARED, END],
    ),
    "ranks start again where they were killed": (
        [*PARTICIPANT, *KILLED, NEXT],
        [START, term(2, 3), kill(2, 3), CLEAR_NOW, CLEARED, StartAll(generation=1)],
    ),
    "after two failures without progress, after a back-off": (
        [*PARTICIPANT, *DIES, ENDED, NEXT, *started(2, 3), *DIES, ENDED, NEXT],
        [
            START, term(3), FAILED, CLEAR, CLEARED,
            StartAll(generation=1), term(3), FAILED, CLEAR, CLEARED,
        ],
    ),
    "a launch that ends without this node": ([READY, over(7), GONE], [END]),
    "a node whose ranks run obeys the coordinator, too": ([*PARTICIPANT, over(7)], [START, END]),
    "a guard that is killed while ranks end changes nothing": (
        [*PARTICIPANT, OTHERS_FAILED, LOST_STORE, *PARTICIPANT_ENDED],
        [START, term(2, 3), CLEAR],
    ),
    "a program that is broken here is a failure of the launch": (
        [all_joined(1), ProgramBroken(text="SyntaxError: x", exit_code=1), GONE],
        [FAILED, CLEARED],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_leads_to_these_actions(name: str) -> None:
    """After these events, a launch has taken these actions and no others."""
    events, expected = HISTORIES[name]
    _, taken = play(events)

    assert taken == expected


def test_a_zygote_that_imports_is_kept_if_another_generation_may_follow() -> None:
    """It need not import torch again, and has nothing to end."""
    _, taken = play([all_joined(1), OTHERS_FAILED, READY], max_restarts=1)

    assert taken == [CLEARED]


def test_a_plan_that_fails_after_all_nodes_joined_is_reported() -> None:
    """The others are about to start ranks; the coordinator learns that this node is cleared."""
    state = launch(0, nodes=NodesState(phase=NodesPhase.RUNNING), phase=Phase.WAITING)
    _, taken = follow(state, JOIN_FAILED, ENDED)

    assert taken == [FAILED, CLEAR, CLEARED]


OVER: dict[str, tuple[list[Event], bool]] = {
    "a node whose zygote is lost waits for the coordinator": ([*PARTICIPANT, KILLED_ZYGOTE], False),
    "and ends as it decides": ([*PARTICIPANT, KILLED_ZYGOTE, over(137)], True),
    "or without it, if that is lost": ([*PARTICIPANT, KILLED_ZYGOTE, COORDINATOR_LOST], True),
    "a node that never joined waits for none": ([READY, JOIN_FAILED, GONE], True),
    "a broken program before all nodes have joined": (
        [ProgramBroken(text="SyntaxError: x", exit_code=1), GONE], True,
    ),
    "the coordinator waits too": (
        [*COORDINATOR, *WELL, ENDED, all_cleared(reported()), GONE], False,
    ),
    "after a third signal, a node waits for nothing": (
        [*PARTICIPANT, signalled(15, 5), signalled(15, 5), signalled(15, 5), KILLED_ZYGOTE], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER)
def test_when_a_launch_is_over(name: str) -> None:
    """After these events, a launch is over or still waits."""
    events, is_over = OVER[name]

    assert play(events)[0].over is is_over


@pytest.mark.parametrize(
    "events",
    [
        [COORDINATOR_LOST, *PARTICIPANT_ENDED],
        [*DIES, COORDINATOR_LOST, ENDED],
        [*DIES, ENDED, COORDINATOR_LOST],
    ],
    ids=["running", "clearing up", "waiting"],
)
def test_the_coordinator_may_be_lost_at_any_moment(events: list[Event]) -> None:
    """While ranks run, while leftover processes are being ended, and after that."""
    state, taken = play([*PARTICIPANT, *events])

    assert sum(isinstance(action, EndZygote) for action in taken) == 1
    assert follow(state, GONE)[0].over


def test_ranks_that_have_ended_give_the_zygote_its_own_time_to_clear() -> None:
    """Not that which ranks have to stop: it would be killed early, or could hang for longer."""
    before = [*PARTICIPANT, *WELL_THERE]
    clears, _ = play([*before, OTHERS_FAILED])
    cleared, _ = play([*before, ENDED, signalled(15, 9)])

    assert (clears.stopping, cleared.stopping) == (True, True)
    assert clears.deadline_ns == play(before)[0].deadline_ns
    assert cleared.deadline_ns is None


ANYTHING = [
    *started(2, 3), exited(2, 0, 5), exited(3, 0, 5), exited(2, 9, 5), exited(3, 15, 6),
    *finished(2, 3), OTHERS_FAILED, OTHERS_FINISHED, ENDED, NEXT, COORDINATOR_LOST, over(7),
    signalled(15, 5), StartFailed(rank=3, error="EAGAIN", at_ns=5 * S),
    LOST_STORE, TimePassed(at_ns=40 * S),
]  # fmt: skip


@given(events=st.lists(st.sampled_from(ANYTHING), max_size=14))
def test_no_participant_keeps_running_without_a_coordinator(events: list[Event]) -> None:
    """Whatever happened before, a launcher without coordinator and ranks ends."""
    state, _ = play([READY, all_joined(1), *events, COORDINATOR_LOST], max_restarts=2)
    state, _ = follow(state, *(exited(rank, 15, 50) for rank in sorted(state.alive)))
    state, _ = follow(state, ENDED, TimePassed(at_ns=900 * S), TimePassed(at_ns=999 * S))

    assert state.phase is Phase.ENDING
    assert follow(state, GONE)[0].over
