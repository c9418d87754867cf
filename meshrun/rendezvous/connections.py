"""A launcher's connections in the loop's selector, and the events they produce."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable

from meshrun.protocol.activity import Activity
from meshrun.protocol.events import FromNodes
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.deadline import Deadline

_GOODBYE_S = 2.0
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class Connections:
    """What a coordinator and a participant share.

    Args:
        selector: The loop's; its keys hold what to call.
        note: Shows people one line.
    """

    def __init__(self, selector: selectors.BaseSelector, note: Callable[[str], None]) -> None:
        self.selector = selector
        self.note = note
        self.news: deque[FromNodes] = deque()
        self.activity = Activity()
        self._lost_ns = 0

    def add(self, connection: Connection, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called when something came, or there is room for what waits."""
        self.selector.register(connection, selectors.EVENT_READ, on_ready)
        self.settle(connection)

    def settle(self, connection: Connection) -> None:
        """After sending or receiving: wait for what the link now waits for."""
        if connection.closed is not None:
            self.drop(connection)
            return
        key = self.selector.get_key(connection)
        wanted = _BOTH if connection.wants_to_write else selectors.EVENT_READ
        if key.events != wanted:
            self.selector.modify(connection, wanted, key.data)

    def close(self, connection: Connection, why: str) -> None:
        """Stop watching a link and close it."""
        self.drop(connection)
        connection.close(why)

    def skip(self, lost_ns: int) -> None:
        """Do not count this time as the others' silence: nobody could listen here."""
        self._lost_ns += lost_ns
        now_ns = time.monotonic_ns()
        for key in self.selector.get_map().values():
            if isinstance(key.fileobj, Connection):
                key.fileobj.heard_ns = min(now_ns, key.fileobj.heard_ns + lost_ns)

    def deadline(self, timeout_s: float) -> Deadline:
        """Return a deadline from now on, to which lost time does not count."""
        return Deadline(timeout_s, lambda: self._lost_ns)

    def drop(self, connection: Connection) -> None:
        """Stop watching a link, closed or not."""
        try:
            self.selector.unregister(connection)
        except (KeyError, ValueError):
            # The selector looks a closed one up by its object.
            pass


def say_goodbye(connections: Iterable[Connection], board: Connections) -> None:
    """Close connections once the other ends have read all that was said, or do not read on."""
    connections = list(connections)
    deadline = time.monotonic() + _GOODBYE_S
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            board.drop(connection)
            if connection.closed is None:
                selector.register(
                    connection, selectors.EVENT_READ | selectors.EVENT_WRITE, connection
                )
                connection.end_writing()
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                connection = key.data
                connection.receive()
                connection.end_writing()
                if connection.closed is not None:
                    selector.unregister(connection)
                elif not connection.wants_to_write:
                    selector.modify(connection, selectors.EVENT_READ, connection)
    for connection in connections:
        connection.close("the launch is over")
