"""A hang names the collective, its group by dim, and the ranks.

``MESHRUN_REPEATS=20`` tries each case so often.
"""

from __future__ import annotations

import os

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
    ("how", "limit", "told"),
    [
        pytest.param("ops", "--hang-timeout", DIFFERENT),
        pytest.param("late", "--timeout", LATE),
        pytest.param("spin nccl", "--hang-timeout", DIFFERENT),
        pytest.param("spin", "--hang-timeout", DIFFERENT, marks=pytest.mark.nightly),
        pytest.param("late nccl", "--hang-timeout", LATE, marks=pytest.mark.nightly),
        pytest.param("late", "--hang-timeout", LATE, marks=pytest.mark.nightly),
        pytest.param("ops", "--timeout", DIFFERENT, marks=pytest.mark.nightly),
    ],
)
def test_a_hung_collective_is_named(how: str, limit: str, told: str) -> None:
    """meshrun's own limit, or that of the group, which raises on the ranks that wait.

    torch has a recorder for NCCL, and one for gloo and others; it takes either for the other here.
    """
    for _ in range(REPEATS):
        ours = run_meshrun(*MESH, limit, "2", PROGRAMS / "hung.py", *how.split())

        said = ours.stderr.partition(f"meshrun: {told}\n")
        assert said[1], ours.stderr
        assert "rank 2: in all_reduce #2 (float32[1024], 4 KB)" in said[2]
        if limit == "--hang-timeout":  # else a rank may be leaving as it is asked where it is
            assert "hung.py:" in said[2].partition("rank 2: ")[2].partition("\n")[0]
            assert "hung.py:" in said[2].partition("rank 3: ")[2].partition("\n")[0]
            assert ours.returncode == 124
            assert ours.stderr.rstrip().endswith(told)
        elif how == "late":
            assert f"({told})" in ours.stderr.rpartition("error: ")[2]


@pytest.mark.nightly
def test_shapes_that_gloo_aborts_for_are_named() -> None:
    """The rank that gets more than it asked for is killed; its peer's call is told."""
    for _ in range(REPEATS):
        ours = run_meshrun(*MESH, PROGRAMS / "hung.py", "shapes")

        assert ours.returncode == 134, ours.stderr
        told = ours.stderr.rpartition("error: ")[2]
        assert "rank 3 [dp1 tp1] was killed by SIGABRT (a peer sent " in told
        assert "rank 2 called all_reduce #2 (float32[1024], 4 KB) of the tp group {2-3})" in told
