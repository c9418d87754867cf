"""Attempts to reach the coordinator, until it has proved itself. Never blocks."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence

from meshrun.errors import MeshrunError, RendezvousError
from meshrun.host.network import Connecting, Lookup, interface_of, is_loopback, outward_address
from meshrun.host.printable import one_line
from meshrun.host.reactor import Reactor
from meshrun.plan.rendezvous_config import fallback_port, format_endpoint
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.endpoint import endpoint_here
from meshrun.rendezvous.handshake import ParticipantHandshake, TranslatedAddressError
from meshrun.rendezvous.hub import RETRY_S
from meshrun.rendezvous.messages import Message
from meshrun.rendezvous.node_phases import EndpointPhase
from meshrun.rendezvous.this_node import ThisNode

_CONNECT_S = 5.0
_FIRST_GREETING_S = 3.0
_GREETING_S = 10.0
"""How long node 0 may take to send its greeting, the second one after an attempt without it, and
how long for each answer after that."""
_REFUSED_LONG_S = 10.0
"""After this long, node 0 was not merely started a little later."""
_SILENT = "it accepts connections but does not answer"
_FOREIGN_S = 5.0
"""How long another launch may answer at the endpoint: an earlier one may still be ending."""
_OTHER_PORT = {
    EndpointPhase.FOREIGN: EndpointPhase.FALLBACK,
    EndpointPhase.FALLBACK: EndpointPhase.FOREIGN,
}
"""While something else answers, the attempts alternate between two ports."""


class Dialer:
    """One attempt at a time, whose end is a connected socket or a reason.

    Args:
        host: The coordinator's name, which is looked up once no address is left to try.
        addresses: Its addresses, if known.
        ended: Called with the socket, or with ``None`` and why :attr:`address` cannot be reached,
            or why the name has no address; then, that is "".
    """

    def __init__(
        self,
        host: str,
        addresses: Sequence[str],
        reactor: Reactor,
        ended: Callable[[socket.socket | None, str], None],
    ) -> None:
        self._host, self._addresses, self._reactor = host, list(addresses), reactor
        self._ended, self._port = ended, 0
        self._lookup: Lookup | None = None
        self._attempt: Connecting | None = None
        self.address = ""
        """The address of the current or last attempt."""
        self.own = ""
        """The coordinator's address, if this machine itself has it, and it is not a loopback."""

    def dial(self, port: int) -> None:
        """Begin an attempt: try the next address, or look the name up first."""
        self._port = port
        if self._addresses:
            self._connect()
        else:
            self._lookup = Lookup(self._host, self._reactor, self._looked_up)

    def prefer(self, address: str) -> None:
        """Try an address next, and after it the last one again."""
        self._addresses[:0] = [address, self.address]

    def _looked_up(self, addresses: list[str], why: str) -> None:
        # Node 0 listens there if its own name does not resolve to an address that others reach.
        here = outward_address() if endpoint_here(self._host, addresses).is_hidden else None
        self._addresses = list(dict.fromkeys([*filter(None, [here]), *addresses]))
        outward = (each for each in self._addresses if not is_loopback(each))
        self.own = next((each for each in outward if interface_of(each) is not None), "")
        if self._addresses:
            self._connect()
        else:
            self.address = ""
            self._ended(None, why)

    def _connect(self) -> None:
        self.address = self._addresses.pop(0)
        self._attempt = Connecting(
            self.address, self._port, self._reactor, most_s=_CONNECT_S, ended=self._ended
        )

    def close(self) -> None:
        """End the attempt, if one is under way."""
        for step in (self._lookup, self._attempt):
            if step is not None:
                step.close()


