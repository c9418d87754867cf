"""Tests whether nodes reach each other on arbitrary ports, as ranks need to.

Until shortly after all have joined, each launcher has a port open. Then it connects to that of the
next node, without sending data. If a firewall is in between, a note says so; otherwise, ranks would
wait for each other in silence.
"""

from __future__ import annotations

import contextlib
import os
import socket

from meshrun.errors import MeshrunError
from meshrun.host.host_names import is_address
from meshrun.host.interfaces import sockaddr_of
from meshrun.host.sockets import listen_on
from meshrun.rendezvous.hub import Hub

_TRY_S = 10.0
_OPEN_S = 30.0


class Reachability:
    """An open port of this node's, and a test of another node's."""

    def __init__(self, address: str, hub: Hub) -> None:
        self._hub = hub
        self._trying: socket.socket | None = None
        self._other = ""
        self._listener: socket.socket | None = None
        try:
            self._listener = listen_on(address, 0)
        except MeshrunError:  # the other node then skips its test
            return
        hub.reactor.add_reader(self._listener, self._accept)

    @property
    def port(self) -> int:
        """The port that is open here; 0 for none."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def probe(self, host: str, address: str, port: int) -> None:
        """Test whether an open port of another node can be reached; soon close this node's.

        Args:
            host: The node's host name.
            address: Its address.
            port: The open port; 0 for none.
        """
        self._hub.reactor.call_later(_OPEN_S, self._stop_listening)
        if not (port and is_address(address)):
            return
        self._other = f"{host} ({address}) on port {port}"
        self._trying = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._trying.setblocking(False)
        try:
            self._trying.connect(sockaddr_of(address, port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._report(error.strerror or str(error))
            return
        self._hub.reactor.add_writer(self._trying, self._connected)
        self._hub.reactor.call_later(_TRY_S, self._give_up)

    def _give_up(self) -> None:
        if self._trying is not None:
            self._report(f"no answer within {_TRY_S:g} s")

    def _accept(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):  # gone already
                self._listener.accept()[0].close()

    def _connected(self) -> None:
        if self._trying is None:
            return
        if code := self._trying.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._report(os.strerror(code))
        else:
            self._stop_trying()

    def _report(self, why: str) -> None:
        self._stop_trying()
        self._hub.note(
            f"this node cannot reach {self._other}, where a launcher listens: {why}; check for"
            " a firewall between the nodes: gloo and NCCL connect ranks through arbitrary"
            " ports"
        )

    def _stop_trying(self) -> None:
        self._hub.reactor.drop(self._trying)
        self._trying = None

    def _stop_listening(self) -> None:
        self._hub.reactor.drop(self._listener)
        self._listener = None

    def close(self) -> None:
        """Close both sockets."""
        self._stop_trying()
        self._stop_listening()
