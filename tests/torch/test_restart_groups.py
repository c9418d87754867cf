"""Restarts of programs that use process groups, where torchrun's restarts fail."""

from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch
MESH = ("--mesh", "dp=3", "--device", "cpu")


@pytest.mark.parametrize(
    ("how", "mesh"),
    ordinary(
        [(how, mesh) for how in ("before", "in", "after") for mesh in ((), MESH)],
        ("in", MESH),
    ),
)  # fmt: skip
def test_a_restart_gets_a_whole_group(how: str, mesh: tuple[str, ...], tmp_path: Path) -> None:
    """Ranks that hang in a broken collective are killed, and the next generation connects."""
    ours = run_meshrun(
        "--nproc-per-node", "3", *mesh, "--max-restarts", "1", "--no-prefix",
        PROGRAMS / "own_group.py", tmp_path, how,
    )  # fmt: skip

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.splitlines() == ["total 3 step 3"] * 3
    assert "restart 1 of 1, because rank 1 " in ours.stderr
    assert "was killed by SIGKILL" in ours.stderr
