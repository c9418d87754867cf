"""What is read of a machine: its CPUs, and the NUMA node of each accelerator."""

import os
from pathlib import Path

import pytest

from meshrun.host.detect_host import read_topology
from meshrun.host.machine import Cpu
from meshrun.plan.hardware import choose_cpus
from tests.machines import Machine, put

# ---- reading a machine -------------------------------------------------------------------------


def test_a_machine_is_read(tmp_path: Path) -> None:
    """Cores and caches are numbered by their lowest CPU, even if that one may not be used."""
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


def test_a_machine_without_information_is_one_node(tmp_path: Path) -> None:
    """Every CPU is a core, all share a cache, and accelerators are on the node."""
    topology = read_topology(tmp_path, {0, 1}, [1, None])

    assert topology.cpus == tuple(Cpu(index=i, node=0, socket=0, core=i, cache=0) for i in (0, 1))
    assert topology.accelerator_nodes == (0, 0)


def test_what_is_missing_is_taken_from_the_node(tmp_path: Path) -> None:
    """The node stands for the socket and the cache; a CPU of no node is on the first."""
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
def test_an_accelerator_of_an_unknown_node_is_on_the_only_one(
    sockets: int, node: int | None, tmp_path: Path
) -> None:
    """It is on the only node; if there are several, its rank is placed as without one."""
    machine = Machine(sockets=sockets, gpu_nodes=(-1, -1))
    machine.write(tmp_path)

    topology = machine.read(tmp_path)

    assert topology.accelerator_nodes == (node, node)
    bound = [choose_cpus("node", topology, local_rank=rank, nproc=2) for rank in range(2)]
    assert [each[0] for each in bound] == ([0, 4] if sockets == 2 else [0, 0])


def test_this_machine_is_read() -> None:
    """Its own CPUs, and whatever accelerators it has."""
    topology = read_topology()

    assert topology.nodes
    if hasattr(os, "sched_getaffinity"):
        assert {cpu.index for cpu in topology.cpus} == os.sched_getaffinity(0)
