"""Whether the endpoint is an address of this machine, and which. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshrun.host.interfaces import is_loopback

_LOCAL = ("localhost", "localhost.localdomain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the first node is said to be."""

    host: str
    addresses: tuple[str, ...]
    """All that its name leads to."""
    own: tuple[str, ...]
    """Those of them that this machine has."""
    facing: tuple[str, ...]
    """Its addresses that other nodes can reach; loopback only if requested."""
    is_ours: bool
    """Whether it leads to this machine."""


def classify_endpoint(
    host: str, addresses: Sequence[str], *, own_addresses: Collection[str], own_name: str
) -> Endpoint:
    """Return what an endpoint is to this machine."""
    own = tuple(each for each in addresses if each.partition("%")[0] in own_addresses)
    facing = tuple(each for each in own if not is_loopback(each))
    if not facing and host in (*_LOCAL, *own):
        facing = own
    return Endpoint(
        host=host,
        addresses=tuple(addresses),
        own=own,
        facing=facing,
        is_ours=bool(own) or is_same_name(host, own_name),
    )


def is_same_name(host: str, other: str) -> bool:
    """Return whether two names are of one machine, with or without their domain."""
    return host.partition(".")[0] == other.partition(".")[0]
