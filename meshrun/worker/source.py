"""The source of code that is in no file, such as a cell of a notebook, for tracebacks."""

from __future__ import annotations

import linecache
from typing import TypeVar

_T = TypeVar("_T")


def remember_source(name: str, text: str) -> None:
    """Let tracebacks show the lines of the code with this file name."""
    lines = [f"{line}\n" for line in text.splitlines()]  # the last one too: Python 3.11 counts it
    linecache.cache[name] = (len(text), None, lines, name)


def with_source(call: _T, name: str, text: str) -> _T:
    """Return a call that was pickled with the source of its function."""
    remember_source(name, text)
    return call
