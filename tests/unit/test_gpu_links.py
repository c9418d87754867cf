"""Links between GPUs, from a driver that is not there: NVML's functions over a table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.host.machine import GpuLinks
from meshrun.host.nvml import read_gpu_links
from tests.unit.test_findings import plan

SWITCH, GPU = 2, 0


class Driver:
    """NVML as far as it is asked: ``links[gpu]`` has the far end of each link, or None if down."""

    class NVMLError(Exception):
        """What the driver cannot do."""

    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, links: list[list[int | str | None]], levels: dict[Any, int]) -> None:
        self._links, self._levels = links, levels
        self.depth = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.depth += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.depth -= 1

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> int:  # noqa: N802
        return int(address.decode()[5:7], 16)

    def nvmlDeviceGetPciInfo(self, gpu: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(domain=0, bus=gpu, device=0)

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:  # noqa: N802
        if link >= len(self._links[gpu]):
            raise self.NVMLError
        return self._links[gpu][link] is not None

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> SimpleNamespace:  # noqa: N802
        far = self._links[gpu][link]
        return self.nvmlDeviceGetPciInfo(far if isinstance(far, int) else 99)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:  # noqa: N802
        return SWITCH if self._links[gpu][link] == "switch" else GPU

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:  # noqa: N802
        if (min(one, other), max(one, other)) not in self._levels:
            raise self.NVMLError
        return self._levels[min(one, other), max(one, other)]


def read(driver: Driver, count: int, sysfs: Path = Path("/nowhere")) -> GpuLinks:
    addresses = [f"0000:{gpu:02x}:00.0" for gpu in range(count)]
    found = read_gpu_links({}, nvml=driver, addresses=addresses, sysfs=sysfs)
    assert found is not None
    assert driver.depth == 0
    return found


def test_links_are_counted_straight_and_through_switches() -> None:
    """Links that are down do not count; without any, the way over PCI is told."""
    straight = read(Driver([[1, 1, None], [0, 0], []], {(0, 2): 30, (1, 2): 50}), 3)
    switched = read(Driver([["switch"] * 4, ["switch"] * 3], {}), 2)
    unknown = read(Driver([[], []], {}), 2)

    assert straight.pairs == (("X", "NV2", "PHB"), ("NV2", "X", "SYS"), ("PHB", "SYS", "X"))
    assert switched.pairs == (("X", "NV3"), ("NV3", "X"))
    assert unknown.pairs == (("X", "?"), ("?", "X"))


@pytest.mark.parametrize(
    ("devices", "weakest"),
    [([0, 1], "NV2"), ([0, 1, 2], "SYS"), ([0, 2], "PHB"), ([0], None), ([0, 7], None)],
)
def test_the_slowest_link_counts(devices: list[int], weakest: str | None) -> None:
    """More links are faster, and any is faster than PCI."""
    links = read(Driver([[1, 1, None], [0, 0], []], {(0, 2): 30, (1, 2): 50}), 3)

    assert links.weakest(devices) == weakest
    assert GpuLinks.weakest_of(["NV4", "NV18", "?"]) == "?"


def test_the_nearest_network_card_is_found(tmp_path: Path) -> None:
    """By how much of the way through PCI it shares with the GPU."""
    ways = {
        "gpu0": "pci0000:00/0000:00:01.0/0000:00:00.0",
        "gpu1": "pci0000:40/0000:40:01.0/0000:01:00.0",
        "gpu2": "pci0000:80/0000:80:01.0/0000:02:00.0",
        "near": "pci0000:00/0000:00:01.0/0000:09:00.0",
        "root": "pci0000:40/0000:40:03.0/0000:49:00.0",
        "node": "pci0000:90/0000:90:03.0/0000:99:00.0",
    }
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "class/infiniband").mkdir(parents=True)
    for name, way in ways.items():
        device = tmp_path / "devices" / way
        device.mkdir(parents=True)
        (device / "numa_node").write_text("1\n" if name in ("gpu2", "node") else "0\n")
        if name.startswith("gpu"):
            (tmp_path / "bus/pci/devices" / f"0000:0{name[3]}:00.0").symlink_to(device)
        else:
            (tmp_path / "class/infiniband" / name).mkdir()
            (tmp_path / "class/infiniband" / name / "device").symlink_to(device)

    links = read(Driver([[], [], []], {}), 3, tmp_path)

    assert links.nics == (
        ("near", "same switch"), ("root", "same root"), ("node", "same NUMA node"),
    )  # fmt: skip


def test_without_a_driver_there_are_no_links() -> None:
    """The module alone is not enough, and nothing is raised."""
    driver = Driver([], {})
    assert read_gpu_links({}, nvml=driver, addresses=[]) is None

    def fail() -> None:
        raise Driver.NVMLError

    driver.nvmlInit = fail  # type: ignore[method-assign]
    assert read_gpu_links({}, nvml=driver, addresses=["0000:00:00.0"]) is None


def test_a_dry_run_tells_the_slowest_link_of_each_dim(capsys: pytest.CaptureFixture[str]) -> None:
    """For the groups on this node."""
    from dataclasses import replace

    from meshrun.report.dry_run import print_dry_run

    links = read(Driver([[1, 1], [0, 0], [3], [2]], dict.fromkeys(
        [(0, 2), (0, 3), (1, 2), (1, 3)], 50)), 4)  # fmt: skip
    here = replace(plan(mesh="dp=2,tp=2", device="cuda"), links=links)

    print_dry_run(here)

    text = capsys.readouterr().out
    assert "dp: slowest link on this node SYS" in text
    assert "tp: slowest link on this node NV1, between gpus 2 3" in text
