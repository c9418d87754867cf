"""Sets the variables of torchrun in a process that srun or mpirun started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshrun.errors import MeshError
from meshrun.host import rank_variables as var
from meshrun.host.network import interface_variables, own_address_towards, own_addresses, resolve
from meshrun.wording import quoted

if TYPE_CHECKING:
    from meshrun.cluster import ClusterFacts, Task

_SET_BY_LAUNCHERS = (var.RANK, var.WORLD_SIZE)
_SET_MASTER = "set MASTER_ADDR to an address of node 0 and MASTER_PORT to a free port on it"


def launch_environment() -> Mapping[str, str]:
    """Return the environment; in a scheduler's task without a launcher, with ``RANK`` and so on.

    Raises:
        UsageError: If a scheduler's variable is malformed.
        MeshError: If ranks are not consecutive on each node.
    """
    found = _find_task(collective=False)
    return os.environ if found is None else {**_ranks(*found), **os.environ}


def join_task() -> None:
    """Set what ``init_process_group()`` reads, if this is one of several tasks without a launcher.

    Raises:
        UsageError: If a scheduler's variable is malformed.
        MeshError: If ranks are not consecutive on each node, or have no address to meet at.
    """
    found = _find_task(collective=var.MASTER_ADDR not in os.environ)
    if found is not None:
        join_as(*found)


def join_as(facts: ClusterFacts, task: Task) -> None:
    """Set what ``init_process_group()`` reads, for this task.

    Raises:
        MeshError: If ranks are not consecutive on each node, or have no address to meet at.
    """
    for name, value in {**_rendezvous(facts, task), **_ranks(facts, task)}.items():
        os.environ.setdefault(name, value)


def _find_task(*, collective: bool) -> tuple[ClusterFacts, Task] | None:
    """Return the facts and the task if this is one of several, and no launcher runs in it."""
    if any(name in os.environ for name in _SET_BY_LAUNCHERS):
        return None
    from meshrun.cluster.here import detect_here  # all detectors; meshrun's ranks need none

    facts = detect_here(collective=collective)
    if facts is None or facts.task is None or facts.task.world_size == 1:
        return None
    return facts, facts.task


def _ranks(facts: ClusterFacts, task: Task) -> dict[str, str]:
    if not task.in_blocks:
        raise MeshError(
            f"rank {task.rank} of {task.world_size} is process {task.local_rank} of its node:"
            " ranks are distributed round-robin over nodes, but a mesh needs consecutive ranks"
            " on one node",
            hint="use `srun --distribution=block` or `mpirun --map-by slot`",
        )
    numbers = {
        var.RANK: task.rank,
        var.WORLD_SIZE: task.world_size,
        var.LOCAL_RANK: task.local_rank,
        var.LOCAL_WORLD_SIZE: task.local_world_size,
        var.GROUP_RANK: facts.node_rank,
        var.GROUP_WORLD_SIZE: facts.nnodes,
    }
    found = {name: str(number) for name, number in numbers.items() if number is not None}
    if len(set(task.per_node)) > 1:
        found[var.NPROC_PER_NODE] = ",".join(map(str, task.per_node))
    return found


def _rendezvous(facts: ClusterFacts, task: Task) -> dict[str, str]:
    """Return the variables for the address where ranks meet and the interface to other nodes."""
    if not os.environ.get(var.MASTER_PORT) and facts.port is None:
        raise MeshError(f"{facts.system} sets no job id", hint=_SET_MASTER)
    port = {} if facts.port is None else {var.MASTER_PORT: str(facts.port)}
    interfaces = own_addresses()
    coordinator = own = "127.0.0.1"
    if facts.nnodes != 1:
        given = os.environ.get(var.MASTER_ADDR)
        names = (given,) if given else facts.coordinator
        coordinator, own = _addresses(facts, task, names, set(interfaces))
        if not given and not (coordinator and own):
            raise _no_address(facts, task)
    interface = interfaces.get(own)
    return {var.MASTER_ADDR: coordinator, **port, **interface_variables(interface)}


def _addresses(
    facts: ClusterFacts, task: Task, coordinator: tuple[str, ...], mine: set[str]
) -> tuple[str, str]:
    """Return the address of node 0 and this machine's address towards it, or "" for each."""
    known = [address for name in coordinator for address in resolve(name)]
    here = next((address for address in known if address in mine), "")
    if task.rank == 0 or facts.node_rank == 0:
        others = (address for host in facts.hosts[1:] for address in resolve(host))
        own = here or next(filter(None, map(own_address_towards, others)), "")
        return own, own
    # An address that this machine has too, such as a container bridge's, does not lead to node 0.
    there = next((address for address in known if address not in mine), "")
    if not there and facts.node_rank is None:
        return here, here  # this machine is node 0
    return there, (own_address_towards(there) or "") if there else ""


def _no_address(facts: ClusterFacts, task: Task) -> MeshError:
    host = os.uname().nodename
    names = quoted(facts.coordinator) or "nothing"
    if facts.system == "Open MPI":
        message = f"rank {task.rank} runs on {host}, but mpirun names only its own host: {names}"
        return MeshError(
            f"{message}; rank 0 must run there",
            hint=f"start mpirun on the first host, or {_SET_MASTER}",
        )
    if facts.node_rank == 0:
        names = quoted(facts.hosts[1:])
        message = f"rank {task.rank} on {host} has no address on a network shared with {names}"
    else:
        message = f"rank {task.rank} on {host} cannot reach node 0: tried {names}"
    return MeshError(message, hint=f"make the host names resolve, or {_SET_MASTER}")
