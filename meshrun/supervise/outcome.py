"""The last state of a launch -> its result: which failure was the cause, which exit code. Pure."""

from __future__ import annotations

import re
import signal

from meshrun.errors import HostError, InternalError, MeshrunError
from meshrun.layout import Layout
from meshrun.result import LaunchResult, RankFailure, Timings, signal_name, split_wait_status
from meshrun.supervise.label import rank_label
from meshrun.supervise.state import RankState, State

_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed"
    r"|remote process exited|failed to (recv|send|write|read)|recvValue failed|sendBytes failed"
)
"""What torch's back ends say when the other end of a collective has gone."""
_TORCHS = frozenset({"RuntimeError", "DistError", "DistBackendError", "DistNetworkError"})
_NOTICED_WITHIN_NS = 100_000_000
"""How long after its peers' errors a rank's own end may be noticed; later it only obeyed."""
_ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP})


def build_result(state: State, layout: Layout, *, host: str, timings: Timings) -> LaunchResult:
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
        broken_program=state.broken.text if state.broken else None,
        trouble=_trouble(state) if signum is None else None,
        timings=timings,
    )


def _has_failed(known: RankState) -> bool:
    ended_badly = known.exited is not None and known.exited.wait_status != 0
    return ended_badly or (known.raised is not None and known.exited is None)


def _failure(state: State, layout: Layout, rank: int, host: str) -> RankFailure:
    known = state.ranks[rank]
    exit_code, signum = split_wait_status(1 << 8)
    if known.exited is not None:
        exit_code, signum = split_wait_status(known.exited.wait_status)
        if (
            known.raised is not None
            and known.told_to_end_ns is not None
            and _is_ours(state, signum)
        ):
            exit_code, signum = 1, None  # it was ending of its exception when our signal came
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
    raised = failure.raised
    if raised and raised.kind in _TORCHS and _CONSEQUENCE.search(raised.message):
        return 2
    if not failure.asked_to_end:
        return 0
    told_ns = state.ranks[failure.rank].told_to_end_ns or 0
    return 1 if failure.at_ns - told_ns < _NOTICED_WITHIN_NS else 3


def _ended_as_told(state: State, failure: RankFailure) -> bool:
    told = failure.shell_code - 128
    if _is_ours(state, told):
        return True
    return failure.raised is not None and failure.raised.kind == "KeyboardInterrupt"


def _is_ours(state: State, signum: int | None) -> bool:
    """Whether a signal is one that meshrun ends ranks with, and by now has sent."""
    return signum in _ENDING_SIGNALS and (signum != signal.SIGKILL or state.killed)


def _exit_code(state: State, failures: list[RankFailure], signum: int | None) -> int:
    if signum is not None:
        return 128 + signum
    if state.broken is not None:
        return state.broken.exit_code
    if (trouble := _trouble(state)) is not None:
        return trouble.exit_code
    return (failures[0].shell_code or 1) if failures else 0


def _trouble(state: State) -> MeshrunError | None:
    """Return what ended the launch from outside its ranks, or ``None``."""
    if state.start_error is not None:
        return HostError(
            f"rank {state.start_error.rank} could not be started: {state.start_error.error}",
            hint="is the machine out of processes or memory? see `ulimit -u` and `free -h`",
        )
    if state.store_ended is not None:
        end = _describe_end(state.store_ended.wait_status)
        return HostError(f"the process that holds the ranks' store {end}, and they need it")
    gone = state.zygote_gone
    if gone is None or state.broken is not None or gone.wait_status == 0:
        return None
    if state.finishing or all(known.exited is not None for known in state.ranks.values()):
        return None
    trouble = HostError(
        f"the process that starts the ranks {_describe_end(gone.wait_status)}, and they with it",
        hint="if nobody did this on purpose, look for the out-of-memory killer in `dmesg`",
    )
    exit_code, signum = split_wait_status(gone.wait_status)
    trouble.exit_code = 128 + signum if signum is not None else exit_code or InternalError.exit_code
    return trouble


def _describe_end(wait_status: int) -> str:
    exit_code, signum = split_wait_status(wait_status)
    if signum is not None:
        return f"was ended by {signal_name(signum)}"
    return f"exited with code {exit_code}"
