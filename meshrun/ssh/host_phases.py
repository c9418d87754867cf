"""The phases of a launch on several hosts. Pure.

docs/explanation/lifecycle.md draws the transitions between them, and tests check each change.
"""

from __future__ import annotations

from enum import Enum


class ControllerPhase(Enum):
    """Where a launch on hosts is."""

    CONNECTING = "connecting"
    """Agents are started."""
    RUNNING = "running"
    """Launchers were started."""
    CLOSING = "closing"
    """A launcher has ended, after which those on the other hosts end by themselves."""
    ENDING = "ending"
    """No launcher is left, or those that are were told to stop."""
    RESTARTING = "restarting"
    """As before, and the launch starts again without its first host."""


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


class AgentPhase(Enum):
    """Where an agent is with its launcher."""

    WAITING = "waiting"
    """For the order to start it."""
    RUNNING = "running"
    ENDING = "ending"
    """The launcher was asked to stop."""
    OVER = "over"
    """It has exited, or will not be started."""
