"""Variables that restrict a rank to the network cards nearest its GPU. Pure.

They may differ between the ranks of a node. NCCL and UCX connect cards of one fabric. gloo and
NCCL's sockets connect any two ranks, so an interface qualifies only if it is on the network over
which the nodes reach each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrun.host.interfaces import interface_variables
from meshrun.host.machine import Gpu
from meshrun.plan.plan import LaunchPlan


def note_no_nics(plan: LaunchPlan) -> tuple[str, ...]:
    """Return a note if ``--nic-affinity`` has no effect because no nearby card is known."""
    is_known = any(rank.gpu and rank.gpu.nics for rank in plan.ranks_of_node())
    if is_known or not plan.request.nic_affinity:
        return ()
    return ("--nic-affinity has no effect: no network card is known to be next to a rank's GPU",)


def nic_variables(
    gpu: Gpu, interface: str | None, networks: Iterable[tuple[str, str]]
) -> dict[str, str]:
    """Return the variables that restrict a rank to the cards and interface nearest its GPU.

    ``interface`` is the one over which the nodes reach each other, if known, and ``networks`` are
    the (interface, network) pairs of this machine.

    Source:
        NCCL, "Environment Variables": ``=`` before the list means exact names. UCX,
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
