"""The listening ports of a launch and their reasons, one line each, for ``--verbose``."""

from __future__ import annotations

from collections.abc import Mapping

from meshrun.host.network import interface_variables, is_loopback
from meshrun.plan.plan import LaunchPlan
from meshrun.plan.rank_env import LaunchFacts

_BACKENDS = {"cpu": ("gloo",), "cuda": ("gloo", "nccl")}
_ALL_BACKENDS = ("gloo", "nccl")


def describe_listening(plan: LaunchPlan, facts: LaunchFacts, env: Mapping[str, str]) -> list[str]:
    """Return a line for each listening port."""
    at = f"{facts.master_addr} port {facts.master_port}"
    who = _who_reaches(facts.master_addr)
    lines = [f"listening: the store on {at}, where ranks find each other ({who})"]
    own = interface_variables(facts.interface)
    for backend in _BACKENDS.get(plan.device_type or "", _ALL_BACKENDS):
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        where = env.get(variable) or own.get(variable)
        chosen = f"on {where.lstrip('=')}" if where else f"where {backend} chooses"
        why = "meshrun sets no default"
        if env.get(variable):
            why = f"{variable} is set"
        elif where is not None:
            is_local = where.lstrip("=").startswith("lo")
            why = "loopback" if is_local else "it faces the other nodes"
        uses = "" if plan.device_type else ", if the program uses it"
        lines.append(f"listening: ranks {chosen}, so that {backend} can connect them ({why}){uses}")
    if plan.rendezvous is not None and not plan.rendezvous.is_elastic:
        lines.append(
            "listening: the launcher on a free port for 30 s, so that another node can test the"
            " connection"
        )
    if plan.rendezvous is not None and plan.node_rank == 0:
        lines.append("listening: the launcher at the endpoint, for nodes that know the secret")
    if plan.request.metrics is not None:
        host, port = plan.request.metrics
        lines.append(f"listening: metrics on {host} port {port or 'chosen'} ({_who_reaches(host)})")
    lines.append("listening: nothing else; launcher and ranks talk over unnamed socket pairs")
    return lines


def _who_reaches(address: str) -> str:
    if address == "localhost" or is_loopback(address):
        return "loopback"
    return "reachable by anyone who can reach this address"
