"""heartbeat(), progress() and exclude_node(): what a program reports to its launcher."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import SupportsIndex

from msgspec import Struct

_EVERY_S = 0.2
"""More frequent heartbeats carry no new information."""
_MOST_STEPS = 2**63 - 1
"""A larger number would not fit into a metric, or even into a message."""


class _ToLauncher(Struct):
    """The connection to the launcher; a global, so that all threads and libraries share it.

    A rank sets its functions; outside meshrun they stay ``None``.
    """

    send_beat: Callable[[int | None], object] | None = None
    exclude_node: Callable[[str], None] | None = None
    end_call: Callable[[int], object] | None = None
    """Reports that the n-th call, in a rank that serves calls, has ended, its output flushed."""
    next_beat_s: float = 0.0
    step: int | None = None
    """The furthest step that the program reported."""


to_launcher = _ToLauncher()


def heartbeat() -> None:
    """Tell ``meshrun --hang-timeout`` that this rank makes progress; call it once per step.

    After its first call, a rank is judged by its heartbeats alone and no longer by its CPU
    time and output: a rank that spins in a collective uses CPU too. It costs a microsecond, may be
    called from any thread, and does nothing outside meshrun.
    """
    now_s = time.clock_gettime(time.CLOCK_MONOTONIC)  # which tools that freeze time leave alone
    if to_launcher.send_beat is not None and now_s >= to_launcher.next_beat_s:
        to_launcher.next_beat_s = now_s + _EVERY_S
        to_launcher.send_beat(to_launcher.step)


def progress(step: SupportsIndex) -> None:
    """Tell the launcher how far this rank has come, by an increasing integer; also a heartbeat.

    ``--max-restarts`` uses it: ranks that fail repeatedly without getting further are not
    restarted forever. It costs a microsecond, may be called from any thread, and does nothing
    outside meshrun.

    Args:
        step: Counted from the beginning of the training, not of this start: a program that
            resumes continues from the step of its checkpoint.
    """
    number = max(-_MOST_STEPS, min(int(operator.index(step)), _MOST_STEPS))
    if to_launcher.step is None or number > to_launcher.step:
        to_launcher.step = number
    heartbeat()


def exclude_node(reason: str) -> None:
    """Tell the launcher that this rank's node must not be used, for example as its GPU is broken.

    An elastic launch continues without the node if enough are left. Any other launch ends with exit
    code 78 and is not restarted; the report says how to leave the node out next time. Does nothing
    outside meshrun.

    Args:
        reason: For people, and for ``--node-history``.
    """
    if to_launcher.exclude_node is not None:
        to_launcher.exclude_node(str(reason))
