"""Lines below the cursor of a terminal, as bytes that leave the cursor where it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence

CLEAR_BELOW = b"\r\x1b[2K\x1bD\x1b[J\x1b[A"
"""Clears the line of the cursor, and then what is below: tmux takes clearing from the very first
place of the window on for clearing all of it, and keeps what was there in its history."""


def panel_block(lines: Sequence[bytes]) -> bytes:
    """Return what draws ``lines`` below the line of the cursor.

    The cursor stays above them, so ``CLEAR_BELOW`` takes them away however the window was resized
    since, and a line that is being typed is left alone. First as many lines are gone down as are
    needed, which scrolls the window if it must, and up again; only then is the cursor's place kept.
    Long lines do not wrap meanwhile: the window may be narrower than it was a moment ago.

    Source:
        ECMA-48 and xterm's "Control Sequences": IND, CUU, DECSC, ED, DECAWM, DECRC.
    """
    if not lines:
        return b""
    count = len(lines)
    room = b"\x1bD" * count + b"\x1b[%dA" % count
    drawn = b"\r\n".join(lines)
    return room + b"\x1b7\x1b[?7l\x1b[K\r\n\x1b[J" + drawn + b"\x1b[0m\x1b8\x1b[?7h"
