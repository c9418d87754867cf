"""Whether ranks are started again after a failure. Pure."""

from __future__ import annotations

from meshrun.events import OthersFailed
from meshrun.supervise.blame import describe_store_end, describe_verdict, judge
from meshrun.supervise.known import Cause, State

_SOON_S = 10.0
_HOPELESS = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
)
"""Errors of a program that is not all there: the next start meets them too."""


def find_cause(state: State, at_ns: int) -> Cause:
    """Return why this generation ended."""
    verdicts = judge(state)
    if state.hung is not None or state.store_ended is not None or not verdicts:
        what = describe_store_end(state) or "the ranks were stopped"
        if state.hung is not None:
            what = f"no rank got on for {state.hung.idle_s:.1f} s"
        return Cause(rank=None, description=what, raised=None, ran_s=None, at_ns=at_ns)
    first = verdicts[0]
    ready_ns = state.everywhere[first.rank].ready_ns
    return Cause(
        rank=first.rank,
        description=describe_verdict(first),
        raised=first.raised,
        ran_s=None if ready_ns is None else (first.at_ns - ready_ns) / 1e9,
        at_ns=first.at_ns,
    )


def change_of(event: OthersFailed) -> Cause:
    """Return the end of a generation by nodes that came or went, which is no failure."""
    return Cause(
        rank=None,
        description=event.why,
        raised=None,
        ran_s=None,
        at_ns=event.at_ns,
        is_failure=False,
    )


def may_restart(state: State) -> bool:
    """Whether a restart is left, and the launch is not over for another reason."""
    return state.max_restarts > state.restarts and may_go_on(state)


def may_go_on(state: State) -> bool:
    """Whether nothing has happened that ends the launch, whatever restarts are left."""
    here = not state.signals and state.broken is None and state.start_error is None
    return here and _may_elsewhere(state)


def _may_elsewhere(state: State) -> bool:
    abroad = state.abroad
    if abroad is None:
        return True
    ends = any(
        outcome.get("signum") or (outcome.get("trouble") and not outcome.get("is_hung"))
        for outcome in abroad.outcomes
    )
    is_here = state.zygote_gone is None
    return is_here and abroad.lost is None and abroad.failed is None and not ends


def why_not_again(state: State, cause: Cause) -> str | None:
    """Return why another start would come to the same end, or ``None`` if it may not.

    One start that fails so may be bad luck, such as a file system that was slow to appear.
    """
    before = state.causes[-1] if state.causes else None
    if before is None or not (_is_hopeless(cause) and _is_hopeless(before)):
        return None
    if cause.description != before.description:
        return None
    return f"it {cause.description} at once after each of {state.generation + 1} starts"


def _is_hopeless(cause: Cause) -> bool:
    if cause.raised is None or cause.raised.kind not in _HOPELESS:
        return False
    return cause.ran_s is not None and cause.ran_s < _SOON_S
