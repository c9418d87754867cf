"""Tells which of some files have other content than before."""

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
"""How often to look where nothing is announced, as of a file system that others write to."""
_QUIET_MS = 100
"""A burst of writes has ended after that."""


_Content = tuple[tuple[int, ...], bytes]
"""What changes with each writing, and a digest of what is written; empty without a file."""
_OTHER: _Content = ((0,), b"other")


class WatchedFiles:
    """Some files, more of which may be added, and what they contain.

    ``watchfiles`` wakes us; what has changed is decided by what the files contain, so that neither
    a file that is written again as it was, nor a folder that is replaced by another, is an error.
    """

    def __init__(self) -> None:
        self._contents: dict[str, _Content] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._contents)

    def add(self, path: str, mtime_ns: int | None = None) -> None:
        """Watch a file, too, from now on, or from when it was written at ``mtime_ns``."""
        if path in self._contents:
            return
        stamp, content = _read(path)
        is_as_it_was = mtime_ns is None or (stamp and stamp[0] == mtime_ns)
        self._contents[path] = (stamp, content) if is_as_it_was else _OTHER

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until something may have changed, for a moment at most, or until ``done()``."""
        self._wait(_LOOK_MS, SimpleNamespace(is_set=done))

    def beside(self) -> set[str]:
        """Return all Python files in the folders of those that are watched."""
        found = (glob.glob(os.path.join(glob.escape(at), "*.py")) for at in self._folders())
        return {path for paths in found for path in paths}

    def changed(self) -> list[str]:
        """Return the files that have other content than at the last call, once all is quiet."""
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
                    # Python takes one of the same second and size for that of the new text.
                    with suppress(OSError):
                        os.unlink(cache_from_source(path))
        return found

    def _folders(self) -> set[str]:
        return {os.path.dirname(path) for path in self._contents}

    def _wait(self, most_ms: int, done: Any = None) -> None:
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
        except (OSError, RuntimeError):  # a folder has gone, or no more can be watched
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
        # A pipe that was put in a file's place may have no writer, and is not waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return stamp, b""
            return stamp, hashlib.sha256(file.read()).digest()
    except OSError:
        return stamp, b""
