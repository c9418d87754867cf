"""Stack dumps of a rank: ``faulthandler`` writes them to a file of the launcher.

A dump that follows frames while their thread runs kills the process: one request in five, in Python
3.11 with a busy thread; one in twenty in 3.13.0, by a busy main thread of itself. So stacks are
written by whoever has the interpreter's lock: a handler in Python, or the thread of
:mod:`meshrun.worker.answer_requests`. If neither answers, as native code keeps the lock or does not
return, a handler in C writes the stack of the main thread.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource
import signal
from contextlib import suppress

from meshrun.host.descriptors import unnamed_file
from meshrun.protocol.stacks import MAIN_STACK_SIGNAL, STACKS_SIGNAL, mark_answer

_crash_fds: list[int] = []
"""The descriptor to which a crash is written, if it is ours."""
_HIGH_FD = 500
"""Above the descriptors that programs close in a loop, or open after they have closed all."""


def enable_stack_dumps(fd: int) -> int:
    """Write stacks to ``fd`` on request and when native code crashes; call it in the main thread.

    A program whose own ``faulthandler`` is on keeps it.

    Returns:
        The descriptor in place of ``fd``, which is closed.
    """
    high = keep_high(fd)
    with suppress(OSError, RuntimeError, ValueError):  # no such signal (macOS): no stacks then
        faulthandler.register(MAIN_STACK_SIGNAL, file=high, all_threads=False)
        signal.signal(STACKS_SIGNAL, lambda *_: write_stacks(high))
        signal.siginterrupt(STACKS_SIGNAL, False)
        os.write(high, b"\n")  # for a launcher that cannot ask the kernel whether we listen
    if _crash_fds or not faulthandler.is_enabled():
        faulthandler.enable(file=high, all_threads=True)
        while _crash_fds:  # inherited from the process that was forked
            os.close(_crash_fds.pop())
        _crash_fds.append(high)
    return high


def write_stacks(fd: int) -> None:
    """Write the stacks of all threads, none of which runs meanwhile, at once."""
    with suppress(OSError):  # the program has closed it
        own = unnamed_file("meshrun-stacks")
        try:
            faulthandler.dump_traceback(own, all_threads=True)
            os.write(fd, mark_answer(os.pread(own, os.fstat(own).st_size, 0)))
        finally:
            os.close(own)


def keep_high(fd: int) -> int:
    """Move a descriptor above those that programs close in a loop; programs do not inherit it."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = _HIGH_FD if soft == resource.RLIM_INFINITY else min(_HIGH_FD, soft // 2)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(fd)
    return high
