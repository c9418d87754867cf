"""Messages between a program and the ranks that serve its calls, over a Unix socket."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from meshrun.host.network import peer_of

_HEAD = struct.Struct("!Q")
_READ_BYTES = 1 << 20
_LONGEST_PATH = 100
"""Of a socket, in bytes; the kernel's limit is 107."""


class CallBegun(Struct, frozen=True):
    """From a rank that has received a request: from now on, SIGINT interrupts it.

    Also from one that was interrupted to no effect.
    """


class TimeLimit(Struct, frozen=True):
    """From a rank that is about to answer: how long it may take from now."""

    seconds: float | None


class CallDone(Struct, frozen=True):
    """From a rank: what its call has returned or raised."""

    value: bytes | None = None
    """The pickled value; ``None`` if it raised."""
    traceback: str = ""
    error: bytes = b""
    """The result of ``pickle_error()``, if it raised."""
    headline: str = ""
    """The exception in one line."""

    @property
    def has_failed(self) -> bool:
        """Whether others may wait for this rank forever."""
        return self.value is None


class Channel:
    """One end of the connection; a message is any object that can be pickled."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._arrived = bytearray()
        """The part of the next message, or of its length, that has arrived."""
        self._size: int | None = None
        """The length of the next message, if that has arrived."""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send a message whole.

        Raises:
            OSError: If the other end is gone.
        """
        self._socket.sendall(packed(message))

    def send_now(self, data: memoryview) -> memoryview:
        """Send as much of a packed message as the other end takes now; return the rest.

        Raises:
            OSError: If the other end is gone.
        """
        with contextlib.suppress(BlockingIOError):
            return data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        return data

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            EOFError: If the other end is gone.
        """
        while (data := self._receive_part(0)) is None:
            pass
        return pickle.loads(data)  # noqa: S301 - from a process of this user

    def receive_now(self) -> Any:
        """Take what has arrived; return a message once it is complete, until then ``None``.

        Raises:
            EOFError: If the other end is gone.
        """
        data = self._receive_part(socket.MSG_DONTWAIT)
        return None if data is None else pickle.loads(data)  # noqa: S301 - as above

    def close(self) -> None:
        """Close this end; the other end's :meth:`receive` raises ``EOFError``."""
        self._socket.close()

    def hang_up(self) -> None:
        """End the connection for both ends, even while a thread waits on it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive_part(self, flags: int) -> bytes | None:
        size = _HEAD.size if self._size is None else self._size
        try:
            data = self._socket.recv(min(size - len(self._arrived), _READ_BYTES), flags)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._arrived += data
        if len(self._arrived) < size:
            return None
        arrived, self._arrived = bytes(self._arrived), bytearray()
        if self._size is not None:
            self._size = None
            return arrived
        (self._size,) = _HEAD.unpack(arrived)
        return None


def packed(message: object) -> memoryview:
    """Return a message as it is sent."""
    data = pickle.dumps(message)
    return memoryview(_HEAD.pack(len(data)) + data)


def listen_in(folder: str) -> socket.socket:
    """Return a socket to which the ranks of a launch connect."""
    listener = socket.socket(socket.AF_UNIX)
    with _short_path(folder) as path:
        listener.bind(path)
    listener.listen(128)
    return listener


def accept(listener: socket.socket) -> Channel | None:
    """Return the channel to a rank; ``None`` if it is another user's process."""
    end, _ = listener.accept()
    return _checked(end)


def connect_in(folder: str) -> Channel:
    """Return a rank's channel to the program that started it.

    Raises:
        PermissionError: If another user listens there.
        OSError: If nobody does.
    """
    end = socket.socket(socket.AF_UNIX)
    with _short_path(folder) as path:
        end.connect(path)
    channel = _checked(end)
    if channel is None:
        raise PermissionError(f"`{folder}` is used by another user")
    return channel


def _checked(end: socket.socket) -> Channel | None:
    """Return the channel, or ``None`` if the peer, which may run code here, is another user's."""
    peer = peer_of(end)
    if peer is not None and peer[1] != os.geteuid():
        end.close()
        return None
    return Channel(end)


@contextlib.contextmanager
def _short_path(folder: str) -> Iterator[str]:
    """Yield a path of the socket that is short enough for the kernel, wherever the folder is."""
    path = os.path.join(folder, "calls")
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/calls"
    finally:
        os.close(opened)
