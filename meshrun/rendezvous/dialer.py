"""Attempts to connect to the coordinator, at one address after the other. Never blocks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from meshrun.host.interfaces import interface_of, is_loopback, outward_address
from meshrun.host.reactor import Reactor
from meshrun.host.sockets import Connecting, Lookup
from meshrun.rendezvous.endpoint import endpoint_here

_CONNECT_S = 5.0


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
