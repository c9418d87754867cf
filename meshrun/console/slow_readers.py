"""Wakes the loop when slow readers of our output accept more."""

from __future__ import annotations

import selectors

from meshrun.console.console import Console

LAST_WORDS_TAKE_S = 2.0
"""How long readers have for what ranks printed, after a launch that was stopped."""


def dropped_note(count: int) -> str:
    """Return the note about bytes that no reader took."""
    return f"dropped {count:,} bytes of output, since its reader takes no more"


class SlowReaders:
    """Keeps the selector's writers equal to the console's outlets that have something waiting."""

    def __init__(self, console: Console, selector: selectors.BaseSelector) -> None:
        self._console = console
        self._selector = selector
        self._has_some = False

    def watch(self) -> None:
        """Have the selector wake us when a reader of our output takes more."""
        waiting = {outlet.fileno(): outlet for outlet in self._console.waiting}
        if not waiting and not self._has_some:
            return
        self._has_some = bool(waiting)
        for fd, key in list(self._selector.get_map().items()):
            if key.events == selectors.EVENT_WRITE and fd not in waiting:
                self._selector.unregister(fd)
        for fd, outlet in waiting.items():
            if not outlet.needs_select:
                outlet.flush()
            elif fd not in self._selector.get_map():
                self._selector.register(fd, selectors.EVENT_WRITE, outlet.flush)

    def wait(self, timeout_s: float | None) -> None:
        """Block until a reader takes more, or for so long; for the end of a launch."""
        self.watch()
        if self._console.waiting:
            for key, _ in self._selector.select(timeout_s):
                key.data()
