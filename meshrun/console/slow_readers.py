"""Wakes the loop when slow readers of our output accept more."""

from __future__ import annotations

from meshrun.console.console import Console
from meshrun.host.reactor import Reactor
from meshrun.wording import count

LAST_WORDS_TAKE_S = 2.0
"""How long readers may take to read the rest of the output after a launch was stopped."""


def last_read_s(stopped_s: float, ended_s: float, shutdown_timeout_s: float) -> float:
    """Return until when readers of a stopped launch may read, whose ranks have ended."""
    last_words_s = min(shutdown_timeout_s, LAST_WORDS_TAKE_S)
    return max(stopped_s + shutdown_timeout_s, ended_s + last_words_s)


def dropped_note(number: int) -> str:
    """Return the note about discarded bytes."""
    return f"dropped {count(number, 'byte')} of output: its reader cannot keep up"


class SlowReaders:
    """Registers the console's outlets with the reactor while they have bytes waiting."""

    def __init__(self, console: Console, reactor: Reactor) -> None:
        self._console = console
        self._reactor = reactor
        self._watched: set[int] = set()

    def watch(self) -> None:
        """Register the outlets that have bytes waiting, and no others."""
        waiting = {outlet.fileno(): outlet for outlet in self._console.waiting}
        for fd, outlet in list(waiting.items()):
            if not outlet.needs_select:
                outlet.flush()
                del waiting[fd]
        for fd in self._watched - waiting.keys():
            self._reactor.remove(fd)
        for fd in waiting.keys() - self._watched:
            self._reactor.add_writer(fd, waiting[fd].flush)
        self._watched = set(waiting)

    def wait(self, timeout_s: float | None) -> None:
        """Block until a reader takes more, or for the timeout; for the end of a launch."""
        self.watch()
        if self._console.waiting:
            self._reactor.poll(timeout_s)
