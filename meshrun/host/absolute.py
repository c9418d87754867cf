"""Absolute paths."""

from __future__ import annotations

from pathlib import Path


def absolute(path: str) -> str:
    """Return an absolute path; ``os.path.abspath`` takes ``link/..`` for the folder of a link."""
    return str(Path(path).absolute())
