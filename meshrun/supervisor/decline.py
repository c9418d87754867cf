"""Tells the other nodes at once why this one cannot take part."""

from __future__ import annotations

import os

from msgspec.structs import replace

from meshrun.errors import MeshrunError, UsageError
from meshrun.host.stderr import note
from meshrun.plan.rendezvous_config import RendezvousConfig, check_backend, plan_rendezvous
from meshrun.plan.request import LaunchRequest


def decline(request: LaunchRequest, error: MeshrunError) -> None:
    """Tell the other nodes of a launch, if there are any, why this one cannot take part."""
    rendezvous = request.rendezvous
    try:
        check_backend(rendezvous.backend)
    except UsageError:  # perhaps a mistake on this node alone: the others wait at the endpoint
        rendezvous = replace(rendezvous, backend="static")
    nnodes = request.nnodes or 1
    if rendezvous.node_rank is not None and rendezvous.node_rank >= nnodes:
        rendezvous = replace(rendezvous, node_rank=None)  # it may be node 0, for which others wait
    try:
        config = plan_rendezvous(
            rendezvous,
            nnodes=nnodes,
            node_timeout_s=request.node_timeout_s,
        )
    except UsageError:
        return
    tell_others(inherit_listener(config), error)


def tell_others(config: RendezvousConfig | None, error: MeshrunError) -> None:
    """Tell the other nodes why this one cannot take part, if they know where to connect."""
    if config is not None and (config.host or config.listener is not None):
        from meshrun.supervisor.join_nodes import stay_to_decline

        stay_to_decline(config, error, note)


def inherit_listener(config: RendezvousConfig | None) -> RendezvousConfig | None:
    """Return the config with the listening socket that the parent of this launcher has opened."""
    listener = os.environ.pop("MESHRUN_LISTENER", "")
    return replace(config, listener=int(listener)) if config and listener else config
