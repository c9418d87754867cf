"""All connections of a launcher: watched in the loop's reactor, with the events they produce."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from meshrun.errors import MeshrunError
from meshrun.host.reactor import Reactor
from meshrun.protocol.activity import Activity
from meshrun.protocol.events import FromNodes, MeetingFailed
from meshrun.rendezvous.connection import BEAT_S, Connection
from meshrun.rendezvous.deadline import Deadline

_SILENT_BEATS = 3
"""After this many missing heartbeats, another launcher may replace one on the same host."""
_NODES_PER_S = 500
"""How many heartbeats the coordinator sends per second at most."""
_LEAST_BEATS = 4
"""How many heartbeats fit into the node timeout at least."""
_GOODBYE_S = 2.0


class Hub:
    """The connections of this launcher, whether it is the coordinator or a participant.

    Args:
        note: Prints a line for the user.
    """

    def __init__(self, reactor: Reactor, note: Callable[[str], None]) -> None:
        self.reactor = reactor
        self._watched: dict[Connection, Callable[[], None]] = {}
        self.note = note
        self.events: deque[FromNodes] = deque()
        self.activity = Activity()
        self._lost_ns = 0
        reactor.on_skip(self.skip)

    def add(self, connection: Connection, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called when the connection can be read, or written if it wants to."""
        self._watched[connection] = on_ready
        self.reactor.add_reader(connection, on_ready)
        self.update(connection)

    def update(self, connection: Connection) -> None:
        """Adapt to what the connection waits for, after sending or receiving."""
        if connection.closed is not None:
            self.drop(connection)
        elif connection.wants_to_write:
            self.reactor.add_writer(connection, self._watched[connection])
        else:
            self.reactor.remove_writer(connection)

    def close(self, connection: Connection, why: str) -> None:
        """Stop watching a connection and close it."""
        self.drop(connection)
        connection.close(why)

    def skip(self, lost_ns: int) -> None:
        """Do not count time in which this launcher could not receive as the peers' silence."""
        self._lost_ns += lost_ns
        now_ns = time.monotonic_ns()
        for connection in self._watched:
            connection.received_ns = min(now_ns, connection.received_ns + lost_ns)

    def fail(self, error: MeshrunError) -> None:
        """Queue the event that this node or the launch has failed to join."""
        self.events.append(MeetingFailed(error=error, at_ns=time.monotonic_ns()))

    def deadline(self, timeout_s: float) -> Deadline:
        """Return a deadline that begins now, and does not count lost time."""
        return Deadline(timeout_s, lambda: self._lost_ns)

    def drop(self, connection: Connection) -> None:
        """Stop watching a connection, closed or not."""
        self._watched.pop(connection, None)
        self.reactor.remove(connection)


def beat_s(nnodes: int, node_timeout_s: float) -> float:
    """Return the interval of heartbeats, which is longer with many nodes."""
    return max(BEAT_S, min(nnodes / _NODES_PER_S, node_timeout_s / _LEAST_BEATS))


def find_replaced(
    numbers: Iterable[int], connections: Mapping[int, Connection], every_s: float
) -> list[int]:
    """Return the connections that a host which was cut off has replaced by a new one.

    Args:
        numbers: The connections to that host.
        connections: All connections, by number.
        every_s: The interval of heartbeats.
    """
    since_ns = time.monotonic_ns() - int(_SILENT_BEATS * every_s * 1e9)
    return [
        number
        for number in numbers
        if number in connections and connections[number].received_ns < since_ns
    ]


def close_gracefully(connections: Iterable[Connection], hub: Hub) -> None:
    """Close connections once the peers have read everything, or after 2 seconds."""
    connections = list(connections)
    with Reactor() as reactor:
        own = Hub(reactor, hub.note)

        def receive(connection: Connection) -> None:
            connection.receive()
            connection.end_writing()
            own.update(connection)

        for connection in connections:
            hub.drop(connection)
            if connection.closed is None:
                connection.end_writing()
                own.add(connection, partial(receive, connection))
        reactor.run_until(lambda: not reactor.watched, timeout_s=_GOODBYE_S)
    for connection in connections:
        connection.close("the launch has ended")
