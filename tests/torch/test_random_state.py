"""torch's random numbers: different on each rank, unless the program sets a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import run_meshrun

pytestmark = pytest.mark.torch
_PROGRAM = """
import os, sys, torch
own, count = torch.initial_seed(), os.environ["TORCHELASTIC_RESTART_COUNT"]
number = torch.rand(1, dtype=torch.float64).item()
torch.manual_seed(7)
print(own, number, torch.rand(1).item())
sys.exit(count == "0")
"""


@pytest.mark.parametrize(
    "words", [pytest.param((), marks=pytest.mark.nightly), ("--mesh", "dp=3", "--device", "cpu")]
)
def test_each_rank_of_each_generation_draws_other_numbers(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """As under torchrun, where each rank has its own interpreter."""
    program = tmp_path / "draws.py"
    program.write_text(_PROGRAM)
    gate = ("--nproc-per-node", "3", "--max-restarts", "1", "--log-dir", tmp_path / "logs")
    ours = run_meshrun(*words, *gate, "-r", "1", program)
    drawn = [path.read_text().split() for path in tmp_path.glob("logs/*/*/*/stdout.log")]
    found = [line for line in drawn if line]  # a rank may be stopped before it has drawn

    assert ours.returncode == 0, ours.stderr
    assert len(found) >= 4
    assert len({seed for seed, _, _ in found}) == len(found)
    assert len({number for _, number, _ in found}) == len(found)
    assert len({seeded for _, _, seeded in found}) == 1
