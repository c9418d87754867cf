"""Errors as text: ``error:``, a blank line, ``hint:``."""

from __future__ import annotations

from meshrun.errors import MeshrunError, SpecError
from meshrun.protocol.printable import lines


def render_error(error: MeshrunError, *, is_end: bool = False) -> str:
    """Return the lines to print for an error, understandable without color.

    Args:
        error: What is wrong.
        is_end: Whether a launch ended by it, whose last line is the cause; the hint comes before.
    """
    parts = [f"error: {error.message}"]
    if isinstance(error, SpecError):
        parts.append(error.marked)
    if error.hint:
        parts.insert(0 if is_end else len(parts), f"hint: {error.hint}")
    return lines("\n\n".join(parts))  # a value may be anybody's, as in a hostfile
