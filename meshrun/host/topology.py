"""The CPUs, caches, sockets and NUMA nodes of this machine, and where its accelerators are.

Whatever cannot be read is filled in with the plainest machine that fits: nothing here raises.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrun.host.machine import Cpu, Topology, parse_cpus


def read_topology(
    sysfs: Path = Path("/sys"),
    allowed: Collection[int] | None = None,
    accelerators: Sequence[str | None] | None = None,
) -> Topology:
    """Return what binding has to know of this machine.

    Args:
        sysfs: Where the kernel describes it.
        allowed: Logical CPUs this process may use; its affinity mask if ``None``.
        accelerators: PCI address of each visible accelerator by local index; if ``None``, those
            of the NVIDIA GPUs that ``CUDA_VISIBLE_DEVICES`` lets through.

    Source:
        kernel, Documentation/admin-guide/cputopology.rst and Documentation/ABI/stable/
        sysfs-devices-node.
    """
    if allowed is None:
        allowed = _affinity()
    if accelerators is None:
        accelerators = visible_pci_addresses(os.environ)
    nodes = _read_nodes(sysfs)
    node_of = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    first_node = min(nodes, default=0)
    return Topology(
        cpus=tuple(
            _read_cpu(sysfs, cpu, node_of.get(cpu, first_node), nodes) for cpu in sorted(allowed)
        ),
        accelerator_nodes=tuple(
            _read_accelerator_node(sysfs, address, nodes) for address in accelerators
        ),
    )


def visible_pci_addresses(env: Mapping[str, str]) -> tuple[str | None, ...]:
    """Return the PCI addresses of the NVIDIA GPUs that a process with ``env`` would see.

    The order is that of NVML, by PCI address; CUDA's is the same if all GPUs are of one kind or
    ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``. A slice of a GPU (MIG) has no address of its own.
    """
    present = _nvidia_gpus()
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return tuple(address for _, address in present)
    found: list[str | None] = []
    for entry in visible.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            found.append(None)
            continue
        if name.isdecimal():
            matches = present[int(name) : int(name) + 1]
        else:  # a UUID may be cut short as long as it means one GPU
            matches = [gpu for gpu in present if name and gpu[0].startswith(name)]
        if len(matches) != 1:
            break  # the list ends at the first entry that names no device
        found.append(matches[0][1])
    return tuple(found)


def _affinity() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)  # macOS has no affinity mask


def _read_nodes(sysfs: Path) -> dict[int, tuple[int, ...]]:
    """Return the CPUs of each NUMA node that has any."""
    nodes = {}
    try:
        for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
            cpus = _read_cpus(folder / "cpulist")
            if cpus and folder.name[4:].isdecimal():
                nodes[int(folder.name[4:])] = cpus
    except OSError:
        pass
    return nodes


def _read_cpu(sysfs: Path, cpu: int, node: int, nodes: Mapping[int, tuple[int, ...]]) -> Cpu:
    folder = sysfs / f"devices/system/cpu/cpu{cpu}"
    socket = _read_number(folder / "topology/physical_package_id")
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
    """Return the CPUs that share the highest cache that holds data."""
    highest = -1
    sharers: tuple[int, ...] = ()
    try:
        for cache in sorted(folder.glob("index[0-9]*")):
            level = _read_number(cache / "level")
            if level is None or level <= highest or _read(cache / "type") == "Instruction":
                continue
            if cpus := _read_cpus(cache / "shared_cpu_list"):
                highest, sharers = level, cpus
    except OSError:
        pass
    return sharers


def _read_accelerator_node(sysfs: Path, address: str | None, nodes: Collection[int]) -> int | None:
    """Return the NUMA node of a PCI device, ``None`` if that is unknown and there are several.

    The kernel says -1 for unknown, which is common in virtual machines. torch takes node 0 then;
    with several nodes, that would crowd every rank onto the first.
    """
    if not nodes:
        return 0
    node = None
    if address is not None:
        node = _read_number(sysfs / "bus/pci/devices" / address.lower() / "numa_node")
    if node is not None and node >= 0:
        return node
    return min(nodes) if len(nodes) == 1 else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _read_number(path: Path) -> int | None:
    try:
        return int(_read(path))
    except ValueError:
        return None


def _read_cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(_read(path))
    except ValueError:
        return ()


def _nvidia_gpus() -> list[tuple[str, str | None]]:
    """Return UUID and PCI address of each GPU that this container may use."""
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
        try:
            count = ctypes.c_uint(0)
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            return [_nvidia_gpu(nvml, index) for index in range(count.value)]
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one without these functions
        return []


def _nvidia_gpu(nvml: Any, index: int) -> tuple[str, str | None]:
    """Return UUID and PCI address of one GPU, if NVML knows them.

    Source:
        nvml.h: ``nvmlPciInfo_t`` is 68 bytes, with domain, bus and device as unsigned ints from
        byte 16; a UUID takes at most 96 bytes.
    """
    import ctypes

    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return "", None
    uuid, info = ctypes.create_string_buffer(96), ctypes.create_string_buffer(68)
    nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(len(uuid)))
    address = None
    if nvml.nvmlDeviceGetPciInfo_v3(handle, info) == 0:
        domain, bus, device = struct.unpack_from("=3I", info.raw, 16)
        address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    return uuid.value.decode(errors="replace"), address
