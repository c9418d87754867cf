"""What a launch does next, as a table of histories."""

from __future__ import annotations

import copy
import dataclasses
import signal

import pytest
from msgspec.structs import replace

from meshrun.lifecycle import advance
from meshrun.lifecycle.actions import (
    Action,
    EndZygote,
    ReleaseRanks,
    SignalRanks,
    StartAll,
    StartZygote,
)
from meshrun.lifecycle.local import ZYGOTE_GRACE_S
from meshrun.lifecycle.phases import NodesPhase
from meshrun.lifecycle.state import NodesState
from meshrun.protocol.events import Event, GenerationAborted, Hung
from meshrun.protocol.rank_end import RankRaised
from meshrun.protocol.zygote_messages import (
    Checked,
    NodeExcluded,
    RankFinished,
    RankLeaves,
    StartFailed,
    ZygoteUnsafe,
)
from tests.histories import (
    BY_FORCE,
    FINISH,
    LOST_STORE,
    READY,
    STARTED,
    S,
    exited,
    follow,
    kill,
    launch,
    passed,
    play,
    raised,
    signalled,
    term,
)

FINISH_AT_ONCE = EndZygote(grace_s=0.0)
CHECKED = Checked(rank=0, findings=[], hosts=[], speeds="dp 1 GB/s", seconds=1.0, at_ns=5 * S)


def saving(rank: int, at_s: float) -> RankRaised:
    """Return the exception of a rank one of whose threads goes on."""
    return dataclasses.replace(raised(rank, at_s), threads="checkpoint")


def left(rank: int, at_s: float) -> RankLeaves:
    """Return the report of a rank that its threads have ended."""
    return RankLeaves(rank=rank, at_ns=int(at_s * S))


