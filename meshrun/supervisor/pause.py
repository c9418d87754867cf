"""Suspends ranks while the launcher runs, because the process it works for is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_EVERY_NS = 500_000_000


class Pause:
    """Whether the ranks are stopped, and when to look again whether they are to be.

    Args:
        is_caller_stopped: Whether the program that started this launcher is stopped; ``None`` if
            the launcher is a job of the shell itself, and is stopped as such.
    """

    def __init__(self, is_caller_stopped: Callable[[], bool] | None) -> None:
        self._is_caller_stopped = is_caller_stopped
        self.is_on = False
        self._until_told = False
        self.next_look_ns: int | None = 0 if self.has_caller else None
        """When :meth:`look` has something to do."""

    @property
    def has_caller(self) -> bool:
        """Whether SIGTSTP is to stop the ranks alone."""
        return self._is_caller_stopped is not None

    def begin(self, *, until_told: bool) -> None:
        """The ranks are stopped now; ``until_told`` if SIGCONT ends that, and not the caller."""
        self.is_on, self._until_told = True, self._until_told or until_told

    def end(self) -> None:
        """Resume the ranks."""
        self.is_on = self._until_told = False

    def look(self) -> bool | None:
        """Return whether ranks, new ones too, are to be stopped; ``None`` for no change."""
        now_ns = time.monotonic_ns()
        if self._is_caller_stopped is None or now_ns < (self.next_look_ns or 0):
            return None
        self.next_look_ns = now_ns + _LOOK_EVERY_NS
        is_stopped = self._until_told or self._is_caller_stopped()
        return is_stopped if is_stopped or self.is_on else None
