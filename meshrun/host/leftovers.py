"""Temporary folders whose launch was killed, all of it: the next launch removes them.

Whoever makes a folder holds a lock on a file in it, which the kernel takes from it however it ends.
Folders without such a file are kept: their logs were asked for.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "meshrun_"
"""What names of temporary folders begin with."""
_LOCK = "held"


def hold(folder: str) -> int:
    """Say that a folder is of no use without this process; return the descriptor that says so.

    A file system without locks keeps the folder for ever; the descriptor is -1 then.
    """
    path = os.path.join(folder, _LOCK)
    try:
        descriptor = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A folder that hosts share may have locks that each host sees alone.
        os.write(descriptor, os.uname().nodename.encode())
        os.rename(f"{path}.new", path)  # no one ever sees it without its lock
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def let_go(descriptor: int) -> None:
    """Close what :func:`hold` returned."""
    if descriptor >= 0:
        os.close(descriptor)


@contextmanager
def private_folder() -> Iterator[str]:
    """Give a temporary folder that goes with the block, or after this process."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        held = hold(folder)
        try:
            yield folder
        finally:
            let_go(held)


def remove_forgotten() -> None:
    """Remove the temporary folders that a process of this user and host held, and no more."""
    try:
        with os.scandir(tempfile.gettempdir()) as entries:
            found = [
                entry.path
                for entry in entries
                if entry.name.startswith(PREFIX)
                and entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            ]
    except OSError:
        return
    for folder in found:
        if _is_forgotten(os.path.join(folder, _LOCK)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_forgotten(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.read(descriptor, 1024) == os.uname().nodename.encode()
    except OSError:
        return False
    finally:
        os.close(descriptor)
