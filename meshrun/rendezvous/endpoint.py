"""Whether the endpoint is an address of this machine, and which one."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence

from msgspec import Struct

from meshrun.host.host_names import first_label
from meshrun.host.network import is_loopback, own_addresses

_LOCAL = ("localhost", "localhost.localdomain")


class Endpoint(Struct, frozen=True, kw_only=True):
    """The endpoint as seen from this machine."""

    host: str
    addresses: tuple[str, ...]
    """The addresses that its name resolves to."""
    own: tuple[str, ...]
    """Those of this machine."""
    facing: tuple[str, ...]
    """Those of this machine that other nodes can reach; loopback only if requested."""
    is_ours: bool
    """Whether it is an address or the name of this machine."""
    is_ambiguous: bool
    """Whether other nodes may reach it at any of several IPv4 addresses."""

    @property
    def is_hidden(self) -> bool:
        """Whether it is this machine's name for a loopback address, as on Debian, or for none."""
        return self.is_ours and not self.facing


def endpoint_here(host: str, addresses: Sequence[str]) -> Endpoint:
    """Return the endpoint as seen from this machine, without the brackets of an address."""
    return classify_endpoint(
        host.strip("[]"), addresses, own_addresses=own_addresses(), own_name=socket.gethostname()
    )


def classify_endpoint(
    host: str, addresses: Sequence[str], *, own_addresses: Collection[str], own_name: str
) -> Endpoint:
    """Return the endpoint as seen from this machine."""
    own = tuple(each for each in addresses if each.partition("%")[0] in own_addresses)
    facing = tuple(each for each in own if not is_loopback(each))
    if not facing and host in (*_LOCAL, *own):
        facing = own
    is_elsewhere = not own and any(not is_loopback(each) for each in addresses)
    is_namesake = is_elsewhere and _has_other_domain(host, own_name)
    is_ours = bool(own) or (is_same_name(host, own_name) and not is_namesake)
    outward = [each for each in own_addresses if not is_loopback(each)]
    possible = facing or (outward if is_ours else ())
    return Endpoint(
        host=host,
        addresses=tuple(addresses),
        own=own,
        facing=facing,
        is_ours=is_ours,
        is_ambiguous=sum(":" not in each for each in possible) > 1,
    )


def is_same_name(host: str, other: str) -> bool:
    """Return whether two names denote one machine, with or without their domain."""
    return first_label(host) == first_label(other)


def _has_other_domain(host: str, other: str) -> bool:
    one, two = f"{host.lower()}.", f"{other.lower()}."
    return not (one.startswith(two) or two.startswith(one))
