"""The kernel's description of this machine: files, cgroups, and the location of PCI devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def read_text(path: Path) -> str:
    """Return the contents of a file without surrounding whitespace; "" if it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""


def boot_id() -> str:
    """Return a random string that changes with each boot; "" if unknown."""
    return read_text(Path("/proc/sys/kernel/random/boot_id"))


def read_number(path: Path) -> int | None:
    """Return the number in a file, ``None`` if there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def read_counter(path: Path, name: str) -> int:
    """Return a value in a file of counters, such as ``memory.events``; 0 if it has none."""
    for line in read_text(path).splitlines():
        found, _, value = line.partition(" ")
        if found == name and value.isdecimal():
            return int(value)
    return 0


def cgroup_folders(
    controller: str, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")
) -> Iterator[Path]:
    """Yield the folder of this process's cgroup, then those above it.

    First those of version 1, where each controller has its own, then those of version 2.
    """
    lines = [line.split(":", 2) for line in read_text(proc / "self/cgroup").splitlines()]
    for hierarchy in (controller, ""):
        root = sysfs / "fs/cgroup" / hierarchy
        for _, controllers, path in lines:
            if hierarchy in controllers.split(","):
                folder = root / path.lstrip("/")
                yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def device_folder(sysfs: Path, address: str) -> Path:
    """Return the folder of a device, whose path goes from the root complex through bridges."""
    return (sysfs / "bus/pci/devices" / address.lower()).resolve()


def numa_node(sysfs: Path, address: str | None) -> int | None:
    """Return the NUMA node of a device, ``None`` if unknown.

    The kernel reports -1 for unknown, which is common in virtual machines.
    """
    return None if address is None else numa_node_of(device_folder(sysfs, address))


def numa_node_of(device: Path) -> int | None:
    """Return the NUMA node of the device in a folder, or of its nearest parent with one."""
    for folder in (device, *device.parents):
        if (node := read_number(folder / "numa_node")) is not None:
            return node if node >= 0 else None
    return None


def nearness(one: Path, other: Path) -> int | None:
    """Return the distance of two devices as an index into ``NEARNESS``, ``None`` if unknown."""
    roots = [next((at for at in path.parts if at.startswith("pci")), "") for path in (one, other)]
    if roots[0] and roots[0] == roots[1]:
        below = [path.parts[path.parts.index(roots[0]) + 1 :] for path in (one, other)]
        return 0 if below[0][:1] == below[1][:1] and len(below[0]) > 1 else 1
    numa = [numa_node_of(path) for path in (one, other)]
    if None in numa:
        return None
    return 2 if numa[0] == numa[1] else 3
