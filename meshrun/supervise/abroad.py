"""What a launch does next when something happens on other nodes. Pure; time comes in events.

The first node is the head: it hears how every node stands, and decides what comes next for all.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshrun.events import (
    AllIdle,
    LaunchOver,
    MeetingFailed,
    Met,
    NextBegins,
    NodeLost,
    OthersFailed,
    OthersFinished,
)
from meshrun.supervise.actions import Decide, EndZygote, OpenGate
from meshrun.supervise.here import (
    Step,
    begin_again,
    end_zygote,
    finish,
    start_if_due,
    stop,
)
from meshrun.supervise.known import Abroad, RankState, State
from meshrun.supervise.outcome_json import cause_from_json, ranks_from_json
from meshrun.supervise.restart import find_cause, may_restart, why_not_again


def _known(state: State) -> Abroad:
    assert state.abroad is not None  # noqa: S101 - only launches of several nodes hear of others
    return state.abroad


def _met(state: State, event: Met) -> Step:
    abroad = replace(_known(state), is_met=True, is_head=event.node_rank == 0)
    ranks = {rank: RankState() for rank in event.ranks}
    return start_if_due(replace(state, abroad=abroad, ranks=ranks))


def _meeting_failed(state: State, event: MeetingFailed) -> Step:
    if _known(state).failed is not None or state.zygote_gone is not None:
        return state, []
    abroad = replace(_known(state), failed=event)
    if not abroad.is_met:
        state = replace(state, abroad=abroad, stopping=True, finishing=True)
        return state, [EndZygote(by_force=True)]
    stopped, actions = stop(replace(state, abroad=abroad), event.at_ns)
    return finish(stopped, actions, event.at_ns)


def _node_lost(state: State, event: NodeLost) -> Step:
    known = _known(state)
    is_cut_off = known.is_cut_off or event.node_rank == 0
    abroad = replace(known, lost=known.lost or event, is_cut_off=is_cut_off)
    state, actions = stop(replace(state, abroad=abroad), event.at_ns, others_know=True)
    if is_cut_off and known.is_told_idle:
        return end_zygote(state, event.at_ns)
    return finish(state, actions, event.at_ns)


def _others_failed(state: State, event: OthersFailed) -> Step:
    signum = event.signum or signal.SIGTERM
    if event.signum and not state.stopping:
        state = replace(state, abroad=replace(_known(state), signum=event.signum))
    state, actions = stop(state, event.at_ns, signum=signum, others_know=True)
    return finish(state, actions, event.at_ns)


def _all_idle(state: State, event: AllIdle) -> Step:
    """Decide for every node: the ranks start again, or the launch is over."""
    ranks: dict[int, RankState] = {}
    for outcome in event.outcomes:
        ranks.update(ranks_from_json(outcome))
    abroad = replace(_known(state), ranks=ranks, outcomes=event.outcomes)
    state = replace(state, abroad=abroad)
    if not (state.stopping and may_restart(state)):
        return state, [Decide(next_after=None)]
    cause = find_cause(state, event.at_ns)
    why_not = why_not_again(state, cause)
    if why_not is not None:
        return replace(state, no_restart=why_not), [Decide(next_after=None)]
    return state, [Decide(next_after=cause)]


def _next_begins(state: State, event: NextBegins) -> Step:
    if state.zygote_gone is not None or state.finishing:
        return state, []
    causes = (*state.causes, cause_from_json(event.cause))
    return begin_again(replace(state, causes=causes), event.at_ns)


def _launch_over(state: State, event: LaunchOver) -> Step:
    state = replace(state, abroad=replace(_known(state), over=event))
    return end_zygote(state, event.at_ns)


STEPS: dict[type[Any], Callable[[State, Any], Step]] = {
    Met: _met,
    MeetingFailed: _meeting_failed,
    NodeLost: _node_lost,
    OthersFailed: _others_failed,
    OthersFinished: lambda state, _: (state, [OpenGate()]),
    AllIdle: _all_idle,
    NextBegins: _next_begins,
    LaunchOver: _launch_over,
}
