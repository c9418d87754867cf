"""The actions that the state machine requests from the loop, or orders to the zygote, as values."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from meshrun.protocol.generation import Cause
from meshrun.protocol.zygote_messages import EndGeneration, SignalRanks


class StartAll(Struct, frozen=True, kw_only=True):
    """Start the store and all ranks of this node as one generation."""

    generation: int


class StartZygote(Struct, frozen=True, kw_only=True):
    """Replace the zygote that exited."""

    without_torch: bool = False
    """Whether each rank gets its own interpreter from now on."""


class EndZygote(Struct, frozen=True, kw_only=True):
    """Have the zygote end what is left and exit, or kill it."""

    grace_s: float = 0.0
    by_force: bool = False


class ReleaseRanks(Struct, frozen=True, kw_only=True):
    """Let finished ranks exit."""


class Report(Struct, frozen=True, kw_only=True):
    """Report to the coordinator: ranks failed, all finished, nothing is left, or this node leaves.

    The others continue without a node that leaves.
    """

    what: Literal["failed", "finished", "cleared", "leaves"]


class Decide(Struct, frozen=True, kw_only=True):
    """Send every node the decision: another generation, or the end of the launch."""

    next_after: Cause | None
    """Why this generation ended; ``None`` ends the launch."""


Action = (
    StartAll
    | StartZygote
    | SignalRanks
    | EndGeneration
    | EndZygote
    | ReleaseRanks
    | Report
    | Decide
)
