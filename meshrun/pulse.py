"""heartbeat(): a program tells its launcher that it gets on."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 0.2
"""More often says nothing new."""


class _Pulse:
    """Where beats go; a plain global, so that every thread and library finds the same."""

    def __init__(self) -> None:
        self.send: Callable[[], None] | None = None
        self.next_s = 0.0


pulse = _Pulse()


def heartbeat() -> None:
    """Tell ``meshrun --hang-timeout`` that this rank gets on; call it once a step, say.

    From its first call on, this rank is judged by its heartbeats alone, and no longer by its CPU
    time and output: a rank that spins in a collective uses CPU too. It costs a microsecond, may be
    called from any thread, and does nothing outside meshrun.
    """
    now_s = time.monotonic()
    if pulse.send is not None and now_s >= pulse.next_s:
        pulse.next_s = now_s + _EVERY_S
        pulse.send()
