"""One of our own output streams, written without blocking the loop."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections import deque

from meshrun.host.stderr import is_terminal

_MOST_BYTES_A_WRITE = 256 * 1024
_PIPE_BYTES = 1024 * 1024
"""The requested size of a pipe: with a small one, reader and writer often wait for each other."""
LAST_WORDS_TAKE_S = 2.0
"""How long readers may take to read the rest of the output after a launch was stopped."""


class Outlet:
    """A queue of bytes before a descriptor whose reader may be slow or gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: deque[memoryview] = deque()
        self.queued_bytes = 0
        self.error: OSError | None = None
        """Why nothing can be written, or ``None``; a regular file is tried again at each write."""
        self.lost_bytes = 0
        """Bytes that could not be written because of errors."""
        self._is_in_line = False
        self.is_terminal = is_terminal(fd)
        self.moves_cursor = self.is_terminal and os.environ.get("TERM", "") not in {"", "dumb"}
        """Whether it is a terminal that understands escape sequences."""
        mode = os.fstat(fd).st_mode
        self._socket: socket.socket | None = None
        self._write_fd = fd
        self.needs_select = not stat.S_ISREG(mode)
        """Whether to wait for the descriptor; a regular file is always ready."""
        self._chunk_bytes = _MOST_BYTES_A_WRITE
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
        elif self.needs_select:
            self._write_fd = self._reopen_nonblocking()
            if stat.S_ISFIFO(mode):
                # The system may refuse this user, or cannot do it (macOS).
                with contextlib.suppress(AttributeError, OSError):
                    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._write_fd

    @property
    def window(self) -> os.terminal_size | None:
        """Columns and lines of the terminal; ``None`` for anything else."""
        try:
            return os.get_terminal_size(self._fd) if self.is_terminal else None
        except OSError:
            return None

    def write(self, data: bytes) -> None:
        """Queue ``data`` and write as much as possible at once."""
        if not data or (self.error is not None and self.needs_select):
            return
        if self.error is not None and not self._has_room_again():
            self.lost_bytes += len(data)
            return
        self._queue.append(memoryview(data))
        self.queued_bytes += len(data)
        if len(self._queue) == 1:
            self.flush()

    def flush(self) -> None:
        """Write what the reader takes now; set ``error`` if it will never take more."""
        while self._queue and self.error is None:
            data = self._queue[0]
            try:
                written = self._write_some(data[: self._chunk_bytes])
            except BlockingIOError:
                return
            except OSError as error:
                self.error = error
                self.lost_bytes += self.drop()
                return
            self._is_in_line = data[written - 1] != ord("\n")
            self.queued_bytes -= written
            if written == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = data[written:]
            if self.needs_select and self._socket is None and self._write_fd == self._fd:
                return  # the next write could block

    def _has_room_again(self) -> bool:
        """Return whether a disk that was full takes data again; then, end the line that was cut."""
        try:
            if self._is_in_line:
                self._write_some(memoryview(b"\n"))
        except OSError as error:
            self.error = error
            return False
        self._is_in_line, self.error = False, None
        return True

    def drop(self) -> int:
        """Discard what the reader has not taken; return the number of bytes."""
        dropped = self.queued_bytes
        self._queue.clear()
        self.queued_bytes = 0
        return dropped

    def _write_some(self, data: memoryview) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        return os.write(self._write_fd, data)

    def _reopen_nonblocking(self) -> int:
        """Return a non-blocking descriptor of the same pipe or terminal.

        O_NONBLOCK on the inherited one would also affect the shell and every other holder. Where it
        cannot be reopened, each write is small and comes after a wait for the descriptor.
        """
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            self._chunk_bytes = 512
            return self._fd


def is_reader_gone(error: OSError) -> bool:
    """Return whether an error means that the reader of a pipe has closed it, as ``| head`` does."""
    return error.errno in (errno.EPIPE, errno.ECONNRESET)


def last_read_s(stopped_s: float, ended_s: float, shutdown_timeout_s: float) -> float:
    """Return until when readers of a stopped launch may read, whose ranks have ended."""
    last_words_s = min(shutdown_timeout_s, LAST_WORDS_TAKE_S)
    return max(stopped_s + shutdown_timeout_s, ended_s + last_words_s)
