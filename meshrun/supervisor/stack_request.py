"""Asks one rank for its stacks without disturbing it."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshrun.host.processes import (
    SignalState,
    read_stat,
    send_signal,
    send_signal_to_main_thread,
    signal_state,
    threads_blocking,
)
from meshrun.protocol.stacks import (
    MAIN_STACK_SIGNAL,
    STACKS_SIGNAL,
    is_answered,
    lacks_main_thread,
)

_PYTHON_TAKES_S = 0.05
_BUSY_PYTHON_TAKES_S = 1.0
"""Time to get the interpreter's lock, if all are busy."""
_STOPPED_TAKES_S = 0.5
_TAKES_S = 1.5
_STOPPED = (SignalState.STOPPED, SignalState.TRACED)


class StackRequest:
    """A request to a rank, until the rank has answered or time has run out.

    The rank's thread that answers, or else its handler in Python, writes the stacks of all threads.
    If neither does, a handler in C writes that of the main thread. It follows frames, so it is
    asked once the main thread sleeps, or can be taken to be in native code.

    Args:
        pid: The rank's process.
        has_thread: Whether its thread has been asked.
        has_written: Whether it has ever written to its file, and so has handlers of its own.
        read: Returns what it has written since.
    """

    def __init__(
        self, pid: int, *, has_thread: bool, has_written: bool, read: Callable[[], str]
    ) -> None:
        self.pid, self.has_written, self.read = pid, has_written, read
        self._has_thread = has_thread
        self._began_s = time.monotonic()
        self._blocking: frozenset[str] = frozenset()
        """The threads that block the signal for the main thread's stack, if that has been sent."""
        self._is_main_asked = False
        self.state = SignalState.RUNNING
        """The state of that signal, which explains silence."""
        if not has_thread:
            self._blocking = threads_blocking(pid, STACKS_SIGNAL)
            # The signal would end a process without a handler.
            if self._look(STACKS_SIGNAL) not in (*_STOPPED, SignalState.UNHANDLED):
                send_signal(pid, STACKS_SIGNAL)

    def is_over(self) -> bool:
        """Continue; return whether the rank has written all that it will write in time."""
        text = self.read()
        if is_answered(text):
            self._has_thread = False  # no more of it follows
            if not lacks_main_thread(text):
                self.state = SignalState.DONE
                return True
        took_s = time.monotonic() - self._began_s
        if took_s < _PYTHON_TAKES_S:
            return False
        self.state = self._look(MAIN_STACK_SIGNAL)
        most_s = _STOPPED_TAKES_S if self.state in _STOPPED else _TAKES_S
        if self.state is SignalState.GONE or took_s > most_s:
            return True
        if self._is_main_asked or self.state is SignalState.UNHANDLED:
            is_done = self.state in (SignalState.DONE, SignalState.UNHANDLED)
            return is_done and not self._has_thread
        blocking = threads_blocking(self.pid, MAIN_STACK_SIGNAL)
        if str(self.pid) in blocking:
            self.state = SignalState.PENDING
        elif self._sleeps() or took_s > _BUSY_PYTHON_TAKES_S:
            self._blocking, self._is_main_asked = blocking, True
            send_signal_to_main_thread(self.pid, MAIN_STACK_SIGNAL)
        return False

    def _sleeps(self) -> bool:
        """Return whether the main thread sleeps, in whose frames nothing changes then."""
        return read_stat(self.pid)[0] in ("S", "D")

    def _look(self, signum: int) -> SignalState:
        state = signal_state(self.pid, signum, self._blocking)
        if state is not SignalState.GONE and not self.has_written:
            return SignalState.UNHANDLED  # a handler may still be the zygote's
        return state
