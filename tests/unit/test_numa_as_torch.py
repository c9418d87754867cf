"""Each rank is bound to the CPUs that torch would bind it to, on invented machines."""

import os
from collections.abc import Iterator
from inspect import signature
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings

from meshrun.errors import UsageError
from meshrun.plan.choices import NUMA_BINDINGS, NumaBinding
from meshrun.plan.hardware import choose_cpus
from tests.machines import BIG, Machine, machines

MACHINES = {
    "one of everything": Machine(cores_per_cache=1, gpu_nodes=(0,)),
    "laptop": Machine(gpu_nodes=(-1,), threads=2),
    "big": BIG,
    "gpus on one node": Machine(sockets=2, caches_per_node=2, gpu_nodes=(1, 1, 1)),
    "gpus interleaved": Machine(sockets=2, cores_per_cache=7, threads=2, gpu_nodes=(1, 0, 1, 0, 1)),
    "first cache cut": Machine(
        caches_per_node=3, threads=2, gpu_nodes=(0, 0, 0, 0), hidden=frozenset({0, 1, 12})
    ),
    "node cut to siblings": Machine(
        nodes_per_socket=2, threads=2, gpu_nodes=(0, 1), hidden=frozenset(range(3))
    ),
}


def choices_of_torch(
    machine: Machine, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[NumaBinding, int, set[int] | None]]:
    """Yield the CPUs that torch binds each rank to; ``None`` if it refuses."""
    binding: Any = pytest.importorskip("torch.numa.binding")

    def moved(path: str) -> str:
        assert path.startswith("/sys/")
        return str(sysfs / path.removeprefix("/sys/"))

    gpus = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=int(address[5:7], 16), pci_device_id=0)
        for address in machine.pci_addresses
    ]
    fake_os = SimpleNamespace(
        path=os.path,
        listdir=lambda path: os.listdir(moved(path)),
        sched_getaffinity=lambda _: machine.allowed,
    )
    fake_cuda = SimpleNamespace(
        device_count=lambda: len(gpus), get_device_properties=gpus.__getitem__
    )
    accelerator = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(gpus),
        current_accelerator=lambda: SimpleNamespace(type="cuda"),
    )
    fake_torch = SimpleNamespace(
        cuda=fake_cuda, accelerator=accelerator, get_device_module=lambda _: fake_cuda
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            binding, "open", lambda path: StringIO(Path(moved(path)).read_text()), raising=False
        )
        patch.setattr(binding, "os", fake_os)
        index, _ = signature(binding._get_logical_cpus_to_bind_to).parameters  # 2.15 renamed it
        patch.setattr(binding, "torch", fake_torch)
        for mode in NUMA_BINDINGS:
            options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
            for gpu in range(len(gpus)):
                try:
                    chosen = binding._get_logical_cpus_to_bind_to(
                        **{index: gpu}, numa_options=options
                    )
                except (RuntimeError, ValueError, ZeroDivisionError):
                    chosen = None
                yield mode, gpu, chosen or None


def check_against_torch(machine: Machine, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    machine.write(sysfs)
    topology = machine.read(sysfs)
    compared = 0
    for mode, gpu, chosen in choices_of_torch(machine, sysfs, monkeypatch):
        gpus = len(machine.gpu_nodes)
        if chosen is not None:
            for nproc in {gpu + 1, gpus}:
                assert choose_cpus(mode, topology, local_rank=gpu, nproc=nproc) == tuple(
                    sorted(chosen)
                ), (mode, gpu, nproc)
            compared += 1
        elif mode != "socket":  # torch refuses if any node has no usable CPU
            with pytest.raises(UsageError):
                choose_cpus(mode, topology, local_rank=gpu, nproc=gpus)
    return compared


@pytest.mark.parametrize("name", MACHINES)
def test_ranks_are_bound_as_torch_binds_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with fewer ranks than accelerators."""
    machine = MACHINES[name]

    compared = check_against_torch(machine, tmp_path, monkeypatch)

    assert compared == len(machine.gpu_nodes) * len(NUMA_BINDINGS)


@settings(max_examples=settings.default.max_examples // 8, deadline=None)
@given(machine=machines())
def test_ranks_of_any_machine_are_bound_as_torch_binds_them(machine: Machine) -> None:
    """If torch refuses, so does meshrun."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        check_against_torch(machine, Path(folder), monkeypatch)
