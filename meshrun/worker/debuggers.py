"""Debuggers in a rank: Ctrl-C in the debugged rank, breakpoints without stdin."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

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


@contextmanager
def on_terminal(path: str) -> Iterator[Callable[[], None]]:
    """Use a terminal as standard input, output and error while the block runs.

    Yields:
        A function that restores the terminal if other files have replaced it meanwhile.

    Raises:
        OSError: If the terminal cannot be opened.
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
