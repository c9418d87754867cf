"""Connections to node 0 that have not yet proved that they know the secret."""

from __future__ import annotations

import itertools
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Network, ip_address

from meshrun.errors import MeshrunError
from meshrun.rendezvous.connection import BEAT_S, Connection
from meshrun.rendezvous.connections import Connections
from meshrun.rendezvous.handshake import CoordinatorHandshake
from meshrun.rendezvous.messages import Beat, Message, Refused

_PROOF_WITHIN_S = 10.0
_MOST = 512
"""Connections that have said nothing yet; for another one has to go, or it waits in the queue."""
_MOST_OF_ONE = 16
"""Of one origin, while others wait."""
_YOUNG_S = 0.5
"""How long one may always stay that is not of an origin with more."""
_TAKEN_AT_ONCE = 32
"""Before those who have said something are heard again."""
_MOST_TOLD = 20
_TRIES = 3
"""So often a launcher that means to join comes again although it is not let in."""


class Unauthenticated:
    """Those who have connected and said nothing yet.

    Args:
        listener: Where nodes connect; the caller closes it.
        most: How many may come at once, where that is more than otherwise.
        every_s: How often beats go to those who belong to the launch.
        on_join: Called with the link, no longer watched and perhaps closed, and the first that it
            says once it has proved what it is.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        hub: Connections,
        most: int = 0,
        every_s: float = BEAT_S,
        on_join: Callable[[Connection, list[Message]], None],
    ) -> None:
        self._listener, self._secret, self._hub = listener, secret, hub
        self._on_join = on_join
        self._every_s, self._most = every_s, max(_MOST, most)
        self._connections: dict[int, Connection] = {}
        """The oldest first."""
        self._by_origin: defaultdict[str, dict[int, Connection]] = defaultdict(dict)
        self._counter = itertools.count()
        self._told: set[tuple[str, str]] = set()
        """Rejected connections that were reported."""
        self._others: dict[str, tuple[int, int]] = {}
        """Addresses of launchers that do not know the secret: since when, and how often."""
        self._is_listening = False
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._hub.reactor.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._hub.reactor.remove(self._listener)

    def look(self) -> None:
        """Once a beat: close connections that do not say what they are."""
        for number, connection in list(self._connections.items()):
            if _age_s(connection) > _PROOF_WITHIN_S:
                self._drop(number, "it did not identify itself")
        self._listen()

    def _accept(self) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            if len(self._connections) >= self._most and not self._make_room():
                self._pause()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # out of descriptors: those that wait stay in the queue
                if not self._make_room():
                    self._tell("a connection", f"could not be accepted: {error.strerror}")
                    self._pause()
                    return
            else:
                handshake = CoordinatorHandshake(self._secret)
                self._watch(Connection(connection, handshake, beat_s=self._every_s))

    def _make_room(self) -> bool:
        """Send the oldest away: of the origin that has most, or else of all, but no young one."""
        crowd = max(self._by_origin.values(), key=len, default={})
        is_crowd = len(crowd) > _MOST_OF_ONE
        number, connection = next(
            iter((crowd if is_crowd else self._connections).items()), (0, None)
        )
        if connection is None or not (is_crowd or _age_s(connection) > _YOUNG_S):
            return False
        self._drop(number, "it did not identify itself, and others were waiting")
        return True

    def _watch(self, connection: Connection) -> None:
        number = next(self._counter)
        self._connections[number] = self._by_origin[_origin(connection)][number] = connection
        self._hub.add(connection, partial(self._on_ready, number))

    def _on_ready(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        said: list[Message] = [each for each in connection.receive() if not isinstance(each, Beat)]
        if said:
            self._hub.drop(self._take_out(number))
            self._on_join(connection, said)
        elif connection.closed is not None:
            self._drop(number, connection.closed)
        else:
            self._hub.update(connection)

    def _take_out(self, number: int) -> Connection:
        """There is room for another."""
        connection = self._connections.pop(number)
        origin = _origin(connection)
        del self._by_origin[origin][number]
        if not self._by_origin[origin]:
            del self._by_origin[origin]
        self._listen()
        return connection

    def foreign_launchers(self, for_s: float) -> list[str]:
        """Return where launchers are that have not known the secret for so long."""
        until_ns = time.monotonic_ns() - int(for_s * 1e9)
        return [
            address
            for address, (since_ns, count) in self._others.items()
            if since_ns <= until_ns and count >= _TRIES
        ]

    def reject(self, connection: Connection, error: MeshrunError) -> None:
        """Tell one who came why it cannot stay, and see it go."""
        connection.send(Refused.of(error))
        if connection.closed is None:
            self._watch(connection)

    def _drop(self, number: int, why: str) -> None:
        connection = self._take_out(number)
        self._hub.close(connection, why)
        if connection.is_other_launch:
            since_ns, count = self._others.get(
                origin := _origin(connection), (time.monotonic_ns(), 0)
            )
            self._others[origin] = since_ns, count + 1
        if connection.was_refused:
            self._tell(connection.their_address, f"was rejected: {why}")

    def _tell(self, who: str, what: str) -> None:
        if (who, what) in self._told or len(self._told) > _MOST_TOLD:
            return
        self._told.add((who, what))
        is_last = len(self._told) > _MOST_TOLD
        self._hub.note("not reporting further rejected connections" if is_last else f"{who} {what}")

    def close(self, why: str) -> None:
        """Stop listening, and close unauthenticated connections."""
        self._pause()
        for connection in self._connections.values():
            self._hub.close(connection, why)
        self._connections.clear()
        self._by_origin.clear()


def _age_s(connection: Connection) -> float:
    return (time.monotonic_ns() - connection.began_ns) / 1e9


def _origin(connection: Connection) -> str:
    """Return what all addresses have in common that one machine may have."""
    address = ip_address(connection.their_address.partition("%")[0] or "::")
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or IPv6Network((int(address) >> 64 << 64, 64)))
