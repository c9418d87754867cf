"""The actions that the state machine requests from the loop, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshrun.protocol.generation import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAll:
    """Start the store and every rank of this node, as one generation."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartZygote:
    """Replace the zygote that exited."""

    without_torch: bool = False
    """Whether from now on each rank gets its own interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Send a signal to ranks, or to their whole process groups."""

    ranks: tuple[int, ...]
    signum: int
    whole_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGeneration:
    """Have the zygote end the store and what ranks left behind, and continue."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndZygote:
    """Have the zygote end what is left and then itself; or end it without asking."""

    grace_s: float = 0.0
    by_force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send TimePassed at a monotonic time."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGate:
    """Let ranks that have finished leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell the coordinator how it stands here: that ranks failed, or finished, or nothing is left.

    Or that it is to continue without this node.
    """

    what: Literal["failed", "finished", "idle", "leaves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """Tell every node what comes next: the next generation after this cause, or the end."""

    next_after: Cause | None


Action = (
    StartAll
    | StartZygote
    | Signal
    | EndGeneration
    | EndZygote
    | WakeAt
    | OpenGate
    | Report
    | Decide
)
