"""The output of all hosts, as the lines of one console."""

from __future__ import annotations

from meshrun.console.console import Console, RankStream
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

    def finish(self) -> None:
        """Queue what is left of lines; nothing more will come."""
        for stream in self._streams.values():
            self.console.feed(stream, b"")
        self.console.close()
