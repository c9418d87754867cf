"""When ranks last made progress, on this and on other nodes; heartbeats carry it. Pure."""

from __future__ import annotations

from msgspec import Struct


class Activity(Struct):
    """Times of this machine's monotonic clock; ``None`` where progress is not measured."""

    here_ns: int | None = None
    elsewhere_ns: int | None = None

    def skip(self, lost_ns: int, now_ns: int) -> None:
        """Exclude time in which this launcher could not measure."""
        if self.here_ns is not None:
            self.here_ns = min(now_ns, self.here_ns + lost_ns)
        if self.elsewhere_ns is not None:
            self.elsewhere_ns = min(now_ns, self.elsewhere_ns + lost_ns)

    def idle_s(self, now_ns: int) -> float | None:
        """Return how long the ranks of this node have made no progress."""
        return idle_s_at(now_ns, self.here_ns)


def latest(*times_ns: int | None) -> int | None:
    """Return the latest of some times; ``None`` if there is none."""
    return max((at for at in times_ns if at is not None), default=None)


def idle_s_at(now_ns: int, since_ns: int | None) -> float | None:
    """Return the seconds since a time."""
    return None if since_ns is None else (now_ns - since_ns) / 1e9
