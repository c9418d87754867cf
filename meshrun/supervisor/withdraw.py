"""Withdraws this node before it joins: notifies the other nodes at once why it cannot take part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from meshrun.cluster import ClusterFacts
from meshrun.errors import HostError, MeshrunError, UsageError
from meshrun.host.own_variables import LISTENER
from meshrun.host.stderr import note
from meshrun.plan.rendezvous_config import RendezvousConfig, check_backend, plan_rendezvous
from meshrun.plan.rendezvous_options import STATIC
from meshrun.plan.request import LaunchRequest, Rendezvous
from meshrun.plan.scheduler_defaults import apply_nodes_of_cluster


def withdraw(rendezvous: Rendezvous, nnodes: int | None, error: MeshrunError) -> None:
    """Withdraw from a launch: notify its other nodes, if there are any, of ``error``."""
    try:
        check_backend(rendezvous.backend)
    except UsageError:  # perhaps a mistake on this node alone: the others wait at the endpoint
        rendezvous = replace(rendezvous, backend=STATIC)
    if rendezvous.node_rank is not None and rendezvous.node_rank >= (nnodes or 1):
        rendezvous = replace(rendezvous, node_rank=None)  # it may be node 0, for which others wait
    try:
        config = plan_rendezvous(rendezvous, nnodes or 1)
    except UsageError:
        return
    _withdraw(inherit_listener(config), error)


def withdraw_in_cluster(
    request: LaunchRequest, found: ClusterFacts | None, error: MeshrunError
) -> None:
    """Withdraw because this node's part of the cluster contradicts the request.

    On theirs there may be no contradiction, unless the scheduler tells all nodes the same.
    """
    if found is not None and found.nnodes is None and not found.is_one_of_several:
        completed = apply_nodes_of_cluster(request, found)
        withdraw(completed.rendezvous, completed.nnodes, error)


@contextmanager
def withdrawing(config: RendezvousConfig | None) -> Iterator[None]:
    """Withdraw if there is an error in the block, and the others know where to connect."""
    try:
        yield
    except MeshrunError as error:
        _withdraw(config, error)
        raise


def inherit_listener(config: RendezvousConfig | None) -> RendezvousConfig | None:
    """Return the config with the listening socket that the parent of this launcher has opened."""
    listener = os.environ.pop(LISTENER, "")
    return replace(config, listener=int(listener)) if config and listener else config


def _withdraw(config: RendezvousConfig | None, error: MeshrunError) -> None:
    """Withdraw, and linger until the other nodes have been notified."""
    if config is None or (not config.host and config.listener is None):
        return
    # Imported here because few launches withdraw.
    from meshrun.host.reactor import Reactor
    from meshrun.protocol.generation import Withdraw
    from meshrun.rendezvous.hub import Hub
    from meshrun.rendezvous.messages import Join
    from meshrun.rendezvous.peers import Peers
    from meshrun.rendezvous.secret import find_secret
    from meshrun.rendezvous.this_node import ThisNode
    from meshrun.supervisor.node_link import Linger

    host = os.uname().nodename
    try:
        secret = find_secret(os.environ, config)
    except HostError:
        secret = find_secret({}, config)  # the others reject it, and so notice
    info = Join(host=host, node_rank=config.node_rank, nproc=1, settings={})
    with Reactor() as reactor:
        hub = Hub(reactor, note=lambda _: None)
        node = ThisNode(config=config, info=info, secret=secret, hub=hub)
        peers = Peers(node, negotiate=lambda _: None)
        peers.withdraw(Withdraw.of(host, error))
        linger = Linger(peers, error.message, config.node_timeout_s, note, reactor)
        reactor.run_until(lambda: linger.is_over)
        peers.close()
