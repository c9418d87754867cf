"""Debuggers in a rank: Ctrl-C in the debugged rank, breakpoints without stdin or on a terminal.

A rank that serves calls may use the terminal of the program that started the ranks.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from msgspec import Struct

from meshrun.worker.call_channel import Channel
from meshrun.worker.imports import when_imported

_DEBUGGERS = ("pdb.py", "bdb.py", "cmd.py", "code.py", "IPython", "prompt_toolkit")


def stop_on_interrupt() -> None:
    """Have Ctrl-C stop the rank that has the terminal in pdb."""
    signal.signal(signal.SIGINT, _stop_here)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # line by line, as on a terminal
            stream.reconfigure(line_buffering=True, write_through=False)


def leave_interrupts() -> None:
    """Keep pdb from handling SIGINT after a breakpoint: Ctrl-C ends a launch, or a call."""
    when_imported("pdb", _refuse_interrupts)


def _refuse_interrupts() -> None:
    pdb: Any = sys.modules["pdb"]
    pdb.Pdb.nosigint = property(lambda _: True, lambda *_: None)


_at_breakpoints: list[Callable[[], bool]] = []
"""What decides whether a rank without a terminal stops at a breakpoint; the last one counts."""


def ask_at_breakpoints(may_stop: Callable[[], bool]) -> None:
    """Have a rank continue at breakpoints unless ``may_stop``, called there, returns true.

    pdb is patched as soon as the program imports it, which takes 20 ms.
    """
    if not _at_breakpoints:
        when_imported("pdb", _patch_pdb)
    _at_breakpoints.append(may_stop)


def _patch_pdb() -> None:
    """Have pdb ask, or continue, where it would read from stdin.

    A debugger with its own streams, such as a remote one, stops as usual.
    """
    pdb: Any = sys.modules["pdb"]
    set_trace = pdb.Pdb.set_trace

    def stop_or_pass(debugger: Any, frame: FrameType | None = None, **kwargs: Any) -> None:
        if debugger.stdin is not sys.__stdin__ or _at_breakpoints[-1]():
            set_trace(debugger, frame or sys._getframe(1), **kwargs)

    pdb.Pdb.set_trace = stop_or_pass


@contextmanager
def passing_breakpoints() -> Iterator[None]:
    """Have a rank continue at breakpoints without a request while the block runs."""
    _at_breakpoints.append(lambda: False)
    try:
        yield
    finally:
        _at_breakpoints.pop()


def _stop_here(signum: int, frame: FrameType | None) -> None:
    """Stop the program where it is; at a debugger's prompt, interrupt that."""
    if frame is None or _is_debugger(frame):
        signal.default_int_handler(signum, frame)
    from pdb import Pdb

    debugger = Pdb()
    debugger.message("\nProgram interrupted. (Use 'cont' to resume).")
    debugger.set_trace(frame)


def _is_debugger(frame: FrameType) -> bool:
    found: FrameType | None = frame
    while found is not None:
        parts = found.f_code.co_filename.split(os.sep)
        if any(part in _DEBUGGERS for part in parts):
            return True
        found = found.f_back
    return False


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
        self._terminal = -1
        self._kept: list[int] = []
        """This rank's own standard streams, while it has the terminal in their place."""
        self._is_denied = False
        self.quits = False
        ask_at_breakpoints(self.acquire)

    @property
    def is_held(self) -> bool:
        """Whether this rank has the terminal now."""
        return bool(self._kept)

    def acquire(self) -> bool:
        """Use the terminal as standard streams; return whether it was granted."""
        if not self.is_held and not self._is_denied:
            self._channel.send(AcquireTerminal())
            path = self._channel.receive()
            self._is_denied = path is None
            if path is not None:
                try:
                    self._terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
                except OSError:  # its path does not exist here
                    self._channel.send(ReleaseTerminal(self.quits))
                    self._is_denied = True
                else:
                    self._kept = [os.dup(fd) for fd in range(3)]
        if self.is_held:
            self._replace_streams([self._terminal] * 3)  # also if other files have replaced it
        return self.is_held

    def release(self) -> None:
        """Restore this rank's own standard streams; the next call may acquire it again."""
        self._is_denied = False
        if self.is_held:
            self._replace_streams(self._kept)
            for fd in (self._terminal, *self._kept):
                os.close(fd)
            self._kept = []
            self._channel.send(ReleaseTerminal(self.quits))

    def _replace_streams(self, by: Sequence[int]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a closed one
                stream.flush()
        for fd, other in enumerate(by):
            os.dup2(other, fd)
