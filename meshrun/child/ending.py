"""How a rank ends: with the program's own status, every time, and without tearing torch down.

Python's finalisation runs in full (threads joined, atexit, the program's own objects freed and
its files flushed). What was imported before the fork is left standing, and the process leaves
before C++ destroys its statics, which is where process groups that a program still holds abort
("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys

_KEPT: list[object] = []
_KEEP_OUT = frozenset({"__main__", "sys", "builtins"})


class Ending:
    """Registered before anything else is imported, so that its part of the end comes last."""

    def __init__(self) -> None:
        self._standing: frozenset[str] = frozenset()
        atexit.register(self._leave_standing)

    def arrange(self) -> None:
        """In a rank, before the program runs: note what is imported and prepare to leave.

        ``MESHRUN_FULL_EXIT=1`` keeps the C library's exit handlers, for tools that need theirs.
        """
        if os.environ.get("MESHRUN_FULL_EXIT", "0") not in ("", "0"):
            return
        self._standing = frozenset(sys.modules) - _KEEP_OUT
        _leave_before_statics()

    def _leave_standing(self) -> None:
        for name in self._standing:
            _KEPT.append(sys.modules.pop(name, None))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))


def _leave_before_statics() -> None:
    """Have ``exit()`` flush C's streams and then leave with the status it was given.

    Source:
        on_exit(3), glibc: handlers get the exit status and run in reverse order, before the
        destructors of libraries that were loaded earlier. Where it is missing the C library's
        own order holds.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)
