"""On ``openreg``, torch's example of a back end outside torch, which simulates two devices.

Its groups' back end, ``occl``, moves no data, so sums are made with gloo.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit import NEW_INTERPRETERS, ROOT

_HERE = sys.executable if find_spec("torch_openreg") else None
_PYTHON = os.environ.get("MESHRUN_OPENREG_PYTHON", _HERE)
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.torch,
    pytest.mark.nightly,
    pytest.mark.skipif(
        _PYTHON is None, reason="MESHRUN_OPENREG_PYTHON names no interpreter with torch_openreg"
    ),
]
_PROGRAM = """
import torch
first = torch.accelerator.current_device_index()
import torch.distributed as dist
from meshrun import current_mesh
mesh = current_mesh()
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total, group=mesh.get_group("tp"))
here = torch.full((2,), dist.get_rank(), device="openreg", dtype=torch.float32)
dist.all_reduce(here)
torch.accelerator.synchronize()
backends = dist.get_backend_config(mesh.get_group("tp"))
print(mesh.device_type, first, here.device, backends, total.item(), torch.openreg._is_in_bad_fork())
"""
_FALLS_BACK = f"meshrun: {NEW_INTERPRETERS}: importing `uses` used openreg"
_NODES = (("--node-rank", "0"), ("--node-rank", "1"))
_TWO = ("--device", "openreg", "--mesh", "dp=1,tp=2")


def launch(
    program: Path, *words: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Launch a program with the other interpreter, and return the result."""
    return run("-m", "meshrun", "--no-prefix", *words, program, folder=program.parent, env=env)


