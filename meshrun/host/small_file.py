"""Reads small text files that users and schedulers name."""

from __future__ import annotations

import errno

_LONGEST = 4 * 1024 * 1024


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
