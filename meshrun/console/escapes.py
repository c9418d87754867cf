"""Escape sequences of a terminal: colors, and lines below the output that change. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from meshrun.console.lines import Prefix

CLEAR_LINE = b"\r\x1b[2K"
CLEAR_BELOW = CLEAR_LINE + b"\x1bD\x1b[J\x1b[A"
"""Clears the line of the cursor, then the lines below it. tmux takes a clear from the first
position of the window as a clear of all of it, and keeps the old content in its history."""
_COLORS = (36, 33, 35, 32, 34, 31)
_COLOR_CODE = re.compile(r"(\x1b\[[0-9;]*m)")


def colored(prefix: Prefix, rank: int) -> Prefix:
    """Return a prefix in the color of a rank, except for trailing spaces."""
    color = _COLORS[rank % len(_COLORS)]
    if callable(prefix):
        return lambda: _in_color(prefix(), color)
    return _in_color(prefix, color)


def _in_color(text: bytes, color: int) -> bytes:
    shown = text.rstrip(b" ")
    return b"\x1b[%dm%b\x1b[0m%b" % (color, shown, text[len(shown) :]) if shown else text


def fit(text: bytes, columns: int) -> bytes:
    """Cut a changing line so that it does not wrap: a wrapped line could not be cleared.

    All color codes are kept, as one behind the cut may reset the color.
    """
    shown, width = "", 0
    for part in _COLOR_CODE.split(text.decode(errors="replace")):
        if _COLOR_CODE.fullmatch(part):
            shown += part
            continue
        for character in part:
            width += _columns_of(character)
            if width >= columns:
                break
            shown += character
    return shown.encode()


def _columns_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("F", "W") else 1


def panel_block(lines: Sequence[bytes]) -> bytes:
    """Return the bytes that draw ``lines`` below the line of the cursor.

    The cursor stays above them, so that ``CLEAR_BELOW`` removes them even after the window was
    resized, and a line that is being typed is left alone. The cursor first moves down as many lines
    as are needed, which may scroll the window, and up again; only then is its position saved.
    Wrapping is off meanwhile, as the window may have become narrower a moment ago.

    Source:
        ECMA-48 and xterm's "Control Sequences": IND, CUU, DECSC, ED, DECAWM, DECRC.
    """
    if not lines:
        return b""
    count = len(lines)
    room = b"\x1bD" * count + b"\x1b[%dA" % count
    drawn = b"\r\n".join(lines)
    return room + b"\x1b7\x1b[?7l\x1b[K\r\n\x1b[J" + drawn + b"\x1b[0m\x1b8\x1b[?7h"
