"""What is known of a failed rank beside its end: last lines, stack, memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of one rank."""

    last_lines: tuple[str, ...] = ()
    """What it printed last on stderr."""
    stack: tuple[str, ...] = ()
    """Where native code crashed, a line a frame, the innermost last."""
    place: str = ""
    """The same in short: ``work at train.py:41``."""
    why: str = ""
    """What explains the signal that ended it, or its exception."""
