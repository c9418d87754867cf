"""Suspends ranks while the launcher runs, because the process it works for is stopped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshrun.host.reactor import Reactor

_LOOK_EVERY_S = 0.5


class Pause:
    """Whether the ranks are stopped, and the look from time to time whether they are to be.

    Args:
        is_caller_stopped: Whether the program that started this launcher is stopped; ``None`` if
            the launcher is a job of the shell itself, and is stopped as such.
        stop: Called as long as ranks, new ones too, are to be stopped.
        resume: Called once they are to be resumed.
    """

    def __init__(
        self,
        reactor: Reactor,
        is_caller_stopped: Callable[[], bool] | None,
        *,
        stop: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self._stop, self._resume = stop, resume
        self.is_on = False
        self._until_told = False
        self.has_caller = is_caller_stopped is not None
        """Whether SIGTSTP is to stop the ranks alone."""
        if is_caller_stopped is not None:
            reactor.every(_LOOK_EVERY_S, partial(self._look, is_caller_stopped))

    def begin(self, *, until_told: bool) -> None:
        """The ranks are stopped now; ``until_told`` if SIGCONT ends that, and not the caller."""
        self.is_on, self._until_told = True, self._until_told or until_told

    def end(self) -> None:
        """Resume the ranks."""
        self.is_on = self._until_told = False

    def _look(self, is_caller_stopped: Callable[[], bool]) -> None:
        if self._until_told or is_caller_stopped():
            self._stop()
        elif self.is_on:
            self._resume()
