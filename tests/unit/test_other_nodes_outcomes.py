"""How a launch of several nodes ends, and what the coordinator decides, for whole histories."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from meshrun.errors import HostError
from meshrun.layout import solve_layout
from meshrun.layout.spec import parse_mesh
from meshrun.lifecycle.actions import Decide, StartAll
from meshrun.lifecycle.outcome import build_result, describe_end, find_trouble, node_outcome
from meshrun.protocol.events import Event, Hung, ZygoteGone
from meshrun.protocol.generation import Evidence, NodeOutcome
from meshrun.protocol.result import LaunchResult, RankFailed, Timings
from meshrun.report.result_text import render_failure
from tests.histories import ENDED, GONE, KILLED_ZYGOTE, LOST_STORE, READY, S, signalled
from tests.kit import ENDED_TOO, NO_PROGRESS, ZYGOTE, lost_node
from tests.node_histories import (
    CAUSE,
    COORDINATOR,
    COORDINATOR_ENDED,
    COORDINATOR_LOST,
    DIES,
    JOIN_FAILED,
    NEXT,
    NODE_LOST,
    OTHERS_FAILED,
    PARTICIPANT,
    PARTICIPANT_ENDED,
    THE_END,
    TROUBLE,
    TWO_DIED,
    WELL,
    WELL_THERE,
    all_cleared,
    over,
    play,
    reported,
)

LAYOUT, HOSTS = solve_layout(parse_mesh("dp=4"), nnodes=2), ["node0", "node1"]


def decided(events: list[Event], max_restarts: int = 0) -> Decide:
    """Return the coordinator's last decision."""
    taken = play(events, max_restarts)[1]
    return [action for action in taken if isinstance(action, Decide)][-1]


def test_the_coordinator_restarts_all_ranks_after_a_failure_elsewhere() -> None:
    """The cause is the other node's rank; the coordinator keeps it in the next generation."""
    events = [*COORDINATOR, OTHERS_FAILED, *COORDINATOR_ENDED, ENDED, all_cleared(TWO_DIED)]
    cause = decided(events, max_restarts=1).next_after

    assert cause is not None
    assert (cause.rank, cause.description) == (2, "exited with code 7")
    state, taken = play([*events, NEXT], max_restarts=1)
    assert taken[-1] == StartAll(generation=1)
    assert state.causes == (CAUSE,)
    assert state.all_ranks.keys() == {0, 1}


@pytest.mark.parametrize("lost", [KILLED_ZYGOTE, LOST_STORE], ids=["zygote", "guard"])
@pytest.mark.parametrize("place", [COORDINATOR, PARTICIPANT], ids=["coordinator", "participant"])
def test_the_coordinator_restarts_all_ranks_after_a_process_of_meshrun_was_lost(
    lost: Event, place: list[Event]
) -> None:
    """On any node; the cause names that process, not the ranks that were stopped because of it."""
    there, cleared = OTHERS_FAILED, reported()
    if place is PARTICIPANT:
        participant, _ = play([*PARTICIPANT, lost])
        cleared = node_outcome(participant, LAYOUT, HOSTS, "node1")
    else:
        there = lost
    events = [*COORDINATOR, there, *COORDINATOR_ENDED, ENDED, all_cleared(cleared)]
    cause = decided(events, max_restarts=1).next_after

    assert decided(events) == THE_END
    assert cause is not None
    assert cause.description.startswith(
        f"on node{' 0' if place is COORDINATOR else '1'}, the process that "
    )
    assert cause.description.endswith(" was killed by SIGKILL")


def test_a_lost_node_costs_a_restart() -> None:
    """The others wait for it, as it may be started again."""
    cause = decided(
        [*COORDINATOR, NODE_LOST, *COORDINATOR_ENDED, ENDED, all_cleared()], 1
    ).next_after

    assert cause is not None
    assert (cause.description, cause.is_failure) == (
        f"{lost_node(1)}it stopped responding",
        True,
    )


def test_a_rank_that_failed_before_its_node_was_lost_is_the_cause_of_a_restart() -> None:
    lost = replace(NODE_LOST, at_ns=8 * S, heard_ns=7 * S)
    events = [*COORDINATOR, OTHERS_FAILED, *COORDINATOR_ENDED, ENDED, lost, all_cleared(TWO_DIED)]
    cause = decided(events, max_restarts=1).next_after

    assert cause is not None
    assert (cause.rank, cause.description) == (2, "exited with code 7")


