"""Notices when files grow, without polling where the system supports it (inotify)."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Generic, TypeVar

_IN_MODIFY = 0x002
_IN_ONESHOT = 0x80000000
_HEAD = struct.Struct("iIII")
_Key = TypeVar("_Key")
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class WriteNotices(Generic[_Key]):
    """Tells once of each file that it was written to; then it has to be armed again.

    A writer of many lines so costs one notice for all that is read at once.
    """

    def __init__(self) -> None:
        self._fd = -1
        if _LIBC is not None:
            # May fail: a user has 128 of them by default (fs.inotify.max_user_instances).
            self._fd = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._keys: dict[int, _Key] = {}

    def fileno(self) -> int:
        """The descriptor to wait for; negative where the system cannot tell."""
        return self._fd

    def arm(self, fd: int, key: _Key) -> bool:
        """Tell of the next write to an open file; what was written before must be looked for.

        Returns:
            Whether a notice will come; otherwise the file has to be looked at from time to time.
        """
        if self._fd < 0 or _LIBC is None:
            return False
        path = b"/proc/self/fd/%d" % fd
        watch = _LIBC.inotify_add_watch(self._fd, path, _IN_MODIFY | _IN_ONESHOT)
        if watch >= 0:
            self._keys[watch] = key
        return bool(watch >= 0)

    def written(self) -> list[_Key]:
        """Return the keys of files that were written to since they were armed."""
        try:
            data = os.read(self._fd, 64 * 1024)
        except BlockingIOError:
            return []
        keys = []
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
