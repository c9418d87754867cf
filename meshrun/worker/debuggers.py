"""Debuggers inside a rank: Ctrl-C of the debugged rank, breakpoints without stdin."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


@contextmanager
def on_terminal(path: str) -> Iterator[None]:
    """Have a terminal for standard input, output and errors while the block runs.

    Raises:
        OSError: If it cannot be opened.
    """
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    kept = [os.dup(fd) for fd in range(3)]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for fd in range(3):
            os.dup2(terminal, fd)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, before in enumerate(kept):
            os.dup2(before, fd)
        for fd in (terminal, *kept):
            os.close(fd)


def pass_breakpoints(passed: Callable[[], None]) -> None:
    """Let a rank without stdin continue where pdb would read from it.

    A debugger that has streams of its own, such as a remote one, stops as always.
    """
    when_imported("pdb", partial(_pass_in_pdb, passed))  # importing it takes 20 ms


def _pass_in_pdb(passed: Callable[[], None]) -> None:
    pdb: Any = sys.modules["pdb"]
    set_trace = pdb.Pdb.set_trace

    def stop_or_pass(self: Any, frame: FrameType | None = None, **kwargs: Any) -> None:
        if self.stdin is sys.__stdin__:
            passed()
        else:
            set_trace(self, frame or sys._getframe(1), **kwargs)

    pdb.Pdb.set_trace = stop_or_pass


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
