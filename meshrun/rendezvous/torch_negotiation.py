"""torch's rendezvous as a launcher asks for it: on which addresses, and with which sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable

from meshrun.errors import HostError
from meshrun.host.interfaces import address_in, own_address_towards
from meshrun.host.network import outward_address
from meshrun.host.sockets import listen_on
from meshrun.plan.rendezvous_config import DEFAULT_PORT, RendezvousConfig
from meshrun.protocol.codec import Negotiate
from meshrun.protocol.events import Negotiated
from meshrun.rendezvous.connections import Connections
from meshrun.rendezvous.endpoint import Endpoint
from meshrun.rendezvous.redirect import Redirect

EVERYWHERE = "0.0.0.0"  # noqa: S104 - only where the coordinator's own address cannot be told
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class TorchNegotiation:
    """What torch's rendezvous is started with, and again if its process has to be.

    Args:
        meeting: Where the nodes meet.
        endpoint: That as it looks from here; ``None`` if nobody said where.
        host: What this machine is called.
        start: Has it started, with these descriptors.

    Raises:
        MeshrunError: If nothing can be listened on.
    """

    def __init__(
        self,
        meeting: RendezvousConfig,
        endpoint: Endpoint | None,
        *,
        host: str,
        start: Callable[[Negotiate, list[int]], None],
    ) -> None:
        self._start = start
        self._redirect: Redirect | None = None
        self._for_torch: socket.socket | None = None
        address: str | None = None
        if endpoint is None:
            self._for_torch = listen_outward(meeting)
        else:
            address = _own_address(meeting, endpoint)
            self._for_torch = _listen_for_torch(meeting, endpoint, address)
        endpoint_host, port = meeting.host or "", meeting.port or DEFAULT_PORT
        if self._for_torch is not None:
            name = self._for_torch.getsockname()
            address, port = address_in(name), name[1]
            endpoint_host = meeting.host or str(address)
        address = address or EVERYWHERE
        self._own: socket.socket | None = listen_on(address, 0)
        self._order = Negotiate(
            backend=meeting.backend,
            endpoint_host=endpoint_host,
            endpoint_port=port,
            run_id=meeting.run_id or "none",
            least_nodes=meeting.least_nodes or meeting.nnodes,
            nnodes=meeting.nnodes,
            conf={name: value for name, value in meeting.conf if name != "is_host"},
            timeout_s=meeting.timeout_s,
            host=host,
            address=address,
            port=self._own.getsockname()[1],
            is_elastic=meeting.is_elastic,
        )

    def start(self) -> None:
        """Have torch's rendezvous started."""
        self._start(self._order, [] if self._for_torch is None else [self._for_torch.fileno()])

    def take_listener(self) -> socket.socket | None:
        """Return where this launcher listens, for the caller to close."""
        own, self._own = self._own, None
        return own

    def show_the_way(self, found: Negotiated, board: Connections) -> None:
        """Tell nodes that come to torch's store from now on where the first node is."""
        if self._for_torch is not None:
            self._redirect = Redirect(self._for_torch, found, board)

    def close(self) -> None:
        """Let go of what is not taken; torch has a copy of its own."""
        if self._redirect is not None:
            self._redirect.close()
        for each in (self._for_torch, self._own):
            if each is not None:
                each.close()


def listen_outward(meeting: RendezvousConfig) -> socket.socket:
    """Return a socket that others can reach, where nobody said an endpoint."""
    place = meeting.local_addr or outward_address() or EVERYWHERE
    if meeting.port is not None:
        return listen_on(place, meeting.port)
    try:
        return listen_on(place, DEFAULT_PORT)
    except HostError:
        return listen_on(place, 0)


def _own_address(meeting: RendezvousConfig, endpoint: Endpoint) -> str:
    towards = None
    if endpoint.addresses and not endpoint.is_ours:
        towards = own_address_towards(endpoint.addresses[0])
    outward = meeting.local_addr or towards or outward_address() or EVERYWHERE
    return (*endpoint.facing, outward)[0]


def _listen_for_torch(
    meeting: RendezvousConfig, endpoint: Endpoint, address: str
) -> socket.socket | None:
    """Return the socket for torch's c10d store, where that is this machine's to serve."""
    told = dict(meeting.conf).get("is_host", "").lower()
    if meeting.backend != "c10d" or not _BOOLEANS.get(told, endpoint.is_ours):
        return None
    try:
        return listen_on(address, meeting.port or 0)
    except HostError:
        if told:
            raise
        return None
