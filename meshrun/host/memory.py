"""Kills for lack of memory, from the kernel's counters, and limits of processes. Linux only."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from meshrun.host.sysfs import cgroup_folders, read_counter, read_number
from meshrun.wording import count

_FULL_BYTES = 1024 * 1024
_COUNTS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files of a cgroup, of version 2 and version 1."""


class MemoryWatch:
    """The kernel's counters at the start of the launch, for later comparison.

    Source:
        kernel, Documentation/admin-guide/cgroup-v2.rst (``memory.events``) and
        cgroup-v1/memory.rst (``memory.oom_control``); ``oom_kill`` in proc(5), ``/proc/vmstat``.
    """

    def __init__(self, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        folders = cgroup_folders("memory", proc, sysfs)
        self._cgroup = next(filter(_has_count, folders), None)
        """The folder of this process's cgroup, or of its nearest visible ancestor."""
        self._vmstat = proc / "vmstat"
        self._in_cgroup = self._count_in_cgroup()
        self._in_machine = _count_kills(self._vmstat)

    def why_killed(self) -> str | None:
        """Return a sentence about out-of-memory kills since the start, or the limit of CPU time.

        It is ``None`` if there is neither.
        """
        if self._cgroup is not None and (new := self._count_in_cgroup() - self._in_cgroup) > 0:
            limit = _limit_of(self._cgroup)
            at = f" of {limit / 2**30:.1f} GiB" if limit else ""
            killed = f"the kernel killed {count(new, 'process')} at this job's limit{at}"
            return f"out of memory: {killed}"
        new = _count_kills(self._vmstat) - self._in_machine
        if new > 0:
            # This includes kills at the limit of other cgroups.
            killed = f"the kernel killed {count(new, 'process')} on this machine meanwhile"
            return f"possibly out of memory: {killed}"
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        if most == resource.RLIM_INFINITY:
            return None
        return f"possibly at the limit of CPU time: `ulimit -t` is {most} s"

    def _count_in_cgroup(self) -> int:
        files = [self._cgroup / name for name in _COUNTS] if self._cgroup is not None else []
        return max(map(_count_kills, files), default=0)


def describe_limited_memory() -> str | None:
    """Return a sentence if the memory of each process is limited, else ``None``."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    return f"`ulimit -v` is {most // 1024}: {most / 2**30:.1f} GiB for each process"


def describe_full_shm(path: str = "/dev/shm") -> str | None:  # noqa: S108 - only inspected
    """Return a sentence if shared memory is full, else ``None``."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    if found.f_bavail * found.f_frsize >= _FULL_BYTES:
        return None
    size = found.f_blocks * found.f_frsize
    return f"{path} is full: {size / 2**20:,.0f} MiB"


def _has_count(cgroup: Path) -> bool:
    return any((cgroup / name).exists() for name in _COUNTS)


def _limit_of(cgroup: Path) -> int | None:
    limits = [read_number(cgroup / name) for name in _LIMITS]
    return next((limit for limit in limits if limit is not None and limit < 2**60), None)


def _count_kills(path: Path) -> int:
    return read_counter(path, "oom_kill")
