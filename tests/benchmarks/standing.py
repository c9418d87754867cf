"""Ranks that keep running: the time of a call, and of a test compared with torch's test classes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshrun.api.worker_group import WorkerGroup
from tests.benchmarks.table import Samples, render_samples

RANKS = 4
MANY, FEW = 200, 4
CALLS = 200

OURS = f"""
import pytest, torch, torch.distributed as dist

@pytest.mark.mesh("dp=2,tp=2", device="cpu")
@pytest.mark.parametrize("n", range(COUNT))
def test_sum(n):
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == {RANKS}
"""
CONTINUOUS = f"""
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class TestSum(MultiProcContinuousTest):
    world_size = {RANKS}

    @classmethod
    def backend_str(cls):
        return "gloo"

def make(n):
    def test(self):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == {RANKS}
    return test

for n in range(COUNT):
    setattr(TestSum, f"test_{{n}}", make(n))
"""
EACH = f"""
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestSum(MultiProcessTestCase):
    world_size = {RANKS}

    def setUp(self):
        super().setUp()
        self._spawn_processes()

def make(n):
    def test(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == {RANKS}
        dist.destroy_process_group()
    return test

for n in range(COUNT):
    setattr(TestSum, f"test_{{n}}", make(n))
"""


def standing(runs: int | None) -> str:
    """Measure the seconds per test, without the session's start, and per call."""
    ways = {
        "meshrun": (OURS, MANY),
        "torch's MultiProcContinuousTest": (CONTINUOUS, MANY),
        "torch's MultiProcessTestCase": (EACH, FEW),
    }
    tests: Samples = {name: [] for name in ways}
    for _ in range(runs or 3):
        for name, (text, count) in ways.items():
            one, many = _pytest_s(text, 1), _pytest_s(text, count)
            tests[name].append(None if one is None or many is None else (many - one) / (count - 1))
    calls: Samples = {
        f"{ranks} ranks": [_call_s(ranks) for _ in range(runs or 3)] for ranks in (4, 8)
    }
    title = f"A test on {RANKS} ranks, one of {MANY} (MultiProcessTestCase: {FEW})"
    return (
        render_samples(title, "s", tests, digits=4)
        + "\n"
        + render_samples("A call on ranks that stay", "s", calls, digits=4)
    )


def _pytest_s(text: str, count: int) -> float | None:
    """Return how long pytest takes to start and run ``count`` tests; ``None`` if they fail."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_it.py").write_text(text.replace("COUNT", str(count)))
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        began = time.monotonic()
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        took = time.monotonic() - began
    if ran.returncode == 0 and f"{count} passed" in ran.stdout:
        return took
    print(ran.stdout, ran.stderr, sep="\n", file=sys.stderr)  # torch's classes need expecttest
    return None


def _call_s(ranks: int) -> float:
    with WorkerGroup(mesh=f"dp={ranks}", device="cpu") as group:
        group.call(int)
        began = time.monotonic()
        for _ in range(CALLS):
            group.call(int)
        return (time.monotonic() - began) / CALLS
