"""A time limit for a wait, with regular notes while it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_NOTE_S = 3.0
_NOTE_EVERY_S = 5.0


class Deadline:
    """A time limit that begins now.

    Args:
        lost_ns: Returns how long this process has been suspended so far, which does not count.
    """

    def __init__(self, timeout_s: float, lost_ns: Callable[[], int] = int) -> None:
        self.timeout_s, self._lost_ns = timeout_s, lost_ns
        self._began_ns = time.monotonic_ns()
        self._lost_before_ns = lost_ns()
        self._next_note_ns = self._began_ns + int(_FIRST_NOTE_S * 1e9)

    @property
    def waited_s(self) -> float:
        """How long the wait has lasted."""
        lost_ns = self._lost_ns() - self._lost_before_ns
        return (time.monotonic_ns() - self._began_ns - lost_ns) / 1e9

    def __str__(self) -> str:
        """Return how long the wait has lasted, and may last: ``3 of 600 s``."""
        return f"{self.waited_s:.0f} of {self.timeout_s:.0f} s"

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.waited_s >= self.timeout_s

    def note_is_due(self) -> bool:
        """Return whether it is time to print a note; if so, schedule the next one."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_note_ns:
            return False
        self._next_note_ns = now_ns + int(_NOTE_EVERY_S * 1e9)
        return True
