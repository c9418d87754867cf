"""A rank's log file: made for the rank to write, and closed by what the rank cannot write."""

from __future__ import annotations

import os

from meshrun.errors import HostError


def open_log(path: str) -> int:
    """Return a descriptor that appends, so that ranks and their children write over nobody.

    Raises:
        HostError: If the file cannot be made.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostError(
            f"the log file `{path}` could not be made: {error.strerror}",
            hint="give --log-dir a folder that is writable and has room",
        ) from error


def append_to_log(path: str, text: str) -> None:
    """Put the last words at the end of a file; what cannot be written is left."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        pass