class Attempts:
    """One attempt after the other, within a time limit, to connect and to do the handshake.

    Args:
        addresses: Those of the coordinator, if known; otherwise its name is looked up before each
            attempt, as it may take a while to appear.
        connected: Called with a connection after the handshake, and the messages that have arrived.
        failed: Called with the reason why there are no more attempts.
    """

    def __init__(
        self,
        node: ThisNode,
        addresses: Sequence[str],
        *,
        connected: Callable[[Connection, list[Message]], None],
        failed: Callable[[MeshrunError], None],
    ) -> None:
        self._config, self._secret = node.config, node.secret
        self._hub, self._beat_s = node.hub, node.beat_s
        self._connected, self._failed = connected, failed
        reactor = node.hub.reactor
        self._dialer = Dialer(self._config.host or "", addresses, reactor, self._dialed)
        self._connection: Connection | None = None
        """The connection of this attempt, until the handshake is done."""
        self._handshake = ParticipantHandshake(node.secret)
        self._is_redirected = False
        """Whether what answers has said that another address is its own, which is tried first."""
        self._why = "no answer yet"
        """Why the last attempt failed."""
        self._noted = ""
        """Why the last connection was closed, as the last note said."""
        self._lost: MeshrunError | None = None
        """How a coordinator was lost that cannot be reached again if nothing listens there."""
        self._found = EndpointPhase.UNKNOWN
        self._deadline = self._since = self._hub.deadline(node.config.timeout_s)
        """How long all attempts may take, and how long it may be what was found."""
        self._next = reactor.call_at(reactor.now_ns(), self._try, skips=False)
        self._end_of_wait = reactor.call_at(None, self._drop_without_answer, skips=False)

    def begin_again(self, lost: MeshrunError, why: str) -> None:
        """Return to a coordinator that was lost."""
        self._lost, self._why = lost, why
        self._deadline = self._hub.deadline(self._config.return_s)
        self._next.restart(0)

    def retry(self, why: str) -> None:
        """Try again, as the coordinator has closed the connection before this node took part."""
        # It has been there: wait less than for a late one.
        known_s = min(self._deadline.timeout_s, self._config.node_timeout_s)
        self._deadline = self._hub.deadline(known_s)
        self._end_attempt(why)

    def check(self) -> None:
        """Note how long the attempts take, and time out at the end; called every second."""
        if self._deadline.is_over:
            self._time_out(f" within {self._deadline.timeout_s:.0f} s")
        elif self._deadline.note_is_due():
            is_long = self._found is EndpointPhase.NOTHING and self._since.is_over
            doubt = "; its launcher has not started yet or has exited" if is_long else ""
            place = self._config.endpoint
            self._hub.note(f"waiting for node 0 at {place}: {self._why}{doubt} ({self._deadline})")

    def _time_out(self, when: str) -> None:
        text = f"cannot join node 0 at {self._config.endpoint}{when}: {self._why}"
        self._failed(RendezvousError(text, hint=self._hint()))

    def _hint(self) -> str:
        """Return what may be wrong."""
        if self._found in _OTHER_PORT or _SILENT in self._why:
            return self._hint_of_foreign()
        if self._dialer.own and self._config.is_first is None:
            return (
                f"{self._dialer.own} is an address of this machine: start meshrun here again, as"
                " the machine did not have the address yet or something else was using the port"
            )
        if self._dialer.own:
            return (
                f"{self._dialer.own} is an address of this machine, which is not node 0: set"
                " --rdzv-endpoint to an address of the node with --node-rank 0"
            )
        if self._found is EndpointPhase.NOTHING:
            return (
                "check that node 0's launcher is running, that the address it prints is this one,"
                " and that the name resolves to the same machine on every node"
            )
        return (
            "check that meshrun was started there, that this node can reach the port, and that the"
            " name resolves to the same machine on every node"
        )

    def _hint_of_foreign(self) -> str:
        """Return what may be wrong if something else than node 0 seems to answer."""
        if _SILENT in self._why:
            return (
                "node 0's launcher may be stopped or slow (a longer --node-timeout gives it more"
                " time), or another program is using the port"
            )
        run_id = self._config.run_id
        own_id = f" (here {one_line(run_id, 80)})" if run_id else ""
        return (
            "another program or launch may be using the port; check that --rdzv-id"
            f"{own_id} and MESHRUN_SECRET are the same on every node"
        )

    # ---- one attempt -----------------------------------------------------------------------

    def _try(self) -> None:
        if self._found in _OTHER_PORT and self._since.is_over:
            self._time_out("")
            return
        self._found = _OTHER_PORT.get(self._found, self._found)
        self._dialer.dial(self._port)

    @property
    def _port(self) -> int:
        uses_fallback = self._found is EndpointPhase.FALLBACK
        return fallback_port(self._secret) if uses_fallback else self._config.port or 0

    def _dialed(self, connected: socket.socket | None, why: str) -> None:
        if connected is not None:
            self._begin_handshake(connected)
        elif self._dialer.address:
            self._not_connected(why or "no answer")
        else:
            self._try_later(f"the name `{self._config.host}` does not resolve: {why}")

    def _begin_handshake(self, connected: socket.socket) -> None:
        self._end_of_wait.restart(_GREETING_S if self._found in _OTHER_PORT else _FIRST_GREETING_S)
        # It has proved nothing yet, so its word is followed once, not from address to address.
        address = "" if self._is_redirected else self._dialer.address
        self._handshake = ParticipantHandshake(self._secret, address)
        self._connection = Connection(connected, self._handshake, self._hub, beat_s=self._beat_s)
        self._connection.watch(self._on_ready)

    def _on_ready(self) -> None:
        connection = self._connection
        if connection is None:
            return
        messages = connection.receive()
        if connection.is_open:
            self._end_of_wait.cancel()
            self._connection, self._is_redirected = None, False
            self._found = EndpointPhase.UNKNOWN
            self._connected(connection, messages)
        elif isinstance(connection.handshake_error, TranslatedAddressError):
            self._connect_directly(connection.handshake_error.address)
        elif connection.closed is not None:
            self._end_attempt(connection.closed, _FOREIGN_S if connection.handshake_error else None)
        else:  # it has begun to answer
            self._end_of_wait.restart(_GREETING_S)

    def _connect_directly(self, own: str) -> None:
        """Connect to the coordinator's own address, or else through the translated one again."""
        self._connection, self._is_redirected = None, True
        self._dialer.prefer(own)
        self._end_of_wait.cancel()
        self._next.restart(0)

    def _drop_without_answer(self) -> None:
        """End a connection whose other end does not answer like a launcher."""
        is_silent = not self._handshake.is_answered
        why = _SILENT if is_silent else f"its answer took more than {_GREETING_S:g} s"
        if self._connection is not None:
            self._connection.close(why)
        # A coordinator that was there before may only be suspended.
        is_foreign = is_silent and self._lost is None
        self._end_attempt(why, self._config.node_timeout_s if is_foreign else None)

    def _end_attempt(self, why: str, foreign_s: float | None = None) -> None:
        """Try again after a connection; for ``foreign_s``, something else may answer there."""
        self._connection = None
        self._not_connected(why, foreign_s)
        if why != self._noted and self._found is not EndpointPhase.FALLBACK:
            self._noted = why
            self._hub.note(f"node 0 at {self._config.endpoint}: {why}; retrying")

    def _not_connected(self, why: str, foreign_s: float | None = None) -> None:
        is_refused = why == os.strerror(errno.ECONNREFUSED)
        if is_refused and self._lost is not None:
            self._failed(self._lost)
            return
        if self._found is EndpointPhase.FALLBACK:  # usually, nothing listens there
            self._try_later(self._why)
            return
        answered = EndpointPhase.UNKNOWN if foreign_s is None else EndpointPhase.FOREIGN
        found = EndpointPhase.NOTHING if is_refused else answered
        most_s = _REFUSED_LONG_S if foreign_s is None else foreign_s
        if found is not self._found or most_s != self._since.timeout_s:
            self._found, self._since = found, self._hub.deadline(most_s)
        if is_refused and self._since.waited_s >= 1:
            why += f" for {self._since.waited_s:.0f} s"
        place = format_endpoint(self._dialer.address, self._port)
        if self._dialer.own == self._dialer.address:
            why += ", and the address belongs to this machine"
        self._try_later(why if place == self._config.endpoint else f"{place}: {why}")

    def _try_later(self, why: str) -> None:
        self._why = why
        self._end_of_wait.cancel()
        self._next.restart(RETRY_S)

    def close(self) -> None:
        """Make no more attempts."""
        self._next.cancel()
        self._end_of_wait.cancel()
        self._dialer.close()
        if self._connection is not None:
            self._connection.close("this node has given up")
