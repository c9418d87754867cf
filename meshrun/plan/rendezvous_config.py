"""The rendezvous settings of a launch, as a value. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from meshrun.errors import UsageError
from meshrun.host.entry_points import entry_points
from meshrun.plan.parse import format_nnodes
from meshrun.plan.rendezvous_options import (
    BACKENDS,
    C10D,
    DEFAULT_PORT,
    IS_HOST,
    JOIN,
    LAST_CALL,
    STATIC,
    STORE_TYPE,
)
from meshrun.plan.request import Rendezvous, RendezvousSettings

_START_S = 60.0
"""How long launchers that were started together may take to join."""


class RendezvousConfig(RendezvousSettings, frozen=True, kw_only=True):
    """Everything a launcher knows before it joins the others."""

    nnodes: int
    host: str | None = None
    """Address or name of node 0; ``None`` if unknown, which makes this node 0."""
    port: int | None = None
    is_secret: bool = False
    """Whether joining takes more than the name of the launch."""
    timeout_s: float
    """How long the nodes may take to join."""
    last_call_s: float | None = None
    """How long to wait for more nodes once the minimum has joined; ``None`` not to wait."""
    return_s: float
    """How long a launch with too few nodes left waits for more, and how long a lost node of an
    elastic launch tries to rejoin."""
    listener: int | None = None
    """Descriptor of an inherited socket that already listens at the endpoint."""
    is_host: bool | None = None
    """Whether this node serves the endpoint of c10d, if given."""

    @property
    def asks_torch(self) -> bool:
        """Whether nodes find each other through one of torch's rendezvous backends.

        With ``c10d`` they need none: one of them serves the endpoint.
        """
        is_tcp = STORE_TYPE.read(dict(self.conf)) == STORE_TYPE.default
        return self.backend != STATIC and not (self.backend == C10D and is_tcp)

    @property
    def is_first(self) -> bool | None:
        """Whether this node is node 0; ``None`` if only the endpoint can tell."""
        if self.backend == C10D:
            return self.is_host
        return None if self.node_rank is None else self.node_rank == 0

    @property
    def endpoint(self) -> str:
        """Host and port as one string."""
        return format_endpoint(self.host or "", self.port or DEFAULT_PORT)


def join_at(
    rendezvous: RendezvousConfig, address: str, port: int, *, nnodes: int
) -> RendezvousConfig:
    """Return the configuration to reach node 0, which torch's rendezvous found."""
    return replace(
        rendezvous,
        nnodes=rendezvous.nnodes if rendezvous.is_elastic else nnodes,
        host=address,
        port=port,
        hosts=(),
        join_command=None,
        timeout_s=min(rendezvous.timeout_s, rendezvous.node_timeout_s),  # all are running
        last_call_s=None,
    )


def fallback_port(secret: bytes) -> int:
    """Return the port on which node 0 reports errors if the endpoint's port is taken."""
    from hashlib import sha256

    return 20000 + int.from_bytes(sha256(b"aside " + secret).digest()[:4], "big") % 10000


def format_endpoint(host: str, port: int) -> str:
    """Return ``host:port``, or ``[address]:port`` for an IPv6 address."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plan_rendezvous(rendezvous: Rendezvous, nnodes: int) -> RendezvousConfig | None:
    """Return the configuration of a launch's rendezvous; ``None`` for a single node.

    Raises:
        UsageError: If the endpoint or a setting cannot be parsed, or settings contradict.
    """
    if rendezvous.standalone or (nnodes == 1 and not rendezvous.is_elastic):
        return None
    host, port = rendezvous.address
    if host and port is None:
        port = BACKENDS.get(rendezvous.backend, DEFAULT_PORT)
    is_elastic = rendezvous.is_elastic
    is_present = is_elastic and rendezvous.present is not None
    if is_elastic and rendezvous.backend == STATIC and not is_present:
        raise UsageError(
            f"--nnodes {format_nnodes(rendezvous.least_nodes, nnodes)} does not work with static"
            " rendezvous, whose number of nodes is fixed",
            hint=f"use --rdzv-backend c10d, or --nnodes {nnodes}",
        )
    if rendezvous.node_rank and not host and rendezvous.backend == STATIC:
        raise UsageError(
            f"--node-rank {rendezvous.node_rank} of {nnodes} nodes needs the address of node 0",
            hint="pass --rdzv-endpoint HOST:PORT, as node 0 prints it",
        )
    settings = dict(rendezvous.conf)
    timeout_s, last_call_s = JOIN.read(settings), LAST_CALL.read(settings)
    return RendezvousConfig(
        backend=rendezvous.backend,
        node_timeout_s=rendezvous.node_timeout_s,
        conf=rendezvous.conf,
        run_id=rendezvous.run_id,
        node_rank=rendezvous.node_rank,
        least_nodes=rendezvous.least_nodes,
        present=rendezvous.present,
        local_addr=rendezvous.local_addr,
        coordinator=rendezvous.coordinator,
        hosts=rendezvous.hosts,
        domain=rendezvous.domain,
        secret=rendezvous.secret,
        join_command=rendezvous.join_command,
        nnodes=nnodes,
        host=host.strip("[]") if host else None,
        port=port,
        timeout_s=min(timeout_s, _START_S) if is_present else timeout_s,
        last_call_s=last_call_s if is_elastic and not is_present else None,
        return_s=timeout_s if is_elastic else rendezvous.node_timeout_s,
        is_host=IS_HOST.read(settings) if rendezvous.backend == C10D else None,
    )


def check_backend(backend: str) -> None:
    """Check that torch has this rendezvous backend, built in or as a plug-in.

    Raises:
        UsageError: If it does not.
    """
    if backend in BACKENDS:
        return
    if backend not in entry_points("torchrun.handlers"):
        raise UsageError(
            f"--rdzv-backend: unknown backend `{backend}`",
            hint=f"use {', '.join(BACKENDS)}, or an entry point in the group torchrun.handlers",
        )
