"""Errors as text: ``error:``, a blank line, ``hint:``."""

from __future__ import annotations

from meshrun.errors import MeshrunError, SpecError
from meshrun.host.printable import lines


def render_error(error: MeshrunError, *, is_end: bool = False) -> str:
    """Return the lines to print for an error.

    If it ended a launch, the hint comes first, as the last line is the cause.
    """
    parts = [f"error: {error.message}"]
    if isinstance(error, SpecError):
        parts.append(error.marked)
    if error.hint:
        parts.insert(0 if is_end else len(parts), f"hint: {error.hint}")
    return lines("\n\n".join(parts))  # a quoted value may come from anywhere, such as a hostfile
