"""No rank starts its program while another one is still building the mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("restarts", ordinary([0, 1], 1))
def test_programs_start_once_every_mesh_is_built(tmp_path: Path, restarts: int) -> None:
    """A program that ends at once would cut the others off; after a restart, too."""
    program = tmp_path / "begin.py"
    program.write_text(
        "import os, time\n"
        "os.write(1, f'begun {time.monotonic_ns()}\\n'.encode())\n"
        f"assert os.environ['TORCHELASTIC_RESTART_COUNT'] == '{restarts}'\n"
    )
    ours = run_meshrun(
        "--mesh", "dp=2,tp=2", "--device", "cpu", "--no-prefix", "--preload", "slow_build",
        "--max-restarts", str(restarts), program, env={"PYTHONPATH": str(PROGRAMS)},
    )  # fmt: skip

    assert ours.returncode == 0, ours.stderr
    times: dict[str, list[int]] = {"built": [], "begun": []}
    for line in ours.stdout.splitlines():
        what, at_ns = line.split()
        times[what].append(int(at_ns))
    assert len(times["built"]) == 4 * (restarts + 1)
    assert len(times["begun"]) >= 4  # ranks of the first generation may be stopped before
    assert max(sorted(times["built"])[-4:]) <= min(sorted(times["begun"])[-4:])
