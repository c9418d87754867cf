"""Launches played through as the events that happen in them."""

from __future__ import annotations

from collections.abc import Iterable

from meshrun.events import Event
from meshrun.supervise.actions import Action, WakeAt
from meshrun.supervise.known import Abroad, RankState, State
from meshrun.supervise.state import step


def play(
    events: Iterable[Event], *, ranks: int, max_restarts: int = 0, abroad: Abroad | None = None
) -> tuple[State, list[Action]]:
    """Return the last state of a launch, and what was done in it; times to wake up are left out."""
    state = State(
        shutdown_timeout_s=30.0,
        ranks={rank: RankState() for rank in range(ranks)},
        max_restarts=max_restarts,
        abroad=abroad,
    )
    taken: list[Action] = []
    for event in events:
        state, actions = step(state, event)
        taken.extend(action for action in actions if not isinstance(action, WakeAt))
    return state, taken
