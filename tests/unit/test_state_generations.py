"""What a launch does between two generations of its ranks, as a table of histories."""

from __future__ import annotations

import pytest

from meshrun.events import Event, ProgramBroken, RankReady, ZygoteGone
from meshrun.layout import solve_layout
from meshrun.result import Timings
from meshrun.spec import parse_mesh
from meshrun.supervise.actions import Action, StartAll
from meshrun.supervise.outcome import build_result
from tests.histories import (
    BY_FORCE,
    CLEAR,
    CLEARED,
    FINISH,
    GONE,
    KILLED_ZYGOTE,
    LOST_STORE,
    STARTED,
    S,
    exited,
    passed,
    play,
    raised,
    signalled,
    term,
)

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
        [term(0, 2), CLEAR, StartAll(generation=1)],
    ),
    "until no restart is left": (
        1,
        [*STARTED, *LOST_ONE, CLEARED, *STARTED, *LOST_ONE],
        [term(0, 2), CLEAR, StartAll(generation=1), term(0, 2), FINISH],
    ),
    "after which all may end well": (
        3,
        [*STARTED, *LOST_ONE, CLEARED, *STARTED, *(exited(r, 0, 9) for r in range(3))],
        [term(0, 2), CLEAR, StartAll(generation=1), FINISH],
    ),
    "a signal to the launcher is no failure": (
        3,
        [*STARTED, signalled(15, 5), *(exited(r, 15, 6) for r in range(3))],
        [term(0, 1, 2), FINISH],
    ),
    "a signal between two generations ends it": (
        3,
        [*STARTED, *LOST_ONE, signalled(15, 6.5), CLEARED],
        [term(0, 2), CLEAR, BY_FORCE],
    ),
    "a zygote that does not clear up is ended by force": (
        3,
        [*STARTED, *LOST_ONE, passed(12)],
        [term(0, 2), CLEAR, BY_FORCE],
    ),
    "the lost store may be had anew": (
        1,
        [*STARTED, LOST_STORE, *(exited(r, 15, 6) for r in range(3))],
        [term(0, 1, 2), CLEAR],
    ),
    "a module that is not there is tried once more, and no more": (
        9,
        [*RUNNING, *NO_MODULE, CLEARED, *RUNNING, *NO_MODULE],
        [term(0, 2), CLEAR, StartAll(generation=1), term(0, 2), FINISH],
    ),
    "another error in between is another matter": (
        9,
        [*RUNNING, *NO_MODULE, CLEARED, *RUNNING, *LOST_ONE],
        [term(0, 2), CLEAR, StartAll(generation=1), term(0, 2), CLEAR],
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
