"""What the kernel reports of limits that were reached, from files as it writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrun.host.shortage import MemoryWatch, ProcessLimit, describe_full_shm


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "folder", "counts", "limit"),
    [
        ("0::/job/step\n", "job/step", "memory.events", "memory.max"),
        ("0::/unseen/deep\n", "", "memory.events", "memory.max"),
        ("9:cpu:/x\n4:memory:/job\n0::/\n", "memory/job", "memory.oom_control",
         "memory.limit_in_bytes"),
    ],
)  # fmt: skip
def test_a_memory_limit_that_was_reached_is_reported(
    cgroup: str, folder: str, counts: str, limit: str, tmp_path: Path
) -> None:
    """Of this process's cgroup, v1 or v2, or of its nearest visible ancestor."""
    proc, sysfs = tmp_path / "proc", tmp_path / "sys"
    write(proc / "self/cgroup", cgroup)
    write(proc / "vmstat", "nr_free_pages 1\noom_kill 7\n")
    place = sysfs / "fs/cgroup" / folder
    write(place / counts, "oom_kill_disable 0\nlow 0\noom_kill 2\n")
    write(place / limit, f"{2 * 2**30}\n")
    watch = MemoryWatch(proc, sysfs)
    assert watch.why_killed() is None

    write(place / counts, "low 0\noom_kill 3\n")

    killed = "out of memory: the kernel killed 1 process at this job's limit"
    assert watch.why_killed() == f"{killed} of 2.0 GiB"
    write(place / limit, "max\n")
    assert watch.why_killed() == killed


def test_a_machine_out_of_memory_is_reported(tmp_path: Path) -> None:
    """If no cgroup counted a kill, or there is no cgroup."""
    proc = tmp_path / "proc"
    write(proc / "vmstat", "oom_kill 7\n")
    watch = MemoryWatch(proc, tmp_path / "sys")
    assert watch.why_killed() is None

    write(proc / "vmstat", "oom_kill 9\n")

    assert watch.why_killed() == (
        "possibly out of memory: the kernel killed 2 processes on this machine meanwhile"
    )
    assert MemoryWatch(tmp_path / "nothing", tmp_path / "nothing").why_killed() is None


def test_shared_memory_is_full_or_not(tmp_path: Path) -> None:
    """A missing folder is not full."""
    assert describe_full_shm(str(tmp_path)) is None
    assert describe_full_shm(str(tmp_path / "nothing")) is None
    assert describe_full_shm("/proc") is not None  # it has no room at all


@pytest.mark.parametrize(
    ("cgroup", "counted", "limited"),
    [
        ("0::/pod/step\n", "pod/step", "pod/step"),
        ("0::/pod/step\n", "pod/step", "pod"),
        ("0::/pod/step\n", "pod", "pod"),
        ("8:pids:/step\n0::/\n", "pids/step", "pids/step"),
    ],
    ids=["own", "of a parent, in older kernels", "of a parent", "version 1"],
)
def test_a_limit_of_processes_that_was_reached_is_reported(
    cgroup: str, counted: str, limited: str, tmp_path: Path
) -> None:
    """Wherever in the hierarchy the kernel counts it."""
    proc, root = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    write(proc / "self/cgroup", cgroup)
    write(root / counted / "pids.max", "max\n")
    write(root / limited / "pids.max", "1024\n")
    write(root / counted / "pids.events", "max 2\n")
    limit = ProcessLimit(proc, tmp_path / "sys")
    assert limit.why_refused() is None

    write(root / counted / "pids.events", "max 5\n")

    assert limit.why_refused() == (
        "this job reached its limit of 1,024 processes and threads, pids.max of its cgroup"
    )
    assert ProcessLimit(tmp_path / "nothing", tmp_path / "nothing").why_refused() is None
