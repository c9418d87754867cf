"""What ``--debug-rank`` changes in a rank's own process."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import Literal

Where = Literal["", "here", "elsewhere"]
_DEBUGGERS = ("pdb.py", "bdb.py", "cmd.py", "code.py", "IPython", "prompt_toolkit")


def prepare(where: str) -> None:
    """Make Ctrl-C stop the debugged rank in pdb, and let the others pass their breakpoints.

    ``breakpoint()`` in the others does nothing by the variable ``PYTHONBREAKPOINT``.
    """
    if where == "here":
        signal.signal(signal.SIGINT, _stop_here)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # whole lines, as python does on a terminal
                stream.reconfigure(line_buffering=True, write_through=False)
    elif where == "elsewhere":
        import pdb

        pdb.set_trace = _go_on


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


def _go_on(*_: object, **__: object) -> None:
    """Stand in for pdb.set_trace() where there is no terminal."""
