"""Wakes the loop when slow readers of our output accept more."""

from __future__ import annotations

from meshrun.console.console import Console
from meshrun.host.reactor import Reactor

LAST_WORDS_TAKE_S = 2.0
"""How long readers have for what ranks printed, after a launch that was stopped."""


def dropped_note(count: int) -> str:
    """Return the note about bytes that no reader took."""
    return f"dropped {count:,} bytes of output: its reader does not keep up"


class SlowReaders:
    """Keeps the reactor's writers equal to the console's outlets that have something waiting."""

    def __init__(self, console: Console, reactor: Reactor) -> None:
        self._console = console
        self._reactor = reactor
        self._watched: set[int] = set()

    def watch(self) -> None:
        """Have the reactor wake us when a reader of our output takes more."""
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
        """Block until a reader takes more, or for so long; for the end of a launch."""
        self.watch()
        if self._console.waiting:
            self._reactor.poll(timeout_s)
