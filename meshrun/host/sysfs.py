"""Files of the kernel's description of this machine."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """Return what a file says, without the line's end; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def read_number(path: Path) -> int | None:
    """Return the number that a file says, if it says one."""
    try:
        return int(read_text(path))
    except ValueError:
        return None
