"""The last state of a launch -> its result: which failure was the cause, which exit code. Pure."""

from __future__ import annotations

import re
import signal

from meshrun.layout import Layout
from meshrun.result import LaunchResult, RankFailure, Timings, split_wait_status
from meshrun.supervise.label import rank_label
from meshrun.supervise.state import RankState, State

_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed"
    r"|remote process exited|failed to (recv|send|write|read)|recvValue failed|sendBytes failed"
)
"""What torch's back ends say when the other end of a collective has gone."""
_ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP})


def build_result(
    state: State, layout: Layout, *, host: str, timings: Timings
) -> LaunchResult:
    """Return what came of a launch whose last state is ``state``."""
    failures = sorted(
        (
            _failure(state, layout, rank, host)
            for rank, known in state.ranks.items()
            if _has_failed(known)
        ),
        key=lambda failure: (_blame(state, failure), failure.at_ns, failure.rank),
    )
    signum = state.signals[0] if state.signals else None
    return LaunchResult(
        exit_code=_exit_code(state, failures, signum),
        signum=signum,
        failures=tuple(failures),
        timings=timings,
    )


def _has_failed(known: RankState) -> bool:
    ended_badly = known.exited is not None and known.exited.wait_status != 0
    return ended_badly or (known.raised is not None and known.exited is None)


def _failure(state: State, layout: Layout, rank: int, host: str) -> RankFailure:
    known = state.ranks[rank]
    exit_code, signum = (1, None)
    if known.exited is not None:
        exit_code, signum = split_wait_status(known.exited.wait_status)
    ended_ns = known.exited.at_ns if known.exited else 0
    at_ns = known.raised.at_ns if known.raised else ended_ns
    return RankFailure(
        rank=rank,
        coordinate=layout.coordinate(rank),
        label=rank_label(layout, rank) if layout.mesh else "",
        host=host,
        pid=known.pid or 0,
        exit_code=exit_code,
        signum=signum,
        at_ns=at_ns,
        raised=known.raised,
        asked_to_end=known.told_to_end_ns is not None and known.told_to_end_ns <= at_ns,
    )


def _blame(state: State, failure: RankFailure) -> int:
    """How far a failure is from being the cause; 0 is nearest.

    A rank that dies without a word is noticed after its peers, whose connections close first. So
    what reads like a consequence counts less than any failure of a rank's own.
    """
    if failure.asked_to_end and _ended_as_told(state, failure):
        return 3
    if failure.raised is not None and _CONSEQUENCE.search(failure.raised.message):
        return 2
    return 1 if failure.asked_to_end else 0


def _ended_as_told(state: State, failure: RankFailure) -> bool:
    if failure.signum == signal.SIGKILL:
        return state.killed
    told = failure.signum in _ENDING_SIGNALS or failure.exit_code in (
        128 + signum for signum in _ENDING_SIGNALS
    )
    return told or (failure.raised is not None and failure.raised.kind == "KeyboardInterrupt")


def _exit_code(state: State, failures: list[RankFailure], signum: int | None) -> int:
    if signum is not None:
        return 128 + signum
    if state.broken is not None:
        return state.broken.exit_code
    if failures:
        return failures[0].shell_code or 1
    if any(known.exited is None for known in state.ranks.values()):
        return 71 if state.start_error is not None else _zygote_code(state)
    return 0


def _zygote_code(state: State) -> int:
    """Ranks have not ended by themselves: the zygote was ended from outside."""
    if state.zygote_gone is None:
        return 1
    exit_code, signum = split_wait_status(state.zygote_gone.wait_status)
    return 128 + signum if signum is not None else exit_code or 70
