"""Restricts the ranks' store, which has no password, to the nodes of the launch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from meshrun.errors import HostError, UsageError
from meshrun.host.host_names import is_address
from meshrun.host.interfaces import own_addresses
from meshrun.host.own_variables import OPEN_STORE
from meshrun.host.sockets import listen_for, listen_on
from meshrun.plan.parse import is_on
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.messages import Join

_MOST_ADDRESSES = 16
"""How many addresses a node may list."""


def addresses_to_name() -> list[str]:
    """Return the IPv6 addresses from which this machine's ranks may connect to the store."""
    return [each for each in own_addresses() if ":" in each and each != "::1"][:_MOST_ADDRESSES]


def listen_for_nodes(
    on: str, connections: Iterable[Connection], nodes: Iterable[Join], hub: Hub
) -> tuple[socket.socket, socket.socket | None]:
    """Return a socket for connections from this node and the others, by any of their addresses.

    The second one, if there is one, gets the connections of others; it is to stay open as long.

    Raises:
        HostError: If this machine has lost the address ``on``.
    """
    try:
        if is_on(os.environ.get(OPEN_STORE)):
            return listen_on(on, 0), None
        theirs = {each.their_address for each in connections if each.their_address}
        if ":" in on:
            named = (each for node in nodes for each in node.addresses[:_MOST_ADDRESSES])
            theirs |= {each for each in named if ":" in each and is_address(each)}
        try:
            return listen_for({*own_addresses(), *theirs}, on)
        except OSError as error:
            listener = listen_on(on, 0)
            place = format_endpoint(*listener.getsockname()[:2])
            hub.note(
                "cannot restrict the ranks' store to this launch's machines"
                f" ({error.strerror}): anyone who can reach {place} can write to it"
            )
            return listener, None
    except UsageError as error:
        raise HostError(
            f"this machine has lost the address {on}, where the nodes met",
            hint="a launch cannot continue without node 0's address; start it again",
        ) from error
