"""Withdraws this node before it joins: notifies the other nodes at once why it cannot take part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from meshrun.cluster import ClusterFacts
from meshrun.errors import MeshrunError, UsageError
from meshrun.host.own_variables import LISTENER
from meshrun.host.stderr import note
from meshrun.plan.rendezvous_config import RendezvousConfig, check_backend, plan_rendezvous
from meshrun.plan.request import LaunchRequest, Rendezvous
from meshrun.plan.scheduler_defaults import fit_nodes_to_cluster


def withdraw(rendezvous: Rendezvous, nnodes: int | None, error: MeshrunError) -> None:
    """Withdraw from a launch: notify its other nodes, if there are any, of ``error``."""
    try:
        check_backend(rendezvous.backend)
    except UsageError:  # perhaps a mistake on this node alone: the others wait at the endpoint
        rendezvous = replace(rendezvous, backend="static")
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
        fitted = fit_nodes_to_cluster(request, found)
        withdraw(fitted.rendezvous, fitted.nnodes, error)


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
    if config is not None and (config.host or config.listener is not None):
        from meshrun.supervisor.join_nodes import withdraw_and_linger

        withdraw_and_linger(config, error, note)
