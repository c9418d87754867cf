"""Tests whether nodes reach each other on arbitrary ports, as ranks need to.

Until shortly after all have joined, each launcher has a port open. Then it connects to that of the
next node, without sending data. If a firewall is in between, a note says so; otherwise, ranks would
wait for each other in silence.
"""

from __future__ import annotations

import contextlib
import socket
from functools import partial

from meshrun.errors import MeshrunError
from meshrun.host.host_names import is_address
from meshrun.host.network import Connecting, listen_on
from meshrun.rendezvous.hub import Hub

_TRY_S = 10.0
_OPEN_S = 30.0


class Reachability:
    """An open port of this node's, and a test of another node's."""

    def __init__(self, address: str, hub: Hub) -> None:
        self._hub = hub
        self._attempt: Connecting | None = None
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
        """Test whether the open port of another node, if any, is reached; soon close this one's."""
        self._hub.reactor.call_later(_OPEN_S, self._stop_listening)
        if not (port and is_address(address)):
            return
        other = f"{host} ({address}) on port {port}"
        self._attempt = Connecting(
            address, port, self._hub.reactor, most_s=_TRY_S, ended=partial(self._report, other)
        )

    def _accept(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):  # gone already
                self._listener.accept()[0].close()

    def _report(self, other: str, connected: socket.socket | None, why: str) -> None:
        if connected is not None:
            connected.close()
            return
        why = why or f"no answer within {_TRY_S:g} s"
        self._hub.note(
            f"this node cannot reach {other}, where a launcher listens: {why}; check for a firewall"
            " between the nodes: gloo and NCCL connect ranks through arbitrary ports"
        )

    def _stop_listening(self) -> None:
        self._hub.reactor.drop(self._listener)
        self._listener = None

    def close(self) -> None:
        """Close both sockets."""
        if self._attempt is not None:
            self._attempt.close()
        self._stop_listening()
