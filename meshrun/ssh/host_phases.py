"""The phases of a launch on several hosts. Pure.

docs/explanation/lifecycle.md draws the transitions between them, and tests check each change.
"""

from __future__ import annotations

from enum import Enum


class HostPhase(Enum):
    """Where a host is, as its controller knows."""

    CONNECTING = "connecting"
    """Its agent has not answered."""
    READY = "ready"
    """Its agent can start a launcher."""
    LAUNCHED = "launched"
    """Its launcher was ordered to start."""
    DONE = "done"
    """Nothing more is expected of it."""
