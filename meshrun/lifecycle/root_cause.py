"""Which rank's failure was the cause, and which were consequences. Pure."""

from __future__ import annotations

import math
import signal

from msgspec import Struct
from msgspec.structs import replace

from meshrun.errors import signal_of_code
from meshrun.lifecycle.state import State
from meshrun.protocol.events import ZygoteGone
from meshrun.protocol.rank_end import (
    LOST_PEER,
    RankRaised,
    aborted_for_lost_peer,
    describe_raised,
    lost_connection,
)
from meshrun.protocol.result import LEFT_EARLY, describe_exit, split_wait_status
from meshrun.protocol.zygote_messages import STORE, StartFailed

_OWN, _SOON_AFTER, _CONSEQUENT, _OBEYED = range(4)
"""Distances from the cause: of a rank that failed by itself, that failed just after it was asked to
end, that lost its connection to a peer, and that ended as it was asked to."""
_NOTICED_WITHIN_NS = 100_000_000
"""How long after its peers' errors a rank's death may be noticed; later, it only obeyed."""
_ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP})


class FailedRank(Struct, frozen=True, kw_only=True):
    """How one rank failed, and how far that is from being the cause."""

    rank: int
    at_ns: int
    exit_code: int | None
    signum: int | None = None
    raised: RankRaised | None = None
    error: str = ""
    """What it printed before SIGABRT killed it."""
    asked_to_end: bool = False
    distance: int = _OWN

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another rank had failed."""
        return self.distance >= _CONSEQUENT

    @property
    def has_lost_peer(self) -> bool:
        """Whether it failed because it lost a connection to a peer."""
        if self.raised is not None:
            return lost_connection(self.raised)
        return aborted_for_lost_peer(self.error)


def failed_ranks(state: State) -> list[FailedRank]:
    """Return the failed ranks of this generation, the cause first.

    If all of them lost a connection, the cause is the rank that exited before they did.
    """
    state = replace(state, ranks=state.all_ranks)
    failures = [_failed_rank(state, rank) for rank in state.ranks if _has_failed(state, rank)]
    failures.sort(key=lambda failed: (failed.distance, failed.at_ns, failed.rank))
    cause = None
    if failures and failures[0].distance == _CONSEQUENT:
        cause = _first_to_leave(state, min(failed.at_ns for failed in failures))
    elif failures and failures[0].distance > _CONSEQUENT:
        cause = _first_to_hide_its_error(state)
    if cause is None:
        return failures
    # It may also have been killed, while it waited for the others to finish.
    return [cause, *(failed for failed in failures if failed.rank != cause.rank)]


def has_root_cause(state: State, before_ns: float = math.inf) -> bool:
    """Return whether a rank is known to have failed by itself, before a time if one is given."""
    return any(each.at_ns < before_ns and not each.is_consequence for each in failed_ranks(state))


def _first_to_leave(state: State, before_ns: int) -> FailedRank | None:
    """Return the rank whose program ended before others lost a connection, if any.

    A program that calls ``os._exit(0)`` reports nothing, so its end is noticed a little late.
    """
    left = []
    for rank, rank_state in state.ranks.items():
        if rank_state.finished_ns is not None:
            left.append((rank_state.finished_ns, rank))
        elif rank_state.exited is not None and rank_state.exited_well and rank_state.exited.unasked:
            left.append((rank_state.exited.at_ns - _NOTICED_WITHIN_NS, rank))
    at_ns, rank = min(left, default=(before_ns, 0))
    return FailedRank(rank=rank, at_ns=at_ns, exit_code=0) if at_ns < before_ns else None


def _first_to_hide_its_error(state: State) -> FailedRank | None:
    """Return a rank that exited with 0, though its exception stopped the others.

    An exit handler may call ``os._exit(0)``.
    """
    found = [
        FailedRank(rank=rank, at_ns=rank_state.raised.at_ns, exit_code=1, raised=rank_state.raised)
        for rank, rank_state in state.ranks.items()
        if rank_state.raised is not None
        and rank_state.exited_well
        and (
            rank_state.asked_to_end_ns is None
            or rank_state.raised.at_ns < rank_state.asked_to_end_ns
        )
    ]
    return min(found, key=lambda failed: failed.at_ns, default=None)


def describe_failed_rank(failed: FailedRank) -> str:
    """Return a short description of how a rank ended."""
    if failed.raised is not None and failed.raised.kind != "SystemExit":
        return LOST_PEER if lost_connection(failed.raised) else describe_raised(failed.raised)
    if failed.exit_code == 0:  # it succeeded, but while others still needed it
        return LEFT_EARLY
    return describe_exit(failed.exit_code, failed.signum, failed.error)


def describe_lost_process(state: State) -> str | None:
    """Return which of meshrun's own processes ended this generation by exiting, if one did."""
    lost = state.lost_process
    if lost is None:
        return None
    if isinstance(lost, ZygoteGone):
        what = "starts the ranks"
    elif state.nodes.is_coordinator:
        what = "hosts the ranks' store"
    else:
        what = "guards the ranks"
    why = f" ({lost.why})" if lost.why else ""
    return f"the process that {what} {describe_exit(*split_wait_status(lost.wait_status))}{why}"


