"""Name lookups that do not block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshrun.host.aside import Aside
from meshrun.host.interfaces import look_up
from meshrun.host.reactor import Reactor


class Lookup:
    """A lookup of a name in a process of its own, as a resolver may take many seconds.

    Args:
        host: The name.
        reactor: The reactor that waits for the answer.
        answered: Called with the addresses and, if there are none, the reason.
    """

    def __init__(
        self, host: str, reactor: Reactor, answered: Callable[[list[str], str], object]
    ) -> None:
        self._reactor, self._answered = reactor, answered
        self._call: Aside[tuple[list[str], str]] | None = Aside(partial(_look_up, host))
        reactor.add_reader(self._call, self._take)

    def _take(self) -> None:
        assert self._call is not None  # noqa: S101 - otherwise, no reader is registered
        call, self._call = self._call, None
        self._reactor.remove(call)
        self._answered(*(call.take() or ([], "the lookup was stopped")))

    def close(self) -> None:
        """Stop the lookup if it is still running."""
        self._reactor.drop(self._call)
        self._call = None


def _look_up(host: str) -> tuple[list[str], str]:
    try:
        return look_up(host), ""
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
