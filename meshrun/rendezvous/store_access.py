"""Restricts the ranks' store, which has no password, to the nodes of the launch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from ipaddress import IPv6Address

from meshrun.host.admission import admit_only
from meshrun.host.interfaces import own_addresses
from meshrun.plan.parse import is_on
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.messages import Join

_MOST_ADDRESSES = 16
"""How many addresses a node may list."""


def addresses_to_name() -> list[str]:
    """Return the IPv6 addresses from which this machine's ranks may connect to the store."""
    return [each for each in own_addresses() if _is_v6(each) and each != "::1"][:_MOST_ADDRESSES]


def restrict_to_nodes(
    listener: socket.socket,
    connections: Iterable[Connection],
    nodes: Iterable[Join],
    hub: Hub,
) -> None:
    """Accept connections only from this node and the others, by any of their addresses."""
    if is_on(os.environ.get("MESHRUN_OPEN_STORE")):
        return
    theirs = {connection.their_address for connection in connections if connection.their_address}
    if listener.family == socket.AF_INET6:
        named = (each for node in nodes for each in node.addresses[:_MOST_ADDRESSES])
        theirs |= {each for each in named if _is_v6(each)}
    try:
        admit_only(listener, {*own_addresses(), *theirs})
    except OSError as error:
        place = format_endpoint(*listener.getsockname()[:2])
        hub.note(
            f"anyone who can reach the ranks' store at {place} can write to it: cannot set a"
            f" filter ({error.strerror})"
        )


def _is_v6(text: str) -> bool:
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False
