"""Lets a rank that is debugged use the terminal of the program that started the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from msgspec import Struct

from meshrun.worker.call_channel import Channel
from meshrun.worker.debuggers import ask_at_breakpoints, on_terminal


class MayDebug(Struct, frozen=True):
    """A request for the terminal. The reply is its path, or ``None``."""


class Debugged(Struct, frozen=True):
    """The terminal is free again."""

    quits: bool
    """Whether the user quit the debugger."""


class BorrowedTerminal:
    """Requested at the first breakpoint of a call, and returned when the call has ended."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lent: ExitStack | None = None
        self._restore_terminal: Callable[[], None] = lambda: None
        self._is_refused = False
        self.quits = False
        ask_at_breakpoints(self.borrow)

    def borrow(self) -> bool:
        """Use the terminal as standard streams; return whether it is lent."""
        if self._lent is not None:
            self._restore_terminal()
            return True
        if self._is_refused:
            return False
        self._channel.send(MayDebug())
        path = self._channel.receive()
        self._is_refused = path is None
        if path is not None:
            self._lent = ExitStack()
            try:
                self._restore_terminal = self._lent.enter_context(on_terminal(path))
            except OSError:  # its path does not exist here
                self.give_back()
                self._is_refused = True
        return self._lent is not None

    def give_back(self) -> None:
        """Restore this rank's own standard streams; the next call may borrow again."""
        self._is_refused = False
        if self._lent is not None:
            self._lent.close()
            self._lent = None
            self._channel.send(Debugged(self.quits))

    @property
    def is_lent(self) -> bool:
        """Whether this rank has the terminal now."""
        return self._lent is not None
