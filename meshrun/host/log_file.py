"""A rank's log file: created for the rank to write, and closed if it cannot be written."""

from __future__ import annotations

import os
from collections.abc import Callable

from meshrun.errors import HostError

Opener = Callable[[str, int], int]
"""Opens a file by its path and flags, as ``os.open`` does, wherever the path may lead by then."""


def open_log(path: str, opener: Opener) -> int:
    """Return a descriptor that appends, so that ranks and their children write over nobody.

    Raises:
        HostError: If the file cannot be made.
    """
    try:
        return opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    except OSError as error:
        raise HostError(
            f"cannot create the log file `{path}`: {error.strerror}",
            hint="set --log-dir to a writable folder with free space",
        ) from error


def append_to_log(path: str, text: str, opener: Opener) -> None:
    """Put the last words at the end of a file; what cannot be written is left."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=opener) as file:
            file.write(text)
    except OSError:
        pass
