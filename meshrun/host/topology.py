"""The CPUs, caches, sockets and NUMA nodes of this machine, and the nodes of its accelerators.

Unreadable facts are replaced by those of the simplest machine that fits: nothing here raises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from meshrun.host.cores import allowed_cpus
from meshrun.host.machine import Cpu, Topology, parse_cpus
from meshrun.host.sysfs import read_number, read_text


def read_topology(
    sysfs: Path = Path("/sys"),
    allowed: Collection[int] | None = None,
    accelerators: Sequence[int | None] = (),
) -> Topology:
    """Return the topology of this machine.

    Args:
        sysfs: The folder in which the kernel describes the machine.
        allowed: Logical CPUs this process may use; its affinity mask if ``None``.
        accelerators: NUMA node of each visible accelerator by local index, if known.

    Source:
        kernel, Documentation/admin-guide/cputopology.rst and Documentation/ABI/stable/
        sysfs-devices-node.
    """
    if allowed is None:
        allowed = allowed_cpus()
    nodes = _read_nodes(sysfs)
    node_of = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    first_node = min(nodes, default=0)
    return Topology(
        cpus=tuple(
            _read_cpu(sysfs, cpu, node_of.get(cpu, first_node), nodes) for cpu in sorted(allowed)
        ),
        accelerator_nodes=tuple(_node_of_accelerator(known, nodes) for known in accelerators),
    )


def _read_nodes(sysfs: Path) -> dict[int, tuple[int, ...]]:
    """Return the CPUs of each NUMA node that has any."""
    nodes = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        cpus = _read_cpus(folder / "cpulist")
        if cpus and folder.name[4:].isdecimal():
            nodes[int(folder.name[4:])] = cpus
    return nodes


def _read_cpu(sysfs: Path, cpu: int, node: int, nodes: Mapping[int, tuple[int, ...]]) -> Cpu:
    folder = sysfs / f"devices/system/cpu/cpu{cpu}"
    socket = read_number(folder / "topology/physical_package_id")
    siblings = _read_cpus(folder / "topology/thread_siblings_list")
    sharers = _read_cache_sharers(folder / "cache") or nodes.get(node, ())
    return Cpu(
        index=cpu,
        node=node,
        socket=node if socket is None else socket,
        core=min(siblings, default=cpu),
        cache=min(sharers, default=0),
    )


def _read_cache_sharers(folder: Path) -> tuple[int, ...]:
    """Return the CPUs that share the highest-level data cache."""
    highest = -1
    sharers: tuple[int, ...] = ()
    for cache in sorted(folder.glob("index[0-9]*")):
        level = read_number(cache / "level")
        if level is None or level <= highest or read_text(cache / "type") == "Instruction":
            continue
        if cpus := _read_cpus(cache / "shared_cpu_list"):
            highest, sharers = level, cpus
    return sharers


def _node_of_accelerator(known: int | None, nodes: Collection[int]) -> int | None:
    """Return the NUMA node of a device, ``None`` if it is unknown and there are several.

    torch would use node 0, which would crowd every rank onto the first of several nodes.
    """
    only = min(nodes, default=0) if len(nodes) < 2 else None
    return only if known is None or not nodes else known


def _read_cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(read_text(path))
    except ValueError:
        return ()
