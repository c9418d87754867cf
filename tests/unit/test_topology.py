"""What is read of a machine: its CPUs, and the node of each accelerator."""

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.host.machine import Cpu
from meshrun.host.topology import read_topology, visible_pci_addresses
from meshrun.plan.numa import bind_cpus
from tests.machines import Machine, put

# ---- reading a machine -------------------------------------------------------------------------


def test_a_machine_is_read(tmp_path: Path) -> None:
    """Cores and caches are known by their lowest CPU, also where that is not allowed."""
    machine = Machine(
        sockets=2, caches_per_node=2, cores_per_cache=2, threads=2, hidden=frozenset({4})
    )
    machine.write(tmp_path)

    topology = machine.read(tmp_path)

    by_index = {cpu.index: cpu for cpu in topology.cpus}
    assert set(by_index) == set(range(16)) - {4}
    assert by_index[0] == Cpu(index=0, node=0, socket=0, core=0, cache=0)
    assert by_index[11] == Cpu(index=11, node=0, socket=0, core=3, cache=2)
    assert by_index[12] == Cpu(index=12, node=1, socket=1, core=4, cache=4)


def test_a_machine_that_says_nothing_is_one_node(tmp_path: Path) -> None:
    """Every CPU is a core, all share a cache, and accelerators are near."""
    topology = read_topology(tmp_path, {0, 1}, ["0000:1a:00.0", None])

    assert topology.cpus == tuple(Cpu(index=i, node=0, socket=0, core=i, cache=0) for i in (0, 1))
    assert topology.accelerator_nodes == (0, 0)


def test_what_is_missing_is_taken_from_the_node(tmp_path: Path) -> None:
    """Its socket and its cache; and a CPU of no node is on the first."""
    put(tmp_path / "devices/system/node/node2/cpulist", "0-1")
    put(tmp_path / "devices/system/node/node3/cpulist", "2-3")
    put(tmp_path / "devices/system/node/node4/cpulist", "")
    put(tmp_path / "devices/system/cpu/cpu0/topology/physical_package_id", "nonsense")
    put(tmp_path / "devices/system/cpu/cpu0/topology/thread_siblings_list", "nonsense")

    topology = read_topology(tmp_path, {0, 3, 9}, [])

    assert topology.cpus == (
        Cpu(index=0, node=2, socket=2, core=0, cache=0),
        Cpu(index=3, node=3, socket=3, core=3, cache=2),
        Cpu(index=9, node=2, socket=2, core=9, cache=0),
    )
    assert topology.nodes == (2, 3)


@pytest.mark.parametrize(("sockets", "node"), [(1, 0), (2, None)])
def test_an_accelerator_of_unknown_node(sockets: int, node: int | None, tmp_path: Path) -> None:
    """It is on the only node; where there are several, its rank is spread as without one."""
    machine = Machine(sockets=sockets, gpu_nodes=(-1, -1))
    machine.write(tmp_path)

    topology = machine.read(tmp_path)

    assert topology.accelerator_nodes == (node, node)
    bound = [bind_cpus("node", topology, local_rank=rank, nproc=2) for rank in range(2)]
    assert [each[0] for each in bound] == ([0, 4] if sockets == 2 else [0, 0])


def test_this_machine_is_read() -> None:
    """Its own CPUs, and whatever accelerators it has."""
    topology = read_topology()

    assert topology.nodes
    if hasattr(os, "sched_getaffinity"):
        assert {cpu.index for cpu in topology.cpus} == os.sched_getaffinity(0)


# ---- accelerators ------------------------------------------------------------------------------

GPUS = (("GPU-1b2c-0", 0, 0x1A), ("GPU-1b2d-1", 0, 0xDC), ("GPU-3d4e-2", 0x10001, 0x03))
ADDRESSES = ("0000:1a:00.0", "0000:dc:00.0", "10001:03:00.0")


class FakeNvml:
    """NVML as ctypes sees it."""

    def __init__(self, gpus: Sequence[tuple[str, int, int]] = GPUS) -> None:
        self.gpus = gpus
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 1000 + index.value
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: Any) -> int:  # noqa: N802
        assert size.value == 96
        uuid.value = self.gpus[handle.value - 1000][0].encode()
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:  # noqa: N802
        _, domain, bus = self.gpus[handle.value - 1000]
        legacy, full = b"0000:FF:1F.0", b"00000000:FF:1F.0"
        info.raw = struct.pack("=16s5I32s", legacy, domain, bus, 0, 0x233010DE, 0, full)
        return 0


@pytest.mark.parametrize(
    ("visible", "addresses"),
    [
        (None, ADDRESSES),
        ("", ()),
        ("2,0", (ADDRESSES[2], ADDRESSES[0])),
        (" 1 ,-1,0", (ADDRESSES[1],)),
        ("0,9,1", (ADDRESSES[0],)),
        ("GPU-3d4e-2,GPU-1b2c", (ADDRESSES[2], ADDRESSES[0])),
        ("GPU-1b", ()),
        ("MIG-1,GPU-3d", (None, ADDRESSES[2])),
        ("NoDevFiles", ()),
        ("²", ()),
    ],
)
def test_visible_accelerators(
    visible: str | None, addresses: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of CUDA_VISIBLE_DEVICES, up to the first that is not there."""
    nvml = FakeNvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    assert visible_pci_addresses(env) == addresses
    assert nvml.open == 0


def test_visible_accelerators_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told of them."""
    machine = Machine(sockets=2)
    machine.write(tmp_path)
    for address, node in zip(ADDRESSES, (0, 1, 0), strict=True):
        put(tmp_path / f"bus/pci/devices/{address}/numa_node", str(node))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")

    assert read_topology(tmp_path, machine.allowed).accelerator_nodes == (1, 0)


class FailingNvml(FakeNvml):
    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 9


class ForgetfulNvml(FakeNvml):
    def nvmlDeviceGetHandleByIndex_v2(self, *_: Any) -> int:  # noqa: N802
        return 15  # fallen off the bus


def test_accelerators_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, one that does not answer, one of another age, and a lost device."""

    def missing(name: str) -> None:
        raise OSError(name)

    for nvml, addresses in (
        (missing, ()),
        (lambda _: FailingNvml(), ()),
        (lambda _: SimpleNamespace(), ()),
        (lambda _: ForgetfulNvml(), (None, None, None)),
    ):
        monkeypatch.setattr(ctypes, "CDLL", nvml)
        assert visible_pci_addresses({}) == addresses