def run(
    *words: str | Path, folder: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the other interpreter in a folder, with this meshrun."""
    assert _PYTHON is not None
    return subprocess.run(
        [_PYTHON, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that prints its device, the back ends of a group, and a sum over ``tp``."""
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    return path


def lines(backends: str = "cpu:gloo,openreg:occl", totals: tuple[int, int] = (1, 1)) -> list[str]:
    """Return what two ranks print, each with a device of its own, which forks can use."""
    return [
        f"openreg {index} openreg:{index} {backends} {total} False"
        for index, total in enumerate(totals)
    ]


@pytest.mark.parametrize(
    "words",
    [
        _TWO,
        (*_TWO, "--start-method", "exec"),
        ("--mesh", "dp=1,tp=2"),
        ("--mesh", "dp=1,tp=-1"),
        ("--nproc-per-node", "openreg", "--mesh", "dp=1,tp=-1"),
        ("--device", "openreg", "--nproc-per-node", "auto", "--mesh", "dp=1,tp=-1"),
    ],
    ids=" ".join,
)
def test_each_rank_has_a_device(words: tuple[str, ...], program: Path) -> None:
    """It is set before the program's first line, and torch has loaded the package by itself."""
    ours = launch(program, *words)

    assert (ours.returncode, ours.stderr) == (0, "")
    assert sorted(ours.stdout.splitlines()) == lines()


def test_a_mesh_of_two_nodes(program: Path) -> None:
    """2x2: each node counts its devices from 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    words = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--device", "openreg")
    mesh = ("--mesh", "dp=2,tp=2")
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda node: launch(program, *words, *mesh, *node), _NODES)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert sorted(first.stdout.splitlines()) == lines()
    assert sorted(second.stdout.splitlines()) == lines(totals=(5, 5))


@pytest.mark.parametrize(
    ("words", "env", "error"),
    [
        (
            ("--device", "openreg", "--mesh", "2x2"),
            {},
            "4 workers need 4 openreg devices, but this machine has 2",
        ),
        (
            ("--nproc-per-node", "openreg", "--mesh", "3"),
            {},
            "mesh `3` needs 3 workers, but 1 node x 2 workers gives 2",
        ),
        (
            (*_TWO, "--virtual-local-rank"),
            {},
            "--virtual-local-rank: no known variable limits a rank to one openreg device",
        ),
        (
            _TWO,
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "--device openreg: torch has no such device type",
        ),
        ((*_TWO, "--backend", "bccl"), {}, "has no backend `bccl`; it has gloo, "),
    ],
)
def test_an_error_before_any_rank_starts(
    words: tuple[str, ...], env: dict[str, str], error: str, program: Path
) -> None:
    """torch is asked where the launcher does not know."""
    ours = launch(program, *words, env=env)

    assert (ours.returncode, ours.stdout) == (2, "")
    assert error in ours.stderr.partition("\n")[0]


def test_too_few_devices_for_auto(program: Path) -> None:
    """The mesh is on the CPU, and a line says why."""
    program.write_text("from meshrun import current_mesh\nprint(current_mesh().device_type)\n")
    ours = launch(program, "--mesh", "2x2")

    assert (ours.returncode, ours.stdout) == (0, "cpu\n" * 4)
    assert "the mesh is on the CPU: 2 openreg found for 4 workers, not enough" in ours.stderr


def test_a_dry_run_counts_devices(program: Path) -> None:
    """The plan names them."""
    ours = launch(program, "--mesh", "tp=-1", "--dry-run")

    assert ours.returncode == 0, ours.stderr
    assert "device: openreg (2 found)" in ours.stdout


@pytest.mark.parametrize("backend", ["occl", "cpu:gloo,openreg:occl"])
def test_the_back_end_of_the_package(backend: str, program: Path) -> None:
    """It is known once torch has loaded the package."""
    program.write_text(_PROGRAM.replace("[dist.get_rank()]", "[1], device='openreg'"))
    ours = launch(program, *_TWO, "--backend", f"tp={backend}")

    assert (ours.returncode, ours.stderr) == (0, "")
    expected = "openreg:occl" if backend == "occl" else backend
    assert sorted(ours.stdout.splitlines()) == lines(expected)


@pytest.mark.parametrize("words", [_TWO, ("--mesh", "dp=1,tp=2")], ids=["named", "auto"])
def test_the_package_is_preloaded(words: tuple[str, ...], program: Path) -> None:
    """As torch has been told not to load it by itself."""
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ours = launch(program, *words, "--preload", "torch_openreg", env=off)

    assert (ours.returncode, ours.stderr) == (0, "")
    assert sorted(ours.stdout.splitlines()) == lines()


@pytest.mark.parametrize(
    "use",
    [
        "torch.openreg.device_count()",
        "torch.zeros(1, device='openreg')",
        "torch.accelerator.synchronize()",
    ],
)
def test_an_import_that_uses_the_device_is_named(use: str, program: Path) -> None:
    """Ranks are new interpreters, as torch refuses the device in forks of one that has used it."""
    program.with_name("uses.py").write_text(f"import torch\n{use}\n")
    ours = launch(program, "--mesh", "dp=1,tp=2", "--preload", "uses")

    assert ours.returncode == 0, ours.stderr
    assert ours.stderr.startswith(_FALLS_BACK)
    assert sorted(ours.stdout.splitlines()) == lines()


def test_a_restart_after_a_failure(program: Path) -> None:
    """The error of the device is the cause; the ranks of the next generation can use theirs."""
    fails = "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' == os.environ['RANK']:\n"
    program.write_text(f"{_PROGRAM}{fails}    torch.openreg.set_device(5)\n")
    ours = launch(program, *_TWO, "--max-restarts", "1")

    assert ours.returncode == 0, ours.stderr
    assert (
        "restart 1 of 1, because rank 0 [dp0 tp0] raised RuntimeError: The device index is out of"
        " range. It must be in [0, 2), but got 5" in ours.stderr
    )
    assert sorted({*ours.stdout.splitlines()}) == lines()


def test_a_launch_by_a_program_that_uses_the_device(tmp_path: Path) -> None:
    """Functions run on the devices, too."""
    (caller := tmp_path / "caller.py").write_text(
        "import meshrun, torch\n"
        "def double(number):\n"
        "    return float((torch.full((1,), number, device='openreg') * 2).sum()), str(\n"
        "        torch.empty(0, device=meshrun.current_mesh().device_type).device)\n"
        "if __name__ == '__main__':\n"
        "    torch.accelerator.synchronize()\n"
        "    print(meshrun.launch(double, args=(3.0,), mesh='tp=2', device='openreg'))\n"
    )
    ours = run(caller, folder=tmp_path)

    assert ours.stdout == "[(6.0, 'openreg:0'), (6.0, 'openreg:1')]\n", ours.stderr


def test_a_back_end_that_moves_no_data_is_not_measured(tmp_path: Path) -> None:
    """The check says that the sum is wrong."""
    ours = run("-m", "meshrun", "--check", *_TWO, "quick", folder=tmp_path)

    assert (ours.returncode, ours.stdout) == (1, "")
    assert "all_reduce over all ranks adds 2 ones up to 1: the backend of its group" in ours.stderr


@pytest.mark.parametrize("launcher", ["torch.distributed.run", "meshrun"])
def test_a_program_that_chooses_its_device(launcher: str, program: Path) -> None:
    """It prints the same under torchrun."""
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK']))\n"
        "dist.init_process_group()\n"
        "mesh = dist.init_device_mesh('openreg', (2, 1), mesh_dim_names=('dp', 'tp'))\n"
        "here = torch.ones(2, device='openreg')\n"
        "dist.all_reduce(here, group=mesh.get_group('dp'))\n"
        "with open(os.environ['RANK'], 'w') as file:\n"
        "    print(here.device, dist.get_backend_config(), mesh.get_coordinate(), file=file)\n"
        "dist.destroy_process_group()\n"
    )
    ours = run("-m", launcher, "--nproc-per-node", "auto", program, folder=program.parent)

    assert ours.returncode == 0, ours.stderr
    printed = [program.with_name(str(rank)).read_text() for rank in range(2)]
    assert printed == [f"openreg:{rank} openreg:occl ({rank}, 0)\n" for rank in range(2)]
