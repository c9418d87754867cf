"""Tells the other nodes at once why this one cannot take part."""

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


def decline(rendezvous: Rendezvous, nnodes: int | None, error: MeshrunError) -> None:
    """Tell the other nodes of a launch, if there are any, why this one cannot take part."""
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
    _tell_others(inherit_listener(config), error)


def decline_in_cluster(
    request: LaunchRequest, found: ClusterFacts | None, error: MeshrunError
) -> None:
    """Tell the other nodes that this one's part of the cluster contradicts the request.

    On theirs there may be no contradiction, unless the scheduler tells all nodes the same.
    """
    if found is not None and found.nnodes is None and not found.is_one_of_several:
        fitted = fit_nodes_to_cluster(request, found)
        decline(fitted.rendezvous, fitted.nnodes, error)


@contextmanager
def declining(config: RendezvousConfig | None) -> Iterator[None]:
    """Tell the other nodes of an error in the block, if they know where to connect."""
    try:
        yield
    except MeshrunError as error:
        _tell_others(config, error)
        raise


def inherit_listener(config: RendezvousConfig | None) -> RendezvousConfig | None:
    """Return the config with the listening socket that the parent of this launcher has opened."""
    listener = os.environ.pop(LISTENER, "")
    return replace(config, listener=int(listener)) if config and listener else config


def _tell_others(config: RendezvousConfig | None, error: MeshrunError) -> None:
    if config is not None and (config.host or config.listener is not None):
        from meshrun.supervisor.join_nodes import stay_to_decline

        stay_to_decline(config, error, note)
