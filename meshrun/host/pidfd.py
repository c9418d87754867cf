"""Descriptors of processes, which never refer to another process (pidfd_open(2)).

Source:
    Linux 5.3; ``include/uapi/asm-generic/unistd.h`` for the numbers of the system calls, which all
    architectures share. Python has no functions for them if it was built for an older system, as
    conda's is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import sys

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_SEND_SIGNAL, _OPEN = 424, 434


def open_pidfd(pid: int) -> int:
    """Return a descriptor of a process, which becomes readable when the process ends.

    Raises:
        OSError: If there is no such process, or the system or a sandbox has no such descriptors.
    """
    return _call(_OPEN, pid, 0)


def send_signal_to(pidfd: int, signum: int) -> None:
    """Send a signal to a process.

    Raises:
        OSError: If it has ended, or this user may not signal it.
    """
    _call(_SEND_SIGNAL, pidfd, signum, None, 0)


def has_ended(pidfd: int, *, within_s: int = 0) -> bool:
    """Return whether a process has ended, or ends within this time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _call(number: int, *arguments: int | None) -> int:
    if _LIBC is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    found: int = _LIBC.syscall(number, *arguments)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
