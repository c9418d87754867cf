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
import functools
import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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
    with suppress(OSError, RuntimeError, ValueError):  # no stacks then
        _handle_requests(high)
        os.write(high, b"\n")  # for a launcher that cannot ask the kernel whether we listen
    if _crash_fds or not faulthandler.is_enabled():
        faulthandler.enable(file=high, all_threads=True)
        while _crash_fds:  # inherited from the process that was forked
            os.close(_crash_fds.pop())
        _crash_fds.append(high)
    return high


def _handle_requests(fd: int) -> None:
    faulthandler.register(MAIN_STACK_SIGNAL, file=fd, all_threads=False)
    signal.signal(STACKS_SIGNAL, lambda *_: write_stacks(fd))
    signal.siginterrupt(STACKS_SIGNAL, False)


def ignore_requests_on_exec(fd: int) -> None:
    """Have this process ignore requests from the moment at which it runs another program.

    An exec keeps pending signals and resets their handlers, so that a request would end the
    program, unless it is ignored.

    Args:
        fd: Where stacks are written if the exec fails.
    """
    pid = os.getpid()
    for name in ("execv", "execve"):
        setattr(os, name, _ignoring(getattr(os, name), pid, fd))


def _ignoring(execute: Callable[..., object], pid: int, fd: int) -> Callable[..., object]:
    @functools.wraps(execute)
    def around(*args: Any, **kwargs: Any) -> object:
        is_ours = os.getpid() == pid and threading.current_thread() is threading.main_thread()
        if is_ours:
            with suppress(OSError, ValueError):  # no such signal
                signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
                signal.signal(MAIN_STACK_SIGNAL, signal.SIG_IGN)
        try:
            return execute(*args, **kwargs)
        finally:
            if is_ours:
                with suppress(OSError, RuntimeError, ValueError):
                    faulthandler.unregister(MAIN_STACK_SIGNAL)
                    _handle_requests(fd)

    return around


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
