"""What all connections of a launcher share: the loop's reactor, events, and time limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshrun.errors import MeshrunError
from meshrun.host.reactor import Reactor
from meshrun.protocol.activity import Activity
from meshrun.protocol.events import FromNodes, JoinFailed

if TYPE_CHECKING:
    from meshrun.rendezvous.connection import Connection

RETRY_S = 0.5
"""How long to wait after a failed attempt."""
CHECK_EVERY_S = 1.0
"""How often a launcher checks whether nodes are silent or missing for too long."""
FIRST_NOTE_S, NOTE_EVERY_S = 3.0, 5.0
"""When the first note about a wait is printed, and how often after that."""


class Deadline:
    """A time limit that begins now.

    The owner asks for it in each check: a timer would have to be cancelled wherever the wait
    ends.
    """

    def __init__(self, timeout_s: float, hub: Hub) -> None:
        self.timeout_s, self._hub = timeout_s, hub
        self._began_ns, self._lost_before_ns = hub.now_ns(), hub.lost_ns
        self._next_note_ns = self._began_ns + int(FIRST_NOTE_S * 1e9)

    @property
    def waited_s(self) -> float:
        """How long the wait has lasted."""
        lost_ns = self._hub.lost_ns - self._lost_before_ns
        return (self._hub.now_ns() - self._began_ns - lost_ns) / 1e9

    def __str__(self) -> str:
        """Return how long the wait has lasted, and may last: ``3 of 600 s``."""
        return f"{self.waited_s:.0f} of {self.timeout_s:.0f} s"

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.waited_s >= self.timeout_s

    def note_is_due(self) -> bool:
        """Return whether it is time to print a note; if so, schedule the next one."""
        now_ns = self._hub.now_ns()
        if now_ns < self._next_note_ns:
            return False
        self._next_note_ns = now_ns + int(NOTE_EVERY_S * 1e9)
        return True


class Hub:
    """The connections of this launcher, whether it is the coordinator or a participant."""

    def __init__(self, reactor: Reactor, note: Callable[[str], None]) -> None:
        self.reactor = reactor
        self.connections: set[Connection] = set()
        """Those that are not closed."""
        self.note = note
        self.events: deque[FromNodes] = deque()
        self.activity = Activity()
        self.reported_idle_s: float | None = None
        """How long the ranks that this launcher reports on have made no progress, for heartbeats;
        ``None`` if it does not know."""
        self.lost_ns = 0
        """How long this process has been suspended so far."""
        reactor.on_skip(self.skip)

    def now_ns(self) -> int:
        """Return the time by the reactor's clock."""
        return self.reactor.now_ns()

    def skip(self, lost_ns: int) -> None:
        """Do not count time in which this launcher could not receive as the peers' silence."""
        self.lost_ns += lost_ns
        now_ns = self.now_ns()
        for connection in self.connections:
            connection.received_ns = min(now_ns, connection.received_ns + lost_ns)

    def fail(self, error: MeshrunError) -> None:
        """Queue the event that this node or the launch has failed to join."""
        self.events.append(JoinFailed(error=error, at_ns=self.now_ns()))

    def deadline(self, timeout_s: float) -> Deadline:
        """Return a deadline that begins now, and does not count lost time."""
        return Deadline(timeout_s, self)
