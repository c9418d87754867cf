"""The output of all hosts, as the lines of one console."""

from __future__ import annotations

import selectors
from collections.abc import Iterator

from meshrun.console.console import Console, RankStream
from meshrun.console.outlet import Outlet
from meshrun.ssh.framing import OUT


class Screen:
    """Our stdout and stderr, to which each host adds whole lines."""

    def __init__(self) -> None:
        self.console = Console()
        self._streams: dict[tuple[int, bytes], RankStream] = {}

    def show(self, number: int, kind: bytes, data: bytes) -> None:
        """Take what has come of one stream of a host."""
        key = (number, kind)
        if key not in self._streams:
            self._streams[key] = self.console.stream(rank=number, prefix=b"", to_stderr=kind != OUT)
        self.console.feed(self._streams[key], data)

    def end(self, number: int) -> None:
        """Show the incomplete line of a lost host."""
        for key in [key for key in self._streams if key[0] == number]:
            self.console.feed(self._streams.pop(key), b"")

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wake us when a reader of our output takes more."""
        for outlet in self._slow():
            selector.register(outlet, selectors.EVENT_WRITE, outlet.flush)

    def finish(self) -> None:
        """Queue what is left of lines; nothing more will come."""
        for stream in self._streams.values():
            self.console.feed(stream, b"")
        self.console.close()

    def _slow(self) -> Iterator[Outlet]:
        for outlet in self.console.waiting:
            if outlet.needs_select:
                yield outlet
            else:
                outlet.flush()
