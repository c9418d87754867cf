"""What a launcher does next in an elastic launch, as a table of histories."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from meshrun.errors import RendezvousError
from meshrun.layout import solve_layout
from meshrun.layout.spec import parse_mesh
from meshrun.lifecycle.actions import Action, Decide, Report, StartAll, StartZygote
from meshrun.lifecycle.outcome import build_result, describe_end
from meshrun.lifecycle.state import ELASTIC, NodesState, State
from meshrun.protocol.events import (
    AllJoined,
    Event,
    GenerationAborted,
    JoinFailed,
    NodeLost,
    TimePassed,
    ZygoteGone,
)
from meshrun.protocol.generation import Cause
from meshrun.protocol.result import Timings
from meshrun.protocol.zygote_messages import Checked, NodeExcluded, ProgramBroken
from tests.histories import (
    BY_FORCE,
    CLEAR,
    ENDED,
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
from tests.kit import HUNG_UP, SILENT, lost_node
from tests.node_histories import (
    CLEARED,
    COORDINATOR,
    COORDINATOR_ENDED,
    DIES,
    END,
    FAILED,
    FINISHED,
    OTHERS_FAILED,
    PARTICIPANT,
    PARTICIPANT_ENDED,
    START,
    THE_END,
    TROUBLE,
    WELL,
    WELL_THERE,
    all_cleared,
    all_joined,
    over,
    reported,
)

WHY = f"{lost_node(1)}{HUNG_UP}"
LOST = GenerationAborted(why=WHY, signum=0, at_ns=5 * S, resizes=True)
CHANGE = Cause(
    rank=None, description=WHY, raised=None, ran_s=None, at_ns=5 * S, is_failure=False
)  # fmt: skip
GO_ON = Decide(next_after=CHANGE)
CUT = NodeLost(node_rank=0, host="node0", why=f"{SILENT} 31 s", at_ns=5 * S, heard_ns=4 * S)
GONE = ZygoteGone(wait_status=9, at_ns=9 * S)
TOO_LATE = JoinFailed(error=RendezvousError("after 600 s 1 node is there"), at_ns=20 * S)
NEXT = StartAll(generation=1)
LEAVES = Report(what="leaves")


def again(node_rank: int, *ranks: int) -> AllJoined:
    """Return the event that nodes have joined for the next generation."""
    return replace(all_joined(node_rank), ranks=ranks, causes=(CHANGE,))


SHRUNK: list[Event] = [*COORDINATOR, LOST, *COORDINATOR_ENDED, ENDED, all_cleared()]
SHRINKS = [START, term(0, 1), CLEAR, CLEARED, GO_ON]
CUT_OFF: list[Event] = [*PARTICIPANT, CUT, *PARTICIPANT_ENDED, ENDED]
CUTS = [START, term(2, 3), CLEAR, CLEARED]

CHECKED = Checked(
    rank=0, findings=["a link is slow"], hosts=[], speeds="", seconds=1.0, at_ns=5 * S
)
EXCLUDED = NodeExcluded(rank=2, reason="ECC", remedy="--exclude node1", at_ns=5 * S)

HISTORIES: dict[str, tuple[list[Event], list[Action]]] = {
    "a node that a rank excludes leaves alone": (
        [*PARTICIPANT, EXCLUDED, *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "a node that a rank excludes while its ranks are ending": (
        [*PARTICIPANT, DIES[0], EXCLUDED, EXCLUDED, DIES[1]],
        [START, term(3), FAILED, LEAVES, FINISH],
    ),
    "node 0 cannot leave": (
        [*COORDINATOR, EXCLUDED, *COORDINATOR_ENDED, ENDED, all_cleared()],
        [START, term(0, 1), FAILED, CLEAR, CLEARED, THE_END],
    ),
    "a check that blames a node leaves it to that node": (
        [*COORDINATOR, replace(CHECKED, hosts=["node1"])],
        [START],
    ),
    "a check that blames none ends the launch": (
        [*COORDINATOR, CHECKED, *COORDINATOR_ENDED, ENDED, all_cleared()],
        [START, term(0, 1), FAILED, CLEAR, CLEARED, THE_END],
    ),
    "a lost node ends the ranks, and the coordinator continues": (SHRUNK, SHRINKS),
    "the coordinator continues with the others": ([*SHRUNK, again(0, 0)], [*SHRINKS, NEXT]),
    "the others do not fit here": (
        [*SHRUNK, replace(TOO_LATE, joined=again(0)), ENDED, all_cleared()],
        [*SHRINKS, FAILED, CLEAR, CLEARED, THE_END],
    ),
    "the first nodes do not fit here, while the zygote still imports": (
        [replace(TOO_LATE, joined=all_joined(1)), GONE],
        [FAILED, BY_FORCE, CLEARED],
    ),
    "two lost nodes are one change": (
        [*COORDINATOR, LOST, LOST, *COORDINATOR_ENDED, ENDED, all_cleared()],
        SHRINKS,
    ),
    "ranks that lost their peers first are not the cause": (
        [*COORDINATOR, exited(0, 1 << 8, 5), LOST, exited(1, 15, 6), ENDED, all_cleared()],
        [START, term(1), FAILED, CLEAR, CLEARED, GO_ON],
    ),
    "a node that joins while this one is cleared": (
        [*COORDINATOR, *WELL, ENDED, LOST, all_cleared(reported())],
        [START, FINISHED, CLEAR, CLEARED, GO_ON],
    ),
    "a node that joins while this one is cleared for long": (
        [*COORDINATOR, *WELL, ENDED, LOST, TimePassed(at_ns=99 * S), all_cleared(reported())],
        [START, FINISHED, CLEAR, CLEARED, GO_ON],
    ),
    "trouble on another node ends the launch despite a change": (
        [*COORDINATOR, LOST, *COORDINATOR_ENDED, ENDED, all_cleared(TROUBLE)],
        [START, term(0, 1), CLEAR, CLEARED, THE_END],
    ),
    "a signal ends the launch despite a change": (
        [*COORDINATOR, LOST, signalled(15, 5), *COORDINATOR_ENDED, ENDED, all_cleared()],
        [START, term(0, 1), CLEAR, CLEARED, THE_END],
    ),
    "a signal while the coordinator waits for nodes": (
        [*SHRUNK, signalled(15, 9), over(143)],
        [*SHRINKS, THE_END, END],
    ),
    "too few nodes at the timeout": ([*SHRUNK, TOO_LATE, over(69)], [*SHRINKS, THE_END, END]),
    "a zygote that ends while nodes are awaited is replaced": (
        [*SHRUNK, GONE, again(0, 0), READY],
        [*SHRINKS, StartZygote(), NEXT],
    ),
    "a zygote that does not answer is replaced": (
        [*COORDINATOR, LOST, *COORDINATOR_ENDED, TimePassed(at_ns=99 * S), GONE, all_cleared(),
         again(0, 0), READY],
        [START, term(0, 1), CLEAR, BY_FORCE, CLEARED, GO_ON, StartZygote(), NEXT],
    ),
    "a zygote that is still importing goes on for the next generation": (
        [all_joined(0), LOST, TimePassed(at_ns=99 * S), all_cleared(), again(0, 0), READY],
        [CLEARED, GO_ON, NEXT],
    ),
    "a zygote that has imported torch meanwhile does so, too": (
        [all_joined(0), LOST, READY, TimePassed(at_ns=99 * S), all_cleared(), again(0, 0)],
        [CLEARED, GO_ON, NEXT],
    ),
    "a zygote that dies meanwhile is replaced": (
        [all_joined(0), LOST, GONE, all_cleared(), again(0, 0), READY],
        [CLEARED, GO_ON, StartZygote(), NEXT],
    ),
    "a participant ends its ranks and learns which nodes remain": (
        [*PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, ENDED, again(1, 1)],
        [START, term(2, 3), CLEAR, CLEARED, NEXT],
    ),
    "a new node begins with the current generation": ([READY, again(1, 2)], [NEXT]),
    "a participant that is cut off ends its ranks and keeps its zygote": (CUT_OFF, CUTS),
    "a participant that was cut off rejoins": ([*CUT_OFF, again(2, 4)], [*CUTS, NEXT]),
    "a participant that was cut off cannot rejoin": ([*CUT_OFF, TOO_LATE], [*CUTS, END]),
    "a participant that was cut off learns so before its ranks have ended": (
        [*PARTICIPANT, CUT, TOO_LATE, *PARTICIPANT_ENDED],
        [START, term(2, 3), FINISH],
    ),
    "a signal while a participant is cut off": ([*CUT_OFF, signalled(15, 9)], [*CUTS, END]),
    "a signal before a participant is cut off": (
        [*PARTICIPANT, signalled(15, 5), CUT, *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "a participant whose machine is preempted leaves alone": (
        [*PARTICIPANT, signalled(15, 5), *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "a participant whose reader has gone leaves alone": (
        [*PARTICIPANT, signalled(13, 5), *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "a participant leaves alone while it ends its ranks for others": (
        [*PARTICIPANT, OTHERS_FAILED, signalled(15, 5), *PARTICIPANT_ENDED],
        [START, term(2, 3), LEAVES, FINISH],
    ),
    "a participant leaves alone while it ends leftover processes": (
        [*PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, signalled(15, 8), ENDED],
        [START, term(2, 3), CLEAR, LEAVES, BY_FORCE],
    ),
    "a signal to all nodes ends all together": (
        [*PARTICIPANT, replace(OTHERS_FAILED, signum=15), signalled(15, 5), *PARTICIPANT_ENDED],
        [START, term(2, 3), CLEAR],
    ),
    "Ctrl-C is meant for all": (
        [*PARTICIPANT, signalled(2, 5), *PARTICIPANT_ENDED],
        [START, replace(term(2, 3), signum=2), FAILED, CLEAR],
    ),
    "a signal to the coordinator ends all": (
        [*COORDINATOR, signalled(15, 5), *COORDINATOR_ENDED],
        [START, term(0, 1), FAILED, CLEAR],
    ),
    "a participant whose zygote is killed leaves, and the others continue": (
        [*PARTICIPANT, GONE],
        [START, LEAVES],
    ),
    "a participant whose guard is killed leaves": (
        [*PARTICIPANT, LOST_STORE, *PARTICIPANT_ENDED],
        [START, LEAVES, term(2, 3), FINISH],
    ),
    "a coordinator whose zygote is killed ends all": (
        [*COORDINATOR, GONE],
        [START, FAILED, CLEARED],
    ),
    "a participant whose zygote is killed while the others end": (
        [*PARTICIPANT, OTHERS_FAILED, GONE],
        [START, term(2, 3), LEAVES],
    ),
    "a participant whose zygote is killed after a failure stays to report it": (
        [*PARTICIPANT, *DIES[:1], GONE],
        [START, term(3), FAILED, CLEARED],
    ),
    "a broken program is a failure of all": (
        [READY, all_joined(1), ProgramBroken(text="SyntaxError: x", exit_code=1), GONE],
        [START, FAILED, CLEARED],
    ),
    "a spare that is stopped is not a failure": ([READY, signalled(15, 9)], [BY_FORCE]),
}  # fmt: skip


def play(events: list[Event], max_restarts: int = 0) -> tuple[State, list[Action]]:
    """Return the final state of an elastic launch, and the actions taken."""
    return play_events(events, max_restarts=max_restarts, ranks=2, nodes=NodesState(policy=ELASTIC))


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_leads_to_these_actions(name: str) -> None:
    """The launch takes these actions and no others."""
    events, expected = HISTORIES[name]

    assert play(events)[1] == expected


def test_a_change_counts_as_a_generation_and_not_as_a_restart() -> None:
    """So ranks keep all their restarts."""
    for joins in (again(0, 0), replace(TOO_LATE, joined=again(0))):
        state, _ = play([*SHRUNK, joins])
        assert (state.generation, state.restarts) == (1, 0)
    failed = [*SHRUNK, again(0, 0), *started(0), exited(0, 7 << 8, 9), ENDED, all_cleared()]
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
def test_what_the_launch_waits_for(events: list[Event], is_over: bool) -> None:
    """A node that is cut off tries to rejoin, with another zygote if necessary."""
    assert play(events)[0].over is is_over


def test_too_few_nodes_are_the_reason() -> None:
    """With the exit code for nodes that did not join."""
    layout = solve_layout(parse_mesh("dp=2"), nproc_per_node=2)
    state, _ = play([*SHRUNK, TOO_LATE])

    assert describe_end(state, layout, ["node0"], "node0").exit_code == 69


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([*COORDINATOR, signalled(15, 4), LOST, *WELL, ENDED, all_cleared(), GONE], 143),
        ([*COORDINATOR, signalled(15, 4), LOST, *WELL, ENDED, all_cleared(reported()), GONE], 75),
        ([*PARTICIPANT, signalled(15, 4), *WELL_THERE, ENDED, GONE], 75),
        ([*PARTICIPANT, CUT, signalled(15, 6), *WELL_THERE, ENDED, GONE], 75),
        ([*PARTICIPANT, replace(OTHERS_FAILED, signum=15), CUT, *WELL_THERE, ENDED, GONE], 69),
    ],
    ids=["a lost node", "a node that left", "on a node that leaves", "cut off", "no coordinator"],
)
def test_a_preemption(events: list[Event], code: int) -> None:
    """Node 0 knows that the ranks of every node exited with 0, except of those that left."""
    state, _ = play(events)
    layout, timings = solve_layout(parse_mesh("dp=4"), nnodes=2), Timings(began_ns=0)
    result = build_result(state, layout, hosts=["node0", "node1"], timings=timings)

    assert (result.exit_code, result.preempted) == (code, code == 75)


@pytest.mark.parametrize("code", [0, 7])
def test_ranks_of_a_node_that_was_cut_off_have_not_failed(code: int) -> None:
    """It was a spare when the launch ended, and had stopped these ranks itself."""
    layout, timings = solve_layout(parse_mesh("dp=4"), nnodes=2), Timings(began_ns=0)
    state, _ = play([*CUT_OFF, over(code, generation=1), GONE])
    result = build_result(state, layout, hosts=["node0", "node1"], timings=timings)

    assert (result.exit_code, result.failures, result.generation) == (code, (), None)
