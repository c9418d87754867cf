"""What a launch does next: step(state, event) -> (state, actions). Pure; time comes in events."""

from __future__ import annotations

from dataclasses import replace

from meshrun.lifecycle import local, other_nodes
from meshrun.lifecycle.actions import Step
from meshrun.lifecycle.phases import Phase
from meshrun.lifecycle.state import State
from meshrun.protocol.events import Event

_STEPS = {**local.STEPS, **other_nodes.STEPS}


def step(state: State, event: Event) -> Step:
    """Return the state after ``event``, and the actions to carry out."""
    state, actions = _STEPS[type(event)](state, event)
    is_waiting = state.nodes is not None and state.nodes.awaits_decision
    if state.zygote_gone is not None and not is_waiting:
        state = replace(state, phase=Phase.OVER)
    return state, actions
