"""Which failure was the cause, if errors of peers come first or a rank has left early."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from meshrun.lifecycle.root_cause import FailedRank, describe_failed_rank, failed_ranks
from meshrun.protocol.events import Event
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.zygote_messages import RankFinished
from tests.histories import STARTED, play
from tests.kit import LEFT_TOO_EARLY, LOST_PEER

MS = 1_000_000
TERM = int(signal.SIGTERM)


def lost(rank: int, at_ms: int) -> RankRaised:
    """A rank lost its connection to a peer."""
    message = "[pair.cc:553] Connection closed by peer [127.0.0.1]:3"
    return raised(rank, at_ms, message)


def raised(rank: int, at_ms: int, message: str = "bad") -> RankRaised:
    """A rank raised a RuntimeError, as torch does."""
    return RankRaised(
        rank=rank,
        at_ns=at_ms * MS,
        kind="RuntimeError",
        message=message,
        traceback=f"RuntimeError: {message}\n",
        shown=False,
    )


def ended(rank: int, status: int, at_ms: int, *, unasked: bool = False) -> RankExited:
    """A rank's process ended, on request or ``unasked``."""
    return RankExited(rank=rank, pid=rank, wait_status=status, at_ns=at_ms * MS, unasked=unasked)


def aborted(rank: int, at_ms: int, error: str) -> RankExited:
    """A rank's process ended by SIGABRT, after it had printed an error."""
    ending = ended(rank, signal.SIGABRT, at_ms, unasked=True)
    return replace(ending, error=error)


def finished(rank: int, at_ms: int) -> RankFinished:
    """A rank's program finished."""
    return RankFinished(rank=rank, at_ns=at_ms * MS)


def failed_after(*events: Event) -> list[FailedRank]:
    """Return those of three ranks that have failed after these events."""
    return failed_ranks(play([*STARTED, *events])[0])


GONE = "ncclRemoteError: socketProgress: Connection closed by remote peer gpu02<42830>"
HISTORIES: dict[str, tuple[list[Event], int, str]] = {
    "a rank that finished while others needed it": (
        [finished(1, 50), lost(0, 100), lost(2, 101), ended(1, 0, 102), ended(0, 256, 110)],
        1,
        LEFT_TOO_EARLY,
    ),
    "the first of two that finished": (
        [finished(2, 60), finished(1, 50), lost(0, 100), ended(0, 256, 110)],
        1,
        LEFT_TOO_EARLY,
    ),
    "a rank that finished early and was killed while it waited for the others": (
        [finished(1, 50), lost(0, 100), lost(2, 101), ended(1, TERM, 105), ended(0, 256, 110)],
        1,
        LEFT_TOO_EARLY,
    ),
    "a rank that left, which NCCL's watchdog on the others noticed": (
        [finished(1, 50), aborted(0, 100, GONE), ended(1, 0, 102), ended(2, TERM, 110)],
        1,
        LEFT_TOO_EARLY,
    ),
    "a rank whose death NCCL's watchdog on the others noticed first": (
        [aborted(0, 100, GONE), aborted(2, 101, GONE), ended(1, 9, 900, unasked=True)],
        1,
        "was killed by SIGKILL",
    ),
    "a rank whose GPU failed, which the others noticed first": (
        [aborted(0, 100, GONE), aborted(1, 190, "CUDA error: unknown error"), ended(2, TERM, 200)],
        1,
        "was killed by SIGABRT (CUDA error: unknown error)",
    ),
    "a rank that left silently, noticed a little late": (
        [lost(0, 100), lost(2, 101), ended(1, 0, 103, unasked=True), ended(0, 256, 110)],
        1,
        LEFT_TOO_EARLY,
    ),
    "a rank that exited with 0 on request has not left early": (
        [lost(0, 100), ended(1, 0, 103), ended(2, 0, 104), ended(0, 256, 110)],
        0,
        LOST_PEER,
    ),
    "a rank that finished later is not to blame": (
        [lost(0, 100), finished(1, 150), ended(1, 0, 160), ended(0, 256, 170)],
        0,
        LOST_PEER,
    ),
    "a rank's own failure outranks an early end": (
        [finished(1, 50), lost(0, 100), ended(2, 11, 101, unasked=True), ended(0, 256, 110)],
        2,
        "was killed by SIGSEGV",
    ),
    "SIGTERM from outside, noticed after the errors of peers": (
        [lost(0, 100), ended(1, TERM, 103, unasked=True), ended(2, TERM, 104), ended(0, 256, 110)],
        1,
        "was killed by SIGTERM",
    ),
    "SIGTERM from meshrun is not the cause": (
        [raised(0, 100), ended(1, TERM, 103), ended(2, TERM, 104), ended(0, 256, 110)],
        0,
        "raised RuntimeError: bad",
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_cause_comes_first(name: str) -> None:
    """With its description; all other failures are consequences, one for each rank."""
    events, cause, description = HISTORIES[name]
    first, *others = failed_after(*events)

    assert (first.rank, describe_failed_rank(first)) == (cause, description)
    assert [other.rank for other in others if not other.is_consequence] == []
    assert len({other.rank for other in others} | {cause}) == len(others) + 1
