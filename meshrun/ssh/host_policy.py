"""What differs between a launch on a fixed number of hosts and an elastic one. Pure.

Nothing else in this package asks which of the two a launch is.
"""

from __future__ import annotations

from msgspec import Struct

from meshrun.ssh.host_phases import ControllerPhase


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
