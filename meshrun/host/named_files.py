"""Files that users and schedulers name: their absolute paths, and the text of small ones."""

from __future__ import annotations

import errno
from pathlib import Path

_LONGEST = 4 * 1024 * 1024


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
