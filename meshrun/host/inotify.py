"""Notification of writes to files, without polling if the system supports it (inotify)."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Generic, TypeVar

from meshrun.host.descriptors import read_now

_IN_MODIFY = 0x002
_IN_ONESHOT = 0x80000000
_HEAD = struct.Struct("iIII")
_Key = TypeVar("_Key")
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class WriteNotices(Generic[_Key]):
    """One-time notices of writes to files, to be armed again after each notice.

    Thus many small writes cost only one notice per read.
    """

    def __init__(self) -> None:
        self._fd = -1
        if _LIBC is not None:
            # May fail: a user has 128 of them by default (fs.inotify.max_user_instances).
            self._fd = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._keys: dict[int, _Key] = {}

    def fileno(self) -> int:
        """Return the descriptor to wait for; negative if the system does not support notices."""
        return self._fd

    def arm(self, fd: int, key: _Key) -> bool:
        """Request a notice of the next write to an open file; check for earlier writes yourself.

        Returns:
            Whether there will be a notice; if not, the file must be polled.
        """
        if self._fd < 0 or _LIBC is None:
            return False
        path = b"/proc/self/fd/%d" % fd
        watch = _LIBC.inotify_add_watch(self._fd, path, _IN_MODIFY | _IN_ONESHOT)
        if watch >= 0:
            self._keys[watch] = key
        return bool(watch >= 0)

    def disarm(self, key: _Key) -> None:
        """Withdraw the request for a notice, which would outlive the open file in the kernel."""
        for watch in [watch for watch, armed in self._keys.items() if armed is key]:
            del self._keys[watch]
            if _LIBC is not None:
                _LIBC.inotify_rm_watch(self._fd, watch)

    def written(self) -> list[_Key]:
        """Return the keys of files that have been written to since they were armed."""
        data, keys = read_now(self._fd, 64 * 1024) or b"", []
        position = 0
        while position < len(data):
            watch, _, _, length = _HEAD.unpack_from(data, position)
            position += _HEAD.size + length
            if watch in self._keys:
                keys.append(self._keys.pop(watch))
        return keys

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
