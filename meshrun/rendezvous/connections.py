"""A launcher's connections in the loop's reactor, and the events they produce."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from meshrun.host.reactor import Reactor
from meshrun.protocol.activity import Activity
from meshrun.protocol.events import FromNodes
from meshrun.rendezvous.connection import BEAT_S, Connection
from meshrun.rendezvous.deadline import Deadline

_SILENT_BEATS = 3
"""After so long without a word it may be another launcher that speaks for a host."""
_NODES_PER_S = 500
"""To so many the coordinator says each second that it is there."""
_LEAST_BEATS = 4
"""So often a node is heard of within the time after which it is lost."""
_GOODBYE_S = 2.0


class Connections:
    """What a coordinator and a participant share."""

    def __init__(self, reactor: Reactor, note: Callable[[str], None]) -> None:
        self.reactor = reactor
        self._heard: dict[Connection, Callable[[], None]] = {}
        self.note = note
        self.events: deque[FromNodes] = deque()
        self.activity = Activity()
        self._lost_ns = 0
        reactor.on_skip(self.skip)

    def add(self, connection: Connection, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called when something came, or there is room for what waits."""
        self._heard[connection] = on_ready
        self.reactor.add_reader(connection, on_ready)
        self.update(connection)

    def update(self, connection: Connection) -> None:
        """After sending or receiving: wait for what the link now waits for."""
        if connection.closed is not None:
            self.drop(connection)
        elif connection.wants_to_write:
            self.reactor.add_writer(connection, self._heard[connection])
        else:
            self.reactor.remove_writer(connection)

    def close(self, connection: Connection, why: str) -> None:
        """Stop watching a link and close it."""
        self.drop(connection)
        connection.close(why)

    def skip(self, lost_ns: int) -> None:
        """Do not count this time as the others' silence: nobody could listen here."""
        self._lost_ns += lost_ns
        now_ns = time.monotonic_ns()
        for connection in self._heard:
            connection.received_ns = min(now_ns, connection.received_ns + lost_ns)

    def deadline(self, timeout_s: float) -> Deadline:
        """Return a deadline from now on, to which lost time does not count."""
        return Deadline(timeout_s, lambda: self._lost_ns)

    def drop(self, connection: Connection) -> None:
        """Stop watching a link, closed or not."""
        self._heard.pop(connection, None)
        self.reactor.remove(connection)


def beat_s(nnodes: int, node_timeout_s: float) -> float:
    """Return how often nodes of a launch say that they are there: seldom where they are many."""
    return max(BEAT_S, min(nnodes / _NODES_PER_S, node_timeout_s / _LEAST_BEATS))


def find_silent(
    numbers: Iterable[int], connections: Mapping[int, Connection], every_s: float
) -> list[int]:
    """Return which connections to a host are silent: it was cut off, and comes again.

    Args:
        numbers: Those to that host.
        connections: All, by number.
        every_s: How often each is heard of.
    """
    since_ns = time.monotonic_ns() - int(_SILENT_BEATS * every_s * 1e9)
    return [
        number
        for number in numbers
        if number in connections and connections[number].received_ns < since_ns
    ]


def close_gracefully(connections: Iterable[Connection], hub: Connections) -> None:
    """Close connections once the other ends have read all that was said, or do not read on."""
    connections = list(connections)
    with Reactor() as reactor:
        last = Connections(reactor, hub.note)

        def receive(connection: Connection) -> None:
            connection.receive()
            connection.end_writing()
            last.update(connection)

        for connection in connections:
            hub.drop(connection)
            if connection.closed is None:
                connection.end_writing()
                last.add(connection, partial(receive, connection))
        reactor.run_until(lambda: not reactor.watched, timeout_s=_GOODBYE_S)
    for connection in connections:
        connection.close("the launch has ended")
