"""The other nodes, for the loop: this launcher as coordinator or as participant."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from meshrun.errors import HostError, MeshrunError, RendezvousError
from meshrun.host.interfaces import as_seen_by, is_address, outward_address, own_addresses
from meshrun.host.sockets import listen_on
from meshrun.plan.rendezvous_config import (
    DEFAULT_PORT,
    RendezvousConfig,
    fallback_port,
    format_endpoint,
    meet_at,
)
from meshrun.protocol.activity import Activity
from meshrun.protocol.codec import Negotiate
from meshrun.protocol.events import FromNodes, MeetingFailed
from meshrun.protocol.from_zygote import (
    FromNegotiation,
    GaveUp,
    Negotiated,
    NegotiationFailed,
    NegotiationWaits,
)
from meshrun.protocol.printable import one_line
from meshrun.rendezvous.coordinator import Coordinator
from meshrun.rendezvous.duplicate_coordinator import DuplicateCoordinator
from meshrun.rendezvous.endpoint import Endpoint, classify_endpoint, is_same_name
from meshrun.rendezvous.lobby import Lobby
from meshrun.rendezvous.messages import Message
from meshrun.rendezvous.participant import Participant
from meshrun.rendezvous.resolve import NameResolver
from meshrun.rendezvous.this_node import ThisNode
from meshrun.rendezvous.torch_negotiation import EVERYWHERE, TorchNegotiation, listen_outward

_IMPORT_TAKES_S = 8.0
"""Of torch, in the process that writes to its store."""


class Peers:
    """The launchers of the other nodes.

    Args:
        is_open: Whether its secret is no more than the command.
        negotiate: Has torch's rendezvous begun, where one is asked for.
    """

    def __init__(
        self, node: ThisNode, *, negotiate: Callable[[Negotiate], None], is_open: bool = False
    ) -> None:
        if node.config.backend == "c10d":  # torch's knows no --node-rank either
            node = replace(node, info=replace(node.info, node_rank=None))
        self._node, self._hub = node, node.hub
        self._negotiate, self._is_open = negotiate, is_open
        self._negotiation: TorchNegotiation | None = None
        self._gave_up: GaveUp | None = None
        self._side: NameResolver | Lobby | Coordinator | Participant | None = None
        self._listener: socket.socket | None = None
        try:
            self._begin()
        except MeshrunError as error:
            self._fail(error)

    @property
    def _config(self) -> RendezvousConfig:
        return self._node.config

    @property
    def activity(self) -> Activity:
        """When ranks last made progress, here and elsewhere."""
        return self._hub.activity

    @property
    def listener(self) -> socket.socket | None:
        """The coordinator's socket, which the ranks' store takes over once all have met."""
        if isinstance(self._side, Coordinator):
            return self._side.store_listener
        return self._listener

    @property
    def _has_told(self) -> bool:
        """Whether nobody is left to whom torch's store is to say that this node gave up."""
        return self._side is not None or self._negotiation is None or self._negotiation.all_notified

    @property
    def has_events(self) -> bool:
        """Whether :meth:`news` yields something."""
        return bool(self._hub.events)

    def events(self) -> Iterator[FromNodes]:
        """Yield what has happened, in order."""
        while self._hub.events:
            yield self._hub.events.popleft()

    def send(self, message: Message) -> None:
        """Tell the others what this node's launch has to say."""
        if self._side is not None:
            self._side.send(message)

    def give_up(self, notice: GaveUp) -> None:
        """Tell the others that this node will not take part, before all have met."""
        self._gave_up = notice
        if isinstance(self._side, NameResolver | Lobby | Participant):
            self._side.give_up(notice)
        elif self._side is None and self._negotiation is not None:
            self._negotiation.give_up(notice)

    @property
    def least_stay_s(self) -> float:
        """How long it takes at least to tell the others of a failure before the meeting."""
        return _IMPORT_TAKES_S if self._side is None and self._negotiation is not None else 0.0

    @property
    def all_notified(self) -> bool:
        """Whether all others that can be told of a failure before the meeting have been."""
        side = self._side
        return self._has_told and (
            not isinstance(side, NameResolver | Lobby | Participant) or side.all_notified
        )

    def start_negotiation(self) -> None:
        """Begin torch's rendezvous, if there is to be one and it is known where."""
        if self._negotiation is not None and self._side is None:
            self._negotiation.start()

    def receive(self, event: FromNegotiation) -> None:
        """Take the news of torch's rendezvous."""
        match event:
            case NegotiationWaits(text=text):
                self._hub.note(one_line(text))
            case NegotiationFailed(text=text, hint=hint) if self._side is None:
                self._fail(
                    RendezvousError(
                        f"{self._config.backend} at {self._config.endpoint}: {one_line(text)}",
                        hint=hint,
                    )
                )
            case GaveUp() if self._side is None:
                self._fail(event.as_error())
            case Negotiated():
                self._connect_as_negotiated(event)

    def _connect_as_negotiated(self, found: Negotiated) -> None:
        """torch's rendezvous is done: the launchers connect."""
        if self._negotiation is None or self._side is not None:
            return
        listener = self._negotiation.take_listener()
        seen = as_seen_by(found.coordinator_address, self._config.host or "")
        self._node = replace(
            self._node,
            config=meet_at(self._config, replace(found, coordinator_address=seen)),
            info=replace(self._node.info, node_rank=found.node_rank),
            secret=hashlib.sha256(self._node.secret + found.secret.encode()).digest(),
        )
        if found.node_rank == 0 and listener is not None:
            self._be_coordinator(listener, nnodes=found.nnodes)
            return
        if listener is not None:
            listener.close()
        self._be_participant((self._config.host or "",))

    def close(self) -> None:
        """Have what was said arrive, and let go."""
        if self._negotiation is not None:
            self._negotiation.close()
        if self._side is not None:
            self._side.close()
        if self._listener is not None:
            self._listener.close()

    # ---- which side ------------------------------------------------------------------------

    def _begin(self) -> None:
        config = self._config
        if config.listener is not None:
            self._be_coordinator(socket.socket(fileno=config.listener))
        elif config.host is None and config.asks_torch:
            self._ask_torch(None)
        elif config.host is None:
            self._be_coordinator(listen_outward(config))
        elif config.is_first is False and not config.asks_torch:
            self._be_participant(self._addresses_of_coordinator())
        else:
            self._side = NameResolver(config, self._hub, found=self._found, fail=self._fail)

    def _found(self, addresses: list[str], why: str) -> bool:
        """Choose a side, if it is known where the name leads; it may come to lead here."""
        config = self._config
        addresses = list(dict.fromkeys([*addresses, *filter(is_address, config.coordinators)]))
        host, own_name = (config.host or "").strip("[]"), socket.gethostname()
        known = addresses or config.is_first is not None or is_same_name(host, own_name)
        if not known and not config.asks_torch:
            return False
        self._side = None
        endpoint = classify_endpoint(
            host, addresses, own_addresses=own_addresses(), own_name=own_name
        )
        try:
            self._choose_side(endpoint, why)
        except MeshrunError as error:
            self._fail(error)
        return True

    def _choose_side(self, endpoint: Endpoint, why: str) -> None:
        config = self._config
        if config.asks_torch:
            self._ask_torch(endpoint)
            return
        if config.is_first is None and not endpoint.is_ours:
            self._be_participant(endpoint.addresses)
            return
        place = self._place_to_listen(endpoint, why)
        try:
            listener = listen_on(place, config.port or DEFAULT_PORT)
        except HostError as error:
            if config.is_first is None:
                self._be_participant(endpoint.own or endpoint.addresses)  # of another launcher here
                return
            port = config.port or DEFAULT_PORT
            error.hint = (
                f"another launch may still be running (`ss -ltnp 'sport = :{port}'` shows it);"
                " or use another port in --rdzv-endpoint, the same on every node"
            )
            self._fail(error)
            self._refuse_aside(place, error)
        else:
            self._be_coordinator(listener, probes=not endpoint.is_ours)

    def _refuse_aside(self, place: str, error: MeshrunError) -> None:
        """Tell the others at another port, where they ask once the endpoint's is not ours."""
        with contextlib.suppress(MeshrunError):
            listener = listen_on(place, fallback_port(self._node.secret))
            self._gave_up = self._gave_up or GaveUp.of(self._node.info.host, error)
            self._be_coordinator(listener)

    def _place_to_listen(self, endpoint: Endpoint, why: str) -> str:
        """Return the address that node 0 listens on; ``why`` says why its name leads nowhere."""
        config, addresses = self._config, endpoint.addresses
        if endpoint.facing:
            return endpoint.facing[0]
        if endpoint.is_ours:  # its own name leads to loopback, as Debian writes it
            return config.local_addr or outward_address() or EVERYWHERE
        if config.coordinators and all(map(is_address, config.coordinators)):
            raise RendezvousError(
                f"no address at which other nodes can reach node 0 ({self._node.info.host}): found"
                f" only {', '.join(config.coordinators)}",
                hint="pass --rdzv-endpoint HOST:PORT with an address of node 0; with mpirun, start"
                " mpirun on the first host",
            )
        place = config.local_addr or EVERYWHERE
        found = f"resolves to {', '.join(addresses)}" if addresses else f"does not resolve: {why}"
        text = f"`{endpoint.host}` {found}, which is not an address of this machine"
        self._hub.note(f"{text}; as node 0, it listens on {place} instead")
        return place

    def _ask_torch(self, endpoint: Endpoint | None) -> None:
        self._negotiation = TorchNegotiation(
            self._config,
            endpoint,
            host=self._node.info.host,
            start=self._negotiate,
            reactor=self._hub.reactor,
        )
        if self._gave_up is not None:
            self._negotiation.give_up(self._gave_up)
        else:
            self._negotiation.start()

    def _addresses_of_coordinator(self) -> tuple[str, ...]:
        """Return a scheduler's addresses of them, without those that this machine has too."""
        coordinators, own = filter(is_address, self._config.coordinators), own_addresses()
        return tuple(
            coordinator for coordinator in coordinators if coordinator.partition("%")[0] not in own
        )

    def _be_coordinator(
        self, listener: socket.socket, *, nnodes: int | None = None, probes: bool = False
    ) -> None:
        self._listener = listener
        if self._is_open:
            self._hub.note(
                "no secret is set: anyone who can reach"
                f" {format_endpoint(*listener.getsockname()[:2])} and knows this command can"
                " join; set MESHRUN_SECRET_FILE to a file with a secret, the same on every"
                " node"
            )
        node, duplicate = self._node, None
        if probes:
            node = replace(node, info=replace(node.info, probe=secrets.token_hex(8)))
            duplicate = DuplicateCoordinator(node)
        self._side = room = Lobby(
            node,
            nnodes=nnodes or self._config.present or self._config.nnodes,
            listener=listener,
            run_id=self._config.run_id or secrets.token_hex(8),
            hand_over=self._be_coordinator_of,
            duplicate=duplicate,
        )
        if self._gave_up is not None:
            room.give_up(self._gave_up)
        else:
            room.begin()

    def _be_coordinator_of(self, coordinator: Coordinator) -> None:
        self._side = coordinator

    def _be_participant(self, addresses: tuple[str, ...]) -> None:
        self._side = participant = Participant(self._node, addresses)
        if self._gave_up is not None:
            participant.give_up(self._gave_up)

    def _fail(self, error: MeshrunError) -> None:
        self._hub.events.append(MeetingFailed(error=error, at_ns=time.monotonic_ns()))
