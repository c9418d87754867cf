"""When ranks last made progress, here and on other nodes; launchers send it in their beats."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    """Monotonic times of this machine; ``None`` where nobody looks."""

    here_ns: int | None = None
    elsewhere_ns: int | None = None

    def skip(self, lost_ns: int) -> None:
        """Do not count this time, in which nobody here could look."""
        now_ns = time.monotonic_ns()
        if self.here_ns is not None:
            self.here_ns = min(now_ns, self.here_ns + lost_ns)
        if self.elsewhere_ns is not None:
            self.elsewhere_ns = min(now_ns, self.elsewhere_ns + lost_ns)

    @property
    def idle_s(self) -> float | None:
        """For how long the ranks of this node have made no progress."""
        return idle_s_since(self.here_ns)


def latest(*times_ns: int | None) -> int | None:
    """Return the last of these times, ``None`` if there is none."""
    return max((at for at in times_ns if at is not None), default=None)


def idle_s_since(at_ns: int | None) -> float | None:
    """Return the seconds since a time."""
    return None if at_ns is None else (time.monotonic_ns() - at_ns) / 1e9
