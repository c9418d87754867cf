"""The links between GPUs, from NVML, if the extra ``gpu`` (nvidia-ml-py) is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrun.host.machine import LEVELS, NEARNESS, GpuLinks
from meshrun.host.topology import visible_pci_addresses

_TO_SWITCH = 2
_LEVEL_OF_NVML = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def read_gpu_links(
    env: Mapping[str, str] = os.environ,
    *,
    nvml: Any = None,
    addresses: Sequence[str | None] | None = None,
    sysfs: Path = Path("/sys"),
) -> GpuLinks | None:
    """Return how the GPUs that a process with ``env`` would see are joined.

    Args:
        env: For ``CUDA_VISIBLE_DEVICES``.
        nvml: The module ``pynvml``; imported if ``None``.
        addresses: PCI addresses of the GPUs; those that NVML and ``env`` give if ``None``.
        sysfs: Where the kernel describes network cards.

    Returns:
        ``None`` without a driver, GPUs or the module; a link that NVML cannot tell is ``?``.

    Source:
        NVML API reference, "Device Queries" and "NvLink Methods".
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    addresses = visible_pci_addresses(env) if addresses is None else addresses
    if not addresses:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        gpus = [_handle(nvml, address) for address in addresses]
        return GpuLinks(
            pairs=tuple(
                tuple(_link(nvml, gpus, first, second) for second in range(len(gpus)))
                for first in range(len(gpus))
            ),
            nics=tuple(_nearest_nic(sysfs, address) for address in addresses),
        )
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, address: str | None) -> Any:
    try:
        return None if address is None else nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    except nvml.NVMLError:
        return None


def _link(nvml: Any, gpus: Sequence[Any], first: int, second: int) -> str:
    if first == second:
        return "X"
    one, other = gpus[first], gpus[second]
    if one is None or other is None:
        return "?"
    if nvlinks := _count_nvlinks(nvml, one, other):
        return f"NV{nvlinks}"
    try:
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    except nvml.NVMLError:
        return "?"
    return _LEVEL_OF_NVML.get(level, LEVELS[0])


def _count_nvlinks(nvml: Any, one: Any, other: Any) -> int:
    """Count the links that join two GPUs, straight or through switches that both are on."""
    address = _bus_id(nvml.nvmlDeviceGetPciInfo(other))
    links = _active_links(nvml, one)
    straight = sum(_bus_id(remote) == address for remote, _ in links)
    to_switch = sum(kind == _TO_SWITCH for _, kind in links)
    others_to_switch = sum(kind == _TO_SWITCH for _, kind in _active_links(nvml, other))
    return straight + min(to_switch, others_to_switch)


def _active_links(nvml: Any, gpu: Any) -> list[tuple[Any, int]]:
    """Return the remote end and its kind of each link that is up."""
    found = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(gpu, link):
                remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link)
                found.append((remote, nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link)))
        except nvml.NVMLError:  # a GPU with fewer links, or with none
            continue
    return found


def _bus_id(info: Any) -> tuple[int, int, int]:
    return info.domain, info.bus, info.device


def _nearest_nic(sysfs: Path, address: str | None) -> tuple[str, str] | None:
    """Return the RDMA card that shares most of a GPU's way through PCI, and how much it shares."""
    if address is None:
        return None
    gpu = (sysfs / "bus/pci/devices" / address.lower()).resolve()
    cards = sorted((sysfs / "class/infiniband").glob("*/device"))
    found = [(_distance(gpu, card.resolve()), card.parent.name) for card in cards]
    if not found:
        return None
    distance, name = min(found)
    return name, NEARNESS[distance]


def _distance(gpu: Path, card: Path) -> int:
    """Return an index of ``NEARNESS``: paths go from the root complex over bridges to a device."""
    roots = [next((at for at in path.parts if at.startswith("pci")), "") for path in (gpu, card)]
    if roots[0] and roots[0] == roots[1]:
        below = [path.parts[path.parts.index(roots[0]) + 1 :] for path in (gpu, card)]
        return 0 if below[0][:1] == below[1][:1] and len(below[0]) > 1 else 1
    numa = [_numa_node(path) for path in (gpu, card)]
    return 2 if numa[0] is not None and numa[0] == numa[1] else 3


def _numa_node(device: Path) -> int | None:
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
