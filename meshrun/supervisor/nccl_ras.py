"""Findings of NCCL's RAS service about its communicators.

Since NCCL 2.24, each process has a thread for this service. The first one on a node listens at
``NCCL_RAS_ADDR``, by default port 28028 of localhost.

Source:
    ``src/ras/client.cc`` of NCCL, and "RAS" in NVIDIA's user guide.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping

from meshrun.host.printable import one_line
from meshrun.host.reactor import Reactor

_PORT = 28028
_TAKES_S = 2.0
"""How long the answer may take on a busy machine, with a timeout of 1 s in the service."""
_DIALOG = ((b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL "), (b"TIMEOUT 1\n", b"OK"))
"""What is sent, and how the reply begins."""
_REQUEST = b"STATUS\n"
_HEADINGS = ("Errors", "Warnings")
_MOST_BYTES = 64 * 1024
_MOST_LINES = 40


def ras_address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where the service of this node listens; ``None`` if it is switched off."""
    if env.get("NCCL_RAS_ENABLE") == "0":
        return None
    host, _, port = env.get("NCCL_RAS_ADDR", "").rpartition(":")
    host = host.strip("[]")
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError:  # a name, which could take long to look up, of this machine
        host = "127.0.0.1"
    is_valid = port.isdecimal() and len(port) <= 5 and int(port) <= 0xFFFF
    return host, int(port) if is_valid else _PORT


def select_findings(status: str) -> list[str]:
    """Return the errors and warnings of an answer, without the tables before them.

    Any user of this machine can listen at that port, so control characters are escaped.
    """
    lines = [one_line(line.rstrip()) for line in status.splitlines()]
    first = next((at for at, line in enumerate(lines) if line in _HEADINGS), len(lines))
    findings = [line for line in lines[first:] if line and set(line) != {"="}]
    return findings[:_MOST_LINES]


class NcclRas:
    """Asks the service, one request at a time.

    Args:
        reactor: The loop's.
        done: Called once there is an answer, or after a failure.
    """

    def __init__(self, reactor: Reactor, done: Callable[[], None]) -> None:
        self._reactor, self._done = reactor, done
        self._socket: socket.socket | None = None
        self._deadline = reactor.call_at(None, self._finish, skips=False)
        self.findings: list[str] = []
        """The errors and warnings of the last answer."""

    @property
    def is_under_way(self) -> bool:
        """Whether a request is under way."""
        return self._socket is not None

    def ask(self, env: Mapping[str, str] = os.environ) -> None:
        """Ask the service of this node, unless a request is under way."""
        if self._socket is not None or (address := ras_address(env)) is None:
            return
        self._received, self._step = b"", 0
        self.findings = []
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # in progress, or refused, which the first read reports
            self._socket.connect(address)
        self._reactor.add_writer(self._socket, self._send_next)
        self._deadline.restart(_TAKES_S)

    def close(self) -> None:
        """Close the connection."""
        self._deadline.cancel()
        self._reactor.drop(self._socket)
        self._socket = None

    def _send_next(self) -> None:
        assert self._socket is not None  # noqa: S101 - the caller is its event
        text = _DIALOG[self._step][0] if self._step < len(_DIALOG) else _REQUEST
        try:
            self._socket.send(text)
        except OSError:
            self._finish()
            return
        self._reactor.remove_writer(self._socket)
        self._reactor.add_reader(self._socket, self._receive)

    def _receive(self) -> None:
        assert self._socket is not None  # noqa: S101 - the caller is its event
        try:
            data = self._socket.recv(_MOST_BYTES)
        except OSError:
            data = b""
        self._received += data
        is_answer = self._step == len(_DIALOG)
        if not data or len(self._received) > _MOST_BYTES:
            self._finish()
        elif not is_answer and self._received.endswith(b"\n"):
            if not self._received.startswith(_DIALOG[self._step][1]):
                self._received = b""
                self._finish()
                return
            self._received = b""
            self._step += 1
            self._reactor.add_writer(self._socket, self._send_next)

    def _finish(self) -> None:
        if self._step == len(_DIALOG):
            self.findings = select_findings(self._received.decode(errors="replace"))
        self.close()
        self._done()
