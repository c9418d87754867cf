"""Node 0 at the start of a generation with other nodes: opens the store, sends each its place."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from meshrun.errors import HostError, UsageError
from meshrun.host.host_names import is_address
from meshrun.host.network import address_of, is_unspecified, listen_for, listen_on, own_addresses
from meshrun.host.own_variables import OPEN_STORE
from meshrun.plan.parse import is_on
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.protocol.events import AllJoined
from meshrun.protocol.generation import Cause
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.membership import Membership
from meshrun.rendezvous.messages import Join, SharedWelcome, Welcome
from meshrun.rendezvous.reachability import Reachability
from meshrun.rendezvous.running_generation import OWN
from meshrun.rendezvous.this_node import ThisNode

_MOST_ADDRESSES = 16
"""How many addresses a node may list."""


def addresses_to_name() -> list[str]:
    """Return the IPv6 addresses from which this machine's ranks may connect to the store."""
    return [each for each in own_addresses() if ":" in each and each != "::1"][:_MOST_ADDRESSES]


def listen_for_nodes(
    on: str, connections: Iterable[Connection], nodes: Iterable[Join], hub: Hub
) -> tuple[socket.socket, socket.socket | None]:
    """Return a socket for connections from this node and the others, by any of their addresses.

    The ranks' store has no password. The second one, if there is one, gets the connections of
    others; it is to stay open as long.

    Raises:
        HostError: If this machine has lost the address ``on``.
    """
    try:
        if is_on(os.environ.get(OPEN_STORE)):
            return listen_on(on, 0), None
        theirs = {each.their_address for each in connections if each.their_address}
        if ":" in on:
            named = (each for node in nodes for each in node.addresses[:_MOST_ADDRESSES])
            theirs |= {each for each in named if ":" in each and is_address(each)}
        try:
            return listen_for({*own_addresses(), *theirs}, on)
        except OSError as error:
            listener = listen_on(on, 0)
            place = format_endpoint(*listener.getsockname()[:2])
            hub.note(
                "cannot restrict the ranks' store to this launch's machines"
                f" ({error.strerror}): anyone who can reach {place} can write to it"
            )
            return listener, None
    except UsageError as error:
        raise HostError(
            f"this machine has lost the address {on}, where the nodes met",
            hint="a launch cannot continue without node 0's address; start it again",
        ) from error


class NodeAssigner:
    """The sockets of the ranks' store, and what the nodes need to know to start ranks.

    Args:
        listener: Node 0's socket for launchers.
        connections: To all other nodes, by number; the owner adds and removes them.
    """

    def __init__(
        self,
        node: ThisNode,
        nodes: Membership,
        connections: Mapping[int, Connection],
        *,
        listener: socket.socket,
        run_id: str,
    ) -> None:
        self._hub, self._policy, self._run_id = node.hub, node.policy, run_id
        self._nodes, self._connections = nodes, connections
        self._bound, port = address_of(listener.getsockname()), listener.getsockname()[1]
        known = (connection.own_address for connection in connections.values())
        is_any = is_unspecified(self._bound)
        self._address = next(known, node.info.host) if is_any else self._bound
        self.endpoint = format_endpoint(self._address, port)
        self.store_listener: socket.socket | None = None
        """The socket of this generation's store, which ranks of another one cannot reach."""
        self._sink: socket.socket | None = None
        """The socket that gets connections of outsiders to the store."""
        self._reach: Reachability | None = None
        """Tests whether the next node can be reached."""

    def assign(
        self, numbers: Sequence[int], causes: Sequence[Cause], previous: dict[str, Any]
    ) -> AllJoined:
        """Send each node its place; return the event for this node's launch.

        Args:
            numbers: The nodes in node order, this one first.
            causes: Why each generation before this one ended.
            previous: The layout of the last one.

        Raises:
            HostError: If this machine has lost the address where the nodes joined.
        """
        self._close_store()
        others = [self._connections[number] for number in numbers[1:]]
        infos, layout = [self._nodes.infos[number] for number in numbers], self._nodes.layout
        self.store_listener, self._sink = listen_for_nodes(
            self._bound, others, self._nodes.infos.values(), self._hub
        )
        if others and not causes and self._policy.tests_reach:
            self._reach = Reachability(self._address, self._hub)
            self._reach.probe(infos[1].host, others[0].their_address, infos[1].reach_port)
        own = Welcome(
            node_rank=0,
            hosts=tuple(info.host for info in infos),
            nproc_per_node=tuple(info.nproc for info in infos),
            nodes_per_domain=layout.nodes_per_domain if layout else (),
            roles=tuple(info.role for info in infos),
            run_id=self._run_id,
            store_port=self.store_listener.getsockname()[1],
            # Old tracebacks are useless, and would make each message longer than the last.
            causes=(*(replace(each, raised=None) for each in causes[:-1]), *causes[-1:]),
            previous=previous,
        )
        shared = SharedWelcome(own)
        for rank, other in enumerate(others, 1):
            after = numbers[(rank + 1) % len(numbers)]
            next_node = ("", 0) if causes else self._port_of(after)  # tested already
            other.send_text(shared.encode(rank, *next_node), kept=False)
        return own.joined(
            store_address=self._address, own_address=self._address, at_ns=self._hub.now_ns()
        )

    def _port_of(self, number: int) -> tuple[str, int]:
        """Return a node's address and port for the test by the preceding node.

        The address is "" for that of the coordinator, and the port 0 if there is nothing to test.
        """
        if self._reach is None:
            return "", 0
        if number == OWN:
            return "", self._reach.port
        return self._connections[number].their_address, self._nodes.infos[number].reach_port

    def _close_store(self) -> None:
        for each in (self.store_listener, self._sink):
            if each is not None:
                each.close()

    def close(self) -> None:
        """Close the sockets."""
        if self._reach is not None:
            self._reach.close()
        self._close_store()
