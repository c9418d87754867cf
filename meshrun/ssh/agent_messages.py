"""The messages between controller and agent, as values, as JSON and on ssh's pipes. Pure.

The controller sends lines. The agent sends a greeting, which marks the end of any output of the
shell there, then frames: kind (1 byte), length (4 bytes, big endian) and content.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict

from meshrun.protocol.packing import Line

OUT, ERR, MESSAGE = b"o", b"e", b"n"
"""Output of the launcher on stdout or stderr, or a message of the agent."""
BEAT_S = 1.0
"""How often each side sends a heartbeat."""
_HEAD = struct.Struct(">cI")
_MOST_NOISE = 64 * 1024
_LONGEST = 256 * 1024 * 1024
"""Bytes of the longest frame; a report of thousands of failed ranks fits."""


class Hello(Struct, frozen=True, kw_only=True):
    """Controller to agent, first: what it needs before it can check and do anything."""

    nonce: str
    """The agent repeats it in its greeting."""
    version: str
    """The version of meshrun that the host must have."""
    path: list[str]
    """Folders to search for meshrun and other modules."""
    cwd: str
    controller: str
    """The name of the controller's host."""
    lease_s: float
    """How long the controller may be silent."""
    grace_s: float
    """How long the launcher's ranks may take to exit."""


class Listen(Struct, frozen=True, kw_only=True):
    """Controller to the first host's agent: open the socket where the launchers meet."""

    addresses: list[str]
    """Addresses by which the hosts know this one, best first; "" for unknown ones."""


class StartLauncher(Struct, frozen=True, kw_only=True):
    """Controller to agent: start the host's launcher."""

    words: list[str]
    env: dict[str, str]
    """Variables to add to the agent's own."""
    listens: bool
    """Whether the launcher inherits the socket that :class:`Listen` opened."""


class SignalLauncher(Struct, frozen=True, kw_only=True):
    """Controller to agent: send the launcher a signal."""

    signum: int
    even_if_joined: bool
    """Whether to send it although node 0 passes signals on, as all nodes have joined."""


class StopLauncher(Struct, frozen=True, kw_only=True):
    """Controller to agent: stop the launcher and exit."""

    why: str
    even_if_joined: bool
    """Whether to stop it although it has joined node 0, with which it ends by itself."""


class Alive(Struct, frozen=True, kw_only=True):
    """A heartbeat, in both directions."""


class Ready(Struct, frozen=True, kw_only=True):
    """Agent to controller, first: it can start a launcher."""

    own: Line
    """The address of its host, if known; "" if not."""
    theirs: Line
    """The controller's address as seen from there; "" if unknown."""
    machine: Line
    """An id of its machine; "" if unknown."""


class AgentError(Struct, frozen=True, kw_only=True):
    """Agent to controller: its host cannot be used, or cannot listen."""

    why: Line
    hint: Line


class Listening(Struct, frozen=True, kw_only=True):
    """Agent to controller: where the launchers meet."""

    address: str
    port: Annotated[int, Meta(ge=1, le=65_535)]

    def __post_init__(self) -> None:
        ip_address(self.address)


class LauncherError(Struct, frozen=True, kw_only=True):
    """Agent to controller: why its launcher could not launch."""

    text: str
    """JSON of ``report/result_json.py``."""


class LauncherReport(Struct, frozen=True, kw_only=True):
    """Agent to controller: the result of the launch, as its launcher reported it."""

    text: str
    """JSON of ``report/result_json.py``."""


class LauncherEnded(Struct, frozen=True, kw_only=True):
    """Agent to controller, last: its launcher has ended."""

    code: Annotated[int, Meta(ge=-64, le=255)]
    """Its exit code, or -n for signal n."""
    has_joined: bool
    """Whether all nodes had joined."""
    why: Line
    """Why the agent stopped it by itself; "" if it did not."""


ToAgent = Listen | StartLauncher | SignalLauncher | StopLauncher | Alive


FromAgent = Ready | AgentError | Listening | LauncherError | LauncherReport | LauncherEnded | Alive


def format_hello(hello: Hello) -> bytes:
    """Return the first line for an agent, whose host may have another version of meshrun."""
    return json.dumps(asdict(hello)).encode() + b"\n"


def read_hello(values: Mapping[str, Any]) -> Hello:
    """Return the value of the first line, without what another version adds to it."""
    return Hello(**{name: values[name] for name in Hello.__struct_fields__})


def greeting(nonce: str) -> bytes:
    """Return the line that precedes the frames; anything before it is not from the agent."""
    return f"\nmeshrun agent {nonce}\n".encode()


def frame(kind: bytes, content: bytes) -> bytes:
    """Return a frame."""
    return _HEAD.pack(kind, len(content)) + content


class FrameSplitter:
    """Splits received bytes into frames; ``noise`` is what precedes the agent's greeting."""

    def __init__(self, nonce: str) -> None:
        self._greeting = greeting(nonce)
        self._bytes = bytearray()
        self._greeted = False
        self.noise = b""

    def feed(self, received: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (kind, content) of each frame that ``received`` completes.

        Raises:
            ValueError: If one is of no known kind, or too long; nothing more can be read then.
        """
        self._bytes += received
        if not self._greeted and not self._find_greeting():
            return
        while len(self._bytes) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._bytes)
            if kind not in (OUT, ERR, MESSAGE) or length > _LONGEST:
                raise ValueError(f"{length} bytes of kind {kind!r}")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            content = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield kind, content

    def _find_greeting(self) -> bool:
        place = self._bytes.find(self._greeting)
        if place < 0:
            self.noise = bytes(self._bytes[:_MOST_NOISE])
            del self._bytes[: -_MOST_NOISE - len(self._greeting)]
            return False
        self.noise = bytes(self._bytes[:place])
        del self._bytes[: place + len(self._greeting)]
        self._greeted = True
        return True
