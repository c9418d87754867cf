"""What each part of the rendezvous needs to know about its own launcher."""

from __future__ import annotations

from msgspec import Struct

from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.rendezvous.connection import beat_s
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.membership import Fit, fit_without_mesh
from meshrun.rendezvous.messages import Join
from meshrun.rendezvous.policy import ELASTIC, FIXED, Policy


class ThisNode(Struct, frozen=True, kw_only=True):
    """This launcher, as the lobby, the coordinator and the participant see it."""

    config: RendezvousConfig
    """Where the nodes meet, how many there may be, and how long they may take."""
    info: Join
    """Its own Join message."""
    secret: bytes
    """The key that only launchers of this launch know."""
    hub: Hub
    """Watches its connections."""
    fit: Fit = fit_without_mesh
    """Solves the mesh for the nodes."""

    @property
    def policy(self) -> Policy:
        """What it does as nodes join and are lost."""
        return ELASTIC if self.config.is_elastic else FIXED

    @property
    def beat_s(self) -> float:
        """The interval of heartbeats."""
        return beat_s(self.config.nnodes, self.config.node_timeout_s)
