"""Splits the bytes of a stream into whole lines and progress states, with prefixes.

Lines with certain words are copied to a file (torchrun's duplicate filters), and lines for a log
collector become JSON objects (``--log-format json``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from msgspec import Struct

from meshrun.host.folder import Opener

Prefix = bytes | Callable[[], bytes]
"""The text before each line, or a function that returns it when the line is printed."""
LONGEST_LINE_BYTES = 64 * 1024
"""A longer line is passed on in parts, so that memory stays bounded."""


class Piece(Struct, frozen=True):
    """Whole lines, or one state of a progress bar, which the next state replaces."""

    text: bytes
    """With prefixes; whole lines end with ``\\n``, a state ends with ``\\r``."""
    is_state: bool = False


class LineAssembler:
    """Splits one stream of a rank at line ends, and keeps the line that has not ended."""

    def __init__(self, prefix: Prefix = b"") -> None:
        self._given = prefix
        self._prefix = b"" if callable(prefix) else prefix
        self._pending = b""

    @property
    def pending(self) -> bytes:
        """The prefixed beginning of a line that has not ended, or ``b""``."""
        text = self._pending.rstrip(b"\r").rpartition(b"\r")[2]
        return self._prefix + text if text else b""

    def feed(self, data: bytes) -> list[Piece]:
        """Take the next bytes of the stream and return the pieces that are complete."""
        if callable(self._given):
            self._prefix = self._given()
        end = data.rfind(b"\n") + 1
        if end:  # copies large data only once
            whole = b"".join((self._pending, memoryview(data)[:end]))
            self._pending = data[end:]
        else:
            whole, self._pending = b"", self._pending + data
        pieces = self._lines(whole)
        if b"\r" in self._pending:
            pieces.extend(self._take_states())
        if len(self._pending) > LONGEST_LINE_BYTES:
            cut = _cut_between_characters(self._pending)
            pieces.append(Piece(self._prefix + self._pending[:cut] + b"\n"))
            self._pending = self._pending[cut:]
        return pieces

    def drop_pending(self) -> None:
        """Forget the line that has not ended."""
        self._pending = b""

    def finish(self) -> list[Piece]:
        """Return what is left at the end of the stream, as a line."""
        rest, self._pending = self._pending, b""
        return self._lines(rest.rstrip(b"\r") + b"\n") if rest.strip(b"\r") else []

    def _lines(self, whole: bytes) -> list[Piece]:
        if not whole:
            return []
        if b"\r" not in whole:
            return [Piece(self._prefixed(whole))]
        pieces: list[Piece] = []
        for line in whole.split(b"\n")[:-1]:
            ending = b"\r\n" if line.endswith(b"\r") else b"\n"
            *states, last = line.rstrip(b"\r").split(b"\r")
            pieces.extend(self._state(state) for state in states if state)
            pieces.append(Piece(self._prefix + last + ending))
        return pieces

    def _prefixed(self, lines: bytes) -> bytes:
        if not self._prefix:
            return lines
        prefixed = lines.replace(b"\n", b"\n" + self._prefix)
        return b"".join((self._prefix, memoryview(prefixed)[: -len(self._prefix)]))

    def _take_states(self) -> list[Piece]:
        r"""Return states that a later one has replaced; keep a last ``\r``, perhaps of ``\r\n``."""
        held = b"\r" if self._pending.endswith(b"\r") else b""
        *states, self._pending = self._pending.removesuffix(b"\r").split(b"\r")
        self._pending += held
        return [self._state(state) for state in states if state]

    def _state(self, state: bytes) -> Piece:
        return Piece(self._prefix + state + b"\r", is_state=True)


class LineCopy:
    """Appends the lines of one stream that contain any of some texts to a file."""

    def __init__(self, path: str, needles: Sequence[str], prefix: Prefix, opener: Opener) -> None:
        self._needles = [needle.encode() for needle in needles]
        self._prefix = prefix
        self._lines = LineAssembler()
        self.error: OSError | None = None
        self._path, self._opener = path, opener
        self._append(b"")

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream; ``b""`` is its end."""
        found = bytearray()
        prefix = self._prefix() if callable(self._prefix) else self._prefix
        for piece in self._lines.feed(data) if data else self._lines.finish():
            for line in piece.text.splitlines(keepends=True):
                if any(needle in line for needle in self._needles):
                    found += prefix + line
        if found:
            self._append(bytes(found))

    def _append(self, text: bytes) -> None:
        try:
            with open(self._path, "ab", opener=self._opener) as file:
                file.write(text)
        except OSError as error:
            self.error = error


def as_json_lines(text: str, **fields: object) -> str:
    """Return each line of a text as a JSON object with ``time``, the fields and ``message``."""
    lines = text.removesuffix("\n").split("\n")
    return "".join(_as_json(line.removesuffix("\r"), **fields) + "\n" for line in lines)


def as_json_message(text: str) -> str:
    """Return a message of meshrun's, with any number of lines, as one JSON object."""
    level = "error" if "error: " in text else "info"
    return _as_json(text.strip("\n").removeprefix("meshrun: "), source="meshrun", level=level)


def _as_json(message: str, **fields: object) -> str:
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, **fields, "message": message})


def _cut_between_characters(data: bytes) -> int:
    """Return a position near the limit that is not inside a UTF-8 character."""
    for cut in range(LONGEST_LINE_BYTES, LONGEST_LINE_BYTES - 4, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return LONGEST_LINE_BYTES
