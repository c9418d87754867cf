"""The variables that keep a rank to the network cards nearest its GPU. Pure.

Each of them may differ between the ranks of a node. NCCL and UCX connect cards of one fabric; gloo
and NCCL's sockets connect every two ranks, so an interface counts only if it is in the network by
which the nodes reach each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrun.host.interfaces import interface_variables
from meshrun.host.machine import Gpu
from meshrun.plan.plan import LaunchPlan


def note_no_nics(plan: LaunchPlan) -> tuple[str, ...]:
    """Return what to tell somebody who asked for affinity where there is nothing to keep to."""
    is_known = any(rank.gpu and rank.gpu.nics for rank in plan.ranks_of_node())
    if is_known or not plan.request.nic_affinity:
        return ()
    return ("--nic-affinity has no effect: no network card is known to be next to a rank's GPU",)


def nic_variables(
    gpu: Gpu, interface: str | None, networks: Iterable[tuple[str, str]]
) -> dict[str, str]:
    """Return what keeps a rank to the cards and the interface next to its GPU.

    Args:
        gpu: The rank's.
        interface: By which the nodes reach each other, if that is known.
        networks: (interface, network) of this machine.

    Source:
        NCCL, "Environment Variables": ``=`` before the list means these very names. UCX,
        ``ucx_info -c -f``: devices have a port.
    """
    found = {}
    if gpu.cards is not None:
        ports = ",".join(gpu.cards.ports)
        found = {"NCCL_IB_HCA": f"={ports}", "UCX_NET_DEVICES": ports}
    near = () if gpu.interfaces is None else gpu.interfaces.names
    reachable = {network for name, network in networks if name == interface}
    fit = [name for name, network in networks if name in near and network in reachable]
    if fit and interface not in near:
        found.update(interface_variables(fit[0]))
    return found
