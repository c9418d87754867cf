"""heartbeat() and progress(step): a program reports its progress to its launcher."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import SupportsIndex

_EVERY_S = 0.2
"""More frequent beats carry no new information."""


class _Heartbeat:
    """Where beats go; a global, so that every thread and library uses the same."""

    def __init__(self) -> None:
        self.send: Callable[[int | None], object] | None = None
        self.next_s = 0.0
        self.step: int | None = None
        """The furthest step that the program reported."""


pulse = _Heartbeat()


def heartbeat() -> None:
    """Tell ``meshrun --hang-timeout`` that this rank makes progress; call it once per step.

    After its first call, a rank is judged by its heartbeats alone and no longer by its CPU
    time and output: a rank that spins in a collective uses CPU too. It costs a microsecond, may be
    called from any thread, and does nothing outside meshrun.
    """
    now_s = time.monotonic()
    if pulse.send is not None and now_s >= pulse.next_s:
        pulse.next_s = now_s + _EVERY_S
        pulse.send(pulse.step)


def progress(step: SupportsIndex) -> None:
    """Tell the launcher how far this rank has come, by an increasing integer; also a heartbeat.

    ``--max-restarts`` uses it: ranks that fail repeatedly without getting further are not
    restarted forever. It costs a microsecond, may be called from any thread, and does nothing
    outside meshrun.

    Args:
        step: Counted from the beginning of the training, not of this start: a program that
            resumes continues from the step of its checkpoint.
    """
    number = int(operator.index(step))
    if pulse.step is None or number > pulse.step:
        pulse.step = number
    heartbeat()
