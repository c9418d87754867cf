"""Figures for ``docs/performance.md``: one rank with CUDA. No test fails for being slow."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from meshrun.warm.server_folder import LiveServer, ServerFolder
from tests.gpu.hardware import needs, used_bytes
from tests.kit import PROGRAMS, command, run_meshrun, start_meshrun, wait_until

OURS = PROGRAMS.parent / "gpu/programs"
ROUNDS = 3
RESTARTS = "from a rank's death until memory is held again, s"


@needs()
def test_start(figures: dict[str, Any], session: Path) -> None:
    """Process group, mesh, one collective and exit, alternating with torchrun and a bare import."""
    mesh = ("--mesh", "dp=1,tp=1", "--device", "cuda")
    ways = {
        "meshrun": command(*mesh, OURS / "our_start.py"),
        "meshrun --warm, a later run": command("--warm", *mesh, OURS / "our_start.py"),
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "localhost"),  # a machine's own name may not resolve
            *("--nproc-per-node", "1", str(OURS / "own_start.py")),
        ],
        "import torch": [sys.executable, "-c", "import torch"],
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    run_meshrun("--warm", *mesh, OURS / "our_start.py")
    wait_until(lambda: bool(warm_servers(session)), lambda: run_meshrun("--warm-status").stdout)
    for _ in range(ROUNDS):
        for name, words in ways.items():
            began = time.monotonic()
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=90)
            took[name].append(time.monotonic() - began)
            assert done.returncode == 0, done.stderr
    figures["1 rank with CUDA from start to end, s"] = {
        name: {"median": round(median(each), 2), "each": [round(one, 2) for one in each]}
        for name, each in took.items()
    }


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep the warm servers of a test in a folder of its own, and stop them at its end."""
    folder = tmp_path / "session"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    assert run_meshrun("--warm-stop").returncode == 0


def warm_servers(session: Path) -> list[LiveServer]:
    """Return the warm servers that are ready."""
    folder = ServerFolder(str(session / "meshrun"))
    try:
        return folder.servers()
    finally:
        folder.close()


@needs()
@pytest.mark.parametrize("launcher", ["meshrun", "torchrun"])
def test_restart(launcher: str, figures: dict[str, Any], tmp_path: Path) -> None:
    """From a rank's death until its successor holds the memory."""
    (tmp_path / "die").touch()
    theirs = tmp_path / "theirs.py"
    theirs.write_text("from torch.distributed.run import main\nmain()\n")
    caller = theirs if launcher == "torchrun" else None
    words = ("--max-restarts", "1", OURS / "hold.py", "0.01", tmp_path)
    with start_meshrun(*words, folder=tmp_path, caller=caller) as run:
        run.wait_for("in generation 0")
        died = time.monotonic()
        run.wait_for("in generation 1")
        figures.setdefault(RESTARTS, {})[launcher] = round(time.monotonic() - died, 2)
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.stderr


@needs(reads_nvml=True, free=True)
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
    for _ in range(ROUNDS):
        for name, words in (("--help", ["--help"]), ("--dry-run", ["-n", "--mesh", "1", "x.py"])):
            began = time.monotonic()
            assert run_meshrun(*words).returncode == 0
            took[name].append(time.monotonic() - began)
    figures["commands that start nothing, s"] = {
        name: round(median(each), 2) for name, each in took.items()
    }
