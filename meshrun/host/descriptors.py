"""Descriptors: standard streams and messages on them, buffers, and the limit of open files."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeGuard

from meshrun.errors import HostError
from meshrun.host.reactor import Reactor

if TYPE_CHECKING:
    pass

_MFD_CLOEXEC = 1
_MANY = 65536
_USUAL = 1024
"""The usual limit of open files in a shell."""


def open_standard_streams() -> None:
    """Open the null device in place of stdin, stdout and stderr where they are closed.

    Otherwise, a pipe of ours would get the free number, and ranks would write into it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `fd`
            os.set_inheritable(fd, True)


def empty_stdin() -> None:
    """Have stdin end at once."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def read_now(fd: int, most: int) -> bytes | None:
    """Return what can be read without waiting; ``b""`` at the end, ``None`` for nothing yet."""
    try:
        return os.read(fd, most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


@contextmanager
def without_output(*fds: int) -> Iterator[None]:
    """Discard what is written to descriptors during the block."""
    kept = {fd: os.dup(fd) for fd in fds}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in fds:
        os.dup2(nowhere, fd)
    os.close(nowhere)
    try:
        yield
    finally:
        for fd, original in kept.items():
            os.dup2(original, fd)
            os.close(original)


def unnamed_file(name: str) -> int:
    """Return the descriptor of a new file without a path, in memory if possible."""
    # Unlike the C library, conda's Python has no such function.
    create = getattr(ctypes.CDLL(None), "memfd_create", None)
    if create is not None and (found := create(name.encode(), _MFD_CLOEXEC)) >= 0:
        return int(found)
    import tempfile  # on macOS, or in a sandbox

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def close_file(fd: int) -> None:
    """Close a file, whatever a network file system reports of what was written to it before."""
    with suppress(OSError):
        os.close(fd)


class LostOutputError(OSError):
    """A standard stream cannot be written, for any reason but a pipe without a reader."""


def is_lost_output(error: Exception) -> TypeGuard[OSError]:
    """Return whether a standard stream cannot be written, or another open file: disk full."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return is_full or isinstance(error, LostOutputError)


def allow_descriptors(count: int) -> None:
    """Raise this process's soft limit so that ``count`` descriptors can be open.

    Raises:
        HostError: If the hard limit is lower, or may not be changed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    except ValueError as error:  # above the hard limit, or refused by a seccomp profile
        limit = hard if hard != resource.RLIM_INFINITY and hard < count else soft
        raise HostError(
            f"this launch needs {count} open files, but the limit is {limit}",
            hint=f"raise it with `ulimit -n {max(count, _USUAL)}`, or start fewer ranks",
        ) from error


def allow_many_descriptors() -> None:
    """Raise this process's soft limit as far as allowed, up to a generous maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY if hard == resource.RLIM_INFINITY else min(hard, _MANY)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError):  # refused by a seccomp profile
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, like an interactive shell."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class WriteBuffer:
    """A queue in front of a descriptor that nothing else writes to.

    Args:
        fd: The descriptor, which the caller owns; it becomes non-blocking.
        reactor: Waits for room while data is queued.
        done: Called once all data is written, or none can be.
    """

    def __init__(
        self, fd: int, reactor: Reactor, done: Callable[[], object] = lambda: None
    ) -> None:
        self._fd, self._reactor, self._done = fd, reactor, done
        self._queue = bytearray()
        self.is_broken = False
        """Whether the other end is closed."""
        self.is_reset = False
        """Whether a connection was reset or aborted: the kernel tells the writer or the reader."""
        os.set_blocking(fd, False)

    @property
    def queued_bytes(self) -> int:
        """The number of queued bytes."""
        return len(self._queue)

    def move(self, reactor: Reactor, done: Callable[[], object]) -> None:
        """Have another reactor wait for room, and call another function at the end."""
        self._reactor.remove_writer(self._fd)
        self._reactor, self._done = reactor, done
        self._flush()

    def close(self) -> None:
        """Drop the queue, and accept no more data."""
        self.is_broken = True
        self._queue.clear()
        self._reactor.remove_writer(self._fd)

    def write(self, data: bytes) -> None:
        """Queue ``data``, and write as much as the pipe takes."""
        if not self.is_broken:
            self._queue += data
            self._flush()

    def _flush(self) -> None:
        try:
            while self._queue:
                del self._queue[: os.write(self._fd, self._queue)]
        except BlockingIOError:
            self._reactor.add_writer(self._fd, self._flush)
        except OSError as error:
            self.is_reset = not isinstance(error, BrokenPipeError)
            self.close()
            self._done()
        else:
            self._reactor.remove_writer(self._fd)
            self._done()
