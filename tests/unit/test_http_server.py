"""The server for metrics and probes, with clients that are slow, many, or half-closed."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from meshrun.host.reactor import Reactor
from meshrun.report.metrics import HttpServer, Response

ASK = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
SLOW = 100
"""More clients than the server keeps at once."""


@pytest.fixture
def server() -> Iterator[tuple[Reactor, tuple[str, int]]]:
    """A server whose answers name the path."""
    with Reactor() as reactor, socket.create_server(("127.0.0.1", 0)) as listener:
        HttpServer(listener, reactor, lambda path, _: Response(f"this is {path}\n"))
        yield reactor, listener.getsockname()
        while len(reactor.watched) > 1:  # until the server has noticed that all clients closed
            reactor.turn()


def ask(server: tuple[Reactor, tuple[str, int]], text: bytes, *, ends: bool = False) -> bytes:
    """Return what a client receives; with ``ends``, it closes its half before it reads."""
    reactor, address = server
    with socket.create_connection(address) as client:
        client.sendall(text)
        if ends:
            client.shutdown(socket.SHUT_WR)
        client.setblocking(False)
        got = b""
        while True:
            reactor.turn(most_s=0.05)
            try:
                data = client.recv(65536)
            except BlockingIOError:
                continue
            if not data:
                return got
            got += data


def test_requests_are_answered(server: tuple[Reactor, tuple[str, int]]) -> None:
    """Also if the client has closed its half; HEAD gets no body, and PUT is not allowed."""
    answer = ask(server, ASK)
    assert answer.endswith(b"\r\n\r\nthis is /healthz\n")
    assert ask(server, ASK, ends=True) == answer
    assert ask(server, ASK.replace(b"GET", b"HEAD")) == answer.removesuffix(b"this is /healthz\n")
    assert ask(server, ASK.replace(b"GET", b"PUT")).startswith(b"HTTP/1.1 405 ")


def test_silent_clients_do_not_block_others(server: tuple[Reactor, tuple[str, int]]) -> None:
    """The server closes the oldest connections, and accepts many in each turn."""
    slow = [socket.create_connection(server[1]) for _ in range(SLOW)]
    try:
        server[0].turn(most_s=0)
        assert len(server[0].watched) > SLOW // 4
        assert ask(server, ASK).endswith(b"this is /healthz\n")
        slow[0].settimeout(30)
        assert slow[0].recv(1) == b""
    finally:
        for client in slow:
            client.close()