@pytest.mark.parametrize(
    ("events", "outcome", "restarts"),
    [
        ([OTHERS_FAILED, *COORDINATOR_ENDED], TWO_DIED, 0),
        ([NODE_LOST, *COORDINATOR_ENDED], None, 0),
        ([OTHERS_FAILED, *COORDINATOR_ENDED], TROUBLE, 3),
        ([OTHERS_FAILED, *COORDINATOR_ENDED], replace(reported(), signum=15), 3),
        ([signalled(15, 5), *COORDINATOR_ENDED], reported(), 3),
        (WELL, reported(), 3),
    ],
    ids=["no restart left", "a lost node", "an error elsewhere", "a signal elsewhere",
         "a signal here", "success"],
)  # fmt: skip
def test_the_coordinator_ends_the_launch(
    events: list[Event], outcome: NodeOutcome | None, restarts: int
) -> None:
    cleared = all_cleared(*([] if outcome is None else [outcome]))

    assert decided([*COORDINATOR, *events, ENDED, cleared], restarts) == THE_END


def result(
    events: list[Event], evidence: Mapping[int, Evidence] = MappingProxyType({})
) -> LaunchResult:
    state, timings = play(events)[0], Timings(began_ns=0)
    return build_result(state, LAYOUT, hosts=HOSTS, timings=timings, evidence=evidence)


