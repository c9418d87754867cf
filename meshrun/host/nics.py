"""The network cards and interfaces that are nearest to each GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshrun.host.machine import NEARNESS, Gpu, Nics
from meshrun.host.pci import device_folder, nearness


def with_nics(gpus: Sequence[Gpu], *, sysfs: Path = Path("/sys")) -> tuple[Gpu, ...]:
    """Return GPUs with what is nearest to them: by the way through PCI, then by NUMA node.

    Source:
        kernel, Documentation/ABI/stable/sysfs-class-infiniband and testing/sysfs-class-net.
    """
    cards = list(_devices(sysfs / "class/infiniband", _is_active))
    interfaces = list(_devices(sysfs / "class/net", _is_up))
    return tuple(
        replace(
            gpu,
            cards=_nearest(sysfs, gpu.address, cards),
            interfaces=_nearest(sysfs, gpu.address, interfaces),
        )
        for gpu in gpus
    )


def _devices(folder: Path, is_usable: Callable[[Path], bool]) -> Iterator[tuple[str, Path]]:
    """Yield name and place of each device that is connected; those of software have no place."""
    for link in sorted(folder.glob("*/device")):
        if is_usable(link.parent):
            yield link.parent.name, link.resolve()


def _nearest(sysfs: Path, address: str | None, devices: Sequence[tuple[str, Path]]) -> Nics | None:
    if address is None or not devices:
        return None
    gpu = device_folder(sysfs, address)
    found = [(nearness(gpu, place), name) for name, place in devices]
    least = min(found)[0]
    return Nics(names=tuple(name for far, name in found if far == least), nearness=NEARNESS[least])


def _is_active(card: Path) -> bool:
    """Whether a port of an RDMA card has a link, or none says that it has not."""
    states = [_read(state) for state in card.glob("ports/*/state")]
    return not states or any("ACTIVE" in state for state in states)


def _is_up(interface: Path) -> bool:
    return _read(interface / "operstate") in ("up", "unknown", "")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
