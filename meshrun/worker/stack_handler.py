"""A rank's part in showing its stack: ``faulthandler`` writes to a file of the launcher.

Its handlers run at once, in C, whatever a rank waits for, and cost nothing until then.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource

from meshrun.protocol.stacks import STACK_SIGNAL

_told: list[int] = []
"""The descriptor that a crash is written to, if it is ours."""
_HIGH_FD = 500
"""Programs that close what they find (``os.closerange``) begin below."""


def tell_stacks(fd: int) -> None:
    """Write all stacks to ``fd`` when asked for, and when native code crashes; closes ``fd``.

    A program whose own ``faulthandler`` is on keeps it.
    """
    high = keep_high(fd)
    if hasattr(faulthandler, "register"):  # not on Windows
        try:
            faulthandler.register(STACK_SIGNAL, file=high, all_threads=True)
        except (OSError, RuntimeError, ValueError):  # no such signal (macOS): no stacks then
            pass
    if _told or not faulthandler.is_enabled():
        faulthandler.enable(file=high, all_threads=True)
        while _told:  # that of the process which was forked
            os.close(_told.pop())
        _told.append(high)


def keep_high(fd: int) -> int:
    """Move a descriptor to where programs do not close what they find, nor inherit it."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = _HIGH_FD if soft == resource.RLIM_INFINITY or soft > _HIGH_FD else 3
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(fd)
    return high
