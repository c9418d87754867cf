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
import os, random, signal, sys, time
import torch, torch.distributed as dist
from meshrun import current_mesh
mesh, tensor = current_mesh(), torch.ones(64)
slow, seconds, how = int(sys.argv[1]), float(sys.argv[2]), sys.argv[4]
is_slow = dist.get_rank() == slow
if is_slow and how == "suspended" and os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        os.kill(parent, signal.SIGSTOP)
        time.sleep(0.03)
        os.kill(parent, signal.SIGCONT)
        time.sleep(0.03)
    os._exit(0)
if is_slow and how == "quota":  # 5 ms of 100
    os.makedirs(group := "/sys/fs/cgroup/cpu/meshrun-test", exist_ok=True)
    for name, value in (("cfs_period_us", 100_000), ("cfs_quota_us", 5_000)):
        open(f"{group}/cpu.{name}", "w").write(str(value))
    open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
flag = torch.zeros(1)
begun = time.monotonic()
while not flag.item():
    time.sleep(0.02 + random.random() * 0.01 + (0.03 if is_slow and how == "sleeps" else 0.0))
    until = time.process_time() + 0.003
    while time.process_time() < until:
        pass
    dist.all_reduce(tensor, group=mesh.get_group("tp"))
    dist.all_reduce(tensor.clone(), group=mesh.get_group("dp"))
    tensor.fill_(1)
    flag[0] = os.path.exists(sys.argv[3]) or time.monotonic() - begun > seconds
    dist.all_reduce(flag)
"""


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
    """By rank, dim and time; the event has the same."""
    if how == "quota" and not os.access("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", os.W_OK):
        pytest.skip("needs a writable cgroup (version 1) with a quota")
    for repeat in range(REPEATS):
        program, events = tmp_path / "train.py", tmp_path / f"events{repeat}"
        program.write_text(TRAIN)
        words = ("--mesh", "dp=2,tp=2", "--device", "cpu", "--stragglers")
        watched = ("--straggler-time", "1", "--events", events)
        args = (str(slow), str(seconds), tmp_path / "no", how)
        ours = run_meshrun(*words, *watched, program, *args)

        if how == "quota":
            os.rmdir("/sys/fs/cgroup/cpu/meshrun-test")
        assert ours.returncode == 0, ours.stderr
        told = [json.loads(line) for line in events.read_text().splitlines()]
        late = {each["rank"] for each in told if each["event"] == "rank_late"}
        assert late == ({slow} if slow >= 0 else set()), ours.stderr
        name = "rank 3 [dp1 tp1] is late at collectives of the tp group {2-3}: the others wait "
        assert (name in ours.stderr) == (slow >= 0)
