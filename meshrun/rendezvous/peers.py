"""The other nodes, for the loop: this launcher as coordinator or as participant."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from meshrun.errors import HostError, MeshrunError, RendezvousError
from meshrun.host.host_names import is_address
from meshrun.host.network import listen_on, outward_address, own_addresses, with_interface_of
from meshrun.host.printable import one_line
from meshrun.plan.rendezvous_config import (
    RendezvousConfig,
    fallback_port,
    format_endpoint,
    join_at,
)
from meshrun.plan.rendezvous_options import C10D, DEFAULT_PORT
from meshrun.protocol.activity import Activity
from meshrun.protocol.events import FromNodes
from meshrun.protocol.generation import Withdraw
from meshrun.protocol.zygote_messages import (
    FromNegotiation,
    Negotiate,
    Negotiated,
    NegotiationFailed,
    NegotiationWaits,
)
from meshrun.rendezvous.coordinator import Coordinator
from meshrun.rendezvous.endpoint import Endpoint, endpoint_here
from meshrun.rendezvous.lobby import DuplicateCoordinator, Lobby
from meshrun.rendezvous.messages import Message
from meshrun.rendezvous.participant import Participant
from meshrun.rendezvous.resolve import NameResolver
from meshrun.rendezvous.this_node import ThisNode
from meshrun.rendezvous.torch_negotiation import EVERYWHERE, TorchNegotiation, listen_outward

_NOTIFYING_TAKES_S = 4.0
"""How long it takes to notify nodes that wait in torch's rendezvous, once torch is imported."""


