"""Work in steps, between which an event loop does other things: see :meth:`Reactor.follow`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[float, None, T]
"""Yields how long to wait for something before the next step, in seconds; returns the result."""


def finish(steps: Steps[T], wait: Callable[[float], object] = time.sleep) -> T:
    """Take all steps, one after the other, and return the result."""
    while True:
        try:
            wait_s = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        wait(wait_s)
