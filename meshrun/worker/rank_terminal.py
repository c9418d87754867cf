"""Lets a rank that is debugged use the terminal of the program that started the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from msgspec import Struct

from meshrun.worker.call_channel import Channel
from meshrun.worker.debuggers import ask_at_breakpoints, on_terminal


class AcquireTerminal(Struct, frozen=True):
    """A request for the terminal. The reply is its path, or ``None``."""


class ReleaseTerminal(Struct, frozen=True):
    """The terminal is free again."""

    quits: bool
    """Whether the user quit the debugger."""


class RankTerminal:
    """Acquired at the first breakpoint of a call, and released when the call has ended."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._streams: ExitStack | None = None
        self._restore_terminal: Callable[[], None] = lambda: None
        self._is_denied = False
        self.quits = False
        ask_at_breakpoints(self.acquire)

    def acquire(self) -> bool:
        """Use the terminal as standard streams; return whether it was granted."""
        if self._streams is not None:
            self._restore_terminal()
            return True
        if self._is_denied:
            return False
        self._channel.send(AcquireTerminal())
        path = self._channel.receive()
        self._is_denied = path is None
        if path is not None:
            self._streams = ExitStack()
            try:
                self._restore_terminal = self._streams.enter_context(on_terminal(path))
            except OSError:  # its path does not exist here
                self.release()
                self._is_denied = True
        return self._streams is not None

    def release(self) -> None:
        """Restore this rank's own standard streams; the next call may acquire it again."""
        self._is_denied = False
        if self._streams is not None:
            self._streams.close()
            self._streams = None
            self._channel.send(ReleaseTerminal(self.quits))

    @property
    def is_held(self) -> bool:
        """Whether this rank has the terminal now."""
        return self._streams is not None