HISTORIES: dict[str, tuple[list[Event], list[Action]]] = {
    "ranks start when the zygote is ready": ([READY], [StartAll(generation=0)]),
    "an unsafe zygote is replaced": ([ZygoteUnsafe(reason="x")], [StartZygote(without_torch=True)]),
    "the zygote ends after the last rank": (
        [*STARTED, exited(0, 0, 1), exited(1, 0, 1), exited(2, 0, 1)],
        [FINISH],
    ),
    "the first failure stops the rest": ([*STARTED, exited(1, 9, 5)], [term(0, 2)]),
    "an exception counts before its process has ended": (
        [*STARTED, raised(1, 5), exited(1, 1 << 8, 6)],
        [term(0, 2)],
    ),
    "a node that a rank excludes starts no ranks again": (
        [*STARTED, NodeExcluded(rank=1, reason="ECC", remedy="", at_ns=5 * S), exited(0, 15, 6),
         exited(1, 15, 6), exited(2, 15, 6)],
        [term(0, 1, 2), FINISH],
    ),
    "a check that finds something ends the launch": (
        [*STARTED, replace(CHECKED, findings=["dp is slow"], hosts=["a"]), exited(0, 15, 6),
         exited(1, 15, 6), exited(2, 15, 6)],
        [term(0, 1, 2), FINISH],
    ),
    "a check that finds nothing does not": ([*STARTED, CHECKED], []),
    "a second failure stops no rank again": (
        [*STARTED, exited(1, 9, 5), exited(0, 1 << 8, 5.1)],
        [term(0, 2)],
    ),
    "a rank that ignores the signal is killed after the grace period": (
        [*STARTED, exited(1, 9, 5), passed(34.9), passed(35)],
        [term(0, 2), kill(0, 2)],
    ),
    "a rank that raised before its start was reported ends by itself": (
        [*STARTED[:1], raised(1, 5), *STARTED[1:], passed(35)],
        [term(0), term(2), kill(0, 1, 2)],
    ),
    "a rank that raised and does not end is killed too": (
        [*STARTED, raised(1, 5), exited(0, 15, 6), exited(2, 15, 6), passed(35)],
        [term(0, 2), kill(1)],
    ),
    "the rest is stopped after the threads of every rank that raised": (
        [*STARTED, saving(1, 5), passed(6), saving(0, 7), left(1, 8), exited(1, 1 << 8, 9),
         left(0, 10)],
        [term(2)],
    ),
    "threads end unreported where the interpreter ends a rank itself": (
        [*STARTED, saving(1, 5), exited(1, 1 << 8, 6)],
        [term(0, 2)],
    ),
    "nobody waits for the threads of a rank when another one dies": (
        [*STARTED, saving(1, 5), exited(0, 9, 6)],
        [term(1, 2)],
    ),
    "threads that do not end are stopped with the rest, and killed": (
        [*STARTED, saving(1, 5), passed(34.9), passed(35), passed(65)],
        [term(0, 1, 2), kill(0, 1, 2)],
    ),
    "ranks that hang while another one's threads end are stopped": (
        [*STARTED, saving(1, 5), Hung(idle_s=9, at_ns=14 * S)],
        [term(0, 1, 2)],
    ),
    "a zygote that does not answer is ended by force": (
        [*STARTED, exited(1, 9, 5), passed(35), passed(35 + ZYGOTE_GRACE_S)],
        [term(0, 2), kill(0, 2), BY_FORCE],
    ),
    "a rank that starts too late is signalled at once": (
        [*STARTED[:2], exited(1, 9, 5), STARTED[2]],
        [term(0), term(2)],
    ),
    "SIGINT is passed on": (
        [*STARTED, signalled(signal.SIGINT, 5)],
        [SignalRanks(ranks=(0, 1, 2), signum=signal.SIGINT)],
    ),
    "a reader that has closed stdout stops the ranks": (
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
    "signals after the third postpone nothing": (
        [
            *STARTED,
            *(signalled(15, at) for at in (5, 6, 6.1, 10, 11)),
            passed(6.2 + ZYGOTE_GRACE_S),
        ],
        [term(0, 1, 2), kill(0, 1, 2), BY_FORCE],
    ),
    "a signal before any rank needs no grace": ([signalled(15, 1)], [BY_FORCE]),
    "ranks do not start once the launch is ending": (
        [signalled(15, 1), READY, ZygoteUnsafe(reason="x")],
        [BY_FORCE],
    ),
    "a rank that cannot be started ends the launch": (
        [*STARTED[:2], StartFailed(rank=2, error="EAGAIN", at_ns=5 * S), exited(0, 15, 6),
         exited(1, 15, 6)],
        [term(0, 1), FINISH],
    ),
    "no rank can be started at all": (
        [StartFailed(rank=0, error="EAGAIN", at_ns=5 * S)],
        [FINISH],
    ),
    "finished ranks wait for the last": (
        [*STARTED, RankFinished(rank=0, at_ns=S), RankFinished(rank=1, at_ns=S), exited(2, 0, 2),
         exited(0, 0, 3), exited(1, 0, 3)],
        [ReleaseRanks(), FINISH],
    ),
    "finished ranks leave when another fails": (
        [*STARTED, RankFinished(rank=0, at_ns=S), exited(2, 9, 2)],
        [term(0, 1), ReleaseRanks()],
    ),
    "a lost store ends the launch": (
        [*STARTED, LOST_STORE],
        [term(0, 1, 2)],
    ),
    "after SIGKILL leftovers get no grace either": (
        [*STARTED, exited(1, 9, 5), passed(35), exited(0, 9, 36), exited(2, 9, 36)],
        [term(0, 2), kill(0, 2), FINISH_AT_ONCE],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_leads_to_these_actions(name: str) -> None:
    """The launch takes these actions and no others."""
    events, expected = HISTORIES[name]
    _, taken = play(events)

    assert taken == expected


def test_one_signal_to_every_node_counts_once() -> None:
    """A node that knows of another's keeps its grace period after its own; a second one counts."""
    aborted = GenerationAborted(why="node1 was stopped", signum=15, at_ns=5 * S)
    nodes = NodesState(phase=NodesPhase.RUNNING)
    once, _ = play([*STARTED, aborted, signalled(15, 6)], nodes=nodes)
    twice, _ = advance(once, signalled(15, 7))
    other, _ = advance(replace(once, signals=()), signalled(signal.SIGINT, 7))

    assert [each.deadline_ns for each in (once, twice, other)] == [35 * S, 9 * S, 9 * S]


@pytest.mark.parametrize(("signum", "until_s"), [(15, 35), (1, 35), (2, 8), (13, 8)])
def test_a_first_signal_while_ranks_stop_leaves_them_their_time(signum: int, until_s: int) -> None:
    """Its sender does not know that they are stopping; somebody who presses Ctrl-C sees it."""
    state, _ = play([*STARTED, exited(1, 1 << 8, 5), signalled(signum, 6)])
    again, _ = advance(state, signalled(signum, 7))

    assert state.deadline_ns == until_s * S
    assert again.deadline_ns == min(until_s, 9) * S


def test_a_sigterm_that_slurm_repeats_counts_once() -> None:
    """Ranks keep their grace period, and Ctrl-C still counts."""
    signals = [signalled(15, at) for at in (5, 5.1, 5.2, 6)]
    state, _ = follow(launch(sigterm_repeats=True), *STARTED, *signals)
    interrupted, _ = advance(state, signalled(signal.SIGINT, 7))

    assert [each.deadline_ns for each in (state, interrupted)] == [35 * S, 9 * S]
    assert not state.killed

    state = replace(state, deadline_ns=35 * S, signals=(signal.SIGINT,))
    # After Ctrl-C, only the first counts.
    state, _ = follow(state, *(signalled(signal.SIGTERM, at) for at in (8, 9)))
    assert state.signals == (signal.SIGINT, signal.SIGTERM)
    assert state.deadline_ns == 10 * S


def test_stepping_never_changes_the_state_it_was_given() -> None:
    """States are values; a watcher may keep them."""
    state, _ = play(STARTED)
    before = copy.deepcopy(state)
    advance(state, exited(1, 9, 5))

    assert state == before
