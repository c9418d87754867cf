"""A server of GET and HEAD requests in a reactor; each response closes its connection."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct

from meshrun.host.descriptors import WriteBuffer
from meshrun.host.reactor import Reactor, Timer

_MOST_BYTES = 16 * 1024
_MOST_CLIENTS = 64
_ACCEPTED_AT_ONCE = 32
"""How many clients are accepted before others are served, so that many in the queue delay none."""
_PAUSE_S = 1.0
"""How long to stop accepting clients when there are no descriptors left."""
_TIMEOUT_NS = 5_000_000_000
"""How long a client may take to send its request and read the response."""


class Response(Struct, frozen=True):
    """The response to a client."""

    body: str
    status: str = "200 OK"
    content_type: str = "text/plain; charset=utf-8"


class _Client(Struct):
    connection: socket.socket
    timer: Timer
    """Closes the connection."""
    received: bytes = b""


class HttpServer:
    """A server on a listening socket.

    Args:
        respond: Called with the path and the headers, whose names are in lower case.
    """

    def __init__(
        self,
        listener: socket.socket,
        reactor: Reactor,
        respond: Callable[[str, Mapping[str, str]], Response],
    ) -> None:
        self._listener, self._reactor, self._respond = listener, reactor, respond
        self._clients: dict[socket.socket, _Client] = {}
        """Ordered by the time of their connection."""
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._reactor.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_oldest():
                    self._reactor.remove(self._listener)  # the clients wait in the queue
                    self._reactor.call_later(_PAUSE_S, self._listen)
                return
            self._add(connection)

    def _add(self, connection: socket.socket) -> None:
        if len(self._clients) >= _MOST_CLIENTS:
            self._drop_oldest()
        connection.setblocking(False)
        until_ns = self._reactor.now_ns() + _TIMEOUT_NS
        timer = self._reactor.call_at(until_ns, partial(self._drop, connection), skips=False)
        client = self._clients[connection] = _Client(connection, timer)
        self._reactor.add_reader(connection, partial(self._read, client))

    def _drop_oldest(self) -> bool:
        """Drop the oldest client to serve others; return whether there was one."""
        oldest = next(iter(self._clients), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        head, end, _ = client.received.partition(b"\r\n\r\n")
        if end:
            self._reactor.remove(client.connection)  # it may have shut down its sending side
            drop = partial(self._drop, client.connection)
            buffer = WriteBuffer(client.connection.fileno(), self._reactor, drop)
            buffer.write(self._handle(head.decode("latin-1")))
        elif not data or len(client.received) > _MOST_BYTES:
            self._drop(client.connection)

    def _handle(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return _render(Response("only GET and HEAD\n", "405 Method Not Allowed"))
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        response = self._respond(words[1].partition("?")[0], headers)
        return _render(response, is_head=words[0] == "HEAD")

    def _drop(self, connection: socket.socket) -> None:
        self._clients.pop(connection).timer.cancel()
        self._reactor.drop(connection)


def _render(response: Response, *, is_head: bool = False) -> bytes:
    body = response.body.encode()
    head = (
        f"HTTP/1.1 {response.status}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else body)
