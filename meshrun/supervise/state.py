"""What a launch does next: step(state, event) -> (state, actions). Pure; time comes in events."""

from __future__ import annotations

from meshrun.events import Event
from meshrun.supervise import abroad, here
from meshrun.supervise.known import State
from meshrun.supervise.parting import Step

_STEPS = {**here.STEPS, **abroad.STEPS}


def step(state: State, event: Event) -> Step:
    """Return the state after ``event`` and what to do about it."""
    return _STEPS[type(event)](state, event)
