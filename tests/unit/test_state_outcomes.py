"""The outcome of a launch: the exit code and the cause for each history."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from meshrun.errors import HostError
from meshrun.layout import solve_layout
from meshrun.layout.spec import parse_mesh
from meshrun.lifecycle.outcome import build_result, describe_end, find_trouble
from meshrun.lifecycle.root_cause import describe_failure
from meshrun.protocol.events import Event, Hung
from meshrun.protocol.result import LaunchResult, RankFailed, Timings, cause_of
from meshrun.protocol.zygote_messages import (
    Checked,
    NodeExcluded,
    ProgramBroken,
    RankLeaves,
    StartFailed,
    StoreEnded,
)
from tests.histories import (
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
)
from tests.kit import NO_PROGRESS, STORE


def result_of(*events: Event) -> LaunchResult:
    state, _ = play([*STARTED, *events])
    layout = solve_layout(parse_mesh("dp=3"))
    return build_result(state, layout, hosts=["node"], timings=Timings(began_ns=0))


LOST_PEER = "[..] Connection closed by peer [127.0.0.1]:3"
ALL_SUCCEED = [exited(rank, 0, 1) for rank in range(3)]

CAUSES: dict[str, dict[str, Any]] = {
    "stopped by SIGTERM": {"signals": (15,)},
    "SyntaxError": {"broken": ProgramBroken(text="SyntaxError: bad", exit_code=1)},
    "no rank made progress": {"hung": Hung(idle_s=9, at_ns=S)},
    "--check-first": {
        "failed_check": Checked(rank=0, at_ns=S, findings=["tp"], hosts=[], speeds="", seconds=1)
    },
    "must not be used": {"excluded": NodeExcluded(rank=0, at_ns=S, reason="hot", remedy="leave")},
    "cannot fork": {"start_error": StartFailed(rank=0, error="cannot fork", at_ns=S)},
    "store was killed": {"lost_process": LOST_STORE},
    "exited with code 7": {},
}
"""What ends a launch, by words of its headline, the decisive one first."""


@pytest.mark.parametrize("words", CAUSES)
def test_of_several_causes_the_first_one_decides(words: str) -> None:
    """The headline, the error and the reason for a restart agree."""
    later = [*CAUSES][[*CAUSES].index(words) :]
    changes = [change for name in later for change in CAUSES[name].items()]
    state = replace(play([*STARTED, exited(1, 7 << 8, 5)])[0], **dict(changes))
    trouble, restart = find_trouble(state), describe_failure(state)

    assert words in describe_end(state, solve_layout(parse_mesh("dp=3")), ["node"], "node").headline
    if later[0] in [*CAUSES][2:-1]:
        assert words in str(trouble)
    if later[0] in ("no rank made progress", "cannot fork", "store was killed"):
        assert words in str(restart)


OUTCOMES: dict[str, tuple[list[Event], int, int | None]] = {
    "all succeed": ([*ALL_SUCCEED, GONE], 0, None),
    "own exit code": ([exited(1, 7 << 8, 5), exited(0, 15, 6), exited(2, 15, 6), GONE], 7, 1),
    "a signal is 128 + n": ([exited(2, 11, 5), exited(0, 15, 6), exited(1, 15, 6), GONE], 139, 2),
    "the exception is older than the exit": (
        [raised(2, 5), exited(0, 3 << 8, 5.5), exited(2, 1 << 8, 6), exited(1, 15, 6), GONE],
        1,
        2,
    ),
    "peers' lost connections come first and are not the cause": (
        [raised(0, 5.00, LOST_PEER), raised(2, 5.001, LOST_PEER), exited(1, 9, 5.002),
         exited(0, 1 << 8, 5.1), exited(2, 1 << 8, 5.1), GONE],
        137,
        1,
    ),
    "only lost connections: the first of them": (
        [raised(0, 5.0, LOST_PEER), exited(0, 1 << 8, 5.1), passed(5.6), exited(1, 15, 6),
         exited(2, 15, 6), GONE],
        1,
        0,
    ),
    "peers of a rank that closes its connections one by one, and then raises": (
        [raised(0, 5.0, LOST_PEER), exited(0, 1 << 8, 5.1), raised(2, 5.4, LOST_PEER),
         passed(5.6), raised(1, 5.7, "Timed out"), exited(1, 1 << 8, 6), exited(2, 15, 6), GONE],
        1,
        1,
    ),
    "death by meshrun's SIGKILL is not the cause": (
        [exited(1, 3 << 8, 5), passed(35), exited(0, 9, 36), exited(2, 9, 36), GONE],
        3,
        1,
    ),
    "meshrun's SIGTERM meets a rank that is ending by its exception": (
        [raised(2, 5), raised(1, 4.999), exited(1, 15, 5.1), exited(2, 1 << 8, 5.2),
         exited(0, 15, 6), GONE],
        1,
        1,
    ),
    "a late exit on request is not the cause": (
        [raised(0, 5, LOST_PEER), exited(0, 1 << 8, 5.1), passed(5.6), exited(1, 5 << 8, 6),
         exited(2, 15, 6), GONE],
        1,
        0,
    ),
    "a rank that left before its peers noticed": (
        [
            RankLeaves(rank=1, at_ns=4 * S), raised(0, 5, LOST_PEER), exited(1, 3 << 8, 6),
            exited(0, 1 << 8, 6), exited(2, 15, 6), GONE,
        ],
        3,
        1,
    ),
    "a rank that exited on request": (
        [
            raised(0, 5, LOST_PEER), passed(5.5), RankLeaves(rank=1, at_ns=6 * S),
            exited(1, 3 << 8, 6), exited(0, 1 << 8, 6), exited(2, 15, 6), GONE,
        ],
        1,
        0,
    ),
    "the launcher's signal decides": (
        [signalled(15, 5), exited(0, 15, 6), exited(1, 3 << 8, 6), exited(2, 15, 6), GONE],
        143,
        0,
    ),
    "a killed zygote": ([KILLED_ZYGOTE], 137, None),
    "a lost store": (
        [StoreEnded(wait_status=9, at_ns=S), *(exited(r, 15, 2) for r in range(3)), GONE],
        71,
        0,
    ),
    "a zygote that is killed while ranks end": ([exited(1, 3 << 8, 5), KILLED_ZYGOTE], 3, 1),
    "a store that is lost while ranks end": (
        [exited(1, 3 << 8, 5), LOST_STORE, exited(0, 15, 6), exited(2, 15, 6), GONE],
        3,
        1,
    ),
    "a store that is lost after its ranks had noticed": (
        [raised(0, 5, LOST_PEER), LOST_STORE, *(exited(r, 1 << 8, 6) for r in range(3)), GONE],
        71,
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_history_has_this_outcome(name: str) -> None:
    events, exit_code, cause = OUTCOMES[name]
    result = result_of(*events)

    assert result.exit_code == exit_code
    assert (result.failures[0].rank if result.failures else None) == cause


STOPPED = [*(exited(rank, 15, 6) for rank in range(3)), GONE]


@pytest.mark.parametrize(
    ("events", "rank", "text"),
    [
        ([raised(1, 5), *STOPPED], 1, "rank 1 raised RuntimeError: bad, exit code 1"),
        ([signalled(15, 5), *STOPPED], None, "the launch was stopped by SIGTERM, exit code 143"),
        ([signalled(2, 6), *STOPPED], None, "the launch was stopped by Ctrl-C, SIGINT, exit code"),
        ([Hung(idle_s=5, at_ns=S), *STOPPED], None, f"{NO_PROGRESS} 5.0 s: none used"),
        ([LOST_STORE, *STOPPED], None, f"{STORE} was killed"),
    ],
)
def test_no_rank_that_was_only_stopped_is_the_cause(
    events: list[Event], rank: int | None, text: str
) -> None:
    result = result_of(*events)
    cause = cause_of(result)

    assert len(result.failures) == 3
    assert (None if cause is None else cause.rank) == rank
    assert str(RankFailed(result)).startswith(text)


@pytest.mark.parametrize("own", [LOST_PEER, "RuntimeError"])
def test_a_rank_of_another_node_is_the_cause_of_what_follows_here(own: str) -> None:
    """A rank that failed by itself stays the cause here."""
    text = "rank 7 on node1 raised ValueError: bad"
    result = dataclasses.replace(
        result_of(raised(1, 5, own), passed(5.5), *STOPPED), elsewhere=text
    )
    is_ours = own != LOST_PEER

    assert (cause_of(result) is not None) == is_ours
    assert str(RankFailed(result)).startswith("rank 1 raised" if is_ours else f"{text}, exit code")


def test_a_broken_program_ends_with_its_own_code() -> None:
    """No rank was started, and Python's message is kept."""
    state, _ = play([ProgramBroken(text="SyntaxError", exit_code=1), GONE])
    layout = solve_layout(parse_mesh("dp=3"))
    result = build_result(state, layout, hosts=["node"], timings=Timings(began_ns=0))

    assert (result.exit_code, result.broken_program) == (1, "SyntaxError")


def test_a_rank_that_cannot_start_is_a_host_error() -> None:
    """The error names the first rank and what the system said."""
    failed = StartFailed(rank=2, error="Resource temporarily unavailable", at_ns=S)
    another = replace(failed, rank=3)
    state, _ = play([*STARTED[:2], failed, another, exited(0, 15, 6), exited(1, 15, 6), GONE])
    layout = solve_layout(parse_mesh("dp=3"))
    result = build_result(state, layout, hosts=["node"], timings=Timings(began_ns=0))

    assert isinstance(result.trouble, HostError)
    assert "rank 2 could not be started: Resource temporarily unavailable" in str(result.trouble)
    assert result.exit_code == 71


@pytest.mark.parametrize(
    ("wait_status", "hint"), [(9, "dmesg"), (6, "output above"), (1 << 8, "output above")]
)
def test_only_sigkill_points_at_the_out_of_memory_killer(wait_status: int, hint: str) -> None:
    """A zygote that aborts or raises has printed why."""
    result = result_of(replace(KILLED_ZYGOTE, wait_status=wait_status))

    assert result.trouble is not None
    assert hint in (result.trouble.hint or "")
