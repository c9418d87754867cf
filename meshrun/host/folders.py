"""Folders that belong to one launch."""

from __future__ import annotations

import os
from collections.abc import Iterable

from meshrun.errors import HostError


def make_private_folders(path: str, names: Iterable[str]) -> None:
    """Make a folder that is new and only ours, and folders of these names in it.

    Raises:
        HostError: If the disk is full, or the place is not writable.
    """
    try:
        os.mkdir(path, 0o700)
        for name in names:
            os.mkdir(os.path.join(path, name), 0o700)
    except OSError as error:
        raise HostError(
            f"`{path}` could not be made: {error.strerror}",
            hint="set TMPDIR to a folder that is writable and has room",
        ) from error
