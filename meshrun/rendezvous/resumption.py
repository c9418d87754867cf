"""A participant's attempts to resume its connection to the coordinator after a reset."""

from __future__ import annotations

import socket
from collections.abc import Callable

from meshrun.host.network import Connecting, address_of, interface_of
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.handshake import ParticipantHandshake
from meshrun.rendezvous.hub import RETRY_S
from meshrun.rendezvous.messages import Message, Rejected, Resume, Resumed
from meshrun.rendezvous.this_node import ThisNode

_ATTEMPT_S = 2.0


class Resumption:
    """Connects to the coordinator again, until it resumes the connection or rejects this node.

    Args:
        connection: The interrupted connection; it is closed if the coordinator rejects this node,
            or if this machine has another address now.
        ended: Called then with it, and with the messages that have arrived since.
    """

    def __init__(
        self,
        connection: Connection,
        node: ThisNode,
        ended: Callable[[Connection, list[Message]], None],
    ) -> None:
        self._connection, self._node, self._ended = connection, node, ended
        self._attempt: Connecting | None = None
        self._other: Connection | None = None
        reactor = node.hub.reactor
        self._next_try = reactor.call_at(reactor.now_ns(), self._try, skips=False)

    def _try(self) -> None:
        self._stop()
        self._next_try.restart(_ATTEMPT_S + RETRY_S)
        self._attempt = Connecting(
            self._connection.their_address,
            self._node.config.port or 0,
            self._node.hub.reactor,
            most_s=_ATTEMPT_S,
            ended=self._connected,
        )

    def _connected(self, connected: socket.socket | None, _why: str) -> None:
        self._attempt = None
        if connected is None:
            self._next_try.restart(RETRY_S)
            return
        own, before = address_of(connected.getsockname()), self._connection.own_address
        if own != before and interface_of(before) is None:
            connected.close()
            self._connection.is_silent = True
            self._connection.close(
                f"this node's address changed from {before} to {own}, which ends the connections of"
                " its ranks"
            )
            self._end([])
            return
        handshake = ParticipantHandshake(self._node.secret)
        self._other = other = Connection(
            connected, handshake, self._node.hub, beat_s=self._node.beat_s
        )
        other.clock = self._connection.clock
        other.send(Resume(launcher=self._node.info.launcher, received=self._connection.received))
        other.watch(self._on_ready)

    def _on_ready(self) -> None:
        assert self._other is not None  # noqa: S101 - it is watched
        match self._other.receive():
            case _ if self._other.closed is not None:
                self._next_try.restart(RETRY_S)
            case [Resumed() as answer, *messages]:
                self._connection.resume(self._other, answer.received)
                self._other = None
                self._end(messages)
            case [Rejected() as answer]:
                self._connection.close(f"it dropped this node: {answer.as_error().message}")
                self._end([])

    def _end(self, messages: list[Message]) -> None:
        self.close()
        self._ended(self._connection, messages)

    def _stop(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
        if self._other is not None:
            self._other.close("it did not answer")
        self._attempt = self._other = None

    def close(self) -> None:
        """Stop reconnecting."""
        self._next_try.cancel()
        self._stop()
