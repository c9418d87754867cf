"""Whether ranks restart after a failure, when, and why not. Pure.

``local`` calls ``plan_restart`` on a single node. On several nodes the coordinator's launcher does,
in ``other_nodes``, once nothing is left on any of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from meshrun.lifecycle.root_cause import (
    describe_failed_rank,
    describe_failure,
    failed_ranks,
    has_root_cause,
)
from meshrun.lifecycle.state import State, furthest
from meshrun.protocol.events import GenerationAborted
from meshrun.protocol.generation import Cause
from meshrun.protocol.stacks import current_folder, user_place

_SOON_S = 10.0
"""A program that reports no steps has made progress if it ran for this long."""
_TRIES = 3
"""How many equal failures in a row, without a further step, rule out another start."""
_LONGEST_WAIT_S = 60.0
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
_HOPELESS = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
)
"""Errors of a program that cannot be loaded, and so would fail again."""


def plan_restart(state: State, at_ns: int) -> tuple[State, Cause | None]:
    """Return the state, and why this generation ended if the ranks are to restart.

    If they are not although restarts are left, the state says why.
    """
    if not may_restart(state):
        return state, None
    cause = _find_cause(state, at_ns)
    # Another start may fail in the same way.
    why_not = _why_hopeless(state, cause) or _why_stuck((*state.causes, cause))
    return (state, cause) if why_not is None else (replace(state, no_restart=why_not), None)


def _find_cause(state: State, at_ns: int) -> Cause:
    """Return why this generation ended."""
    failures = failed_ranks(state)
    failure = _failure_of_no_rank(state)
    if failure is not None or not failures:
        began_ns = [
            rank_state.ready_ns
            for rank_state in state.ranks.values()
            if rank_state.ready_ns is not None
        ]
        return Cause(
            description=failure or "the ranks were stopped",
            ran_s=(at_ns - min(began_ns)) / 1e9 if began_ns else None,
            at_ns=at_ns,
            step=state.best_step,
        )
    first = failures[0]
    ready_ns = state.all_ranks[first.rank].ready_ns
    return Cause(
        rank=first.rank,
        description=describe_failed_rank(first),
        raised=first.raised,
        ran_s=None if ready_ns is None else (first.at_ns - ready_ns) / 1e9,
        at_ns=first.at_ns,
        step=state.best_step,
        place=user_place(first.raised.traceback, current_folder()) if first.raised else "",
    )


def cause_of_change(state: State, event: GenerationAborted) -> Cause:
    """Return the cause of a generation's end by a change of its nodes.

    If it is a failure, it may be that of a rank which failed before.
    """
    is_failure = state.nodes.policy.loss_is_failure
    if is_failure and has_root_cause(state, before_ns=event.at_ns):
        return _find_cause(state, event.at_ns)
    return Cause(
        description=event.why,
        at_ns=event.at_ns,
        step=state.best_step,
        is_failure=is_failure,
    )


def _failure_of_no_rank(state: State) -> str | None:
    nodes, here = state.nodes, describe_failure(state)
    if not nodes.have_joined:
        return here
    if here is not None and state.hung is None:
        return f"on node 0, {here}"
    failures = (outcome.failure for outcome in nodes.outcomes if outcome.failure)
    return here or next(failures, None)


def may_restart(state: State) -> bool:
    """Return whether a restart is left, and nothing else ends the launch."""
    return state.max_restarts > state.restarts and may_continue(state)


def may_continue(state: State) -> bool:
    """Return whether nothing has happened that ends the launch whatever restarts are left."""
    if state.signals or state.broken or state.excluded or state.failed_check:
        return False
    if state.nodes.lost or state.nodes.failed:
        return False
    return not any(
        outcome.signum or (outcome.trouble and not outcome.failure) for outcome in state.outcomes
    )


def back_off(causes: Sequence[Cause]) -> tuple[float, str]:
    """Return how many seconds to wait before the next generation, and why; 0 after progress."""
    count = _count_stalled(causes)
    if count < 2:
        return 0.0, ""
    best = furthest(*(cause.step for cause in causes))
    did = f"ran for {_SOON_S:g} s" if best is None else f"got past step {best}"
    wait_s = min(2.0 ** min(count - 2, 30), _LONGEST_WAIT_S)
    return wait_s, f"none of the last {count} starts {did}"


def _why_stuck(causes: Sequence[Cause]) -> str | None:
    """Return why not to restart a program that keeps failing at the same step, if it does."""
    best, last = furthest(*(cause.step for cause in causes)), causes[-1]
    stalled = causes[-1 - _count_stalled(causes) :]  # with the one that got this far first
    alike = 0
    while alike < len(stalled) and _signature(stalled[-1 - alike]) == _signature(last):
        alike += 1
    if best is None or alike < _TRIES:
        return None
    is_there = all(cause.step == best for cause in stalled[-alike:])
    where = f"at step {best}" if is_there else f"that did not get past step {best}"
    what = last.raised.kind if last.raised is not None else last.description
    at = f" ({last.place})" if last.place else ""
    return f"{alike} failures in a row {where}: {what}{at}"


def _signature(cause: Cause) -> tuple[str, str | int | None]:
    """Return what equal failures share: the text without its numbers, and the place.

    A failure without a place, such as one by a signal, has the step that was reached.
    """
    return _NUMBER.sub("#", cause.description), cause.place or cause.step


def _count_stalled(causes: Sequence[Cause]) -> int:
    """Return how many of the latest generations got no further than those before them."""
    count = 0
    while count < len(causes) and not _made_progress(causes[-1 - count], causes[: -1 - count]):
        count += 1
    return count


def _made_progress(cause: Cause, before: Sequence[Cause]) -> bool:
    if not cause.is_failure:
        return True  # with other nodes, everything may differ
    best = furthest(*(each.step for each in before))
    if cause.step is None and best is None:
        return cause.ran_s is not None and cause.ran_s >= _SOON_S
    return furthest(cause.step, best) != best


def _why_hopeless(state: State, cause: Cause) -> str | None:
    """Return why not to restart a program that failed to load twice in a row, if so.

    A single such failure may be bad luck, such as a file system that was mounted late.
    """
    before = state.causes[-1] if state.causes else None
    is_own = state.start_error is not None and state.start_error.rank is None
    if is_own and before is not None and _signature(before) == _signature(cause):
        return "twice in a row, no rank could be started"
    if before is None or not (_is_hopeless(cause) and _is_hopeless(before)):
        return None
    if cause.description != before.description:
        return None
    return f"it {cause.description} immediately after each of {state.generation + 1} starts"


def _is_hopeless(cause: Cause) -> bool:
    if cause.raised is None or cause.raised.kind not in _HOPELESS:
        return False
    return cause.ran_s is not None and cause.ran_s < _SOON_S
