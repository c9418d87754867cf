"""--stragglers names the rank that others wait for, and the dim, while a healthy one is silent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.kit import run_meshrun

pytestmark = pytest.mark.torch
REPEATS = int(os.environ.get("MESHRUN_REPEATS", "1"))
TRAIN = """
import os, random, sys, time
import torch, torch.distributed as dist
from meshrun import current_mesh
mesh, tensor = current_mesh(), torch.ones(64)
slow, seconds = int(sys.argv[1]), float(sys.argv[2])
flag = torch.zeros(1)
begun = time.monotonic()
while not flag.item():
    time.sleep(0.02 + random.random() * 0.01 + (0.03 if dist.get_rank() == slow else 0.0))
    dist.all_reduce(tensor, group=mesh.get_group("tp"))
    dist.all_reduce(tensor.clone(), group=mesh.get_group("dp"))
    tensor.fill_(1)
    flag[0] = os.path.exists(sys.argv[3]) or time.monotonic() - begun > seconds
    dist.all_reduce(flag)
"""


@pytest.mark.parametrize(
    ("slow", "seconds"), [(3, 6), pytest.param(-1, 60, marks=pytest.mark.nightly)]
)
def test_a_slow_rank_is_named(tmp_path: Path, slow: int, seconds: float) -> None:
    """By rank, dim and time; the event has the same."""
    for repeat in range(REPEATS):
        program, events = tmp_path / "train.py", tmp_path / f"events{repeat}"
        program.write_text(TRAIN)
        words = ("--mesh", "dp=2,tp=2", "--device", "cpu", "--stragglers")
        watched = ("--straggler-time", "1", "--events", events)
        ours = run_meshrun(*words, *watched, program, str(slow), str(seconds), tmp_path / "no")

        assert ours.returncode == 0, ours.stderr
        told = [json.loads(line) for line in events.read_text().splitlines()]
        late = {each["rank"] for each in told if each["event"] == "rank_late"}
        assert late == ({slow} if slow >= 0 else set()), ours.stderr
        name = "rank 3 [dp1 tp1] is late at collectives of the tp group {2-3}: the others wait "
        assert (name in ours.stderr) == (slow >= 0)
