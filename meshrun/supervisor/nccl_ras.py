"""What NCCL knows of its communicators, asked of the RAS service in the first rank of a node.

Since NCCL 2.24 each process has a thread for it; the first one on a node listens at
``NCCL_RAS_ADDR``, by default port 28028 of localhost.

Source:
    ``src/ras/client.cc`` of NCCL, and "RAS" in NVIDIA's user guide.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping

from meshrun.host.reactor import Reactor

_PORT = 28028
_TAKES_S = 2.0
"""A service that is asked to give up after a second, on a busy machine."""
_DIALOG = ((b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL "), (b"TIMEOUT 1\n", b"OK"))
"""What is said, and how the answer begins."""
_QUESTION = b"STATUS\n"
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
    except OSError:  # a name: to look it up could take long, and it is one of this machine
        host = "127.0.0.1"
    return host, int(port) if port.isdecimal() else _PORT


def select_findings(status: str) -> list[str]:
    """Return what the answer says of errors and warnings, without the tables before."""
    lines = [line.rstrip() for line in status.splitlines()]
    first = next((at for at, line in enumerate(lines) if line in _HEADINGS), len(lines))
    told = [line for line in lines[first:] if line and set(line) != {"="}]
    return told[:_MOST_LINES]


class NcclRas:
    """One question at a time.

    Args:
        reactor: The loop's.
        done: Called once the answer is there, or will not come.
    """

    def __init__(self, reactor: Reactor, done: Callable[[], None]) -> None:
        self._reactor, self._done = reactor, done
        self._socket: socket.socket | None = None
        self._deadline = reactor.call_at(None, self._finish, skips=False)
        self.findings: list[str] = []
        """What the last answer said of errors and warnings."""

    @property
    def is_under_way(self) -> bool:
        """Whether an answer is awaited."""
        return self._socket is not None

    def ask(self, env: Mapping[str, str] = os.environ) -> None:
        """Ask the service of this node; a question that is under way continues instead."""
        if self._socket is not None or (address := ras_address(env)) is None:
            return
        self._got, self._said = b"", 0
        self.findings = []
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # under way, or refused: the first read says so
            self._socket.connect(address)
        self._reactor.add_writer(self._socket, self._speak)
        self._deadline.restart(_TAKES_S)

    def close(self) -> None:
        """Let go of the connection."""
        self._deadline.cancel()
        if self._socket is not None:
            self._reactor.remove(self._socket)
            self._socket.close()
            self._socket = None

    def _speak(self) -> None:
        assert self._socket is not None  # noqa: S101 - which is why this is called
        text = _DIALOG[self._said][0] if self._said < len(_DIALOG) else _QUESTION
        try:
            self._socket.send(text)
        except OSError:
            self._finish()
            return
        self._reactor.remove_writer(self._socket)
        self._reactor.add_reader(self._socket, self._hear)

    def _hear(self) -> None:
        assert self._socket is not None  # noqa: S101 - which is why this is called
        try:
            data = self._socket.recv(_MOST_BYTES)
        except OSError:
            data = b""
        self._got += data
        is_answer = self._said == len(_DIALOG)
        if not data or len(self._got) > _MOST_BYTES:
            self._finish()
        elif not is_answer and self._got.endswith(b"\n"):
            if not self._got.startswith(_DIALOG[self._said][1]):
                self._got = b""
                self._finish()
                return
            self._got = b""
            self._said += 1
            self._reactor.add_writer(self._socket, self._speak)

    def _finish(self) -> None:
        if self._said == len(_DIALOG):
            self.findings = select_findings(self._got.decode(errors="replace"))
        self.close()
        self._done()
