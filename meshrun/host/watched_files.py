"""Detection of files whose contents have changed."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import time
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.util import cache_from_source
from types import SimpleNamespace
from typing import Any

_LOOK_MS = 1000
"""How often to check files without notification, such as those on a network file system."""
_QUIET_MS = 100
"""How long a burst of writes must have paused to count as ended."""


_Content = tuple[tuple[int, ...], bytes]
"""Metadata that change with each write, and a digest of the contents; empty without a file."""
_OTHER: _Content = ((0,), b"other")
"""A value that differs from that of any file."""


class WatchedFiles:
    """A growing set of files with their contents.

    ``watchfiles`` only wakes us: the contents decide what has changed, so that rewriting a file
    unchanged or replacing its folder has no effect.
    """

    def __init__(self) -> None:
        self._contents: dict[str, _Content] = {}

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._contents)

    def add(self, path: str, mtime_ns: int | None = None) -> None:
        """Add a file; it counts as changed if it was modified since ``mtime_ns``."""
        if path in self._contents:
            return
        stamp, content = _read(path)
        is_unchanged = mtime_ns is None or (stamp and stamp[0] == mtime_ns)
        self._contents[path] = (stamp, content) if is_unchanged else _OTHER

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until something may have changed, ``done()`` is true, or a second has passed."""
        self._wait(_LOOK_MS, SimpleNamespace(is_set=done))

    def beside(self) -> set[str]:
        """Return all Python files in the folders of the watched files."""
        found = (glob.glob(os.path.join(glob.escape(at), "*.py")) for at in self._folders())
        return {path for paths in found for path in paths}

    def changed(self) -> list[str]:
        """Return the files changed since the last call, once writes have paused."""
        found: dict[str, None] = {}
        while more := self._changed_now():
            found.update(dict.fromkeys(more))
            self._wait(_QUIET_MS)
        return list(found)

    def _changed_now(self) -> list[str]:
        found = []
        for path, (stamp, content) in self._contents.items():
            if _stamp(path) != stamp:
                self._contents[path] = now = _read(path)
                if now[1] != content:
                    found.append(path)
                    # Python would use it if the new source has the same size and mtime in seconds.
                    with suppress(OSError):
                        os.unlink(cache_from_source(path))
        return found

    def _folders(self) -> set[str]:
        return {os.path.dirname(path) for path in self._contents}

    def _wait(self, most_ms: int, done: Any = None) -> None:
        # watchfiles has no descriptor to add to a loop: it asks every 0.1 s whether to stop.
        from watchfiles import watch

        announced = watch(
            *filter(os.path.isdir, self._folders()),
            watch_filter=None,
            step=_QUIET_MS,
            stop_event=done,
            rust_timeout=most_ms,
            yield_on_timeout=True,
            raise_interrupt=False,
            recursive=False,
            ignore_permission_denied=True,
        )
        try:
            with closing(announced):
                next(announced, None)
        except (OSError, RuntimeError):  # a folder was removed, or the limit of watches is reached
            time.sleep(most_ms / 1000)


def _stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> _Content:
    stamp = _stamp(path)
    try:
        # Do not block if a pipe without a writer has replaced the file.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return stamp, b""
            return stamp, hashlib.sha256(file.read()).digest()
    except OSError:
        return stamp, b""
