"""The launcher of node 0 once all nodes have joined: tells every node what happens next."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable, Mapping
from functools import partial

from meshrun.protocol.activity import idle_s_since, latest
from meshrun.protocol.events import (
    SILENT,
    AllIdle,
    LaunchOver,
    NextBegins,
    NodeLost,
    OthersFailed,
    OthersFinished,
)
from meshrun.protocol.generation import NodeOutcome
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.connections import Connections
from meshrun.rendezvous.messages import (
    Begin,
    End,
    Failed,
    Finished,
    Idle,
    Leave,
    MayLeave,
    Message,
    Over,
    Where,
)
from meshrun.rendezvous.reachability import Reachability

BEAT_S = 1.0
SILENT_S = 3 * BEAT_S
"""After so long without a word it may be another launcher that speaks for a host."""
_GOODBYE_S = 2.0
OWN = 0
"""The coordinator's own number among the nodes: it is always the first."""


class Coordinator:
    """Node 0 of a launch whose nodes have met.

    Args:
        connections: To the other nodes, by node rank.
        hosts: Names of all nodes, in node order.
        world_size: How many ranks they have.
        node_timeout_s: How long a node may be silent.
        board: Where links are watched.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        *,
        hosts: list[str],
        world_size: int,
        node_timeout_s: float,
        board: Connections,
    ) -> None:
        self._reach: Reachability | None = None
        """Tries whether the next node can be reached."""
        self._connections, self._hosts, self._world_size = dict(connections), hosts, world_size
        self._node_timeout_s, self._board = node_timeout_s, board
        self._next_beat_ns = time.monotonic_ns()
        self._over = False
        self._begin_generation(0)
        for node_rank, connection in self._connections.items():
            board.add(connection, partial(self._on_ready, node_rank))

    def _begin_generation(self, generation: int) -> None:
        self._generation = generation
        self._outcomes: dict[int, NodeOutcome] = {}
        self._finished: set[int] = set()
        self._idle: set[int] = set()
        self._ending = False

    # ---- the launch's own wishes -----------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Do what this node's own launch says, and pass on what concerns the others."""
        now_ns = time.monotonic_ns()
        match message:
            case Failed():
                self._end(OWN, message)
            case Finished():
                self._finished.add(OWN)
                self._leave_if_all_finished()
            case Idle():
                self._idle.add(OWN)
                self._advance_if_all_idle()
            case Begin():
                self._broadcast(message)
                self._begin_generation(message.generation)
                self._board.news.append(
                    NextBegins(generation=message.generation, cause=message.cause, at_ns=now_ns)
                )
            case Over():
                self._over = True
                self._broadcast(message)
                self._board.news.append(over_event(message))
            case Where():
                self._broadcast(message)

    # ---- time ------------------------------------------------------------------------------

    @property
    def next_look_ns(self) -> int | None:
        """When :meth:`look` has something to do."""
        return self._next_beat_ns

    def look(self) -> None:
        """Do what is due: beats, and whether a node is silent for too long."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_beat_ns:
            return
        self._next_beat_ns = now_ns + int(BEAT_S * 1e9)
        if self._reach is not None:
            self._reach.look()
        activity = self._board.activity
        activity.elsewhere_ns = latest(
            *(connection.active_ns for connection in self._connections.values())
        )
        idle_s = idle_s_since(latest(activity.here_ns, activity.elsewhere_ns))
        for node_rank, connection in list(self._connections.items()):
            connection.beat(idle_s=idle_s)
            self._board.settle(connection)
            silent_s = (now_ns - connection.heard_ns) / 1e9
            if silent_s > self._node_timeout_s:
                why = f"{SILENT} for {silent_s:.0f} s"
                connection.part(why)
                self._lose(node_rank, why)

    # ---- hearing ---------------------------------------------------------------------------

    def _on_ready(self, node_rank: int) -> None:
        connection = self._connections.get(node_rank)
        if connection is None:
            return
        for message in connection.receive():
            if getattr(message, "generation", None) == self._generation:
                self._hear(node_rank, connection, message)
        if connection.closed is not None:
            self._lose(node_rank, connection.closed)
        else:
            self._board.settle(connection)

    def _hear(self, node_rank: int, connection: Connection, message: Message) -> None:
        match message:
            case Failed() | Idle() if message.last_rank >= self._world_size:
                connection.close(f"it reported rank {message.last_rank} of {self._world_size}")
            case Failed():
                self._outcomes[node_rank] = message.outcome.shifted(-connection.ahead_ns)
                self._end(node_rank, message)
            case Idle():
                self._outcomes[node_rank] = message.outcome.shifted(-connection.ahead_ns)
                self._idle.add(node_rank)
                self._advance_if_all_idle()
            case Finished():
                self._finished.add(node_rank)
                self._leave_if_all_finished()
            case Leave():
                connection.close(message.why)

    def _lose(self, node_rank: int, why: str) -> None:
        self._board.close(self._connections.pop(node_rank), why)
        if self._over:
            return
        host, now_ns = self._hosts[node_rank], time.monotonic_ns()
        self._board.news.append(NodeLost(node_rank=node_rank, host=host, why=why, at_ns=now_ns))
        lost = f"node {node_rank} ({host}) was lost: {why}"
        self._broadcast(End(generation=self._generation, why=lost, signum=0))
        self._ending = True
        self._advance_if_all_idle()

    # ---- deciding --------------------------------------------------------------------------

    def _end(self, node_rank: int, message: Failed) -> None:
        """One node's ranks are over before they are done: all others' are to end, once."""
        if self._ending or self._over:
            return
        self._ending = True
        outcome = message.outcome
        end = End(
            generation=self._generation,
            why=outcome.headline or "a rank failed",
            signum=outcome.signum,
            is_hung=outcome.is_hung,
        )
        self._broadcast(end, but=node_rank)
        if node_rank != OWN:
            self._board.news.append(others_failed(end))

    def _leave_if_all_finished(self) -> None:
        if self._finished >= {OWN, *self._connections}:
            self._broadcast(MayLeave(generation=self._generation))
            self._board.news.append(OthersFinished(at_ns=time.monotonic_ns()))

    def _advance_if_all_idle(self) -> None:
        if self._idle >= {OWN, *self._connections}:
            self._idle.discard(OWN)  # it is asked once
            outcomes = tuple(self._outcomes.values())
            self._board.news.append(AllIdle(outcomes=outcomes, at_ns=time.monotonic_ns()))

    def _broadcast(self, message: Message, *, but: int = OWN) -> None:
        for node_rank, connection in self._connections.items():
            if node_rank != but:
                connection.send(message)
                self._board.settle(connection)

    def close(self) -> None:
        """Have what was said arrive, as far as the others still listen, and let them go."""
        if self._reach is not None:
            self._reach.close()
        say_goodbye(self._connections.values(), self._board)


def others_failed(end: End) -> OthersFailed:
    """Return the news that this generation is to end."""
    return OthersFailed(
        why=end.why, signum=end.signum, is_hung=end.is_hung, at_ns=time.monotonic_ns()
    )


def over_event(message: Over) -> LaunchOver:
    """Return the news that the launch is over."""
    return LaunchOver(
        exit_code=message.exit_code,
        signum=message.signum,
        preempted=message.preempted,
        headline=message.headline,
        at_ns=time.monotonic_ns(),
    )


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
