"""What a launcher does next where nodes come and go, as a table of histories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshrun.errors import RendezvousError
from meshrun.lifecycle.actions import Action, Decide, Report, StartAll, StartZygote
from meshrun.lifecycle.outcome import decide
from meshrun.lifecycle.state import NodesState, State
from meshrun.protocol.events import (
    Event,
    GenerationAborted,
    MeetingFailed,
    Met,
    NodeLost,
    TimePassed,
    ZygoteGone,
)
from meshrun.protocol.from_zygote import Checked, NodeExcluded, ProgramBroken
from meshrun.protocol.generation import Cause
from tests.histories import (
    BY_FORCE,
    CLEAR,
    CLEARED,
    FINISH,
    LOST_STORE,
    READY,
    S,
    exited,
    signalled,
    started,
    term,
)
from tests.histories import play as play_events
from tests.node_histories import (
    COORDINATOR,
    COORDINATOR_ENDED,
    DIES,
    END,
    FAILED,
    FINISHED,
    IDLE,
    OTHERS_FAILED,
    PARTICIPANT,
    PARTICIPANT_ENDED,
    START,
    THE_END,
    TROUBLE,
    WELL,
    all_idle,
    met,
    over,
    reported,
)

WHY = "node 1 (node1) was lost: it closed the connection"
LOST = GenerationAborted(why=WHY, signum=0, at_ns=5 * S, resizes=True)
CHANGE = Cause(
    rank=None, description=WHY, raised=None, ran_s=None, at_ns=5 * S, is_failure=False
)  # fmt: skip
GO_ON = Decide(next_after=CHANGE)
CUT = NodeLost(node_rank=0, host="node0", why="no message from it for 31 s", at_ns=5 * S)
GONE = ZygoteGone(wait_status=9, at_ns=9 * S)
TOO_LATE = MeetingFailed(error=RendezvousError("after 600 s 1 node is there"), at_ns=20 * S)
NEXT = StartAll(generation=1)
LEAVES = Report(what="leaves")


def again(node_rank: int, *ranks: int) -> Met:
    """Return the news that nodes have met once more."""
    return replace(met(node_rank), ranks=ranks, causes=(CHANGE,))


SHRUNK: list[Event] = [*COORDINATOR, LOST, *COORDINATOR_ENDED, CLEARED, all_idle()]
SHRINKS = [START, term(0, 1), CLEAR, IDLE, GO_ON]
CUT_OFF: list[Event] = [*PARTICIPANT, CUT, *PARTICIPANT_ENDED, CLEARED]
CUTS = [START, term(2, 3), CLEAR, IDLE]

CHECKED = Checked(
    rank=0, findings=["a link is slow"], hosts=[], speeds="", seconds=1.0, at_ns=5 * S
)
EXCLUDED = NodeExcluded(rank=2, reason="ECC", remedy="--exclude node1", at_ns=5 * S)

HISTORIES: dict[str, tuple[list[Event], list[Action]]] = {
    "a node that a rank excludes leaves alone": (
        [*PARTICIPANT, EXCLUDED, *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "as one does whose ranks are ended already": (
        [*PARTICIPANT, DIES[0], EXCLUDED, EXCLUDED, DIES[1]],
        [START, term(3), FAILED, LEAVES, FINISH],
    ),
    "the first node cannot leave": (
        [*COORDINATOR, EXCLUDED, *COORDINATOR_ENDED, CLEARED, all_idle()],
        [START, term(0, 1), FAILED, CLEAR, IDLE, THE_END],
    ),
    "a check that blames a node leaves it to that node": (
        [*COORDINATOR, replace(CHECKED, hosts=["node1"])],
        [START],
    ),
    "a check that blames none ends the launch": (
        [*COORDINATOR, CHECKED, *COORDINATOR_ENDED, CLEARED, all_idle()],
        [START, term(0, 1), FAILED, CLEAR, IDLE, THE_END],
    ),
    "a lost node ends the ranks, and the coordinator goes on": (SHRUNK, SHRINKS),
    "with those that are left": ([*SHRUNK, again(0, 0)], [*SHRINKS, NEXT]),
    "two lost nodes are one change": (
        [*COORDINATOR, LOST, LOST, *COORDINATOR_ENDED, CLEARED, all_idle()],
        SHRINKS,
    ),
    "ranks that lost their peers first are not the cause": (
        [*COORDINATOR, exited(0, 1 << 8, 5), LOST, exited(1, 15, 6), CLEARED, all_idle()],
        [START, term(1), FAILED, CLEAR, IDLE, GO_ON],
    ),
    "a node that joins while this one is idle": (
        [*COORDINATOR, *WELL, CLEARED, LOST, all_idle(reported())],
        [START, FINISHED, CLEAR, IDLE, GO_ON],
    ),
    "however long that takes": (
        [*COORDINATOR, *WELL, CLEARED, LOST, TimePassed(at_ns=99 * S), all_idle(reported())],
        [START, FINISHED, CLEAR, IDLE, GO_ON],
    ),
    "what ends the launch ends it still": (
        [*COORDINATOR, LOST, *COORDINATOR_ENDED, CLEARED, all_idle(TROUBLE)],
        [START, term(0, 1), CLEAR, IDLE, THE_END],
    ),
    "a signal ends it too": (
        [*COORDINATOR, LOST, signalled(15, 5), *COORDINATOR_ENDED, CLEARED, all_idle()],
        [START, term(0, 1), CLEAR, IDLE, THE_END],
    ),
    "also while the coordinator waits for nodes": (
        [*SHRUNK, signalled(15, 9), over(143)],
        [*SHRINKS, THE_END, END],
    ),
    "too few nodes for too long end it": ([*SHRUNK, TOO_LATE, over(69)], [*SHRINKS, THE_END, END]),
    "a zygote that is gone then is replaced": (
        [*SHRUNK, GONE, again(0, 0), READY],
        [*SHRINKS, StartZygote(), NEXT],
    ),
    "and one that does not answer": (
        [met(0), LOST, TimePassed(at_ns=99 * S), GONE, all_idle(), again(0, 0), READY],
        [CLEAR, BY_FORCE, IDLE, GO_ON, StartZygote(), NEXT],
    ),
    "a participant ends its ranks and learns which nodes are left": (
        [*PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, CLEARED, again(1, 1)],
        [START, term(2, 3), CLEAR, IDLE, NEXT],
    ),
    "a newcomer begins with the generation that there is": ([READY, again(1, 2)], [NEXT]),
    "a participant that is cut off ends its ranks and keeps its zygote": (CUT_OFF, CUTS),
    "for when it comes back": ([*CUT_OFF, again(2, 4)], [*CUTS, NEXT]),
    "or cannot": ([*CUT_OFF, TOO_LATE], [*CUTS, END]),
    "or not before its ranks have ended": (
        [*PARTICIPANT, CUT, TOO_LATE, *PARTICIPANT_ENDED],
        [START, term(2, 3), FINISH],
    ),
    "a signal ends it meanwhile": ([*CUT_OFF, signalled(15, 9)], [*CUTS, END]),
    "or before": (
        [*PARTICIPANT, signalled(15, 5), CUT, *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "a participant whose machine is taken away leaves alone": (
        [*PARTICIPANT, signalled(15, 5), *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "so does one whose reader has gone": (
        [*PARTICIPANT, signalled(13, 5), *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "also while it ends its ranks for others": (
        [*PARTICIPANT, OTHERS_FAILED, signalled(15, 5), *PARTICIPANT_ENDED],
        [START, term(2, 3), LEAVES, FINISH],
    ),
    "or clears up after them": (
        [*PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, signalled(15, 8), CLEARED],
        [START, term(2, 3), CLEAR, LEAVES, BY_FORCE],
    ),
    "what all nodes are sent ends all together": (
        [*PARTICIPANT, replace(OTHERS_FAILED, signum=15), signalled(15, 5), *PARTICIPANT_ENDED],
        [START, term(2, 3), CLEAR],
    ),
    "Ctrl-C is meant for all": (
        [*PARTICIPANT, signalled(2, 5), *PARTICIPANT_ENDED],
        [START, replace(term(2, 3), signum=2), FAILED, CLEAR],
    ),
    "the coordinator that is stopped ends all": (
        [*COORDINATOR, signalled(15, 5), *COORDINATOR_ENDED],
        [START, term(0, 1), FAILED, CLEAR],
    ),
    "a participant whose zygote is killed leaves, for the others to go on": (
        [*PARTICIPANT, GONE],
        [START, LEAVES],
    ),
    "and so does one whose guard is killed": (
        [*PARTICIPANT, LOST_STORE, *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "of the coordinator all ends": ([*COORDINATOR, GONE], [START, FAILED, IDLE]),
    "also if the others were first to notice": (
        [*PARTICIPANT, OTHERS_FAILED, GONE],
        [START, term(2, 3), LEAVES],
    ),
    "after a failure here it stays to tell of it": (
        [*PARTICIPANT, *DIES[:1], GONE],
        [START, term(3), FAILED, IDLE],
    ),
    "a program that is broken is a failure of all": (
        [READY, met(1), ProgramBroken(text="SyntaxError: x", exit_code=1), GONE],
        [START, FAILED, IDLE],
    ),
    "a spare that is stopped is no failure": ([READY, signalled(15, 9)], [BY_FORCE]),
}  # fmt: skip


def play(events: list[Event], max_restarts: int = 0) -> tuple[State, list[Action]]:
    """Return the last state of such a launch, and what was done in it."""
    return play_events(
        events, max_restarts=max_restarts, ranks=2, nodes=NodesState(is_elastic=True)
    )


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name: str) -> None:
    """A launch in such a history takes these actions and no others."""
    events, expected = HISTORIES[name]

    assert play(events)[1] == expected


def test_a_change_counts_as_a_generation_and_not_as_a_restart() -> None:
    """So that ranks have all their restarts left."""
    state, _ = play([*SHRUNK, again(0, 0)])
    assert (state.generation, state.restarts) == (1, 0)
    failed = [*SHRUNK, again(0, 0), *started(0), exited(0, 7 << 8, 9), CLEARED, all_idle()]
    decided = [each for each in play(failed, max_restarts=1)[1] if isinstance(each, Decide)]

    assert [each.next_after is not None and each.next_after.is_failure for each in decided] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("events", "is_over"),
    [
        ([*CUT_OFF, GONE], False),
        ([*CUT_OFF, TOO_LATE, GONE], True),
        ([*CUT_OFF], False),
        ([*PARTICIPANT, CUT, GONE], True),
        ([*PARTICIPANT, GONE], True),
    ],
    ids=["zygote gone", "too late", "cut off", "zygote gone at once", "zygote gone first"],
)
def test_what_is_waited_for(events: list[Event], is_over: bool) -> None:
    """A node that is cut off tries to come back, if need be with another zygote."""
    assert play(events)[0].over is is_over


def test_too_few_nodes_are_the_reason() -> None:
    """With the code of nodes that did not come together."""
    from meshrun.layout import solve_layout
    from meshrun.layout.spec import parse_mesh

    layout = solve_layout(parse_mesh("dp=2"), nproc_per_node=2)
    state, _ = play([*SHRUNK, TOO_LATE])

    assert decide(state, layout, ["node0"], "node0").exit_code == 69
