"""What each part of the rendezvous knows of its own launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.rendezvous.connections import Connections
from meshrun.rendezvous.membership import Fit, fit_without_mesh
from meshrun.rendezvous.messages import Join


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisNode:
    """This launcher, for the lobby, the coordinator and the participant alike."""

    config: RendezvousConfig
    """Where the nodes meet, how many there may be, and how long they may take."""
    info: Join
    """What it says of itself."""
    secret: bytes
    """What only launchers of this launch know."""
    hub: Connections
    """Where connections are watched."""
    where: Callable[[str], None] = lambda _: None
    """Called with a reason when the coordinator asks for where this node's ranks are."""
    fit: Fit = fit_without_mesh
    """Solves the mesh over nodes."""
