"""Which Python files are the user's: neither Python's, nor installed, nor meshrun's."""

from __future__ import annotations

import os
import sysconfig

_IN_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")


def _folders(*paths: str) -> tuple[str, ...]:
    """Return folders as they are named and as they are, each with a slash at its end."""
    return tuple(
        {os.path.join(find(path), "") for path in paths for find in (str, os.path.realpath)}
    )


LIBRARIES = _folders(*filter(None, map(sysconfig.get_path, _IN_PATHS)))
"""The folders of Python's own library and of what is installed beside it."""
OURS = _folders(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_INSTALLED = ("/site-packages/", "/dist-packages/")


def is_installed(path: str | None) -> bool:
    """Whether a file was installed, into this environment or another that Python looks into."""
    return path is not None and any(folder in path for folder in _INSTALLED)


def is_users_file(path: str) -> bool:
    """Whether a module or a frame is the user's by the path it names; ``<string>`` is not."""
    return not (path.startswith(("<", *LIBRARIES, *OURS)) or is_installed(path))
