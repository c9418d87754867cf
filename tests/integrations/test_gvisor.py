"""In gVisor, a kernel in user space that some clouds run GPU jobs in; where ``runsc`` is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, ROOT, run_meshrun

_RUNSC = shutil.which("runsc")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.torch,
    pytest.mark.nightly,
    pytest.mark.skipif(_RUNSC is None, reason="needs gVisor's runsc, which Debian packages"),
]
MESH = ("--mesh", "dp=2,tp=2", "--device", "cpu")


def inside(folder: Path) -> list[str]:
    """Return words that run a command in gVisor, below an init that is not the command."""
    script = folder / "init"
    script.write_text('"$@"; exit $?\n')
    alone = ("env", "TMPDIR=/tmp", str(_RUNSC), "--network=none", "--ignore-cgroups")
    place = ("env", f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1", "sh", str(script))
    return [*alone, "do", *place]


def test_gloo_connects_whatever_the_order_of_addresses(tmp_path: Path) -> None:
    """gVisor's is another each time, and gloo would take the first of an interface."""
    for _ in range(3):
        ours = run_meshrun(*MESH, PROGRAMS / "ask_mesh.py", around=inside(tmp_path))

        assert ours.returncode == 0, ours.stderr


def test_a_hang_is_told_with_stacks(tmp_path: Path) -> None:
    """Whose kernel does not say what becomes of a signal."""
    words = (*MESH, "--hang-timeout", "4", PROGRAMS / "hung.py", "ops")
    ours = run_meshrun(*words, around=inside(tmp_path))

    assert "#2 is all_reduce on rank 2, all_gather on rank 3" in ours.stderr
    assert "hung.py:" in ours.stderr
    assert ours.returncode == 124


def test_a_failure_is_told(tmp_path: Path) -> None:
    """With the exit code of the rank."""
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit(7)\n")
    ours = run_meshrun(*MESH, program, around=inside(tmp_path))

    assert ours.returncode == 7
    assert "exited with code 7" in ours.stderr
