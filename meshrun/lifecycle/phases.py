"""The phases of a launch. Pure.

docs/explanation/lifecycle.md draws the transitions between them, and a test plays random histories
and checks each transition against these diagrams.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where this node is with one generation of ranks."""

    IMPORTING = "importing"
    """The zygote imports torch; nodes may be joining."""
    WAITING = "waiting"
    """The zygote is ready, and waits for other nodes or for the end of a back-off."""
    RUNNING = "running"
    """The zygote was ordered to start the ranks."""
    CLEARING = "clearing"
    """No rank is left: the zygote ends what they left behind, or the coordinator decides."""
    ENDING = "ending"
    """The zygote was ordered to exit."""
    OVER = "over"
    """Nothing is left to wait for."""


class Stop(Enum):
    """Whether the ranks of a generation are being stopped, and how."""

    NONE = "none"
    ASKED = "asked"
    """By a signal that they may catch, or before they started."""
    KILLED = "killed"
    """By SIGKILL."""


class ExitBarrier(Enum):
    """Whether finished ranks may exit, and so close connections that their peers may need."""

    CLOSED = "closed"
    REACHED = "reached"
    """The ranks of this node have finished, and wait for those of other nodes."""
    RELEASED = "released"


class NodesPhase(Enum):
    """Where the nodes of a launch are with one generation, as far as this node knows."""

    JOINING = "joining"
    RUNNING = "running"
    CLEARED = "cleared"
    """This node has reported that nothing of this generation is left on it."""
    AWAITING_NODES = "awaiting_nodes"
    """The coordinator will start the ranks again once there are enough nodes."""
    OVER = "over"
    """The coordinator has ended the launch."""
    ALONE = "alone"
    """There are no other nodes."""


class Link(Enum):
    """The state of this node's link to the coordinator."""

    UP = "up"
    RETURNING = "returning"
    """The connection was lost, and this node of an elastic launch tries to reconnect."""
    CLOSED = "closed"
    """The coordinator is lost for good, or this node leaves the launch."""
