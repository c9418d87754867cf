"""The other nodes, for the loop: finds out whether this is the head, and is one or a member."""

from __future__ import annotations

import hashlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from meshrun.errors import HostError, MeshrunError, RendezvousError
from meshrun.events import (
    FromNegotiation,
    FromNodes,
    MeetingFailed,
    Negotiated,
    NegotiationFailed,
    NegotiationWaits,
)
from meshrun.host.network import interface_of, is_loopback, outward_address
from meshrun.host.sockets import listen_on
from meshrun.interfaces import is_address, own_address_towards
from meshrun.meeting import DEFAULT_PORT, Meeting, meet_at
from meshrun.nodes.activity import Activity
from meshrun.nodes.elastic_head import ElasticHead
from meshrun.nodes.elastic_member import ElasticMember
from meshrun.nodes.finding import Finding
from meshrun.nodes.head import Head
from meshrun.nodes.member import Member
from meshrun.nodes.membership import Fit
from meshrun.nodes.messages import Join, Message
from meshrun.nodes.switchboard import Switchboard
from meshrun.nodes.waiting_room import WaitingRoom
from meshrun.wire import Negotiate

_EVERYWHERE = "0.0.0.0"  # noqa: S104 - only where the head's own address cannot be told
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_LOCAL = ("localhost", "localhost.localdomain")


