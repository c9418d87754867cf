"""Nodes that a program excludes, and nodes that fail often."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrun.errors import HostError, UsageError
from meshrun.host.exclusion import how_to_exclude
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.report.node_history import (
    Failure,
    describe_history,
    node_failure,
    read_history,
    record_failure,
)
from tests.histories import STARTED, play
from tests.kit import run_meshrun, within
from tests.nvml import card

HOST = os.uname().nodename
PROGRAM = """
import os, signal, sys, time
from meshrun import exclude_node
if os.environ["RANK"] == "1" and sys.argv[1] == "exclude":
    exclude_node("the self-test failed\\nat GPU 1")
elif os.environ["RANK"] == "1":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "2":
        raise ValueError("the loss is nan")
    os.kill(os.getpid(), signal.SIGBUS)
time.sleep(3600)
"""


def test_failures_are_counted_across_jobs(fake_torch: object, tmp_path: Path) -> None:
    """Exclusion has its own exit code; an exception of the program is not a node failure."""
    program, history = tmp_path / "program.py", tmp_path / "history"
    program.write_text(PROGRAM)
    words = ("--nproc-per-node", "2", "--max-restarts", "2", "--node-history", history, program)
    env = {"SLURMD_NODENAME": ""}
    first = run_meshrun(*words, "exclude", env=env)
    second = run_meshrun(*words, "kill", env=env)

    assert first.returncode == 78
    assert "hint: leave the node out: " in first.stderr
    said = (
        "error: rank 1 reported that its node must not be used: the self-test failed\\nat GPU 1\n"
    )
    assert first.stderr.endswith(said)
    assert " failed " not in first.stderr
    assert second.returncode == 1
    reasons = [json.loads(line)["reason"] for line in history.read_text().splitlines()]
    assert reasons == [
        "excluded by rank 1: the self-test failed\\nat GPU 1",
        *["rank 1 was killed by SIGBUS"] * 2,
    ]
    assert f"meshrun: {HOST} failed 3 times in 2 jobs in the last 30 days" in second.stderr


@pytest.mark.parametrize(
    ("xid", "code", "generations"),
    [
        ("79, pid=1, name=python, GPU has fallen off the bus.", 78, 1),
        ("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", 78, 1),
        ("31, pid=1, name=python, MMU Fault", 1, 2),
    ],
)
def test_no_rank_starts_again_on_a_gpu_that_needs_a_reset(
    fake_nvml: Callable[[list[Any]], None], tmp_path: Path, xid: str, code: int, generations: int
) -> None:
    """The driver's errors decide; an error that a program can cause is no reason."""
    (log := tmp_path / "kmsg").write_text("4,1,1,-;NVRM: Xid (PCI:0000:02:00): 79, an old one\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(3600)\n"
        "print('started', flush=True)\n"
        "with open('/dev/kmsg', 'a') as log:\n"
        f"    log.write('4,2,2,-;NVRM: Xid (PCI:0000:02:00): {xid}\\n')\n"
        "raise RuntimeError('CUDA error: unspecified launch failure')\n"
    )
    fake_nvml([card("GPU-0", 1), card("GPU-1", 2)])
    history = tmp_path / "history"
    ours = run_meshrun(
        *("--nproc-per-node", "2", "--max-restarts", "1", "--node-history", history, program),
        around=within("--mount", prepare=f"mount --bind {log} /dev/kmsg"),
    )

    assert (ours.returncode, ours.stdout.count("started")) == (code, generations), ours.stderr
    number, _, text = xid.partition(", ")
    on_gpu = f"XID {number} ({text.rpartition('python, ')[2]}) on GPU 1"
    last = ours.stderr.splitlines()[-1]
    reasons = ["rank 1 raised RuntimeError: CUDA error: unspecified launch failure"] * generations
    if code == 78:
        assert last == f"error: the driver of the GPUs excludes this node: {on_gpu}"
        reasons.append(f"excluded by the driver of the GPUs: {on_gpu}")
    else:
        assert f"({on_gpu}" in ours.stderr
    assert "RuntimeError: CUDA error: unspecified launch failure" in ours.stderr
    assert [json.loads(line)["reason"] for line in history.read_text().splitlines()] == reasons


