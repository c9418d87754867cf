"""Where torch's store was while nodes met: whoever comes later is told where to go instead."""

from __future__ import annotations

import contextlib
import selectors
import socket

from meshrun.protocol.events import Negotiated
from meshrun.rendezvous.connections import Switchboard
from meshrun.rendezvous.node_info import NodeCard


class Signpost:
    """Answers every connection with one line, and listens to nobody.

    Args:
        listener: Where they come; the caller closes it.
        found: Where the first node's launcher is.
        board: Where the listener is watched.
    """

    def __init__(self, listener: socket.socket, found: Negotiated, board: Switchboard) -> None:
        self._listener, self._board = listener, board
        card = NodeCard(
            host=found.head_host,
            is_host=True,
            address=found.head_address,
            port=found.head_port,
            secret=found.secret,
        )
        self._line = card.to_text().encode() + b"\n"
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
