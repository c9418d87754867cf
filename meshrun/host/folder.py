"""Folders accessed through a descriptor, so that renaming or replacing them has no effect.

If others can write to the parent folder, they can put something else at the path at any time.

The creator of a temporary folder holds a lock on a file in it, which the kernel releases when it
exits: folders of killed launches are removed. Those without such a file, such as log folders, are
kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from meshrun.errors import HostError
from meshrun.host.descriptors import close_file
from meshrun.host.shortage import hint_for

Opener = Callable[[str, int], int]
"""Opens a file by path and flags, like ``os.open``, such as :meth:`Folder.open`."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
PREFIX = "meshrun_"
_LOCK = "held"
_UNFINISHED = f"{_LOCK}.new"
_NAME = re.compile(PREFIX + "[0-9a-f]{16}")
_ABANDONED_AFTER_S = 3600.0


class Folder:
    """An open folder."""

    def __init__(self, path: str, *, above: int | None = None) -> None:
        """Open a folder, which must not be a link; ``above`` is the descriptor of its parent.

        Raises:
            OSError: If it cannot be opened.
        """
        self.path = path
        name = path if above is None else os.path.basename(path)
        self._fd = os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=above)
        self.lock = -1
        """A descriptor that is closed with the folder."""

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this user."""
        return os.fstat(self._fd).st_uid == os.geteuid()

    @property
    def is_gone(self) -> bool:
        """Whether it has been removed, so that nothing can be created in it, or is out of reach."""
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError:  # of a network file system
            return True

    def make(self, name: str) -> None:
        """Create a private folder in it, unless it exists."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._fd)

    def open(self, path: str, flags: int) -> int:
        """Open a file in it by its full path; a new file is private.

        Raises:
            OSError: If it cannot be opened, or is a link.
        """
        name = os.path.relpath(path, self.path)
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a private file in it, whole or not at all; a link in its place is replaced.

        Raises:
            OSError: If it cannot be written, as when the disk is full.
        """
        data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
        unfinished = f"{name}.{os.getpid()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(self.open(f"{self.path}/{unfinished}", flags), "wb") as file:
                file.write(data)
            self.rename(unfinished, name)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=self._fd)
            raise

    def rename(self, old: str, new: str) -> None:
        """Rename a file in it."""
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self) -> None:
        """Remove its contents, and itself if it is still at its path; ignore errors."""
        with suppress(OSError):  # out of descriptors, or of memory
            for _, folders, files, here in os.fwalk(topdown=False, dir_fd=self._fd):
                for name in (*files, *folders):
                    with suppress(OSError):
                        _remove(name, here)
        with suppress(OSError):
            os.rmdir(self.path)

    def close(self) -> None:
        """Close the descriptor, and release the lock."""
        for fd in (self._fd, self.lock):
            if fd >= 0:
                close_file(fd)
        self._fd = self.lock = -1


def make_folder(path: str) -> Folder:
    """Create a private folder and open it.

    Raises:
        OSError: If it cannot be created, or exists.
    """
    above = os.open(os.path.dirname(path), _OPEN)
    try:
        os.mkdir(name := os.path.basename(path), 0o700, dir_fd=above)
        try:
            return Folder(path, above=above)
        except OSError:
            os.rmdir(name, dir_fd=above)
            raise
    finally:
        os.close(above)


def open_private(path: str, flags: int) -> int:
    """Open a file in a private folder; an opener for ``open``.

    Anyone who can write to the parent folder could replace the folder by a link, or by a folder
    with links to this user's files.

    Raises:
        OSError: If it cannot be opened, is a link, or is in another user's folder.
    """
    with _own_folder_of(path) as folder:
        return folder.open(path, flags)


def read_private(path: str) -> bytes:
    """Return the contents of a file in a private folder; see :func:`open_private`.

    Raises:
        OSError: If it cannot be read, is a link, or is in another user's folder.
    """
    with open(path, "rb", opener=open_private) as file:
        return file.read()


def write_private(path: str, content: str | bytes) -> None:
    """Write a file in a private folder, as :meth:`Folder.write` does.

    Raises:
        OSError: If it cannot be written, or is in another user's folder.
    """
    with _own_folder_of(path) as folder:
        folder.write(os.path.basename(path), content)


@contextmanager
def _own_folder_of(path: str) -> Iterator[Folder]:
    folder = Folder(os.path.dirname(path))
    try:
        if not folder.is_ours:
            raise PermissionError(errno.EPERM, "its folder belongs to another user", path)
        yield folder
    finally:
        folder.close()


def open_log(path: str, opener: Opener) -> int:
    """Create a log file; return its descriptor, in append mode for ranks that have children.

    Raises:
        HostError: If the file cannot be created.
    """
    try:
        return opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    except OSError as error:
        raise HostError(
            f"cannot create the log file `{path}`: {error.strerror}",
            hint="set --log-dir to a writable folder with free space",
        ) from error


def nonblocking(opener: Opener) -> Opener:
    """Return an opener that never blocks, as a program may have put a pipe there."""
    return lambda path, flags: opener(path, flags | os.O_NONBLOCK)


def append_to_log(path: str, text: str, opener: Opener) -> None:
    """Append a text to a file, ignoring errors."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=opener) as file:
            file.write(text)
    except OSError:
        pass


def _remove(name: str, folder: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.rmdir(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def temporary_path() -> str:
    """Return a path for a new temporary folder."""
    import tempfile

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
    import tempfile

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
