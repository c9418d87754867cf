"""Tests whether nodes reach each other on arbitrary ports, which ranks need.

Each launcher opens one port for a moment and tries that of the next node. Nothing is said over it;
where a firewall is between, it is told, rather than that ranks wait for each other in silence.
"""

from __future__ import annotations

import os
import socket

from meshrun.errors import MeshrunError
from meshrun.host.interfaces import is_address, sockaddr_of
from meshrun.host.sockets import listen_on
from meshrun.rendezvous.connections import Connections

_TRY_S = 10.0
_OPEN_S = 30.0


class Reachability:
    """A port of this node's that another one tries, and a try of another's."""

    def __init__(self, address: str, hub: Connections) -> None:
        self._hub = hub
        self._trying: socket.socket | None = None
        self._other = ""
        self._listener: socket.socket | None = None
        try:
            self._listener = listen_on(address, 0)
        except MeshrunError:  # nobody tries it then
            return
        hub.reactor.add_reader(self._listener, self._answer)
        hub.reactor.call_later(_OPEN_S, self._shut)

    @property
    def port(self) -> int:
        """The port that is open here; 0 for none."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def probe(self, host: str, address: str, port: int) -> None:
        """Find out whether a port that is open on another node can be reached.

        Args:
            host: What people call it.
            address: Where it is.
            port: Which one is open there; 0 for none.
        """
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
            self._tell(error.strerror or str(error))
            return
        self._hub.reactor.add_writer(self._trying, self._came_through)
        self._hub.reactor.call_later(_TRY_S, self._give_up)

    def _give_up(self) -> None:
        if self._trying is not None:
            self._tell(f"no answer within {_TRY_S:g} s")

    def _answer(self) -> None:
        if self._listener is not None:
            try:
                self._listener.accept()[0].close()
            except OSError:  # gone already
                pass

    def _came_through(self) -> None:
        if self._trying is None:
            return
        code = self._trying.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._tell(os.strerror(code))
        else:
            self._stop_trying()

    def _tell(self, why: str) -> None:
        self._stop_trying()
        self._hub.note(
            f"this node cannot reach {self._other}, where a launcher listens: {why}; check for"
            " a firewall between the nodes: gloo and NCCL connect ranks through arbitrary"
            " ports"
        )

    def _stop_trying(self) -> None:
        trying, self._trying = self._trying, None
        self._let_go(trying)

    def _shut(self) -> None:
        listener, self._listener = self._listener, None
        self._let_go(listener)

    def _let_go(self, each: socket.socket | None) -> None:
        if each is not None:
            self._hub.reactor.remove(each)
            each.close()

    def close(self) -> None:
        """Let go of everything."""
        self._stop_trying()
        self._shut()
