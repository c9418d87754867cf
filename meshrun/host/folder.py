"""A folder held by its descriptor, so that renaming or replacing it changes nothing.

If others can write to the folder above it, its path may change at any time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """A folder that is there."""

    def __init__(self, path: str, *, above: int | None = None) -> None:
        """Open it; a link in its place is no folder.

        Args:
            path: How others may call it.
            above: The folder that it is in, if that is held too.

        Raises:
            OSError: If it cannot be opened.
        """
        self.path = path
        name = path if above is None else os.path.basename(path)
        self._fd = os.open(name, _OPEN | os.O_NOFOLLOW, dir_fd=above)

    def fileno(self) -> int:
        """Return the descriptor that holds it."""
        return self._fd

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this user."""
        return os.fstat(self._fd).st_uid == os.geteuid()

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed it, so that nothing can be made in it."""
        return os.fstat(self._fd).st_nlink == 0

    def make(self, name: str) -> None:
        """Make a private folder in it, unless it is there."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._fd)

    def open(self, path: str, flags: int) -> int:
        """Open a file in it, by its whole path; one that is made is private, and links are none.

        Raises:
            OSError: If it cannot be opened.
        """
        name = os.path.relpath(path, self.path)
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

    def rename(self, old: str, new: str) -> None:
        """Give a file in it another name."""
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self) -> None:
        """Remove what is in it, and it too if it still has its name; what cannot go is left."""
        for _, folders, files, here in os.fwalk(topdown=False, dir_fd=self._fd):
            for name in (*files, *folders):
                with contextlib.suppress(OSError):
                    _remove(name, here)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_folder(path: str) -> Folder:
    """Make a private folder and hold it.

    Raises:
        OSError: If it cannot be made, or is there.
    """
    above = os.open(os.path.dirname(path), _OPEN)
    try:
        os.mkdir(os.path.basename(path), 0o700, dir_fd=above)
        return Folder(path, above=above)
    finally:
        os.close(above)


def open_private(path: str, flags: int) -> int:
    """Open a file in a private folder, as an opener for ``open``.

    Whoever may write to the folder above can put a folder with links to this user's files in its
    place, or a link to another folder.

    Raises:
        OSError: If it cannot be opened, is a link, or is in a folder of another user's.
    """
    folder = Folder(os.path.dirname(path))
    try:
        if not folder.is_ours:
            raise PermissionError(errno.EPERM, "its folder belongs to another user", path)
        return folder.open(path, flags)
    finally:
        folder.close()


def who_else_may_write(path: str) -> str | None:
    """Return who besides this user and root could put other files in the place of a folder's.

    Whoever may write to it or to one above it, unless that is sticky, as ``/tmp`` is. A group made
    for this user is nobody else. A folder that is not there yet is as those above it.
    """
    for place in _and_above(os.path.realpath(path)):
        try:
            found = os.stat(place)
        except OSError:
            continue
        is_sticky = bool(found.st_mode & stat.S_ISVTX)
        if found.st_uid not in (0, os.geteuid()):
            return f"`{place}` belongs to {_user(found.st_uid)}"
        if found.st_mode & stat.S_IWOTH and not is_sticky:
            return f"everyone can write to `{place}`"
        if found.st_mode & stat.S_IWGRP and not is_sticky:
            group = _group_of_others(found.st_gid)
            if group is not None:
                return f"{group} can write to `{place}`"
    return None


def _and_above(path: str) -> Iterator[str]:
    yield path
    while path != (path := os.path.dirname(path)):
        yield path


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
    """Return a group in which others may be; root's own is none, nor one made for this user."""
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
