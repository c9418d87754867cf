"""Where torch's store was while nodes met: whoever comes later is told that he is too late."""

from __future__ import annotations

import contextlib
import selectors
import socket

from meshrun.nodes.handshake import refusal
from meshrun.nodes.switchboard import Switchboard


class ClosedDoor:
    """Answers every connection with one line, and listens to nobody.

    Args:
        listener: Where they come; the caller closes it.
        text: What they are told.
        board: Where the listener is watched.
    """

    def __init__(self, listener: socket.socket, text: str, board: Switchboard) -> None:
        self._listener, self._line, self._board = listener, refusal(text), board
        listener.setblocking(False)
        board.selector.register(listener, selectors.EVENT_READ, self._turn_away)

    def _turn_away(self) -> None:
        with contextlib.suppress(OSError):  # gone already, or torch's store was faster
            connection, _ = self._listener.accept()
            with connection:
                connection.setblocking(False)
                connection.send(self._line)

    def close(self) -> None:
        """Answer nobody any more."""
        self._board.selector.unregister(self._listener)
