"""The server for metrics and probes, and clients that are slow, many or say no more."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from meshrun.host.http_server import HttpServer, Response
from meshrun.host.reactor import Reactor

ASK = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
SLOW = 100
"""More clients than are served at once."""


@pytest.fixture
def server() -> Iterator[tuple[Reactor, tuple[str, int]]]:
    """Serve texts that name the path."""
    with Reactor() as reactor, socket.create_server(("127.0.0.1", 0)) as listener:
        HttpServer(listener, reactor, lambda path, _: Response(f"this is {path}\n"))
        yield reactor, listener.getsockname()
        while len(reactor.watched) > 1:  # until all clients are known to have gone
            reactor.turn()


def ask(server: tuple[Reactor, tuple[str, int]], text: bytes, *, ends: bool = False) -> bytes:
    """Return what a client gets; one that ``ends`` closes its half before it reads."""
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


def test_who_asks_is_answered(server: tuple[Reactor, tuple[str, int]]) -> None:
    """Whether or not it may ask more, and without the text if it asks for the head alone."""
    answer = ask(server, ASK)
    assert answer.endswith(b"\r\n\r\nthis is /healthz\n")
    assert ask(server, ASK, ends=True) == answer
    assert ask(server, ASK.replace(b"GET", b"HEAD")) == answer.removesuffix(b"this is /healthz\n")
    assert ask(server, ASK.replace(b"GET", b"PUT")).startswith(b"HTTP/1.1 405 ")


def test_silent_clients_keep_no_other_out(server: tuple[Reactor, tuple[str, int]]) -> None:
    """The oldest of them is sent away."""
    slow = [socket.create_connection(server[1]) for _ in range(SLOW)]
    try:
        assert ask(server, ASK).endswith(b"this is /healthz\n")
        slow[0].settimeout(30)
        assert slow[0].recv(1) == b""
    finally:
        for client in slow:
            client.close()
