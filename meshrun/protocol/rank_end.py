"""How a rank ended: the exception of its program, and the status of its process."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace

from meshrun.protocol.checked import Line, Rank, Time, WaitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception left a rank's program, or meshrun's own start of it."""

    rank: Rank
    at_ns: Time
    kind: Line
    """Name of the exception's class, such as ``ValueError``."""
    message: str
    traceback: str
    """The whole text, as ``python`` prints it."""
    shown: bool
    """Whether the program's own excepthook has printed it already."""
    handled: bool = False
    """Whether the program caught it, and called ``sys.exit()`` while it handled it."""

    def shifted(self, by_ns: int) -> RankRaised:
        """Return it with its time in another machine's clock, ahead by ``by_ns``."""
        return replace(self, at_ns=self.at_ns + by_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process has ended."""

    rank: Rank
    pid: int
    wait_status: WaitStatus
    """As ``os.waitpid`` gives it."""
    at_ns: Time
    unasked: bool = False
    """Whether it was at its end before it was sent any signal."""

    @property
    def aborted(self) -> bool:
        """Whether native code ended it by SIGABRT, as gloo and NCCL's watchdog do."""
        return os.WIFSIGNALED(self.wait_status) and os.WTERMSIG(self.wait_status) == signal.SIGABRT

    def shifted(self, by_ns: int) -> RankExited:
        """Return it with its time in another machine's clock, ahead by ``by_ns``."""
        return replace(self, at_ns=self.at_ns + by_ns)
