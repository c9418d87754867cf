"""How a rank ended: the exception of its program, and the status of its process."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from meshrun.protocol.packing import Line, Rank, Time


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception ended a rank's program, or meshrun's start of the rank."""

    rank: Rank
    at_ns: Time
    kind: Line
    """The name of the exception's class, such as ``ValueError``."""
    message: str
    traceback: str
    """The whole text, as ``python`` prints it."""
    shown: bool
    """Whether the program's own excepthook has already printed it."""
    handled: bool = False
    """Whether the program called ``sys.exit()`` while it handled the exception."""
    threads: Line = ""
    """The threads that must end before its process exits, such as that of a checkpoint."""


class RankExited(Struct, frozen=True, kw_only=True):
    """A rank's process has ended."""

    rank: Rank
    pid: int
    wait_status: Annotated[int, Meta(ge=0, le=0xFFFF)]
    """The status from ``os.waitpid``."""
    at_ns: Time
    unasked: bool = False
    """Whether it was exiting before meshrun sent it a signal."""
    error: Line = ""
    """The error that it printed before SIGABRT killed it, if it did."""

    def __post_init__(self) -> None:
        os.waitstatus_to_exitcode(self.wait_status)  # raises an error if it has not ended

    @property
    def aborted(self) -> bool:
        """Whether SIGABRT killed it, as gloo and NCCL's watchdog do."""
        return os.WIFSIGNALED(self.wait_status) and os.WTERMSIG(self.wait_status) == signal.SIGABRT