@pytest.mark.parametrize(
    ("error", "is_nodes"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: unknown error", True),
        ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("CUDA error: invalid device ordinal", False),
        ("CUDA error: misaligned address", False),
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("CUDA error: operation not permitted when stream is capturing", False),
    ],
)
def test_errors_of_a_device_are_the_nodes(error: str, is_nodes: bool) -> None:
    """Whether the program or NCCL's watchdog meets them; errors of a program are not."""
    raised = RankRaised(
        rank=1, at_ns=1, kind="AcceleratorError", message=error, traceback=error, shown=False
    )
    aborted = RankExited(rank=1, pid=1, wait_status=6, at_ns=1, error=error)

    for event in (raised, aborted):
        assert (node_failure(play([*STARTED, event])[0]) is not None) == is_nodes


def test_old_failures_and_other_lines_do_not_count(tmp_path: Path) -> None:
    """The history is shared between jobs and is never cleaned up."""
    now, file = time.time(), tmp_path / "history"
    lines: list[dict[str, Any]]
    lines = [{"time": now - 40 * 86400, "host": "a", "run_id": "1", "reason": "x"}] * 5
    lines += [{"time": now, "host": "b", "run_id": str(run), "reason": "y"} for run in range(3)]
    lines += [{**lines[0], "time": each} for each in (float("inf"), now + 10**9, 10**400)]
    broken = f'no JSON\n[]\n{"[" * 100_000}\n{{"ti'  # the last line was cut off by a full disk
    file.write_text(broken)
    for line in lines[-6:-3]:
        record_failure(str(file), "b", line["run_id"], "y\n\x1b[31m", pytest.fail)
    with file.open("a") as opened:
        opened.writelines(f"{json.dumps(line)}\n" for line in (*lines[:5], *lines[-3:]))

    (line_shown,) = describe_history(read_history(str(file)), now)
    assert line_shown.startswith("b failed 3 times in 3 jobs in the last 30 days")
    assert r"most recently: y\n\x1b[31m; to leave" in line_shown
    os.mkfifo(fifo := tmp_path / "fifo")
    for wrong in (fifo, "/dev/zero", tmp_path / "none" / "history"):
        with pytest.raises((HostError, UsageError), match="--node-history"):
            read_history(str(wrong))
    assert read_history(str(tmp_path / "none")) == []
    assert list(describe_history([Failure(time=now, host="c", run_id="1", reason="z")], now)) == []


def test_a_node_that_failed_too_often_starts_nothing(tmp_path: Path) -> None:
    """Only its own recent failures count."""
    file, now = tmp_path / "history", time.time()
    own = {"time": now, "host": HOST, "run_id": "1", "reason": "ECC"}
    old, other = {**own, "time": now - 40 * 86400}, {**own, "host": "b"}
    file.write_text("".join(f"{json.dumps(line)}\n" for line in (own, own, old, other, other)))
    env = {"SLURMD_NODENAME": ""}
    words = ("--nproc-per-node", "1", "--node-history", file, "--max-node-failures")
    done = run_meshrun(*words, "1", tmp_path / "none.py", env=env)
    assert done.returncode == 78
    assert f"error: {HOST} failed 2 times in 1 job in the last 30 days" in done.stderr
    assert "hint: leave the node out: " in done.stderr
    assert run_meshrun(*words, "2", "--no-python", "true", env=env).returncode == 0
    alone = run_meshrun("--max-node-failures", "2", "--no-python", "true")
    assert "--max-node-failures requires --node-history" in alone.stderr


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_JOB_ID": "7"}, "sbatch --exclude=gpu07"),
        ({"KUBERNETES_SERVICE_HOST": "x"}, "kubectl taint nodes gpu07 meshrun=excluded:NoSchedule"),
        ({}, "--exclude gpu07 with --hosts or --hostfile"),
    ],
)
def test_how_to_leave_a_node_out(env: dict[str, str], expected: str) -> None:
    assert how_to_exclude("gpu07", env) == expected
