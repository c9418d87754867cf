"""What a launch does next after an event on other nodes. Pure; time comes in events.

Node 0 is the coordinator: every node reports to it, and it decides what all do next.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from meshrun.lifecycle.actions import Decide, EndZygote, ReleaseRanks, Report
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
from meshrun.lifecycle.phases import ExitBarrier, Link, NodesPhase, Phase
from meshrun.lifecycle.restart import cause_of_change, may_continue, may_restart, plan_restart
from meshrun.lifecycle.state import State
from meshrun.protocol.events import (
    AllCleared,
    AllJoined,
    GenerationAborted,
    JoinFailed,
    LaunchOver,
    NextBegins,
    NodeLost,
    OthersFinished,
)
from meshrun.protocol.generation import Cause, RankState


def _joined(state: State, event: AllJoined) -> State:
    nodes, at_ns = state.nodes, event.at_ns
    if nodes.have_joined and (
        state.phase in (Phase.ENDING, Phase.OVER) or nodes.link is Link.CLOSED
    ):
        return state
    ranks = {rank: RankState() for rank in event.ranks}
    state = replace(state, ranks=ranks, causes=event.causes)
    if nodes.have_joined:  # the nodes have changed since
        return start_next_generation(state, at_ns)
    state = state.with_nodes(phase=NodesPhase.RUNNING, is_coordinator=event.node_rank == 0)
    return start_if_due(state) if nodes.failed is None else finish(stop(state, at_ns), at_ns)


def _join_failed(state: State, event: JoinFailed) -> State:
    nodes = state.nodes
    if nodes.failed is not None or state.over:
        return state
    if event.joined is not None:
        return _joined(state.with_nodes(failed=event), event.joined)
    link = Link.CLOSED if nodes.link is Link.RETURNING else nodes.link
    state = state.with_nodes(failed=event, link=link)
    if not nodes.have_joined:
        return mark_stopped(state, phase=Phase.ENDING).do(EndZygote(by_force=True))
    if nodes.is_cleared and nodes.may_end_alone:
        return leave(state, event.at_ns)
    return finish(stop(state, event.at_ns), event.at_ns)


def _node_lost(state: State, event: NodeLost) -> State:
    nodes = state.nodes
    if nodes.may_return and not state.signals:  # an elastic launch reports only a lost coordinator
        alone = state.with_nodes(link=Link.RETURNING)
        return finish(stop(alone, event.at_ns, others_know=True), event.at_ns)
    if nodes.is_coordinator and may_restart(state):  # the lost node may be started again
        lost = GenerationAborted(why=str(event), signum=0, at_ns=event.heard_ns)
        state = state.with_nodes(change=nodes.change or lost)
        return finish(stop(state, event.at_ns, others_know=True), event.at_ns)
    link = Link.CLOSED if event.node_rank == 0 else nodes.link
    state = state.with_nodes(lost=nodes.lost or event, link=link)
    state = stop(state, event.at_ns, others_know=True)
    if link is Link.CLOSED and nodes.is_cleared:
        return end_zygote(state, event.at_ns)
    return finish(state, event.at_ns)


def _generation_aborted(state: State, event: GenerationAborted) -> State:
    signum = event.signum or signal.SIGTERM
    if event.resizes and state.nodes.change is None:
        state = state.with_nodes(change=event)
    if event.signum and not state.stopping:
        state = state.with_nodes(signum=event.signum)
    return finish(stop(state, event.at_ns, signum=signum, others_know=True), event.at_ns)


def _all_cleared(state: State, event: AllCleared) -> State:
    """Decide for every node: restart the ranks, or end the launch."""
    change = state.nodes.change
    if state.nodes.phase is not NodesPhase.CLEARED:
        return state
    state = state.with_nodes(outcomes=event.outcomes)
    if state.hung is not None and event.why_hung:
        state = replace(state, hung=replace(state.hung, why=event.why_hung))
    if change is not None and may_continue(state):
        return _gather(state, cause_of_change(state, change))
    if not state.stopping:  # every rank succeeded
        return state.do(Decide(next_after=None))
    state, cause = plan_restart(state, event.at_ns)
    return state.do(Decide(next_after=None)) if cause is None else _gather(state, cause)


def _gather(state: State, cause: Cause) -> State:
    """Restart the ranks, once there are enough nodes."""
    return state.with_nodes(phase=NodesPhase.AWAITING_NODES).do(Decide(next_after=cause))


def _next_begins(state: State, event: NextBegins) -> State:
    state = with_cause(state, event.cause)
    if not (state.nodes.awaits_decision and state.nodes.is_cleared):
        return state
    if state.phase not in (Phase.ENDING, Phase.OVER) and state.broken is None:
        return start_next_generation(state, event.at_ns)
    # This node can no longer start ranks, and the others would wait for them.
    return report_cleared(state.with_nodes(phase=NodesPhase.RUNNING).do(Report(what="failed")))


def _others_finished(state: State, event: OthersFinished) -> State:
    return finish(replace(state, exit_barrier=ExitBarrier.RELEASED).do(ReleaseRanks()), event.at_ns)


def _launch_over(state: State, event: LaunchOver) -> State:
    return end_zygote(state.with_nodes(launch_over=event, phase=NodesPhase.OVER), event.at_ns)


HANDLERS: dict[type[Any], Callable[[State, Any], State]] = {
    AllJoined: _joined,
    JoinFailed: _join_failed,
    NodeLost: _node_lost,
    GenerationAborted: _generation_aborted,
    OthersFinished: _others_finished,
    AllCleared: _all_cleared,
    NextBegins: _next_begins,
    LaunchOver: _launch_over,
}
