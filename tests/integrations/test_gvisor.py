"""In gVisor, a user-space kernel in which some clouds run GPU jobs; needs ``runsc``."""

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
    """Return a prefix that runs a command in gVisor, below a separate init process."""
    script = folder / "init"
    script.write_text('"$@"; exit $?\n')
    alone = ("env", "TMPDIR=/tmp", str(_RUNSC), "--network=none", "--ignore-cgroups")
    place = ("env", f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1", "sh", str(script))
    return [*alone, "do", *place]


def test_gloo_connects_whatever_the_order_of_addresses(tmp_path: Path) -> None:
    """In gVisor the order varies, and gloo would take an interface's first address."""
    for _ in range(3):
        ours = run_meshrun(*MESH, PROGRAMS / "ask_mesh.py", around=inside(tmp_path))

        assert ours.returncode == 0, ours.stderr


def test_a_hang_is_reported_with_stacks(tmp_path: Path) -> None:
    """gVisor does not show how a process handles a signal."""
    words = (*MESH, "--hang-timeout", "4", PROGRAMS / "hung.py", "ops")
    ours = run_meshrun(*words, around=inside(tmp_path))

    assert "#2 is all_reduce on rank 2, all_gather on rank 3" in ours.stderr
    assert "hung.py:" in ours.stderr
    assert ours.returncode == 124


def test_a_failure_is_reported(tmp_path: Path) -> None:
    """With the rank's exit code."""
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit(7)\n")
    ours = run_meshrun(*MESH, program, around=inside(tmp_path))

    assert ours.returncode == 7
    assert "exited with code 7" in ours.stderr


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """Not even one in a session of its own, which no process adopts in gVisor."""
    program, init = tmp_path / "leaves.py", tmp_path / "then"
    program.write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )
    init.write_text('"$@"\necho exit $?\ncat /proc/[0-9]*/cmdline | tr "\\0" " "\n')
    ours = run_meshrun(*MESH, program, around=[*inside(tmp_path), "sh", str(init)])

    assert "exit 0\n" in ours.stdout
    assert "sleep 600" not in ours.stdout
