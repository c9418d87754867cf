"""Debuggers inside a rank: Ctrl-C of the debugged rank, breakpoints without stdin."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from meshrun.worker.when_imported import when_imported

_DEBUGGERS = ("pdb.py", "bdb.py", "cmd.py", "code.py", "IPython", "prompt_toolkit")


def stop_on_interrupt() -> None:
    """Make Ctrl-C stop the rank that has the terminal in pdb."""
    signal.signal(signal.SIGINT, _stop_here)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines, as python does on a terminal
            stream.reconfigure(line_buffering=True, write_through=False)


def leave_interrupts() -> None:
    """Keep pdb from taking SIGINT once a breakpoint is over: Ctrl-C ends a launch, or a call."""
    when_imported("pdb", _refuse_interrupts)


def _refuse_interrupts() -> None:
    pdb: Any = sys.modules["pdb"]
    pdb.Pdb.nosigint = property(lambda _: True, lambda *_: None)


@contextmanager
def on_terminal(path: str) -> Iterator[Callable[[], None]]:
    """Have a terminal for standard input, output and errors while the block runs.

    Yields:
        What to call if somebody has put other files into their place meanwhile.

    Raises:
        OSError: If it cannot be opened.
    """
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    kept = [os.dup(fd) for fd in range(3)]

    def use() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a closed one
                stream.flush()
        for fd in range(3):
            os.dup2(terminal, fd)

    try:
        use()
        yield use
    finally:
        use()
        for fd, before in enumerate(kept):
            os.dup2(before, fd)
        for fd in (terminal, *kept):
            os.close(fd)


class _Breakpoints:
    """What ``pdb`` does at a breakpoint in a rank that has no terminal of its own."""

    def __init__(self) -> None:
        self.asks: Callable[[], bool] | None = None
        """Asks for a terminal; whether there is one."""
        self.passed: Callable[[], None] = lambda: None
        """Called where it continues instead."""

    def patch(self) -> None:
        """Have pdb ask, or continue, where it would read from stdin.

        A debugger that has streams of its own, such as a remote one, stops as always.
        """
        pdb: Any = sys.modules["pdb"]
        set_trace = pdb.Pdb.set_trace

        def stop_or_pass(debugger: Any, frame: FrameType | None = None, **kwargs: Any) -> None:
            if debugger.stdin is not sys.__stdin__ or (self.asks is not None and self.asks()):
                set_trace(debugger, frame or sys._getframe(1), **kwargs)
            elif self.asks is None:
                self.passed()

        pdb.Pdb.set_trace = stop_or_pass


_breakpoints = _Breakpoints()
_will_patch = False


def pass_breakpoints(passed: Callable[[], None]) -> None:
    """Let a rank without stdin continue where pdb would read from it."""
    _breakpoints.passed = passed
    _patch_once()


def ask_at_breakpoints(asks: Callable[[], bool]) -> None:
    """Let a rank continue where pdb would read from stdin, unless it is given a terminal."""
    _breakpoints.asks = asks
    _patch_once()


@contextmanager
def passing_breakpoints() -> Iterator[None]:
    """Let a rank that asks for a terminal continue at breakpoints while the block runs."""
    asks, _breakpoints.asks = _breakpoints.asks, lambda: False
    try:
        yield
    finally:
        _breakpoints.asks = asks


def _patch_once() -> None:
    global _will_patch  # noqa: PLW0603 - as pdb is one for the whole process
    if not _will_patch:
        _will_patch = True
        when_imported("pdb", _breakpoints.patch)  # importing it takes 20 ms


def _stop_here(signum: int, frame: FrameType | None) -> None:
    """Stop the program where it is; at the prompt of a debugger, leave it to that."""
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
