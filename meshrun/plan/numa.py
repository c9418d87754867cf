"""The CPUs of each local rank for ``--numa-binding``. Pure: the machine is a value.

The modes choose what ``torch/numa/binding.py`` of torch 2.13 chooses for a rank whose accelerator
has the same local index. torch refuses a rank without an accelerator; here, such ranks are spread
over the NUMA nodes evenly, neighbors together.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshrun.errors import UsageError
from meshrun.host.machine import Cpu, Topology
from meshrun.plan.choices import NumaBinding
from meshrun.wording import count, number_ranges, plural


def choose_cpus(
    mode: NumaBinding, topology: Topology, *, local_rank: int, nproc: int
) -> tuple[int, ...]:
    """Return the logical CPUs that a local rank may run on, in order.

    Args:
        mode: ``node`` and ``socket`` choose all CPUs near its accelerator, ``exclusive`` physical
            cores that no other rank gets, ``core-complex`` the CPUs that share a largest cache.
        topology: This machine.
        local_rank: Number of the rank on this machine, below ``nproc``.
        nproc: Number of ranks on this machine.

    Raises:
        UsageError: If this machine has no such CPUs.
    """
    if not topology.cpus:
        raise UsageError(
            f"--numa-binding {mode}: cannot read the CPU topology of this machine",
            hint="remove --numa-binding",
        )
    homes = _homes(topology, nproc)
    node = homes[local_rank]
    near = [cpu for cpu in topology.cpus if cpu.node == node]
    if not near:
        raise _no_cpus(mode, topology, local_rank)
    # Unused accelerators count as well, so that rank 0 is bound the same way in every launch.
    sharers = [index for index, home in enumerate(homes) if home == node]
    place = sharers.index(local_rank)
    if mode == "socket":
        near = _socket_around(topology, near)
    elif mode == "exclusive":
        near = _share_of_cores(near, place, len(sharers))
    elif mode == "core-complex":
        near = _cache_for(near, place)
    return tuple(sorted(cpu.index for cpu in near))


def _homes(topology: Topology, nproc: int) -> list[int | None]:
    """Return the NUMA node of each local rank, and of the accelerators beyond the last rank."""
    nodes, known = topology.nodes, topology.accelerator_nodes
    spread: list[int | None] = [nodes[rank * len(nodes) // nproc] for rank in range(nproc)]
    homes = [spread[rank] if node is None else node for rank, node in enumerate(known[:nproc])]
    return [*homes, *spread[len(homes) :], *known[nproc:]]


def _socket_around(topology: Topology, near: Sequence[Cpu]) -> list[Cpu]:
    """Return the CPUs of all nodes on the socket; a node's lowest CPU determines its socket."""
    lowest_last = sorted(topology.cpus, key=lambda cpu: -cpu.index)
    socket_of_node = {cpu.node: cpu.socket for cpu in lowest_last}
    socket = socket_of_node[near[0].node]
    return [cpu for cpu in topology.cpus if socket_of_node[cpu.node] == socket]


def _share_of_cores(near: Sequence[Cpu], place: int, sharers: int) -> list[Cpu]:
    """Return the CPUs of a share of whole physical cores; the first shares get one more."""
    cores = sorted({cpu.core for cpu in near})
    each, left = divmod(len(cores), sharers)
    if each < 1:
        raise UsageError(
            "--numa-binding exclusive needs a physical core per worker, but NUMA node"
            f" {near[0].node} has {len(cores)} for {sharers} workers or accelerators",
            hint="use --numa-binding node to share the cores of a NUMA node",
        )
    start = place * each + min(place, left)
    mine = set(cores[start : start + each + (place < left)])
    return [cpu for cpu in near if cpu.core in mine]


def _cache_for(near: Sequence[Cpu], place: int) -> list[Cpu]:
    """Return the CPUs of one cache; ranks take caches in turn, those with the most CPUs first."""
    groups: dict[int, list[Cpu]] = {}
    for cpu in near:
        groups.setdefault(cpu.cache, []).append(cpu)
    caches = sorted(groups, key=lambda cache: (-len(groups[cache]), cache))
    return groups[caches[place % len(caches)]]


def _no_cpus(mode: NumaBinding, topology: Topology, local_rank: int) -> UsageError:
    cpus = count(len(topology.cpus), "CPU")
    where = f"node{plural(len(topology.nodes))} {number_ranges(topology.nodes)}"
    return UsageError(
        f"--numa-binding {mode} binds local rank {local_rank} to NUMA node"
        f" {topology.accelerator_nodes[local_rank]}, where accelerator {local_rank} is, but"
        f" this process may only use {cpus} of NUMA {where}",
        hint="widen the affinity mask or cpuset, or remove --numa-binding",
    )
