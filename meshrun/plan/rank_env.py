"""The environment of a rank: torchrun's variables, meshrun's, and those of network cards. Pure.

The cards may differ between the ranks of a node. NCCL and UCX connect cards of one fabric. gloo and
NCCL's sockets connect any two ranks, so an interface qualifies only if it is on the network over
which the nodes reach each other.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from msgspec import Struct

from meshrun.host import rank_variables as var
from meshrun.host.machine import Gpu
from meshrun.host.network import interface_variables
from meshrun.host.own_variables import SECRET_VARIABLES
from meshrun.layout.environment import format_layout
from meshrun.plan.choices import STOP_SIGNALS
from meshrun.plan.group_options import format_group_options
from meshrun.plan.plan import LaunchPlan, RankPlan


def zygote_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a zygote, without the launch's mark.

    It sets one thread per library, as libraries start threads when imported; ranks set their own
    number later.
    """
    own = {name: value for name, value in base.items() if name not in SECRET_VARIABLES}
    return {**own, **dict.fromkeys(var.THREADS, "1")}


class LaunchFacts(Struct, frozen=True, kw_only=True):
    """Facts about a launch that are known only once it starts."""

    run_id: str
    master_addr: str
    master_port: int
    interface: str | None
    """Network interface over which ranks reach each other, such as ``lo``; ``None`` if unknown."""
    timer_file: str | None = None
    """A named pipe for ``torch.distributed.elastic.timer``, or ``None``."""
    previous: str = ""
    """The layout of the previous generation of ranks, as JSON; "" if there is none."""


def rank_environment(
    plan: LaunchPlan,
    rank: RankPlan,
    facts: LaunchFacts,
    base: Mapping[str, str],
    *,
    generation: int = 0,
    error_file: str = "",
) -> dict[str, str]:
    """Return the variables that a rank has in addition to ``base``.

    ``supervisor.node_processes`` adds those the zygote lacks and those of the terminal.
    ``zygote.spawn`` starts new programs with all of them; ``worker.bootstrap`` sets them in every
    Python rank, with its process id. If a scheduler's task is itself a rank,
    ``mesh.scheduler_task`` makes the variables instead, and ``cli.per_task`` those of the mesh.

    Names and values follow torchrun 2.13 (``_start_workers`` in
    ``torch/distributed/elastic/agent/server/local_elastic_agent.py``); ``MESHRUN_*`` are ours.
    """
    layout, request = plan.layout, plan.request
    local_world_size = layout.nproc_per_node[rank.node_rank]
    role_rank, role_world_size = plan.place_in_role(rank.rank)
    numbers = {
        var.RANK: rank.rank,
        var.LOCAL_RANK: plan.device_index(rank.local_rank),
        var.WORLD_SIZE: layout.world_size,
        var.LOCAL_WORLD_SIZE: local_world_size,
        var.GROUP_RANK: rank.node_rank,
        var.GROUP_WORLD_SIZE: layout.nnodes,
        var.ROLE_RANK: role_rank,
        var.ROLE_WORLD_SIZE: role_world_size,
        var.MASTER_PORT: facts.master_port,
        var.RESTART_COUNT: generation,
        var.MAX_RESTARTS: request.max_restarts,
        var.GENERATION: generation,
    }
    # Workers see torchrun's default, which includes SIGQUIT.
    default = request.stop_signals == STOP_SIGNALS
    signums = (*request.stop_signals, signal.SIGQUIT) if default else request.stop_signals
    names = (signal.Signals(signum).name for signum in signums)
    texts = {
        var.ROLE_NAME: request.role,
        var.MASTER_ADDR: facts.master_addr,
        var.TORCH_RUN_ID: facts.run_id,
        var.USE_AGENT_STORE: "True",
        var.ERROR_FILE: error_file,
        var.SIGNALS_TO_HANDLE: ",".join(names),
        var.RUN_ID: facts.run_id,
        **format_layout(layout),
    }
    if facts.previous:
        texts[var.PREVIOUS] = facts.previous
    if facts.timer_file is not None:
        texts[var.TIMER_FILE] = facts.timer_file
    if (devices := plan.devices_seen(rank.local_rank)) is not None:
        texts.update(dict.fromkeys(plan.host.visibility, devices))
    if layout.mesh is not None:
        texts[var.DEVICE] = plan.device_type or "cpu"
        texts.update(format_group_options(request.groups))
    defaults = {var.ASYNC_ERROR_HANDLING: "1"}
    if local_world_size > 1:  # as in torchrun, a single worker keeps its libraries' default
        defaults[var.OMP_NUM_THREADS] = str(plan.omp_num_threads)
    # On one node, this is loopback: nothing listens outside, and no names are looked up.
    defaults.update(interface_variables(facts.interface))
    if request.nic_affinity and rank.gpu is not None:
        defaults.update(nic_variables(rank.gpu, facts.interface, plan.host.networks))
    given = {name: value for name, value in defaults.items() if name not in base}
    return {**given, **texts, **{name: str(value) for name, value in numbers.items()}}


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
