"""The actions that the state machine requests from the loop, or orders to the zygote, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshrun.protocol.generation import Cause
from meshrun.protocol.to_zygote import EndGeneration, SignalRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAll:
    """Start the store and all ranks of this node as one generation."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartZygote:
    """Replace the zygote that exited."""

    without_torch: bool = False
    """Whether each rank gets its own interpreter from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndZygote:
    """Have the zygote end what is left and exit, or kill it."""

    grace_s: float = 0.0
    by_force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGate:
    """Let finished ranks exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report to the coordinator: ranks failed, all finished, nothing is left, or this node leaves.

    The others continue without a node that leaves.
    """

    what: Literal["failed", "finished", "cleared", "leaves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """Send every node the decision: another generation, or the end of the launch."""

    next_after: Cause | None
    """Why this generation ended; ``None`` ends the launch."""


Action = (
    StartAll | StartZygote | SignalRanks | EndGeneration | EndZygote | OpenGate | Report | Decide
)
