"""Failures on a GPU: the cause is named, memory is freed, and stacks are available."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshrun.host.gpu_state import read_xids
from tests.gpu.hardware import needs, reads_kernel_log, used_bytes
from tests.kit import PROGRAMS, run_meshrun, start_meshrun, wait_until

OURS = PROGRAMS.parent / "gpu/programs"


@needs()
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("memory", "OutOfMemoryError: CUDA out of memory"),
        ("address", "an illegal memory access was encountered"),
        ("assert", "device-side assert triggered (Index"),
    ],
)
def test_a_fault_of_the_gpu_is_the_cause(fault: str, cause: str) -> None:
    ours = run_meshrun("--mesh", "dp=1,tp=1", "--device", "cuda", OURS / "fault.py", fault)
    error = ours.stderr[ours.stderr.rindex("\nerror:") :]

    assert ours.returncode not in (0, 128 + signal.SIGKILL)
    assert cause in error, ours.stderr
    assert "fault.py" in error
    if fault != "memory" and reads_kernel_log() and read_xids():  # sandboxes may log none
        assert "XID " in error


@needs(shared=True)
def test_ranks_on_the_same_gpu_are_the_cause() -> None:
    """NCCL's reason is on the last line of its message."""
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    ours = run_meshrun("--nproc-per-node", "2", OURS / "same_gpu.py", env=env)

    assert ours.returncode == 1, ours.stderr
    assert re.search(r"\nerror: rank \d raised DistBackendError: nccl\w+: Dup.* GPU", ours.stderr)


@needs(reads_nvml=True, free=True)
def test_a_rank_that_was_killed_gets_its_memory_back(tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    (tmp_path / "go").touch()
    wait = ("--gpu-memory-wait", "2GiB,60s")
    ours = run_meshrun("--max-restarts", "1", *wait, OURS / "hold.py", "0.6", tmp_path)

    assert ours.returncode == 0, ours.stderr
    assert "no effect" not in ours.stderr
    assert re.findall(r"in generation (\d)", ours.stdout) == ["0", "1"]


@needs(reads_nvml=True, free=True)
def test_killing_the_launcher_frees_the_memory(tmp_path: Path, figures: dict[str, Any]) -> None:
    before = used_bytes()
    with start_meshrun(OURS / "hold.py", "0.6", tmp_path, folder=tmp_path) as run:
        run.wait_for("holding")
        held = used_bytes()
        assert held > before + 2**28
        run.signal(signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: used_bytes() < before + 2**28, lambda: f"{used_bytes()} of {held}")
        figures["memory free after SIGKILL of the launcher, s"] = round(
            time.monotonic() - killed, 3
        )


@needs()
def test_stacks_are_shown_while_a_kernel_spins(tmp_path: Path) -> None:
    with start_meshrun(OURS / "spin.py", folder=tmp_path) as run:
        run.wait_for("up")
        run.signal(signal.SIGQUIT)
        wait_until(lambda: "spin.py" in run.stderr, lambda: run.stderr)
        run.signal(signal.SIGTERM)
        code = run.wait()

    assert code == 128 + signal.SIGTERM
    assert "synchronize" in run.stderr
