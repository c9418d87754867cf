"""Files of the kernel's description of this machine."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """Return what a file says, without the line's end; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def read_number(path: Path) -> int | None:
    """Return the number that a file says, if it says one."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def device_folder(sysfs: Path, address: str) -> Path:
    """Return the folder of a device: its path goes from the root complex over bridges to it."""
    return (sysfs / "bus/pci/devices" / address.lower()).resolve()


def numa_node(sysfs: Path, address: str | None) -> int | None:
    """Return the NUMA node of a device, ``None`` if that is unknown.

    The kernel says -1 for unknown, which is common in virtual machines.
    """
    return None if address is None else numa_node_of(device_folder(sysfs, address))


def numa_node_of(device: Path) -> int | None:
    """Return the NUMA node of the device in a folder, or of the one that it is a part of."""
    for folder in (device, *device.parents):
        if (node := read_number(folder / "numa_node")) is not None:
            return node if node >= 0 else None
    return None


def nearness(one: Path, other: Path) -> int | None:
    """Return how far two devices are from each other, an index of ``NEARNESS``, if it is known."""
    roots = [next((at for at in path.parts if at.startswith("pci")), "") for path in (one, other)]
    if roots[0] and roots[0] == roots[1]:
        below = [path.parts[path.parts.index(roots[0]) + 1 :] for path in (one, other)]
        return 0 if below[0][:1] == below[1][:1] and len(below[0]) > 1 else 1
    numa = [numa_node_of(path) for path in (one, other)]
    if None in numa:
        return None
    return 2 if numa[0] == numa[1] else 3
