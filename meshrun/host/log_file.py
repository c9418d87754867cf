"""Log files of ranks: creating them, and appending to them."""

from __future__ import annotations

import os
from collections.abc import Callable

from meshrun.errors import HostError

Opener = Callable[[str, int], int]
"""Opens a file by path and flags, like ``os.open``, but protected from replaced folders."""


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
