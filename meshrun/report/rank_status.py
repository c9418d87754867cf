"""The phase of a rank, for ``--status`` and ``--metrics``. Pure."""

from __future__ import annotations

from typing import Literal

from meshrun.lifecycle.state import State
from meshrun.protocol.generation import RankState

RankPhase = Literal[
    "starting", "joining", "running", "hung", "stopped", "ending", "ended", "failed"
]


def phase_of(rank_state: RankState, state: State, *, has_mesh: bool) -> RankPhase:
    """Return the phase of a rank."""
    phase: RankPhase = "running"
    if rank_state.exited is not None:
        was_asked = rank_state.asked_to_end_ns is not None
        phase = "ended" if rank_state.exited_well or was_asked else "failed"
    elif rank_state.raised is not None:
        phase = "failed"
    elif state.hung is not None:
        phase = "hung"
    elif rank_state.finished or (state.stopping and rank_state.pid is not None):
        phase = "ending"
    elif not rank_state.ready:
        phase = "joining" if has_mesh and rank_state.pid is not None else "starting"
    return phase
