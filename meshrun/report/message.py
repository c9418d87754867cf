"""Errors as people read them: ``error:``, a blank line, ``hint:``."""

from __future__ import annotations

from meshrun.errors import MeshrunError, SpecError


def render_error(error: MeshrunError) -> str:
    """Return the lines to print for an error, understandable without colour."""
    parts = [f"error: {error.message}"]
    if isinstance(error, SpecError):
        parts.append(f"    {error.text}\n    {error.caret}")
    if error.hint:
        parts.append(f"hint: {error.hint}")
    return "\n\n".join(parts)
