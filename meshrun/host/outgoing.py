"""Name lookups and connections that do not block."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial

from meshrun.host.forked_call import ForkedCall
from meshrun.host.interfaces import look_up, sockaddr_of
from meshrun.host.reactor import Reactor


class Lookup:
    """A lookup of a name in a process of its own, as a resolver may take many seconds.

    Args:
        answered: Called with the addresses and, if there are none, the reason.
    """

    def __init__(
        self, host: str, reactor: Reactor, answered: Callable[[list[str], str], object]
    ) -> None:
        self._reactor, self._answered = reactor, answered
        self._call = ForkedCall(partial(_look_up, host))
        self._call.follow(reactor, self._take)

    def _take(self, found: tuple[list[str], str] | None) -> None:
        self._answered(*(found or ([], "the lookup was stopped")))

    def close(self) -> None:
        """Stop the lookup if it is still running."""
        self._reactor.drop(self._call)


def _look_up(host: str) -> tuple[list[str], str]:
    try:
        return look_up(host), ""
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)


class Connecting:
    """An attempt to connect to an address.

    Args:
        most_s: How long to wait for it.
        ended: Called later with the connected socket, or with ``None`` and why; "" for no answer.
    """

    def __init__(
        self,
        address: str,
        port: int,
        reactor: Reactor,
        *,
        most_s: float,
        ended: Callable[[socket.socket | None, str], object],
    ) -> None:
        self._reactor, self._ended, why = reactor, ended, ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(sockaddr_of(address, port))
        except BlockingIOError:
            pass
        except OSError as error:
            why, most_s = error.strerror or str(error), 0.0
        if not why:
            reactor.add_writer(self._socket, self._finish)
        self._limit = reactor.call_at(None, partial(self._fail, why), skips=False)
        self._limit.restart(most_s)

    def _finish(self) -> None:
        assert self._socket is not None  # noqa: S101 - otherwise, no writer is registered
        if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(os.strerror(code))
            return
        connected, self._socket = self._socket, None
        self._reactor.remove(connected)
        self._limit.cancel()
        self._ended(connected, "")

    def _fail(self, why: str) -> None:
        self.close()
        self._ended(None, why)

    def close(self) -> None:
        """End the attempt, unless it has ended."""
        self._limit.cancel()
        self._reactor.drop(self._socket)
        self._socket = None
