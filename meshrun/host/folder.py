"""Folders accessed through a descriptor, so that renaming or replacing them has no effect.

If others can write to the parent folder, they can put something else at the path at any time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from meshrun.errors import HostError
from meshrun.host.descriptors import close_file
from meshrun.host.sysfs import read_number, read_text

Opener = Callable[[str, int], int]
"""Opens a file by path and flags, like ``os.open``, such as :meth:`Folder.open`."""
_MAP_OF_ALL = ["0", "0", str(2**32 - 1)]
_USUAL_OVERFLOW = 65534
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
        with contextlib.suppress(FileExistsError):
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
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=self._fd)
            raise

    def rename(self, old: str, new: str) -> None:
        """Rename a file in it."""
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self) -> None:
        """Remove its contents, and itself if it is still at its path; ignore errors."""
        with contextlib.suppress(OSError):  # out of descriptors, or of memory
            for _, folders, files, here in os.fwalk(topdown=False, dir_fd=self._fd):
                for name in (*files, *folders):
                    with contextlib.suppress(OSError):
                        _remove(name, here)
        with contextlib.suppress(OSError):
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


@contextlib.contextmanager
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


def who_else_may_write(path: str) -> str | None:
    """Return who, besides this user and root, could replace files in a folder, if anyone.

    This is anyone who can write to the folder or to one above it, unless that is sticky, like
    ``/tmp``, and the owner of a link on the way there. The private group of this user does not
    count. For a folder that does not exist, only those above it count.
    """
    trusted = {os.geteuid(), *_uids_of_root()}
    for place in led_through(path):
        try:
            found = os.lstat(place)
        except OSError:
            continue
        is_sticky = bool(found.st_mode & stat.S_ISVTX)
        if found.st_uid not in trusted:
            return f"`{place}` belongs to {_user(found.st_uid)}"
        if stat.S_ISLNK(found.st_mode):
            continue
        if found.st_mode & stat.S_IWOTH and not is_sticky:
            return f"everyone can write to `{place}`"
        if found.st_mode & stat.S_IWGRP and not is_sticky:
            group = _group_of_others(found.st_gid)
            if group is not None:
                return f"{group} can write to `{place}`"
    return None


def led_through(path: str) -> Iterator[str]:
    """Yield what a path leads through, itself first: folders and links, with what these lead to."""
    left, seen = [os.path.join(os.getcwd(), path)], set[str]()
    while left:
        place = left.pop()
        while place not in seen:
            seen.add(place)
            yield place
            folder = os.path.dirname(place)
            if os.path.islink(place):
                left.append(os.path.join(folder, os.readlink(place)))
            place = folder


def _uids_of_root() -> set[int]:
    """Return the owners that files of root have here.

    In a user namespace, as of Enroot, Apptainer or rootless Docker, that may be the overflow uid,
    which files of all users without a mapping have, so that root's cannot be told apart.

    Source:
        user_namespaces(7).
    """
    if read_text(Path("/proc/self/uid_map")).split() in ([], _MAP_OF_ALL):
        return {0}
    return {0, read_number(Path("/proc/sys/fs/overflowuid")) or _USUAL_OVERFLOW}


def _remove(name: str, folder: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.rmdir(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _user(uid: int) -> str:
    import pwd

    with contextlib.suppress(KeyError):
        return f"user `{pwd.getpwuid(uid).pw_name}`"
    return f"user {uid}"


def _group_of_others(gid: int) -> str | None:
    """Return the name of a group that may have other members, unless it is root's or private."""
    import grp
    import pwd

    if gid == 0:
        return None
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return f"group {gid}"
    try:
        own = pwd.getpwuid(os.geteuid())
    except KeyError:
        return f"group `{group.gr_name}`"
    is_private = (gid, group.gr_name) == (own.pw_gid, own.pw_name)
    return None if is_private and {*group.gr_mem} <= {own.pw_name} else f"group `{group.gr_name}`"
