"""Temporary folders, and the removal of those whose launches were killed.

The creator of a folder holds a lock on a file in it, which the kernel releases when it exits.
Folders without such a file, such as log folders, are kept.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from meshrun.errors import HostError
from meshrun.host.folder import Folder, make_folder
from meshrun.host.shortage import hint_for

PREFIX = "meshrun_"
_LOCK = "held"
_UNFINISHED = f"{_LOCK}.new"
_NAME = re.compile(PREFIX + "[0-9a-f]{16}")
_ABANDONED_AFTER_S = 3600.0


def temporary_path() -> str:
    """Return a path for a new temporary folder."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError:  # a read-only file system: creating the folder will fail
        place = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    return os.path.join(place, f"{PREFIX}{os.urandom(8).hex()}")


def keep_from_aging(folder: Folder) -> None:
    """Have systemd-tmpfiles, which removes what is old, keep all of a folder until it is closed.

    Source:
        tmpfiles.d(5): "If the aging algorithm finds a lock is already taken on some directory, it
        (and everything below it) is skipped".
    """
    with suppress(OSError):
        fcntl.flock(folder.fileno(), fcntl.LOCK_SH)


def lock_folder(folder: Folder) -> None:
    """Lock a folder until it is closed, or this process has ended; :func:`keep_from_aging` it.

    Later launches remove folders with a lock that no process holds; on a file system without
    locks, they keep it.
    """
    keep_from_aging(folder)
    try:
        descriptor = folder.open(f"{folder.path}/{_UNFINISHED}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # If hosts share the folder, each may see only its own locks.
        os.write(descriptor, os.uname().nodename.encode())
        folder.rename(_UNFINISHED, _LOCK)  # the file appears with its lock held
    except OSError:
        os.close(descriptor)
    else:
        folder.lock = descriptor


@contextmanager
def private_folder() -> Iterator[str]:
    """Provide a temporary folder that is removed after the block, or after this process.

    Raises:
        HostError: If it cannot be created.
    """
    path = temporary_path()
    with writing_to(path):
        folder = make_folder(path)
    lock_folder(folder)
    try:
        yield folder.path
    finally:
        folder.remove()
        folder.close()


@contextmanager
def writing_to(folder: str) -> Iterator[None]:
    """Report errors of the block as those of writing to a temporary folder.

    Raises:
        HostError: If the block raises an OSError.
    """
    try:
        yield
    except OSError as error:
        raise HostError(
            f"cannot write to the temporary folder `{folder}`: {error.strerror}",
            hint=hint_for(error.errno) or "set TMPDIR to a writable folder with free space",
        ) from error


def is_in_private(path: str) -> bool:
    """Return whether a path is in a folder with the name of a :func:`private_folder`."""
    return _NAME.fullmatch(os.path.basename(os.path.dirname(path))) is not None


def is_temporary(path: str) -> bool:
    """Return whether a folder has the name of a temporary folder and belongs to this user."""
    folder = _open_ours(path)
    if folder is not None:
        folder.close()
    return folder is not None


def remove_stale_folders() -> None:
    """Remove temporary folders whose processes, of this user on this host, have exited."""
    try:
        with os.scandir(tempfile.gettempdir()) as entries:
            found = [entry.path for entry in entries if entry.name.startswith(PREFIX)]
    except OSError:
        return
    for path in found:
        remove_if_stale(path)


def remove_if_stale(path: str) -> None:
    """Remove a temporary folder if its process, of this user on this host, has exited."""
    folder = _open_ours(path)
    if folder is None:
        return
    if _is_stale(folder):
        folder.remove()
    folder.close()


def _open_ours(path: str) -> Folder | None:
    if not os.path.basename(path).startswith(PREFIX):
        return None
    try:
        folder = Folder(path)
    except OSError:
        return None
    if folder.is_ours:
        return folder
    folder.close()
    return None


def _is_stale(folder: Folder) -> bool:
    try:
        descriptor = folder.open(f"{folder.path}/{_LOCK}", os.O_RDONLY)
    except OSError:
        return _was_never_held(folder)
    try:
        # Others may have renamed a folder of this user's that they can write to, and added a lock.
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.read(descriptor, 1024) == os.uname().nodename.encode()
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _was_never_held(folder: Folder) -> bool:
    """Return whether the creator was killed between creating and locking the folder."""
    is_named_by_us = _NAME.fullmatch(os.path.basename(folder.path)) is not None
    if not is_named_by_us or not {*os.listdir(folder.fileno())} <= {_UNFINISHED}:
        return False
    return time.time() - os.stat(folder.fileno()).st_mtime > _ABANDONED_AFTER_S
