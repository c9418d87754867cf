"""The monotonic clock of another machine, by round trips of messages. Pure."""

from __future__ import annotations

_DRIFT = 1e-4
"""How fast two clocks may drift apart, so a later round trip may count although it is longer."""
_TRIPS = 2
"""How many round trips suffice to know the peer's clock."""


class PeerClock:
    """How far a peer's clock is ahead of ours, as the shortest round trip tells."""

    def __init__(self) -> None:
        self.ahead_ns = 0
        """0 until there has been a round trip."""
        self._trips = self._shortest_ns = self._measured_ns = 0

    @property
    def is_known(self) -> bool:
        """Whether there have been enough round trips."""
        return self._trips >= _TRIPS

    def unsure_ns(self, now_ns: int) -> int:
        """Return the error of :attr:`ahead_ns`."""
        return self._shortest_ns // 2 + self._drift_ns(now_ns)

    def measure(self, began_ns: int, theirs_ns: int, now_ns: int) -> None:
        """Take a round trip from ``began_ns`` to ``now_ns``, with the peer's time in between."""
        trip_ns = now_ns - began_ns
        if not self._trips or trip_ns <= self._shortest_ns + self._drift_ns(now_ns):
            self._shortest_ns, self._measured_ns = trip_ns, now_ns
            self.ahead_ns = theirs_ns - (began_ns + now_ns) // 2
        self._trips += 1

    def _drift_ns(self, now_ns: int) -> int:
        return int(_DRIFT * (now_ns - self._measured_ns))
