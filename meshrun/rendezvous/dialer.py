"""Attempts to connect to the coordinator, at one address after the other. Never blocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from meshrun.host.interfaces import (
    interface_of,
    is_loopback,
    outward_address,
    own_addresses,
    sockaddr_of,
)
from meshrun.host.lookup import Lookup
from meshrun.host.reactor import Reactor
from meshrun.rendezvous.endpoint import classify_endpoint

_CONNECT_S = 5.0


class Dialer:
    """One attempt at a time, whose end is a connected socket or a reason.

    Args:
        host: The coordinator's name, which is looked up once no address is left to try.
        addresses: Its addresses, if known.
        connected: Called with the socket.
        failed: Called with the reason if an address cannot be reached.
        unresolved: Called with the reason if the name has no address.
    """

    def __init__(
        self,
        host: str,
        addresses: Sequence[str],
        reactor: Reactor,
        *,
        connected: Callable[[socket.socket], None],
        failed: Callable[[str], None],
        unresolved: Callable[[str], None],
    ) -> None:
        self._host, self._addresses, self._reactor = host, list(addresses), reactor
        self._connected, self._failed, self._unresolved = connected, failed, unresolved
        self._port = 0
        self._lookup: Lookup | None = None
        self._socket: socket.socket | None = None
        """The socket that is being connected."""
        self._limit = reactor.call_at(None, self._give_up, skips=False)
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
        endpoint = classify_endpoint(
            self._host.strip("[]"),
            addresses,
            own_addresses=own_addresses(),
            own_name=socket.gethostname(),
        )
        # Node 0 listens there if its own name does not resolve to an address that others reach.
        here = outward_address() if endpoint.is_ours and not endpoint.facing else None
        self._addresses = list(dict.fromkeys([*filter(None, [here]), *addresses]))
        outward = (each for each in self._addresses if not is_loopback(each))
        self.own = next((each for each in outward if interface_of(each) is not None), "")
        if self._addresses:
            self._connect()
        else:
            self._unresolved(why)

    def _connect(self) -> None:
        self.address = self._addresses.pop(0)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._limit.restart(_CONNECT_S)
        try:
            self._socket.connect(sockaddr_of(self.address, self._port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._reactor.add_writer(self._socket, self._finish)

    def _finish(self) -> None:
        connected = self._socket
        if connected is None:
            return
        if code := connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(os.strerror(code))
            return
        self._socket = None
        self._limit.cancel()
        self._reactor.remove(connected)
        self._connected(connected)

    def _give_up(self) -> None:
        self._fail("no answer")

    def _fail(self, why: str) -> None:
        self._drop()
        self._failed(why)

    def _drop(self) -> None:
        self._limit.cancel()
        self._reactor.drop(self._socket)
        self._socket = None

    def close(self) -> None:
        """End the attempt, if one is under way."""
        self._drop()
        if self._lookup is not None:
            self._lookup.close()
