"""How this node's part of a launch ends. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshrun.lifecycle.actions import Action, Decide, EndZygote, Report, Transition, WakeAt
from meshrun.lifecycle.phases import Link, NodesPhase, Phase, Stop
from meshrun.lifecycle.state import NodesState, State

LEFTOVER_GRACE_S = 2.0
"""How long processes that ranks left behind may take to end after the last rank."""
ZYGOTE_GRACE_S = LEFTOVER_GRACE_S + 5.0
"""How long the zygote may take to answer before it and its ranks are killed."""
_NS = 1_000_000_000


def end_zygote(state: State, at_ns: int) -> Transition:
    """End the zygote, as no rank is left and none will be started."""
    if state.zygote_gone is not None or state.phase is Phase.ENDING:
        return state, []
    deadline_ns = at_ns + int(ZYGOTE_GRACE_S * _NS)
    actions: list[Action] = [EndZygote(), WakeAt(at_ns=deadline_ns)]
    return replace(state, phase=Phase.ENDING, deadline_ns=deadline_ns), actions


def leave(state: State, nodes: NodesState, actions: list[Action], at_ns: int) -> Transition:
    """End this node's part; on the coordinator, end the launch if it waits for more nodes."""
    if nodes.is_coordinator:
        is_awaited = nodes.phase is NodesPhase.REGROUPING
        return state, [*actions, Decide(next_after=None)] if is_awaited else actions
    state, ends = end_zygote(replace(state, nodes=replace(nodes, link=Link.CUT_OFF)), at_ns)
    return state, [*actions, *ends]


def mark_stopped(state: State, **changes: Any) -> State:
    """Return the state with its ranks marked as asked to stop, unless they have been killed."""
    stop = state.stop if state.stopping else Stop.ASKED
    return replace(state, stop=stop, **changes)


def report_cleared(state: State) -> Transition:
    """Report to the coordinator, once, that nothing of this generation is left here."""
    nodes = state.nodes
    if nodes is None or nodes.is_cleared or not nodes.awaits_decision:
        return state, []
    return replace(state, nodes=replace(nodes, phase=NodesPhase.CLEARED)), [Report(what="cleared")]
