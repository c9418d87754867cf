"""What a launch does between two generations of its ranks, as a table of histories."""

from __future__ import annotations

import pytest

from meshrun.layout import solve_layout
from meshrun.layout.spec import parse_mesh
from meshrun.lifecycle.actions import Action, StartAll, StartZygote
from meshrun.lifecycle.local import ZYGOTE_GRACE_S
from meshrun.lifecycle.outcome import build_result
from meshrun.protocol.events import Event
from meshrun.protocol.result import Timings
from meshrun.protocol.zygote_messages import NodeExcluded, ProgramBroken, RankReady, StartFailed
from tests.histories import (
    BY_FORCE,
    CLEAR,
    ENDED,
    FINISH,
    GONE,
    KILLED_ZYGOTE,
    LOST_STORE,
    READY,
    STARTED,
    S,
    exited,
    passed,
    play,
    raised,
    signalled,
    term,
)

NOW = StartAll(generation=0)
EXCLUDED = NodeExcluded(rank=0, reason="ECC", remedy="", at_ns=5 * S)
LOST_ONE = [exited(1, 9, 5), exited(0, 15, 6), exited(2, 15, 6)]
RUNNING = [*STARTED, *(RankReady(rank=rank, at_ns=4 * S) for rank in range(3))]
NO_MODULE = [
    raised(1, 5, "No module named 'x'", "ModuleNotFoundError"),
    exited(1, 1 << 8, 5),
    exited(0, 15, 6),
    exited(2, 15, 6),
]

RESTARTS: dict[str, tuple[int, list[Event], list[Action]]] = {
    "a failure restarts all ranks": (
        1,
        [*STARTED, *LOST_ONE, ENDED],
        [term(0, 2), CLEAR, StartAll(generation=1)],
    ),
    "until no restart is left": (
        1,
        [*STARTED, *LOST_ONE, ENDED, *STARTED, *LOST_ONE],
        [term(0, 2), CLEAR, StartAll(generation=1), term(0, 2), FINISH],
    ),
    "after which all may succeed": (
        3,
        [*STARTED, *LOST_ONE, ENDED, *STARTED, *(exited(r, 0, 9) for r in range(3))],
        [term(0, 2), CLEAR, StartAll(generation=1), FINISH],
    ),
    "a signal to the launcher is no failure": (
        3,
        [*STARTED, signalled(15, 5), *(exited(r, 15, 6) for r in range(3))],
        [term(0, 1, 2), FINISH],
    ),
    "a signal between two generations ends the launch": (
        3,
        [*STARTED, *LOST_ONE, signalled(15, 6.5), ENDED],
        [term(0, 2), CLEAR, BY_FORCE],
    ),
    "a node that must not be used again is not, even if its ranks are already stopping": (
        3,
        [*STARTED, raised(1, 5), EXCLUDED, *(exited(r, 15, 6) for r in range(3))],
        [term(0, 2), FINISH],
    ),
    "a zygote that does not clean up is ended by force": (
        3,
        [*STARTED, *LOST_ONE, passed(6 + ZYGOTE_GRACE_S)],
        [term(0, 2), CLEAR, BY_FORCE],
    ),
    "a rank that could not be started is tried again": (
        1,
        [
            *STARTED[:2],
            StartFailed(rank=2, error="EAGAIN", at_ns=5 * S),
            exited(0, 15, 6),
            exited(1, 15, 6),
            ENDED,
        ],
        [term(0, 1), CLEAR, StartAll(generation=1)],
    ),
    "a lost store is a failure like any other": (
        1,
        [*STARTED, LOST_STORE, *(exited(r, 15, 6) for r in range(3))],
        [term(0, 1, 2), CLEAR],
    ),
    "a missing module is tried once more only": (
        9,
        [*RUNNING, *NO_MODULE, ENDED, *RUNNING, *NO_MODULE],
        [term(0, 2), CLEAR, StartAll(generation=1), term(0, 2), FINISH],
    ),
    "another error after it is tried again": (
        9,
        [*RUNNING, *NO_MODULE, ENDED, *RUNNING, *LOST_ONE],
        [term(0, 2), CLEAR, StartAll(generation=1), term(0, 2), CLEAR],
    ),
    "a killed zygote is replaced": (
        1,
        [READY, *STARTED, KILLED_ZYGOTE, READY],
        [NOW, StartZygote(), StartAll(generation=1)],
    ),
    "until no restart is left for it": (
        1,
        [*STARTED, KILLED_ZYGOTE, READY, *STARTED, KILLED_ZYGOTE],
        [StartZygote(), StartAll(generation=1)],
    ),
    "also while it imports": (
        1,
        [KILLED_ZYGOTE, READY],
        [StartZygote(), StartAll(generation=1)],
    ),
    "however it ends": (
        1,
        [GONE, READY],
        [StartZygote(), StartAll(generation=1)],
    ),
    "between two generations that is not another failure": (
        1,
        [*STARTED, *LOST_ONE, KILLED_ZYGOTE, READY],
        [term(0, 2), CLEAR, StartZygote(), StartAll(generation=1)],
    ),
    "it is not replaced there after a signal": (
        1,
        [*STARTED, *LOST_ONE, signalled(15, 6.5), KILLED_ZYGOTE],
        [term(0, 2), CLEAR, BY_FORCE],
    ),
    "a zygote that is killed while the launch stops is not replaced": (
        9,
        [*STARTED, signalled(15, 5), KILLED_ZYGOTE],
        [term(0, 1, 2)],
    ),
    "nor once all ranks have succeeded": (
        9,
        [*STARTED, *(exited(rank, 0, 9) for rank in range(3)), KILLED_ZYGOTE],
        [FINISH],
    ),
    "a program that cannot be parsed is not tried again": (
        9,
        [ProgramBroken(text="SyntaxError", exit_code=1), GONE],
        [],
    ),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_restarts(name: str) -> None:
    """With this many restarts, the launch takes these actions and no others."""
    max_restarts, events, expected = RESTARTS[name]
    _, taken = play(events, max_restarts)

    assert taken == expected


def test_a_useless_restart_is_explained() -> None:
    """The state holds the reason for giving up."""
    state, _ = play([*RUNNING, *NO_MODULE, ENDED, *RUNNING, *NO_MODULE], 9)

    assert state.no_restart == (
        "it raised ModuleNotFoundError: No module named 'x' immediately after each of 2 starts"
    )


def test_a_zygote_that_does_not_clean_up_is_not_the_cause() -> None:
    """It was ended for that; the earlier failure is the cause."""
    failed = [exited(rank, 9 << 8, 5) for rank in range(3)]
    state, _ = play([*STARTED, *failed, passed(6 + ZYGOTE_GRACE_S), KILLED_ZYGOTE], 1)
    result = build_result(
        state, solve_layout(parse_mesh("dp=3")), hosts=["node"], timings=Timings(began_ns=0)
    )

    assert (result.exit_code, result.trouble) == (9, None)
