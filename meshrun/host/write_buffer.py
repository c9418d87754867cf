"""Buffers bytes for a pipe or a connection that must never block its writer."""

from __future__ import annotations

import os
from collections.abc import Callable

from meshrun.host.reactor import Reactor


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
