"""Copies lines that contain certain words to a file (torchrun's duplicate filters)."""

from __future__ import annotations

from collections.abc import Sequence

from meshrun.console.lines import LineAssembler, Prefix
from meshrun.host.folder import Opener


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
