"""Suspends ranks while the launcher runs, because its caller is stopped."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import partial

from meshrun.host.reactor import Reactor

_CHECK_EVERY_S = 0.5
"""The kernel reports that a child is stopped, but not that the caller is."""


class _Ranks(Enum):
    RUN = auto()
    STOPPED_WITH_CALLER = auto()
    STOPPED_UNTIL_SIGCONT = auto()


class Pause:
    """Whether the ranks are stopped, with a periodic check of whether they should be.

    Args:
        is_caller_stopped: Returns whether the program that started this launcher is stopped;
            ``None`` if the launcher is a job of the shell, which is stopped itself.
        stop: Called repeatedly while ranks, including new ones, should be stopped.
        resume: Called when they should continue.
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
        self._ranks = _Ranks.RUN
        self.has_caller = is_caller_stopped is not None
        """Whether SIGTSTP stops only the ranks, not the launcher."""
        if is_caller_stopped is not None:
            reactor.every(_CHECK_EVERY_S, partial(self._check, is_caller_stopped))

    @property
    def is_on(self) -> bool:
        """Whether ranks are stopped."""
        return self._ranks is not _Ranks.RUN

    def begin(self, *, until_sigcont: bool) -> None:
        """Note that ranks are stopped: until SIGCONT if so, else until the caller continues."""
        if until_sigcont:
            self._ranks = _Ranks.STOPPED_UNTIL_SIGCONT
        elif not self.is_on:
            self._ranks = _Ranks.STOPPED_WITH_CALLER

    def end(self) -> None:
        """Note that ranks continue."""
        self._ranks = _Ranks.RUN

    def _check(self, is_caller_stopped: Callable[[], bool]) -> None:
        if self._ranks is _Ranks.STOPPED_UNTIL_SIGCONT or is_caller_stopped():
            self._stop()
        elif self.is_on:
            self._resume()
