"""The facts about this machine: detect_host() -> HostFacts, without importing torch.

Its CPUs, caches, sockets and NUMA nodes, its GPUs, and the network cards nearest to them. Facts
about CPUs that cannot be read are replaced by those of the simplest machine that fits.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from meshrun.host.cores import allowed_cpus, count_cores, count_usable_cores, may_bind
from meshrun.host.gpus import read_domain, read_gpu_links, visible_gpus
from meshrun.host.machine import NEARNESS, Cpu, Gpu, HostFacts, Nics, Topology, parse_cpus
from meshrun.host.network import networks_of_interfaces
from meshrun.host.sysfs import device_folder, nearness, read_number, read_text
from meshrun.host.visibility import Build, listed_devices, visibility_variables

_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=]*=\s*'", re.MULTILINE)
_BUILDS: tuple[Build, ...] = ("hip", "cuda", "xpu")


def detect_host(
    *,
    with_gpus: bool = True,
    with_topology: bool = False,
    with_links: bool = False,
    with_nics: bool = False,
    with_domain: bool = False,
) -> HostFacts:
    """Return the facts about this machine that a plan needs, without side effects."""
    env = os.environ
    build = _build_of_torch()
    vendor, gpus = visible_gpus(build, env) if with_gpus else (build, ())
    variables = visibility_variables(vendor, env)
    bound, cores = count_cores()
    return HostFacts(
        hostname=socket.gethostname(),
        usable_cores=count_usable_cores(),
        bound_cores=bound,
        cores=cores,
        may_bind=not with_topology or may_bind(),
        accelerator="cuda" if build == "hip" else build,
        accelerator_count=len(gpus) if build else 0,
        visible_devices=listed_devices(variables, env),
        visibility=variables,
        gpus=add_nics(gpus) if with_nics else gpus,
        topology=read_topology(accelerators=[gpu.numa_node for gpu in gpus])
        if with_topology
        else None,
        networks=networks_of_interfaces() if with_nics and gpus else (),
        domain=read_domain(gpus) if with_domain else "",
        links=read_gpu_links(gpus) if with_links else None,
    )


def _build_of_torch() -> Build | None:
    """Return the platform that the installed torch was built for, or ``None``.

    Source:
        ``torch/version.py``, written by torch's build: ``cuda: Optional[str] = '12.8'``.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return None
    built_for = {match.group(1) for match in _BUILD.finditer(text)}
    return next((build for build in _BUILDS if build in built_for), None)


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


def add_nics(gpus: Sequence[Gpu], *, sysfs: Path = Path("/sys")) -> tuple[Gpu, ...]:
    """Return the GPUs with their nearest cards and interfaces: by PCI path, then by NUMA node.

    Source:
        kernel, Documentation/ABI/stable/sysfs-class-infiniband and testing/sysfs-class-net.
    """
    cards = list(_devices(sysfs / "class/infiniband", _active_port))
    interfaces = list(_devices(sysfs / "class/net", _if_up))
    return tuple(
        replace(
            gpu,
            cards=_nearest(sysfs, gpu.address, cards),
            interfaces=_nearest(sysfs, gpu.address, interfaces),
        )
        for gpu in gpus
    )


def _devices(
    folder: Path, port_of: Callable[[Path], str | None]
) -> Iterator[tuple[str, Path, str]]:
    """Yield (name, place, port) of each connected device; virtual ones have no ``device`` link."""
    for link in sorted(folder.glob("*/device")):
        if (port := port_of(link.parent)) is not None:
            yield link.parent.name, link.resolve(), port


def _nearest(
    sysfs: Path, address: str | None, devices: Sequence[tuple[str, Path, str]]
) -> Nics | None:
    if address is None:
        return None
    gpu = device_folder(sysfs, address)
    found = [(nearness(gpu, place), name, port) for name, place, port in devices]
    least = min((far for far, _, _ in found if far is not None), default=None)
    if least is None:
        return None
    names = tuple(name for far, name, _ in found if far == least)
    ports = tuple(port for far, _, port in found if far == least and port)
    return Nics(names=names, nearness=NEARNESS[least], ports=ports)


def _active_port(card: Path) -> str | None:
    """Return the first linked port of an RDMA card; port 1 if the kernel lists none."""
    states = {state.parent.name: read_text(state) for state in sorted(card.glob("ports/*/state"))}
    active = [port for port, state in states.items() if "ACTIVE" in state] if states else ["1"]
    return f"{card.name}:{active[0]}" if active else None


def _if_up(interface: Path) -> str | None:
    return "" if read_text(interface / "operstate") in ("up", "unknown", "") else None
