"""Makes text from outside safe to print, without control characters. Pure."""

from __future__ import annotations

_MOST_ON_A_LINE = 1000


def one_line(text: str, most: int = _MOST_ON_A_LINE) -> str:
    """Return ``text`` as one line without control characters, and without its middle if long."""
    return _shorten("".join(map(_escape, text)) if not text.isprintable() else text, most)


def lines(text: str, most: int = 64 * 1024) -> str:
    """Return ``text`` as :func:`one_line` does, but keep its tabs and line breaks."""
    return _shorten(printable(text), most)


def printable(text: str) -> str:
    """Return ``text`` without control characters except tabs and line breaks."""
    return "".join(char if char in "\n\t" else _escape(char) for char in text)


def first_words(text: str, most: int) -> str:
    """Return ``text``, or as many of its first words as fit, followed by ``...``."""
    if len(text) <= most:
        return text
    start = text[:most]
    end = start.rfind(" ", most // 2)
    return f"{(start[:end] if end > 0 else start).rstrip('.')}..."


def _escape(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _shorten(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 3]} ... {text[-half + 2 :]}"
