"""Buffers bytes for a pipe that must never block its writer."""

from __future__ import annotations

import os


class WriteBuffer:
    """A queue in front of a descriptor that nobody else writes to.

    Args:
        fd: Owned by the caller; made non-blocking here.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue = bytearray()
        self.is_broken = False
        """Whether the other end has closed the pipe."""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._fd

    @property
    def queued_bytes(self) -> int:
        """How much waits."""
        return len(self._queue)

    def close(self) -> None:
        """Drop what is buffered, and accept no more."""
        self.is_broken = True
        self._queue.clear()

    def write(self, data: bytes) -> None:
        """Queue ``data`` and write as much as goes at once."""
        if not self.is_broken:
            self._queue += data
            self.flush()

    def flush(self) -> None:
        """Write what there is room for."""
        try:
            while self._queue:
                del self._queue[: os.write(self._fd, self._queue)]
        except BlockingIOError:
            return
        except OSError:
            self.close()
