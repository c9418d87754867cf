"""Stack dumps of a rank: ``faulthandler`` writes them to a file of the launcher.

Its handlers run at once, in C, whatever the rank waits for, and cost nothing until then. On
request, they write only the stack of the thread that they interrupt, the main one: a dump that
follows the frames of another thread while it runs kills the process (one request in five, in
Python 3.11 with a busy thread). :mod:`meshrun.worker.answer_requests` writes those of all threads.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource
from contextlib import suppress

from meshrun.protocol.stacks import STACK_SIGNAL

_crash_fds: list[int] = []
"""The descriptor to which a crash is written, if it is ours."""
_HIGH_FD = 500
"""Above the descriptors that programs close in a loop, or open after they have closed all."""


def enable_stack_dumps(fd: int) -> int:
    """Write a stack to ``fd`` on request, and all of them when native code crashes.

    A program whose own ``faulthandler`` is on keeps it.

    Returns:
        The descriptor in place of ``fd``, which is closed.
    """
    high = keep_high(fd)
    with suppress(OSError, RuntimeError, ValueError):  # no such signal (macOS): no stacks then
        faulthandler.register(STACK_SIGNAL, file=high, all_threads=False)
        os.write(high, b"\n")  # for a launcher that cannot ask the kernel whether we listen
    if _crash_fds or not faulthandler.is_enabled():
        faulthandler.enable(file=high, all_threads=True)
        while _crash_fds:  # inherited from the process that was forked
            os.close(_crash_fds.pop())
        _crash_fds.append(high)
    return high


def keep_high(fd: int) -> int:
    """Move a descriptor above those that programs close in a loop; programs do not inherit it."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = _HIGH_FD if soft == resource.RLIM_INFINITY else min(_HIGH_FD, soft // 2)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(fd)
    return high
