"""The report of a hang names the collective, its group by dim, and the ranks.

``MESHRUN_REPEATS=20`` repeats each case 20 times.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun

pytestmark = pytest.mark.torch
REPEATS = int(os.environ.get("MESHRUN_REPEATS", "1"))
MESH = ("--mesh", "dp=2,tp=2", "--device", "cpu")
DIFFERENT = (
    "in the tp group {2-3}, the ranks call different collectives: "
    "#2 is all_reduce on rank 2, all_gather on rank 3"
)
LATE = "in the tp group {2-3}, rank 2 waits in all_reduce #2, which rank 3 has not called"


@pytest.mark.parametrize(
    ("how", "limit", "expected"),
    [
        pytest.param("ops", "--hang-timeout", DIFFERENT, marks=pytest.mark.nightly),
        pytest.param("late", "--timeout", LATE),
        pytest.param("spin nccl", "--hang-timeout", DIFFERENT),
        pytest.param("spin", "--hang-timeout", DIFFERENT, marks=pytest.mark.nightly),
        pytest.param("late nccl", "--hang-timeout", LATE, marks=pytest.mark.nightly),
        pytest.param("late", "--hang-timeout", LATE, marks=pytest.mark.nightly),
        pytest.param("ops", "--timeout", DIFFERENT, marks=pytest.mark.nightly),
    ],
)
def test_a_hung_collective_is_named(how: str, limit: str, expected: str) -> None:
    """At meshrun's limit, or at the group's timeout, which raises on the ranks that wait.

    torch has one flight recorder for NCCL and one for other backends; in the cases with `nccl`,
    gloo's stands in for NCCL's.
    """
    for _ in range(REPEATS):
        ours = run_meshrun(*MESH, limit, "2", PROGRAMS / "hung.py", *how.split())

        found = ours.stderr.partition(f"meshrun: {expected}\n")
        assert found[1], ours.stderr
        assert "rank 2: in all_reduce #2 (float32[1024], 4 KB)" in found[2]
        if limit == "--hang-timeout":  # else a rank may already be exiting when it is asked
            assert "hung.py:" in found[2].partition("rank 2: ")[2].partition("\n")[0]
            assert "hung.py:" in found[2].partition("rank 3: ")[2].partition("\n")[0]
            assert ours.returncode == 124
            assert ours.stderr.rstrip().endswith(expected)
        elif how == "late":
            assert f"({expected})" in ours.stderr.rpartition("error: ")[2]


@pytest.mark.nightly
def test_a_timeout_while_ranks_end_does_not_explain_another_error() -> None:
    """As of a rank that handles SIGTERM to save a checkpoint."""
    ours = run_meshrun(*MESH, "--timeout", "2", PROGRAMS / "hung.py", "afterwards")

    assert "rank 2 raised RuntimeError: " in ours.stderr, ours.stderr
    error = ours.stderr.rpartition("error: ")[2]
    assert error.startswith("rank 0 [dp0 tp0] raised ValueError: the loss is nan, exit code 1\n"), (
        error
    )


@pytest.mark.nightly
def test_shapes_that_gloo_aborts_for_are_named() -> None:
    """The rank that receives more than it expects is killed; the error names its peer's call."""
    for _ in range(REPEATS):
        ours = run_meshrun(*MESH, PROGRAMS / "hung.py", "shapes")

        assert ours.returncode == 134, ours.stderr
        error = ours.stderr.rpartition("error: ")[2]
        assert "rank 3 [dp1 tp1] was killed by SIGABRT (a peer sent " in error
        assert "rank 2 called all_reduce #2 (float32[1024], 4 KB) of the tp group {2-3})" in error


@pytest.mark.nightly
@pytest.mark.parametrize(
    "call", ["all_reduce(torch.ones(9))", "monitored_barrier(timeout=timedelta(seconds=2))"]
)
def test_peers_that_lose_their_connections_to_a_late_rank_are_not_blamed(
    call: str, tmp_path: Path
) -> None:
    """gloo closes a rank's connections before the rank raises that it timed out."""
    (program := tmp_path / "late.py").write_text(
        "import time, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "dist.barrier()\n"
        "rank = dist.get_rank()\n"
        "time.sleep(60 if rank == 1 else rank * 0.05)\n"
        f"dist.{call}\n"
    )
    for _ in range(REPEATS):
        words = ("--mesh", "dp=8", "--device", "cpu", "--timeout", "2", program)
        ours = run_meshrun(*words, cwd=tmp_path)

        error = ours.stderr.rpartition("error: ")[2]
        assert error.startswith("rank 0 [dp0] raised RuntimeError: "), ours.stderr
        assert "has not completed" not in ours.stderr
        assert "ank 1 failed to pass" in error or "which rank 1 has not called" in error, error
        assert "dp1: late.py:5 in <module>\n" in ours.stderr