CODES: dict[str, tuple[list[Event], int]] = {
    "success": ([*COORDINATOR, *WELL, ENDED, all_cleared(reported()), over(0, ""), GONE], 0),
    "success, at a participant": ([*PARTICIPANT, *WELL_THERE, ENDED, over(0, ""), GONE], 0),
    "a rank elsewhere": (
        [
            *COORDINATOR, OTHERS_FAILED, *COORDINATOR_ENDED, ENDED, all_cleared(TWO_DIED),
            over(7), GONE,
        ], 7,
    ),
    "as the coordinator decides": (
        [
            *PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, ENDED,
            over(42, "rank 0 failed"), GONE,
        ], 42,
    ),
    "an error elsewhere": (
        [
            *COORDINATOR, OTHERS_FAILED, *COORDINATOR_ENDED, ENDED, all_cleared(TROUBLE),
            over(71), GONE,
        ], 71,
    ),
    "a signal at the coordinator after its decision": (
        [
            *COORDINATOR, *WELL, ENDED, all_cleared(reported()), over(0, ""),
            signalled(15, 9.5), GONE,
        ],
        0,
    ),
    "a signal at a participant after the decision": (
        [*PARTICIPANT, *WELL_THERE, ENDED, over(0, ""), signalled(15, 9.5), GONE], 0,
    ),
    "a signal while the coordinator decides": (
        [*PARTICIPANT, *DIES, ENDED, signalled(15, 8), over(7), GONE], 7,
    ),
    "a lost node": (
        [*COORDINATOR, NODE_LOST, *COORDINATOR_ENDED, ENDED, all_cleared(), over(69), GONE], 69,
    ),
    "a lost coordinator": ([*PARTICIPANT, COORDINATOR_LOST, *PARTICIPANT_ENDED, GONE], 69),
    "nodes that did not join": ([READY, JOIN_FAILED, ZygoteGone(wait_status=9, at_ns=6 * S)], 69),
    "a coordinator lost after a failure here": (
        [*PARTICIPANT, *DIES, COORDINATOR_LOST, ENDED, GONE], 69,
    ),
    "a coordinator heard of since": (
        [*PARTICIPANT, *DIES, replace(COORDINATOR_LOST, heard_ns=5 * S + 1), ENDED, GONE], 7,
    ),
    "a node heard of since a failure there": (
        [
            *COORDINATOR, OTHERS_FAILED, *COORDINATOR_ENDED, ENDED,
            replace(NODE_LOST, at_ns=8 * S, heard_ns=7 * S), all_cleared(TWO_DIED), GONE,
        ],
        7,
    ),
    "a signal before other nodes joined": (
        [READY, signalled(15, 3), ZygoteGone(wait_status=9, at_ns=6 * S)], 143,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CODES)
def test_exit_code(name: str) -> None:
    events, code = CODES[name]
    found = result(events)

    assert found.exit_code == code
    assert found.signum in (None, code - 128)


@pytest.mark.parametrize(
    ("lost", "outcomes", "code"),
    [([], [reported()], 75), ([NODE_LOST], [reported()], 75), ([NODE_LOST], [], 143)],
    ids=["none", "after its ranks had ended", "before"],
)
def test_a_node_that_is_lost_during_a_preemption(
    lost: list[Event], outcomes: list[NodeOutcome], code: int
) -> None:
    """The launch was preempted only if the ranks of every node exited with 0."""
    cleared = all_cleared(*outcomes)
    found = result([*COORDINATOR, signalled(15, 4), *lost, *WELL, ENDED, cleared, GONE])

    assert (found.exit_code, found.signum, found.preempted) == (code, 15, code == 75)


def test_the_coordinator_names_the_node_that_a_signal_stopped() -> None:
    """Not another one, whose ranks ended with it."""
    stopped = replace(reported((2, 15)), signum=15, headline="node1 was stopped by SIGTERM")
    cleared = all_cleared(reported((3, 15)), stopped)
    found = result([*COORDINATOR, OTHERS_FAILED, *COORDINATOR_ENDED, ENDED, cleared, GONE])

    assert str(RankFailed(found)) == "node1 was stopped by SIGTERM, exit code 143"
    assert render_failure(found).endswith("meshrun: node1 was stopped by SIGTERM")


def test_the_participants_own_report_is_the_coordinators_headline() -> None:
    """The coordinator prints the whole report."""
    ended = result(
        [*PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, ENDED, over(42, "rank 0 x"), GONE]
    )

    assert ended.elsewhere == "rank 0 x"


def test_the_coordinators_own_error_has_its_class_on_every_node() -> None:
    """As the result of launch(), whichever node the error is on."""
    coordinator, _ = play([*COORDINATOR, KILLED_ZYGOTE])
    ending = describe_end(coordinator, LAYOUT, HOSTS, "node0")
    events = [*PARTICIPANT, OTHERS_FAILED, *PARTICIPANT_ENDED, ENDED]
    found = result([*events, replace(over(137), trouble=ending.trouble), GONE]).trouble

    assert isinstance(found, HostError)
    assert found.message == ending.headline


def test_a_failure_here_is_reported_here_if_the_coordinator_is_lost() -> None:
    """Before the reason for the exit code; a rank that was asked to stop is not."""
    failed = render_failure(result([*PARTICIPANT, *DIES, COORDINATOR_LOST, ENDED, GONE]))
    stopped = render_failure(result([*PARTICIPANT, COORDINATOR_LOST, *PARTICIPANT_ENDED, GONE]))

    assert "error: rank 2 [dp2] exited with code 7\n       on node1, pid 102\n\n" in failed
    assert failed.splitlines()[-1] == stopped.splitlines()[-1]
    assert "rank" not in stopped


def test_a_failure_elsewhere_is_named_with_its_host_and_evidence() -> None:
    """Like a failure of this node, which knows nothing of that rank's output and memory."""
    state, _ = play([*PARTICIPANT, *DIES])
    evidence = {2: Evidence(last_lines=("bad",), place="work at train.py:4")}
    known_here = {2: Evidence(why="a process was killed here")}
    outcome = node_outcome(state, LAYOUT, HOSTS, "node1", evidence)
    events = [
        *COORDINATOR,
        OTHERS_FAILED,
        *COORDINATOR_ENDED,
        ENDED,
        all_cleared(outcome),
        over(7),
        GONE,
    ]
    (first, *_) = result(events, known_here).failures

    assert (first.rank, first.host, first.pid, first.exit_code) == (2, "node1", 102, 7)
    assert (first.last_lines, first.place, first.why) == (("bad",), "work at train.py:4", "")


def test_an_error_names_its_host() -> None:
    """Both a participant's error and the coordinator's own."""
    killed = f"{ZYGOTE} was killed by SIGKILL, {ENDED_TOO}"
    participant, _ = play([*PARTICIPANT, KILLED_ZYGOTE])
    outcome = node_outcome(participant, LAYOUT, HOSTS, "node1")
    at_coordinator = result(
        [*COORDINATOR, OTHERS_FAILED, *COORDINATOR_ENDED, ENDED, all_cleared(outcome), over(137)]
    )
    of_coordinator = result([*COORDINATOR, KILLED_ZYGOTE])
    guard, _ = play([*PARTICIPANT, LOST_STORE])

    assert describe_end(guard, LAYOUT, HOSTS, "node1").headline == (
        "on node1, the process that guards the ranks was killed by SIGKILL, and the ranks need it"
    )
    assert at_coordinator.trouble is not None
    assert of_coordinator.trouble is not None
    assert outcome.headline == at_coordinator.trouble.message == f"on node1, {killed}"
    assert of_coordinator.trouble.message == f"on node0, {killed}"


def test_the_coordinator_says_who_waited_for_whom_in_a_hang() -> None:
    """It learns that from the reports of all nodes."""
    events = [*COORDINATOR, Hung(idle_s=9, at_ns=S), *COORDINATOR_ENDED, ENDED]
    cleared = replace(all_cleared(NodeOutcome(is_well=True)), why_hung="rank 0 waits for rank 3")
    trouble = result([*events, cleared, over(124), GONE]).trouble

    assert trouble is not None
    assert trouble.message == f"{NO_PROGRESS} 9.0 s: rank 0 waits for rank 3"


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_hint_fits_how_a_node_was_lost(is_silent: bool) -> None:
    """A silent node may be unreachable; one that closed the connection has output to read."""
    state, _ = play([*COORDINATOR, replace(NODE_LOST, is_silent=is_silent)])
    trouble = find_trouble(state)

    assert trouble is not None
    assert trouble.hint is not None
    assert ("--node-timeout" in trouble.hint) == is_silent
