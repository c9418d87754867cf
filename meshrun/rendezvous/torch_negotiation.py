"""The launcher's side of torch's rendezvous, for backends that need it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from meshrun.errors import HostError
from meshrun.host.network import listen_on, outward_address, own_address_towards
from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.plan.rendezvous_options import DEFAULT_PORT
from meshrun.protocol.generation import Withdraw
from meshrun.protocol.zygote_messages import Negotiate
from meshrun.rendezvous.endpoint import Endpoint
from meshrun.rendezvous.this_node import ThisNode
from meshrun.rendezvous.torch_withdrawal import WithdrawalProcess

EVERYWHERE = "0.0.0.0"  # noqa: S104 - only if the coordinator's own address is unknown


class TorchNegotiation:
    """Starts torch's rendezvous, again if its process is replaced.

    Args:
        endpoint: The endpoint as seen from here; ``None`` if there is none.
        start: Sends the order to the zygote.

    Raises:
        MeshrunError: If no socket can be opened.
    """

    def __init__(
        self, node: ThisNode, endpoint: Endpoint | None, start: Callable[[Negotiate], None]
    ) -> None:
        config = node.config
        self._start, self._reactor = start, node.hub.reactor
        self._withdrawal: WithdrawalProcess | None = None
        address = _own_address(config, endpoint)
        self._own: socket.socket | None = listen_on(address, 0)
        self._order = Negotiate(
            backend=config.backend,
            endpoint_host=config.host or "",
            endpoint_port=config.port or DEFAULT_PORT,
            run_id=config.run_id or "none",
            least_nodes=config.least_nodes or config.nnodes,
            nnodes=config.nnodes,
            conf=dict(config.conf),
            timeout_s=config.timeout_s,
            host=node.info.host,
            address=address,
            port=self._own.getsockname()[1],
        )

    def start(self) -> None:
        """Start torch's rendezvous."""
        self._start(self._order)

    def withdraw(self, notice: Withdraw) -> None:
        """Notify the other nodes that this one withdraws."""
        self._withdrawal = self._withdrawal or WithdrawalProcess(self._order, notice, self._reactor)

    @property
    def all_notified(self) -> bool:
        """Whether all nodes have received that notice, or there is none."""
        return self._withdrawal is None or self._withdrawal.all_notified

    @property
    def imports_torch(self) -> bool:
        """Whether the process that will notify the other nodes is importing torch."""
        return self._withdrawal is not None and self._withdrawal.imports_torch

    def take_listener(self) -> socket.socket | None:
        """Return this launcher's socket, which the caller closes."""
        own, self._own = self._own, None
        return own

    def close(self) -> None:
        """Close the socket if it was not taken, and end the process that notifies the others."""
        if self._own is not None:
            self._own.close()
        if self._withdrawal is not None:
            self._withdrawal.close()


def listen_outward(config: RendezvousConfig) -> socket.socket:
    """Return a socket that other nodes can reach, without an endpoint."""
    place = config.local_addr or outward_address() or EVERYWHERE
    if config.port is not None:
        return listen_on(place, config.port)
    try:
        return listen_on(place, DEFAULT_PORT)
    except HostError:
        return listen_on(place, 0)


def _own_address(config: RendezvousConfig, endpoint: Endpoint | None) -> str:
    towards = None
    if endpoint is not None and endpoint.addresses and not endpoint.is_ours:
        towards = own_address_towards(endpoint.addresses[0])
    outward = config.local_addr or towards or outward_address() or EVERYWHERE
    return (*(endpoint.facing if endpoint is not None else ()), outward)[0]
