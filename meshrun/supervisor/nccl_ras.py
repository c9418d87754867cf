"""Findings of NCCL's RAS service about its communicators.

Since NCCL 2.24, each process has a thread for this service. The first one on a node listens at
``NCCL_RAS_ADDR``, by default port 28028 of localhost.

Source:
    ``src/ras/client.cc`` of NCCL, and "RAS" in NVIDIA's user guide.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from meshrun.host.forked_call import ForkedCall
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
    """Asks the service, one request at a time, in a process of its own.

    Args:
        done: Called once there is an answer, or after a failure.
    """

    def __init__(self, reactor: Reactor, done: Callable[[], None]) -> None:
        self._reactor, self._done = reactor, done
        self._asked: ForkedCall[list[str]] | None = None
        self._deadline = reactor.call_at(None, partial(self._finish, None), skips=False)
        self.findings: list[str] = []
        """The errors and warnings of the last answer."""

    @property
    def is_under_way(self) -> bool:
        """Whether a request is under way."""
        return self._asked is not None

    def ask(self, env: Mapping[str, str] = os.environ) -> None:
        """Ask the service of this node, unless a request is under way."""
        if self._asked is not None or (address := ras_address(env)) is None:
            return
        self.findings = []
        with suppress(OSError):  # no process can be started
            self._asked = ForkedCall(partial(_ask_service, address))
            self._asked.follow(self._reactor, self._finish)
            self._deadline.restart(_TAKES_S)

    def close(self) -> None:
        """Stop waiting for an answer."""
        self._deadline.cancel()
        self._reactor.drop(self._asked)
        self._asked = None

    def _finish(self, findings: list[str] | None) -> None:
        self.findings = findings or []
        self.close()
        self._done()


def _ask_service(address: tuple[str, int]) -> list[str]:
    """Return the findings; none if there is no such service."""
    try:
        with (
            socket.create_connection(address, _TAKES_S) as connection,
            connection.makefile("rb") as replies,
        ):
            for request, reply in _DIALOG:
                connection.sendall(request)
                if not replies.readline(_MOST_BYTES).startswith(reply):
                    return []
            connection.sendall(_REQUEST)
            return select_findings(replies.read(_MOST_BYTES).decode(errors="replace"))
    except OSError:
        return []