class Peers:
    """The launchers of the other nodes.

    Args:
        meeting: Where to meet them.
        card: What this node says of itself.
        secret: What only launchers of this launch know.
        selector: The loop's; its keys hold what to call.
        note: Shows people one line.
        where: Called with a reason when the head asks for where this node's ranks are.
        negotiate: Has torch's rendezvous begun, with these descriptors, where one is asked for.
        fit: Solves the mesh over nodes, where they may come and go.
    """

    def __init__(
        self,
        meeting: Meeting,
        card: Join,
        *,
        secret: bytes,
        selector: selectors.BaseSelector,
        note: Callable[[str], None],
        where: Callable[[str], None],
        negotiate: Callable[[Negotiate, list[int]], None],
        fit: Fit | None = None,
    ) -> None:
        self._meeting, self._card, self._secret, self._where = meeting, card, secret, where
        self._negotiate, self._fit = negotiate, fit
        self._order: tuple[Negotiate, list[socket.socket]] | None = None
        """What torch's rendezvous is started with, and again if its process has to be."""
        self._own_listener: socket.socket | None = None
        self._board = Switchboard(selector, note)
        self._side: Finding | WaitingRoom | Head | Member | None = None
        self._listener: socket.socket | None = None
        try:
            self._begin()
        except MeshrunError as error:
            self._fail(error)

    @property
    def activity(self) -> Activity:
        """When ranks last got on, here and elsewhere."""
        return self._board.activity

    @property
    def listener(self) -> socket.socket | None:
        """The head's socket, which the ranks' store takes over once all have met."""
        if isinstance(self._side, ElasticHead):
            return self._side.store_listener
        return self._listener

    @property
    def next_look_ns(self) -> int | None:
        """When :meth:`look` has something to do."""
        if self._board.news:
            return 0
        return self._side.next_look_ns if self._side is not None else None

    def look(self) -> None:
        """Do what is due."""
        if self._side is not None:
            self._side.look()

    def news(self) -> Iterator[FromNodes]:
        """Yield what has happened, in order."""
        while self._board.news:
            yield self._board.news.popleft()

    def tell(self, message: Message) -> None:
        """Tell the others what this node's launch has to say."""
        if self._side is not None:
            self._side.tell(message)

    def start_negotiation(self) -> None:
        """Begin torch's rendezvous, if there is to be one and it is known where."""
        if self._order is not None and self._side is None:
            order, sockets = self._order
            self._negotiate(order, [each.fileno() for each in sockets])

    def hear(self, event: FromNegotiation) -> None:
        """Take the news of torch's rendezvous."""
        match event:
            case NegotiationWaits(text=text):
                self._board.note(text)
            case NegotiationFailed(text=text):
                self._fail(
                    RendezvousError(
                        f"{self._meeting.backend} at {self._meeting.endpoint}: {text}",
                        hint="were all nodes started, with the same --rdzv-id and --nnodes?",
                    )
                )
            case Negotiated():
                self._go_on(event)

    def _go_on(self, found: Negotiated) -> None:
        """torch's rendezvous is done: the launchers connect."""
        self._end_order()
        self._meeting = meet_at(self._meeting, found)
        self._card = replace(self._card, node_rank=None if found.is_late else found.node_rank)
        self._secret = hashlib.sha256(self._secret + found.secret.encode()).digest()
        if found.node_rank == 0 and not found.is_late and self._own_listener is not None:
            self._be_head(self._own_listener, nnodes=found.nnodes)
            self._own_listener = None
        else:
            self._be_member((found.head_address,))

    def _end_order(self) -> None:
        order, self._order = self._order, None
        for each in order[1] if order is not None else ():
            each.close()

    def close(self) -> None:
        """Have what was said arrive, and let go."""
        self._end_order()
        if self._own_listener is not None:
            self._own_listener.close()
        if self._side is not None:
            self._side.close()
        if self._listener is not None:
            self._listener.close()

    # ---- which side ------------------------------------------------------------------------

    def _begin(self) -> None:
        meeting = self._meeting
        if meeting.listener is not None:
            self._be_head(socket.socket(fileno=meeting.listener))
        elif meeting.host is None and meeting.backend != "static":
            self._plan_negotiation(self._listen_outward(), None)
        elif meeting.host is None:
            self._be_head(self._listen_outward())
        elif meeting.node_rank and meeting.backend == "static":
            self._be_member(self._addresses_of_head())
        else:
            self._side = Finding(meeting, self._board, found=self._found, fail=self._fail)

    def _found(self, addresses: list[str], why: str) -> bool:
        """Choose a side, if it is known where the name leads; it may come to lead here."""
        meeting = self._meeting
        addresses = list(dict.fromkeys([*addresses, *filter(is_address, meeting.heads)]))
        host = (meeting.host or "").strip("[]")
        own_name = host.partition(".")[0] == socket.gethostname().partition(".")[0]
        is_told = meeting.node_rank is not None or "is_host" in dict(meeting.conf)
        if not (addresses or own_name or is_told) and meeting.backend in ("static", "c10d"):
            return False
        self._side = None
        try:
            self._choose_side(host, addresses, why)
        except MeshrunError as error:
            self._fail(error)
        return True

    def _choose_side(self, host: str, addresses: list[str], why: str) -> None:
        meeting = self._meeting
        own = [address for address in addresses if interface_of(address) is not None]
        facing = [address for address in own if not is_loopback(address)]
        named_loopback = host in (*_LOCAL, *own) and not facing
        if named_loopback and own:
            facing = own
        is_ours = bool(own) or host.partition(".")[0] == socket.gethostname().partition(".")[0]
        if meeting.backend != "static":
            self._choose_negotiation(addresses, facing, is_ours=is_ours)
            return
        if meeting.node_rank is None and not is_ours:
            self._be_member(tuple(addresses))
            return
        port = meeting.port or DEFAULT_PORT
        if facing:
            place = facing[0]
        elif is_ours:  # its own name leads to loopback, as Debian writes it
            place = meeting.local_addr or outward_address() or _EVERYWHERE
        elif meeting.heads and all(map(is_address, meeting.heads)):
            raise RendezvousError(
                f"node 0 is {self._card.host}, and all that is known of where it may be reached is"
                f" {', '.join(meeting.heads)}",
                hint="--rdzv-endpoint HOST:PORT with an address of node 0; with mpirun, start it"
                " on the first host",
            )
        else:
            place = meeting.local_addr or _EVERYWHERE
            found = f"leads to {', '.join(addresses)}" if addresses else f"does not resolve: {why}"
            self._board.note(
                f"`{host}` {found}, no address of this machine; as node 0 it listens on {place}"
            )
        try:
            self._be_head(listen_on(place, port))
        except HostError:
            if meeting.node_rank is None:  # another launcher of this machine is the head
                self._be_member(tuple(own or addresses))
            else:
                raise

    def _choose_negotiation(
        self, addresses: list[str], facing: list[str], *, is_ours: bool
    ) -> None:
        """Where torch's c10d store is this machine's to serve, bind its socket."""
        meeting = self._meeting
        listener = None
        towards = own_address_towards(addresses[0]) if addresses and not is_ours else None
        address = (*facing, meeting.local_addr or towards or outward_address() or _EVERYWHERE)[0]
        told = dict(meeting.conf).get("is_host", "").lower()
        is_host = _BOOLEANS.get(told, is_ours)
        if meeting.backend == "c10d" and is_host:
            try:
                listener = listen_on(address, meeting.port or 0)
            except HostError:
                if told:
                    raise
        self._plan_negotiation(listener, address)

    def _plan_negotiation(self, listener: socket.socket | None, address: str | None) -> None:
        meeting = self._meeting
        host, port = meeting.host or "", meeting.port or DEFAULT_PORT
        if listener is not None:
            address, port = listener.getsockname()[:2]
            host = meeting.host or str(address)
        address = address or _EVERYWHERE
        self._own_listener = listen_on(address, 0)
        order = Negotiate(
            backend=meeting.backend,
            endpoint_host=host,
            endpoint_port=port,
            run_id=meeting.run_id or "none",
            least_nodes=meeting.least_nodes or meeting.nnodes,
            nnodes=meeting.nnodes,
            conf={name: value for name, value in meeting.conf if name != "is_host"},
            timeout_s=meeting.timeout_s,
            host=self._card.host,
            address=address,
            port=self._own_listener.getsockname()[1],
            is_elastic=meeting.is_elastic,
        )
        self._order = (order, [] if listener is None else [listener])
        self.start_negotiation()

    def _addresses_of_head(self) -> tuple[str, ...]:
        """Return what a scheduler says of them, without those that this machine has as well."""
        return tuple(
            head for head in self._meeting.heads if is_address(head) and interface_of(head) is None
        )

    def _listen_outward(self) -> socket.socket:
        place = self._meeting.local_addr or outward_address() or _EVERYWHERE
        if self._meeting.port is not None:
            return listen_on(place, self._meeting.port)
        try:
            return listen_on(place, DEFAULT_PORT)
        except HostError:
            return listen_on(place, 0)

    def _be_head(self, listener: socket.socket, *, nnodes: int | None = None) -> None:
        self._listener = listener
        self._side = room = WaitingRoom(
            self._meeting,
            self._card,
            nnodes=nnodes or self._meeting.nnodes,
            listener=listener,
            secret=self._secret,
            run_id=self._meeting.run_id or secrets.token_hex(8),
            board=self._board,
            hand_over=self._be_head_of,
            fit=self._fit,
        )
        room.begin()

    def _be_head_of(self, head: Head) -> None:
        self._side = head

    def _be_member(self, addresses: tuple[str, ...]) -> None:
        kind = ElasticMember if self._meeting.is_elastic else Member
        self._side = kind(
            self._meeting,
            self._card,
            secret=self._secret,
            board=self._board,
            where=self._where,
            addresses=addresses,
        )

    def _fail(self, error: MeshrunError) -> None:
        self._board.news.append(MeetingFailed(error=error, at_ns=time.monotonic_ns()))