def describe_failure(state: State) -> str | None:
    """Return what ended this generation here, if it was not a rank and a restart may help.

    The order is that of :func:`meshrun.lifecycle.outcome.find_trouble`.
    """
    if state.hung is not None:
        why = f": {state.hung.why}" if state.hung.why else ""
        return f"no rank made progress for {state.hung.idle_s:.1f} s{why}"
    if state.start_error is not None:
        return describe_start_error(state.start_error)
    return describe_lost_process(state)


def describe_start_error(failed: StartFailed) -> str:
    """Return which process could not be started and why, or why none could."""
    if failed.rank is None:
        return failed.error
    who = f"rank {failed.rank}" if failed.rank != STORE else "the process of the ranks' store"
    return f"{who} could not be started: {failed.error}"


def _has_failed(state: State, rank: int) -> bool:
    rank_state = state.ranks[rank]
    return not rank_state.exited_well and (
        rank_state.exited is not None or rank_state.raised is not None
    )


def _failed_rank(state: State, rank: int) -> FailedRank:
    rank_state = state.ranks[rank]
    exited, asked_ns = rank_state.exited, rank_state.asked_to_end_ns
    exit_code, signum = split_wait_status(exited.wait_status) if exited else (1, None)
    if rank_state.raised is not None and asked_ns is not None and _is_ours(state, signum):
        exit_code, signum = 1, None  # our signal came while its exception was ending it
    ended_ns = exited.at_ns if exited else 0
    if rank_state.left_ns is not None and signum is None:
        ended_ns = rank_state.left_ns  # before that, its peers cannot have missed it
    at_ns = rank_state.raised.at_ns if rank_state.raised else ended_ns
    unasked = exited is not None and exited.unasked
    asked_to_end = asked_ns is not None and asked_ns <= at_ns and not unasked
    failed = FailedRank(
        rank=rank,
        at_ns=at_ns,
        exit_code=exit_code,
        signum=signum,
        raised=rank_state.raised,
        error=exited.error if exited else "",
        asked_to_end=asked_to_end,
    )
    return replace(failed, distance=_distance(state, failed))


def _distance(state: State, failed: FailedRank) -> int:
    """Return how far a failure is from being the cause.

    When a rank dies without a report, its peers' lost connections are noticed before its death. So
    a failure that looks like a consequence ranks below any failure of a rank's own.
    """
    raised, signum = failed.raised, failed.signum
    ended_by = signum if signum is not None else signal_of_code(failed.exit_code or 0)
    is_interrupted = raised is not None and raised.kind == "KeyboardInterrupt"
    obeyed = _is_ours(state, ended_by) or is_interrupted
    if failed.asked_to_end and obeyed:
        return _OBEYED
    if failed.has_lost_peer:
        return _CONSEQUENT
    if not failed.asked_to_end:
        return _OWN
    asked_ns = state.ranks[failed.rank].asked_to_end_ns or 0
    return _SOON_AFTER if failed.at_ns - asked_ns < _NOTICED_WITHIN_NS else _OBEYED


def _is_ours(state: State, signum: int | None) -> bool:
    """Return whether meshrun stops ranks with a signal, and has sent it if it is SIGKILL."""
    return signum in _ENDING_SIGNALS and (signum != signal.SIGKILL or state.has_killed)
