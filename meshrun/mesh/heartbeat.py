"""heartbeat() and progress(step): a program tells its launcher that it gets on, and how far."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import SupportsIndex

_EVERY_S = 0.2
"""More often says nothing new."""


class _Heartbeat:
    """Where beats go; a plain global, so that every thread and library finds the same."""

    def __init__(self) -> None:
        self.send: Callable[[int | None], None] | None = None
        self.next_s = 0.0
        self.step: int | None = None
        """The furthest that the program has said."""


pulse = _Heartbeat()


def heartbeat() -> None:
    """Tell ``meshrun --hang-timeout`` that this rank gets on; call it once a step, say.

    From its first call on, this rank is judged by its heartbeats alone, and no longer by its CPU
    time and output: a rank that spins in a collective uses CPU too. It costs a microsecond, may be
    called from any thread, and does nothing outside meshrun.
    """
    now_s = time.monotonic()
    if pulse.send is not None and now_s >= pulse.next_s:
        pulse.next_s = now_s + _EVERY_S
        pulse.send(pulse.step)


def progress(step: SupportsIndex) -> None:
    """Tell the launcher how far this rank has come, by an integer that grows; a heartbeat too.

    ``--max-restarts`` goes by it: ranks that fail again and again without coming further are not
    started for ever. It costs a microsecond, may be called from any thread, and does nothing
    outside meshrun.

    Args:
        step: Counted from the beginning of the training and not of this start: a program that
            resumes goes on from its checkpoint's.
    """
    number = int(operator.index(step))
    if pulse.step is None or number > pulse.step:
        pulse.step = number
    heartbeat()
