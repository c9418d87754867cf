"""How the messages of ``ssh/agent_messages.py`` are delimited on ssh's pipes. Pure.

The controller sends lines. The agent sends a greeting, which marks the end of any output of the
shell there, then frames: kind (1 byte), length (4 bytes, big endian) and content.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

OUT, ERR, MESSAGE = b"o", b"e", b"n"
"""Output of the launcher on stdout or stderr, or a message of the agent."""
BEAT_S = 1.0
"""How often each side sends a heartbeat."""
_HEAD = struct.Struct(">cI")
_MOST_NOISE = 64 * 1024
_LONGEST = 256 * 1024 * 1024
"""Bytes of the longest frame; a report of thousands of failed ranks fits."""


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
