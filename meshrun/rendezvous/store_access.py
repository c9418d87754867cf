"""Restricts the ranks' store, which has no password, to the nodes of the launch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from meshrun.host.admission import admit_only
from meshrun.host.interfaces import own_addresses
from meshrun.plan.parse import is_on
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.connections import Connections


def keep_to_nodes(
    listener: socket.socket, connections: Iterable[Connection], board: Connections
) -> None:
    """Let only this node, and the peers of ``connections``, connect to ``listener``."""
    if is_on(os.environ.get("MESHRUN_OPEN_STORE")):
        return
    theirs = (connection.their_address for connection in connections if connection.their_address)
    try:
        admit_only(listener, {*own_addresses(), *theirs})
    except OSError as error:
        place = format_endpoint(*listener.getsockname()[:2])
        board.note(
            f"anyone who can reach the ranks' store at {place} can write to it: cannot set a"
            f" filter ({error.strerror})"
        )
