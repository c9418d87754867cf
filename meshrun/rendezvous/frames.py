"""Frames between launchers, signed with the key of the connection. Pure.

A frame is its length (4 bytes, big endian), HMAC-SHA256 over direction, number and text, and the
text. Numbers count up from 0, so that none can be left out, repeated or sent back.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

LONGEST = 16 * 1024 * 1024
"""Bytes of the longest text; thousands of failed ranks fit."""
_LENGTH = struct.Struct(">I")
_MARK = hashlib.sha256().digest_size


class FrameError(Exception):
    """What was received is not a frame of the other end's."""


class FrameWriter:
    """Makes the frames of one direction.

    Args:
        direction: Another text for each of the two directions.
    """

    def __init__(self, key: bytes, direction: str) -> None:
        self._key, self._direction, self._number = key, direction, 0

    def frame(self, text: bytes) -> bytes:
        """Return the next frame."""
        mark = _mark(self._key, self._direction, self._number, text)
        self._number += 1
        return _LENGTH.pack(len(text)) + mark + text


class FrameReader:
    """Takes bytes as they come, and gives whole texts; see :class:`FrameWriter`."""

    def __init__(self, key: bytes, direction: str) -> None:
        self._key, self._direction, self._number = key, direction, 0
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Return the texts that ``received`` completes.

        Raises:
            FrameError: If a mark is wrong or a frame too long; nothing more can be read then.
        """
        self._bytes += received
        texts = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > LONGEST:
                raise FrameError(f"a frame of {length} bytes, over {LONGEST}")
            end = _LENGTH.size + _MARK + length
            if len(self._bytes) < end:
                break
            mark = bytes(self._bytes[_LENGTH.size : _LENGTH.size + _MARK])
            text = bytes(self._bytes[_LENGTH.size + _MARK : end])
            del self._bytes[:end]
            expected = _mark(self._key, self._direction, self._number, text)
            if not hmac.compare_digest(mark, expected):
                raise FrameError("a frame that is not signed with this launch's key")
            self._number += 1
            texts.append(text)
        return texts


def _mark(key: bytes, direction: str, number: int, text: bytes) -> bytes:
    place = f"{direction} {number} ".encode()
    return hmac.digest(key, place + text, "sha256")
