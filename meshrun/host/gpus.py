"""The GPUs of this machine, those that a process sees, and their links, without importing torch."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from meshrun.host.machine import LEVELS, Gpu, GpuLinks
from meshrun.host.nvml import Handle, Nvml, ask_driver
from meshrun.host.sysfs import numa_node, read_text
from meshrun.host.visibility import CUDA, HIP, ROCR, XPU, Build

_INTEL = "0x8086"
MOST_NVLINKS = 36
"""Maximum number of NVLinks of a GPU, ``NVML_NVLINK_MAX_LINKS``."""
_TO_SWITCH = 2
_LEVEL_OF_NVML = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def visible_gpus(
    build: Build | None,
    env: Mapping[str, str],
    *,
    sysfs: Path = Path("/sys"),
    dev: Path = Path("/dev"),
) -> tuple[Build | None, tuple[Gpu, ...]]:
    """Return the vendor of the GPUs that a process with ``env`` sees, and the GPUs by local index.

    The order is that of NVML, by PCI address. CUDA's is the same if all GPUs are of one model or
    ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``.

    Without a torch, these are NVIDIA's GPUs, or else AMD's.
    """
    vendor, seen = build, tuple[Gpu, ...]()
    if build == "xpu":
        seen = filter_visible(_intel_gpus(sysfs), env.get(XPU))
    elif build != "hip" and ((found := _nvidia_gpus(dev)) or build == "cuda"):
        vendor, seen = "cuda", filter_visible(found, env.get(CUDA))
    elif found := _amd_gpus(sysfs):
        seen = filter_visible(found, env.get(ROCR))
        seen = tuple(replace(gpu, entry=str(place)) for place, gpu in enumerate(seen))
        vendor, seen = "hip", filter_visible(seen, env.get(HIP) or env.get(CUDA))
    return vendor, tuple(replace(gpu, numa_node=numa_node(sysfs, gpu.address)) for gpu in seen)


def filter_visible(present: Sequence[Gpu], listed: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that the value of a visibility variable selects, in its order.

    The list ends at the first entry that names no device, and an empty value hides all (CUDA
    programming guide, "CUDA environment variables").
    """
    if listed is None or not present:
        return tuple(present)
    seen = []
    for entry in listed.split(","):
        matches = match_gpus(present, entry.strip())
        if len(matches) != 1:
            break
        seen.append(matches[0])
    return tuple(seen)


def match_gpus(present: Sequence[Gpu], entry: str) -> list[Gpu]:
    """Return the GPUs that match an entry of a visibility variable; a valid entry matches one.

    A number is an index into ``present``. A UUID may be abbreviated. ``0.1`` is a tile of Intel's
    GPU 0.
    """
    number, _, tile = entry.partition(".")
    if number.isdecimal() and (not tile or tile.isdecimal()):
        return [replace(gpu, entry=entry) for gpu in present[int(number) : int(number) + 1]]
    if not entry.startswith(("GPU-", "MIG-")):  # such as Slurm's `NoDevFiles`
        return []
    found = [replace(each, entry=entry) for gpu in present for each in match_uuid(gpu, entry)]
    if not found and not all(gpu.uuid for gpu in present):  # it may be one without a known UUID
        return [Gpu(entry=entry, uuid=entry)]
    return found


def match_uuid(gpu: Gpu, text: str) -> list[Gpu]:
    """Return those of a GPU and its MIG instances whose UUID begins with ``text``.

    ``MIG-GPU-UUID/1/0`` is an older form of an instance's name, which contains its GPU's UUID.
    """
    names = [*gpu.mig_uuids, *([text] if text.startswith(f"MIG-{gpu.uuid}/") else [])]
    parts = [replace(gpu, entry=name, uuid=name, mig_uuids=()) for name in names]
    return [each for each in (gpu, *parts) if each.uuid.startswith(text)]


def _nvidia_gpus(dev: Path) -> list[Gpu]:
    """Return the GPUs that NVML lists for this container, or without NVML, the device nodes."""
    if (found := ask_driver(_list_gpus)) is not None:
        return found
    count = sum(1 for _ in dev.glob("nvidia[0-9]*"))
    return [Gpu(entry=str(index), index=index) for index in range(count)]


def _list_gpus(nvml: Nvml | None) -> list[Gpu] | None:
    if nvml is None:
        return None
    found = []
    for place, (index, handle) in enumerate(nvml.gpus().items()):
        gpu = Gpu(entry=str(place), index=index)
        if handle is not None:
            uuid, *parts = (
                nvml.text("nvmlDeviceGetUUID", each)
                for each in (handle, *nvml.mig_instances(handle))
            )
            model, address = nvml.text("nvmlDeviceGetName", handle), nvml.address(handle)
            gpu = replace(gpu, uuid=uuid, address=address, model=model, mig_uuids=tuple(parts))
        found.append(gpu)
    return found


def _amd_gpus(sysfs: Path) -> list[Gpu]:
    """Return the nodes of the KFD topology that have SIMD units (kernel, amdkfd)."""
    nodes = (sysfs / "class/kfd/kfd/topology/nodes").glob("[0-9]*/properties")
    found: list[Gpu] = []
    for node in sorted(nodes, key=lambda node: int(node.parent.name)):
        properties = {
            name: int(value)
            for name, value in re.findall(r"^(\w+) (\d+)$", read_text(node), re.MULTILINE)
        }
        if not properties.get("simd_count"):
            continue
        place, unique = properties.get("location_id", 0), properties.get("unique_id", 0)
        domain = properties.get("domain", 0)
        address = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        found.append(
            Gpu(
                entry=str(len(found)),
                index=len(found),
                uuid=f"GPU-{unique:016x}" if unique else "",
                address=address if "location_id" in properties else None,
            )
        )
    return found


def _intel_gpus(sysfs: Path) -> list[Gpu]:
    """Return the render nodes with Intel's vendor id, which Level Zero can use."""
    vendors = (sysfs / "class/drm").glob("renderD*/device/vendor")
    devices = [
        vendor.parent.resolve().name
        for vendor in sorted(vendors, key=lambda vendor: vendor.parent.parent.name)
        if read_text(vendor) == _INTEL
    ]
    return [
        Gpu(entry=str(index), index=index, address=address if ":" in address else None)
        for index, address in enumerate(devices)
    ]


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
