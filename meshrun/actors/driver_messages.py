"""Messages between a launcher and the process that is connected to Ray, packed into lines."""

from __future__ import annotations

from msgspec import Struct

from meshrun.actors.bundles import PlacementRequest


class PlaceNodes(Struct, frozen=True):
    """To Ray's process: place the nodes of a launch."""

    request: PlacementRequest
    call: str | None
    """The folder with the call that ranks make, to which their results are written."""
    grace_s: float
    """How long the launch may take to end once the launcher has closed the connection."""


class PlacementWaits(Struct, frozen=True):
    """To the launcher: the cluster has yet to free resources."""

    note: str


class PlacementFailed(Struct, frozen=True):
    """To the launcher: there is no cluster, or it cannot provide the nodes."""

    error: str
    hint: str | None


class NodesPlaced(Struct, frozen=True):
    """To the launcher: what the cluster provides."""

    hosts: list[tuple[str, int]]
    """(name, workers) of each node."""
    address: str
    """The socket for the streams of the nodes."""


Reply = PlacementWaits | PlacementFailed | NodesPlaced
