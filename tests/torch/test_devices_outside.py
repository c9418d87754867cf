"""Simulated devices of a package outside torch, which torch loads automatically."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import end_all, launch_on
from tests.kit import FAKES, run_meshrun

pytestmark = pytest.mark.torch
_PROGRAM = """
import os, torch, torch.distributed as dist
from meshrun import current_mesh
mesh = current_mesh()
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
current = getattr(torch.sim, "current_device", torch.accelerator.current_device_index)
print(mesh.device_type, current(), dist.get_backend_config(), total.item(),
    torch.sim._is_in_bad_fork())
"""
_WITH_TENSORS = """
import torch, torch.distributed as dist
from meshrun import current_mesh
mesh = current_mesh()
here = torch.full((4,), dist.get_rank(), device="sim", dtype=torch.float32)
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total, group=mesh.get_group(1))
print(here.device, here.sum().item(), total.item())
"""


def compile_devices(folder: Path) -> Path:
    """Compile ``sim.cpp`` against torch, which takes seconds; skip without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler to build a back end with memory and kernels")
    library, torch_folder = folder / "libsim.so", Path(str(find_spec("torch").origin)).parent
    includes = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include")
    subprocess.run(
        [
            *(compiler, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-o", library),
            *(f"-I{include}" for include in includes),
            *(FAKES / "back_end" / "sim.cpp", f"-L{torch_folder / 'lib'}"),
            *("-lc10", "-ltorch_cpu", "-ltorch"),
        ],
        check=True,
        timeout=100,
    )
    return library


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that prints its device, on a machine with two devices of the type `sim`."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES / "back_end"))
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    return path


@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_each_rank_has_a_device(
    method: str, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set before the program starts; the group has gloo and the package's backend."""
    monkeypatch.setenv("SIM_DEVICES", "4")
    words = ("--device", "sim", "--mesh", "2x2", "--start-method", method, "--no-prefix")
    ours = run_meshrun(*words, program)

    assert (ours.returncode, ours.stderr) == (0, "")
    backends = "cpu:gloo,sim:simccl"
    assert sorted(ours.stdout.splitlines()) == [
        f"sim {rank} {backends} {1 if rank < 2 else 5} False" for rank in range(4)
    ]


@pytest.mark.nightly
def test_devices_with_memory_and_kernels(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.accelerator selects them, and tensors are created there by default."""
    monkeypatch.setenv("SIM_LIBRARY", str(compile_devices(tmp_path)))
    program.write_text(_WITH_TENSORS)
    monkeypatch.setenv("SIM_DEVICES", "4")
    ours = run_meshrun("--mesh", "2x2", "--no-prefix", program)

    assert (ours.returncode, ours.stderr) == (0, "")
    assert sorted(ours.stdout.splitlines()) == [
        f"sim:{rank} {4.0 * rank} {1 if rank < 2 else 5}" for rank in range(4)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["sim", "auto"])
def test_two_nodes_with_two_devices_each(device: str, make_hosts: MakeHosts, program: Path) -> None:
    """Ranks count their devices from 0 on each node."""
    hosts = make_hosts(2)
    words = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--device", device, "--mesh", "2x2")
    launches = launch_on(hosts, *words, "--no-prefix", program)

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    for launch, total in zip(launches, (1, 5), strict=True):
        lines = sorted(line for line in launch.text.splitlines() if line.startswith("sim "))
        assert lines == [f"sim {index} cpu:gloo,sim:simccl {total} False" for index in range(2)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("--device", "sim", "--mesh", "2x2"),
            "4 workers need 4 sim devices, but this machine has 2",
        ),
        pytest.param(
            ("--device", "foo", "--mesh", "2x2"),
            "--device foo: torch has no such device type",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--nproc-per-node", "foo"),
            "--nproc-per-node foo: this machine has no device of type `foo`",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--device", "sim", "--nproc-per-node", "auto", "--mesh", "3"),
            "mesh `3` needs 3 workers, but 1 node x 2 workers gives 2",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_devices_that_do_not_exist(words: tuple[str, ...], error: str, program: Path) -> None:
    """torch is asked before any rank starts."""
    ours = run_meshrun(*words, program)

    assert (ours.returncode, ours.stdout) == (2, "")
    assert f"error: {error}" in ours.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "dp=-1"),
        ("--mesh", "dp=-1", "--device", "sim"),
        ("--mesh", "dp=2"),
        ("--mesh", "dp=2", "--nproc-per-node", "sim"),
        ("--mesh", "dp=-1", "--nproc-per-node", "auto"),
        ("--mesh", "dp=2", "--preload", "beside"),
    ],
)
def test_torch_counts_devices_if_the_plan_depends_on_it(
    words: tuple[str, ...], program: Path
) -> None:
    """A dry run shows the same plan; a module to preload may be beside the program."""
    program.with_name("beside.py").write_text("")
    ours = run_meshrun(*words, "--dry-run", program)

    assert ours.returncode == 0, ours.stderr
    assert "sim:0" in ours.stdout
    assert "sim:1" in ours.stdout
    assert "sim:2" not in ours.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("loaded_by", ["torch", "preload"])
def test_an_import_that_uses_the_device_is_named(
    loaded_by: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices are counted in another process; each rank imports the package by itself."""
    text = "import torch\nassert torch.sim.is_available()\n"
    if loaded_by == "preload":
        text = f"import torch_sim\ntorch_sim.autoload()\n{text}"
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    (tmp_path / "uses.py").write_text(text)
    words = ("--device", "sim", "--mesh", "dp=2", "--preload", "uses", "--backend", "gloo")
    ours = run_meshrun(*words, "--no-prefix", program)

    assert ours.returncode == 0, ours.stderr
    assert "importing `uses` used sim, which torch then refuses in forks" in ours.stderr
    assert ours.stdout.count(" False\n") == 2


@pytest.mark.nightly
def test_a_device_type_without_a_backend_for_groups(program: Path, tmp_path: Path) -> None:
    """No rank starts its program, and the error blames the package."""
    (tmp_path / "forgets.py").write_text(
        "import torch.distributed as dist\ndel dist.Backend.default_device_backend_map['sim']\n"
    )
    words = ("--device", "sim", "--mesh", "dp=1", "--preload", "forgets")
    ours = run_meshrun(*words, program)

    assert (ours.returncode, ours.stdout) == (1, "")
    assert "torch has no backend for groups of sim devices" in ours.stderr
