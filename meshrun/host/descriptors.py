"""Descriptors: the standard streams, terminals, messages to stderr, and limits of open files."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from collections.abc import Callable
from typing import TextIO, TypeGuard

from meshrun.errors import HostError

_MANY = 65536
_USUAL = 1024
"""Open files that a shell usually allows."""
_COLORS = {"error:": "1;31", "hint:": "1;36"}
_COLORED = re.compile("^(?:" + "|".join(_COLORS) + ")", re.MULTILINE)


def open_standard_streams() -> None:
    """Open the null device in place of stdin, stdout and stderr where they are closed.

    Otherwise, a pipe of ours would get the free number, and ranks would write into it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `fd`


def is_terminal(fd: int) -> bool:
    """Return whether a descriptor is a terminal that a person may be looking at.

    mpirun and ``srun --unbuffered`` give each process a pseudo-terminal as its output, and copy it
    to their own output, which may be a file. With ``srun --pty``, stdin is a terminal as well.
    """
    is_copied = "OMPI_COMM_WORLD_RANK" in os.environ
    is_copied |= "SLURM_STEP_ID" in os.environ and not os.isatty(0)
    return os.isatty(fd) and not is_copied


def has_colors(fd: int) -> bool:
    """Return whether a descriptor is a terminal with colors, and the user has not disabled them."""
    can = is_terminal(fd) and os.environ.get("TERM", "") not in {"", "dumb"}
    return can and not os.environ.get("NO_COLOR")


_formats: list[Callable[[str], str]] = []


def set_message_format(render: Callable[[str], str]) -> None:
    """Make :func:`say` print what ``render`` returns for each text from now on."""
    _formats.append(render)


def note(text: str) -> None:
    """Print a message of meshrun's own to stderr, as :func:`say` does."""
    say(f"meshrun: {text}")


def say(text: str) -> None:
    """Print to stderr, with ``error:`` and ``hint:`` in color on a terminal.

    Continue if the terminal has hung up or the disk is full.
    """
    text = _formats[-1](text) if _formats else text
    if has_colors(2) and not _formats:
        text = _COLORED.sub(lambda found: f"\033[{_COLORS[found[0]]}m{found[0]}\033[0m", text)
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr)


def discard_output(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device, with what it has buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_lost_output(error: Exception) -> TypeGuard[OSError]:
    """Return whether an open file cannot be written: disk full, terminal closed."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def allow_descriptors(count: int) -> None:
    """Raise this process's soft limit so that ``count`` descriptors can be open.

    Raises:
        HostError: If the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise HostError(
            f"this launch needs {count} open files, but the limit is {hard}",
            hint=f"raise it with `ulimit -n {max(count, _USUAL)}`, or start fewer ranks",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def allow_many_descriptors() -> None:
    """Raise this process's soft limit as far as allowed, up to a generous maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY if hard == resource.RLIM_INFINITY else min(hard, _MANY)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, like an interactive shell."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
