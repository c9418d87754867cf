"""The messages between controller and agent. Pure.

To the agent go lines of JSON. From it comes one line that marks the end of whatever the shell there
had to say first, then frames: their kind (1 byte), length (4 bytes, big endian) and content.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

OUT, ERR, NEWS = b"o", b"e", b"n"
"""A piece of the launcher's stdout, of its stderr, or news of the agent's own as JSON."""
BEAT_S = 1.0
"""How often each end says that it is there."""
_HEAD = struct.Struct(">cI")
_MOST_NOISE = 64 * 1024
_LONGEST = 256 * 1024 * 1024
"""Bytes of the longest frame: the report of a launch of which thousands of ranks failed fits."""


class NoFrame(ValueError):
    """What was received is no frame of an agent's."""


def greeting(nonce: str) -> bytes:
    """Return the line after which frames come; what stood before it was not the agent's."""
    return f"\nmeshrun agent {nonce}\n".encode()


def frame(kind: bytes, content: bytes) -> bytes:
    """Return a frame."""
    return _HEAD.pack(kind, len(content)) + content


def news(**values: object) -> bytes:
    """Return a frame with news."""
    return frame(NEWS, json.dumps(values).encode())


def order(**values: object) -> bytes:
    """Return a line for the agent."""
    return json.dumps(values).encode() + b"\n"


class FrameSplitter:
    """Takes an agent's bytes as they come; ``noise`` is what came before its greeting."""

    def __init__(self, nonce: str) -> None:
        self._greeting = greeting(nonce)
        self._bytes = bytearray()
        self._greeted = False
        self.noise = b""

    def feed(self, received: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (kind, content) of each frame that ``received`` completes.

        Raises:
            NoFrame: If one is of no known kind, or too long; nothing more can be read then.
        """
        self._bytes += received
        if not self._greeted and not self._find_greeting():
            return
        while len(self._bytes) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._bytes)
            if kind not in (OUT, ERR, NEWS) or length > _LONGEST:
                raise NoFrame(f"{length} bytes of kind {kind!r}")
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


class LineSplitter:
    """Takes a controller's bytes as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[Mapping[str, Any]]:
        """Yield what each line that ``received`` completes says."""
        self._bytes += received
        *lines, self._bytes = self._bytes.split(b"\n")
        for line in lines:
            yield json.loads(line)
