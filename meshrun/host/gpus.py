"""The GPUs of this machine, and those that a process sees, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from meshrun.host.ask_driver import ask_driver
from meshrun.host.machine import Gpu
from meshrun.host.nvml import Handle, Nvml
from meshrun.host.sysfs import numa_node, read_text
from meshrun.host.visibility import CUDA, HIP, ROCR, XPU, Build

_INTEL = "0x8086"


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
    if build == "xpu":
        return build, _placed(filter_visible(_intel_gpus(sysfs), env.get(XPU)), sysfs)
    if build != "hip" and ((found := _nvidia_gpus(dev)) or build == "cuda"):
        return "cuda", _placed(filter_visible(found, env.get(CUDA)), sysfs)
    if not (found := _amd_gpus(sysfs)):
        return build, ()
    seen = filter_visible(found, env.get(ROCR))
    seen = tuple(replace(gpu, entry=str(place)) for place, gpu in enumerate(seen))
    return "hip", _placed(filter_visible(seen, env.get(HIP) or env.get(CUDA)), sysfs)


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


def _placed(gpus: Sequence[Gpu], sysfs: Path) -> tuple[Gpu, ...]:
    return tuple(replace(gpu, numa_node=numa_node(sysfs, gpu.address)) for gpu in gpus)


def _nvidia_gpus(dev: Path) -> list[Gpu]:
    """Return the GPUs that NVML lists for this container, or without NVML, the device nodes."""
    if (found := ask_driver(_list_gpus)) is not None:
        return found
    count = sum(1 for _ in dev.glob("nvidia[0-9]*"))
    return [Gpu(entry=str(index), index=index) for index in range(count)]


def _list_gpus(nvml: Nvml | None) -> list[Gpu] | None:
    if nvml is None:
        return None
    return [
        _nvidia_gpu(nvml, str(place), index, gpu)
        for place, (index, gpu) in enumerate(nvml.gpus().items())
    ]


def _nvidia_gpu(nvml: Nvml, entry: str, index: int, gpu: Handle | None) -> Gpu:
    if gpu is None:
        return Gpu(entry=entry, index=index)
    return Gpu(
        entry=entry,
        index=index,
        uuid=nvml.text("nvmlDeviceGetUUID", gpu),
        address=nvml.address(gpu),
        model=nvml.text("nvmlDeviceGetName", gpu),
        mig_uuids=tuple(
            nvml.text("nvmlDeviceGetUUID", instance) for instance in nvml.mig_instances(gpu)
        ),
    )


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
