"""What a launch does next, after any event. Pure; time comes in events."""

from __future__ import annotations

from msgspec.structs import replace

from meshrun.lifecycle import local, other_nodes
from meshrun.lifecycle.actions import Action
from meshrun.lifecycle.phases import Phase
from meshrun.lifecycle.state import State
from meshrun.protocol.events import Event

_HANDLERS = {**local.HANDLERS, **other_nodes.HANDLERS}


def advance(state: State, event: Event) -> tuple[State, list[Action]]:
    """Return the state after ``event``, and the actions to carry out."""
    state = _HANDLERS[type(event)](state, event)
    if state.zygote_gone is not None and not state.nodes.awaits_decision:
        state = replace(state, phase=Phase.OVER)
    return replace(state, actions=()), [*state.actions]
