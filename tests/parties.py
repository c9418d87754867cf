"""Several launchers' ends of the channel between nodes, in one process.

Sockets are real; the clock belongs to the test.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from meshrun.host.forked_call import ForkedCall
from meshrun.host.network import listen_on
from meshrun.host.reactor import Reactor
from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.protocol.events import FromNodes, ShowStacks
from meshrun.protocol.generation import Cause
from meshrun.rendezvous.coordinator import Coordinator
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.lobby import Lobby
from meshrun.rendezvous.membership import Fit, fit_without_mesh
from meshrun.rendezvous.messages import Join, Message
from meshrun.rendezvous.participant import Participant
from meshrun.rendezvous.this_node import ThisNode
from tests.kit import wait_until
from tests.plans import config_of

SECRET = os.urandom(32)
"""Of this process alone: the fallback port is derived from it, and other tests may be running."""
S = 1_000_000_000
_TURN_NS = 20_000_000
_News = TypeVar("_News")


class Clock:
    """The monotonic clock of the parties; each of their turns takes 20 ms."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * S

    def __call__(self) -> int:
        """Return the time, as a reactor's ``clock_ns``."""
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        """Advance the clock, without a turn."""
        self.now_ns += int(seconds * S)


class Party:
    """One launcher's end: its reactor, its messages to the user, and its events."""

    def __init__(self, clock: Clock, *, ahead_ns: int = 0) -> None:
        self.clock, self.ahead_ns = clock, ahead_ns
        self.reactor = Reactor(clock_ns=self.now_ns)
        self.notes: list[str] = []
        self.events: list[FromNodes] = []
        self.is_closed = False
        self.hub = Hub(self.reactor, self.notes.append)
        self.side: Lobby | Coordinator | Participant

    def turn(self) -> None:
        """Do what is due."""
        self.reactor.turn(most_s=0)
        self.events += self.hub.events
        self.hub.events.clear()

    def send(self, message: Message) -> None:
        """Send a message on behalf of its launch."""
        self.side.send(message)

    def now_ns(self) -> int:
        """Return the time by its own clock."""
        return self.clock.now_ns + self.ahead_ns

    def received(self, kind: type[_News]) -> list[_News]:
        """Return its events of one kind."""
        return [each for each in self.events if isinstance(each, kind)]

    @property
    def asked(self) -> list[str]:
        """The reasons given when it was asked where its ranks are."""
        return [event.why for event in self.received(ShowStacks)]

    def close(self) -> None:
        """Close everything, once."""
        if not self.is_closed:
            self.is_closed = True
            self.side.close()
            self.reactor.close()


class Parties:
    """A coordinator and participants, and the turns they take."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.all: list[Party] = []
        self._listeners: list[socket.socket] = []
        self._unauthenticated: list[socket.socket] = []
        self.port = 0

    def coordinator(
        self, nnodes: int, *, secret: bytes = SECRET, fit: Fit = fit_without_mesh, there: int = 0,
        **changes: Any,
    ) -> Party:  # fmt: skip
        """Add node 0, which listens on :attr:`port` and waits for ``there`` nodes, or all."""
        party, listener = Party(self.clock), listen_on("127.0.0.1", 0)
        self._listeners.append(listener)
        self.port = listener.getsockname()[1]
        own = changes.pop("own", None) or info("node0", **changes.pop("settings", {}))

        def hand_over(coordinator: Coordinator) -> None:
            party.side = coordinator

        party.side = Lobby(
            ThisNode(
                config=self._config(nnodes, **changes),
                info=own,
                secret=secret,
                hub=party.hub,
                fit=fit,
            ),
            listener=listener,
            run_id="run",
            hand_over=hand_over,
            nnodes=there or nnodes,
        )
        self.all.append(party)
        return party

    def participant(
        self, joining: Join, *, nnodes: int = 2, secret: bytes = SECRET, ahead_ns: int = 0,
        **changes: Any,
    ) -> Party:  # fmt: skip
        """Add a node that connects to :attr:`port`."""
        party = Party(self.clock, ahead_ns=ahead_ns)
        party.side = Participant(
            ThisNode(
                config=self._config(nnodes, **changes),
                info=joining,
                secret=secret,
                hub=party.hub,
            ),
            ("127.0.0.1",),
        )
        self.all.append(party)
        return party

    def outsider(self, data: bytes = b"", *, source: str = "127.0.0.1") -> socket.socket:
        """Connect to the coordinator and send something that no launcher would send."""
        connection = socket.create_connection(("127.0.0.1", self.port), source_address=(source, 0))
        self._unauthenticated.append(connection)
        connection.sendall(data)
        return connection

    def remove(self, party: Party) -> None:
        """Close a party while the others continue."""
        self.all.remove(party)
        party.close()

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Take turns until a condition holds."""

        def look() -> bool:
            self.turn()
            return bool(condition())

        wait_until(look, lambda: f"{what} {[(each.notes, each.events) for each in self.all]}")

    def turn(self, times: int = 1) -> None:
        """Have each party do what is due, once its lookups have ended: they take a turn at most."""
        for _ in range(times):
            for pid in ForkedCall.running:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self.clock.now_ns += _TURN_NS
            for party in list(self.all):
                party.turn()

    def pass_s(self, seconds: float, *, step_s: float = 0.5) -> None:
        """Let time pass, with turns meanwhile."""
        for _ in range(int(seconds / step_s)):
            self.clock.pass_s(step_s)
            self.turn()
            time.sleep(0.001)  # for the kernel to carry bytes

    def close(self) -> None:
        """Close all, the coordinator last: it waits until the others have received everything."""
        for each in self._unauthenticated:
            each.close()
        for party in reversed(self.all):
            party.close()
        for each in self._listeners:
            each.close()

    def _config(self, nnodes: int, **changes: Any) -> RendezvousConfig:
        return config_of(nnodes, host="127.0.0.1", port=self.port, **changes)


WHY = Cause(description="why", at_ns=1)
"""The cause of a generation's end."""


def info(host: str, rank: int | None = None, **settings: str) -> Join:
    """Return the message with which a node joins."""
    return Join(host=host, node_rank=rank, nproc=1, settings=settings)


def names(parties: Sequence[Party]) -> list[list[str]]:
    """Return the names of the events that each party had."""
    return [[type(each).__name__ for each in party.events] for party in parties]
