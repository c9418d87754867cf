"""Errors of the operating system that mean this machine lacks something."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from meshrun.errors import HostError

TOO_FEW_PROCESSES = (
    "check `ulimit -u`, pids.max of the cgroup, and `free -h`: processes or memory may have run out"
)
"""What to try if no process can be started."""
_MEMORY = "check `free -h`, `ulimit -v`, and the memory limit of the cgroup"
_DISK = "free some space, or set TMPDIR to a folder with free space"
_HINTS = {
    errno.EMFILE: "raise the limit with `ulimit -n`, which is {files}",
    errno.ENFILE: "see /proc/sys/fs/file-nr: this machine has too many files open",
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
    errno.EAGAIN: "check `ulimit -u` and pids.max of the cgroup",
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EIO: "see `dmesg`: a disk or a network file system may have failed",
    errno.EROFS: "set TMPDIR to a writable folder",
    errno.ESTALE: "a network file system was replaced: start again in a new shell",
}
"""What to try for each error number; the limit on open files in place of ``{files}``."""
REFUSED = (
    "see the seccomp profile of the container, or SystemCallFilter= of the systemd service, which"
    " may forbid a system call"
)
"""What to try if a system call is refused that needs no permission."""


def hint_for(number: int | None) -> str | None:
    """Return what to try for an error number, if it means that this machine lacks something."""
    hint = _HINTS.get(number or 0)
    return hint and hint.format(files=resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def describe_shortage(error: BaseException) -> HostError | None:
    """Return what this machine lacks, if that is why ``error`` was raised; else ``None``."""
    if isinstance(error, MemoryError):
        return HostError("this machine is out of memory", hint=_MEMORY)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return HostError("cannot start a thread", hint=_HINTS[errno.EAGAIN])
    path, number = None, None
    if isinstance(error, OSError):
        path, number = error.filename, error.errno
    elif isinstance(error, ImportError):
        path, number = error.path, _number_in(str(error))
    is_refused = number in (errno.EPERM, errno.ENOSYS) and path is None
    hint = REFUSED if is_refused else hint_for(number)
    if number is None or hint is None:
        return None
    what = "the operating system refused what meshrun needs"
    if isinstance(path, str | bytes):
        what = f"cannot use `{os.fsdecode(path)}`"
    return HostError(f"{what}: {os.strerror(number)}", hint=hint)


def _number_in(text: str) -> int | None:
    """Return the number of the error in a message of dlopen(), which only describes it."""
    if text.endswith("failed to map segment from shared object"):
        return errno.ENOMEM
    return next((number for number in _HINTS if text.endswith(f": {os.strerror(number)}")), None)


@contextmanager
def reporting_shortages() -> Iterator[None]:
    """Report an error of the block that means that this machine lacks something as such.

    Raises:
        HostError: In place of such an error.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if (shortage := describe_shortage(error)) is None:
            raise
        raise shortage from error