class Peers:
    """The launchers of the other nodes.

    Args:
        negotiate: Starts torch's rendezvous, for backends that need it.
    """

    def __init__(self, node: ThisNode, *, negotiate: Callable[[Negotiate], None]) -> None:
        if node.config.backend == C10D:  # it ignores --node-rank, as torch's does
            node = replace(node, info=replace(node.info, node_rank=None))
        self._node, self._hub, self._negotiate = node, node.hub, negotiate
        self._withdrawal: Withdraw | None = None
        self._side: NameResolver | TorchNegotiation | Lobby | Coordinator | Participant | None = (
            None
        )
        """What this launcher is to the others by now; ``None`` if it could not become anything."""
        self._listener: socket.socket | None = None
        try:
            self._begin()
        except MeshrunError as error:
            self._hub.fail(error)

    @property
    def _config(self) -> RendezvousConfig:
        return self._node.config

    @property
    def activity(self) -> Activity:
        """When ranks last made progress, here and elsewhere."""
        return self._hub.activity

    @property
    def listener(self) -> socket.socket | None:
        """The coordinator's socket; once all nodes have joined, that of the ranks' store."""
        if isinstance(self._side, Coordinator):
            return self._side.store_listener
        return self._listener

    @property
    def events(self) -> deque[FromNodes]:
        """The queued events, for the loop to take."""
        return self._hub.events

    def send(self, message: Message) -> None:
        """Send the other nodes a message of this node's launch, if they are known by now."""
        if isinstance(self._side, Coordinator | Participant):
            self._side.send(message)

    def withdraw(self, notice: Withdraw) -> None:
        """Notify the other nodes, before all have joined, that this one withdraws."""
        self._withdrawal = notice
        if isinstance(self._side, TorchNegotiation | Lobby | Participant):
            self._side.withdraw(notice)

    @property
    def least_linger_s(self) -> float:
        """How long it takes at least to notify the others that this node withdraws."""
        return _NOTIFYING_TAKES_S if isinstance(self._side, TorchNegotiation) else 0.0

    @property
    def imports_torch(self) -> bool:
        """Whether the process that will notify the others is importing torch."""
        return isinstance(self._side, TorchNegotiation) and self._side.imports_torch

    @property
    def all_notified(self) -> bool:
        """Whether all others that can be notified of a failure to join have been."""
        return isinstance(self._side, Coordinator | None) or self._side.all_notified

    @property
    def all_delivered(self) -> bool:
        """Whether all others have received the result of the launch, if this node sends it."""
        return not isinstance(self._side, Coordinator) or self._side.all_delivered

    def start_negotiation(self) -> None:
        """Start torch's rendezvous, if there is one and its endpoint is known."""
        if isinstance(self._side, TorchNegotiation):
            self._side.start()

    def receive(self, event: FromNegotiation) -> None:
        """Handle a message of the process that runs torch's rendezvous."""
        negotiation = self._side
        if not isinstance(negotiation, TorchNegotiation):
            return
        match event:
            case NegotiationWaits(text=text):
                self._hub.note(one_line(text))
            case NegotiationFailed(text=text, hint=hint):
                self._hub.fail(
                    RendezvousError(
                        f"{self._config.backend} at {self._config.endpoint}: {one_line(text)}",
                        hint=hint,
                    )
                )
            case Withdraw():
                self._hub.fail(event.as_error())
            case Negotiated():
                self._connect_as_negotiated(event, negotiation)
                negotiation.close()

    def _connect_as_negotiated(self, found: Negotiated, negotiation: TorchNegotiation) -> None:
        """Connect to the other launchers, as torch's rendezvous is done."""
        first = found.coordinator
        address = with_interface_of(first.address, self._config.host or "")
        self._node = replace(
            self._node,
            config=join_at(self._config, address, first.port, nnodes=found.nnodes),
            info=replace(self._node.info, node_rank=found.node_rank),
            secret=hashlib.sha256(self._node.secret + first.secret.encode()).digest(),
        )
        if found.node_rank == 0 and (listener := negotiation.take_listener()) is not None:
            self._become_coordinator(listener, nnodes=found.nnodes)
            return
        self._become_participant((self._config.host or "",))

    def close(self) -> None:
        """Send what is left to send, and close all connections."""
        if self._side is not None:
            self._side.close()
        if self._listener is not None:
            self._listener.close()

    # ---- coordinator or participant --------------------------------------------------------

    def _begin(self) -> None:
        config = self._config
        if config.listener is not None:
            self._become_coordinator(socket.socket(fileno=config.listener))
        elif config.host is None and config.asks_torch:
            self._ask_torch(None)
        elif config.host is None:
            self._become_coordinator(listen_outward(config))
        elif config.is_first is False and not config.asks_torch:
            self._become_participant(self._addresses_of_coordinator())
        else:
            self._side = NameResolver(config, self._hub, self._found)

    def _found(self, addresses: list[str], why: str) -> bool:
        """Choose a side, unless the name must resolve first; return whether one was chosen."""
        config = self._config
        addresses = list(dict.fromkeys([*addresses, *filter(is_address, config.coordinator)]))
        endpoint = endpoint_here(config.host or "", addresses)
        known = addresses or config.is_first is not None or endpoint.is_ours
        if not known and not config.asks_torch:
            return False
        self._side = None
        try:
            self._choose_side(endpoint, why)
        except MeshrunError as error:
            self._hub.fail(error)
        return True

    def _choose_side(self, endpoint: Endpoint, why: str) -> None:
        config = self._config
        if config.asks_torch:
            self._ask_torch(endpoint)
            return
        if config.is_first is None and not endpoint.is_ours:
            self._become_participant(endpoint.addresses)
            return
        place = self._place_to_listen(endpoint, why)
        try:
            listener = listen_on(place, config.port or DEFAULT_PORT)
        except HostError as error:
            if config.is_first is None:  # another launcher on this machine listens there
                self._become_participant(endpoint.own or endpoint.addresses)
                return
            port = config.port or DEFAULT_PORT
            error.hint = (
                f"another launch may still be running (`ss -ltnp 'sport = :{port}'` shows it);"
                " or use another port, the same on every node"
            )
            self._hub.fail(error)
            self._withdraw_at_fallback_port(place, error)
        else:
            self._become_coordinator(listener, probes=not endpoint.own)

    def _withdraw_at_fallback_port(self, place: str, error: MeshrunError) -> None:
        """Withdraw, at the port that the other nodes try if the endpoint's is not ours."""
        with contextlib.suppress(MeshrunError):
            listener = listen_on(place, fallback_port(self._node.secret))
            self._withdrawal = self._withdrawal or Withdraw.of(self._node.info.host, error)
            self._become_coordinator(listener)

    def _place_to_listen(self, endpoint: Endpoint, why: str) -> str:
        """Return the address on which node 0 listens; ``why`` is why a name does not resolve."""
        config, addresses = self._config, endpoint.addresses
        if endpoint.is_ambiguous:
            return config.local_addr or EVERYWHERE
        if endpoint.facing:
            return endpoint.facing[0]
        if endpoint.is_hidden:
            return config.local_addr or outward_address() or EVERYWHERE
        if config.coordinator and all(map(is_address, config.coordinator)):
            raise RendezvousError(
                f"no address at which other nodes can reach node 0 ({self._node.info.host}): found"
                f" only {', '.join(config.coordinator)}",
                hint="pass --rdzv-endpoint HOST:PORT with an address of node 0; with mpirun, start"
                " mpirun on the first host",
            )
        place = config.local_addr or EVERYWHERE
        found = f"resolves to {', '.join(addresses)}" if addresses else f"does not resolve: {why}"
        text = f"`{endpoint.host}` {found}, which is not an address of this machine"
        self._hub.note(f"{text}; as node 0, it listens on {place} instead")
        return place

    def _ask_torch(self, endpoint: Endpoint | None) -> None:
        self._side = negotiation = TorchNegotiation(self._node, endpoint, self._negotiate)
        if self._withdrawal is not None:
            negotiation.withdraw(self._withdrawal)
        else:
            negotiation.start()

    def _addresses_of_coordinator(self) -> tuple[str, ...]:
        """Return a scheduler's addresses of node 0, without those that this machine has too."""
        own, known = own_addresses(), filter(is_address, self._config.coordinator)
        return tuple(address for address in known if address.partition("%")[0] not in own)

    def _become_coordinator(
        self, listener: socket.socket, *, nnodes: int | None = None, probes: bool = False
    ) -> None:
        self._listener = listener
        if not self._config.is_secret and self._withdrawal is None:
            self._hub.note(
                "no secret is set: anyone who can reach"
                f" {format_endpoint(*listener.getsockname()[:2])} and knows this command can"
                " join; set MESHRUN_SECRET_FILE to a file with a secret, the same on every"
                " node"
            )
        node, duplicate = self._node, None
        if probes:
            node = replace(node, info=replace(node.info, probe=secrets.token_hex(8), node_rank=0))
            duplicate = DuplicateCoordinator(node)
        self._side = lobby = Lobby(
            node,
            nnodes=nnodes or self._config.present or self._config.nnodes,
            listener=listener,
            run_id=self._config.run_id or secrets.token_hex(8),
            hand_over=self._take_over,
            duplicate=duplicate,
        )
        if self._withdrawal is not None:
            lobby.withdraw(self._withdrawal)
        else:
            lobby.begin()

    def _take_over(self, coordinator: Coordinator) -> None:
        self._side = coordinator

    def _become_participant(self, addresses: tuple[str, ...]) -> None:
        self._side = participant = Participant(self._node, addresses)
        if self._withdrawal is not None:
            participant.withdraw(self._withdrawal)
