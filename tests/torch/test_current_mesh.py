"""The current mesh: with blocks, threads, torch's own calls, and other ways to get one."""

import os
import subprocess
import sys

import pytest

from tests.kit import PROGRAMS, run_meshrun

pytestmark = pytest.mark.torch
MESH = ("--mesh", "dp=2,tp=2", "--device", "cpu", "--no-prefix")


def timeouts(*options: str, env: dict[str, str] | None = None) -> tuple[dict[str, int], str]:
    ours = run_meshrun(*MESH, *options, "--show", "rank=0", PROGRAMS / "timeouts.py", env=env)
    assert ours.returncode == 0, ours.stderr
    lines = (line.split() for line in ours.stdout.splitlines())
    return {name: int(seconds) for name, seconds in lines}, ours.stderr


def python(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_with_block_has_its_own_current_mesh() -> None:
    """In one thread and for torch's calls too; afterwards, the launch's is current again."""
    ours = run_meshrun(*MESH, PROGRAMS / "ambient.py")

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.splitlines().count("well") == 4
    assert "the mesh has no dim `tp`; hint: use `all`" in ours.stdout
    assert "init_mesh() was called with `dp=4`, but mesh `dp=2,tp=2` already exists" in ours.stdout


@pytest.mark.nightly
def test_one_timeout_reaches_every_group() -> None:
    """torch's own dims would not inherit the world's timeout."""
    assert timeouts("--timeout", "77s")[0] == {"world": 77, "dp": 77, "tp": 77}


def test_a_dim_has_its_own_timeout_and_a_late_setting_is_warned_of() -> None:
    """From a variable too; the warning comes once, from rank 0, and not with a lazy mesh."""
    late = {"SET_LATE": "1"}
    eager, warned = timeouts("--timeout", "5m", "--timeout", "tp=9", env=late)
    lazy, silent = timeouts("--mesh-init", "lazy", env={**late, "MESHRUN_TIMEOUT": "5m;tp=9"})

    assert eager == lazy == {"world": 300, "dp": 300, "tp": 9}
    assert warned.count("NCCL_DEBUG was changed after the process group") == 1
    assert silent == ""


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--timeout", "pp=3s"), "--timeout: the mesh has no dim `pp`"),
        (("--timeout", "soon"), "--timeout expects a time, found `soon`"),
        (("--backend", "pp=gloo"), "--backend: the mesh has no dim `pp`"),
        (("--pg-opt", "tp"), "--pg-opt cannot read `tp`"),
        (("--mesh-init", "never"), "--mesh-init must be eager or lazy, found `never`"),
    ],
)
def test_bad_group_options_start_nothing(
    option: tuple[str, ...], message: str, fake_torch: object
) -> None:
    """The error names the mesh's dims or the expected form."""
    ours = run_meshrun(*MESH, *option, PROGRAMS / "echo.py")

    assert (ours.returncode, ours.stdout) == (2, "")
    assert message in ours.stderr


def test_a_lazy_mesh_leaves_the_group_to_the_program() -> None:
    """The program calls init_process_group() first, and current_mesh() builds on that group."""
    ours = run_meshrun(*MESH, "--mesh-init", "lazy", PROGRAMS / "own_init.py")

    assert ours.returncode == 0, ours.stderr


@pytest.mark.nightly
def test_a_fallback_is_a_mesh_without_any_launcher() -> None:
    """A notebook has a world of one rank."""
    alone = python("import meshrun; print(meshrun.current_mesh(fallback='dp=-1,tp=1').shape)")

    assert (alone.returncode, alone.stdout) == (0, "(1, 1)\n"), alone.stderr


def test_init_mesh_needs_no_launcher() -> None:
    """It makes its mesh the current one."""
    alone = python(
        "import meshrun\n"
        "mesh = meshrun.init_mesh('1x-1', 'dp,tp')\n"
        "assert meshrun.init_mesh('dp=1,tp=1') is mesh is meshrun.current_mesh()\n"
        "print(meshrun.current_mesh('tp').size())"
    )

    # gloo in torch 2.10 prints a line of its own
    assert (alone.returncode, alone.stdout.splitlines()[-1:]) == (0, ["1"]), alone.stderr


@pytest.mark.nightly
def test_init_mesh_under_torchrun() -> None:
    """The same program runs under either launcher."""
    program = (
        "import meshrun, os\n"
        "mesh = meshrun.init_mesh('dp=-1', device='cpu', timeout=['33s'])\n"
        "line = f'{mesh.shape} {meshrun.current_layout().world_size}\\n'\n"
        "os.write(1, line.encode())\n"  # one write: torchrun mixes halves of lines
    )
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--no-python", sys.executable, "-c", program],
        capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip

    assert theirs.stdout.splitlines() == ["(2,) 2"] * 2, theirs.stderr
