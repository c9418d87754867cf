"""Connections to node 0 that have not yet proved that they know the secret."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Network, ip_address

from meshrun.errors import MeshrunError
from meshrun.host.network import address_of
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.handshake import CoordinatorHandshake, WrongSecretError
from meshrun.rendezvous.messages import Disconnect, Message, Rejected
from meshrun.rendezvous.this_node import ThisNode

_PROOF_WITHIN_S = 10.0
_NO_JOIN = (
    f"its first long message did not arrive within {_PROOF_WITHIN_S:g} s; check that the network"
    " carries large packets (the MTU)"
)
_MOST = 512
"""How many unauthenticated connections may be open; another one replaces one of them or waits in
the kernel's queue."""
_MOST_OF_ONE = 16
"""How many of them may come from one origin while others wait."""
_YOUNG_S = 0.5
"""How long a connection is safe unless its origin has too many."""
_ACCEPTED_AT_ONCE = 32
"""How many connections are accepted before others are served again."""
_MOST_REPORTED = 20
_TRIES = 3
"""After this many rejections, a launcher is assumed to try to join."""


class Unauthenticated:
    """The connections that have not authenticated yet.

    Args:
        listener: The socket to which nodes connect; the caller closes it.
        on_join: Called with an authenticated connection, no longer watched and perhaps closed, and
            with its first messages.
    """

    def __init__(
        self,
        listener: socket.socket,
        node: ThisNode,
        on_join: Callable[[Connection, list[Message]], None],
    ) -> None:
        self._listener, self._node, self._hub = listener, node, node.hub
        self._on_join = on_join
        self._most = max(_MOST, node.config.nnodes)
        self._connections: dict[Connection, None] = {}
        """The oldest first."""
        self._by_origin: defaultdict[str, dict[Connection, None]] = defaultdict(dict)
        self._reported: set[tuple[str, str]] = set()
        """Rejected connections that were reported."""
        self._others: dict[str, tuple[int, int]] = {}
        """Origins of launchers without the secret: since when, and how many connections."""
        self.unheard: dict[str, str] = {}
        """What was reported of launchers whose first message never arrived, by their origins."""
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self._hub.reactor.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        self._hub.reactor.remove(self._listener)

    def check(self) -> None:
        """Close connections that do not authenticate in time; called every second."""
        for connection in list(self._connections):
            if connection.age_s > _PROOF_WITHIN_S:
                if connection.is_open and not connection.received:
                    who, what = connection.their_address, f"has connected, but {_NO_JOIN}"
                    self._report(who, what)
                    self.unheard[_origin(connection)] = f"{who} {what}"
                    connection.send(Disconnect(why=_NO_JOIN))
                self._drop(connection, "it did not identify itself")
        self._listen()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if len(self._connections) >= self._most and not self._make_room():
                self._pause()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # out of descriptors; the connection stays in the queue
                if not self._make_room():
                    self._report("a connection", f"could not be accepted: {error.strerror}")
                    self._pause()
                    return
            else:
                self._begin(connection)

    def _begin(self, accepted: socket.socket) -> None:
        node = self._node
        handshake = CoordinatorHandshake(node.secret, _own_address(accepted))
        connection = Connection(accepted, handshake, self._hub, beat_s=node.beat_s)
        if connection.their_address:
            self._watch(connection)
        else:
            connection.close("it was reset before it was accepted")

    def _make_room(self) -> bool:
        """Close the oldest connection, of an origin with too many if there is one, or of all.

        Without such an origin, a young connection is not closed. Return whether one was.
        """
        crowd = max(self._by_origin.values(), key=len, default={})
        is_crowd = len(crowd) > _MOST_OF_ONE
        oldest = next(iter(crowd if is_crowd else self._connections), None)
        if oldest is None or not (is_crowd or oldest.age_s > _YOUNG_S):
            return False
        self._drop(oldest, "it did not identify itself, and others were waiting")
        return True

    def _watch(self, connection: Connection) -> None:
        self._connections[connection] = self._by_origin[_origin(connection)][connection] = None
        connection.watch(partial(self._on_ready, connection))

    def _on_ready(self, connection: Connection) -> None:
        if messages := connection.receive():
            self._remove(connection)
            self.unheard.pop(_origin(connection), None)
            self._on_join(connection, messages)
        elif connection.closed is not None:
            self._drop(connection, connection.closed)

    def _remove(self, connection: Connection) -> None:
        origin = _origin(connection)
        del self._connections[connection], self._by_origin[origin][connection]
        if not self._by_origin[origin]:
            del self._by_origin[origin]
        self._listen()

    def foreign_launchers(self, for_s: float) -> list[str]:
        """Return the addresses of launchers that have tried without the secret for ``for_s``."""
        until_ns = self._hub.now_ns() - int(for_s * 1e9)
        return [
            address
            for address, (since_ns, count) in self._others.items()
            if since_ns <= until_ns and count >= _TRIES
        ]

    def reject(self, connection: Connection, error: MeshrunError) -> None:
        """Send an authenticated node the reason why it cannot join, and wait until it closes."""
        connection.send(Rejected.of(error))
        if connection.closed is None:
            self._watch(connection)

    def _drop(self, connection: Connection, why: str) -> None:
        self._remove(connection)
        connection.close(why)
        if isinstance(connection.handshake_error, WrongSecretError):
            since_ns, count = self._others.get(
                origin := _origin(connection), (self._hub.now_ns(), 0)
            )
            self._others[origin] = since_ns, count + 1
        if connection.handshake_error is not None:
            self._report(connection.their_address, f"was rejected: {why}")

    def _report(self, who: str, what: str) -> None:
        if (who, what) in self._reported or len(self._reported) > _MOST_REPORTED:
            return
        self._reported.add((who, what))
        is_last = len(self._reported) > _MOST_REPORTED
        self._hub.note("not reporting further rejected connections" if is_last else f"{who} {what}")

    def close(self, why: str, error: MeshrunError | None = None) -> None:
        """Stop listening, and close these connections, with the error if there is one."""
        self._pause()
        for connection in self._connections:
            if error is not None and connection.is_open:
                connection.send(Rejected.of(error))
            connection.close(why)
        self._connections.clear()
        self._by_origin.clear()


def _own_address(connection: socket.socket) -> str:
    return address_of(connection.getsockname()).removeprefix("::ffff:")


def _origin(connection: Connection) -> str:
    """Return the IPv4 address or IPv6 /64 network that a connection comes from."""
    address = ip_address(connection.their_address.partition("%")[0])
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or IPv6Network((int(address) >> 64 << 64, 64)))
