"""What a launch does next: one pure state machine, advance(state, event) -> (state, actions).

``phases`` lists the phases; docs/explanation/lifecycle.md draws their transitions.
``local`` handles events on this node, ``other_nodes`` those on other nodes. ``restart`` decides
whether ranks restart, ``root_cause`` which failure was the cause, ``outcome`` the exit code.
What a signal such as Ctrl-C stops, and when ranks are killed: ``_signalled()`` in ``local``.
"""

from __future__ import annotations

from msgspec.structs import replace

from meshrun.lifecycle import local, other_nodes
from meshrun.lifecycle.actions import Action
from meshrun.lifecycle.phases import Phase
from meshrun.lifecycle.state import State
from meshrun.protocol.events import Event

_HANDLERS = {**local.HANDLERS, **other_nodes.HANDLERS}


def advance(state: State, event: Event) -> tuple[State, list[Action]]:
    """Return the state after ``event``, and the actions to carry out; time comes in events."""
    state = _HANDLERS[type(event)](state, event)
    if state.zygote_gone is not None and not state.nodes.awaits_decision:
        state = replace(state, phase=Phase.OVER)
    return replace(state, actions=()), [*state.actions]
