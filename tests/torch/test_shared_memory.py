"""Shared memory of torch's strategy ``file_system``, and Python's, is freed at every end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.kit import run_meshrun, start_meshrun, wait_until

_SHARES = """
import os, signal, sys
from multiprocessing.shared_memory import SharedMemory
import torch

if sys.argv[1] == "stay" and os.environ["RANK"] == "1":
    block = SharedMemory(create=True, size=8)
    print("/" + block.name, flush=True)
    signal.pause()
torch.multiprocessing.set_sharing_strategy("file_system")
tensor = torch.zeros(8).share_memory_()
print(tensor.untyped_storage()._share_filename_cpu_()[1].decode(), flush=True)
if sys.argv[1] == "kill":  # once both ranks have shared a tensor
    with open(sys.argv[2], "r" if os.environ["RANK"] == "0" else "w"):
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] != "leave":
    signal.pause()
os._exit(0)  # which frees nothing
"""


@pytest.mark.torch
@pytest.mark.parametrize("how", ["leave", pytest.param("kill", marks=pytest.mark.nightly)])
def test_what_ranks_shared_is_freed(how: str, tmp_path: Path) -> None:
    """By torch's shared memory manager, once all processes that used it have ended."""
    (program := tmp_path / "shares.py").write_text(_SHARES)
    os.mkfifo(both := tmp_path / "both")
    ours = run_meshrun("--nproc-per-node", "2", "--no-prefix", program, how, both)
    segments = ours.stdout.split()

    assert len(segments) == 2, ours.stderr
    assert [name for name in segments if os.path.exists(f"/dev/shm{name}")] == []
    assert os.listdir(os.environ["TMPDIR"]) == []
    assert "left behind" not in ours.stderr


@pytest.mark.torch
@pytest.mark.parametrize("with_zygote", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_what_ranks_shared_is_freed_after_the_launcher(with_zygote: bool, tmp_path: Path) -> None:
    """The launch's remaining processes give torch's manager and Python's tracker time for it."""
    (program := tmp_path / "shares.py").write_text(_SHARES)
    words = ("--nproc-per-node", "2", "--no-prefix", program, "stay")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("\n", 2)
        segments = running.stdout.split()
        victims = [running.process.pid, *([running.zygote()] if with_zygote else [])]
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        running.wait()

    wait_until(
        lambda: not any(os.path.exists(f"/dev/shm{name}") for name in segments),
        lambda: f"the end of {segments}",
    )
