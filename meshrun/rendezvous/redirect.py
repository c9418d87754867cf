"""Where torch's store was while nodes met: whoever comes later is told where to go instead."""

from __future__ import annotations

import contextlib
import selectors
import socket

from meshrun.protocol.events import Negotiated
from meshrun.rendezvous.connections import Connections
from meshrun.rendezvous.node_info import NodeInfo


class Redirect:
    """Answers every connection with one line, and listens to nobody.

    Args:
        listener: Where they come; the caller closes it.
        found: Where the first node's launcher is.
        board: Where the listener is watched.
    """

    def __init__(self, listener: socket.socket, found: Negotiated, board: Connections) -> None:
        self._listener, self._board = listener, board
        info = NodeInfo(
            host=found.coordinator_host,
            is_host=True,
            address=found.coordinator_address,
            port=found.coordinator_port,
            secret=found.secret,
        )
        self._line = info.to_text().encode() + b"\n"
        listener.setblocking(False)
        board.selector.register(listener, selectors.EVENT_READ, self._answer)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):  # gone already, or torch's store was faster
            connection, _ = self._listener.accept()
            with connection:
                connection.setblocking(False)
                connection.send(self._line)

    def close(self) -> None:
        """Answer nobody any more."""
        self._board.selector.unregister(self._listener)
