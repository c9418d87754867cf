"""Where node 0 listens: whoever connects is a stranger until it has proved that it belongs here."""

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
from meshrun.nodes.messages import Beat, Message, Refused
from meshrun.nodes.switchboard import Switchboard

_PROOF_WITHIN_S = 10.0
_PROOF_IN_A_CROWD_S = 2.0
"""The same while others wait in the kernel's queue."""
_MOST = 256
"""Connections that have said nothing yet; more wait in the kernel's queue."""


class Strangers:
    """Those who have connected and said nothing yet.

    Args:
        listener: Where nodes connect; the caller closes it.
        secret: What only launchers of this launch know.
        board: Where links are watched.
        come: Called with the link, no longer watched and perhaps closed, and the first that it
            says once it has proved what it is.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        board: Switchboard,
        come: Callable[[Link, list[Message]], None],
    ) -> None:
        self._listener, self._secret, self._board, self._come = listener, secret, board, come
        self._links: dict[int, Link] = {}
        self._counter = itertools.count()
        self._told: set[tuple[str, str]] = set()
        """Strangers that people were told of."""
        self._is_listening = False
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._board.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _pause(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._board.selector.unregister(self._listener)

    def look(self) -> None:
        """Once a beat: close connections that do not say what they are."""
        limit_s = _PROOF_WITHIN_S if self._is_listening else _PROOF_IN_A_CROWD_S
        now_ns = time.monotonic_ns()
        for number, link in list(self._links.items()):
            if now_ns - link.began_ns > limit_s * 1e9:
                self._drop(number, "it did not say what it is")
        if len(self._links) < _MOST:
            self._listen()

    def _accept(self) -> None:
        while self._is_listening and len(self._links) < _MOST:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # out of descriptors: those that wait stay in the queue
                self._tell("a connection", f"could not be taken: {error.strerror}")
                break
            self._watch(Link(connection, HeadHandshake(self._secret)))
        self._pause()

    def _watch(self, link: Link) -> None:
        number = next(self._counter)
        self._links[number] = link
        self._board.add(link, partial(self._on_ready, number))

    def _on_ready(self, number: int) -> None:
        link = self._links.get(number)
        if link is None:
            return
        said: list[Message] = [each for each in link.receive() if not isinstance(each, Beat)]
        if said:
            self._board.drop(self._take_out(number))
            self._come(link, said)
        elif link.closed is not None:
            self._drop(number, link.closed)
        else:
            self._board.settle(link)

    def _take_out(self, number: int) -> Link:
        """There is room for another."""
        link = self._links.pop(number)
        self._listen()
        return link

    def turn_away(self, link: Link, error: MeshrunError) -> None:
        """Tell one who came why it cannot stay, and see it go."""
        link.send(Refused.of(error))
        if link.closed is None:
            self._watch(link)

    def _drop(self, number: int, why: str) -> None:
        link = self._take_out(number)
        self._board.close(link, why)
        if link.was_refused:
            self._tell(link.their_address, f"was not let in: {why}")

    def _tell(self, who: str, what: str) -> None:
        if (who, what) not in self._told:
            self._told.add((who, what))
            self._board.note(f"{who} {what}")

    def close(self, why: str) -> None:
        """Listen no more, and let go of those who are still strangers."""
        self._pause()
        for link in self._links.values():
            self._board.close(link, why)
        self._links.clear()
