"""The phases of the launchers' parts in the rendezvous. Pure.

docs/explanation/lifecycle.md draws the transitions, which tests check as they check those of a
launch.
"""

from __future__ import annotations

from enum import Enum


class ConnectionPhase(Enum):
    """Where a connection between two launchers is."""

    HANDSHAKE = "handshake"
    """Each side proves that it knows the secret."""
    OPEN = "open"
    INTERRUPTED = "interrupted"
    """It was reset, and the participant connects again to resume it."""
    CLOSED = "closed"


class EndpointPhase(Enum):
    """What a participant has found at the endpoint."""

    UNKNOWN = "unknown"
    """It has not got that far, or was connected and lost the connection."""
    NOTHING = "nothing"
    """The machine refuses connections: it is up, but nothing listens there."""
    FOREIGN = "foreign"
    """Something else than this launch's coordinator may answer there."""
    FALLBACK = "fallback"
    """Likewise; this attempt is made at the port on which node 0 reports that."""


class CoordinatorPhase(Enum):
    """Where node 0 is with the generations of a launch, once all nodes have joined."""

    AWAITING_NODES = "awaiting_nodes"
    """The next generation begins once there are enough nodes."""
    RUNNING = "running"
    """It has begun, and ends once nothing of it is left on any node."""
    FAILED = "failed"
    """It cannot begin."""
    OVER = "over"
    """The launch has ended."""


class ParticipantPhase(Enum):
    """The part of a node other than node 0 in the launch."""

    JOINING = "joining"
    """It connects to the coordinator, and waits for the other nodes."""
    SPARE = "spare"
    """The elastic launch runs without it."""
    RUNNING = "running"
    """It takes part, and may have processes of this generation."""
    CLEARED = "cleared"
    """It takes part, and has reported that nothing of this generation is left on it."""
    CUT_OFF = "cut off"
    """The connection to an elastic launch was lost; its ranks end first."""
    RETURNING = "returning"
    """It tries to reconnect."""
    LINGERING = "lingering"
    """The launch has failed; this node waits until the coordinator, which reports this, has ended.
    Unlike a node that withdraws, it has nobody to notify (``node_link.Linger``).
    """
    OVER = "over"
    """The launch has ended well, or this node has left or lost it."""
    FAILED = "failed"
    """It cannot join, or was rejected."""
