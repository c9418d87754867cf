"""--stragglers names the rank that others wait for and the dim; healthy runs print nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun

pytestmark = pytest.mark.torch
PROGRAM = PROGRAMS / "straggling.py"
REPEATS = int(os.environ.get("MESHRUN_REPEATS", "1"))


@pytest.mark.parametrize(
    ("how", "slow", "seconds"),
    [
        ("sleeps", 3, 6),
        pytest.param("suspended", 3, 6, marks=pytest.mark.nightly),
        pytest.param("quota", 3, 8, marks=pytest.mark.nightly),
        pytest.param("sleeps", -1, 60, marks=pytest.mark.nightly),
    ],
)
def test_a_slow_rank_is_named(tmp_path: Path, how: str, slow: int, seconds: float) -> None:
    """By rank, dim and time; the event names it too."""
    if how == "quota" and not os.access("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", os.W_OK):
        pytest.skip("needs a writable cgroup (version 1) with a quota")
    for repeat in range(REPEATS):
        events = tmp_path / f"events{repeat}"
        words = ("--mesh", "dp=2,tp=2", "--device", "cpu", "--stragglers")
        watched = ("--straggler-time", "1", "--events", events)
        args = (str(slow), str(seconds), tmp_path / "no", how)
        ours = run_meshrun(*words, *watched, PROGRAM, *args)

        if how == "quota":
            os.rmdir("/sys/fs/cgroup/cpu/meshrun-test")
        assert ours.returncode == 0, ours.stderr
        written = [json.loads(line) for line in events.read_text().splitlines()]
        late = {each["rank"] for each in written if each["event"] == "rank_late"}
        assert late == ({slow} if slow >= 0 else set()), ours.stderr
        name = "rank 3 [dp1 tp1] reaches collectives of the tp group {2-3} late: the others wait "
        assert (name in ours.stderr) == (slow >= 0)
