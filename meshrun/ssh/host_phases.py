"""The phases of a launch on several hosts, and what differs if it is elastic. Pure.

docs/explanation/lifecycle.md draws the transitions between phases, and tests check each change.
Nothing else in this package asks whether the number of hosts is fixed or elastic.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


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


class HostPolicy(Struct, frozen=True, kw_only=True):
    """What a host means to a launch: :data:`FIXED` or :data:`ELASTIC`."""

    needs_all: bool
    """Whether the launch needs every one of its hosts, not only the first."""
    ends_with_first: bool
    """Whether the other hosts are to end once the first one has succeeded."""
    after_loss: ControllerPhase
    """What follows once a host that the launch needs is lost."""
    keeps_places: bool
    """Whether a host's node rank is its place in the list, by which it finds its workers."""


FIXED = HostPolicy(
    needs_all=True,
    ends_with_first=False,
    after_loss=ControllerPhase.ENDING,
    keeps_places=True,
)
"""All hosts take part until the end."""


ELASTIC = HostPolicy(
    needs_all=False,
    ends_with_first=True,
    after_loss=ControllerPhase.RESTARTING,
    keeps_places=False,
)
"""Lost hosts are tried again; the first one, where the others meet, decides how the launch ends."""
