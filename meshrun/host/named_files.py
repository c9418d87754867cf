"""Files that users and schedulers name: their paths, small texts, atomic writes, and who may write.

In an atomic write, a link stays a link, and pipes and devices are written directly. A file keeps
its old contents until the new ones are complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from meshrun.errors import HostError, UsageError
from meshrun.host.sysfs import read_number, read_text

_LONGEST = 4 * 1024 * 1024
_MAP_OF_ALL = ["0", "0", str(2**32 - 1)]
_USUAL_OVERFLOW = 65534
_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors of replacing a file that can still be written in place: of its folder, or of a mount."""


def absolute(path: str) -> str:
    """Return an absolute path; ``os.path.abspath`` takes ``link/..`` for the folder of a link."""
    return str(Path(path).absolute())


def read_small(path: str, *, errors: str = "surrogateescape") -> str:
    """Return the text of a file, a pipe or a device, which need not end.

    Raises:
        OSError: If it cannot be read, or is longer than four million characters.
        UnicodeDecodeError: If it is not text and ``errors`` is ``strict``.
    """
    with open(path, encoding="utf-8", errors=errors) as file:
        text = file.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        raise OSError(errno.EFBIG, "more than 4 MiB of text", path)
    return text


def check_target(path: str, option: str) -> None:
    """Check that a file can probably be written later.

    Raises:
        UsageError: If the path cannot name a file.
        HostError: If it would not be writable.
    """
    if _stream_of(path) is not None:
        return
    target = _resolve(path, option)
    if not os.access(target if os.path.exists(target) else os.path.dirname(target), os.W_OK):
        raise HostError(f"{option}: no permission to write `{path}`")


def write_whole(path: str, text: str, option: str, *, is_private: bool = False) -> None:
    """Write a text to a file, or to stdout if the path is ``-``.

    Only this user may read a new file that is private. A pipe without a reader is then an error,
    instead of being waited for.

    Raises:
        UsageError: If the path cannot name a file.
        HostError: If it cannot be written.
    """
    stream = _stream_of(path)
    if stream is not None:
        stream.write(text)
        stream.flush()
        return
    target = _resolve(path, option)
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            _write_into(path, text, os.O_NONBLOCK if is_private else 0)
        else:
            _replace(target, text, 0o600 if is_private else 0o666)
    except OSError as error:
        why = "it has no reader" if error.errno == errno.ENXIO else error.strerror
        raise HostError(f"cannot write `{path}`: {why}") from error


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting for the writer if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _resolve(path: str, option: str) -> str:
    """Return the target of a path; for an unnamed pipe in /proc, the path itself."""
    target = os.path.realpath(path)
    if not os.path.exists(target) and os.path.exists(path):
        target = path
    folder = os.path.dirname(target)
    if not path or os.path.isdir(target):
        raise UsageError(f"{option} expects a file, found `{path}`")
    if not os.path.isdir(folder):
        raise UsageError(f"{option}: folder `{os.path.dirname(path) or folder}` does not exist")
    if planted := _planted(path):
        raise UsageError(
            f"{option}: `{planted}` belongs to another user",
            hint="choose a file in a folder that you own",
        )
    return target


def _planted(path: str) -> str | None:
    """Return the file, or a link on the way to it, that another user put into a sticky folder.

    The kernel refuses such files, too (fs.protected_symlinks, protected_fifos, protected_regular),
    but neither for paths resolved here nor for files opened without O_CREAT.
    """
    for place in led_through(path):
        if os.path.islink(place) and _is_of_others(place):
            return place
    target = os.path.realpath(path)
    return target if os.path.exists(target) and _is_of_others(target) else None


def _is_of_others(place: str) -> bool:
    above, owner = os.stat(os.path.dirname(place)), os.lstat(place).st_uid
    is_open = above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH
    return bool(is_open) and owner not in (os.geteuid(), above.st_uid)


def _stream_of(path: str) -> TextIO | None:
    """Return stdout or stderr if the path is the same file, so that output is appended there."""
    if path == "-":
        return sys.stdout
    for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return stream
    return None


def _write_into(path: str, text: str, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC | flags)
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _replace(target: str, text: str, mode: int) -> None:
    import tempfile

    exists, unfinished = os.path.exists(target), ""
    try:
        descriptor, unfinished = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".meshrun_")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            os.umask(umask := os.umask(0))
            os.fchmod(descriptor, _mode(target) or mode & ~umask)
        os.replace(unfinished, target)
    except BaseException as error:
        if unfinished:
            os.unlink(unfinished)
        if not isinstance(error, OSError) or error.errno not in _IN_PLACE or not exists:
            raise
        _write_into(target, text, os.O_TRUNC)


def _mode(target: str) -> int | None:
    """Return the permissions of an existing file of this user or root."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    return found.st_mode & 0o777 if found.st_uid in (0, os.geteuid()) else None


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
