"""The links between GPUs, from NVML."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

from meshrun.host.ask_driver import ask_driver
from meshrun.host.machine import LEVELS, Gpu, GpuLinks
from meshrun.host.nvml import Handle, Nvml

MOST_NVLINKS = 36
"""Maximum number of NVLinks of a GPU, ``NVML_NVLINK_MAX_LINKS``."""
_TO_SWITCH = 2
_LEVEL_OF_NVML = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def read_domain(gpus: Sequence[Gpu]) -> str:
    """Return the name of the NVLink domain that these GPUs share with other nodes.

    Returns:
        The name; "" without a driver, or if the GPUs are in no domain or in several.
    """
    found = ask_driver(partial(_domains, gpus=gpus))
    return found.pop() if len(found) == 1 else ""


def read_gpu_links(gpus: Sequence[Gpu]) -> GpuLinks | None:
    """Return the links between GPUs, in the order of ``gpus``; ``None`` without driver or GPUs.

    Source:
        NVML API reference, "Device Queries" and "NvLink Methods".
    """
    if not gpus:
        return None
    return ask_driver(partial(_links, gpus=gpus))


def nvlink_state(nvml: Nvml, gpu: Handle, link: int) -> bool | None:
    """Return whether a link is up, ``None`` if the GPU has no such link."""
    state = nvml.number("nvmlDeviceGetNvLinkState", gpu, ctypes.c_uint(link))
    return None if state is None else bool(state)


def _domains(nvml: Nvml | None, *, gpus: Sequence[Gpu]) -> set[str]:
    handles = [nvml.whole_gpu(gpu) for gpu in gpus] if nvml else []
    return {nvml.fabric(handle) if nvml and handle else "" for handle in handles}


def _links(nvml: Nvml | None, *, gpus: Sequence[Gpu]) -> GpuLinks | None:
    if nvml is None:
        return None
    handles, places = [nvml.whole_gpu(gpu) for gpu in gpus], range(len(gpus))
    pairs = (tuple(_link(nvml, handles, one, other) for other in places) for one in places)
    return GpuLinks(pairs=tuple(pairs))


def _link(nvml: Nvml, gpus: Sequence[Handle | None], first: int, second: int) -> str:
    if first == second:
        return "X"
    one, other = gpus[first], gpus[second]
    if one is None or other is None:
        return "?"
    if nvlinks := _count_nvlinks(nvml, one, other):
        return f"NV{nvlinks}"
    level = nvml.number("nvmlDeviceGetTopologyCommonAncestor", one, other)
    return "?" if level is None else _LEVEL_OF_NVML.get(level, LEVELS[0])


def _count_nvlinks(nvml: Nvml, one: Handle, other: Handle) -> int:
    """Return the number of links between two GPUs, direct or through switches."""
    address = nvml.address(other)
    links = _active_links(nvml, one)
    direct = sum(remote is not None and remote == address for remote, _ in links)
    to_switch = sum(kind == _TO_SWITCH for _, kind in links)
    others_to_switch = sum(kind == _TO_SWITCH for _, kind in _active_links(nvml, other))
    return direct + min(to_switch, others_to_switch)


def _active_links(nvml: Nvml, gpu: Handle) -> list[tuple[str | None, int | None]]:
    """Return (address of the remote end, kind of the remote end) of each link that is up."""
    found = []
    for link in map(ctypes.c_uint, range(MOST_NVLINKS)):
        if nvlink_state(nvml, gpu, link.value):
            remote = nvml.pci_address("nvmlDeviceGetNvLinkRemotePciInfo_v2", gpu, link)
            kind = nvml.number("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link)
            found.append((remote, kind))
    return found
