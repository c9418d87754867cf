"""Frames between launchers, signed with the key of the connection. Pure.

A frame consists of its length (4 bytes, big endian), an HMAC-SHA256 of direction, number and text,
and the text. Frames are numbered from 0, so that none can be dropped, repeated or reflected.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

LONGEST = 16 * 1024 * 1024
"""Bytes of the longest text; a report of thousands of failed ranks fits."""
_LENGTH = struct.Struct(">I")
_MAC_BYTES = hashlib.sha256().digest_size


class FrameError(Exception):
    """The received data is not a frame from the peer."""


class FrameWriter:
    """Writes the frames of one direction.

    Args:
        direction: A different text for each of the two directions.
    """

    def __init__(self, key: bytes, direction: str) -> None:
        self._key, self._direction, self._number = key, direction, 0

    def frame(self, text: bytes) -> bytes:
        """Return the next frame."""
        mac = _mac(self._key, self._direction, self._number, text)
        self._number += 1
        return _LENGTH.pack(len(text)) + mac + text


class FrameReader:
    """Splits received bytes into texts; see :class:`FrameWriter`."""

    def __init__(self, key: bytes, direction: str) -> None:
        self._key, self._direction, self._number = key, direction, 0
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Return the texts that ``received`` completes.

        Raises:
            FrameError: If a MAC is wrong or a frame too long; nothing more can be read then.
        """
        self._bytes += received
        texts = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > LONGEST:
                raise FrameError(f"a frame of {length} bytes, over {LONGEST}")
            begin = _LENGTH.size + _MAC_BYTES
            end = begin + length
            if len(self._bytes) < end:
                break
            mac = bytes(self._bytes[_LENGTH.size : begin])
            text = bytes(self._bytes[begin:end])
            del self._bytes[:end]
            expected = _mac(self._key, self._direction, self._number, text)
            if not hmac.compare_digest(mac, expected):
                raise FrameError("a frame that is not signed with this launch's key")
            self._number += 1
            texts.append(text)
        return texts


def _mac(key: bytes, direction: str, number: int, text: bytes) -> bytes:
    prefix = f"{direction} {number} ".encode()
    return hmac.digest(key, prefix + text, "sha256")
