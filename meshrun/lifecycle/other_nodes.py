"""What a launch does next after an event on other nodes. Pure; time comes in events.

Node 0 is the coordinator: every node reports to it, and it decides what all do next.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshrun.lifecycle.actions import Decide, EndZygote, OpenGate, Report
from meshrun.lifecycle.local import (
    end_zygote,
    finish,
    leave,
    mark_stopped,
    report_cleared,
    start_if_due,
    start_next_generation,
    stop,
    with_cause,
)
from meshrun.lifecycle.phases import Gate, Link, NodesPhase, Phase
from meshrun.lifecycle.restart import cause_of_change, may_continue, may_restart, plan_restart
from meshrun.lifecycle.state import NodesState, State
from meshrun.protocol.events import (
    AllCleared,
    GenerationAborted,
    LaunchOver,
    MeetingFailed,
    Met,
    NextBegins,
    NodeLost,
    OthersFinished,
)
from meshrun.protocol.generation import Cause, RankState


def _nodes(state: State) -> NodesState:
    assert state.nodes is not None  # noqa: S101 - these events need several nodes
    return state.nodes


def _met(state: State, event: Met) -> State:
    known = _nodes(state)
    ranks = {rank: RankState() for rank in event.ranks}
    if known.is_met:  # the nodes have changed since
        if state.phase in (Phase.ENDING, Phase.OVER) or known.link is Link.CUT_OFF:
            return state
        return start_next_generation(replace(state, ranks=ranks, causes=event.causes), event.at_ns)
    nodes = replace(known, phase=NodesPhase.RUNNING, is_coordinator=event.node_rank == 0)
    return start_if_due(replace(state, nodes=nodes, ranks=ranks, causes=event.causes))


def _meeting_failed(state: State, event: MeetingFailed) -> State:
    known = _nodes(state)
    if known.failed is not None or state.over:
        return state
    link = Link.CUT_OFF if known.link is Link.RETURNING else known.link
    nodes = replace(known, failed=event, link=link)
    if not nodes.is_met:
        state = mark_stopped(state, nodes=nodes, phase=Phase.ENDING)
        return state.do(EndZygote(by_force=True))
    if known.is_cleared and known.may_end_alone:
        return leave(replace(state, nodes=nodes), nodes, event.at_ns)
    return finish(stop(replace(state, nodes=nodes), event.at_ns), event.at_ns)


def _node_lost(state: State, event: NodeLost) -> State:
    known = _nodes(state)
    may_return = known.is_elastic and known.link is not Link.CUT_OFF and known.signum is None
    if may_return and not state.signals:  # an elastic launch reports only a lost coordinator
        alone = replace(state, nodes=replace(known, link=Link.RETURNING))
        return finish(stop(alone, event.at_ns, others_know=True), event.at_ns)
    if known.is_coordinator and may_restart(state):  # the lost node may be started again
        lost = GenerationAborted(why=str(event), signum=0, at_ns=event.at_ns)
        state = replace(state, nodes=replace(known, change=known.change or lost))
        return finish(stop(state, event.at_ns, others_know=True), event.at_ns)
    link = Link.CUT_OFF if event.node_rank == 0 else known.link
    nodes = replace(known, lost=known.lost or event, link=link)
    state = stop(replace(state, nodes=nodes), event.at_ns, others_know=True)
    if link is Link.CUT_OFF and known.is_cleared:
        return end_zygote(state, event.at_ns)
    return finish(state, event.at_ns)


def _generation_aborted(state: State, event: GenerationAborted) -> State:
    signum = event.signum or signal.SIGTERM
    if event.resizes and _nodes(state).change is None:
        state = replace(state, nodes=replace(_nodes(state), change=event))
    if event.signum and not state.stopping:
        state = replace(state, nodes=replace(_nodes(state), signum=event.signum))
    return finish(stop(state, event.at_ns, signum=signum, others_know=True), event.at_ns)


def _all_cleared(state: State, event: AllCleared) -> State:
    """Decide for every node: restart the ranks, or end the launch."""
    if _nodes(state).phase in (NodesPhase.MEETING, NodesPhase.OVER):
        return state
    nodes = replace(_nodes(state), outcomes=event.outcomes)
    state = replace(state, nodes=nodes)
    if nodes.change is not None and may_continue(state):
        return _regroup(state, cause_of_change(state, nodes.change))
    if not state.stopping:  # every rank succeeded
        return state.do(Decide(next_after=None))
    state, cause = plan_restart(state, event.at_ns)
    return state.do(Decide(next_after=None)) if cause is None else _regroup(state, cause)


def _regroup(state: State, cause: Cause) -> State:
    """Restart the ranks, once there are enough nodes."""
    known = _nodes(state)
    nodes = replace(known, phase=NodesPhase.REGROUPING)
    return replace(state, nodes=nodes).do(Decide(next_after=cause))


def _next_begins(state: State, event: NextBegins) -> State:
    state = with_cause(state, event.cause)
    if not _nodes(state).awaits_decision:
        return state
    if state.phase not in (Phase.ENDING, Phase.OVER) and state.broken is None:
        return start_next_generation(state, event.at_ns)
    # This node can no longer start ranks, and the others would wait for them.
    nodes = replace(_nodes(state), phase=NodesPhase.RUNNING)
    return report_cleared(replace(state, nodes=nodes).do(Report(what="failed")))


def _others_finished(state: State, event: OthersFinished) -> State:
    return finish(replace(state, gate=Gate.OPEN).do(OpenGate()), event.at_ns)


def _launch_over(state: State, event: LaunchOver) -> State:
    state = replace(state, nodes=replace(_nodes(state), over=event, phase=NodesPhase.OVER))
    return end_zygote(state, event.at_ns)


HANDLERS: dict[type[Any], Callable[[State, Any], State]] = {
    Met: _met,
    MeetingFailed: _meeting_failed,
    NodeLost: _node_lost,
    GenerationAborted: _generation_aborted,
    OthersFinished: _others_finished,
    AllCleared: _all_cleared,
    NextBegins: _next_begins,
    LaunchOver: _launch_over,
}
