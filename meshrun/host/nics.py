"""The network cards and interfaces nearest to each GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from meshrun.host.machine import NEARNESS, Gpu, Nics
from meshrun.host.sysfs import device_folder, nearness, read_text


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


class _Device(Struct, frozen=True):
    name: str
    place: Path
    port: str


def _devices(folder: Path, port_of: Callable[[Path], str | None]) -> Iterator[_Device]:
    """Yield each connected device; virtual ones have no ``device`` link."""
    for link in sorted(folder.glob("*/device")):
        if (port := port_of(link.parent)) is not None:
            yield _Device(link.parent.name, link.resolve(), port)


def _nearest(sysfs: Path, address: str | None, devices: Sequence[_Device]) -> Nics | None:
    if address is None:
        return None
    gpu = device_folder(sysfs, address)
    found = [(nearness(gpu, device.place), device) for device in devices]
    least = min((far for far, _ in found if far is not None), default=None)
    if least is None:
        return None
    near = [device for far, device in found if far == least]
    return Nics(
        names=tuple(device.name for device in near),
        nearness=NEARNESS[least],
        ports=tuple(device.port for device in near if device.port),
    )


def _active_port(card: Path) -> str | None:
    """Return the first linked port of an RDMA card; port 1 if the kernel lists none."""
    states = {state.parent.name: read_text(state) for state in sorted(card.glob("ports/*/state"))}
    active = [port for port, state in states.items() if "ACTIVE" in state] if states else ["1"]
    return f"{card.name}:{active[0]}" if active else None


def _if_up(interface: Path) -> str | None:
    return "" if read_text(interface / "operstate") in ("up", "unknown", "") else None
