"""What all connections of a launcher share: the loop's reactor, and the events they produce."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshrun.errors import MeshrunError
from meshrun.host.reactor import Reactor
from meshrun.protocol.activity import Activity
from meshrun.protocol.events import FromNodes, MeetingFailed
from meshrun.rendezvous.deadline import Deadline

if TYPE_CHECKING:
    from meshrun.rendezvous.connection import Connection


class Hub:
    """The connections of this launcher, whether it is the coordinator or a participant."""

    def __init__(self, reactor: Reactor, note: Callable[[str], None]) -> None:
        self.reactor = reactor
        self.connections: set[Connection] = set()
        """Those that are not closed."""
        self.note = note
        self.events: deque[FromNodes] = deque()
        self.activity = Activity()
        self._lost_ns = 0
        reactor.on_skip(self.skip)

    def skip(self, lost_ns: int) -> None:
        """Do not count time in which this launcher could not receive as the peers' silence."""
        self._lost_ns += lost_ns
        now_ns = time.monotonic_ns()
        for connection in self.connections:
            connection.received_ns = min(now_ns, connection.received_ns + lost_ns)

    def fail(self, error: MeshrunError) -> None:
        """Queue the event that this node or the launch has failed to join."""
        self.events.append(MeetingFailed(error=error, at_ns=time.monotonic_ns()))

    def deadline(self, timeout_s: float) -> Deadline:
        """Return a deadline that begins now, and does not count lost time."""
        return Deadline(timeout_s, lambda: self._lost_ns)
