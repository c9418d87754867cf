"""Where node 0 of an elastic launch lets in nodes that come later."""

from __future__ import annotations

import itertools
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from meshrun.errors import MeshrunError
from meshrun.nodes.handshake import HeadHandshake
from meshrun.nodes.link import Link
from meshrun.nodes.messages import Join, Refused
from meshrun.nodes.switchboard import Switchboard

_PROOF_WITHIN_S = 10.0
_MOST_STRANGERS = 256
"""Connections that have not said what they are; more are closed."""


class Door:
    """A listening socket, which this object owns, and who has come to it.

    Args:
        listener: Where nodes connect.
        secret: What only launchers of this launch know.
        board: Where links are watched.
        come: Called with the link, no longer watched, and the card of each node that comes;
            raises a MeshrunError to refuse it.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        board: Switchboard,
        come: Callable[[Link, Join], None],
    ) -> None:
        self._listener, self._secret, self._board, self._come = listener, secret, board, come
        self._strangers: dict[int, Link] = {}
        self._counter = itertools.count()
        self._told: set[tuple[str, str]] = set()
        listener.setblocking(False)
        board.selector.register(listener, selectors.EVENT_READ, self._accept)

    def look(self) -> None:
        """Close connections that do not say what they are."""
        now_ns = time.monotonic_ns()
        for number, link in list(self._strangers.items()):
            if now_ns - link.began_ns > _PROOF_WITHIN_S * 1e9:
                self._drop(number, "it did not say what it is")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone already; or out of descriptors, and then it waits in the queue
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)), "others came after it")
        number = next(self._counter)
        link = self._strangers[number] = Link(connection, HeadHandshake(self._secret))
        self._board.add(link, partial(self._on_ready, number))

    def _on_ready(self, number: int) -> None:
        link = self._strangers.get(number)
        if link is None:
            return
        cards = [message for message in link.receive() if isinstance(message, Join)]
        if link.closed is not None:
            self._drop(number, link.closed)
        elif cards:
            self._let_in(number, link, cards[0])
        else:
            self._board.settle(link)

    def _let_in(self, number: int, link: Link, card: Join) -> None:
        self._board.drop(link)
        try:
            self._come(link, card)
            del self._strangers[number]
        except MeshrunError as error:
            self._board.add(link, partial(self._on_ready, number))
            link.send(Refused.of(error))
            self._board.settle(link)

    def _drop(self, number: int, why: str) -> None:
        link = self._strangers.pop(number)
        self._board.close(link, why)
        if link.was_refused and (link.their_address, why) not in self._told:
            self._told.add((link.their_address, why))
            self._board.note(f"{link.their_address} was not let in: {why}")

    def close(self) -> None:
        """Let nobody in any more."""
        for number in list(self._strangers):
            self._drop(number, "the launch is over")
        self._board.selector.unregister(self._listener)
        self._listener.close()
