"""How this process ends: with a code, or by a signal."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_at_end: list[Callable[[int], None]] = []


def call_at_end(function: Callable[[int], None]) -> None:
    """Call a function with the exit code of this process when it ends, even by a signal."""
    _at_end.append(function)


def end_with(code: int) -> NoReturn:
    """Exit with a code."""
    _announce_end(code)
    sys.exit(code)


def _announce_end(code: int) -> None:
    while _at_end:
        _at_end.pop()(code)


def end_as(returncode: int) -> int:
    """End by signal n for -n, as ``subprocess`` writes it; otherwise return the exit code."""
    return returncode if returncode >= 0 else end_by_signal(-returncode)


def end_by_signal(signum: int) -> int:
    """End by a signal, so that the shell sees what ended this process.

    Returns:
        The exit code to use instead in PID 1 of a container, which its own signals do not end.
    """
    atexit._run_exitfuncs()  # a signal skips them
    sys.stdout.flush()
    sys.stderr.flush()
    code = 128 + signum
    _announce_end(code)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    return code
