"""Figures for ``docs/performance.md``: one rank with CUDA. No test fails for being slow."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.gpu.hardware import needs, used_bytes
from tests.kit import PROGRAMS, command, run_meshrun, start_meshrun

OURS = PROGRAMS.parent / "gpu/programs"
PAIRS = 5


@needs()
def test_start(figures: dict[str, Any]) -> None:
    """Process group, mesh, one collective and exit, alternating with torchrun and a bare import."""
    mesh = ("--mesh", "dp=1,tp=1", "--device", "cuda")
    ways = {
        "meshrun": command(*mesh, OURS / "our_start.py"),
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "localhost"),  # a machine's own name may not resolve
            *("--nproc-per-node", "1", str(OURS / "own_start.py")),
        ],
        "import torch": [sys.executable, "-c", "import torch"],
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for _ in range(PAIRS):
        for name, words in ways.items():
            began = time.monotonic()
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=90)
            took[name].append(time.monotonic() - began)
            if done.returncode:
                failed[name] = done.stderr
    figures["1 rank with CUDA from start to end, s"] = {
        name: {"median": round(median(each), 2), "each": [round(one, 2) for one in each]}
        for name, each in took.items()
        if name not in failed
    }
    assert not failed


@needs()
def test_restart(figures: dict[str, Any], tmp_path: Path) -> None:
    """From a rank's death until its successor holds the memory."""
    (tmp_path / "die").touch()
    words = ("--max-restarts", "1", OURS / "hold.py", "0.01", tmp_path)
    with start_meshrun(*words, folder=tmp_path) as run:
        run.wait_for("in generation 0")
        died = time.monotonic()
        run.wait_for("in generation 1")
        figures["from death to memory again, s"] = round(time.monotonic() - died, 2)
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.stderr


@needs(reads_nvml=True)
def test_memory(figures: dict[str, Any], tmp_path: Path) -> None:
    """Host memory of all processes of a launch, and GPU memory."""
    holds = (OURS / "hold.py", "0.01", tmp_path)
    before = used_bytes()
    with start_meshrun(*holds, folder=tmp_path) as run:
        run.wait_for("holding")
        launcher = psutil.Process(run.process.pid)
        every = [launcher, *launcher.children(recursive=True)]
        infos = [each.memory_full_info() for each in every]
        host = sum(getattr(each, "pss", each.rss) for each in infos)  # a sandbox may lack PSS
        on_gpu = used_bytes() - before
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.stderr
    figures["memory of 1 rank with CUDA, MiB"] = {
        "host, launcher and all below": host >> 20,
        "GPU": on_gpu >> 20,
    }


@needs()
def test_plain_commands_do_not_wait_for_cuda(figures: dict[str, Any]) -> None:
    """Help and dry run load neither torch nor a driver context."""
    took: dict[str, list[float]] = {"--help": [], "--dry-run": []}
    for _ in range(PAIRS):
        for name, words in (("--help", ["--help"]), ("--dry-run", ["-n", "--mesh", "1", "x.py"])):
            began = time.monotonic()
            assert run_meshrun(*words).returncode == 0
            took[name].append(time.monotonic() - began)
    figures["commands that start nothing, s"] = {
        name: round(median(each), 2) for name, each in took.items()
    }
