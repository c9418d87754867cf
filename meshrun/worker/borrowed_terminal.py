"""The terminal of the program that started the ranks, for one of them that is being debugged."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from meshrun.worker.call_channel import Channel
from meshrun.worker.debuggers import ask_at_breakpoints, on_terminal


@dataclass(frozen=True, slots=True)
class MayDebug:
    """May this rank have the terminal? The reply is its name, or ``None``."""


@dataclass(frozen=True, slots=True)
class Debugged:
    """The terminal is free again."""

    quits: bool
    """Whether whoever debugged has quit."""


class BorrowedTerminal:
    """Asked for at the first breakpoint of a call, and given back when the call has ended."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lent: ExitStack | None = None
        self._use: Callable[[], None] = lambda: None
        self._is_refused = False
        self.quits = False
        ask_at_breakpoints(self.borrow)

    def borrow(self) -> bool:
        """Have the terminal as standard streams; return whether it is lent."""
        if self._lent is not None:
            self._use()
            return True
        if self._is_refused:
            return False
        self._channel.send(pickle.dumps(MayDebug()))
        path = pickle.loads(self._channel.receive())  # noqa: S301 - our caller's
        self._is_refused = path is None
        if path is not None:
            self._lent = ExitStack()
            try:
                self._use = self._lent.enter_context(on_terminal(path))
            except OSError:  # its name leads nowhere here
                self.give_back()
                self._is_refused = True
        return self._lent is not None

    def give_back(self) -> None:
        """Have the own standard streams again; the next call may ask again."""
        self._is_refused = False
        if self._lent is not None:
            self._lent.close()
            self._lent = None
            self._channel.send(pickle.dumps(Debugged(self.quits)))

    @property
    def is_lent(self) -> bool:
        """Whether it is this rank's now."""
        return self._lent is not None
