"""What is known of a rank that failed beside its end: its last words, its stack, the memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from meshrun.host.memory import MemoryWatch, describe_full_shm
from meshrun.raised import killed_worker
from meshrun.result import split_wait_status
from meshrun.stacks import describe, headline
from meshrun.supervise.known import State
from meshrun.supervise.lookout import Lookout
from meshrun.supervise.output import Output

_MOST_LINES = 6
_MOST_RANKS = 16
_OF_MEMORY = {signal.SIGKILL}
_OF_SHM = {signal.SIGBUS}


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
    """What explains the signal that ended it."""


def gather(
    state: State, output: Output, lookout: Lookout, memory: MemoryWatch
) -> Mapping[int, Evidence]:
    """Return what is known of the first ranks that ended badly, by their time."""
    ended = [
        (known.exited.at_ns, rank, known.exited.wait_status, known.exited.unasked)
        for rank, known in state.ranks.items()
        if known.exited is not None and known.exited.wait_status != 0
    ]
    found = {}
    for _, rank, wait_status, unasked in sorted(ended)[:_MOST_RANKS]:
        _, signum = split_wait_status(wait_status)
        crash = lookout.crash(rank) if signum is not None else None
        why = None
        if signum in _OF_MEMORY and (unasked or not state.killed):
            why = memory.why_killed()
        elif signum in _OF_SHM:
            why = describe_full_shm()
        elif (raised := state.ranks[rank].raised) and (worker := killed_worker(raised)):
            why = memory.why_killed() if worker.endswith("Killed") else None
        folder = os.getcwd()
        found[rank] = Evidence(
            last_lines=tuple(output.last_lines(rank)[-_MOST_LINES:]),
            stack=tuple(describe(crash.main, folder)) if crash else (),
            place=headline(crash.main, folder) if crash else "",
            why=why or "",
        )
    return found
